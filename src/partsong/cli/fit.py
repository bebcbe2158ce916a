"""`partsong fit`: data to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from partsong.cli.choices import DTYPES, ENGINES, INITS, METHODS, SOLVERS, finite, one_of
from partsong.cli.fit_settings import FitOptions
from partsong.cli.guard import guarded
from partsong.cli.options import (
    AsJson,
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

EPILOG = examples(
    "partsong fit counts.csv -k 20 -o model.safetensors --weights W.csv",
    "partsong fit big.npy -k 50 -o model.safetensors --checkpoint fit.ckpt --time-budget 3600",
    "partsong fit big.npy -o model.safetensors --resume fit.ckpt",
    "partsong split counts.h5ad --parties 5 --by hospital -o parts/ && partsong fit parts/ -k 20 -o model.safetensors",
)

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
        OptionalPath, _option("--output", "-o", panel=KEEPING, help="The model file to write (.safetensors).")
    ] = None,
    n_components: Annotated[
        OptionalInt,
        _option(
            "--components",
            "-k",
            min=1,
            panel=MODEL,
            help="Number of parts to learn.",
            show_default="at most 20",
        ),
    ] = None,
    solver: Annotated[
        str, _option("--solver", panel=MODEL, help=f"One of {', '.join(SOLVERS)}.", callback=one_of(SOLVERS))
    ] = "hals",
    init: Annotated[
        str, _option("--init", panel=MODEL, help=f"Start: one of {', '.join(INITS)}.", callback=one_of(INITS))
    ] = "auto",
    alpha_w: Annotated[float, _option("--alpha-w", panel=MODEL, min=0.0, help="Penalty on W.", callback=finite)] = 0.0,
    alpha_h: Annotated[
        OptionalFloat,
        _option("--alpha-h", panel=MODEL, min=0.0, help="Penalty on H.", callback=finite, show_default="as --alpha-w"),
    ] = None,
    l1_ratio: Annotated[
        float, _option("--l1-ratio", panel=MODEL, min=0.0, max=1.0, help="Share of L1 in them.", callback=finite)
    ] = 0.0,
    tol: Annotated[
        float,
        _option(
            "--tol", panel=STOPPING, min=0.0, callback=finite, help="Least fall of the squared error per iteration."
        ),
    ] = 1e-4,
    max_iter: Annotated[int, _option("--max-iter", panel=STOPPING, min=1, help="Most iterations (a file).")] = 500,
    rounds: Annotated[int, _option("--rounds", panel=STOPPING, min=1, help="Most rounds (a folder of parts).")] = 100,
    time_budget: Annotated[
        OptionalFloat,
        _option(
            "--time-budget",
            panel=STOPPING,
            callback=finite,
            help="Most seconds, earlier parts of a resumed run included.",
        ),
    ] = None,
    method: Annotated[
        str, _option("--method", panel=PARTIES, help=f"One of {', '.join(METHODS)}.", callback=one_of(METHODS))
    ] = "exact",
    local_steps: Annotated[
        OptionalInt,
        _option(
            "--local-steps",
            panel=PARTIES,
            min=1,
            help="Steps at a party between exchanges.",
            show_default="3; local-only: 100",
        ),
    ] = None,
    engine: Annotated[
        str,
        _option("--engine", panel=PARTIES, help=f"One of {', '.join(ENGINES)}; same result.", callback=one_of(ENGINES)),
    ] = "parallel",
    record: Annotated[
        bool, _option("--record", panel=PARTIES, help="Keep all that parties send in the run folder.")
    ] = False,
    seed: Annotated[
        OptionalInt, _option("--seed", panel=COMPUTING, min=0, help="Random seed.", show_default="a fresh one, told")
    ] = None,
    dtype: Annotated[
        OptionalText,
        _option(
            "--dtype", panel=COMPUTING, help="float32 or float64.", callback=one_of(DTYPES), show_default="as the data"
        ),
    ] = None,
    threads: Threads = None,
    label: Label = None,
    transpose: Transpose = False,
    key: Key = None,
    weights: Annotated[
        OptionalPath, _option("--weights", panel=KEEPING, help="Also write W: .csv, .tsv, .npy, .parquet or .h5ad.")
    ] = None,
    run_folder: Annotated[
        OptionalPath, _option("--run-folder", panel=KEEPING, help="Folder for settings, versions, history and result.")
    ] = None,
    overwrite: Annotated[
        bool, _option("--overwrite", panel=KEEPING, help="The run folder may hold an earlier run.")
    ] = False,
    checkpoint: Annotated[
        OptionalPath, _option("--checkpoint", panel=KEEPING, help="File to go on from later. It holds private weights.")
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
    """Learn parts from data: X ≈ W H. A folder of parts is fitted as a simulated federation."""
    options = dict(locals())
    given = given_names(options.pop("ctx"))
    from partsong.cli.fit_session import run_fit

    run_fit(FitOptions(**options), given)


def given_names(ctx: typer.Context) -> frozenset[str]:
    """The options that stand on the command line, in contrast to those left at their defaults."""
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return frozenset(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
