"""Writing so that a file is either the old one or the new one, never half of each."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from partsong.errors import FileError
from partsong.io.opening import place_of


@contextmanager
def replacing(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[Path]:
    """Give the name of an empty temporary file beside `path`; when the block ends well, it takes the place of `path`.

    The contents reach the disk before the name changes. What is `private` can be read by its owner alone; otherwise
    an existing file keeps its permissions. Links are followed.
    """
    target = Path(os.path.realpath(place_of(path)))
    draft = target.with_name(f".{secrets.token_hex(8)}.{target.name}")
    if target.exists() and not os.access(target, os.W_OK):
        raise FileError(f"{path} is write-protected. Write to another name, or lift the protection first.")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600 if private else 0o666))
        yield draft
        _flush_to_disk(draft, os.O_RDWR)
        if target.exists() and not private:
            shutil.copymode(target, draft)
        os.replace(draft, target)
        with contextlib.suppress(OSError):  # not every system can flush a folder
            _flush_to_disk(target.parent, os.O_RDONLY)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(
            f"{path} cannot be written: {error.strerror or error}. Check that the folder exists and is yours to "
            "write to, and that the disk is not full; what was there before is untouched."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)


def _flush_to_disk(path: Path, mode: int) -> None:
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
