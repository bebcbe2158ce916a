"""What an observer of a run has in hand: the uploads, and the models that they answer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from partsong.core import Array, Layout, Message, Program
from partsong.errors import FileError, FormatError, ParameterError
from partsong.io.tensor_file import FileKind, read_tensors

Traffic = Sequence[tuple[str, int, Message]]
"""What one round sent, as in `Round.traffic`: party, phase of the reduction, message."""

LIST, KIND = "traffic.jsonl", FileKind("partsong-traffic", 1, is_private=True)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What parties sent in one round, and the model that each of them had been sent before."""

    models: Mapping[str, Message]
    uploads: Mapping[str, Message]


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
    path = Path(folder)
    rounds: dict[int, list[tuple[str, int, Message]]] = {}
    opened: dict[str, dict[str, Any]] = {}
    for line in _lines_of(path):
        try:
            told = json.loads(line)
            index, party, phase = int(told["round"]), str(told["party"]), int(told["phase"])
            file, weight = str(told["file"]), float("nan" if told["weight"] is None else told["weight"])
            names = [str(array["name"]) for array in told["arrays"]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FormatError(f"{path / LIST}: a line is not about a message: {line.strip()[:60]!r}.") from error
        if file not in opened:
            opened = {file: read_tensors(path / file, KIND)[0]}
        missing = [name for name in names if f"{party}/{phase}/{name}" not in opened[file]]
        if missing:
            raise FormatError(f"{path / file} lacks {', '.join(missing)} of party {party!r}, which {LIST} lists.")
        arrays = {name: opened[file][f"{party}/{phase}/{name}"] for name in names}
        rounds.setdefault(index, []).append((party, phase, Message(arrays, weight)))
    absent = sorted(set(range(1, max(rounds, default=0) + 1)) - rounds.keys())
    if absent or not rounds:
        what = f"that of round {absent[0]} is missing" if absent else "there is none"
        raise FileError(f"{path} does not hold the traffic of a run from its first round on: {what}. Add --record.")
    return [rounds[index] for index in sorted(rounds)]


def _lines_of(path: Path) -> list[str]:
    try:
        return (path / LIST).read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FileError(f"{path / LIST} cannot be read: no traffic was recorded there. Add --record.") from error


def _require_known(uploads: Mapping[str, Message], layout: Layout) -> None:
    unknown = sorted(uploads.keys() - set(layout.parties))
    if unknown:
        raise ParameterError(f"The traffic names parties that the layout does not: {', '.join(unknown[:5])}.")
