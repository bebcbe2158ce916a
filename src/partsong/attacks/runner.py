"""What left each party of a recorded run, what an attacker tried on it, and what came of it: no values, only measures.

run = RecordedRun([done.traffic for done in rounds], program, Layout.of(shards, schedule.seed))
for each in findings(run, attacker=Attacker.SERVER, truth={"clinic": X}):
    print(each.party, each.verdict)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from partsong.aggregation.plaintext import InTheOpen
from partsong.attacks.findings import Finding, Observer, PartyFindings, Recovery, SentArray, first_names, rows_within
from partsong.attacks.reconstruction import from_factors, from_play, from_raw_sketches, from_sketches, from_statistics
from partsong.attacks.sums import (
    Uploads,
    by_subtraction,
    complete_sums,
    from_sums,
    in_the_open,
    less_all_others,
    repeated,
    summed,
)
from partsong.attacks.transcript import Exchange, Scene, Traffic, numbers, transcript
from partsong.core.interfaces import Layout, Program, Reduction, Shard
from partsong.errors import ParameterError

# ---- leakage ----------------------------------------------------------------------------------------------------
#
# What others can work out from what was sent: attacks on a recorded run, for its owner to try first.
#
#     rounds = list(Sequential(record=True).run(program, shards, schedule, reduction=InTheOpen()))
#     for finding in attack([done.traffic for done in rounds], program, Layout.of(shards, schedule.seed)):
#         print(finding.told)
#
# Everything is computed from messages, the program and the shared seed: what an honest-but-curious server has. That an
# attack finds nothing shows that this attack finds nothing.


def attack(
    traffic: Iterable[Traffic],
    program: Program,
    layout: Layout,
    *,
    truth: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
) -> list[Finding]:
    """Every attack that the arrays of these uploads allow, on every party, as far as it gets.

    `traffic` is that of all rounds from the first one on (`Round.traffic`, or `read_traffic` of a run folder); `truth`
    are rows by party, with which findings have an error, and `asynchronous` says which engine ran.
    """
    exchanges = transcript(traffic, program, layout, asynchronous=asynchronous)
    if not exchanges:
        return [_nothing_readable(layout)]
    scene = Scene(exchanges, program, layout, {name: numbers(rows) for name, rows in (truth or {}).items()})
    found = [finding for party in layout.parties for each in ATTACKS for finding in each(scene, party)]
    return [*found, *from_sums(scene), *by_subtraction(scene)]


ATTACKS: tuple[Callable[[Scene, str], list[Finding]], ...] = (
    from_statistics,
    from_sketches,
    from_factors,
    from_play,
    from_raw_sketches,
)


def _nothing_readable(layout: Layout) -> Finding:
    told = (
        "nothing from single uploads, which are not the program's own arrays: they are masked, and look random. The "
        "sum is known to the server, and all parties but one can subtract their own addends from it"
    )
    return Finding("masked uploads", ", ".join(layout.parties), "nothing", None, told)


# ---- leakage tried ----------------------------------------------------------------------------------------------
#
# Which attacks there are on what a party has sent.


def tried_on(scene: Scene, party: str) -> tuple[str, ...]:
    """The attacks that have something to work on, in words; none says that there is none for such uploads."""
    has_factors = [upload for _, upload in scene.seen(party, "H") if "place" not in upload.arrays]
    is_game = hasattr(scene.program, "game") and getattr(scene.program, "repeats", 1) == 1
    attempts = {
        "rows, or their span, from WᵀW and WᵀX": bool(scene.seen(party, "gram", "cross")),
        "rows from sketches, by linear algebra or as sparse ones": bool(scene.seen(party, "data", "weights")),
        "what all H_p of a party with few rows have in common": len(has_factors) > 1,
        "the row space of the one H_p of a party with few rows": len(has_factors) == 1,
        "a single row from how the columns that it played have moved": is_game
        and bool(scene.seen(party, "H", "place", "totals")),
        "columns of H_p, or rows of W_p, that a sketch leaves as they are": bool(
            scene.seen(party, "sketch") or scene.seen(party, "sketched_W")
        ),
    }
    return tuple(attempt for attempt, is_possible in attempts.items() if is_possible)


# ---- leakage parties --------------------------------------------------------------------------------------------

MASKED = "Single uploads were masked: only sums were visible, and only they were attacked."
FROM_SUMS = "rows, or their span, from sums over all parties"
NO_ATTACK_ON_SUMS = "No attack is implemented on these sums. That is not a guarantee."
NO_ATTACK = "No attack is implemented on what it sent. That is not a guarantee."
NOTHING_SENT = "{party!r} has sent nothing."
NOT_SUMMED = "What it sent is not one addend of a sum, so that subtracting is no way in. That is not a guarantee."
NOISE = (
    "Uploads carry {kind} noise for the privacy of a {unit}. If these attacks find nothing, that is no proof of it; "
    "how the noise was calibrated is."
)
UNKNOWN_ADDENDS = (
    "Colluders know what they have sent, but a masked record does not say it, and rows of all of them were not given. "
    "Nothing was tried."
)
FRESH_NOISE = "Colluders know the noise that they have added, but a masked record does not. Nothing was tried."


class Attacker(enum.StrEnum):
    """Whoever reads the server's inbox; or all parties but one, who know the sum and what they have sent themselves."""

    SERVER = "server"
    COLLUDERS = "colluders"


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """All that a run has left behind: its traffic from the first round on, and what everybody knows of it.

    `shards` are the rows and secrets of colluders, who do their own work again where masks hide what they have sent.
    """

    traffic: Sequence[Traffic]
    program: Any
    layout: Layout
    reduction: Reduction = InTheOpen()
    asynchronous: bool = False
    shards: Mapping[str, Shard] = field(default_factory=dict)

    def exchanges(self) -> list[Exchange]:
        """Uploads where they are open, and sums where they are hidden."""
        if self.reduction.hides_uploads:
            return summed(self.traffic, self.program, self.layout, self.reduction)
        found = transcript(self.traffic, self.program, self.layout, asynchronous=self.asynchronous)
        if not found:
            raise ParameterError(
                f"These uploads are not those of {type(self.program).__name__}: they have other arrays. Give the "
                "program of the run, and the reduction if it hides uploads."
            )
        return found


def findings(
    run: RecordedRun,
    *,
    attacker: Attacker = Attacker.SERVER,
    truth: Mapping[str, Any] | None = None,
    parties: Collection[str] | None = None,
) -> list[PartyFindings]:
    """What was found of each of these parties (by default all), and last of all their rows together, if anything was.

    `truth` are rows by party: findings then have an error, and tell how many rows were recovered.
    """
    names = [name for name in run.layout.parties if parties is None or name in parties]
    exchanges = run.exchanges()
    known = {name: numbers(rows) for name, rows in (truth or {}).items()}
    scene = Scene(exchanges, run.program, run.layout, known)
    if attacker is Attacker.COLLUDERS:
        return [_by_colluders(run, scene, name) for name in names]
    found = [_by_server(run, scene, name) for name in names]
    if parties is not None:
        return found
    together = _of_sums(run, scene)
    return [*found, together] if together.recovered or run.reduction.hides_uploads else found


def _of_sums(run: RecordedRun, scene: Scene) -> PartyFindings:
    """Of all rows together, for whoever knows the sums."""
    everyone, is_tried = first_names(run.layout.parties), bool(complete_sums(scene))
    rows = [scene.truth[name] for name in run.layout.parties if name in scene.truth]
    all_rows = np.vstack(rows) if len(rows) == len(run.layout.parties) else None
    recovered = tuple(_measured(each, all_rows) for each in from_sums(scene))
    tried, notes = ((FROM_SUMS,), ()) if is_tried else ((), (NO_ATTACK_ON_SUMS,))
    return PartyFindings(everyone, Attacker.SERVER, (), 0, 0, tried, recovered, notes, is_sum=True)


def _by_server(run: RecordedRun, scene: Scene, party: str) -> PartyFindings:
    left = _left(run, party, Attacker.SERVER)
    return _with_note(left, MASKED) if run.reduction.hides_uploads else _attacked(left, scene)


def _by_colluders(run: RecordedRun, scene: Scene, party: str) -> PartyFindings:
    """Uploads as all others work them out, and then the attacks that a server would try on them."""
    left, others = _left(run, party, Attacker.COLLUDERS), [name for name in run.layout.parties if name != party]
    if not run.reduction.hides_uploads:
        known: Uploads = in_the_open(scene.exchanges)
    elif not set(others) <= run.shards.keys():
        return _with_note(left, UNKNOWN_ADDENDS)
    elif getattr(run.program, "release", None) is not None:
        return _with_note(left, FRESH_NOISE)
    else:
        known = repeated(scene.exchanges, run.program, run.layout, [run.shards[name] for name in others])
    subtracted = less_all_others(scene.exchanges, run.program, party, known)
    return _attacked(left, replace(scene, exchanges=subtracted)) if subtracted else _with_note(left, NOT_SUMMED)


def _left(run: RecordedRun, party: str, attacker: Attacker) -> PartyFindings:
    """What left a party, before anything is tried on it."""
    messages = [message for sent in run.traffic for sender, _, message in sent if sender == party]
    release: Any = getattr(run.program, "release", None)
    notes = () if release is None else (NOISE.format(kind=release.kind, unit=release.unit),)
    size = sum(message.nbytes for message in messages)
    return PartyFindings(party, attacker, _arrays_of(messages), len(messages), size, (), (), notes)


def _attacked(left: PartyFindings, scene: Scene) -> PartyFindings:
    tried = tried_on(scene, left.party)
    found = [finding for each in ATTACKS for finding in each(scene, left.party)]
    if left.attacker == Attacker.COLLUDERS:
        found = [replace(each, observer=Observer.OTHERS) for each in found]
    rows = scene.truth.get(left.party)
    done = replace(left, tried=tried, recovered=tuple(_measured(each, rows) for each in found))
    return done if tried else _with_note(done, NO_ATTACK)


def _with_note(found: PartyFindings, note: str) -> PartyFindings:
    """With a reason why nothing was tried; of a party that has sent nothing there is only one."""
    said = note if found.messages else NOTHING_SENT.format(party=found.party)
    return replace(found, notes=(said, *found.notes))


def _arrays_of(messages: Sequence[Any]) -> tuple[SentArray, ...]:
    """Every kind of array that was sent, with how often and how many bytes in all."""
    counts: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for message in messages:
        for name, shape, dtype in message.signature:
            counts.setdefault((name, shape, dtype), []).append(int(message[name].nbytes))
    return tuple(SentArray(*kind, len(sizes), sum(sizes)) for kind, sizes in counts.items())


def _measured(finding: Finding, rows: np.ndarray | None) -> Recovery:
    """A finding without its values."""
    shape = None if finding.recovered is None else tuple(int(side) for side in finding.recovered.shape)
    within = None if rows is None or finding.recovered is None else rows_within(finding.array, finding.recovered, rows)
    return Recovery(
        finding.attack,
        finding.array,
        shape,
        finding.what,
        finding.verdict,
        finding.doubt,
        finding.error,
        within,
        str(finding.observer),
    )
