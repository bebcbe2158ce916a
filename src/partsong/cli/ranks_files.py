"""Where a fit over ranks writes, and that it can."""

from __future__ import annotations

from pathlib import Path

import typer

from partsong.cli import run_folder
from partsong.cli.choices import MODEL_ENDINGS, WEIGHT_ENDINGS
from partsong.cli.fit_settings import FitOptions
from partsong.cli.outputs import require_distinct, require_writable
from partsong.io.opening import place_of


def shard_path(weights: Path, rank: int, ranks: int) -> Path:
    """W.rank0of4.npy for W.npy."""
    ending = _ending(weights)
    return weights.with_name(f"{weights.name[: len(weights.name) - len(ending)]}.rank{rank}of{ranks}{ending}")


def listing_path(weights: Path) -> Path:
    """W.shards.json for W.npy."""
    return weights.with_name(f"{weights.name[: len(weights.name) - len(_ending(weights))]}.shards.json")


def _ending(path: Path) -> str:
    found = [ending for ending in WEIGHT_ENDINGS if path.name.lower().endswith(ending)]
    return path.name[len(path.name) - len(max(found, key=len)) :] if found else ""


def require_outputs(options: FitOptions, rank: int, ranks: int) -> None:
    """Refuse, before anything is read, what this rank could not write afterwards."""
    if options.output is None and options.run_folder is None:
        raise typer.BadParameter("say where the model goes: -o model.safetensors.", param_hint="--output")
    if options.overwrite and options.run_folder is None:
        raise typer.BadParameter("needs --run-folder; other files are replaced anyway.", param_hint="--overwrite")
    if options.weights is not None:
        shard = shard_path(options.weights, rank, ranks)
        others = {"--weights": shard, "--weights (the list of shards)": listing_path(options.weights)}
        require_distinct({"DATA": options.data, "--output": options.output, **others})
        require_writable("--weights", shard, WEIGHT_ENDINGS)
    if rank > 0:
        return
    require_distinct({"DATA": options.data, "--output": options.output})
    if options.output is not None:
        require_writable("--output", options.output, MODEL_ENDINGS)
    if options.run_folder is not None:
        folder = place_of(options.run_folder)
        for name in run_folder.OWN:
            require_distinct({"--run-folder": folder / name, "DATA": options.data, "--weights": options.weights})
        run_folder.make_usable(folder, options.overwrite)
