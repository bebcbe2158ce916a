"""What a fit is to write, looked at before it begins: options that need each other, names, folders, earlier files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import typer

from partsong.cli import run_folder
from partsong.cli.checkpoints import open_checkpoint
from partsong.cli.choices import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.cli.fit_settings import FitOptions
from partsong.cli.outputs import require_distinct, require_writable
from partsong.errors import FileError, FormatError
from partsong.io.opening import place_of


def require_companions(options: FitOptions, given: Collection[str]) -> None:
    """Refuse options that do nothing without another one."""
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("say where the model goes: -o model.safetensors.", param_hint="--output")
    if options.record and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder, where the traffic is kept.", param_hint="--record")
    if options.overwrite and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder; other files are replaced anyway.", param_hint="--overwrite")
    if "checkpoint_every" in given and options.checkpoint is None:
        raise typer.BadParameter("needs --checkpoint, the file to write.", param_hint="--checkpoint-every")


def require_outputs(options: FitOptions) -> None:
    """Refuse, before anything is read, what could not be written afterwards, or would overwrite something else."""
    outputs = {"--output": options.output, "--weights": options.weights, "--checkpoint": options.checkpoint}
    require_distinct({"DATA": options.data, **outputs, "--report": options.report})
    require_distinct({"--output": options.output, "--weights": options.weights, "--resume": options.resume})
    if options.run_folder is not None:
        folder = place_of(options.run_folder)
        others = {"DATA": options.data, "--weights": options.weights, "--checkpoint": options.checkpoint}
        for name in run_folder.OWN:
            require_distinct({"--run-folder": folder / name, **others})
        run_folder.make_usable(folder, options.overwrite)
    endings = {"--output": MODEL_ENDINGS, "--weights": WEIGHT_ENDINGS, "--checkpoint": ()}
    for option, path in outputs.items():
        if path is not None:
            require_writable(option, path, endings[option])
    if options.report is not None:
        require_writable("--report", options.report, (".html",))
    if options.checkpoint is not None and place_of(options.checkpoint).exists():
        _require_checkpoint(place_of(options.checkpoint), is_resumed=options.resume is not None)


def _require_checkpoint(path: Path, *, is_resumed: bool) -> None:
    """Only a checkpoint is ever overwritten by one; what a private run has spent is never lost."""
    try:
        _, _, context = open_checkpoint(path)
    except FormatError as error:
        raise FileError(f"--checkpoint {path}: this file is something else. Choose another name.") from error
    if context.get("ledger") and not is_resumed:
        raise FileError(
            f"--checkpoint {path}: this file holds what an earlier run has spent on privacy, which adds up with what "
            "this one will spend. Go on with it by --resume, or choose another name and keep it."
        )
