"""Agreeing on columns by hashes: the server compares numbers, and names stay at the sites.

    hash = BLAKE2b-128(NFC(name); key, run)

In Unicode's normal form C, as a letter with a mark can be written in two ways that look the same. Salted by the run, so
that two runs cannot be compared. A server that has a list of likely names can still test them, unless all sites share a
`key` that it does not know. Whether they have the same key they find out by a hash of it, which tells nothing of a
random key.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong.errors import FeatureError, ParameterError
from partsong.federation.refusals import Denied
from partsong.privacy.key_agreement import fingerprint

HASH_BYTES = 16
SAME, COMMON = RULES = ("same", "common")
"""All sites need the same columns; or those are taken that all have."""
ONE_NAME = "have the same name, once letters with marks are written in one way (Unicode NFC). Rename one of them."


def hashed(names: Sequence[str], run: str, key: bytes = b"") -> Any:
    """One row of 16 bytes for each name; Denied where two names differ in how they are written alone."""
    salt = hashlib.sha256(run.encode()).digest()[:16]
    if (same := twins(names)) is not None:
        raise Denied("data", f"Columns {same[0] + 1} and {same[1] + 1} of those that may leave {ONE_NAME}")
    written = [unicodedata.normalize("NFC", name).encode("utf-8", "surrogatepass") for name in names]
    rows = [hashlib.blake2b(name, digest_size=HASH_BYTES, key=key, salt=salt).digest() for name in written]
    return np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), HASH_BYTES)


def twins(names: Sequence[str]) -> tuple[int, int] | None:
    """The places of two names that are one in normal form C, where there are any; names may be words that are told
    nowhere.
    """
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        before = first.setdefault(unicodedata.normalize("NFC", name), at)
        if before != at:
            return before, at
    return None


def key_mark(key: bytes, run: str) -> str:
    """By which sites find out that they have the same key; empty where there is none."""
    return fingerprint("partsong mark of a shared key", run, key).hex()[:32] if key else ""


def require_key_mark(own: str, usual: str) -> None:
    """Refuse where most sites have another key."""
    if own == usual:
        return
    here = "has another one" if own and usual else "has one, and they have none" if own else "has none, and they have"
    raise Denied(
        "shared-key",
        f"Most sites hash names of columns with one shared key; this one {here}. Compare with the steward of another "
        "site, not with the coordinator, and join again with --shared-key.",
    )


def strangers_in(marks: Mapping[str, str]) -> tuple[tuple[str, ...], str]:
    """Sites whose key is not that of most, and the mark of the key of most."""
    usual = Counter(mark for _, mark in sorted(marks.items())).most_common(1)[0][0] if marks else ""
    return tuple(name for name, mark in sorted(marks.items()) if mark != usual), usual


def listed(hashes: Any) -> list[bytes]:
    """The rows as bytes; ParameterError where they are no hashes, or not all different."""
    array = np.asarray(hashes)
    if array.ndim != 2 or array.shape[1] != HASH_BYTES or array.dtype != np.uint8:
        raise ParameterError("Columns are told by hashes of 16 bytes each; this is something else.")
    rows = [row.tobytes() for row in array]
    if len(set(rows)) < len(rows):
        raise ParameterError("A column is named more than once. Name each once.")
    return rows


def labels_of(hashes: Any, run: str, public: Sequence[str] = ()) -> tuple[str, ...]:
    """What a server calls columns: by name where it is `public` and no key was used, else "#" and the hash."""
    if (same := twins(public)) is not None:
        raise ParameterError(f"Lines {same[0] + 1} and {same[1] + 1} of the public names {ONE_NAME}")
    known = dict(zip(listed(hashed(public, run)), public, strict=True)) if public else {}
    return tuple(known.get(row, f"#{row.hex()}") for row in listed(hashes))


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
    """Columns of a site that may leave, and the key that they are hashed with.

    `are_secret`: they are words of texts, and are in no reason of a refusal either.
    """

    own: Sequence[str]
    key: bytes = b""
    are_secret: bool = False

    def order(self, wanted: Wanted) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Where the agreed columns are among its own, and the names of those that are not among them.

        A site that lacks some finds the beginnings of their hashes in its log, and then their names, from another site
        (`naming`). Only their number leaves.
        """
        rows = listed(wanted.hashes)
        taken = set(rows)
        places = {row: at for at, row in enumerate(listed(hashed(self.own, wanted.run, self.key)))}
        missing = [row for row in rows if row not in places]
        unused = tuple(self.own[at] for row, at in places.items() if row not in taken)
        extra = unused if wanted.rule == SAME else ()
        if missing or extra:
            counts = {"missing": len(missing), "extra": len(extra)}
            if self.are_secret:
                told = [f"{len(missing)} columns are missing here, {len(extra)} are here and not at most others"]
            else:
                told = [_told_missing(missing)] if missing else []
                told += [f"{name} is here and not at most others" for name in extra]
            raise Denied("columns", f"{'; '.join(told)}.", counts)
        return tuple(places[row] for row in rows), unused


def _told_missing(rows: Sequence[bytes]) -> str:
    hashes = ", ".join(f"#{row.hex()[:8]}" for row in rows)
    return f"{hashes}: missing here, or not let out. Names follow, if another site tells them (tell_names)"
