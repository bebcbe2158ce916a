"""Agreeing on columns by hashes: the server compares numbers, and names stay at the sites.

    hash = BLAKE2b-128(name; key, run)

Salted by the run, so that two runs cannot be compared. A server that has a list of likely names can still test them,
unless all sites share a `key` that it does not know.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import FeatureError, ParameterError
from partsong.federation.refusals import Denied

HASH_BYTES = 16
SAME, COMMON = RULES = ("same", "common")
"""All sites need the same columns; or those are taken that all have."""


def hashed(names: Sequence[str], run: str, key: bytes = b"") -> Any:
    """One row of 16 bytes for each name."""
    salt = hashlib.sha256(run.encode()).digest()[:16]
    rows = [
        hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, key=key, salt=salt).digest()
        for name in names
    ]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), HASH_BYTES)


def listed(hashes: Any) -> list[bytes]:
    """The rows as bytes; ParameterError where they are no hashes, or not all different."""
    array = np.asarray(hashes)
    if array.ndim != 2 or array.shape[1] != HASH_BYTES or array.dtype != np.uint8:
        raise ParameterError("Columns are told by hashes of 16 bytes each; this is something else.")
    rows = [row.tobytes() for row in array]
    if len(set(rows)) < len(rows):
        raise ParameterError("A column is named more than once. Name each once.")
    return rows


def agreed(offers: Mapping[str, Any], rule: str) -> Any:
    """The hashes that all sites are to work on: the columns of the most sites, or those that all have.

    In the order of the first site that has them. Sites that do not fit find out at the start, each for itself.
    """
    by_site = {name: listed(hashes) for name, hashes in sorted(offers.items())}
    if rule == SAME:
        usual = Counter(frozenset(rows) for rows in by_site.values()).most_common(1)[0][0]
        wanted = next(rows for rows in by_site.values() if frozenset(rows) == usual)
    else:
        everybody = set.intersection(*map(set, by_site.values()))
        wanted = [row for row in next(iter(by_site.values())) if row in everybody]
    if not wanted:
        raise FeatureError("No column is held by all sites. Compare the names at two of them.")
    return np.frombuffer(b"".join(wanted), np.uint8).reshape(len(wanted), HASH_BYTES)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The agreed columns as a site hears of them, and how they were agreed on."""

    hashes: Any
    run: str
    rule: str = SAME


@dataclass(frozen=True, slots=True)
class Names:
    """Columns of a site that may leave, the key that they are hashed with, and names that it has heard of."""

    own: Sequence[str]
    key: bytes = b""
    reference: Collection[str] = ()

    def order(self, wanted: Wanted) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where the agreed columns are among its own, and the names of those that are not among them.

        A site that lacks some is told which: by name where they are in the reference (a list that came with the
        invitation), else by the beginning of the hash. Only their number leaves.
        """
        rows = listed(wanted.hashes)
        taken = set(rows)
        places = {row: at for at, row in enumerate(listed(hashed(self.own, wanted.run, self.key)))}
        missing = [row for row in rows if row not in places]
        unused = tuple(self.own[at] for row, at in places.items() if row not in taken)
        extra = unused if wanted.rule == SAME else ()
        if missing or extra:
            told = [*(f"{name} is missing here, or not let out" for name in self._known(missing, wanted.run))]
            told += [f"{name} is here and not at most others" for name in extra]
            raise Denied("columns", f"{'; '.join(told)}.", {"missing": len(missing), "extra": len(extra)})
        return tuple(places[row] for row in rows), unused

    def _known(self, rows: Sequence[bytes], run: str) -> list[str]:
        names = list(self.reference)
        known = dict(zip(listed(hashed(names, run, self.key)), names, strict=True)) if names else {}
        return [known.get(row, f"#{row.hex()[:8]} (not in the list of names of this site)") for row in rows]
