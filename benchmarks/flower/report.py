"""The second half of docs/results/federation.md: federations between processes, over Flower."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.flower.arms import COLUMNS, RANK, ROWS
from benchmarks.flower.layer_report import section
from benchmarks.flower.processes import (
    ENVELOPE,
    NAMED,
    TIMEOUT,
    down_of,
    masked_up_of,
    set_up_of,
    slope_of,
    up_of,
)

HEADING = "## Between processes, over Flower"
BYTES_ALLOWED = 0.05
ARMS = {"masked sums": "secure aggregation"}
"""Names in the log -> names of today."""


def written(found: dict[str, Any]) -> str:
    """The sections on all parts that were measured."""
    lines = [
        HEADING,
        "",
        "A SuperLink and SuperNodes of Flower 1.41, started by `partsong federation serve` and `join`, as processes of "
        f"one machine, with TLS and keys. Method `exact`, k = {RANK}, m = {COLUMNS}, {ROWS} rows per site, float64.",
        "",
    ]
    if "long" in found:
        lines += _long(found["long"])
    if "layer" in found:
        lines += section(found["layer"], _about(found["layer"]))
    if "overhead" in found:
        lines += _overhead(found["overhead"])
    return "\n".join(lines)


def _about(part: dict[str, Any]) -> list[str]:
    return [f"```\n{part['command']}\n```", "", f"{part['processor']}; load average {part['load']}.", ""]


def _long(part: dict[str, Any]) -> list[str]:
    seconds, killed, held = part["seconds"], part["killed after"], part["resident"]
    slope, error = slope_of(held[3:])
    waited = [one for one in seconds[killed:] if one > TIMEOUT]
    rest = [one for one in seconds[killed:] if one <= TIMEOUT]
    answers, last = sum(part["participants"]), part["participants"][-1]
    down = part["down by Flower"] * answers / (answers + last)
    rows = [
        ("up, in the audit logs", part["up"], up_of()),
        ("up, as Flower counts", part["up by Flower"], up_of()),
        ("down, as Flower counts", down, down_of(part["sites"])),
    ]
    return [
        f"### {part['sites']} sites, {part['rounds']} rounds, one site lost",
        "",
        *_about(part),
        f'`on_party_error = "skip"`, `--timeout {TIMEOUT}`; plain sums. One site was killed for good after round '
        f"{killed}. All {part['rounds']} rounds were completed, first with {max(part['participants'])} sites, then "
        f"with {part['participants'][-1]}.",
        "",
        "| rounds | seconds, median (smallest–largest) |",
        "|---|---|",
        f"| 2 to {killed} (the first: {seconds[0]:.1f}) | {_spread(seconds[1:killed])} |",
        f"| {len(waited)} in which the server waited for the lost site | {_spread(waited)} |",
        f"| {len(rest)} after that | {_spread(rest)} |",
        "",
        f"Bytes per site and round. Formula: 8 (k m + k² + 3) + {ENVELOPE} up, 8 k m + {ENVELOPE} + {NAMED} × sites "
        f"down; {ENVELOPE} (header and signature) and {NAMED} (a name) are empirical. Target: at most "
        f"{100 * BYTES_ALLOWED:g} % off. Flower's count includes its envelopes and the messages before the first "
        "round; the final model counts as a round.",
        "",
        "| | measured | formula | difference |",
        "|---|---|---|---|",
        *(
            f"| {name} | {value:.0f} | {formula} | {100 * (value / formula - 1):+.1f} % |"
            for name, value, formula in rows
        ),
        "",
        f"Resident memory of the server app: {held[2]:.1f} MB after the third round, {held[-1]:.1f} MB after the last; "
        f"{slope:+.3f} ± {error:.3f} MB per round (least squares from round 4 on, one standard error).",
        "",
    ]


def _overhead(part: dict[str, Any]) -> list[str]:
    middle = {arm: statistics.median(seconds) for arm, seconds in part["seconds"].items()}
    alone = middle["Flower alone"]
    lines = [
        "### Compared with unmodified Flower",
        "",
        *_about(part),
        f"{part['sites']} sites; {part['blocks']} blocks of {part['count']} rounds per row, in turns, without the "
        "first round of a run. The first row sends as many random bytes as plain sums, and computes nothing.",
        "",
        "| | seconds per round, median (smallest–largest) | over Flower alone |",
        "|---|---|---|",
        *(
            f"| {ARMS.get(arm, arm)} | {_spread(seconds)} | {100 * (middle[arm] / alone - 1):+.0f} % |"
            for arm, seconds in part["seconds"].items()
        ),
        "",
        "*Flower alone*: unmodified `flower-superlink` and `flower-supernode` with `grid.send_and_receive`, which "
        "start a process for each message and poll every three seconds. Nodes of `partsong federation join` do "
        "neither, which makes their rounds shorter.",
        "",
    ]
    if up := part.get("masked up"):
        sites = part["sites"]
        formulas = [("a sum", up["sum"], masked_up_of(sites))]
        formulas += [("the first, with its setup", up["first"], masked_up_of(sites) + set_up_of(sites))]
        lines += [
            "Bytes up per site with secure aggregation, shares included, from the audit logs; formulas of "
            f"[secure aggregation](../reference/secure-aggregation.md), and {ENVELOPE} per message. A sum took "
            f"{up['exchanges']:.0f} exchanges, the first {up['exchanges of the first']:.0f}; a plain sum takes one "
            f"and {up_of()} bytes.",
            "",
            "| | measured | formula | difference |",
            "|---|---|---|---|",
            *(_row(*one) for one in formulas),
            "",
        ]
    return lines


def _row(name: str, value: float, formula: int) -> str:
    return f"| {name} | {value:.0f} | {formula} | {100 * (value / formula - 1):+.1f} % |"


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})"
