"""The section of docs/results/federation.md on the overhead of partsong over bare rounds of Flower."""

from __future__ import annotations

import statistics
from typing import Any

OVERHEAD_ALLOWED = 0.10
LABELS = {"desk": "site client", "client": "site client", "who is there": "node list"}
"""Labels in the log -> names of today."""


def section(part: dict[str, Any], about: list[str]) -> list[str]:
    """Rounds with partsong's layer and without it, and the layer's own clock."""
    seconds, (down, up) = part["seconds"], part["sizes"]
    echo, clock = statistics.median(seconds["echo"]), part["server"]["together"] + part["site"]["together"]
    share, error = _over(seconds["ours"], seconds["echo"])
    labels = sorted({*part["server"], *part["site"]} - {"rest", "together"}, key=lambda one: -_both(part, one))
    names = {
        "echo": "Flower alone: nodes echo",
        "work": "nodes do the same work on rows in memory, and echo",
        "ours": "partsong, plain sums",
    }
    return [
        "### Overhead over bare rounds of Flower",
        "",
        *about,
        f"{part['sites']} sites; {part['rounds']} rounds of each kind, in turns, in one run with the same processes, "
        "without the first round. In each round every site receives and sends one message, of "
        f"{down} and {up} bytes, {_objects(part)} in all rows. The first two rows have no signature, ledger, audit log "
        "or state on disk.",
        "",
        "| rounds | seconds, median (quartiles) | mean | over the echo, mean of pairs ± standard error |",
        "|---|---|---|---|",
        *(_arm(names[arm], seconds[arm], seconds["echo"]) for arm in ("echo", "work", "ours")),
        "",
        f"Target, at most {100 * OVERHEAD_ALLOWED:g} % over bare rounds: {verdict_of(share, error, clock / echo)}, "
        "with "
        f"{100 * share:+.1f} ± {100 * error:.1f} % by these rounds and {100 * clock / echo:.1f} % by the layer's "
        "clock, "
        "which does not depend on Flower's spread:",
        "",
        "| milliseconds per round, median | server | a site |",
        "|---|---|---|",
        *(_parts(part, label, LABELS.get(label, label)) for label in (*labels, "rest")),
        _parts(part, "together", "together"),
        "",
        f"Excluded are Flower itself and the mathematics ({1000 * part['work']:.1f} ms at a site). Sites work at the "
        "same time, so the share is that of the server and one site. All sites share one disk and its processors: "
        "*fsync* waits for that disk. *Node list* asks Flower for its nodes, at most every three seconds. The server "
        "polls for replies every half second in all rows: anything shorter shows only in the mean. Ledgers are short "
        "here; at every message a site compares all lines of its ledger, one per release, which adds "
        f"{1e6 * part['ledger']:.2g} ms for 1000 of them.",
        "",
    ]


def _arm(name: str, seconds: list[float], echo: list[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4)
    row = f"| {name} | {middle:.2f} ({low:.2f}–{high:.2f}) | {statistics.mean(seconds):.2f} |"
    share, error = _over(seconds, echo)
    return f"{row} {'' if seconds is echo else f'{100 * share:+.1f} ± {100 * error:.1f} %'} |"


def _over(seconds: list[float], echo: list[float]) -> tuple[float, float]:
    """Relative overhead over the echo and its standard error, from pairs of rounds."""
    apart, usual = [one - other for one, other in zip(seconds, echo, strict=True)], statistics.mean(echo)
    return statistics.mean(apart) / usual, statistics.stdev(apart) / len(apart) ** 0.5 / usual


def verdict_of(share: float, error: float, by_clock: float) -> str:
    """Judge by the rounds where two standard errors lie on one side of the target."""
    if by_clock > OVERHEAD_ALLOWED or share - 2 * error > OVERHEAD_ALLOWED:
        return "NOT met"
    return "met" if share + 2 * error <= OVERHEAD_ALLOWED else "met by the clock, and not decided by so few rounds"


def _parts(part: dict[str, Any], label: str, name: str) -> str:
    figures = (part[side].get(label) for side in ("server", "site"))
    return f"| {name} | " + " | ".join("" if one is None else f"{1000 * one:.1f}" for one in figures) + " |"


def _both(part: dict[str, Any], label: str) -> float:
    return float(part["server"].get(label, 0.0) + part["site"].get(label, 0.0))


def _objects(part: dict[str, Any]) -> str:
    ours, theirs = part["objects"]
    if ours != theirs:
        raise ValueError(f"The messages of the rows differ: {ours} and {theirs} objects of Flower, down and up.")
    down, up = ours
    return f"in {down} objects of Flower each" if down == up else f"in {down} and {up} objects of Flower"
