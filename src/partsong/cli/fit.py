"""`partsong fit`: data to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partsong import methods
from partsong.cli.choices import (
    CHOICES,
    DTYPES,
    ENGINES,
    FAULTY,
    GAME,
    INITS,
    METHODS,
    MISSING,
    PLAYS,
    RANK_METHODS,
    RANKED,
    SELF_PLAYS,
    SKETCHES,
    SOLVERS,
    SUMS,
    WITH_SKETCHES,
    faulty_named,
    finite,
    one_of,
    positive,
)
from partsong.cli.fit_settings import FitOptions
from partsong.cli.options import (
    Clip,
    Delta,
    Epsilon,
    HtmlReport,
    Leader,
    Masked,
    MaskedBound,
    Missing,
    Noise,
    Play,
    Relation,
    RowBound,
    SelfPlay,
    Shrink,
    Step,
    StepDecay,
    Unit,
)
from partsong.console.options import (
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
    examples,
)
from partsong.console.output import guarded
from partsong.training.distributed_settings import SAFE

EPILOG = examples(
    "partsong fit counts.csv -k 20 -o model.safetensors --weights W.csv",
    "partsong fit big.npy -k 50 -o model.safetensors --checkpoint fit.ckpt --time-budget 3600",
    "partsong fit big.npy -o model.safetensors --resume fit.ckpt",
    "partsong fit ratings.npz -k 20 --solver game --missing ignore -o model.safetensors",
    "mpiexec -n 4 partsong fit X.npz -k 50 --method dsanls --engine mpi -o model.safetensors --weights W.npy",
    "partsong fit parts/ -k 20 --epsilon 3 --unit row --row-bound 10 --masked -o model.safetensors",
    "partsong split counts.h5ad --parties 5 --by hospital -o parts/ && partsong fit parts/ -k 20 -o model.safetensors",
)

RANKS = "Ranks (one file over the processes of mpiexec or torchrun)"
MODEL, STOPPING, PARTIES, COMPUTING, KEEPING = "Model", "Stopping", "Federation (DATA is a folder of parts)", "Computing", "Keeping"  # noqa: E501  # fmt: skip


def _option(*names: str, panel: str, help: str, **more: object) -> object:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)  # type: ignore[arg-type]


@guarded
def fit(
    ctx: typer.Context,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="DATA",
            help="A .csv, .tsv, .npy, .npz, .mtx, .parquet or .h5ad file, a folder with matrix.mtx, "
            "or a folder that `partsong split` wrote. Rows are samples.",
            show_default=False,
        ),
    ],
    output: Annotated[
        OptionalPath,
        _option(
            "--output",
            "-o",
            panel=KEEPING,
            help="The model file to write (.safetensors). Needed unless --run-folder is given.",
        ),
    ] = None,
    n_components: Annotated[
        OptionalInt,
        _option(
            "--components",
            "-k",
            min=1,
            panel=MODEL,
            help="Number of parts to learn.",
            show_default="20, or fewer for small data",
        ),
    ] = None,
    solver: Annotated[
        str,
        _option(
            "--solver",
            panel=MODEL,
            help=f"How W and H are updated, one of {', '.join((*SOLVERS, GAME))}. hals suits most data.",
            callback=one_of((*SOLVERS, GAME)),
        ),
    ] = "hals",
    init: Annotated[
        str,
        _option("--init", panel=MODEL, help=f"Where to start, one of {', '.join(INITS)}.", callback=one_of(INITS)),
    ] = "auto",
    alpha_w: Annotated[
        float,
        _option("--alpha-w", panel=MODEL, min=0.0, help="Strength of the penalty on W; 0: none.", callback=finite),
    ] = 0.0,
    alpha_h: Annotated[
        OptionalFloat,
        _option(
            "--alpha-h",
            panel=MODEL,
            min=0.0,
            help="Strength of the penalty on H.",
            callback=finite,
            show_default="as --alpha-w",
        ),
    ] = None,
    l1_ratio: Annotated[
        float,
        _option(
            "--l1-ratio",
            panel=MODEL,
            min=0.0,
            max=1.0,
            help="Share of L1 in these penalties; the rest is L2.",
            callback=finite,
        ),
    ] = 0.0,
    tol: Annotated[
        float,
        _option(
            "--tol",
            panel=STOPPING,
            min=0.0,
            callback=finite,
            help="Stop once ten iterations lower the squared error by less than this share each, of what is explained "
            "or of what is left, whichever is less; 0: never. asyn-… over ranks: once it changes by less per turn.",
        ),
    ] = 1e-4,
    max_iter: Annotated[
        int,
        _option(
            "--max-iter",
            panel=STOPPING,
            min=1,
            help="Most iterations, where DATA is one table (of a game: sweeps over all cells); for asyn-… over ranks, "
            "most arrivals at the server.",
        ),
    ] = 500,
    rounds: Annotated[
        OptionalInt,
        _option(
            "--rounds",
            panel=STOPPING,
            min=1,
            help="Most rounds, where DATA is a folder of parts.",
            show_default="100; 10 with --epsilon",
        ),
    ] = None,
    time_budget: Annotated[
        OptionalFloat,
        _option(
            "--time-budget",
            panel=STOPPING,
            callback=positive,
            help="Stop after this many seconds and keep the model so far. A resumed run counts its earlier parts.",
        ),
    ] = None,
    method: Annotated[
        str,
        _option(
            "--method",
            panel=PARTIES,
            help="How the parties work together (docs/methods.md). "
            f"{' '.join(f'{name}: {methods.TABLE[name].summary}' for name in METHODS)} Over ranks: "
            f"{', '.join(RANK_METHODS)}.",
            callback=one_of(tuple(dict.fromkeys((*METHODS, *RANK_METHODS)))),
        ),
    ] = "exact",
    align: Annotated[
        OptionalText,
        _option(
            "--align",
            panel=PARTIES,
            help=f"How {', '.join(methods.taking('align'))} match components: {', '.join(CHOICES['align'])}.",
            show_default="as the method does",
            callback=one_of(CHOICES["align"]),
        ),
    ] = None,
    start: Annotated[
        OptionalText,
        _option(
            "--start",
            panel=PARTIES,
            help="common: one H for all parties; independent: one of its own for each.",
            callback=one_of(CHOICES["start"]),
            show_default="as the method does",
        ),
    ] = None,
    local_steps: Annotated[
        OptionalInt,
        _option(
            "--local-steps",
            panel=PARTIES,
            min=1,
            help="Steps that a party takes between two exchanges.",
            show_default="3 (exact, fedavg) to 1000",
        ),
    ] = None,
    method_options: Annotated[
        list[str],
        _option(
            "--method-option",
            panel=PARTIES,
            help="NAME=VALUE: a further option of the method, such as strength=0.2; once for each. docs/methods.md has "
            "all names and values.",
            metavar="NAME=VALUE",
            show_default=False,
        ),
    ] = [],  # noqa: B006  # typer copies it
    faulty: Annotated[
        str,
        _option(
            "--faulty",
            panel=PARTIES,
            help="stop: a party with bad data, or whose work or upload fails, ends the fit; leave-out: the fit goes on "
            "without it, and says so.",
            callback=faulty_named,
        ),
    ] = FAULTY[0],
    engine: Annotated[
        str,
        _option(
            "--engine",
            panel=PARTIES,
            help="How parties are run, sequential or parallel; same result. "
            f"{' or '.join(RANKED)}: one file, split over ranks that mpiexec or torchrun starts.",
            callback=one_of(ENGINES),
        ),
    ] = "parallel",
    record: Annotated[
        bool, _option("--record", panel=PARTIES, help="Keep every message of the parties; needs --run-folder.")
    ] = False,
    epsilon: Epsilon = None,
    delta: Delta = None,
    unit: Unit = None,
    row_bound: RowBound = None,
    clip: Clip = None,
    noise: Noise = None,
    relation: Relation = None,
    masked: Masked = False,
    masked_bound: MaskedBound = None,
    report: HtmlReport = None,
    sums: Annotated[
        str,
        _option(
            "--sums",
            panel=RANKS,
            help="all-reduce: fast; in-order: the same bits whatever the transport.",
            callback=one_of(SUMS),
        ),
    ] = SUMS[0],
    sketch: Annotated[
        str,
        _option(
            "--sketch",
            panel=RANKS,
            help=f"How {', '.join(WITH_SKETCHES)} over ranks and --solver sanls sketch, one of {', '.join(SKETCHES)}.",
            callback=one_of(SKETCHES),
        ),
    ] = SKETCHES[0],
    sketch_ratio: Annotated[
        float,
        _option(
            "--sketch-ratio",
            panel=RANKS,
            max=1.0,
            help="Size of these sketches, as a share of the rows and of the columns.",
            callback=positive,
        ),
    ] = 0.1,
    play: Play = PLAYS[0],
    step: Step = SAFE,
    step_decay: StepDecay = None,
    self_play: SelfPlay = SELF_PLAYS[0],
    shrink: Shrink = None,
    leader: Leader = None,
    missing: Missing = MISSING[0],
    seed: Annotated[
        OptionalInt, _option("--seed", panel=COMPUTING, min=0, help="Random seed.", show_default="a new one, printed")
    ] = None,
    dtype: Annotated[
        OptionalText,
        _option(
            "--dtype",
            panel=COMPUTING,
            help="Precision: float32 or float64.",
            callback=one_of(DTYPES),
            show_default="as the data",
        ),
    ] = None,
    threads: Threads = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    header: Header = None,
    weights: Annotated[
        OptionalPath, _option("--weights", panel=KEEPING, help="Also write W: .csv, .tsv, .npy, .parquet or .h5ad.")
    ] = None,
    run_folder: Annotated[
        OptionalPath,
        _option("--run-folder", panel=KEEPING, help="Folder for the model, settings, versions, history and result."),
    ] = None,
    overwrite: Annotated[
        bool, _option("--overwrite", panel=KEEPING, help="Replace an earlier run in the run folder.")
    ] = False,
    checkpoint: Annotated[
        OptionalPath,
        _option("--checkpoint", panel=KEEPING, help="File that --resume can go on from. It holds private weights."),
    ] = None,
    checkpoint_every: Annotated[
        float,
        _option("--checkpoint-every", panel=KEEPING, min=0.0, callback=finite, help="Seconds between checkpoints."),
    ] = 30.0,
    resume: Annotated[
        OptionalPath, _option("--resume", panel=KEEPING, help="Go on from this checkpoint, with its settings.")
    ] = None,
    as_json: AsJson = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no summary.")] = False,
) -> None:
    """Learn parts from data: X ≈ W H. A folder of parts is fitted as a simulated federation.

    Its line "exposure" says what could be computed from all that the parties sent: with enough rounds × components,
    their rows (docs/privacy.md).
    """
    options = dict(locals())
    given = given_names(options.pop("ctx"))
    if engine in RANKED:
        from partsong.cli.ranks import run_over_ranks

        run_over_ranks(FitOptions(**options), given)
    else:
        from partsong.cli.fit_session import run_fit

        run_fit(FitOptions(**options), given)


def given_names(ctx: typer.Context) -> frozenset[str]:
    """The options that stand on the command line, in contrast to those left at their defaults."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
