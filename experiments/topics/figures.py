"""Figures 2, 3 and 4 and Table V of the FedNMF+MI paper, with the settings that `experiments.topics.table` has chosen.

    python -m experiments.topics.figures --sets spam,news,rt --figures 2,3,4 --seeds 3 --jobs 16
    python -m experiments.topics.figures --sets so --figures V --jobs 5

2: accuracy over the number of topics; 3: macro-F1 over bytes at k = 100; 4: macro-F1 over α and over the number of
parties at k = 50; V: the words of topics at k = 200. Two are not in the paper: `--figures ablation`, the step of
weights as printed, and `--figures longer`, descents for so many rounds that they send as much as 20 rounds of sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from experiments.topics.methods import FEDERATED, MI, OURS, SERVERS, Settings
from experiments.topics.runs import known, run_all
from experiments.topics.settings import Run, build_run
from experiments.topics.table import Records, parser_of, settings_of, smaller, tuned

RANKS = (20, 50, 100, 200)
ALPHAS = (0.1, 1.0, 10.0, 100.0)
PARTIES = (1, 10, 30, 50)
LOOKS = 10
LONG = 100
VARIED = tuple(name + extra for name in ("FedAvg", "FedAdam") for extra in ("", MI))
SHOWN = ("FedLDA", *VARIED)
DESCENDING = tuple(name for name in FEDERATED if name.removesuffix(MI) in SERVERS)


def over_ranks(found: Records, data: str, seeds: Iterable[int]) -> list[Run]:
    """Runs of Fig. 2, most of which Table IV has as well."""
    return [
        build_run(data, method, rank, seed, tuned(found, data, method))
        for rank in RANKS
        for seed in seeds
        for method in DESCENDING
    ]


def over_bytes(found: Records, data: str, seeds: Iterable[int]) -> list[Run]:
    """Runs of Fig. 3."""
    return [
        build_run(data, method, 100, seed, settings, looks=LOOKS)
        for seed in seeds
        for method in (*DESCENDING, *OURS)
        for settings in settings_of(found, data, method)[-1:]
    ]


def over_parties(found: Records, data: str, seeds: Iterable[int]) -> list[Run]:
    """Runs of Fig. 4."""
    cases = [{"alpha": alpha} for alpha in ALPHAS] + [{"parties": parties} for parties in PARTIES]
    return [
        build_run(data, method, 50, seed, tuned(found, data, method), **case)
        for seed in seeds
        for method in VARIED
        for case in cases
    ]


def topics(found: Records, data: str, seeds: Iterable[int]) -> list[Run]:
    """Runs of Table V, which keep all topics of one seed."""
    return [
        build_run(data, method, 200, 0, settings, shown=200)
        for method in (*SHOWN, "exact")
        for settings in settings_of(found, data, method)[-1:]
    ]


def ablation(found: Records, data: str, seeds: Iterable[int]) -> list[Run]:
    """Runs with the step of weights as printed, and with weights that are fitted before the descent."""

    def changed(own: Settings) -> list[Settings]:
        return [replace(own, weight_step="batch"), replace(own, fits_first=True)]

    return [
        build_run(data, method, 50, seed, settings)
        for seed in seeds
        for method in VARIED
        for settings in changed(tuned(found, data, method))
    ]


def longer(found: Records, data: str, seeds: Iterable[int]) -> list[Run]:
    """Runs of LONG rounds: with a fifth of the parties each, they send as much as 20 rounds of all parties."""
    return [
        build_run(data, method, 50, seed, replace(tuned(found, data, method), rounds=LONG))
        for seed in seeds
        for method in DESCENDING
    ]


FIGURES = {
    "2": over_ranks, "3": over_bytes, "4": over_parties, "V": topics, "ablation": ablation, "longer": longer,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; the report draws the figures."""
    parser = parser_of(__doc__)
    parser.add_argument("--figures", default="2,3,4", help=f"some of {', '.join(FIGURES)}")
    chosen = parser.parse_args(arguments)
    found = known(chosen.output)
    seeds = range(1 if chosen.quick else chosen.seeds)
    wanted = [(FIGURES[figure], data) for figure in chosen.figures.split(",") for data in chosen.sets.split(",")]
    runs_wanted = [one for figure, data in wanted for one in figure(found, data, seeds)]
    run_all(
        smaller(runs_wanted) if chosen.quick else runs_wanted, chosen.output, chosen.jobs, chosen.minutes, chosen.device
    )


if __name__ == "__main__":
    main()
