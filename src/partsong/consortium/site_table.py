"""The table of a site on its own disk; what is read stays in the process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from partsong.data.table import Table


def table_at(data: Path, reading: dict[str, Any]) -> Table:
    """The rows; read once in a process, as long as the file stays as it is."""
    stamp = data.stat() if data.exists() else None
    return _read(data, tuple(reading.items()), stamp and (stamp.st_mtime_ns, stamp.st_size))


@lru_cache(maxsize=1)
def _read(data: Path, reading: tuple[tuple[str, Any], ...], stamp: tuple[int, int] | None) -> Table:
    from partsong.io.opening import Wanted
    from partsong.io.read import read_wanted

    return read_wanted(data, Wanted(**dict(reading)))
