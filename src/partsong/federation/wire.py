"""Wire format of requests and replies between server and sites, refusal codes, and state files.

A message is the `core.codec` encoding of (format name, header as JSON, Message). Anything else is a FormatError. The
parser allocates no more than the bytes it was given.
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
    format_count,
)
from partsong.federation.transports.base import MAX_MESSAGE_BYTES
from partsong.io.state_file import read_state, write_state

# ---- wire -------------------------------------------------------------------------------------------------------

MAX_HEADER_BYTES = 1 << 22
MAX_INTEGER = 1 << 53
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Pattern of run names. A run's name is also the name of its folder."""
CODE_PATTERN = "[a-z][a-z-]{0,39}"
"""Pattern of refusal codes and of the names of their counts. Both are shown to people at the server."""
Serial = Annotated[int, Meta(ge=0, lt=MAX_INTEGER)]
DTYPE_CODES = frozenset("?bhilqBHILQefd")

AnyHead = TypeVar("AnyHead", bound="Head")
Stored = TypeVar("Stored")


class Kind(enum.StrEnum):
    """Kind of request to a site."""

    HELLO = "hello"
    START = "start"
    NAMES = "names"
    WORK = "work"
    REDUCE = "reduce"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class Nonce:
    """Identifies a message. For work and for each phase of a sum, a site sends one payload per nonce."""

    run: str
    round: int = 0
    attempt: int = 0
    kind: Kind = Kind.HELLO
    phase: int = 0

    def __post_init__(self) -> None:
        counts = (self.round, self.attempt, self.phase)
        if not RUN_NAME.fullmatch(self.run) or not all(0 <= number < MAX_INTEGER for number in counts):
            raise FormatError(
                "A message needs the name of its run (letters, digits, dots and dashes, at most 64) and whole numbers "
                f"for round, attempt and phase; got {str(self.run)[:64]!r}, {counts}."
            )

    def to_dict(self) -> dict[str, Any]:
        numbers = {"round": self.round, "attempt": self.attempt, "phase": self.phase}
        return {"run": self.run, "kind": str(self.kind), **numbers}


@dataclass(frozen=True, slots=True)
class Request:
    """A request to one party: the model (work) or the server's answer to the previous phase (reduce), and plain values.

    `seen` is the largest serial number that the server has received from this party.
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
        """SHA-256 of everything but `seen`. Two requests with one nonce are the same request if their digests agree."""
        return _digest([self.party, self.nonce.to_dict(), dict(self.note)], self.body)

    @property
    def model_digest(self) -> str:
        """SHA-256 of the model and the history that work starts from. All attempts of a round have the same one."""
        return _digest([self.note.get("counted")], self.body)

    @property
    def factor_digest(self) -> str | None:
        """SHA-256 of H in float32, regardless of other arrays of the model; None if the model has no H."""
        H = self.body.arrays.get("H")
        if H is None:
            return None
        values = np.ascontiguousarray(np.asarray(H), np.float32)
        return hashlib.sha256(f"{values.shape}".encode() + values.tobytes()).hexdigest()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a site refuses: a code, and possibly some counts. The reason itself stays in the site's log."""

    code: str
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of one party to one request. `serial` counts the releases in its ledger, over all runs."""

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
    """Header fields that requests and replies share."""

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
    """Header of a request."""

    seen: Serial


class ReplyHead(Head):
    """Header of a reply. `code` is empty unless it is a refusal. Codes and counts are shown at the server."""

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
        raise FormatError(
            f"Array {name!r} is a {type(array).__name__}, which cannot be sent. Use a NumPy array or a torch tensor."
        ) from error
    if not _is_native(values):
        raise FormatError(
            f"Array {name!r} is {values.dtype}, which cannot be sent. Use a numeric dtype in native byte order."
        )
    return values


def _is_native(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.char in DTYPE_CODES and array.dtype.isnative


def _decode(format_: str, data: bytes, max_bytes: int, kind: type[AnyHead]) -> tuple[AnyHead, Message]:
    if len(data) > max_bytes:
        raise FormatError(f"A message of {len(data)} bytes was refused unread: the limit is {max_bytes} bytes.")
    try:
        _require(len(data) >= 8 and int.from_bytes(data[:8], "little") <= MAX_HEADER_BYTES, "it has no header")
        found = codec.decode(bytes(data), only=("core.message",), numpy_only=True)
        _require(type(found) is tuple and len(found) == 3 and found[0] == format_, f"not a {format_}")
        _, text, body = found
        head = msgspec.convert(json.loads(text, parse_constant=_reject_constant), kind)
        _require(isinstance(body, Message) and type(body.weight) is float, "its body is not a message")
        _require(all(type(name) is str for name in body.arrays), "an array has no name")
        _require(all(map(_is_native, body.arrays.values())), "an array is not numeric")
    except FormatError:
        raise
    except Exception as error:  # on hostile bytes, binary parsers raise anything
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
    raise ValueError(f"{name} is not a JSON number")


# ---- refusals ---------------------------------------------------------------------------------------------------
#
# A site refuses with a code. The reason, with names and values, stays at the site. The coordinator sees what the code
# means and one action.

NEW_RUN = "start a new run with another --name and another seed"
SKIP_SITE = 'with on_party_error = "skip", which continues without the site where possible'

RESUME = (
    'Nothing is lost. Resume the run once the site is back, or with on_party_error = "skip" to continue without it '
    "where possible."
)
SAME_VERSION = (
    "Install the same version of partsong at the server and at the site (pip install --upgrade partsong), then resume "
    "the run."
)
SAME_EXPERIMENT = (
    "The site's log names the key. If the site's partsong does not know it, install the same version at the server and "
    f"at the site, then resume the run. Otherwise change the experiment and {NEW_RUN}."
)
CHANGE_POLICY = (
    "The site's policy rejects this experiment. Change the experiment, or ask the site to update site.toml, then "
    "resume. A changed experiment may keep its --name if no site has started the run. Otherwise it needs another "
    "--name and another seed."
)
NEW_SEED = "Start a new run with another --name. Set another seed, or none: partsong then draws one."
SAME_ROSTER = (
    "If the run has not started: let all sites pin the same roster with exactly the parties of the run (partsong "
    "federation join KIT --roster roster.toml), then resume it. If it has started, it cannot continue without one of "
    f"its parties or with a new key of one: {NEW_RUN}."
)
NEWEST_FILES = (
    "The site's files of this run (state/runs/NAME) are older than the server expects. Restore the newest files, then "
    f"resume the run; or resume it {SKIP_SITE}. A site without any of them is restarted automatically."
)
FINAL_REFUSAL = f"The site will refuse again. Resume the run {SKIP_SITE}, or {NEW_RUN}."


RESTORE_DATA = (
    "Restore the rows and columns with which the run started, allow them in site.toml, then resume the run. Otherwise "
    f"{NEW_RUN}, or resume this one {SKIP_SITE}."
)
REPAIR = (
    f"Fix the cause at the site, then resume the run. If the site refuses again, {NEW_RUN}: rows and settings of a "
    "started run are fixed, and with secure aggregation failed work closes the run at that site. Or resume it "
    f"{SKIP_SITE}."
)
LARGER_BOUND = (
    'An entry beyond the public bound needs a larger mask_bound, and so a new run ("How large is mask_bound?" in '
    f"docs/guide/federation.md). {REPAIR}"
)

CODES: Mapping[str, tuple[str, str]] = {
    "unreadable": ("the request could not be read: it is damaged, or from another version of partsong", SAME_VERSION),
    "unsigned": ("the request is not signed by the coordinator whose key the site has pinned", RESUME),
    "not-addressed": ("the request is addressed to another party", RESUME),
    "not-started": ("the site does not know this run, which has to be started there first", RESUME),
    "conflict": (
        "a different request was already answered or charged for the same run, round, attempt and phase; or the "
        "attempts of a round have different models",
        FINAL_REFUSAL,
    ),
    "over": ("the run is over at this site", FINAL_REFUSAL),
    "attempts": (
        "the server has requested more attempts of a round, or of the whole run, than a run can need",
        FINAL_REFUSAL,
    ),
    "out-of-turn": ("this phase is not the next phase of the site's current sum", NEWEST_FILES),
    "out-of-step": (
        "the server and the site disagree on which rounds count, or the server has requested an old round",
        NEWEST_FILES,
    ),
    "round-closed": (
        "a masked upload of this round has left the site, and the round is not summed again",
        FINAL_REFUSAL,
    ),
    "cohort": ("the sum continues a round, but over other parties than the sum before it", FINAL_REFUSAL),
    "behind": ("the site's ledger is behind what the server has seen: it was restored from an older backup", RESUME),
    "ledger": (
        "the site's ledger or audit log was edited or removed, or the two disagree; the site refuses every request "
        "until its steward has repaired them",
        RESUME,
    ),
    "method": ("the site's policy does not allow this method", CHANGE_POLICY),
    "rounds": ("the site's policy allows fewer rounds", CHANGE_POLICY),
    "runs": ("the site's policy allows no further run", CHANGE_POLICY),
    "rows": ("the site has fewer rows than its policy requires", CHANGE_POLICY),
    "parties": ("the sum has fewer parties than the site's policy requires", CHANGE_POLICY),
    "masks": ("the site's policy requires secure aggregation", CHANGE_POLICY),
    "mask-bound": ("mask_bound is smaller than the site's policy requires", CHANGE_POLICY),
    "roster": (
        "the parties differ from the roster that the site has pinned; or one was removed from it, or has another key, "
        "since the run started",
        SAME_ROSTER,
    ),
    "shared-key": (
        "the site hashes column names with a shared key that differs from that of most sites, or with none",
        RESUME,
    ),
    "columns": ("the site lacks columns that the others have, or its policy does not release them", RESTORE_DATA),
    "names": ("the site does not send column names to other sites", RESUME),
    "texts": ("the experiment needs texts and the site has a table, or the reverse", CHANGE_POLICY),
    "words": (
        "the site's policy allows no runs over texts, or requires words to be in more documents or at more parties",
        CHANGE_POLICY,
    ),
    "no-shared-key": ("a run over texts needs the shared key, and the site has none", RESUME),
    "no-words": ("the site does not have the agreed words of this run", RESUME),
    "no-columns": ("the site's policy releases no column", CHANGE_POLICY),
    "layout": ("the dtype, rows or columns of the site differ from those agreed for the run", RESTORE_DATA),
    "data": ("the site's data are invalid, or have changed since the run started", RESTORE_DATA),
    "model": ("the model has entries that are not finite, negative or too large", RESUME),
    "exposure": (
        "over all runs, more combinations of the site's rows would leave without noise than its policy allows",
        CHANGE_POLICY,
    ),
    "answered": (
        "the site has answered this model or this seed in an earlier run; start the run with another seed",
        NEW_SEED,
    ),
    "experiment": ("the site cannot read the experiment, or its settings are incompatible", SAME_EXPERIMENT),
    "privacy-needed": ("the site has a privacy budget, but the program adds no noise", CHANGE_POLICY),
    "privacy-unit": (
        "the program's privacy guarantee has another unit or relation than the site's ledger",
        CHANGE_POLICY,
    ),
    "insecure-noise": ("the program draws noise from a seed, which the site's policy does not allow", CHANGE_POLICY),
    "noiseless": (
        "the site has released without noise, which its privacy budget does not cover",
        CHANGE_POLICY,
    ),
    "budget": ("the site's privacy budget, over all runs, is exhausted", CHANGE_POLICY),
    "diverged": ("the site's work diverged: its numbers are not finite or too large", REPAIR),
    "upload": (
        "the site's upload does not match the program; with secure aggregation, usually an entry is beyond mask_bound",
        LARGER_BOUND,
    ),
    "too-few": ("too few parties for a sum that hides each of them", RESUME),
    "protocol": ("the site rejects what the server has sent for this sum", RESUME),
    "storage": ("the site could not read or write its own files", RESUME),
    "settings": ("site.toml, another settings file of the site, or its data is invalid", RESUME),
    "failed": ("the site's work failed", REPAIR),
}
"""Code -> its meaning for the coordinator, and what to do."""

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
"""Error of the work at a site -> the code that it sends. The server raises the first four again."""


class RequestRefused(PartsongError):
    """Raised at a site to refuse a request. The code and the counts are sent; the reason stays at the site."""

    def __init__(self, code: str, reason: str = "", counts: Mapping[str, int] | None = None) -> None:
        super().__init__(reason or code)
        self.refusal = Refusal(code, dict(counts or {}))


def refusal_from_error(error: PartsongError) -> Refusal:
    """Return the refusal that a site sends for an error: a code, and nothing of the error's text."""
    if isinstance(error, RequestRefused):
        return error.refusal
    return Refusal(next((code for kind, code in CODES_BY_ERROR.items() if isinstance(error, kind)), "failed"))


ALL_ROWS_KEY = "all-rows"
"""Count of a refusal: the upload shows all rows, however few rounds and components there are."""


def exposure_advice(counts: Mapping[str, int]) -> str:
    """Describe what the exposure limit would allow. With secure aggregation it is rounded down to a power of two."""
    rounds, rank = counts.get("rounds", 0), counts.get("rank", 0)
    if ALL_ROWS_KEY in counts:
        return "XᵀX without noise counts as all rows; use noise (a table privacy) or another method"
    if not rounds and not rank:
        return "No round without noise is allowed; use noise"
    allowed = [f"{format_count(rounds, 'round')} of this rank"] if rounds else []
    allowed += [f"rank {rank} in as many rounds"] if rank else []
    return f"At most {' or '.join(allowed)} would be allowed"


def error_from_refusal(party: str, refusal: Refusal, index: int) -> PartyError:
    """Return the error that the server raises for a refusal: of the site's own class if it is in CODES_BY_ERROR."""
    kind = next(
        (kind for kind, code in CODES_BY_ERROR.items() if code == refusal.code and issubclass(kind, PartyError)), None
    )
    counts = "".join(f", {name}: {count}" for name, count in sorted(refusal.counts.items()))
    meaning, _ = CODES.get(refusal.code, ("this code is not known here", SAME_VERSION))
    if refusal.code == "exposure" and refusal.counts:
        meaning += f". {exposure_advice(refusal.counts)}"
    return (kind or SiteRefused)(
        f"Site {party!r} refuses in round {index} (code {refusal.code!r}{counts}): {meaning}. The reason is in the "
        "site's log; ask the site."
    )


def recovery_advice(refusal: Refusal | None) -> str:
    """Say what to do about a site that refused. None: the site did not reply, or its reply was unusable."""
    return RESUME if refusal is None else CODES.get(refusal.code, ("", SAME_VERSION))[1]


NEVER_STARTED = "The run was never started there."
"""Why a site that was not in a run has no result."""


def missing_result_advice(why: str) -> str:
    """Say how a site can get the result of a finished run, given the reason why it has none."""
    if why == NEVER_STARTED:
        return "Include it in a new run."
    if "(code 'not-started'" in why:
        return (
            "It no longer has this run: its files are lost, or it has joined in a new folder. Restore its files, then "
            "resume; or include it in a new run."
        )
    return "Once it is back, --resume sends it the final model again."


# ---- states -----------------------------------------------------------------------------------------------------
#
# What a site or a server needs to resume after it was killed. The source of randomness is passed in by the reader, and
# not written.

STATE_KIND = "federation"


def save_state(path: Path, state: Any, given: Mapping[str, Any] | None = None) -> None:
    """Write a state atomically, readable by its owner only."""
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
    """Read a state of this class; None if there is no file."""
    return load_state(path, kind, given) if path.exists() else None
