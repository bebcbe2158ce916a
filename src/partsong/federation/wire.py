"""What is asked of a site and what it answers, as bytes: `core.codec` of (format, head as JSON, Message).

Whatever is not exactly that is a FormatError; nothing is allocated beyond the bytes that were given.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from partsong.core import codec
from partsong.core.interfaces import Message
from partsong.errors import (
    BudgetSpent,
    CompositionError,
    DamagedState,
    DivergenceError,
    FeatureError,
    FileError,
    FormatError,
    ParameterError,
    PartsongError,
    PartyError,
    SiteRefused,
    TooFewParties,
    UploadError,
)
from partsong.io.state_file import read_state, write_state

# ---- wire -------------------------------------------------------------------------------------------------------

MOST_BYTES = 1 << 31
"""A longer message is refused before it is looked at."""
MOST_HEADER_BYTES = 1 << 22
MOST_NUMBER = 1 << 53
RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What the name of a run looks like; it is also the name of a folder."""
CODE = re.compile(r"[a-z][a-z-]{0,39}")
"""What codes, and names of counts beside them, look like: they are told to people at the server."""
MOST_COUNTS = 8
NUMBERS = frozenset("?bhilqBHILQefd")

Text = TypeVar("Text")
Stored = TypeVar("Stored")


class Kind(enum.StrEnum):
    """What a site is asked for."""

    HELLO = "hello"
    START = "start"
    NAMES = "names"
    WORK = "work"
    REDUCE = "reduce"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Nonce:
    """Which message this is: of work, and of phases of a sum, a site sends one payload under one of these."""

    run: str
    round: int = 0
    attempt: int = 0
    kind: Kind = Kind.HELLO
    phase: int = 0

    def __post_init__(self) -> None:
        counts = (self.round, self.attempt, self.phase)
        if not RUN.fullmatch(self.run) or not all(type(n) is int and 0 <= n < MOST_NUMBER for n in counts):
            raise FormatError(
                f"A message is known by the name of its run (letters, digits, dots and dashes, at most 64) and whole "
                f"numbers; got {str(self.run)[:64]!r}, {counts}."
            )

    def told(self) -> dict[str, Any]:
        """Plain values."""
        numbers = {"round": self.round, "attempt": self.attempt, "phase": self.phase}
        return {"run": self.run, "kind": str(self.kind), **numbers}


@dataclass(frozen=True, slots=True)
class Request:
    """To one party: the model (work) or what the server has answered in the phase before (reduce), and plain values.

    `seen` is the largest serial number that the server has had from this party.
    """

    party: str
    nonce: Nonce
    body: Message = Message({})
    note: Mapping[str, Any] = field(default_factory=dict)
    seen: int = 0

    def written(self) -> bytes:
        """As bytes."""
        head = {"party": self.party, "seen": self.seen, "note": dict(self.note), **self.nonce.told()}
        return _packed("partsong-request", head, self.body)

    @staticmethod
    def read(data: bytes, most: int = MOST_BYTES) -> Request:
        """From bytes."""
        head, body = _unpacked("partsong-request", data, most, {"party", "seen", "note", *_NONCE})
        _require(type(head["seen"]) is int and 0 <= head["seen"] < MOST_NUMBER, "seen is no whole number")
        _require(isinstance(head["note"], dict), "its note is none")
        return Request(_name(head["party"]), _nonce(head), body, head["note"], head["seen"])

    @property
    def digest(self) -> str:
        """SHA-256 of all but `seen`: two requests under one nonce are the same request if this is the same."""
        return _digest([self.party, self.nonce.told(), dict(self.note)], self.body)

    @property
    def about(self) -> str:
        """SHA-256 of the model and the history that work begins from: the same in all attempts of a round."""
        return _digest([self.note.get("counted")], self.body)

    @property
    def model_mark(self) -> str | None:
        """SHA-256 of H in float32, whatever else a model tells beside it; None where it has no H."""
        H = self.body.arrays.get("H")
        if H is None:
            return None
        values = np.ascontiguousarray(np.asarray(H), np.float32)
        return hashlib.sha256(f"{values.shape}".encode() + values.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a site does not answer: a code, and at most some counts; the reason itself stays in the site's log."""

    code: str
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """From one party, to one request; `serial` counts the releases in its ledger, over all runs."""

    party: str
    nonce: Nonce
    answer: Message | Refusal
    serial: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)

    def written(self) -> bytes:
        """As bytes."""
        refusal = self.answer if isinstance(self.answer, Refusal) else Refusal("")
        head = {"party": self.party, "serial": self.serial, "note": dict(self.note), **self.nonce.told()}
        head |= {"code": refusal.code, "counts": dict(refusal.counts)}
        return _packed("partsong-reply", head, self.answer if isinstance(self.answer, Message) else Message({}))

    @staticmethod
    def read(data: bytes, most: int = MOST_BYTES) -> Reply:
        """From bytes."""
        keys = {"party", "serial", "note", "code", "counts", *_NONCE}
        head, body = _unpacked("partsong-reply", data, most, keys)
        code, counts, note = head["code"], head["counts"], head["note"]
        _require(type(head["serial"]) is int and 0 <= head["serial"] < MOST_NUMBER, "serial is no whole number")
        _require(isinstance(note, dict) and isinstance(counts, dict), "its note or counts are none")
        _require(all(type(n) is int and abs(n) < MOST_NUMBER for n in counts.values()), "its counts are none")
        _require(len(counts) <= MOST_COUNTS and all(map(CODE.fullmatch, counts)), "its counts have no names")
        _require(code == "" or (isinstance(code, str) and CODE.fullmatch(code) is not None), "its code is none")
        answer = Refusal(code, counts) if code else body
        return Reply(_name(head["party"]), _nonce(head), answer, head["serial"], note)


_NONCE = frozenset({"run", "round", "attempt", "kind", "phase"})


def _digest(head: list[Any], body: Message) -> str:
    arrays = sorted(body.arrays.items())
    forms = [[name, array.dtype.str, array.shape, array.flags.c_contiguous] for name, array in arrays]
    found = hashlib.sha256(json.dumps([*head, float(body.weight), forms], sort_keys=True).encode())
    for _, array in arrays:
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _packed(format_: str, head: Mapping[str, Any], body: Message) -> bytes:
    arrays = {name: _sendable(name, array) for name, array in sorted(body.arrays.items())}
    text = json.dumps(head, sort_keys=True, allow_nan=False)
    data: bytes = codec.encode((format_, text, Message(arrays, float(body.weight)))).tobytes()
    return data


def _sendable(name: str, array: Any) -> Any:
    try:
        values = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    except Exception as error:
        raise FormatError(f"Array {name!r} is {type(array).__name__}, which cannot be sent.") from error
    if not _is_native(values):
        raise FormatError(f"Array {name!r} is {values.dtype}, which cannot be sent. Use native numbers.")
    return values


def _is_native(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.char in NUMBERS and array.dtype.isnative


def _unpacked(format_: str, data: bytes, most: int, keys: set[str]) -> tuple[dict[str, Any], Message]:
    if len(data) > most:
        raise FormatError(f"A message of {len(data)} bytes was refused unread: at most {most} are taken.")
    _require(len(data) >= 8 and int.from_bytes(data[:8], "little") <= MOST_HEADER_BYTES, "it has no header")
    return _guarded(lambda: _parsed(bytes(data), format_, keys))


def _parsed(data: bytes, format_: str, keys: set[str]) -> tuple[dict[str, Any], Message]:
    found = codec.decode(data, only=("core.message",), numpy_only=True)
    _require(type(found) is tuple and len(found) == 3 and found[0] == format_, f"not a {format_}")
    _, text, body = found
    head = json.loads(text, parse_constant=_refuse)
    _require(isinstance(head, dict) and set(head) == keys, "its head has other fields")
    _require(isinstance(body, Message) and type(body.weight) is float, "its body is none")
    _require(all(type(name) is str for name in body.arrays), "an array has no name")
    _require(all(map(_is_native, body.arrays.values())), "an array holds no numbers")
    return head, body


def _nonce(head: Mapping[str, Any]) -> Nonce:
    _require(isinstance(head["run"], str), "its run is no name")
    kind = _guarded(lambda: Kind(head["kind"]))
    return Nonce(head["run"], head["round"], head["attempt"], kind, head["phase"])


def _name(name: Any) -> str:
    _require(isinstance(name, str) and 0 < len(name) <= 200, "its party is no name")
    return str(name)


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise FormatError(f"A message cannot be read: {what}. It is damaged, or from another version; ask for it anew.")


def _guarded(parse: Callable[[], Text]) -> Text:
    """Parsers of binary formats fail in every way there is on hostile bytes, so this catches all exceptions."""
    try:
        return parse()
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(
            f"A message cannot be read ({type(error).__name__}). It is damaged, or from another version; ask for it "
            "anew."
        ) from error


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


# ---- refusals ---------------------------------------------------------------------------------------------------
#
# Codes with which a site says no, and what they mean at the server; the reason, with names and values, stays there.

CODES: Mapping[str, str] = {
    "unreadable": "the request could not be read",
    "unsigned": "the request was not signed by the coordinator that the site has pinned",
    "not-addressed": "the request was for another party",
    "not-started": "the site does not know this run; it has to be started there first",
    "conflict": "another request was answered, or charged, under the same run, round, attempt and phase; or the "
    "attempts of a round are not about one model",
    "over": "the run is over at this site; nothing of it is worked on any more",
    "attempts": "more attempts of a round, or of all rounds of a run, were asked for than a run can need",
    "out-of-turn": "this phase is not the next one of the sum that the site is in",
    "out-of-step": "the server and the site disagree on which rounds have counted, or an old round was asked for",
    "round-closed": "a masked upload of this round has left the site; the round is not summed again",
    "company": "the sum continues a round, and would be over other parties than the one before",
    "behind": "the site's ledger is behind what the server has seen: it was restored from an older copy",
    "ledger": "the site's ledger or audit log was edited, removed, or does not cover the other, and it answers nothing "
    "until somebody has looked at it",
    "recipe": "the site's policy does not allow this recipe",
    "rounds": "the site's policy allows fewer rounds",
    "runs": "the site's policy allows no further run",
    "rows": "the site holds fewer rows than its policy asks for",
    "parties": "fewer parties are in the sum than the site's policy asks for",
    "masks": "the site's policy asks for masked sums",
    "mask-bound": "the bound of masked numbers is smaller than the site's policy asks for",
    "roster": "the parties are not those of the roster that the site has pinned, or one of them is not in it any more, "
    "or has another key there than when the run began",
    "shared-key": "the site hashes names of columns with another shared key than most sites, or with none",
    "columns": "the site lacks columns that the others have, or may not let them leave",
    "names": "the site does not tell names of columns to others",
    "texts": "the experiment is about texts and the site holds a table, or the other way round",
    "words": "the site's policy allows no run over texts, or asks for words in more documents or at more parties",
    "no-shared-key": "a run over texts needs the key that sites share, and the site has none",
    "no-words": "the site does not know on which words sites have agreed for this run",
    "no-columns": "the site's policy lets no column leave",
    "layout": "number type or columns of the site do not fit what was agreed on",
    "data": "the site's data are not fit for a run, or have changed since this one began",
    "model": "the model is none: not finite, negative, or too large",
    "exposure": "more combinations of the site's rows would leave without noise than its policy allows, over all runs",
    "answered": "the site has answered this model, or this seed, in an earlier run; begin the run with another seed",
    "experiment": "the experiment cannot be read, or its parts do not go together",
    "privacy-needed": "the site has a privacy budget, and the program adds no noise",
    "privacy-unit": "the program's promise is about another unit or relation than the site's ledger",
    "insecure-noise": "the program's noise comes from a seed, which the site's policy does not allow",
    "noiseless": "the site has released without noise before it had a privacy budget, which does not cover that",
    "budget": "the site's privacy budget is spent, over all runs",
    "diverged": "the site's numbers are not finite, or too large",
    "upload": "the site's upload is not what its program said it would be; under masks most often: it has a number "
    "beyond mask_bound",
    "too-few": "fewer parties than a sum needs in which each is hidden",
    "protocol": "the site does not accept what the server has sent in this sum",
    "storage": "the site could not read or write its own files",
    "settings": "site.toml, another file of the site's settings, or its data cannot be used as they are",
    "failed": "the site's work ended in an error",
}
"""Code -> what it means to somebody at the server."""

KINDS: Mapping[str, type[PartyError]] = {
    "budget": BudgetSpent,
    "diverged": DivergenceError,
    "upload": UploadError,
    "too-few": TooFewParties,
}


class Denied(PartsongError):
    """Raised at a site: the code that leaves it, the reason that does not, and counts that do."""

    def __init__(self, code: str, reason: str = "", counts: Mapping[str, int] | None = None) -> None:
        super().__init__(reason or code)
        self.refusal = Refusal(code, dict(counts or {}))


def refusal_of(error: PartsongError) -> Refusal:
    """What leaves a site where its work ends in an error of ours: a code, and nothing of its text."""
    if isinstance(error, Denied):
        return error.refusal
    kinds: tuple[tuple[type[PartsongError], str], ...] = (
        (BudgetSpent, "budget"),
        (DivergenceError, "diverged"),
        (UploadError, "upload"),
        (TooFewParties, "too-few"),
        (FormatError, "unreadable"),
        (FileError, "storage"),
        (FeatureError, "columns"),
        (CompositionError, "experiment"),
        (ParameterError, "experiment"),
    )
    return Refusal(next((code for kind, code in kinds if isinstance(error, kind)), "failed"))


def within_exposure(counts: Mapping[str, int]) -> str:
    """What a site says would be allowed; under masks it is rounded down to a power of two."""
    rounds, rank = counts.get("rounds", 0), counts.get("rank", 0)
    if not rounds and not rank:
        return "No exact round is allowed; use noise"
    allowed = [f"{rounds} rounds of this rank"] if rounds else []
    allowed += [f"rank {rank} in as many rounds"] if rank else []
    return f"At most {', or '.join(allowed)}, would be allowed"


def error_of(party: str, refusal: Refusal, index: int) -> PartyError:
    """The error at the server; one of a kind that callers know, where there is one."""
    kind = KINDS.get(refusal.code, SiteRefused)
    counts = "".join(f", {name}: {count}" for name, count in sorted(refusal.counts.items()))
    meaning = CODES.get(refusal.code, "a code that is not known here")
    if refusal.code == "exposure" and refusal.counts:
        meaning += f". {within_exposure(refusal.counts)}"
    return kind(
        f"Site {party!r} refuses in round {index} (code {refusal.code!r}{counts}): {meaning}. The reason is in the log "
        "of the site; ask there."
    )


# ---- states -----------------------------------------------------------------------------------------------------
#
# What a site or a server needs to go on after it was killed. A source of randomness is not written: its reader has it.

KIND = "federation"


def save_state(path: Path, state: Any, given: Mapping[str, Any] | None = None) -> None:
    """Write a state atomically, for its owner alone."""
    write_state(path, state, KIND, given)


def load_state(path: Path, kind: type[Stored], given: Mapping[str, Any] | None = None) -> Stored:
    """Read a state of this class."""
    try:
        found = read_state(path, KIND, given)
    except PartsongError as error:
        raise DamagedState(str(error)) from error
    if not isinstance(found, kind):
        raise DamagedState(f"{path}: holds {type(found).__name__}, not {kind.__name__}. Restore it from a backup.")
    return found


# ---- ways on ----------------------------------------------------------------------------------------------------
#
# What a coordinator can do about a site that did not answer as it was asked, by the code with which it has refused.

USUAL = (
    'Nothing is lost: resume the run once the site is back, or with faulty = "leave out" to go on without it where '
    "that is possible."
)
POLICY = frozenset({
    "recipe", "rounds", "runs", "rows", "parties", "masks", "mask-bound", "words", "no-columns", "texts", "experiment",
    "privacy-needed", "privacy-unit", "insecure-noise", "noiseless", "budget", "exposure",
})  # fmt: skip
"""Codes that the same experiment gets again, as long as the site's settings stay what they are."""
LOST = frozenset({"out-of-turn", "out-of-step"})
"""Codes of a site whose files of the run are older than the run."""
CLOSED = frozenset({"company", "round-closed", "conflict", "over", "attempts"})
"""Codes of a site that answers this request in no way any more."""
SPOILED: Mapping[str, str] = {
    "upload": "The log of the site says what is wrong with its upload. Where a number is beyond its public bound, that "
    'takes a larger mask_bound ("How large is mask_bound?" in docs/federation.md says how to choose it), and so a new '
    "run.",
    "diverged": "The log of the site says which numbers are not finite, or too large. Other settings (a smaller rate, "
    "say), or data that are scaled alike at all sites, take a new run.",
    "failed": "The log of the site says which error it was: have it mended there, then resume the run.",
}
"""Codes of what came to nothing by the site's own numbers or programs -> what it takes."""
OTHER_DATA: Mapping[str, str] = {
    "columns": "The log of the site says which of the agreed columns it lacks, or its site.toml does not let leave: "
    "resume the run once they are there again and may leave.",
    "data": "The log of the site says what its rows are not fit for, or that they are not those that the run began "
    "with: resume the run once that is mended there.",
    "layout": "The log of the site says how its rows or columns differ from what was agreed on: resume the run once "
    "that is mended there.",
}
"""Codes of a site whose data are not, or not any more, what the run is about -> after what it can be resumed."""
NOT_IN = "The run was never started there."
"""Why a site has no result that was not in a run."""


def way_on(refusal: Refusal | None, site: str, run: str) -> str:
    """A sentence or two; without a refusal the site was not heard, or what it sent was not used."""
    code = "" if refusal is None else refusal.code
    if code in POLICY:
        return (
            "Resuming the run cannot help as long as both stay as they are: change the experiment, or ask the steward "
            "of that site to change its site.toml. Once that allows the run, resume it as it is. A changed experiment "
            "may keep its name as long as no site has begun with the run; later it needs another --name, and another "
            "seed."
        )
    if code == "answered":
        return "Begin a new run, under another --name and with another seed, or without one: then it is drawn."
    if code == "roster":
        return (
            "Before a run has begun, all sites have to pin the same roster, which has its parties and no others "
            "(partsong federation join KIT --roster roster.toml); then resume it. A run that has begun cannot go on "
            "without one of its parties, or with another key of it: begin a new run, under another --name and with "
            "another seed."
        )
    if code in OTHER_DATA:
        return (
            f"{OTHER_DATA[code]} Where that is not to be, begin a new run, under another --name and with another seed; "
            'or resume this one with faulty = "leave out", which goes on without the site where that is possible.'
        )
    if code in LOST:
        return (
            f"The site has older files of this run (state/runs/{run}) than the server knows of. Resume the run once "
            'its newest files are back, or with faulty = "leave out" to go on without it where that is possible. A '
            "site that has lost all of them is started again by itself."
        )
    if code in CLOSED:
        return (
            'The site will say so again: resume the run with faulty = "leave out", which goes on without it where that '
            "is possible, or begin a new run, under another --name and with another seed."
        )
    if code in SPOILED:
        return (
            f"{SPOILED[code]} If the site says so again when the run is resumed, begin a new run, under another --name "
            "and with another seed: the rows and settings of a run that has begun stay what they are, and under masks "
            'work that came to nothing closes the run at that site. Or resume it with faulty = "leave out", which goes '
            "on without the site where that is possible."
        )
    return USUAL


def way_to_result(why: str) -> str:
    """How a site can come by what it lacks of a run that is done, by the text that says why it has no result."""
    if why == NOT_IN:
        return "A new run can have it in."
    if "(code 'not-started'" in why:
        return (
            "It does not have this run any more: its files are lost, or it has joined in a new folder. Only with its "
            "own files back could it be told the end; else a new run can have it in."
        )
    return "Once it is back, --resume tells it the end again."
