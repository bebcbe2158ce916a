"""The largest serial number that each site has told, over all runs of a federation: one small file at the server.

A site whose ledger is shorter than that was restored from an older copy, whichever run it has released in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from partsong.errors import FormatError
from partsong.federation.locks import locked
from partsong.io.atomic import replacing


@dataclass(frozen=True, slots=True)
class Serials:
    """That file; without a path nothing is kept from run to run."""

    path: Path | None = None

    def known(self, names: Iterable[str]) -> dict[str, int]:
        """Of these sites, as far as they were heard before."""
        kept = self._read()
        return {name: kept[name] for name in names if name in kept}

    def keep(self, seen: Mapping[str, int]) -> None:
        """Take in what was seen; on the disk when this returns. Runs that go on at the same time take turns."""
        if self.path is None:
            return
        with locked(self.path.with_name(f"{self.path.name}.lock"), waits=True):
            kept = self._read()
            after = larger(kept, seen)
            if after != kept:
                with replacing(self.path, private=True) as draft:
                    draft.write_text(json.dumps(after, sort_keys=True) + "\n", encoding="utf-8")

    def _read(self) -> dict[str, int]:
        if self.path is None or not self.path.exists():
            return {}
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            is_sound = all(type(number) is int and number >= 0 for number in kept.values())
        except (ValueError, AttributeError):
            is_sound = False
        if not is_sound:
            raise FormatError(
                f"{self.path} does not hold the number of releases that each site has told. Take it from a copy: "
                "without it a site that was restored from an older one is not noticed."
            )
        return dict(kept)


def larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """The larger number of each name."""
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}
