"""Cost of secure aggregation: bytes and seconds over the number of parties and dropouts.

    python -m experiments.privacy.secure_sums --output privacy-masking.jsonl

Sums of k × m = 20 × 1000 numbers in one process; processor seconds of parties and server are measured separately. The
cost of a setup is divided by the sums of its batch: two sums are run, one with the setup and one without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.federations import shards_of
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Schedule
from partsong.engines.local import Sequential
from partsong.methods import build
from partsong.secure_aggregation.protocol import SecureSum

RANK, COLUMNS, ROWS = 20, 1000, 25
CASES = ((3, 0), (10, 0), (10, 1), (30, 0), (30, 3), (100, 0), (100, 10))
"""Numbers of parties, and of dropouts in phase 2."""
MEASURED = ("bytes_up", "bytes_down", "party_seconds", "server_seconds")


class Timed:
    """A reduction with separate clocks for parties and server."""

    PARTY, SERVER = ("begin", "send"), ("hear", "total")

    def __init__(self, within: Any) -> None:
        self.within = within
        self.seconds = {"party": 0.0, "server": 0.0}

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.within, name)
        if name in self.PARTY:
            return self._clocked("party", found)
        return self._clocked("server", found) if name in self.SERVER else found

    def _clocked(self, who: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            try:
                return work(*arguments)
            finally:
                self.seconds[who] += time.process_time() - began

        return timed


def cost(parties: int, dropped: int, turn: int, is_masked: bool) -> dict[str, Any]:
    """One sum: bytes up of a remaining party, bytes down, seconds of a party and of the server."""
    draw = np.random.default_rng(turn)
    shards = shards_of([draw.random((ROWS, COLUMNS)) for _ in range(parties)], turn)
    masks = SecureSum()
    reduction = Timed(masks if is_masked else PlainReduction())
    silent = {shard.name: 2 for shard in sorted(shards, key=lambda shard: shard.name)[:dropped]}
    schedule, program, sums = Schedule(2, turn, dropouts={1: silent}), build("fedavg", RANK, local_steps=1), []
    for done in Sequential().run(program, shards, schedule, reduction=reduction):
        stays = next(name for name in reversed(done.participants) if name not in silent)
        seconds = (reduction.seconds["party"] / parties, reduction.seconds["server"])
        sums.append((done.bytes_up[stays], done.bytes_down, *seconds))
        reduction.seconds.update(party=0.0, server=0.0)
    shares = masks.batch if is_masked else 1
    costs = [inside + max(0, first - inside) / shares for first, inside in zip(*sums, strict=True)]
    about = {"parties": parties, "dropped": dropped, "turn": turn, "masked": is_masked}
    return about | dict(zip(MEASURED, (round(costs[0]), round(costs[1]), *costs[2:]), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="three and ten parties, once")
    parser.add_argument("--output", type=Path, help="a JSON Lines file")
    chosen = parser.parse_args(arguments)
    cases, repeats = (CASES[:3], 1) if chosen.quick else (CASES, chosen.repeats)
    cost(3, 0, 0, True)  # warm up: code that is loaded or compiled on first use
    records = [
        cost(parties, dropped, turn, is_masked)
        for parties, dropped in cases
        for turn in range(repeats)
        for is_masked in ((True,) if dropped else (False, True))
    ]
    lines = [json.dumps(record) for record in records]
    print("\n".join(lines))
    if chosen.output is not None:
        chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
