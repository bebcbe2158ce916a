"""What a site has released, over all runs and restarts: a chained file that is written before anything is computed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from partsong.errors import BrokenChain, CompositionError, FileError, FormatError
from partsong.federation.wire import Denied, Request
from partsong.privacy.accounting import Ledger, Release

if TYPE_CHECKING:
    from partsong.federation.policy import PrivacyBudget


# ---- chain ------------------------------------------------------------------------------------------------------
#
# Append-only files in which every line holds the hash of the line before: what was written cannot be changed unseen.
#
#     {"number": 3, "before": "<hash of line 2>", …, "hash": "<SHA-256 of this line without it>"}
#
# A line is on the disk before `append` returns. A last line without its end was cut off by a crash and was never acted
# on: it is taken away when the next one is written. Lines that are missing from the end cannot be seen from the file
# alone; `head` is the hash to note elsewhere, or to compare with.

NOTHING = "0" * 64
"""The hash before the first line."""
TAIL = 1 << 16
HASH = re.compile(rb'"hash": "([0-9a-f]{64})", ')
"""Where a line has its own hash: never last, for "number" comes after it."""
MOST_REMEMBERED = 16

Line = dict[str, Any]
Sum = TypeVar("Sum")


@dataclass(frozen=True, slots=True)
class Mark:
    """How far a file was compared: so many bytes with this SHA-256, and number and hash of the last line in them."""

    length: int = 0
    sha256: bytes = hashlib.sha256().digest()
    number: int = 0
    head: str = NOTHING

    def is_of(self, data: bytes) -> bool:
        """Whether these bytes begin with the ones that were compared."""
        return len(data) >= self.length and hashlib.sha256(memoryview(data)[: self.length]).digest() == self.sha256


_REMEMBERED: dict[tuple[Path, Any], tuple[Mark, Any]] = {}
"""Of files that this process has read: how far, and what came of it."""
_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class Chain:
    """Such a file."""

    path: Path

    def append(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """One more line, flushed to the disk; returned with its number and hashes."""
        text, number, before = self._end()
        line = {"number": number + 1, "before": before, **entry}
        line["hash"] = _hash(line)
        written = _text(line) + b"\n"
        is_new = not self.path.exists()
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.ftruncate(descriptor, text)
                os.lseek(descriptor, 0, os.SEEK_END)
                while written:
                    written = written[os.write(descriptor, written) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_new:
                _flush_folder(self.path.parent)
        except OSError as error:
            raise FileError(
                f"{self.path} cannot be written: {error.strerror or error}. Nothing was sent; check that the disk is "
                "not full, and ask again."
            ) from error
        return line

    def lines(self) -> Iterator[Line]:
        """All lines, each compared with the one before and with how it is written; BrokenChain at the first that does
        not fit.
        """
        return self._compared(_whole_lines(self._read()), Mark())

    def folded(self, fold: Callable[[Sum, Sequence[Line]], Sum], empty: Sum) -> Sum:
        """fold(…, lines) over all lines, compared: those that this process has read before are not read again where
        their bytes are the same to the last one. BrokenChain also for an end that no crash leaves.
        """
        data, place = self._read(), (self.path, fold)
        with _LOCK:
            mark, found = _REMEMBERED.pop(place, (Mark(), empty))
        if not mark.is_of(data):
            mark, found = Mark(), empty
        end = data.rfind(b"\n") + 1
        new = list(self._compared(_whole_lines(data[mark.length : end]), mark))
        self._require_torn(data[end:], mark.number + len(new), new[-1]["hash"] if new else mark.head)
        if new:
            found = fold(found, new)
            mark = Mark(end, hashlib.sha256(memoryview(data)[:end]).digest(), new[-1]["number"], new[-1]["hash"])
        with _LOCK:
            _REMEMBERED[place] = (mark, found)
            while len(_REMEMBERED) > MOST_REMEMBERED:
                _REMEMBERED.pop(next(iter(_REMEMBERED)))
        return found

    def _compared(self, texts: Sequence[bytes], mark: Mark) -> Iterator[Line]:
        before = mark.head
        for number, text in enumerate(texts, mark.number + 1):
            line = _line_in(text)
            if line is None or line["number"] != number or line["before"] != before:
                raise BrokenChain(
                    f"{self.path}, line {number}: it does not follow from the line before it, so that this file was "
                    "edited, or lines were taken out. What came before it is sound. Keep the file as it is, and ask "
                    "who could write to it.",
                    number,
                    before,
                )
            before = line["hash"]
            yield line

    def head(self) -> tuple[int, str]:
        """The number of lines and the last hash, after all lines were compared."""
        number, before = 0, NOTHING
        for line in self.lines():
            number, before = line["number"], line["hash"]
        return number, before

    @property
    def number(self) -> int:
        """That of the last whole line; what is before it is not read."""
        return self._end()[1]

    def unfinished(self) -> int:
        """Bytes of a last line that a crash has cut off, which the next line replaces; BrokenChain where no crash
        leaves such bytes: more than a line, without its end.
        """
        rest = self._read().rpartition(b"\n")[2]
        self._require_torn(rest, *self.head())
        return len(rest)

    def _require_torn(self, rest: bytes, number: int, last: str) -> None:
        """Refuse bytes after the last whole line that are more than a line."""
        if not rest:
            return
        try:
            line, length = json.JSONDecoder().raw_decode(rest.decode("latin-1"))
            is_whole = isinstance(line, dict) and length < len(rest)
        except (ValueError, RecursionError):
            is_whole = False
        if is_whole:
            raise BrokenChain(f"{self.path}, line {number + 1}: the end of this line was edited.", number + 1, last)

    def _read(self) -> bytes:
        try:
            return self.path.read_bytes() if self.path.exists() else b""
        except OSError as error:
            raise FileError(f"{self.path} cannot be read: {error.strerror or error}. Check whose it is.") from error

    def _end(self) -> tuple[int, int, str]:
        """Length of all whole lines, and number and hash of the last; what is before it is not read again."""
        if not self.path.exists():
            return 0, 0, NOTHING
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            tail, start = b"", size
            while start > 0 and tail.count(b"\n") < 2:
                start = max(0, start - TAIL)
                file.seek(start)
                tail = file.read(size - start)
        length = start + tail.rfind(b"\n") + 1
        if length == 0:
            return 0, 0, NOTHING
        text = tail[: tail.rfind(b"\n")].rpartition(b"\n")[2]
        line = _line_in(text)
        if line is None:
            raise FormatError(f"{self.path}: its last line was edited. Nothing can be added to it; keep it as it is.")
        return length, int(line["number"]), str(line["hash"])


def _whole_lines(data: bytes) -> list[bytes]:
    return data.split(b"\n")[:-1]


def _line_in(text: bytes) -> Line | None:
    """A line whose hash is that of all else in it, written in the one way there is; None where it is not."""
    try:
        line = json.loads(text)
        if len(found := HASH.findall(text)) == 1 and list(line) == sorted(line):
            is_sound = line["hash"] == found[0].decode() == hashlib.sha256(HASH.sub(b"", text)).hexdigest()
        else:
            is_sound = line["hash"] == _hash(line) and text == _text(line)
        is_sound = is_sound and "number" in line and "before" in line
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return line if is_sound else None


def _flush_folder(path: Path) -> None:
    """A new name is on the disk as well; not every system can do that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _hash(line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text({name: value for name, value in line.items() if name != "hash"})).hexdigest()


def _text(line: Mapping[str, Any]) -> bytes:
    """The one way to write a line."""
    return json.dumps(line, sort_keys=True, allow_nan=False).encode()


# ---- ledger -----------------------------------------------------------------------------------------------------

MOST_MADE_UP = 1_000_000
"""Releases that a ledger can lack: more than any site has."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many attempts a round may have, and how many all rounds of a run may have together."""

    attempts: int
    lines: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What an attempt costs (None: no noise), out of which budget, how many there may be, how many combinations of rows
    it sends without noise, and from which seed its run began.
    """

    release: Release | None = None
    allowance: PrivacyBudget | None = None
    bounds: Bounds | None = None
    directions: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A line: which attempt of a round it is for, of which request and model, how much noise that had, and how many
    combinations of rows it sent without noise (None: the line is of a version that did not count them). `model`: a mark
    of H, and `seed` that of the run, where combinations were sent.
    """

    number: int
    round: int
    attempt: int
    digest: str
    about: str | None
    noise: float | None
    directions: int | None = 0
    model: str | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Books:
    """All lines together: charges by run, releases by what they cost, and how many had no noise. `made_up`: number and
    count of lines without noise that are of no run.

    Lines that were made up, for releases of which no more is known, are of no run, and one can stand for many: `serial`
    is the number of releases, `lines` that of lines. `unheard`: the numbers of those of which nothing had left when the
    next one was written.
    """

    serial: int = 0
    lines: int = 0
    unheard: frozenset[int] = frozenset()
    runs: Mapping[str, tuple[Charge, ...]] = field(default_factory=dict)
    releases: Mapping[Release, int] = field(default_factory=dict)
    noiseless: int = 0
    made_up: tuple[tuple[int, int], ...] = ()

    def directions(self, since: int = 0, run: str | None = None) -> int:
        """Combinations of rows that were sent without noise, in all runs or in one, by lines after number `since`.
        Attempts of a round send the same combinations, and count once.
        """
        rounds: dict[tuple[str, int], int] = {}
        for name, charges in self.runs.items() if run is None else [(run, self.runs.get(run, ()))]:
            for one in charges:
                if one.number > since:
                    rounds[name, one.round] = max(rounds.get((name, one.round), 0), one.directions or 0)
        return sum(rounds.values())

    def uncounted(self, since: int = 0) -> int:
        """Releases without noise, by lines after number `since`, of which it is not known how many combinations of rows
        they sent: those of partsong 0.1.0, and lines that were made up.
        """
        own = sum(one.directions is None and one.number > since for charges in self.runs.values() for one in charges)
        return own + sum(count for number, count in self.made_up if number > since)

    def answered(self, about: str, model: str | None, run: str) -> int | None:
        """The line by which a model was answered with combinations of rows in another run; None: it never was."""
        return self._line(run, lambda one: one.about == about or (model is not None and one.model == model))

    def seeded(self, seed: int, run: str) -> int | None:
        """The line of another run that sent combinations of rows and began from this seed; None: there is none."""
        return self._line(run, lambda one: one.seed == seed)

    def _line(self, run: str, is_meant: Callable[[Charge], bool]) -> int | None:
        others = (one for name, charges in self.runs.items() if name != run for one in charges)
        return next((one.number for one in others if one.noise is None and one.directions != 0 and is_meant(one)), None)

    def with_lines(self, lines: Sequence[Line]) -> Books:
        """With more of them."""
        runs, releases, noiseless, serial = dict(self.runs), dict(self.releases), self.noiseless, self.serial
        new: dict[str, list[Charge]] = {}
        made_up = list(self.made_up)
        for line in lines:
            release = None if line["release"] is None else Release.from_json(line["release"])
            (run, number, attempt), noise = line["attempt"], None if release is None else release.noise_multiplier
            count = int(line.get("count", 1))
            serial += count
            directions = 0 if release is not None else line.get("directions")
            if run:
                of_model = (line.get("about"), noise, directions, line.get("model"), line.get("seed"))
                charge = Charge(line["number"], number, attempt, line["digest"], *of_model)
                new.setdefault(run, []).append(charge)
            elif release is None:
                made_up.append((line["number"], count))
            if release is None:
                noiseless += count
            else:
                releases[release] = releases.get(release, 0) + count
        runs |= {run: (*runs.get(run, ()), *charges) for run, charges in new.items()}
        unheard = self.unheard | {line["number"] - 1 for line in lines if line.get("unheard")}
        return Books(serial, lines[-1]["number"], unheard, runs, releases, noiseless, tuple(made_up))


@dataclass(frozen=True, slots=True)
class SiteLedger:
    """One line for every attempt of every round of every run, with what it costs; `serial` counts releases."""

    path: Path

    @property
    def chain(self) -> Chain:
        """The file."""
        return Chain(self.path)

    def books(self) -> Books:
        """All that was charged, after every line was compared."""
        return self.chain.folded(Books.with_lines, Books())

    @property
    def serial(self) -> int:
        """How many releases were charged."""
        return self.books().serial

    def spent(self) -> Ledger:
        """All that was charged and had noise."""
        return Ledger(tuple(self.books().releases.items()))

    def charge(self, request: Request, cost: Cost, *, unheard: bool = False, again: bool = False) -> bool:
        """Write an attempt down, once; refused where the budget does not allow it, before anything is written.

        All attempts of a round are about one model and one history. True where the line was there before; `again`: one
        more is written then. `unheard`: nothing of the last line has left, and this one says so. Lines of which nothing
        has left are charged, and are none of the attempts that a round may have.
        """
        nonce, before = request.nonce, self.charges_of(request.nonce.run)
        of_round = [one for one in before if one.round == nonce.round]
        own, digest, about = [nonce.run, nonce.round, nonce.attempt], request.digest, request.about
        for one in of_round:
            if one.attempt == nonce.attempt and one.digest != digest:
                raise Denied("conflict", f"Another request than that of ledger line {one.number} for {own}.")
            if one.about not in (None, about):
                raise Denied("conflict", f"Another model, or history, than that of ledger line {one.number}.")
        was_charged = any(one.attempt == nonce.attempt for one in of_round)
        if was_charged and not again:
            self._flush()
            return True
        books = self.books()
        excused = books.unheard | ({books.lines} if unheard else set())
        heard = [one for one in before if one.number not in excused]
        self._require_few(cost.bounds, [one for one in heard if one.round == nonce.round], heard)
        if cost.allowance is not None:
            self.require_within(cost.allowance, cost.release)
        more = {"about": about, **({"unheard": True} if unheard else {})}
        counted: dict[str, Any] = {} if cost.release is not None else {"directions": cost.directions}
        if counted and cost.directions:
            counted |= {"model": request.model_mark, "seed": cost.seed}
        self._append({"attempt": own, "digest": digest, "count": 1, **counted, **more}, cost.release)
        return was_charged

    def require_within(self, allowance: PrivacyBudget, release: Release | None, count: int = 1) -> None:
        """Refuse releases that the site's budget does not cover, and all where some before had no noise. `count` 0:
        what was charged already has to be covered, and the release be of a kind that the budget is about.
        """
        books = self.books()
        require_within(allowance, books.releases, release, count)
        if books.noiseless > allowance.noiseless_before:
            raise Denied(
                "noiseless",
                f"{books.noiseless} releases of the ledger had no noise, so that epsilon = {allowance.epsilon:g} is "
                "not true of all that has left. If that is known, set privacy.noiseless_before = "
                f"{books.noiseless} in site.toml.",
            )

    def charges_of(self, run: str) -> tuple[Charge, ...]:
        """All attempts of a run that were charged."""
        return self.books().runs.get(run, ())

    def lines_of(self, run: str) -> list[Line]:
        """The lines of these, as they are written."""
        return [line for line in self.chain.lines() if line["attempt"][0] == run]

    def make_up(
        self, count: int, release: Release | None, why: str, attempt: tuple[str, int, int] = ("", 0, 0)
    ) -> None:
        """Charge releases that this copy of the ledger does not know of, in one line: for sites restored from an older
        copy. `attempt`: run, round and attempt, where that is known; else they are of no run. How many combinations of
        rows they sent is not known.
        """
        self._append({"attempt": list(attempt), "digest": why, "count": count}, release)

    def _append(self, entry: Mapping[str, Any], release: Release | None) -> None:
        self.chain.append({**entry, "release": None if release is None else release.to_json()})

    def _require_few(self, bounds: Bounds | None, of_round: Sequence[Charge], of_run: Sequence[Charge]) -> None:
        if bounds is not None and (len(of_round) >= bounds.attempts or len(of_run) >= bounds.lines):
            raise Denied(
                "attempts",
                f"{len(of_round)} attempts of this round and {len(of_run)} of the run were charged before; allowed: "
                f"{bounds.attempts} and {bounds.lines}.",
            )

    def _flush(self) -> None:
        """A line that was found may have been written by a process that was killed before it was flushed."""
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def require_within(
    allowance: PrivacyBudget, before: Mapping[Release, int], release: Release | None, count: int = 1
) -> None:
    """Refuse releases that the site's budget does not cover, after those before."""
    if release is None or release.kind == "none":
        raise Denied("privacy-needed", "site.toml has a privacy budget, but this program adds no noise.")
    if not release.is_secure and not allowance.insecure_noise:
        raise Denied("insecure-noise", "The noise would come from a seed; privacy.insecure_noise is not set.")
    if release.unit != allowance.unit:
        raise Denied("privacy-unit", f"The promise is about a {release.unit}, site.toml about a {allowance.unit}.")
    try:
        spent = Ledger(tuple(before.items()))
        after = spent.after(release, count).epsilon(allowance.delta)
    except CompositionError as error:
        raise Denied("privacy-unit", str(error)) from error
    if after > allowance.epsilon:
        raise Denied(
            "budget",
            f"{f'After {count} more ' if count else ''}{after:.4g} of epsilon = {allowance.epsilon:g} "
            f"{'would be' if count else 'is'} spent (delta {allowance.delta:g}, {len(spent)} releases before, over all "
            "runs).",
        )
