"""Row-level privacy on MNIST and TCGA: error against ε, k, rounds and the number of rows.

    PARTSONG_DATA=folder python -m experiments.privacy.rows --processes 16 --output privacy-rows.jsonl

Row bound, rounds and ridge are those with the least error on other data, at k = 10 (at 1 for k = 1): for MNIST on
Fashion-MNIST with as many rows (20000 where there are more), for TCGA on mouse brain cells. One sum with one noise: all
rows at one party, or noise shares under secure aggregation, which is equivalent. "Open": each of ten parties adds the
full noise.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from experiments.privacy.methods import DATA_FREE, Setting
from experiments.privacy.runs import TUNING_SEED, Records, Trial, chosen_setting, known, run_all
from experiments.shared.metrics import spread

RIDGES = (0.0, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
ROUNDS = (1, 3, 10, 30)
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
FURTHER = (*EPSILONS, 300.0, 1000.0, 3000.0)
"""Values of ε without meaningful privacy, where noise is as small as with more rows."""
USUAL = (1.0, 3.0, 10.0)
TUNING_RANK, RIDGES_ALONE = 10, (0.0, 1.0, 10.0)
"""Settings for k = 1 are tuned separately, those of all other ranks at this rank."""
OPEN_PARTIES = 10


@dataclass(frozen=True, slots=True)
class Study:
    """Data and tuning data: numbers of rows of both, row bounds to try, ranks.

    For ε in `careful`, settings are tuned with two seeds for all sizes; otherwise with one seed for the largest size.
    Beyond the largest tuned ε, its settings are used.
    """

    data: str
    other: str
    sizes: tuple[int, ...]
    other_sizes: tuple[int, ...]
    bounds: tuple[float, ...]
    ranks: tuple[int, ...]
    epsilons: tuple[float, ...]
    careful: tuple[float, ...]
    public: str = ""
    rounds: tuple[int, ...] = ROUNDS
    ridges: tuple[float, ...] = RIDGES

    @property
    def whole(self) -> int:
        """The number of all rows."""
        return self.sizes[-1]

    def size_for(self, rows: int) -> int:
        """Number of rows of the tuning data for this number of rows."""
        return max((n for n in self.other_sizes if n <= rows), default=self.other_sizes[0])


STUDIES: Mapping[str, Study] = {
    "mnist": Study(
        "mnist", "fashion", (300, 1000, 3000, 10000, 30000, 60000), (300, 1000, 3000, 10000, 20000), (1.0, 10.0),
        (1, 10, 20), EPSILONS, USUAL, "pooled on fashion",
    ),
    "tcga": Study("tcga", "brain", (844,), (844,), (1.0, 30.0, 300.0), (1, 3, 10), FURTHER, EPSILONS),
}  # fmt: skip


def _private(study: Study, rows: int, rank: int, seed: int, setting: Setting, data: str = "") -> Trial:
    return Trial("rows", data or study.data, "row level", 1, rows, rank, seed, setting)


def tuning(study: Study) -> Iterator[Trial]:
    """Trials of all settings on the tuning data."""
    for rows, epsilon in product(study.other_sizes, (e for e in study.epsilons if e <= EPSILONS[-1])):
        is_careful = epsilon in study.careful
        if not is_careful and rows != study.other_sizes[-1]:
            continue
        for bound, rounds, ridge, seed in product(
            study.bounds, study.rounds, study.ridges, range(2 if is_careful else 1)
        ):
            setting = Setting("gaussian", epsilon, "add-or-remove", rounds, 0, bound, ridge)
            yield _private(study, rows, TUNING_RANK, TUNING_SEED + seed, setting, study.other)
            if seed == 0 and ridge in RIDGES_ALONE:
                yield _private(study, rows, 1, TUNING_SEED, setting, study.other)


def best(found: Records, study: Study, rows: int, epsilon: float, rank: int = TUNING_RANK) -> Setting:
    """The tuned setting for this number of rows and ε."""
    wanted = Setting("gaussian", min(epsilon, EPSILONS[-1]), "add-or-remove")
    like = _private(study, rows, TUNING_RANK if rank > 1 else 1, 0, wanted)
    return replace(chosen_setting(found, like, study.other, rows=study.size_for(rows)), epsilon=epsilon)


def floors(study: Study, seeds: Sequence[int], sizes: Sequence[int]) -> Iterator[Trial]:
    """Trials without noise: pooled and data-free."""
    for rows, rank, seed, method in product(sizes, study.ranks, seeds, ("pooled", *DATA_FREE)):
        yield Trial("free", study.data, method, 1, rows, rank, seed)
    for rank, seed in product(study.ranks if study.public else (), seeds):
        yield Trial("free", study.data, study.public, 1, study.whole, rank, seed)


def measured(found: Records, study: Study, seeds: Sequence[int]) -> Iterator[Trial]:
    """Trials over rows at the usual ε, over ε with all rows, over rounds, and with noise at each of ten parties."""
    by_size = [(rows, epsilon) for rows in study.sizes for epsilon in USUAL]
    by_epsilon = [(study.whole, epsilon) for epsilon in study.epsilons]
    for (rows, epsilon), rank, seed in product(dict.fromkeys([*by_size, *by_epsilon]), study.ranks, seeds):
        yield _private(study, rows, rank, seed, best(found, study, rows, epsilon, rank))
    for epsilon, seed in product(USUAL, seeds):
        one = _private(study, study.whole, TUNING_RANK, seed, best(found, study, study.whole, epsilon))
        yield replace(one, method="row level, open", parties=OPEN_PARTIES)
        yield from (replace(one, setting=replace(one.setting, rounds=rounds)) for rounds in study.rounds)


def run_study(study: Study, chosen: argparse.Namespace, seeds: Sequence[int]) -> dict[Trial, dict[str, float]]:
    """Tune on the tuning data and measure."""
    if chosen.quick:
        few = study.other_sizes[:1]
        study = replace(study, sizes=few, other_sizes=few, epsilons=USUAL, careful=(), rounds=(1,), ridges=(1.0,))
    run_all([*tuning(study), *floors(study, seeds, study.sizes)], chosen.output, chosen.processes)
    return run_all(measured(known(chosen.output), study, seeds), chosen.output, chosen.processes)


def main(arguments: Sequence[str] | None = None) -> None:
    """Tune, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", default=",".join(STUDIES), help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rows, one seed, few settings")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument(
        "--output", type=Path, required=True, help="a JSON Lines file; runs that it holds are not repeated"
    )
    chosen = parser.parse_args(arguments)
    for name in chosen.studies.split(","):
        found = run_study(STUDIES[name], chosen, range(1 if chosen.quick else chosen.seeds))
        values: dict[tuple[object, ...], list[float]] = {}
        for trial, record in found.items():
            setting = trial.setting
            label = (trial.data, trial.method, trial.rows, trial.rank, setting.epsilon, setting.rounds, setting.ridge)
            values.setdefault(label, []).append(record["error"])
        for label, numbers in values.items():
            print(*label, spread(numbers, 4), sep=" | ", flush=True)


if __name__ == "__main__":
    main()
