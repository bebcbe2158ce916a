"""Fig. 4 of the FNMF paper: error against ε, with noise as printed and with noise that protects parties.

    PARTSONG_DATA=folder python -m experiments.privacy.parties --processes 16 --output privacy-parties.jsonl
    python -m experiments.privacy.parties --parts shipped --processes 16 --output privacy-shipped.jsonl

Clip and number of rounds are those with the least error on generated data of other seeds (for MNIST: on Fashion-MNIST),
for each method, kind of noise, relation and ε. So are row bound, rounds and ridge of the row-level method.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from experiments.privacy.methods import DATA_FREE, METHODS, SIGNED, Setting
from experiments.privacy.runs import TUNING_SEED, Records, Trial, chosen_setting, known, run_all
from experiments.shared.metrics import spread

RANK = 10
FEW, MANY, DIGITS = ("blocks", 20, 2000), ("blocks", 1000, 20000), ("mnist", 200, 20000)
SEVERAL, CLOTHES, TINY = ("blocks", 300, 6000), ("fashion", 200, 20000), ("blocks", 3, 60)
"""Data, parties, total rows: the cases, the tuning data for MNIST, and the case of --quick."""
PRINTED = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0, 10000.0)
COMPOSED = (1.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
BY_ROW = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
FORMS = (("gaussian", "replace"), ("gaussian", "zero-out"), ("laplace", "replace"))
CLIPS, LONGER_CLIPS = (0.1, 0.3, 1.0, 3.0), (3.0, 10.0, 30.0)
"""Clips for an H with ten rows of norm 1, in the L2 norm and in the up to 30 times larger L1 norm."""
ROUNDS = (1, 3, 10)
ROW_LEVEL = ("row level", "row level, open")


def steps_of(method: str, case: tuple[str, int, int]) -> int:
    """Local steps per round; one-shot methods make those of ten rounds (of three with many parties)."""
    if case == TINY:
        return 5
    return 100 if method != "iPALM once" else (1000 if case == FEW else 300)


def free(case: tuple[str, int, int], seeds: Iterable[int], rank: int, methods: Sequence[str]) -> Iterator[Trial]:
    """Trials without noise: pooled, data-free, and all methods."""
    data, parties, rows = case
    for seed, method in product(seeds, ("pooled", *DATA_FREE, *methods)):
        steps = steps_of(method, case) if method in methods else 100
        yield Trial("free", data, method, parties, rows, rank, seed, Setting(steps=steps))


def printed(case: tuple[str, int, int], seeds: Iterable[int]) -> Iterator[Trial]:
    """Trials with noise as printed, ε per round."""
    data, parties, rows = case
    methods = ("FNMF-LAP (paper)", *METHODS)
    for seed, method, kind, epsilon in product(seeds, methods, ("gaussian", "laplace"), PRINTED):
        setting = Setting(kind, epsilon, steps=steps_of(method, case))
        yield Trial("printed", data, method, parties, rows, RANK, seed, setting)


def cells(
    case: tuple[str, int, int], methods: Sequence[str], forms: Sequence[tuple[str, str]], epsilons: Sequence[float]
) -> Iterator[Trial]:
    """A trial for each curve and ε at party level, without its clip and rounds."""
    data, parties, rows = case
    rank = RANK if data == "blocks" else 20
    for method, (kind, relation), epsilon in product(methods, forms, epsilons):
        setting = Setting(kind, epsilon, relation, steps=steps_of(method, case))
        yield Trial("parties", data, method, parties, rows, rank, 0, setting)


def variants(cell: Trial, seeds: Iterable[int], rounds: Sequence[int] = ROUNDS) -> Iterator[Trial]:
    """All clips and rounds to try for it."""
    clips = LONGER_CLIPS if cell.setting.kind.startswith("laplace") else CLIPS
    for seed, clip, turns in product(seeds, clips, (1,) if cell.method == "iPALM once" else rounds):
        yield replace(cell, seed=seed, setting=replace(cell.setting, clip=clip, rounds=turns))


def row_cells(case: tuple[str, int, int], methods: Sequence[str] = ROW_LEVEL) -> Iterator[Trial]:
    """Trials of the row-level method, without its settings."""
    data, parties, rows = case
    for method, epsilon in product(methods, BY_ROW):
        yield Trial("rows", data, method, parties, rows, RANK, 0, Setting("gaussian", epsilon, "add-or-remove", 0, 0))


def row_variants(cell: Trial, seeds: Iterable[int]) -> Iterator[Trial]:
    """All bounds, rounds and ridges to try for it."""
    for seed, clip, rounds, ridge in product(seeds, (1.0, 3.0, 10.0), (1, 3, 10, 30), (0.1, 0.3, 1.0, 3.0, 10.0)):
        yield replace(cell, seed=seed, setting=replace(cell.setting, clip=clip, rounds=rounds, ridge=ridge))


def at_best(found: Records, cells: Iterable[Trial], seeds: Iterable[int], on: str = "") -> Iterator[Trial]:
    """The trials of a cell with the tuned settings, for all seeds."""
    given_seeds = tuple(seeds)
    for cell in cells:
        among = {} if on else {"parties": cell.parties, "rows": cell.rows}
        setting = chosen_setting(found, cell, on, **among)
        yield from (replace(cell, seed=seed, setting=setting) for seed in given_seeds)


def blocks_trials(chosen: argparse.Namespace, seeds: range, tuning: range) -> list[Trial]:
    """All trials on generated data, tuned on other seeds."""
    case = TINY if chosen.quick else FEW
    forms, epsilons = (FORMS[:1], (10.0, 1000.0)) if chosen.quick else (FORMS, COMPOSED)
    methods = METHODS[::2] if chosen.quick else METHODS
    here, by_row = list(cells(case, methods, forms, epsilons)), list(row_cells(case))
    if chosen.quick:
        by_row = [cell for cell in by_row if cell.setting.epsilon in (1.0, 1000.0)]
    tried = [trial for cell in here for trial in variants(cell, tuning)]
    tried += [trial for cell in by_row for trial in row_variants(cell, tuning)]
    if chosen.quick:
        tried = [t for t in tried if t.setting.clip == 1.0 and t.setting.rounds == 1 and t.setting.ridge in (0, 1.0)]
    run_all(tried, chosen.output, chosen.processes)
    found = known(chosen.output)
    return [
        *free(case, seeds, RANK, methods),
        *(
            t
            for t in printed(case, seeds)
            if not chosen.quick or (t.method in methods and t.setting.epsilon in (1, 1e3))
        ),
        *at_best(found, [*here, *by_row], seeds),
    ]


def many_trials(chosen: argparse.Namespace, seeds: range, tuning: range) -> list[Trial]:
    """A thousand parties of twenty rows, with few rounds."""
    epsilons = (1.0, 3.0, 10.0, 30.0, 100.0, 1000.0)
    here, by_row = list(cells(MANY, METHODS, FORMS[:1], epsilons)), list(row_cells(MANY, ROW_LEVEL[:1]))
    tried = [trial for cell in here for trial in variants(cell, tuning[:1], ROUNDS[:2])]
    tried += [trial for cell in by_row for trial in row_variants(cell, tuning[:1])]
    run_all(tried, chosen.output, chosen.processes)
    return [*free(MANY, seeds, RANK, METHODS), *at_best(known(chosen.output), [*here, *by_row], seeds)]


def digit_trials(chosen: argparse.Namespace, seeds: range, tuning: range) -> list[Trial]:
    """MNIST at 200 parties, tuned on Fashion-MNIST at 200 parties."""
    methods, epsilons = METHODS[:1], (100.0, 1000.0, 10000.0)
    other = cells(CLOTHES, methods, FORMS[:1], epsilons)
    run_all([t for cell in other for t in variants(cell, tuning[:1], ROUNDS[:2])], chosen.output, chosen.processes)
    here = cells(DIGITS, methods, FORMS[:1], epsilons)
    return [*free(DIGITS, seeds, 20, ()), *at_best(known(chosen.output), here, seeds, on="fashion")]


def signed_trials(chosen: argparse.Namespace, seeds: range, tuning: range) -> list[Trial]:
    """FedAvg at 20 and 300 parties: cut off at zero by the parties, or by the server after the mean."""
    forms, epsilons = (FORMS[0], ("gaussian" + SIGNED, "replace")), (10.0, 100.0, 1000.0)
    here = [*cells(FEW, ("FedAvg",), forms[1:], epsilons), *cells(SEVERAL, ("FedAvg",), forms, epsilons)]
    tried = [trial for cell in here for trial in variants(cell, tuning[:1], ROUNDS[:2]) if trial.setting.clip >= 1]
    run_all(tried, chosen.output, chosen.processes)
    return [*free(SEVERAL, seeds[:3], RANK, ()), *at_best(known(chosen.output), here, seeds[:3])]


def shipped_trials(chosen: argparse.Namespace, seeds: range, tuning: range) -> list[Trial]:
    """Party-level privacy as the library has it now, cut off at zero after the mean; use a separate file.

    Clip and rounds are those chosen for uploads that are cut off before the mean.
    """
    found = known(chosen.output.with_name("privacy-parties.jsonl"))
    here = cells(FEW, METHODS, (FORMS[0], FORMS[2]), COMPOSED)
    return [replace(t, setting=replace(t.setting, kind=t.setting.kind + SIGNED)) for t in at_best(found, here, seeds)]


PARTS = {"signed": signed_trials, "blocks": blocks_trials, "many": many_trials, "mnist": digit_trials}
ALL_PARTS = {**PARTS, "shipped": shipped_trials}


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="three small parties, one seed, few settings")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, required=True, help="a JSON Lines file; runs that it holds are not repeated"
    )
    chosen = parser.parse_args(arguments)
    seeds = range(1 if chosen.quick else chosen.seeds)
    tuning = range(TUNING_SEED, TUNING_SEED + (1 if chosen.quick else 2))
    for part in ("blocks",) if chosen.quick else chosen.parts.split(","):
        found = run_all(ALL_PARTS[part](chosen, seeds, tuning), chosen.output, chosen.processes)
        values: dict[tuple[object, ...], list[float]] = {}
        for trial, record in found.items():
            setting = trial.setting
            label = (trial.data, trial.parties, trial.purpose, trial.method, setting.kind, setting.relation)
            values.setdefault((*label, setting.epsilon), []).append(record["rmsd"])
        for label, numbers in values.items():
            print(*label, spread(numbers, 4), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
