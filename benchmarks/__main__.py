"""python -m benchmarks: measure, and write reports to build/ and docs/results/federation.md."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks import machine

FLOWER = ("flower-long", "flower-overhead", "flower-layer", "flower-report")
PARTS = (
    "speed", "floor", "memory", "compiling", "tuning", "federation", "ranks-memory", "game", "defaults", "report",
    *FLOWER,
)  # fmt: skip
USUAL = ("speed", "floor", "memory", "compiling")


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure speed, product floor, memory, compile time. PARTSONG_DATA names the folder of real data.",
    )
    parser.add_argument("parts", nargs="*", choices=(*PARTS, []), help=f"default: {' '.join(USUAL)}")
    parser.add_argument("--quick", action="store_true", help="tiny data and short runs, to check that everything works")
    parser.add_argument("--workloads", default="", help="comma-separated names")
    parser.add_argument("--contestants", default="", help="comma-separated names; use --keep to measure in parts")
    parser.add_argument("--seeds", type=int, help="runs per method (default 5; tuning 3; quick 2)")
    parser.add_argument("--seconds", type=float, help="limit per run on the largest data (default 20; tuning 2)")
    parser.add_argument(
        "--threads", type=int, default=machine.cores(), help="threads for every library (default: all cores)"
    )
    parser.add_argument("--thorough", action="store_true", help="run every method to its limit on all seeds")
    parser.add_argument("--large", action="store_true", help="memory: also measure large data (wide, sparse, mapped)")
    parser.add_argument("--keep", type=Path, help="a JSON file of runs that is read, extended and written back")
    parser.add_argument("--output", type=Path, help="default build/speed.md; tuning, game and others: standard output")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    chosen = arguments(words)
    parts = tuple(chosen.parts) or USUAL
    from threadpoolctl import threadpool_limits

    with threadpool_limits(chosen.threads):
        if "tuning" in parts:
            _tune(chosen, words)
        if "federation" in parts:
            _federate(chosen, words)
        if set(parts) & set(FLOWER):
            _over_flower(chosen, parts, words)
        if "ranks-memory" in parts:
            _over_ranks(chosen, words)
        if "game" in parts:
            _play(chosen)
        if "defaults" in parts:
            _defaults(chosen, words)
        if set(parts) - {"tuning", "federation", "ranks-memory", "game", "defaults", *FLOWER}:
            _measure(chosen, parts, words)


def _measure(chosen: argparse.Namespace, parts: tuple[str, ...], words: list[str]) -> None:
    from benchmarks.memory import fit as memory
    from benchmarks.speed import compiling
    from benchmarks.speed.contestants import chosen as chosen_contestants
    from benchmarks.speed.contestants import everyone
    from benchmarks.speed.report import Report
    from benchmarks.speed.results import Results
    from benchmarks.speed.workloads import ALL
    from benchmarks.speed.workloads import chosen as chosen_workloads

    began = time.perf_counter()
    results = Results.load(chosen.keep) if chosen.keep else Results()
    results.commands.append(machine.command(words))
    if set(parts) & {"speed", "floor", "memory"}:
        contestants = chosen_contestants(chosen.contestants)
        for workload in chosen_workloads(chosen.workloads):
            why = workload.missing()
            if why:
                results.skipped[workload.name] = why
                say(f"{workload.name}: {why}")
                continue
            results.skipped.pop(workload.name, None)
            _workload(chosen, parts, workload, contestants, results)
            if chosen.keep:
                results.save(chosen.keep)
    if chosen.large and "memory" in parts:
        say("memory: a mapped file of 1 GB")
        results.memory["mapped file"] = memory.measure_mapped(chosen.threads)
        say("memory: wide and large sparse data")
        results.memory |= memory.measure_large(chosen.threads)
    if "compiling" in parts and not (chosen.quick and not chosen.parts):
        say("compiling: two processes")
        results.compiling = compiling.measure()
    output = chosen.output or Path("build/speed.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    pictures = _draw(results, output)
    described = [(workload.name, workload.description) for workload in ALL]
    output.write_text(Report(results, everyone(), described, pictures).text(), encoding="utf-8")
    if chosen.keep:
        results.save(chosen.keep)
    say(f"{output.name} written after {(time.perf_counter() - began) / 60:.1f} minutes")


def _workload(chosen, parts, workload, contestants, results) -> None:  # type: ignore[no-untyped-def]
    from benchmarks.memory import fit as memory
    from benchmarks.speed import floor
    from benchmarks.speed.evaluation import Problem
    from benchmarks.speed.measure import Rounds

    problem = Problem(workload.load(chosen.quick), workload.rank_for(chosen.quick))
    results.shapes[workload.name] = _shape(problem)
    if "speed" in parts:
        seeds = chosen.seeds or (2 if chosen.quick else 5)
        seconds = chosen.seconds or (0.5 if chosen.quick else 20.0)
        results.settings.update(threads=chosen.threads, seeds=seeds, seconds=seconds)
        known = results.of(workload.name)
        limit = seconds * workload.share
        rounds = Rounds(workload.name, problem, limit, chosen.threads, chosen.thorough, known, say)
        results.add(rounds.measure([one for one in contestants if one.is_installed], seeds))
    results.settings.setdefault("threads", chosen.threads)
    if "floor" in parts:
        results.floor[workload.name] = floor.measure(problem, chosen.threads, 5 if chosen.quick else 30)
        say(f"{workload.name}: one sweep takes {results.floor[workload.name]['ratio']:.2f} × its products")
    if "memory" in parts:
        results.memory[workload.name] = held = memory.measure(problem, chosen.threads)
        say(f"{workload.name}: peak {held['peak'] / 1e6:.0f} MB, allowance {held['allowance'] / 1e6:.0f} MB")


def _shape(problem) -> str:  # type: ignore[no-untyped-def]
    n, m = problem.X.shape
    stored = f", {problem.X.nnz} entries" if problem.is_sparse else ""
    return f"{n} × {m}{stored}, {problem.X.dtype}, k = {problem.rank}"


def _draw(results, output: Path) -> dict[str, str]:  # type: ignore[no-untyped-def]
    from benchmarks.speed.picture import drawn

    pictures = {}
    for name in dict.fromkeys(run.workload for run in results.runs):
        first = [run for run in results.of(name) if run.seed == 0 and run.points]
        if first:
            pictures[name] = f"{output.stem}-{name}.svg"
            (output.parent / pictures[name]).write_text(drawn(first, results.best(name)), encoding="utf-8")
    return pictures


def _defaults(chosen: argparse.Namespace, words: list[str]) -> None:
    from benchmarks.speed import defaults

    seeds = chosen.seeds or 5
    found = defaults.measure(seeds, keep=chosen.keep, say=say)
    page = defaults.report(found, machine.command(words), seeds)
    if chosen.output:
        chosen.output.write_text(page, encoding="utf-8")
    else:
        say(page)


def _play(chosen: argparse.Namespace) -> None:
    from benchmarks.speed import game

    lines = game.measure(chosen.quick, say)
    if chosen.output:
        chosen.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _tune(chosen: argparse.Namespace, words: list[str]) -> None:
    from benchmarks.tuning import sweeps as tuning

    seeds = chosen.seeds or (2 if chosen.quick else 3)
    seconds = chosen.seconds or (0.3 if chosen.quick else 2.0)
    outcomes = tuning.measure(chosen.threads, seeds, seconds, chosen.quick, say)
    heading = "\n\n".join(
        [
            "# Sweeps per product and extrapolation, on generated data",
            f"{machine.processor()}, {chosen.threads} threads. Seconds and iterations to 99.9 % of the best explained "
            f"variance of any setting, {seeds} seeds (median, smallest–largest), at most {seconds:g} s a run; the "
            "start is the same for all and not counted. Cost: median seconds over the smallest of all settings, mean "
            "over data.",
            f"```\n{machine.command(words)}\n```",
        ]
    )
    page = tuning.written(outcomes, heading)
    if chosen.output is None:
        print(page)
        return
    output = chosen.output.with_name("tuning.md") if set(chosen.parts) - {"tuning"} else chosen.output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    say(f"{output.name} written")


def _federate(chosen: argparse.Namespace, words: list[str]) -> None:
    from benchmarks.flower import in_process as federation

    found = federation.measure(chosen.threads, chosen.quick, say)
    heading = (
        "# What a federation costs\n\n"
        "Overhead above the parties' own work, in one process and between processes over Flower "
        "(`federation-flower.json` beside this page).\n\n"
        f"{machine.processor()}, {chosen.threads} threads.\n\n```\n{machine.command(words)}\n```\n"
    )
    output = chosen.output if chosen.output and chosen.parts == ["federation"] else Path("docs/results/federation.md")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(heading + federation.written(found) + _flower_part(output), encoding="utf-8")
    say(f"{output.name} written")


def _over_flower(chosen: argparse.Namespace, parts: tuple[str, ...], words: list[str]) -> None:
    """Add to the log, and rewrite the second half of docs/results/federation.md."""
    import json
    import os

    from benchmarks.flower import processes as federation_flower
    from benchmarks.flower import report as flower_report

    output = chosen.output or Path("docs/results/federation.md")
    kept = output.with_name(f"{output.stem}-flower.json")
    found = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    own = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(own)
    about = {"command": machine.command(words), "processor": f"{machine.processor()}, {machine.cores()} cores"}
    before = os.getloadavg()[0]
    if "flower-long" in parts:
        sizes = (4, 6) if chosen.quick else (10, 30)
        found["long"] = federation_flower.long_run(*sizes, say) | about
        found["long"]["load"] = f"{before:.1f} before, {os.getloadavg()[0]:.1f} in the end"
    if "flower-overhead" in parts:
        blocks = (1, 3) if chosen.quick else (chosen.seeds or 3, 6)
        found["overhead"] = federation_flower.overhead(4, *blocks, masked=True, say=say) | about
        found["overhead"]["load"] = f"{before:.1f} before, {os.getloadavg()[0]:.1f} in the end"
    if "flower-layer" in parts:
        rounds = 3 if chosen.quick else chosen.seeds or 40
        found["layer"] = federation_flower.layer(4, rounds, say) | about
        found["layer"]["load"] = f"{before:.1f} before, {os.getloadavg()[0]:.1f} in the end"
    output.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(found) + "\n", encoding="utf-8")
    text = output.read_text(encoding="utf-8") if output.exists() else ""
    output.write_text(text.partition(flower_report.HEADING)[0] + flower_report.written(found), encoding="utf-8")
    say(f"{output.name} written")


def _flower_part(output: Path) -> str:
    """The half of the page that the other command writes."""
    from benchmarks.flower.report import HEADING

    _, found, rest = (output.read_text(encoding="utf-8") if output.exists() else "").partition(HEADING)
    return f"\n{found}{rest}" if found else ""


def _over_ranks(chosen: argparse.Namespace, words: list[str]) -> None:
    from benchmarks.memory import ranks as ranks_memory

    found = ranks_memory.measure(chosen.quick, say)
    shape = ranks_memory.QUICK_SHAPE if chosen.quick else ranks_memory.SHAPE
    heading = f"# Memory of a fit over ranks\n\n{machine.processor()}.\n\n```\n{machine.command(words)}\n```\n\n"
    text = heading + ranks_memory.written(found, shape)
    if chosen.output and chosen.parts == ["ranks-memory"]:
        chosen.output.write_text(text, encoding="utf-8")
    else:
        print(text)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    machine.start_again_with(arguments(sys.argv[1:]).threads)
    main(sys.argv[1:])
