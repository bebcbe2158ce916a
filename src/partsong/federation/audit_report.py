"""An audit log for the people who answer for a site: is it whole, what has left, how much in each run; never values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from partsong.errors import BrokenChain, FileError, ParameterError
from partsong.federation.audit_log import RefusalCounts
from partsong.federation.chain import NOTHING, Chain

AUDIT_FILE = "audit.jsonl"
HEAD_LETTERS = len(NOTHING)
COLUMNS = (
    "line", "time (UTC)", "run", "round", "kind", "bytes", "norm", "clip", "ε spent", "again", "arrays or refusal",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verified:
    """A log whose lines follow from each other; `unfinished`: bytes of a last line without its end."""

    lines: int
    first: str | None
    last: str | None
    head: str
    unfinished: int
    since: int | None = None
    """Lines that were added since the hash that was noted elsewhere."""


def log_at(place: Path) -> Path:
    """The log in a site's folder, in its state folder, or the file itself."""
    tried = (place / "state" / AUDIT_FILE, place / AUDIT_FILE) if place.is_dir() else (place,)
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise FileError(
            f"{place}: there is no {AUDIT_FILE}. Name the folder of a site, or the file; where nothing was ever "
            "sent there is none."
        )
    return found


def verified(path: Path, noted: str | None = None) -> Verified:
    """Compare all lines, and look for a hash that was `noted` elsewhere: BrokenChain where no line has it."""
    wanted = None if noted is None else _hash_in(noted)
    chain, first, last, number, head, since = Chain(path), None, None, 0, NOTHING, None
    at = 0 if wanted == NOTHING else None
    for line in chain.lines():
        number, head, last = line["number"], line["hash"], str(line.get("time"))
        first = first or last
        at = number if head == wanted else at
    unfinished = chain.unfinished()
    if wanted is not None:
        if at is None:
            raise BrokenChain(
                f"{path}: each of its {number} lines follows from the one before, but none has the hash that was noted "
                "elsewhere: lines were taken from its end, or all of it was written anew. Keep the file as it is.",
                number + 1,
                head,
            )
        since = number - at
    return Verified(number, first, last, head, unfinished, since)


@dataclass(frozen=True, slots=True)
class Totals:
    """What has left in one run: messages, bytes, repeated ones (sent before with the same bytes), refusals."""

    messages: int = 0
    bytes: int = 0
    again: int = 0
    refusals: int = 0
    rounds: int = 0
    epsilon: float | None = None
    """Spent by the site over all its runs, after the last message of this one."""

    def plus(self, line: Mapping[str, Any]) -> Totals:
        """With one line more."""
        epsilon = line.get("epsilon")
        return Totals(
            self.messages + 1,
            self.bytes + int(line["bytes"]),
            self.again + bool(line["again"]),
            self.refusals + (line["refusal"] is not None),
            max(self.rounds, int(line["round"]) + (line["kind"] == "work")),
            self.epsilon if epsilon is None else float(epsilon),
        )


def sound_lines(path: Path) -> tuple[list[dict[str, Any]], BrokenChain | None]:
    """All lines up to the first that does not fit, and what is wrong with that one."""
    found: list[dict[str, Any]] = []
    try:
        for line in Chain(path).lines():
            found.append(line)
    except BrokenChain as error:
        return found, error
    return found, None


def totals_of(lines: Iterable[Mapping[str, Any]]) -> dict[str, Totals]:
    """By run, in the order in which they began."""
    found: dict[str, Totals] = {}
    for line in lines:
        found[line["run"]] = found.get(line["run"], Totals()).plus(line)
    return found


def unlisted_at(path: Path, lines: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Refusals by code that have no line of their own: those that lines tell of, and those since the last line."""
    last = int(lines[-1]["number"]) if lines else 0
    found = Counter(RefusalCounts.today(path).unlisted_after(last))
    for line in lines:
        found.update(line.get("unlisted", {}))
    return dict(sorted(found.items()))


def row_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for people."""
    norms = [shown(one["norm"]) for one in line["arrays"] if one["norm"] is not None]
    arrays = ", ".join(f"{one['name']} {'×'.join(map(str, one['shape'])) or 'number'}" for one in line["arrays"])
    kind = f"{line['kind']} {line['phase']}" if line["kind"] in ("reduce", "names") else line["kind"]
    attempt = f", attempt {line['attempt']}" if line["attempt"] else ""
    what = f"refused: {line['refusal']}" if line["refusal"] else arrays or "nothing"
    what = f"made up: {line['made_up']}" if "made_up" in line else what
    what += f" (before it {sum(line['unlisted'].values())} refusals without a line)" if "unlisted" in line else ""
    words = (line["number"], str(line["time"])[:19].replace("T", " "), line["run"], f"{line['round']}{attempt}", kind)
    numbers = (line["bytes"], " ".join(norms), shown(line.get("clip")), shown(line.get("epsilon")))
    return (*map(str, words), *map(str, numbers), "again" if line["again"] else "", what)


def shown(value: Any) -> str:
    """A cell of a table."""
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _hash_in(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in "- \t\n:")
    if len(letters) != HEAD_LETTERS or set(letters) - set("0123456789abcdef"):
        raise ParameterError(
            f"A hash of a line has {HEAD_LETTERS} hexadecimal letters; got {text[:80]!r}. `partsong audit verify "
            "FOLDER` prints it."
        )
    return letters
