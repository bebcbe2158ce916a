"""Folders that their owner alone can read, also where they were there before."""

from __future__ import annotations

from pathlib import Path

from partsong.errors import FileError
from partsong.federation.site_files import make_folder


def make_private(path: Path) -> None:
    """Make a folder, or take what others may do in it away."""
    make_folder(path)
    try:
        path.chmod(0o700)
    except OSError as error:
        raise FileError(
            f"{path} cannot be kept from other accounts: {error.strerror or error}. Choose a folder of your own."
        ) from error
