"""Tables III and IV of the FedNMF+MI paper: coherence, macro-F1 and accuracy of all methods, tuned alike.

    python -m experiments.topics.corpora --prepare build/data/topics        # once, with PARTSONG_DATA
    python -m experiments.topics.table --sets spam,news,rt,so --ranks 50,100,200 --seeds 3 --jobs 16

Every descent is tuned on each corpus with the same number of draws of E, B and η (and λ and the learning of the
critic); E, B and η are the same with and without mutual information. The draw with the largest mean macro-F1 on tuning
seeds (from 1000 on) at k = 50 is used for all ranks, seeds and readings. There are 200/E rounds, so that all draws see
documents equally often. Runs that the file holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.shared.metrics import spread
from experiments.topics.corpora import SOURCES
from experiments.topics.methods import BAYESIAN, DESCENTS, METHODS, NUMPY, OURS, Settings
from experiments.topics.runs import known, run_all
from experiments.topics.settings import COUNTS, READINGS, WORDS, Run, build_run
from partsong.core.streams import stream

OUTPUT = Path("docs/results/topics.jsonl")
TUNING_SEED, TUNING_RANK = 1000, 50
LOCAL_EPOCHS = 200
ROUNDS_OF_SUMS = (5, 20)
"""Rounds of `exact` and `fnmf` with all parties: as many bytes as 25 rounds of a fifth of them, and four times that."""

Records = Mapping[str, Mapping[str, Any]]

GRIDS: dict[str, tuple[Any, ...]] = {
    "epochs": (10, 20, 30, 40), "batch": (16, 32, 64, 128), "rate": (0.01, 0.02, 0.05, 0.1),
    "server_rate": (0.01, 0.03, 0.1, 0.03), "strength": (0.01, 0.05, 0.1, 0.5),
    "learning": (("dv", 0.0), ("js", 0.0), ("js", 0.2), ("js", 0.5)),
}  # fmt: skip
"""Printed grids of E, B, η and λ; gradients and rates of the critic (rate 0 is η, as printed)."""

FIRST = Settings(LOCAL_EPOCHS // 10, 10, 64, 0.05, 0.1, mi_gradient="js", critic_rate=0.5)
"""Settings near the middle of all grids, with a critic that learns."""


def draws(count: int) -> list[Settings]:
    """A first draw near the middle of all grids; then groups of four with each value of each grid once."""
    found = [FIRST]
    for four in range((count + 2) // 4):
        orders = {name: stream(TUNING_SEED, name, four).permutation(4) for name in GRIDS}
        for place in range(4):
            drawn = {name: GRIDS[name][order[place]] for name, order in orders.items()}
            gradient, critic_rate = drawn.pop("learning")
            rounds = LOCAL_EPOCHS // drawn["epochs"]
            found.append(Settings(rounds=rounds, **drawn, mi_gradient=gradient, critic_rate=critic_rate))
    return found[:count]


def draws_for(method: str, count: int) -> list[Settings]:
    """The draws of a method; for LDA its two usual priors, 1/k and those for short texts."""
    if method in BAYESIAN:
        rounds = LOCAL_EPOCHS // 10
        return [Settings(rounds), Settings(rounds, topic_prior=0.1, word_prior=0.01)]
    return draws(count) if method in DESCENTS else []


def tuning_runs(data: str, methods: Iterable[str], weighting: str, count: int, seeds: int = 1) -> list[Run]:
    """Runs of all draws of all tuned methods, on the first tuning seed, then on the next."""
    return [
        build_run(data, method, TUNING_RANK, TUNING_SEED + number, settings, weighting=weighting)
        for number in range(seeds)
        for method in methods
        for settings in draws_for(method, count)
    ]


def trials(found: Records, data: str, method: str, weighting: str = COUNTS) -> list[list[Mapping[str, Any]]]:
    """The tuning runs of each draw; only draws with the largest number of seeds."""
    by_draw: dict[str, list[Mapping[str, Any]]] = {}
    for record in found.values():
        is_of = (record["data"], record["method"], record["weighting"]) == (data, method, weighting)
        if is_of and record["seed"] >= TUNING_SEED and record["rank"] == TUNING_RANK:
            by_draw.setdefault(json.dumps(record["settings"], sort_keys=True), []).append(record)
    most = max(map(len, by_draw.values()), default=0)
    return [runs for runs in by_draw.values() if len(runs) == most]


def mean_f1(runs: Sequence[Mapping[str, Any]]) -> float:
    """Mean macro-F1 of a draw, by which draws are compared."""
    return sum(run["f1"] for run in runs) / len(runs)


def tuned(found: Records, data: str, method: str, weighting: str = COUNTS) -> Settings:
    """The draw with the largest mean macro-F1, or the first if none was run."""
    tried = trials(found, data, method, weighting)
    if not tried:
        return build_run(data, method, TUNING_RANK, 0, FIRST).settings
    return Settings(**max(tried, key=mean_f1)[0]["settings"])


def settings_of(found: Records, data: str, method: str, weighting: str = COUNTS) -> list[Settings]:
    """Settings of a method: as tuned, or both numbers of rounds for sums."""
    if method in OURS:
        return [Settings(rounds=rounds) for rounds in ROUNDS_OF_SUMS]
    if method in (*DESCENTS, *BAYESIAN):
        return [tuned(found, data, method, weighting)]
    return [Settings(rounds=LOCAL_EPOCHS // 10)]


def table_runs(found: Records, data: str, methods: Iterable[str], weighting: str, **sizes: Any) -> list[Run]:
    """All runs of a corpus: `sizes` are ranks, seeds and readings."""
    return [
        build_run(data, method, rank, seed, settings, weighting=weighting, reading=reading)
        for reading in sizes["readings"]
        for rank in sizes["ranks"]
        for seed in sizes["seeds"]
        for method in methods
        for settings in settings_of(found, data, method, weighting)
    ]


def smaller(runs_wanted: Iterable[Run]) -> list[Run]:
    """The same runs with little work, for --quick."""
    few = {"rounds": 2, "epochs": 1}
    return [replace(one, settings=replace(one.settings, **few), looks=min(one.looks, 2)) for one in runs_wanted]


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Build the parser of common options."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default=",".join(SOURCES), help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1, help="processes, each on one thread")
    parser.add_argument(
        "--minutes",
        type=float,
        default=float("inf"),
        help="start no run that would end later than after so many minutes",
    )
    parser.add_argument(
        "--device", default=NUMPY, help="device of the descents: numpy, or a device of torch such as cuda"
    )
    parser.add_argument("--quick", action="store_true", help="one seed and little work")
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="a JSON Lines file; runs that it holds are not repeated"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--methods", default=",".join((WORDS, *METHODS)))
    parser.add_argument("--ranks", default="50,100,200")
    parser.add_argument("--readings", default=",".join(READINGS))
    parser.add_argument("--weightings", default=COUNTS, help="counts, tf-idf or both")
    parser.add_argument("--draws", type=int, default=5, help="number of settings to try for each descent; 0: no tuning")
    parser.add_argument("--tuning-seeds", type=int, default=2, help="number of tuning seeds for each setting")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    methods, seeds = chosen.methods.split(","), range(1 if chosen.quick else chosen.seeds)
    ranks = [int(rank) for rank in chosen.ranks.split(",")]
    pairs = [(data, weighting) for data in chosen.sets.split(",") for weighting in chosen.weightings.split(",")]
    if not chosen.quick and chosen.draws:
        sizes = (chosen.draws, chosen.tuning_seeds)
        tuning = [one for data, weighting in pairs for one in tuning_runs(data, methods, weighting, *sizes)]
        run_all(tuning, chosen.output, chosen.jobs, chosen.minutes, chosen.device)
    found = known(chosen.output)
    wanted = {"ranks": ranks, "seeds": seeds, "readings": chosen.readings.split(",")}
    runs_wanted = [one for data, weighting in pairs for one in table_runs(found, data, methods, weighting, **wanted)]
    left = chosen.minutes - (time.monotonic() - began) / 60
    results = run_all(
        smaller(runs_wanted) if chosen.quick else runs_wanted, chosen.output, chosen.jobs, left, chosen.device
    )
    values: dict[tuple[str, ...], list[float]] = {}
    for record in results.values():
        case = (record["data"], record["weighting"], record["reading"], f"k={record['rank']}", record["method"])
        values.setdefault((*case, f"{record['settings']['rounds']} rounds"), []).append(record["f1"])
    for case, numbers in values.items():
        print(" | ".join(case), spread(numbers))


if __name__ == "__main__":
    main()
