"""The server's folder in an asynchronous run: the run after its last arrival, and what each site is working on.

    arrivals         model, server's state, the order of arrivals, number and version of every site's piece, who has
                     started, largest serials
    model-VERSION    the model after so many arrivals, as long as a site works with it and it is not the newest

A model is there before the record that needs it, and goes after the record that does not. States of parties are not
here, nor are uploads.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from partsong.core import Message
from partsong.engines.pieces import Midway, Piece
from partsong.engines.recorded_order import RecordedOrder
from partsong.federation.record import Record
from partsong.federation.site_files import make_folder
from partsong.federation.states import load_state, save_state

MODEL = re.compile(r"model-(\d+)")


@dataclass(frozen=True, slots=True)
class Ongoing(Record):
    """A run between two arrivals; `index` is their number.

    `order` is who arrived, one after another, and `faults` says at which places nothing but a reason came; `pieces` is
    what each site works on, `clock` the seconds that the run has taken, `moves` how far the last few arrivals have
    moved the model.
    """

    order: tuple[str, ...] = ()
    faults: Mapping[int, str] = field(default_factory=dict)
    pieces: Mapping[str, Piece] = field(default_factory=dict)
    clock: float = 0.0
    moves: tuple[float, ...] = ()

    @staticmethod
    def of(record: Record, point: Midway) -> Ongoing:
        """A run of which nothing has arrived yet."""
        known = {one.name: getattr(record, one.name) for one in fields(record)}
        return Ongoing(**known, pieces=point.pieces)

    @property
    def point(self) -> Midway:
        """As the engines know it."""
        return Midway(self.index, {}, self.server, self.model, self.pieces, self.clock)

    def recorded_order(self) -> RecordedOrder:
        """For `Asynchronous(durations=…)`, which then gives the same models in one process."""
        return RecordedOrder(order=self.order)

    def readmitting(self, party: str, *, is_adrift: bool = False) -> Ongoing:
        """The same, where a site that has lost its states begins anew, with a new piece: no round is under way that it
        could be adrift in. What one process makes of the order is then no longer this run.
        """
        pieces = {**self.pieces, party: Piece(self.model, self.index, self.pieces[party].number + 1)}
        counted = {name: at for name, at in self.counted.items() if name != party}
        return replace(self, started=self.started - {party}, counted=counted, pieces=pieces)


@dataclass(frozen=True, slots=True)
class ArrivalsJournal:
    """That folder."""

    folder: Path

    @property
    def path(self) -> Path:
        """The record."""
        return self.folder / "arrivals"

    def load(self) -> Ongoing | None:
        """None where no run has begun here."""
        if not self.path.exists():
            return None
        tree, note = load_state(self.path)
        known = Record.fields_in(tree, note)
        models, parties = {known["index"]: known["model"]}, known["layout"].parties
        for version in {told[0] for told in note["pieces"].values()} - models.keys():
            models[version], _ = load_state(self.folder / f"model-{version}")
        pieces = {
            name: Piece(models[version], version, number, fault=tuple(fault))
            for name, (version, number, fault) in note["pieces"].items()
        }
        return Ongoing(
            **known,
            order=tuple(parties[number] for number in note["order"]),
            faults=dict(note["faults"]),
            pieces=pieces,
            clock=note["clock"],
            moves=tuple(note["moves"]),
        )

    def readmit(self, party: str) -> Ongoing | None:
        """Let a site that has lost its states begin anew; None where no run has begun here."""
        record = self.load()
        if record is not None:
            record = record.readmitting(party)
            self.save(record)
        return record

    def save(self, record: Ongoing) -> None:
        """Atomically."""
        make_folder(self.folder)
        kept: dict[int, Message] = {piece.version: piece.model for piece in record.pieces.values()}
        kept.pop(record.index, None)
        for version, model in kept.items():
            if not (self.folder / f"model-{version}").exists():
                save_state(self.folder / f"model-{version}", model)
        places = {name: number for number, name in enumerate(record.layout.parties)}
        note = {
            **record.told(),
            "order": [places[name] for name in record.order],
            "faults": [list(pair) for pair in record.faults.items()],
            "pieces": {name: [one.version, one.number, list(one.fault)] for name, one in record.pieces.items()},
            "clock": record.clock,
            "moves": list(record.moves),
        }
        save_state(self.path, record.tree, note)
        self._forget(kept)

    def _forget(self, kept: Mapping[int, Message]) -> None:
        for path in self.folder.iterdir():
            found = MODEL.fullmatch(path.name)
            if found is not None and int(found[1]) not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()
