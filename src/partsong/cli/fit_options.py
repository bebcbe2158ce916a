"""The options of `partsong fit`: the fields of `FitOptions`, and for which kind of DATA each is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from partsong import methods
from partsong.console.options import (
    DTYPES,
    FAULTY,
    MISSING,
    AsJson,
    Header,
    Key,
    Label,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    OptionalText,
    Threads,
    Transpose,
    one_of,
    positive,
)

CHOICES = methods.CHOICES
GAME = "game"
"""A solver of one table, and a method between parties and over ranks."""
SOLVERS = (*CHOICES["rule"], GAME)
INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar")
RANKED = ("mpi", "torch")
"""Engines that split one file over processes which mpiexec or torchrun has started."""
SUMS = ("all-reduce", "in-order")
METHODS = methods.names()
RANK_METHODS = methods.over_ranks()

KNOWN = tuple(name for name, entry in methods.TABLE.items() if {methods.PARTIES, methods.RANKS} & {*entry.tasks})
PARAMETERS = tuple(dict.fromkeys(name for method in KNOWN for name in methods.TABLE[method].parameters))
"""What these methods take, each an option by its own name."""
GAMES = tuple(name for name in methods.TABLE[GAME].parameters if name not in ("local_steps", "start"))
SKETCHES = ("sketch", "sketch_ratio")

# ---- which options go together ----------------------------------------------------------------------------------

TABLE, PARTIES, RANKS = "one table", "a folder of parts", "ranks (--engine mpi or torch)"
HERE = {
    TABLE: "DATA is a file, another folder, or not there",
    PARTIES: "DATA is a folder of parts",
    RANKS: "--engine splits one file over ranks",
}
PRIVACY = ("epsilon", "delta", "unit", "row_bound", "clip", "noise", "relation")
READING = ("label", "transpose", "key", "header")
PENALTIES = ("alpha_w", "alpha_h", "l1_ratio")

FOR: dict[str, tuple[str, ...]] = {
    "solver": (TABLE,),
    **dict.fromkeys(("init", *PENALTIES, "max_iter", *READING, "weights"), (TABLE, RANKS)),
    **dict.fromkeys(("rounds", "faulty", "record", "report", *PRIVACY, "masked", "masked_bound"), (PARTIES,)),
    **dict.fromkeys(("method", "engine", *PARAMETERS), (PARTIES, RANKS)),
    **dict.fromkeys(("checkpoint", "checkpoint_every", "resume"), (TABLE, PARTIES)),
    "sums": (RANKS,),
}
"""What an option is for, where it is not for all."""

INSTEAD = {
    ("rounds", TABLE): "Use --max-iter.",
    ("max_iter", PARTIES): "Use --rounds.",
    ("method", TABLE): "Use --solver.",
    ("solver", PARTIES): "Use --method.",
    ("solver", RANKS): "Use --method.",
    ("weights", PARTIES): "Weights stay with their party: use `partsong transform` on its file.",
}

NEEDS = {
    "record": "run_folder",
    "overwrite": "run_folder",
    "checkpoint_every": "checkpoint",
    "masked_bound": "masked",
    **dict.fromkeys(PRIVACY[1:], "epsilon"),
}
"""Options that do nothing without another one."""


# ---- options ----------------------------------------------------------------------------------------------------

KEEPING, MODEL, STOPPING, COMPUTING = "Keeping", "Model", "Stopping", "Computing"
FEDERATION, NOISE = "Federation (DATA is a folder of parts)", "Privacy (DATA is a folder of parts)"
RANKED_PANEL = "Ranks (one file over the processes of mpiexec or torchrun)"
METHOD_PANEL = "Options of methods, of --solver game and of --solver sanls"


def opt(*names: str, panel: str | None, help: str, choices: tuple[str, ...] = (), **more: Any) -> Any:
    """An option; one with choices names them in its help and accepts nothing else."""
    if choices:
        help, more["callback"] = f"{help} One of {', '.join(choices)}.", one_of(choices)
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


_DATA = typer.Argument(
    metavar="DATA",
    help="A .csv, .tsv, .npy, .npz, .mtx, .parquet or .h5ad file, a folder with matrix.mtx, or a folder that "
    "`partsong split` wrote. Rows are samples.",
    show_default=False,
)
_RESUME = "Resume the run of this checkpoint, with its settings."


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The command line of `partsong fit`; `method_options` are those of the method, as they were written."""

    data: Annotated[Path, _DATA]
    output: Annotated[OptionalPath, opt("--output", "-o", panel=KEEPING, help="The model file (.safetensors).")] = None
    weights: Annotated[
        OptionalPath, opt("--weights", panel=KEEPING, help="Also write W: .csv, .tsv, .npy, .parquet or .h5ad.")
    ] = None
    run_folder: Annotated[
        OptionalPath,
        opt("--run-folder", panel=KEEPING, help="Folder for the model, settings, versions, history and result."),
    ] = None
    overwrite: Annotated[bool, opt("--overwrite", panel=KEEPING, help="Replace the run in the run folder.")] = False
    checkpoint: Annotated[
        OptionalPath,
        opt("--checkpoint", panel=KEEPING, help="File that --resume can go on from. It holds private weights."),
    ] = None
    checkpoint_every: Annotated[
        float, opt("--checkpoint-every", panel=KEEPING, min=0.0, help="Seconds between checkpoints.")
    ] = 30.0
    resume: Annotated[OptionalPath, opt("--resume", panel=KEEPING, help=_RESUME)] = None
    record: Annotated[
        bool, opt("--record", panel=KEEPING, help="Keep every message of the parties; needs --run-folder.")
    ] = False
    report: Annotated[
        OptionalPath,
        opt(
            "--report",
            panel=KEEPING,
            help="Also write a page (.html): components, parties, what left each, its ε, and what attacks find. It is "
            "for the owner of all parts: it shows what no party would release.",
        ),
    ] = None
    n_components: Annotated[
        OptionalInt,
        opt(
            "--components",
            "-k",
            min=1,
            panel=MODEL,
            help="Number of components.",
            show_default="20, or fewer for small data",
        ),
    ] = None
    solver: Annotated[str, opt(panel=MODEL, help="How W and H are updated.", choices=SOLVERS)] = "hals"
    init: Annotated[str, opt(panel=MODEL, help="Where to start.", choices=INITS)] = "auto"
    alpha_w: Annotated[float, opt(panel=MODEL, min=0.0, help="Strength of the penalty on W; 0: none.")] = 0.0
    alpha_h: Annotated[
        OptionalFloat,
        opt(panel=MODEL, min=0.0, help="Strength of the penalty on H.", show_default="as --alpha-w"),
    ] = None
    l1_ratio: Annotated[
        float, opt(panel=MODEL, min=0.0, max=1.0, help="Share of L1 in these penalties; the rest is L2.")
    ] = 0.0
    missing: Annotated[
        str,
        opt(
            panel=MODEL,
            help="Games only: whether blanks, NaN, and cells that a sparse file does not store are unknown.",
            choices=MISSING,
        ),
    ] = MISSING[0]
    tol: Annotated[
        float,
        opt(
            panel=STOPPING,
            min=0.0,
            help="Stop once ten iterations lower the squared error by less than this share each, of what is explained "
            "or of what is left, whichever is less; 0: never. asyn-… over ranks: once it changes by less per turn.",
        ),
    ] = 1e-4
    max_iter: Annotated[
        int,
        opt(panel=STOPPING, min=1, help="Most iterations of one table; for asyn-… over ranks, most arrivals."),
    ] = 500
    rounds: Annotated[
        OptionalInt,
        opt(panel=STOPPING, min=1, help="Most rounds of a folder of parts.", show_default="100; 10 with --epsilon"),
    ] = None
    time_budget: Annotated[
        OptionalFloat,
        opt(
            panel=STOPPING,
            callback=positive,
            help="Stop after this many seconds and keep the model so far. A resumed run counts its earlier parts.",
        ),
    ] = None
    method: Annotated[
        str,
        opt(
            panel=FEDERATION,
            help="How the parties work together: exact gives what pooled rows would, fnmf aligns components that "
            "parties find alone, fedavg averages; docs/methods.md describes all.",
            choices=tuple(dict.fromkeys((*METHODS, *RANK_METHODS))),
        ),
    ] = "exact"
    faulty: Annotated[
        str,
        opt(panel=FEDERATION, help="What a party with bad data or a failed upload leads to.", choices=FAULTY),
    ] = FAULTY[0]
    engine: Annotated[
        str,
        opt(
            panel=FEDERATION,
            help="Parties one by one or at once, with the same result; mpi and torch split one file over ranks.",
            choices=("sequential", "parallel", *RANKED),
        ),
    ] = "parallel"
    masked: Annotated[
        bool,
        opt(
            "--masked",
            panel=NOISE,
            help="Secure aggregation: masks that cancel in the sum hide single uploads; at least three parties.",
        ),
    ] = False
    masked_bound: Annotated[
        OptionalFloat,
        opt(
            panel=NOISE,
            help="--masked without --epsilon: a public bound of all numbers sent; a party refuses to send a larger "
            "one. Smaller is finer.",
            show_default="1e9",
        ),
    ] = None
    epsilon: Annotated[
        OptionalFloat,
        opt(panel=NOISE, help="Differential privacy: ε of the whole run, for one unit.", show_default="no noise"),
    ] = None
    delta: Annotated[OptionalFloat, opt(panel=NOISE, min=0.0, help="Its δ.", show_default="1e-5")] = None
    unit: Annotated[
        OptionalText,
        opt(panel=NOISE, help="Whom ε protects: any single row, or all data of a party.", choices=("row", "party")),
    ] = None
    row_bound: Annotated[
        OptionalFloat,
        opt(panel=NOISE, help="--unit row: longer rows are scaled down. Choose it without a look at the data."),
    ] = None
    clip: Annotated[
        OptionalFloat,
        opt(
            panel=NOISE,
            help="--unit party: the most that an H_p with rows of norm 1 may lie from the model.",
            show_default="1",
        ),
    ] = None
    noise: Annotated[
        OptionalText,
        opt(panel=NOISE, help="--unit party.", choices=("gaussian", "laplace"), show_default="gaussian"),
    ] = None
    relation: Annotated[
        OptionalText,
        opt(
            panel=NOISE,
            help="Which neighbours look alike; --unit row has the first two, --unit party the last two.",
            choices=("add-or-remove", "replace", "zero-out"),
            show_default="add-or-remove of rows, replace of parties",
        ),
    ] = None
    sums: Annotated[
        str,
        opt(
            panel=RANKED_PANEL,
            help="all-reduce is fast; in-order gives the same bits whatever the transport.",
            choices=SUMS,
        ),
    ] = SUMS[0]
    seed: Annotated[
        OptionalInt, opt(panel=COMPUTING, min=0, help="Random seed.", show_default="a new one, printed")
    ] = None
    dtype: Annotated[
        OptionalText, opt(panel=COMPUTING, help="Precision.", choices=DTYPES, show_default="as the data")
    ] = None
    threads: Threads = None
    label: Label = None
    transpose: Transpose = False
    key: Key = None
    header: Header = None
    as_json: AsJson = False
    quiet: Annotated[bool, opt("--quiet", "-q", panel=None, help="No progress and no summary.")] = False
    method_options: Mapping[str, str] = field(default_factory=dict)
