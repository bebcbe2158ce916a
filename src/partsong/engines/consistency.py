"""Consistency checks over ranks before the first round. A difference is an error at all ranks that shows the values."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from partsong.core.interfaces import Layout, Program, Schedule, Shard, type_name
from partsong.engines.collective import Communicator, RunEnded, all_gather_text
from partsong.errors import CompositionError, ParameterError, PartsongError, format_count

SHOWN = 60
"""Characters of a difference that an error shows."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The layout of all ranks together, and the rank of each party."""

    layout: Layout
    homes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class _Columns:
    """What is known of another rank's matrix: its width and number type."""

    shape: tuple[int, int]
    dtype: str


def agree_on_run(
    communicator: Communicator,
    program: Program,
    shards: Sequence[Shard],
    schedule: Schedule,
    others: Mapping[str, Any],
    *,
    has_server: bool = False,
) -> Placement:
    """Check that all ranks have the same settings, and return the common placement.

    With `has_server`, rank 0 is only a server and holds no party. Sent, as JSON: version, settings as text, and the
    names, widths and number types of this rank's shards.
    """
    own = {
        "version": version("partsong"),
        "seed": schedule.seed,
        "schedule": describe(schedule),
        "program": describe(program),
        **{name: describe(value) for name, value in others.items()},
        "parties": [[s.name, int(s.matrix.shape[1]), type_name(s.matrix.dtype)] for s in shards],
    }
    cards = [json.loads(text) for text in all_gather_text(communicator, json.dumps(own))]
    try:
        _check_settings(cards)
        return _placement_with_server(cards) if has_server else _placement(cards)
    except PartsongError as error:
        raise RunEnded(error) from None


def _check_settings(cards: Sequence[Mapping[str, Any]]) -> None:
    for what in (name for name in cards[0] if name != "parties"):
        values = [card.get(what) for card in cards]
        if len(set(values)) > 1:
            kind = ParameterError if what in ("seed", "schedule", "resume") else CompositionError
            raise kind(
                f"All ranks must have the same {what}, but {_format_differences(values)}. Start every rank with the "
                "same command on the same version."
            )


def _placement(cards: Sequence[Mapping[str, Any]]) -> Placement:
    idle = [rank for rank, card in enumerate(cards) if not card["parties"]]
    if idle:
        raise ParameterError(
            f"Every rank needs at least one shard, but {_format_ranks(idle)} has none. Start fewer ranks, or split the "
            "rows into more parts."
        )
    homes: dict[str, int] = {}
    for rank, (name, _, _) in _parties(cards):
        if name in homes:
            raise ParameterError(
                f"Party names must differ, but {name!r} is at {_format_ranks(sorted({homes[name], rank}))}."
            )
        homes[name] = rank
    widths = [
        " and ".join(sorted({format_count(width, "column") for _, width, _ in card["parties"]})) for card in cards
    ]
    if len({width for _, (_, width, _) in _parties(cards)}) > 1:
        raise CompositionError(
            f"Parties must hold the same columns, but {_format_differences(widths)}. Use one list of "
            "features for all parties."
        )
    return Placement(_layout(cards), homes)


def _placement_with_server(cards: Sequence[Mapping[str, Any]]) -> Placement:
    if cards[0]["parties"]:
        names = ", ".join(name for name, *_ in cards[0]["parties"])
        raise ParameterError(
            f"Rank 0 is the server and holds no shard, but it was given {names}. Pass shards at the other ranks."
        )
    idle = [rank for rank, card in enumerate(cards) if rank and not card["parties"]]
    if idle:
        raise ParameterError(
            f"Every worker needs at least one shard, but rank {idle[0]} has none. Start fewer ranks, or split the rows "
            "into more parts."
        )
    return Placement(_layout(cards), {name: rank for rank, (name, _, _) in _parties(cards)})


def _layout(cards: Sequence[Mapping[str, Any]]) -> Layout:
    known = [Shard(name, _Columns((0, width), dtype)) for _, (name, width, dtype) in _parties(cards)]  # type: ignore[arg-type]
    return Layout.of(known, cards[0]["seed"])


def describe(value: Any) -> str:
    """Describe a value identically in every process: without addresses, arrays by type, shape and checksum."""
    if is_dataclass(value) and not isinstance(value, type):
        inner = ", ".join(f"{field.name}={describe(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__name__}({inner})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{describe(k)}: {describe(v)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(describe, value))) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(describe, value)) + ")"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = np.ascontiguousarray(value.cpu() if hasattr(value, "cpu") else value)
        return f"{type_name(array.dtype)}{list(array.shape)}#{zlib.crc32(array.tobytes()):08x}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _parties(cards: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, tuple[str, int, str]]]:
    for rank, card in enumerate(cards):
        yield from ((rank, tuple(party)) for party in card["parties"])


def _format_differences(values: Sequence[Any]) -> str:
    """Format which ranks have which value, around the first difference: 'it is 3 at rank 0, and 4 at rank 1'."""
    texts = [str(value) for value in values]
    alike = next((i for i, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), None)
    start = 0 if alike is None else max(0, alike - SHOWN // 2)
    start = start if max(map(len, texts)) > SHOWN else 0
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    parts = [f"{_excerpt(text, start)} at {_format_ranks(who)}" for text, who in groups.items()]
    return "it is " + ", and ".join(parts)


def _excerpt(text: str, start: int) -> str:
    return f"{'…' if start else ''}{text[start : start + SHOWN]}{'…' if len(text) > start + SHOWN else ''}"


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = [str(rank) for rank in ranks[:8]] + (["…"] if len(ranks) > 8 else [])
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
