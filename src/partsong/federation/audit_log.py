"""What left a site: one line for every message out, chained, without values and without names of rows or columns.

Refusals that come by the thousand are the exception: they are counted, and later lines tell how many (`refusal_count`).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from partsong.core.interfaces import Program, type_name
from partsong.errors import BrokenChain, FileError, FormatError, ParameterError
from partsong.federation.ledger import MOST_MADE_UP, NOTHING, Books, Chain, Line, SiteLedger
from partsong.federation.locks import locked
from partsong.federation.policy import Policy
from partsong.federation.wire import Denied, Kind, Nonce, Refusal, Reply
from partsong.io.write import replacing
from partsong.privacy.accounting import Release

# ---- refusal count ----------------------------------------------------------------------------------------------
#
# Refusals without a line of their own in the audit log: a server can ask for what is refused as often as it likes.
#
#     refusals    {"day", "count", "different": [SHA-256, …], "after": the number of a line, "unlisted": {code: count}}
#
# Of n refusals of a day (UTC) the first MOST_DIFFERENT that differ have a line, and so have the 1st, 2nd, 4th, 8th … of
# all: at most MOST_DIFFERENT + 1 + log₂ n lines. Each of the others is counted here before it leaves, and the next line
# of any kind, the one after line `after`, tells how many there were of each code. So counts after a line that is not
# the
# last one were told: who is killed between a line and this file tells nothing twice, and forgets nothing.

FILE = "refusals"
MOST_DIFFERENT = 16


@dataclass(frozen=True, slots=True)
class Refusals:
    """Of one day: how many, hashes of the first that differ, and how many of each code no line has told of."""

    day: str = ""
    count: int = 0
    different: tuple[str, ...] = ()
    after: int = 0
    unlisted: Mapping[str, int] = field(default_factory=dict)

    def told_after(self, last: int) -> dict[str, int]:
        """What the line that follows the last one has to tell."""
        return dict(self.unlisted) if self.after == last else {}

    def has_line(self, digest: str) -> bool:
        """Whether one more, with this hash, has a line of its own."""
        is_new = digest not in self.different and len(self.different) < MOST_DIFFERENT
        return is_new or (self.count & (self.count + 1)) == 0

    def with_one(self, digest: str) -> Refusals:
        """With one more."""
        different = self.different if digest in self.different else (*self.different, digest)[:MOST_DIFFERENT]
        return replace(self, count=self.count + 1, different=different)

    def on(self, day: str) -> Refusals:
        """As they are on a day; what no line has told of stays."""
        return self if self.day == day else Refusals(day, after=self.after, unlisted=self.unlisted)


@dataclass(frozen=True, slots=True)
class RefusalCount:
    """The file, beside a log. One that cannot be understood was not written here, and is begun anew."""

    path: Path

    @staticmethod
    def beside(log: Path) -> RefusalCount:
        """That of a log."""
        return RefusalCount(log.with_name(FILE))

    def today(self) -> Refusals:
        """Refusals of this day."""
        return self._read().on(_today())

    def keep(self, refusals: Refusals) -> None:
        """On the disk when this returns."""
        with replacing(self.path, private=True) as draft:
            draft.write_text(json.dumps(asdict(refusals)) + "\n", encoding="utf-8")

    def _read(self) -> Refusals:
        try:
            found = Refusals(**json.loads(self.path.read_text(encoding="utf-8")))
            numbers = (found.count, found.after, *found.unlisted.values())
            is_sound = all(type(number) is int and number >= 0 for number in numbers)
            return replace(found, different=tuple(map(str, found.different))) if is_sound else Refusals()
        except (OSError, ValueError, TypeError, AttributeError):
            return Refusals()


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


# ---- audit report -----------------------------------------------------------------------------------------------
#
# An audit log for the people who answer for a site: is it whole, what has left, how much in each run; never values.

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
        Chain(path).unfinished()
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
    found = Counter(RefusalCount.beside(path).today().told_after(last))
    for line in lines:
        found.update(line.get("unlisted", {}))
    return dict(sorted(found.items()))


def row_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """One line for people."""
    norms = [_number(one["norm"]) for one in line["arrays"] if one["norm"] is not None]
    arrays = ", ".join(f"{one['name']} {'×'.join(map(str, one['shape'])) or 'number'}" for one in line["arrays"])
    kind = f"{line['kind']} {line['phase']}" if line["kind"] in ("reduce", "names") else line["kind"]
    attempt = f", attempt {line['attempt']}" if line["attempt"] else ""
    what = f"refused: {line['refusal']}" if line["refusal"] else arrays or "nothing"
    what = f"made up: {line['made_up']}" if "made_up" in line else what
    what += f" (before it {sum(line['unlisted'].values())} refusals without a line)" if "unlisted" in line else ""
    words = (line["number"], str(line["time"])[:19].replace("T", " "), line["run"], f"{line['round']}{attempt}", kind)
    numbers = (line["bytes"], " ".join(norms), _number(line.get("clip")), _number(line.get("epsilon")))
    return (*map(str, words), *map(str, numbers), "again" if line["again"] else "", what)


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)


def _hash_in(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in "- \t\n:")
    if len(letters) != HEAD_LETTERS or set(letters) - set("0123456789abcdef"):
        raise ParameterError(
            f"A hash of a line has {HEAD_LETTERS} hexadecimal letters; got {text[:80]!r}. `partsong audit verify "
            "FOLDER` prints it."
        )
    return letters


# ---- audit ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Released:
    """Rounds and attempts of a run of which something has left, with how much noise; whether anything but refusals was
    answered in it, and its end.
    """

    works: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    is_begun: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Departures:
    """What has left, by run, as far as it was no refusal; a run with nothing but refusals is there as well."""

    runs: Mapping[str, Released] = field(default_factory=dict)

    def with_lines(self, lines: Sequence[Line]) -> Departures:
        """With more of them."""
        works: dict[str, dict[tuple[int, int], float | None]] = {}
        begun = {line["run"] for line in lines if line["refusal"] is None}
        over = {line["run"] for line in lines if line["kind"] == "finish" and line["refusal"] is None}
        for line in lines:
            own = works.setdefault(line["run"], {})
            if line["refusal"] is None and line["kind"] in ("work", "reduce"):
                own.setdefault((line["round"], line["attempt"]), line.get("noise_multiplier"))
        found = dict(self.runs)
        for run, own in works.items():
            before = found.get(run, Released())
            is_begun, is_over = before.is_begun or run in begun, before.is_over or run in over
            found[run] = Released({**own, **before.works}, is_begun, is_over)
        return Departures(found)


@dataclass(frozen=True, slots=True)
class Audit:
    """The log of a site."""

    path: Path

    def note(self, reply: Reply, payload: bytes, *, again: bool, protection: dict[str, Any]) -> None:
        """A message that is about to leave; its line, or for a refusal its count, is on the disk when this returns."""
        digest = hashlib.sha256(payload).hexdigest()
        if isinstance(reply.answer, Refusal):
            self._note_refusal(reply, reply.answer.code, digest, {"bytes": len(payload), **protection})
            return
        arrays = [_described(name, array) for name, array in sorted(reply.answer.arrays.items())]
        told = {"refusal": None, "again": again, "arrays": arrays, "bytes": len(payload), "sha256": digest}
        self._append({**reply.nonce.told(), **told, **protection})

    def make_up(self, place: tuple[str, int, int], release: Release | None, why: str) -> None:
        """An attempt that was charged, of whose message nothing is known but that it may have left, and what it was
        charged at; `release` None: without noise, as in all other lines.
        """
        run, number, attempt = place
        nonce = Nonce(run, number, attempt, Kind.WORK).told()
        known: dict[str, Any] = {"refusal": None, "again": False, "arrays": [], "bytes": 0, "sha256": None}
        self._append({**nonce, **known, **_protection(release, clip=None, epsilon=None), "made_up": why})

    def departures(self) -> Departures:
        """All that has left, after every line was compared."""
        return Chain(self.path).folded(Departures.with_lines, Departures())

    def released(self, run: str) -> Released | None:
        """What of a run has left; None where the log does not know the run."""
        return self.departures().runs.get(run)

    @property
    def is_sound(self) -> bool:
        """Whether each line follows from the one before."""
        try:
            self.departures()
        except FormatError:
            return False
        return True

    def verify(self, noted: str | None = None) -> Verified:
        """The number of lines, times and the last hash, if each follows from the one before; BrokenChain else."""
        return verified(self.path, noted)

    def show(self) -> Iterator[str]:
        """For people, one line each."""
        return ("  ".join(row_of(line)) for line in Chain(self.path).lines())

    def _note_refusal(self, reply: Reply, code: str, digest: str, more: Mapping[str, Any]) -> None:
        """By a line, or where there were many by a count that the next line tells."""
        counter, last = RefusalCount.beside(self.path), Chain(self.path).number
        before = counter.today()
        after, unlisted = before.with_one(digest), before.told_after(last)
        if before.has_line(digest):
            told = {"refusal": code, "again": False, "arrays": [], "sha256": digest}
            self._append({**reply.nonce.told(), **told, **more})
            counter.keep(replace(after, after=last + 1, unlisted={}))
        else:
            counter.keep(replace(after, after=last, unlisted={**unlisted, code: unlisted.get(code, 0) + 1}))

    def _append(self, entry: Mapping[str, Any]) -> None:
        """A line, with the time and the refusals since the one before that have none."""
        chain = Chain(self.path)
        unlisted = RefusalCount.beside(self.path).today().told_after(chain.number)
        when = datetime.now(UTC).isoformat(timespec="milliseconds")
        chain.append({"time": when, **entry, **({"unlisted": unlisted} if unlisted else {})})


def protection_of(program: Program | None, epsilon: float | None) -> dict[str, Any]:
    """Clip, noise and ε spent so far, as far as a program has them."""
    release: Any = None if program is None else program.traits.release
    clip: Any = getattr(getattr(program, "mechanism", None), "clip", getattr(program, "row_bound", None))
    return _protection(release, clip, epsilon)


def _protection(release: Release | None, clip: Any, epsilon: float | None) -> dict[str, Any]:
    """As lines of the log have it."""
    noise = None if release is None else release.noise_multiplier
    told = None if release is None else release.to_json()
    return {"clip": clip, "noise_multiplier": noise, "epsilon": epsilon, "release": told}


def _described(name: str, array: Any) -> dict[str, Any]:
    values = np.asarray(array)
    norm = float(np.linalg.norm(values.astype(np.float64))) if values.dtype.kind in "fi" and values.size else None
    return {
        "name": name,
        "shape": list(values.shape),
        "type": type_name(values.dtype),
        "bytes": int(values.nbytes),
        "norm": norm if norm is None or np.isfinite(norm) else None,
    }


# ---- wholeness --------------------------------------------------------------------------------------------------
#
# Ledger and audit log of a site tell of each other: what has left was charged, and what was charged has left.
#
#     audit line of work or of a phase, no refusal   →  ledger line of the same run, round and attempt, with its noise
#     ledger line of a run                           →  such an audit line; or it is the last one of the ledger, or the
#                                                       next one says that nothing had left (`unheard`)
#
# The last line may be one of work that was cut off, or has failed, before anything had left; if that is so, the next
# line
# says it. So a log that is older than the ledger by more than one attempt is found, and nothing is done a second time.

Place = tuple[str, int, int]
"""Run, round and attempt."""

NEWEST = "Put the newest copy of both files back. Where there is none,"


def require_whole(ledger: SiteLedger, audit: Audit) -> None:
    """Refuse to go on (`ledger`) where one of the two is not as it was written, or does not cover the other."""
    try:
        books, left = both_read(ledger, audit)
    except FormatError as error:
        raise Denied("ledger", str(error)) from error
    folder = quote(str(ledger.path.parent))
    way_out = (
        f"{NEWEST} charge what is known to have left, and note what is not known: partsong audit make-up {folder} "
        '--why "one of the files was lost".'
    )
    uncharged, unknown, other = not_charged(books, left), not_in_log(books, left), _with_other_noise(books, left)
    if uncharged:
        raise Denied(
            "ledger",
            f"{audit.path.name} tells of {len(uncharged)} attempts whose answers have left (the first: "
            f"{_named(uncharged[0])}), and {ledger.path.name} has not charged them: it is an older copy, or lines were "
            f"taken from its end. {way_out}",
        )
    if other:
        raise Denied(
            "ledger",
            f"{_named(other[0])} has left with other noise than it was charged for. {NEWEST} move {ledger.path.name} "
            f"out of the folder, and charge what has left as {audit.path.name} tells, and what else was in those "
            f"{books.serial} releases as without noise: partsong audit make-up {folder} "
            f'--count {books.serial} --why "the ledger was not that of the log".',
        )
    if unknown:
        raise Denied(
            "ledger",
            f"{ledger.path.name} has charged {len(unknown)} attempts (the first: {_named(unknown[0])}) of which "
            f"{audit.path.name} has no line: it is an older copy, was removed, or lines were taken from its end. "
            f"{way_out}",
        )


def both_read(ledger: SiteLedger, audit: Audit) -> tuple[Books, Departures]:
    """Both, each compared line by line; FormatError with the way on where one was edited."""
    books = ledger_read(ledger)
    try:
        return books, audit.departures()
    except FormatError as error:
        raise _edited(audit.path, error) from error


def ledger_read(ledger: SiteLedger) -> Books:
    """The same of the ledger alone."""
    try:
        return ledger.books()
    except FormatError as error:
        raise _edited(ledger.path, error) from error


def not_charged(books: Books, left: Departures) -> list[Place]:
    """Attempts that have left, and are not in the ledger."""
    charged = {run: {(one.round, one.attempt) for one in charges} for run, charges in books.runs.items()}
    return [
        (run, *at) for run, told in left.runs.items() for at in sorted(told.works) if at not in charged.get(run, ())
    ]


def not_in_log(books: Books, left: Departures, *, with_last: bool = False) -> list[Place]:
    """Attempts that were charged, and of which the log does not say that something has left, though it should: all of a
    run that it does not know, or knows by refusals alone; of others, but for those that the ledger says had not left,
    and for the last line of all.
    """
    excused = books.unheard if with_last else books.unheard | {books.lines}
    found: dict[Place, None] = {}
    for run, charges in books.runs.items():
        told = left.runs.get(run)
        works = {} if told is None else told.works
        is_known = told is not None and told.is_begun
        for one in charges:
            if (one.round, one.attempt) not in works and not (is_known and one.number in excused):
                found[run, one.round, one.attempt] = None
    return list(found)


def place_of_last(books: Books) -> Place | None:
    """What the last line of the ledger is for; None where there is none, or it was made up."""
    ends = ((run, charges[-1]) for run, charges in books.runs.items())
    return next(((run, one.round, one.attempt) for run, one in ends if one.number == books.lines), None)


def is_last_unheard(books: Books, left: Departures) -> bool:
    """Whether the last line of the ledger is for work of which nothing has left."""
    place = place_of_last(books)
    if place is None:
        return False
    told = left.runs.get(place[0])
    return told is None or place[1:] not in told.works


def _edited(path: Path, error: FormatError) -> FormatError:
    return FormatError(
        f"{error} To go on, move {path.name} out of the folder (do not delete it: it is what there is to look into), "
        "put the newest sound copy in its place, and charge or note what that lacks, or all where there is none: "
        f'partsong audit make-up {quote(str(path.parent))} --why "{path.name} was edited".'
    )


def _with_other_noise(books: Books, left: Departures) -> list[Place]:
    """As far as lines were not made up, which are about no request."""
    charged = ((run, one) for run, charges in books.runs.items() for one in charges if one.about is not None)
    noises = {(run, one.round, one.attempt): one.noise for run, one in charged}
    told = {(run, *at): noise for run, one in left.runs.items() for at, noise in one.works.items()}
    return [place for place, noise in told.items() if place in noises and noises[place] != noise]


def _named(place: Place) -> str:
    return f"run {place[0]}, round {place[1]}, attempt {place[2]}"


# ---- making up --------------------------------------------------------------------------------------------------
#
# Lines for what a site's ledger and audit log do not know of: after a copy was put back, or a file was lost.
#
# What the log says has left is charged, attempt by attempt, at the cost that the log tells. What was charged, and the
# log
# does not know, is noted there as left, at the cost that the ledger tells. Releases of which nothing is known but their
# number, as a server's (`behind`), are charged as releases without noise, for which no ε holds, unless their cost is
# stated: what is left of a ledger says nothing of what is gone. That number is of all releases that the ledger lacks;
# those which the log tells of are in it. A cost that is stated must be about what books and policy are about: two
# promises have no ε together, and nothing could be charged after them.

FILES = ("ledger.jsonl", "audit.jsonl", "site.log")
"""One of which a site has that has ever answered; no folder of a server has any."""

LEAVE_OUT = "leave --release out: releases of which only the number is known are charged as without noise."


@dataclass(frozen=True, slots=True)
class MadeUp:
    """What the ledger was charged with, attempts that were noted in the log, and charges of no run."""

    charged: tuple[Place, ...]
    noted: tuple[Place, ...]
    of_no_run: int


def state_at(place: Path) -> Path:
    """The folder with ledger and log: of a site, or that folder itself."""
    tried = (place / "state", place)
    found = next((path for path in tried if _is_of_site(path)), None)
    if found is None:
        raise FileError(
            f"{place}: this is not the folder of a site that has ever answered. Name the one with site.toml and state/ "
            "in it, at the site."
        )
    return found


def _is_of_site(path: Path) -> bool:
    """Also where all of it is lost but that the site was there."""
    was_there = (path / "lock").exists() and (path.parent / "site.toml").exists()
    return was_there or any((path / name).exists() for name in FILES)


def stated_release(text: str) -> Release:
    """A cost as ledger and log write it."""
    try:
        return Release.from_json(json.loads(text))
    except (ValueError, TypeError, KeyError) as error:
        raise ParameterError(
            "A release is stated as lines of ledger.jsonl and audit.jsonl have it, such as "
            f"{json.dumps(Release('gaussian', 2.0).to_json())}; got {text[:200]!r}."
        ) from error


def make_up(state: Path, why: str, count: int = 0, release: Release | None = None) -> MadeUp:
    """Write what is missing: `count` releases in the ledger, or as many as the log tells of; each line says `why`.

    `release`: what each of those has cost of which the log does not tell; None: they had no noise. One that could not
    be added up with what is charged here, or has no noise, is refused before anything is written.
    """
    if count > MOST_MADE_UP:
        raise ParameterError(
            f"No site has released {count} times; at most {MOST_MADE_UP} are made up. If that number is a server's, "
            "ask there what it has counted."
        )
    ledger, audit = SiteLedger(state / "ledger.jsonl"), Audit(state / "audit.jsonl")
    with locked(state / "lock", waits=True):
        books, left = both_read(ledger, audit)
        charged, unknown = not_charged(books, left), not_in_log(books, left)
        is_amiss = bool(charged or unknown or count)
        noted = not_in_log(books, left, with_last=True) if is_amiss else []
        costs = _told_costs(audit.path)
        if release is not None:
            _require_adds_up(release, (*books.releases, *(costs[place] for place in charged if place in costs)))
            _require_of_policy(release, state.parent / "site.toml")
        for place in charged:
            ledger.make_up(1, costs.get(place), why, place)
        paid = _charged_costs(ledger)
        for place in noted:
            audit.make_up(place, paid[place], why)
        besides = max(0, count - len(charged))
        if besides:
            ledger.make_up(besides, release, why)
    return MadeUp(tuple(charged), tuple(noted), besides)


def _require_adds_up(stated: Release, known: Iterable[Release]) -> None:
    """One promise for all that a ledger holds, with noise."""
    if stated.kind == "none":
        raise ParameterError(f'A release of kind "none" has no noise, and states no cost. For such ones {LEAVE_OUT}')
    promises = {(one.unit, one.relation) for one in known if one.kind != "none"}
    if promises and (stated.unit, stated.relation) not in promises:
        told = " and ".join(f"a {unit} ({relation})" for unit, relation in sorted(promises))
        raise ParameterError(
            f"The release that is stated is about a {stated.unit} ({stated.relation}), and ledger and log of this site "
            f"are about {told}: these do not add up to one epsilon. Take it from a copy of this site's own ledger or "
            f"log, or {LEAVE_OUT}"
        )


def _require_of_policy(stated: Release, place: Path) -> None:
    """About the unit of the site's budget, where it has one."""
    allowance = Policy.read(place).privacy if place.exists() else None
    if allowance is not None and stated.unit != allowance.unit:
        raise ParameterError(
            f"The release that is stated is about a {stated.unit}, and privacy.unit in {place} is "
            f"{allowance.unit!r}: nothing could be charged to that budget after it. Take it from a copy of this site's "
            f"own ledger or log, or {LEAVE_OUT}"
        )


def _charged_costs(ledger: SiteLedger) -> dict[Place, Release | None]:
    """What each attempt was charged at; None: without noise."""
    lines = ((tuple(line["attempt"]), line["release"]) for line in ledger.chain.lines())
    return {place: None if cost is None else Release.from_json(cost) for place, cost in lines}


def _told_costs(log: Path) -> dict[Place, Release]:
    """What each attempt has cost, as the log tells where its answers have left: a refusal, or another kind of answer
    under the same round and attempt, has cost nothing.
    """
    left = (one for one in Chain(log).lines() if one["refusal"] is None and one["kind"] in ("work", "reduce"))
    told = {(one["run"], one["round"], one["attempt"]): one.get("release") for one in left}
    return {place: Release.from_json(release) for place, release in told.items() if release is not None}
