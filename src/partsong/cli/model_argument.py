"""MODEL on the command line: the model file that is meant, or a word on what was named instead."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from partsong.cli.choices import MODEL_ENDINGS
from partsong.errors import FileError
from partsong.io.opening import place_of
from partsong.io.party_folder import is_parts_folder
from partsong.training.run_folder import MODEL, is_run_folder

if TYPE_CHECKING:
    from partsong.io.model_file import Model


def read_model(path: Path) -> Model:
    """`partsong.load_model`, with the way out where a folder is named instead of a file."""
    from partsong.io.model_file import load_model

    place = place_of(path)
    if place.is_dir():
        raise FileError(f"{path}: this is a folder, not a model file. {_way_out(path, place)}")
    return load_model(place)


def _way_out(path: Path, folder: Path) -> str:
    if (folder / MODEL).is_file():
        return f"It is a run folder; name the model in it: {path / MODEL}."
    if is_parts_folder(folder):
        return f"It holds the parts of several parties; fit them first: partsong fit {path} -o {MODEL}."
    if is_run_folder(folder):
        return "It is the folder of a run that did not get as far as a model. Run the fit again."
    held = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(MODEL_ENDINGS))
    return f"Name a file in it, such as {path / held[0]}." if held else "It holds no .safetensors file."
