"""Cost of a federation between processes, over Flower with TLS and keys: rounds, bytes, memory, overhead."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.flower.arms import (
    COLUMNS,
    RANK,
    Federation,
    bare_rounds,
    federation,
    flower_alone,
    lines_of,
    rounds_in_turns,
)
from benchmarks.flower.clock import MATHEMATICS, layer_in
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import holder_of

ENVELOPE = 500
"""Bytes of a message besides its arrays: header, JSON document, signature. A list of sites adds `NAMED` for each."""
NAMED = 12
PLAIN = f'method = "exact"\nrank = {RANK}\n'
SEED = "seed = 5\n"
"""For a federation with a single run: sites refuse a seed that they have answered before."""
MASKED = "secure_aggregation = true\nmask_bound = 1e9\n"
KILLED_AFTER = 10
TIMEOUT = 20

Say = Callable[[str], None]


def up_of() -> int:
    """Bytes of a plain upload: Wᵀ X, Wᵀ W and three totals, float64."""
    return 8 * (RANK * COLUMNS + RANK * RANK + 3) + ENVELOPE


def down_of(sites: int) -> int:
    """Bytes of a request: H, float64."""
    return 8 * RANK * COLUMNS + ENVELOPE + NAMED * sites


def masked_up_of(sites: int) -> int:
    """Bytes of a masked upload with its weight, names, shapes of three arrays and shares (secure-aggregation.md)."""
    upload = 8 * (RANK * COLUMNS + RANK * RANK + 3 + 1) + 32 + 3 * 50 + 72
    return upload + 33 * sites + 49 + 81 * (sites - 1) + 72 + 2 * ENVELOPE


def set_up_of(sites: int, sums: int = 16) -> int:
    """Bytes of keys and shares of one setup."""
    shares = 64 * sums * sites + (sites - 1) * (66 * sums + 16)
    return 64 + 64 * sums + shares + 2 * 72 + 2 * ENVELOPE


def long_run(n_sites: int, rounds: int, say: Say) -> dict[str, Any]:
    """Run many sites and rounds, kill one site; return seconds, bytes, and the server's memory by round."""
    names = tuple(f"site-{number:02d}" for number in range(n_sites))
    began, kill_at = time.perf_counter(), min(KILLED_AFTER, rounds // 3)
    with tempfile.TemporaryDirectory() as scratch, federation(Path(scratch) / "long", names) as made:
        say(f"{n_sites} sites are there after {time.perf_counter() - began:.0f} s")
        text = PLAIN + SEED + f'rounds = {rounds}\non_party_error = "skip"\n'
        name, place = made.start(text, "--timeout", str(TIMEOUT))
        held = _followed(made, name, kill_at, names[-1], say)
        lines = lines_of(place.progress)
        traffic = flower_traffic(made, int(place.number.read_text()))
        works = [line["bytes"] for site in names for line in made.audited(site, name) if line["kind"] == "work"]
    answers = sum(len(line["participants"]) for line in lines)
    return {
        "sites": n_sites,
        "rounds": len(lines),
        "killed after": kill_at,
        "participants": [len(line["participants"]) for line in lines],
        "seconds": [line["seconds"] for line in lines],
        "up": statistics.median(works),
        "up by Flower": traffic["received"] / len(works),
        "down by Flower": traffic["sent"] / answers,
        "resident": held,
    }


def _followed(made: Federation, name: str, kill_at: int, victim: str, say: Say) -> list[float]:
    """Follow a run to its end: record the memory of the server app after each round, and kill a site."""
    place, held = made.server.run(name), {}
    while made.running.running[name].poll() is None:
        done, holder = len(lines_of(place.progress)), holder_of(place.lock)
        held[done] = (resident(holder) if holder else 0.0) or held.get(done, 0.0)
        if done >= kill_at and victim in made.running.running:
            made.running.kill(victim)
            say(f"{victim} was killed after {done} rounds")
        time.sleep(0.3)
    made.ended(name)
    return [held[index] for index in sorted(held) if index and held[index]]


def resident(process: int) -> float:
    """Resident megabytes of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope_of(values: list[float]) -> tuple[float, float]:
    """Slope by least squares, and its standard error."""
    at = np.arange(len(values)) - (len(values) - 1) / 2
    slope = float(at @ np.asarray(values) / (at @ at))
    rest = np.asarray(values) - np.mean(values) - slope * at
    return slope, float(np.sqrt(rest @ rest / (len(values) - 2) / (at @ at)))


def flower_traffic(made: Federation, number: int) -> dict[str, float]:
    """Bytes to and from sites in a run, as counted by Flower."""
    from flwr.proto.control_pb2 import ListRunsRequest

    found = made.control.client.ListRuns(ListRunsRequest(run_id=number)).run_dict[number]
    return {"sent": float(found.bytes_sent), "received": float(found.bytes_recv)}


def overhead(n_sites: int, blocks: int, count: int, masked: bool, say: Say) -> dict[str, Any]:
    """Seconds of rounds, in turns: unmodified Flower, plain sums, secure aggregation."""
    names = tuple(f"site-{number}" for number in range(n_sites))
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch, federation(Path(scratch) / "ours", names) as made:
        others = tuple(f"bare-{number}" for number in range(n_sites))
        with flower_alone(Path(scratch) / "alone", made.running, others) as (server, nodes):
            sizes = (up_of(), down_of(n_sites))
            arms: dict[str, Callable[[], list[float]]] = {
                "Flower alone": lambda: bare_rounds(server, nodes, sizes, count),
                "plain sums": lambda: made.rounds(PLAIN + f"rounds = {count}\n"),
            }
            if masked:
                arms["masked sums"] = lambda: made.rounds(PLAIN + MASKED + f"rounds = {count}\n")
            for block in range(blocks):
                for arm, rounds in arms.items():
                    seconds = rounds()[1:]
                    found.setdefault(arm, []).extend(seconds)
                    say(f"block {block + 1}, {arm}: {statistics.median(seconds):.2f} s a round")
        bytes_up = masked_bytes(made, names) if masked else None
    return {"sites": n_sites, "blocks": blocks, "count": count - 1, "seconds": found, "masked up": bytes_up}


def layer(n_sites: int, rounds: int, say: Say) -> dict[str, Any]:
    """Seconds of rounds with and without partsong's layer, in turns within one run, and the times of its parts."""
    names, began = tuple(f"site-{number}" for number in range(n_sites)), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, federation(Path(scratch) / "layer", names, "layer") as made:
        say(f"{n_sites} sites are there after {time.perf_counter() - began:.0f} s")
        found = rounds_in_turns(made, PLAIN + SEED + f"rounds = {rounds + 1}\n", patience=120.0 + 20.0 * rounds)
        say(f"{rounds} rounds of each kind are done after {time.perf_counter() - began:.0f} s")
    seconds = {arm: found[arm][1:] for arm in ("ours", "echo", "work")}
    works = [one for lines in found["sites"].values() for one in lines if MATHEMATICS in one["spent"]][n_sites:]
    return {
        "sites": n_sites,
        "rounds": rounds,
        "seconds": seconds,
        "sizes": found["sizes"],
        "objects": found["objects"],
        "server": _middle([layer_in(*one) for one in zip(seconds["ours"], found["clock"][1:], strict=True)]),
        "site": _middle([layer_in(one["seconds"], one["spent"]) for one in works]),
        "work": statistics.median(one["spent"][MATHEMATICS] for one in works),
        "ledger": ledger_seconds(500) / 500,
    }


def ledger_seconds(lines: int) -> float:
    """Processor seconds that one existing ledger line adds to a message.

    `Site.answer` counts the lines twice and searches those of the run once; each message adds a line.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ledger, spent = SiteLedger(Path(scratch) / "ledger.jsonl"), []
        line = {"attempt": ["", 0, 0], "digest": "0" * 64, "release": None}
        ledger.chain.append({**line, "count": lines})
        for _ in range(5):
            ledger.chain.append({**line, "count": 1})
            began = time.process_time()
            _ = ledger.serial, ledger.charges("run"), ledger.serial
            spent.append(time.process_time() - began)
    return statistics.median(spent)


def _middle(parts: list[dict[str, float]]) -> dict[str, float]:
    """Median of each part and of their sum."""
    labels = sorted({label for one in parts for label in one})
    found = {label: statistics.median(one.get(label, 0.0) for one in parts) for label in labels}
    return {**found, "together": statistics.median(sum(one.values()) for one in parts)}


def masked_bytes(made: Federation, names: tuple[str, ...]) -> dict[str, float]:
    """Bytes up per site in a masked sum, and in the setup before the first, from the audit logs of the last run."""
    lines = [line for site in names for line in made.audited(site, f"run-{made.runs}")]
    last = max(line["round"] for line in lines if line["kind"] == "work")
    of_sum = [line for line in lines if line["kind"] in ("work", "reduce")]
    later = [line["bytes"] for line in of_sum if line["round"] == last]
    first = [line["bytes"] for line in of_sum if line["round"] == 0]
    return {
        "sum": sum(later) / len(names),
        "first": sum(first) / len(names),
        "exchanges": len(later) / len(names),
        "exchanges of the first": len(first) / len(names),
    }
