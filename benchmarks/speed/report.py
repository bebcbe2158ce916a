"""The full report on speed: the machine, the settings, all tables, and a sentence for each target.

docs/results/speed.md is its summary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import machine
from benchmarks.speed import floor
from benchmarks.speed.contestants import OURS, Contestant
from benchmarks.speed.curves import LEVELS, Ratio, Run, fastest, median_of, median_ratio, ratio, spread
from benchmarks.speed.results import Results

CD_STARTS = ("sklearn-cd-random", "sklearn-cd-nndsvda")
FAST_ON = ("mnist", "stack-overflow")
WANTED = {0.99: 3.0, 0.999: 5.0}
NEVER_BELOW = 0.95
NEVER = "–"
UNKNOWN = "?"


def _arrives(runs: Sequence[Run], target: float) -> bool:
    """Whether at least one seed reached the level."""
    return any(math.isfinite(run.time_to(target)) for run in runs)


@dataclass(frozen=True, slots=True)
class Report:
    """All results as Markdown; `pictures` maps a workload to the file name of its figure."""

    results: Results
    contestants: Sequence[Contestant]
    workloads: Sequence[tuple[str, str]]
    pictures: dict[str, str]

    def text(self) -> str:
        parts = [
            ["# Speed"],
            list(self._how()),
            ["## Targets", "", *(f"- {line}" for line in self._verdicts())],
            *(list(self._all_data(level)) for level in LEVELS),
            *(list(self._workload(name, description)) for name, description in self.workloads),
            list(self._floor()),
            list(self._memory()),
            list(self._compiling()),
            list(self._clocks()),
        ]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def _how(self) -> Iterator[str]:
        settings = self.results.settings
        yield (
            f"{machine.processor()}, {machine.cores()} cores, {machine.memory_gigabytes():.0f} GB; "
            f"{settings.get('threads', '?')} threads for BLAS, OpenMP, torch and partsong alike; "
            f"BLAS of NumPy: {machine.blas()}."
        )
        yield ""
        yield ", ".join(f"{name} {number}" for name, number in machine.versions().items()) + "."
        yield ""
        yield "```"
        yield from dict.fromkeys(self.results.commands)
        yield "```"
        yield ""
        yield (
            "Measure: seconds to 99 % and 99.9 % of the best explained variance 1 − ‖X−WH‖²/‖X‖² (float64) that any "
            "method reached on that data. The clock includes checks and initialization. It excludes imports, compiling "
            "(below), the conversion of data to a library's format, and evaluation. Each method runs once per seed, in "
            f"rotated order, {settings.get('seeds', '?')} seeds, at most {settings.get('seconds', 0):g} s a run on the "
            "largest data. The first seed runs to the limit, or until the last third of its time gains less than "
            "0.001 %. Later seeds end once they pass their level, and any run ends that could not reach its next level "
            "within the limit at twice its recent pace. Methods that missed 99.9 % on the first seed are run to 99 % "
            "afterwards; those that missed 99 % are not run again (scikit-learn's cd is always run to both). Iterates "
            "are evaluated whenever the clock has advanced by 2 %. Times are medians (smallest–largest); ratios are "
            "taken within a seed, then the median. `–` means never within the limit, `>` a ratio to a method that "
            "never reached the level."
        )
        for name, why in self.results.skipped.items():
            yield ""
            yield f"{name}: {why}."

    def _workload(self, name: str, description: str) -> Iterator[str]:
        runs = self.results.of(name)
        if not runs:
            return
        best = self.results.best(name)
        shape = self.results.shapes.get(name, "")
        yield f"## {name}"
        yield ""
        yield f"{description[0].upper()}{description[1:]} ({shape}). Best explained variance: {best:.5f}."
        yield ""
        yield "| method | s to 99 % | s to 99.9 % | best reached | time / partsong's, 99 % | the same, 99.9 % | seeds |"
        yield "|---|---|---|---|---|---|---|"
        for contestant in self.contestants:
            held = [run for run in runs if run.contestant == contestant.name]
            if held:
                yield self._row(contestant, held, runs, best)
        notes = [f"{run.contestant}, seed {run.seed}: {run.note}." for run in runs if run.note]
        if notes:
            yield ""
            yield from notes
        after = spread(run.after for run in runs if run.contestant == OURS)
        if after.count:
            yield ""
            yield (
                f"After its last iteration `fit` of partsong takes {after.median:.2f} s more to solve W for the final "
                "H, to scale and to sort. Closing steps of other libraries are not counted either."
            )
        if name in self.pictures:
            yield ""
            yield f"![Distance from the best over time on {name}]({self.pictures[name]})"

    def _all_data(self, level: float) -> Iterator[str]:
        """Methods × data: the ratio of times to a level."""
        names = [name for name, _ in self.workloads if self.results.of(name)]
        if not names:
            return
        yield f"## Time divided by partsong's, {100 * level:g} %"
        yield ""
        yield f"| method | {' | '.join(names)} |"
        yield "|---|" + "---|" * len(names)
        for contestant in self.contestants:
            cells = []
            for name in names:
                ours, held = self.results.of(name, contestant.against), self.results.of(name, contestant.name)
                cells.append(shown(median_ratio(ours, held, level * self.results.best(name))) if held else NEVER)
            if contestant.name != contestant.against and set(cells) != {NEVER}:
                yield f"| {contestant.name} | {' | '.join(cells)} |"

    def _row(self, contestant: Contestant, held: Sequence[Run], runs: Sequence[Run], best: float) -> str:
        ours = [run for run in runs if run.contestant == contestant.against]
        times = [_seconds(held, level * best) for level in LEVELS]
        alone = contestant.name == contestant.against
        ratios = ["1" if alone else shown(median_ratio(ours, held, level * best)) for level in LEVELS]
        reached = max(run.best for run in held)
        share = f"{100 * reached / best:.2f} %" if math.isfinite(reached) else NEVER
        label = contestant.name if contestant.against == OURS else f"{contestant.name} (against {contestant.against})"
        return f"| {label} | {' | '.join(times)} | {share} | {' | '.join(ratios)} | {len(held)} |"

    def _verdicts(self) -> Iterator[str]:
        for name in FAST_ON:
            for level, wanted in WANTED.items():
                yield self._against_scikit_learn(name, level, wanted)
        yield self._never_below(OURS)
        yield self._never_below("partsong-same-start")
        ratios = {name: found["ratio"] for name, found in self.results.floor.items()}
        allowed = f"a full iteration of one sweep within {floor.ALLOWED}× of its two products"
        yield _verdict(allowed, ratios, floor.ALLOWED, lambda v: f"{v:.2f}×")
        used = {name: found["peak"] / found["allowance"] for name, found in self.results.memory.items()}
        yield _verdict("memory within data + 4(n+m)k numbers + 64 MB", used, 1.0, lambda v: f"{100 * v:.0f} % of it")

    def _against_scikit_learn(self, name: str, level: float, wanted: float) -> str:
        """Judge by the better of the two starts per seed, then the median."""
        claim = f"{name}, {100 * level:g} %: at least {wanted:g}× faster than the better scikit-learn cd start"
        target = level * self.results.best(name)
        ours = {run.seed: run for run in self.results.of(name, OURS)}
        theirs = fastest((run for start in CD_STARTS for run in self.results.of(name, start)), target)
        found = median_of(
            [one for run in theirs if run.seed in ours and (one := ratio(ours[run.seed], run, target)) is not None]
        )
        if found is None:
            return f"{claim}: not measured."
        met = found.value >= wanted and found.bound != "<"
        return f"{claim}: {'met' if met else 'NOT met'}, {shown(found)}."

    def _never_below(self, ours_is: str) -> str:
        """Judge by the smallest median ratio over all data, listed libraries and levels."""
        claim = f"nowhere below {NEVER_BELOW}× of any listed peer"
        claim += "" if ours_is == OURS else " from the same random start"
        found: dict[str, Ratio] = {}
        missed: list[str] = []
        for name, _ in self.workloads:
            ours = self.results.of(name, ours_is)
            for contestant in self.contestants:
                if contestant.module == "partsong" or contestant.against != ours_is:
                    continue
                for level in LEVELS:
                    theirs, target = self.results.of(name, contestant.name), level * self.results.best(name)
                    held = median_ratio(ours, theirs, target)
                    where = f"{contestant.name} on {name} at {100 * level:g} %"
                    if held is not None:
                        found[where] = held
                    elif _arrives(theirs, target) and not _arrives(ours, target):
                        missed.append(f"{where}, which partsong did not reach at all")
        if not found:
            return f"{claim}: not measured."
        least = min(found, key=lambda where: found[where].value)
        below = {where: held for where, held in found.items() if held.value < NEVER_BELOW and held.bound != ">"}
        if not below and not missed:
            return f"{claim}: met in all {len(found)} comparisons; the least is {shown(found[least])} ({least})."
        worst = "; ".join([*missed, *(f"{where} {shown(held)}" for where, held in below.items())])
        total = len(found) + len(missed)
        return f"{claim}: NOT met in {len(below) + len(missed)} of {total} comparisons: {worst}."

    def _floor(self) -> Iterator[str]:
        if not self.results.floor:
            return
        yield "## Above the product floor"
        yield ""
        yield (
            "Milliseconds, medians, interleaved: the two products X Hᵀ and Wᵀ X alone (in one pass or two, whichever "
            "is cheaper), and a full iteration with everything around them."
        )
        yield ""
        yield "| data | products | one sweep | ratio | one sweep, extrapolated | default | repeats |"
        yield "|---|---|---|---|---|---|---|"
        for name, held in self.results.floor.items():
            cells = [
                f"{held[key]:.2f}" for key in ("products", "one sweep", "ratio", "one sweep, extrapolated", "default")
            ]
            yield f"| {name} | {' | '.join(cells)} | {held['repeats']:.0f} |"

    def _memory(self) -> Iterator[str]:
        if not self.results.memory:
            return
        yield "## Memory"
        yield ""
        yield "MB. The peak is that above a process that has already fitted something small, and includes the data."
        yield ""
        yield "| data | data | peak | allowance | share |"
        yield "|---|---|---|---|---|"
        for name, held in self.results.memory.items():
            cells = [f"{held[key] / 1e6:.0f}" for key in ("data", "peak", "allowance")]
            yield f"| {name} | {' | '.join(cells)} | {100 * held['peak'] / held['allowance']:.0f} % |"
        if any(name.startswith("mapped") for name in self.results.memory):
            yield ""
            yield "The mapped file stays on disk: its allowance excludes the data."

    def _compiling(self) -> Iterator[str]:
        if not self.results.compiling:
            return
        columns = list(next(iter(self.results.compiling.values())))
        yield "## First call"
        yield ""
        yield "Seconds, on 200 × 50 numbers."
        yield ""
        yield f"| kernels | {' | '.join(columns)} |"
        yield "|---|" + "---|" * len(columns)
        for name, held in self.results.compiling.items():
            yield f"| {name} | {' | '.join(f'{held[column]:.2f}' for column in columns)} |"

    def _clocks(self) -> Iterator[str]:
        yield "## Methods and their time points"
        yield ""
        for contestant in self.contestants:
            state = contestant.clock if contestant.is_installed else f"not installed: pip install {contestant.package}"
            yield f"- {contestant.name}: {state}."


def _seconds(runs: Sequence[Run], target: float) -> str:
    found = spread(run.time_to(target) for run in runs)
    if not found.count:
        return UNKNOWN
    if not math.isfinite(found.median):
        return NEVER
    most = "never" if math.isinf(found.high) else _digits(found.high)
    return _digits(found.median) + ("" if found.count == 1 else f" ({_digits(found.low)}–{most})")


def _digits(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"


def shown(found: Ratio | None) -> str:
    """A ratio with its bound and its range over seeds."""
    if found is None:
        return NEVER
    number = f"{found.bound} {_spelled(found.value)}×".strip()
    return number if found.count < 2 else f"{number} ({_spelled(found.low)}–{_spelled(found.high)})"


def _spelled(value: float) -> str:
    return f"{value:.2f}" if value < 2 else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _verdict(claim: str, values: dict[str, float], allowed: float, spell: Callable[[float], str]) -> str:
    if not values:
        return f"{claim}: not measured."
    where = max(values, key=lambda name: values[name])
    over = {name: value for name, value in values.items() if value > allowed}
    if not over:
        return f"{claim}: met on all {len(values)}; the most is {spell(values[where])} ({where})."
    listed = ", ".join(f"{name} {spell(value)}" for name, value in over.items())
    return f"{claim}: NOT met on {len(over)} of {len(values)}: {listed}."
