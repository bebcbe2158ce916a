"""The options of `partsong fit`: the fields of `FitOptions`, and the kinds of DATA each one is for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from partsong import methods
from partsong.console.options import (
    DTYPES,
    MISSING,
    ON_PARTY_ERROR,
    AsJson,
    Header,
    Key,
    Label,
    Threads,
    Transpose,
    opt,
    positive,
)

CHOICES = methods.CHOICES
GAME = "game"
"""A solver of one table, and a method for parties and ranks."""
SOLVERS = (*CHOICES["rule"], GAME)
INITS = ("auto", "anchors", "random", "nndsvd", "nndsvda", "nndsvdar")
RANKED = ("mpi", "torch")
"""Engines that split one file over the processes of mpiexec or torchrun."""
SUMS = ("all-reduce", "in-order")
METHODS = methods.names()
RANK_METHODS = methods.distributed_names()

KNOWN = tuple(name for name, entry in methods.TABLE.items() if {methods.PARTIES, methods.RANKS} & {*entry.tasks})
PARAMETERS = tuple(dict.fromkeys(name for method in KNOWN for name in methods.TABLE[method].parameters))
"""The parameters of these methods, each an option of its own name."""
SKETCHES = ("sketch", "sketch_ratio")
OF_SOLVERS = dict.fromkeys(SKETCHES, "sanls") | {
    name: GAME for name in ("missing", *methods.TABLE[GAME].parameters) if name not in ("local_steps", "init_mode")
}
"""Options that only one solver of a table has -> that solver."""

# ---- which options go together ----------------------------------------------------------------------------------

TABLE, PARTIES, RANKS = "one table", "a folder of parts", "ranks (--engine mpi or torch)"
HERE = {
    TABLE: "DATA is a file, another folder, or missing",
    PARTIES: "DATA is a folder of parts",
    RANKS: "--engine splits one file over ranks",
}
ROW_ONLY = ("row_bound", "mechanism", "centre_radius", "buckets", "n_rows")
PRIVACY = ("epsilon", "delta", "unit", *ROW_ONLY, "clip", "noise", "relation")
ROW_MECHANISMS = ("auto", "moment", "centred", "hybrid", "rounds")
OF_MECHANISMS = {"centre_radius": "centred", "buckets": "moment", "rounds": "rounds"}
"""Options of privacy of rows that a single mechanism has -> that mechanism."""
READING = ("label", "transpose", "key", "header")
PENALTIES = ("alpha_w", "alpha_h", "l1_ratio")

FOR: dict[str, tuple[str, ...]] = {
    "solver": (TABLE,),
    **dict.fromkeys(("init", *PENALTIES, "max_iter", *READING, "weights"), (TABLE, RANKS)),
    **dict.fromkeys(
        ("rounds", "on_party_error", "record", "report", *PRIVACY, "secure_aggregation", "mask_bound"), (PARTIES,)
    ),
    **dict.fromkeys(("method", "engine", *PARAMETERS), (PARTIES, RANKS)),
    **dict.fromkeys(("checkpoint", "checkpoint_every", "resume"), (TABLE, PARTIES)),
    "reduce": (RANKS,),
}
"""The kinds of DATA of options that are not for all kinds."""

INSTEAD = {
    ("rounds", TABLE): "Use --max-iter.",
    ("max_iter", PARTIES): "Use --rounds.",
    ("method", TABLE): "Use --solver.",
    ("solver", PARTIES): "Use --method.",
    ("solver", RANKS): "Use --method.",
    ("weights", PARTIES): "Weights stay with their party. Run `partsong transform` on its file.",
}

NEEDS = {
    "record": "run_folder",
    "overwrite": "run_folder",
    "checkpoint_every": "checkpoint",
    "mask_bound": "secure_aggregation",
    **dict.fromkeys(PRIVACY[1:], "epsilon"),
}
"""Options that need another option."""


# ---- options ----------------------------------------------------------------------------------------------------


def ranks(value: str) -> int | list[int]:
    """Read a rank, or several ranks separated by commas, which come in ascending order."""
    words = [word.strip() for word in value.split(",")]
    if any(not (word.isascii() and word.isdecimal() and int(word)) for word in words):
        raise typer.BadParameter(f"{value!r} is not a whole number above 0, nor several separated by commas.")
    found = sorted({int(word) for word in words})
    return found[0] if len(found) == 1 else found


KEEPING, MODEL, STOPPING, COMPUTING = "Output", "Model", "Stopping", "Computing"
FEDERATION, NOISE = "Federation (DATA is a folder of parts)", "Privacy (DATA is a folder of parts)"
RANKED_PANEL = "Ranks (one file over the processes of mpiexec or torchrun)"
METHOD_PANEL = "Parameters of single methods, --solver game and --solver sanls (methods: values)"


_DATA = typer.Argument(
    metavar="DATA",
    help="A .csv, .tsv, .npy, .npz, .mtx, .parquet or .h5ad file, a folder with matrix.mtx, or a folder that "
    "`partsong split` wrote. Rows are samples.",
    show_default=False,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """The command line of `partsong fit`; `method_options` are the parameters of the method, as text."""

    data: Annotated[Path, _DATA]
    output: Path | None = opt(None, KEEPING, "The model file to write (.safetensors).", "--output", "-o")
    weights: Path | None = opt(None, KEEPING, "Also write W: .csv, .tsv, .npy, .parquet or .h5ad.")
    run_folder: Path | None = opt(None, KEEPING, "Folder for the model, settings, versions, history and result.")
    overwrite: bool = opt(False, KEEPING, "Replace the run in the run folder.", "--overwrite")
    checkpoint: Path | None = opt(None, KEEPING, "File from which --resume continues. It holds private weights.")
    checkpoint_every: float = opt(30.0, KEEPING, "Seconds between checkpoints.", min=0.0)
    resume: Path | None = opt(None, KEEPING, "Resume the run of this checkpoint with its settings.")
    record: bool = opt(False, KEEPING, "Keep every message that the parties send. Needs --run-folder.", "--record")
    report: Path | None = opt(
        None,
        KEEPING,
        "Also write a page (.html): components, parties, what each party sent, its ε, and what attacks find. For the "
        "owner of all parts only: the page shows what no party would release.",
    )
    n_components: Any = opt(
        None,
        MODEL,
        "Number of components. With a private second moment also several, as 5,10,20: one release gives all of them. "
        "The model has the largest of which all directions are visible; the others are written next to it.",
        "--components",
        "-k",
        parser=ranks,
        metavar="K[,K…]",
        show_default="20, or fewer for small data",
    )
    solver: str = opt("hals", MODEL, "Update rule for W and H.", choices=SOLVERS)
    init: str = opt("auto", MODEL, "Initial W and H.", choices=INITS)
    alpha_w: float = opt(0.0, MODEL, "Strength of the penalty on W.", min=0.0)
    alpha_h: float | None = opt(None, MODEL, "Strength of the penalty on H.", min=0.0, show_default="that of --alpha-w")
    l1_ratio: float = opt(0.0, MODEL, "Share of L1 in these penalties; the rest is L2.", min=0.0, max=1.0)
    missing: str = opt(
        MISSING[0],
        MODEL,
        "Games only. ignore: treat blanks, NaN, and cells that a sparse file does not store as unknown.",
        choices=MISSING,
    )
    tol: float = opt(
        1e-4,
        STOPPING,
        "Stop when an iteration, on average over ten, lowers the squared error by less than this share of the "
        "explained or of the remaining sum of squares, whichever is smaller; 0: never. Methods asyn-… over ranks: when "
        "it changes less per turn.",
        min=0.0,
    )
    max_iter: int = opt(
        500, STOPPING, "Maximum number of iterations; for methods asyn-… over ranks, of arrivals.", min=1
    )
    rounds: int | None = opt(
        None,
        STOPPING,
        "Maximum number of rounds (DATA is a folder of parts).",
        min=1,
        show_default="100; 10 with --epsilon",
    )
    time_budget: float | None = opt(
        None,
        STOPPING,
        "Stop after this many seconds and keep the model so far. A resumed run counts the seconds before.",
        callback=positive,
    )
    method: str = opt(
        "exact",
        FEDERATION,
        "How the parties work together: exact equals a fit of the pooled rows, fnmf aligns the components that parties "
        "find alone, fedavg averages. --help-all describes all methods.",
        choices=tuple(dict.fromkeys((*METHODS, *RANK_METHODS))),
    )
    on_party_error: str = opt(
        ON_PARTY_ERROR[0],
        FEDERATION,
        "What to do about a party with bad data or a failed upload.",
        choices=ON_PARTY_ERROR,
    )
    engine: str = opt(
        "parallel",
        FEDERATION,
        "Run parties one by one or in parallel, with the same result; mpi and torch split one file over ranks.",
        choices=("sequential", "parallel", *RANKED),
    )
    secure_aggregation: bool = opt(
        False,
        NOISE,
        "Hide single uploads by masks that cancel in the sum. Needs at least three parties.",
        "--secure-aggregation",
    )
    mask_bound: float | None = opt(
        None,
        NOISE,
        "--secure-aggregation without --epsilon: a public bound on all numbers sent. A party refuses to send a larger "
        "number. A smaller bound gives a finer grid.",
        show_default="1e9",
    )
    epsilon: float | None = opt(None, NOISE, "Differential privacy: ε of the whole run.", show_default="no noise")
    delta: float | None = opt(None, NOISE, "Differential privacy: δ of the whole run.", min=0.0, show_default="1e-5")
    unit: str | None = opt(
        None, NOISE, "Unit that ε protects: any single row, or all data of a party.", choices=("row", "party")
    )
    row_bound: float | None = opt(
        None,
        NOISE,
        "--unit row: rows with a larger norm are scaled down to it. Choose it without looking at the data. One release "
        "takes a bound that nearly all rows exceed: it uses only their directions.",
    )
    mechanism: str | None = opt(
        None,
        NOISE,
        "--unit row: moment releases all products of columns once, and any rank follows; hybrid adds three noisy "
        "rounds; centred is for data with one dominant direction; rounds sends noisy sums in every one of --rounds; "
        "auto takes what --n-rows says is best, or the moment. What was taken is printed before anything is spent.",
        choices=ROW_MECHANISMS,
        show_default="auto",
    )
    centre_radius: float | None = opt(
        None,
        NOISE,
        "--mechanism centred: rows of norm 1 are cut to this distance from the mean direction. Takes no --row-bound.",
        show_default="0.1",
    )
    buckets: int | None = opt(
        None, NOISE, "--mechanism moment with many columns: release sums over this number of buckets.", min=1
    )
    n_rows: int | None = opt(
        None,
        NOISE,
        "--unit row: a public lower bound of the number of rows, for the forecast and --mechanism auto. Do not compute "
        "it from the data.",
        min=1,
    )
    clip: float | None = opt(
        None,
        NOISE,
        "--unit party: clipping norm of the update H_p − H, whose rows have norm 1; with --method moment, of X_pᵀX_p.",
        show_default="1",
    )
    noise: str | None = opt(
        None, NOISE, "--unit party: noise distribution.", choices=("gaussian", "laplace"), show_default="gaussian"
    )
    relation: str | None = opt(
        None,
        NOISE,
        "Neighboring relation; --unit row has the first two, --unit party the last two.",
        choices=("add-or-remove", "replace", "zero-out"),
        show_default="add-or-remove of rows, replace of parties",
    )
    reduce: str = opt(
        SUMS[0],
        RANKED_PANEL,
        "How ranks add their sums: all-reduce is fast; in-order gives the same bits on every transport.",
        choices=SUMS,
    )
    seed: int | None = opt(None, COMPUTING, "Random seed.", min=0, show_default="drawn and printed")
    dtype: str | None = opt(None, COMPUTING, "Floating-point type.", choices=DTYPES, show_default="as the data")
    threads: Threads = None
    label: Label = None
    transpose: Transpose = False
    key: Key = None
    header: Header = None
    as_json: AsJson = False
    quiet: bool = opt(False, None, "No progress and no summary.", "--quiet", "-q")
    method_options: Mapping[str, str] = field(default_factory=dict)
