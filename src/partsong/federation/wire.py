"""What is asked of a site and what it answers, as bytes: `core.codec` of (format, head as JSON, Message).

Whatever is not exactly that is a FormatError; nothing is allocated beyond the bytes that were given.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

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
from partsong.federation.transports.base import MAX_MESSAGE_BYTES
from partsong.io.state_file import read_state, write_state

# ---- wire -------------------------------------------------------------------------------------------------------

MAX_HEADER_BYTES = 1 << 22
MAX_INTEGER = 1 << 53
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What the name of a run looks like; it is also the name of a folder."""
CODE_PATTERN = "[a-z][a-z-]{0,39}"
"""What codes, and names of counts beside them, look like: they are told to people at the server."""
Serial = Annotated[int, Meta(ge=0, lt=MAX_INTEGER)]
DTYPE_CODES = frozenset("?bhilqBHILQefd")

AnyHead = TypeVar("AnyHead", bound="Head")
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
        if not RUN_NAME.fullmatch(self.run) or not all(0 <= number < MAX_INTEGER for number in counts):
            raise FormatError(
                f"A message is known by the name of its run (letters, digits, dots and dashes, at most 64) and whole "
                f"numbers; got {str(self.run)[:64]!r}, {counts}."
            )

    def to_dict(self) -> dict[str, Any]:
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

    def to_bytes(self) -> bytes:
        head = {"party": self.party, "seen": self.seen, "note": dict(self.note), **self.nonce.to_dict()}
        return _encode("partsong-request", head, self.body)

    @staticmethod
    def from_bytes(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Request:
        head, body = _decode("partsong-request", data, max_bytes, RequestHead)
        return Request(head.party, head.nonce, body, head.note, head.seen)

    @property
    def digest(self) -> str:
        """SHA-256 of all but `seen`: two requests under one nonce are the same request if this is the same."""
        return _digest([self.party, self.nonce.to_dict(), dict(self.note)], self.body)

    @property
    def model_digest(self) -> str:
        """SHA-256 of the model and the history that work begins from: the same in all attempts of a round."""
        return _digest([self.note.get("counted")], self.body)

    @property
    def factor_digest(self) -> str | None:
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

    def to_bytes(self) -> bytes:
        refusal = self.answer if isinstance(self.answer, Refusal) else Refusal("")
        head = {"party": self.party, "serial": self.serial, "note": dict(self.note), **self.nonce.to_dict()}
        head |= {"code": refusal.code, "counts": dict(refusal.counts)}
        return _encode("partsong-reply", head, self.answer if isinstance(self.answer, Message) else Message({}))

    @staticmethod
    def from_bytes(data: bytes, max_bytes: int = MAX_MESSAGE_BYTES) -> Reply:
        head, body = _decode("partsong-reply", data, max_bytes, ReplyHead)
        answer = Refusal(head.code, head.counts) if head.code else body
        return Reply(head.party, head.nonce, answer, head.serial, head.note)


class Head(msgspec.Struct, forbid_unknown_fields=True):
    """What requests and replies have in common beside arrays."""

    party: Annotated[str, Meta(min_length=1, max_length=200)]
    note: dict[str, Any]
    run: str
    round: int
    attempt: int
    kind: Kind
    phase: int

    @property
    def nonce(self) -> Nonce:
        return Nonce(self.run, self.round, self.attempt, self.kind, self.phase)


class RequestHead(Head):
    """A request without its arrays."""

    seen: Serial


class ReplyHead(Head):
    """A reply without its arrays; `code` is empty where it is no refusal. Codes and counts are shown at the server."""

    serial: Serial
    code: Annotated[str, Meta(pattern=rf"\A({CODE_PATTERN})?\Z")]
    counts: Annotated[
        dict[
            Annotated[str, Meta(pattern=rf"\A{CODE_PATTERN}\Z")], Annotated[int, Meta(gt=-MAX_INTEGER, lt=MAX_INTEGER)]
        ],
        Meta(max_length=8),
    ]


def _digest(head: list[Any], body: Message) -> str:
    arrays = sorted(body.arrays.items())
    forms = [[name, array.dtype.str, array.shape, array.flags.c_contiguous] for name, array in arrays]
    found = hashlib.sha256(json.dumps([*head, float(body.weight), forms], sort_keys=True).encode())
    for _, array in arrays:
        found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.hexdigest()


def _encode(format_: str, head: Mapping[str, Any], body: Message) -> bytes:
    arrays = {name: _to_sendable_array(name, array) for name, array in sorted(body.arrays.items())}
    text = json.dumps(head, sort_keys=True, allow_nan=False)
    data: bytes = codec.encode((format_, text, Message(arrays, float(body.weight)))).tobytes()
    return data


def _to_sendable_array(name: str, array: Any) -> Any:
    try:
        values = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
    except Exception as error:
        raise FormatError(f"Array {name!r} is {type(array).__name__}, which cannot be sent.") from error
    if not _is_native(values):
        raise FormatError(f"Array {name!r} is {values.dtype}, which cannot be sent. Use native numbers.")
    return values


def _is_native(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.char in DTYPE_CODES and array.dtype.isnative


def _decode(format_: str, data: bytes, max_bytes: int, kind: type[AnyHead]) -> tuple[AnyHead, Message]:
    if len(data) > max_bytes:
        raise FormatError(f"A message of {len(data)} bytes was refused unread: at most {max_bytes} are taken.")
    try:
        _require(len(data) >= 8 and int.from_bytes(data[:8], "little") <= MAX_HEADER_BYTES, "it has no header")
        found = codec.decode(bytes(data), only=("core.message",), numpy_only=True)
        _require(type(found) is tuple and len(found) == 3 and found[0] == format_, f"not a {format_}")
        _, text, body = found
        head = msgspec.convert(json.loads(text, parse_constant=_reject_constant), kind)
        _require(isinstance(body, Message) and type(body.weight) is float, "its body is none")
        _require(all(type(name) is str for name in body.arrays), "an array has no name")
        _require(all(map(_is_native, body.arrays.values())), "an array holds no numbers")
    except FormatError:
        raise
    except Exception as error:  # parsers of binary formats fail in every way there is on hostile bytes
        raise _unreadable_error(
            str(error) if isinstance(error, msgspec.ValidationError) else type(error).__name__
        ) from error
    return head, body


def _require(is_so: bool, what: str) -> None:
    if not is_so:
        raise _unreadable_error(what)


def _unreadable_error(what: str) -> FormatError:
    return FormatError(
        f"A message cannot be read: {what[:200]}. It is damaged, or from another version of partsong. Install the same "
        "version at the server and at all sites."
    )


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


# ---- refusals ---------------------------------------------------------------------------------------------------
#
# A site says no by a code; the reason, with names and values, stays there. The coordinator is told what the code means,
# and one way on.

NEW_RUN = "begin a new run, under another --name and with another seed"
SKIP_SITE = 'with on_party_error = "skip", which goes on without the site where that is possible'

RESUME = (
    'Nothing is lost: resume the run once the site is back, or with on_party_error = "skip" to go on without it where '
    "that is possible."
)
SAME_VERSION = (
    "Install the same version of partsong at the server and at the site (pip install --upgrade partsong), then resume "
    "the run."
)
SAME_EXPERIMENT = (
    "The log of the site names the key. Where the partsong there does not know it, install the same version at the "
    f"server and at the site, then resume the run. Else change the experiment, and {NEW_RUN}."
)
CHANGE_POLICY = (
    "Resuming the run cannot help as long as both stay as they are: change the experiment, or ask the steward of that "
    "site to change its site.toml. Once that allows the run, resume it as it is. A changed experiment may keep its "
    "name as long as no site has begun with the run; later it needs another --name, and another seed."
)
NEW_SEED = "Begin a new run, under another --name and with another seed, or without one: then it is drawn."
SAME_ROSTER = (
    "Before a run has begun, all sites have to pin the same roster, which has its parties and no others (partsong "
    "federation join KIT --roster roster.toml); then resume it. A run that has begun cannot go on without one of its "
    f"parties, or with another key of it: {NEW_RUN}."
)
NEWEST_FILES = (
    "The site has older files of this run (state/runs/NAME) than the server knows of. Resume the run once its newest "
    f"files are back, or {SKIP_SITE}. A site that has lost all of them is started again by itself."
)
FINAL_REFUSAL = f"The site will say so again: resume the run {SKIP_SITE}, or {NEW_RUN}."


RESTORE_DATA = (
    "Resume the run once its rows and columns are those of the run again, and may leave. Where that is not to be, "
    f"{NEW_RUN}; or resume this one {SKIP_SITE}."
)
REPAIR = (
    f"Have it mended there, then resume the run. If the site says so again when the run is resumed, {NEW_RUN}: the "
    "rows and settings of a run that has begun stay what they are, and under masks work that came to nothing closes "
    f"the run at that site. Or resume it {SKIP_SITE}."
)
LARGER_BOUND = (
    'A number beyond its public bound takes a larger mask_bound ("How large is mask_bound?" in docs/guide/federation.md'
    f" says how to choose it), and so a new run. {REPAIR}"
)

CODES: Mapping[str, tuple[str, str]] = {
    "unreadable": ("the request could not be read: it is damaged, or from another version of partsong", SAME_VERSION),
    "unsigned": ("the request was not signed by the coordinator that the site has pinned", RESUME),
    "not-addressed": ("the request was for another party", RESUME),
    "not-started": ("the site does not know this run; it has to be started there first", RESUME),
    "conflict": (
        "another request was answered, or charged, under the same run, round, attempt and phase; or the attempts "
        "of a round are not about one model",
        FINAL_REFUSAL,
    ),
    "over": ("the run is over at this site; nothing of it is worked on any more", FINAL_REFUSAL),
    "attempts": (
        "more attempts of a round, or of all rounds of a run, were asked for than a run can need",
        FINAL_REFUSAL,
    ),
    "out-of-turn": ("this phase is not the next one of the sum that the site is in", NEWEST_FILES),
    "out-of-step": (
        "the server and the site disagree on which rounds have counted, or an old round was asked for",
        NEWEST_FILES,
    ),
    "round-closed": ("a masked upload of this round has left the site; the round is not summed again", FINAL_REFUSAL),
    "company": ("the sum continues a round, and would be over other parties than the one before", FINAL_REFUSAL),
    "behind": ("the site's ledger is behind what the server has seen: it was restored from an older copy", RESUME),
    "ledger": (
        "the site's ledger or audit log was edited, removed, or does not cover the other, and it answers nothing "
        "until somebody has looked at it",
        RESUME,
    ),
    "recipe": ("the site's policy does not allow this recipe", CHANGE_POLICY),
    "rounds": ("the site's policy allows fewer rounds", CHANGE_POLICY),
    "runs": ("the site's policy allows no further run", CHANGE_POLICY),
    "rows": ("the site holds fewer rows than its policy asks for", CHANGE_POLICY),
    "parties": ("fewer parties are in the sum than the site's policy asks for", CHANGE_POLICY),
    "masks": ("the site's policy asks for masked sums", CHANGE_POLICY),
    "mask-bound": ("the bound of masked numbers is smaller than the site's policy asks for", CHANGE_POLICY),
    "roster": (
        "the parties are not those of the roster that the site has pinned, or one of them is not in it any more, "
        "or has another key there than when the run began",
        SAME_ROSTER,
    ),
    "shared-key": ("the site hashes names of columns with another shared key than most sites, or with none", RESUME),
    "columns": ("the site lacks columns that the others have, or may not let them leave", RESTORE_DATA),
    "names": ("the site does not tell names of columns to others", RESUME),
    "texts": ("the experiment is about texts and the site holds a table, or the other way round", CHANGE_POLICY),
    "words": (
        "the site's policy allows no run over texts, or asks for words in more documents or at more parties",
        CHANGE_POLICY,
    ),
    "no-shared-key": ("a run over texts needs the key that sites share, and the site has none", RESUME),
    "no-words": ("the site does not know on which words sites have agreed for this run", RESUME),
    "no-columns": ("the site's policy lets no column leave", CHANGE_POLICY),
    "layout": ("number type or columns of the site do not fit what was agreed on", RESTORE_DATA),
    "data": ("the site's data are not fit for a run, or have changed since this one began", RESTORE_DATA),
    "model": ("the model is none: not finite, negative, or too large", RESUME),
    "exposure": (
        "more combinations of the site's rows would leave without noise than its policy allows, over all runs",
        CHANGE_POLICY,
    ),
    "answered": (
        "the site has answered this model, or this seed, in an earlier run; begin the run with another seed",
        NEW_SEED,
    ),
    "experiment": ("the experiment cannot be read there, or its parts do not go together", SAME_EXPERIMENT),
    "privacy-needed": ("the site has a privacy budget, and the program adds no noise", CHANGE_POLICY),
    "privacy-unit": ("the program's promise is about another unit or relation than the site's ledger", CHANGE_POLICY),
    "insecure-noise": ("the program's noise comes from a seed, which the site's policy does not allow", CHANGE_POLICY),
    "noiseless": (
        "the site has released without noise before it had a privacy budget, which does not cover that",
        CHANGE_POLICY,
    ),
    "budget": ("the site's privacy budget is spent, over all runs", CHANGE_POLICY),
    "diverged": ("the site's numbers are not finite, or too large", REPAIR),
    "upload": (
        "the site's upload is not what its program said it would be; under masks most often: it has a number "
        "beyond mask_bound",
        LARGER_BOUND,
    ),
    "too-few": ("fewer parties than a sum needs in which each is hidden", RESUME),
    "protocol": ("the site does not accept what the server has sent in this sum", RESUME),
    "storage": ("the site could not read or write its own files", RESUME),
    "settings": ("site.toml, another file of the site's settings, or its data cannot be used as they are", RESUME),
    "failed": ("the site's work ended in an error", REPAIR),
}
"""Code -> what it means to the coordinator, and what to do."""

CODES_BY_ERROR: Mapping[type[PartsongError], str] = {
    BudgetSpent: "budget",
    DivergenceError: "diverged",
    UploadError: "upload",
    TooFewParties: "too-few",
    FormatError: "unreadable",
    FileError: "storage",
    FeatureError: "columns",
    CompositionError: "experiment",
    ParameterError: "experiment",
}
"""What work at a site may end in -> the code that leaves it. The first four are raised again at the server."""


class RequestRefused(PartsongError):
    """Raised at a site: the code that leaves it, the reason that does not, and counts that do."""

    def __init__(self, code: str, reason: str = "", counts: Mapping[str, int] | None = None) -> None:
        super().__init__(reason or code)
        self.refusal = Refusal(code, dict(counts or {}))


def refusal_from_error(error: PartsongError) -> Refusal:
    """What leaves a site where its work ends in an error of ours: a code, and nothing of its text."""
    if isinstance(error, RequestRefused):
        return error.refusal
    return Refusal(next((code for kind, code in CODES_BY_ERROR.items() if isinstance(error, kind)), "failed"))


def exposure_advice(counts: Mapping[str, int]) -> str:
    """What a site says would be allowed; under masks it is rounded down to a power of two."""
    rounds, rank = counts.get("rounds", 0), counts.get("rank", 0)
    if not rounds and not rank:
        return "No exact round is allowed; use noise"
    allowed = [f"{rounds} rounds of this rank"] if rounds else []
    allowed += [f"rank {rank} in as many rounds"] if rank else []
    return f"At most {', or '.join(allowed)}, would be allowed"


def error_from_refusal(party: str, refusal: Refusal, index: int) -> PartyError:
    """The error at the server; one of a kind that callers know, where there is one."""
    kind = next(
        (kind for kind, code in CODES_BY_ERROR.items() if code == refusal.code and issubclass(kind, PartyError)), None
    )
    counts = "".join(f", {name}: {count}" for name, count in sorted(refusal.counts.items()))
    meaning, _ = CODES.get(refusal.code, ("a code that is not known here", SAME_VERSION))
    if refusal.code == "exposure" and refusal.counts:
        meaning += f". {exposure_advice(refusal.counts)}"
    return (kind or SiteRefused)(
        f"Site {party!r} refuses in round {index} (code {refusal.code!r}{counts}): {meaning}. The reason is in the log "
        "of the site; ask there."
    )


def recovery_advice(refusal: Refusal | None) -> str:
    """What to do about a site that has refused; without a refusal it was not heard, or what it sent was not used."""
    return RESUME if refusal is None else CODES.get(refusal.code, ("", SAME_VERSION))[1]


NEVER_STARTED = "The run was never started there."
"""Why a site has no result that was not in a run."""


def missing_result_advice(why: str) -> str:
    """How a site can come by what it lacks of a run that is done, by the text that says why it has no result."""
    if why == NEVER_STARTED:
        return "A new run can have it in."
    if "(code 'not-started'" in why:
        return (
            "It does not have this run any more: its files are lost, or it has joined in a new folder. Only with its "
            "own files back could it be told the end; else a new run can have it in."
        )
    return "Once it is back, --resume tells it the end again."


# ---- states -----------------------------------------------------------------------------------------------------
#
# What a site or a server needs to go on after it was killed. A source of randomness is not written: its reader has it.

STATE_KIND = "federation"


def save_state(path: Path, state: Any, given: Mapping[str, Any] | None = None) -> None:
    """Write a state atomically, for its owner alone."""
    write_state(path, state, STATE_KIND, given)


def load_state(path: Path, kind: type[Stored], given: Mapping[str, Any] | None = None) -> Stored:
    """Read a state of this class."""
    try:
        found = read_state(path, STATE_KIND, given)
    except PartsongError as error:
        raise DamagedState(str(error)) from error
    if not isinstance(found, kind):
        raise DamagedState(f"{path}: holds {type(found).__name__}, not {kind.__name__}. Restore it from a backup.")
    return found


def find_state(path: Path, kind: type[Stored], given: Mapping[str, Any] | None = None) -> Stored | None:
    """Read a state of this class; None where there is no file."""
    return load_state(path, kind, given) if path.exists() else None
