"""What others can work out from what was sent: attacks on a recorded run, for its owner to try first.

    rounds = list(Sequential(record=True).run(program, shards, schedule, reduction=InTheOpen()))
    for finding in attack([done.traffic for done in rounds], program, Layout.of(shards, schedule.seed)):
        print(finding.told)

Everything is computed from messages, the program and the shared seed: what an honest-but-curious server has. That an
attack finds nothing shows that this attack finds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from partsong.core import Layout, Program
from partsong.evaluate.leakage_findings import Finding
from partsong.evaluate.leakage_from_factors import from_factors, from_play
from partsong.evaluate.leakage_from_sketches import from_raw_sketches, from_sketches
from partsong.evaluate.leakage_from_statistics import from_statistics
from partsong.evaluate.leakage_from_sums import by_subtraction, from_sums
from partsong.evaluate.leakage_scene import Scene
from partsong.evaluate.leakage_transcript import Traffic, numbers, transcript


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
