"""Asynchronous runs in one process, over a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from partsong.core import Checkpoint, Layout, Program, Reduction, Round, Schedule, Shard
from partsong.engines.arrivals import Arrival, taken_in
from partsong.engines.pieces import Midway, Terms, Worked, agreed_terms, attempt, begun, started
from partsong.engines.rounds import Desk
from partsong.engines.virtual_clock import Durations


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """No party waits for another: each begins anew with the model that its own last upload was answered with.

    `Schedule.rounds` counts arrivals; a Round is one of them, with its sender as the only participant. Arrivals come in
    the order of (virtual time, name), so that a run depends on `durations` and not on the host. `Round.seconds` is the
    virtual time since the arrival before: their sum is the clock, and `Round.checkpoint.clock` tells it. A party that
    is left out for a fault uses up an arrival too, and tries again with the model as it stands then; the run ends when
    nobody's latest piece was good. Checkpoints hold what is under way (`pieces.Midway`), and a resumed run is the
    uninterrupted one to the bit. With one party and a server that takes over what it is sent this is Sequential.
    """

    durations: Durations = Durations()
    record: bool = False

    def run(
        self,
        program: Program,
        shards: Sequence[Shard],
        schedule: Schedule,
        *,
        reduction: Reduction,
        resume: Checkpoint | None = None,
    ) -> Iterator[Round]:
        """Rounds in the order of arrival."""
        layout = Layout.of(shards, schedule.seed)
        terms = agreed_terms(program, schedule, layout, reduction, self.record)
        self.durations.check(layout.parties)
        by_name = {shard.name: shard for shard in shards}
        point = begun(terms, resume)
        del resume  # as large as the parties' states, and soon behind us
        point = replace(point, parties=started(terms, by_name, point.parties))
        point = self._on_the_clock(point, by_name, schedule.seed)
        desk = Desk({name: reduction.enrol(name, shard.secret, layout) for name, shard in by_name.items()})
        while point.index < schedule.rounds:
            done = self._one_arrival(terms, desk, point, by_name)
            point = done.checkpoint  # type: ignore[assignment]
            yield done
            del done

    def _on_the_clock(self, point: Midway, shards: dict[str, Shard], seed: int) -> Midway:
        """A due time for pieces that have none."""
        pieces = {
            name: replace(piece, due=point.clock + self.durations.of(shards[name], piece.number, seed))
            if piece.due is None
            else piece
            for name, piece in point.pieces.items()
        }
        return replace(point, pieces=pieces)

    def _one_arrival(self, terms: Terms, desk: Desk, point: Midway, shards: dict[str, Shard]) -> Round:
        name = min(point.pieces, key=lambda party: (point.pieces[party].due, party))
        piece, shard = point.pieces[name], shards[name]
        assert piece.due is not None
        due = piece.due + self.durations.of(shard, piece.number + 1, terms.schedule.seed)
        worked = attempt(terms, shard, piece, point.parties.get(name), desk.parties[name])
        if not isinstance(worked, Worked):
            return taken_in(terms, desk, point, Arrival(name, worked, piece.due, due))
        desk.parties[name] = worked.standing
        return taken_in(terms, desk, point, Arrival(name, worked.message, piece.due, due, {name: worked.state}))
