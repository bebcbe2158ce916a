"""What an observer of a run has in hand: the uploads, and the models that they answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from partsong.attacks.findings import Finding
from partsong.attacks.moment import unit_of
from partsong.core.interfaces import Array, Layout, Message, Program, Shard
from partsong.data.conversion import as_matrix
from partsong.errors import FileError, FormatError, ParameterError
from partsong.io.model_file import FileKind, read_tensors

# ---- leakage transcript -----------------------------------------------------------------------------------------

Traffic = Sequence[tuple[str, int, Message]]
"""What one round sent, as in `Round.traffic`: party, phase of the reduction, message."""

LIST, KIND = "traffic.jsonl", FileKind("partsong-traffic", 1, is_private=True)
MOST_ROUNDS = 10**6
"""A list that names a later round is not one of ours."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """What parties sent in one round, and the model that each of them had been sent before.

    `total` is the sum of what they sent, where it is all that is known: `uploads` then lack those that are hidden.
    `unheard` have worked on the same model, and are not in the sum: they fell silent before their upload was there.
    """

    models: Mapping[str, Message]
    uploads: Mapping[str, Message]
    total: Message | None = None
    unheard: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """The recorded traffic of a run, round by round; who took part, and the number of columns where that is told."""

    traffic: Sequence[Traffic]
    parties: tuple[str, ...]
    n_features: int | None


def transcript(traffic: Iterable[Traffic], program: Program, layout: Layout, *, asynchronous: bool) -> list[Exchange]:
    """The exchanges of a run from its first round on, with the server's part done again from the uploads alone.

    Every server can: its start comes from the shared seed. Of an asynchronous run a party's model is the answer to its
    own last upload, else the latest one. Empty where uploads are masked.
    """
    server, model = program.start_server(layout)
    answered = dict.fromkeys(layout.parties, model)
    exchanges: list[Exchange] = []
    for number, sent in enumerate(traffic):
        uploads = {party: message for party, phase, message in sent if phase == 0}
        if not uploads:
            continue
        _require_known(uploads, layout)
        if not all(is_readable(message, program, layout) for message in uploads.values()):
            return []
        models = {party: answered[party] if asynchronous else model for party in uploads}
        exchanges.append(Exchange(models, uploads))
        before = models[min(uploads)] if asynchronous else model
        try:
            aggregate = program.aggregation([uploads[party] for party in sorted(uploads)], before)
            server, model = program.finish(server, aggregate)
        except (ArithmeticError, KeyError, IndexError, ValueError, RuntimeError) as error:
            raise ParameterError(
                f"The uploads of round {number} do not follow from those before, as this program would have them: "
                f"{error} Give all rounds of one run from the first on, with its own program and layout."
            ) from error
        answered.update(dict.fromkeys(uploads, model))
    return exchanges


def is_readable(message: Message, program: Program, layout: Layout) -> bool:
    """Whether a message has the arrays that the program's uploads have, and so is not masked."""
    states = getattr(program, "expects", None)
    expected = () if states is None else states(layout)
    return not expected or any(message.arrays.keys() == arrays.keys() for arrays in expected)


def of_party(exchanges: Sequence[Exchange], party: str, *names: str) -> list[tuple[Message, Message]]:
    """(model, upload) of the exchanges in which a party sent all of these arrays."""
    return [
        (exchange.models[party], exchange.uploads[party])
        for exchange in exchanges
        if party in exchange.uploads and set(names) <= exchange.uploads[party].arrays.keys()
    ]


def numbers(array: Array) -> np.ndarray:
    """Any array as NumPy's, in float64."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array, np.float64)


def read_traffic(folder: str | PathLike[str]) -> list[Traffic]:
    """The recorded traffic of a run folder (`partsong fit --record`), round by round from the first."""
    return list(read_record(folder).traffic)


def read_record(folder: str | PathLike[str]) -> Record:
    """The same, with what the record says of the run; everything that is not as we write it is a FormatError."""
    path = Path(folder)
    rounds: dict[int, list[tuple[str, int, Message]]] = {}
    abouts: list[Any] = []
    opened: tuple[str, dict[str, Any]] = ("", {})
    for line in _lines_of(path):
        index, party, phase, weight, names = _message_of(path, line)
        file = f"traffic/round-{index:04d}.safetensors"
        if file != opened[0]:
            arrays, about = read_tensors(path / file, KIND)
            opened, abouts = (file, arrays), [*abouts, about]
        missing = [name for name in names if f"{party}/{phase}/{name}" not in opened[1]]
        if missing:
            raise FormatError(f"{path / file} lacks {', '.join(missing)} of party {party!r}, which {LIST} lists.")
        sent = {name: opened[1][f"{party}/{phase}/{name}"] for name in names}
        if any((party, phase) == (sender, at) for sender, at, _ in rounds.get(index, ())):
            raise FormatError(f"{path / LIST} lists two messages of party {party!r} in phase {phase} of round {index}.")
        rounds.setdefault(index, []).append((party, phase, Message(sent, weight)))
    absent = next((index for index in range(1, len(rounds) + 1) if index not in rounds), None)
    if absent is not None or not rounds:
        what = f"that of round {absent} is missing" if absent is not None else "there is none"
        raise FileError(f"{path} does not hold the traffic of a run from its first round on: {what}. Add --record.")
    senders = {party for sent in rounds.values() for party, _, _ in sent}
    parties, widths = _told_by(path, abouts)
    return Record([rounds[index] for index in sorted(rounds)], tuple(sorted(senders | parties)), widths)


def _message_of(path: Path, line: str) -> tuple[int, str, int, float, list[str]]:
    """Round, party, phase, weight and names of arrays, from one line of the list."""
    try:
        told = json.loads(line)
        index, party, phase = int(told["round"]), str(told["party"]), int(told["phase"])
        weight = float("nan" if told["weight"] is None else told["weight"])
        names = [str(array["name"]) for array in told["arrays"]]
        is_sound = 1 <= index <= MOST_ROUNDS and phase >= 0
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise FormatError(f"{path / LIST}: a line is not about a message: {line.strip()[:60]!r}.") from error
    if not is_sound:
        raise FormatError(f"{path / LIST}: a line is about round {index}, phase {phase}, which no run has.")
    return index, party, phase, weight, names


def _told_by(path: Path, abouts: Sequence[Any]) -> tuple[set[str], int | None]:
    """Parties and columns, from what the files of all rounds say; files of earlier releases say neither."""
    parties: set[str] = set()
    widths: set[int] = set()
    for about in abouts:
        named, width = (about.get("parties", []), about.get("n_features")) if isinstance(about, dict) else (None, None)
        is_width = width is None or (type(width) is int and width > 0)
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named) or not is_width:
            raise FormatError(f"{path / 'traffic'}: a file does not say who took part as ours do. Record the run anew.")
        parties |= set(named)
        widths |= set() if width is None else {width}
    if len(widths) > 1:
        raise FormatError(f"{path / 'traffic'}: files are of runs with {sorted(widths)} columns. Record the run anew.")
    return parties, next(iter(widths), None)


def _lines_of(path: Path) -> list[str]:
    try:
        return (path / LIST).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FileError(f"{path / LIST} cannot be read: no traffic was recorded there. Add --record.") from error


def _require_known(uploads: Mapping[str, Message], layout: Layout) -> None:
    unknown = sorted(uploads.keys() - set(layout.parties))
    if unknown:
        raise ParameterError(f"The traffic names parties that the layout does not: {', '.join(unknown[:5])}.")


# ---- leakage replay ---------------------------------------------------------------------------------------------
#
# A party's work done again by somebody else, on rows that are only supposed.

ROUNDS = 2
"""So many rounds are done again."""


def replayed(
    program: Program, layout: Layout, party: str, models: Sequence[Message], rows: np.ndarray, secret: int = 0
) -> list[Message]:
    """What a party with these rows (n × m) would have answered to these models, from its start on."""
    shard = Shard(party, as_matrix(np.ascontiguousarray(rows, layout.dtype)), secret)
    state, uploads = program.start_party(shard, layout), []
    for model in models:
        state, upload = program.local(shard, state, model)
        uploads.append(upload)
    return uploads


def misfit(
    program: Program, layout: Layout, party: str, seen: Sequence[tuple[Message, Message]], rows: np.ndarray
) -> np.ndarray:
    """How far the uploads that these rows lead to are from those that were seen, array by array, relative to them."""
    models = [model for model, _ in seen[:ROUNDS]]
    again = replayed(program, layout, party, models, rows)
    parts = []
    for (_, upload), answer in zip(seen[:ROUNDS], again, strict=True):
        for name, array in sorted(upload.arrays.items()):
            wanted = numbers(array)
            parts.append((numbers(answer[name]) - wanted).ravel() / max(float(np.linalg.norm(wanted)), 1e-300))
    return np.concatenate(parts)


# ---- leakage scene ----------------------------------------------------------------------------------------------
#
# What an attack begins with: a run as an attacker has it.


@dataclass(slots=True)
class Clock:
    """When a search has to end (`time.monotonic`; None: never), and whether one was cut off."""

    deadline: float | None = None
    was_over: bool = False

    def is_over(self) -> bool:
        """Whether the time is up; it is remembered."""
        self.was_over = self.was_over or (self.deadline is not None and time.monotonic() >= self.deadline)
        return self.was_over

    def has(self, seconds: float) -> bool:
        """Whether so much time is left; if not, the time counts as up."""
        if self.deadline is not None and time.monotonic() + seconds > self.deadline:
            self.was_over = True
        return not self.is_over()


@dataclass(frozen=True, slots=True)
class Scene:
    """A run as an attacker has it, and, for an audit of one's own, the rows that were hidden.

    `others`: further recorded runs of the same parties. `mask_error`: how far sums under masks can be off.
    """

    exchanges: Sequence[Exchange]
    program: Any
    layout: Layout
    truth: Mapping[str, np.ndarray]
    others: tuple[Scene, ...] = ()
    clock: Clock = field(default_factory=Clock)
    mask_error: float | None = None

    def unit(self, cross: np.ndarray) -> float:
        """The relative rounding of what was sent: of the number type, or of the steps under masks."""
        rms = float(np.sqrt(np.mean(np.square(cross)))) or 1.0
        return unit_of(str(self.layout.dtype), None if self.mask_error is None else self.mask_error / rms)

    @staticmethod
    def alone(party: str, model: Message, upload: Message) -> Exchange:
        """An exchange of one party."""
        return Exchange({party: model}, {party: upload})

    def seen(self, party: str, *names: str) -> list[tuple[Message, Message]]:
        """(model, upload) where a party sent these arrays."""
        return of_party(self.exchanges, party, *names)


def judged(scene: Scene, finding: Finding, measure: Callable[[np.ndarray, np.ndarray], float]) -> list[Finding]:
    """With its error, where the truth is known."""
    if finding.party not in scene.truth or finding.recovered is None:
        return [finding]
    return [replace(finding, error=measure(finding.recovered, scene.truth[finding.party]))]
