"""The part of docs/results/federation.md about processes and Flower, from what was measured."""

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

HEADING = "# Between processes, over Flower"
BYTES_ALLOWED = 0.05


def written(found: dict[str, Any]) -> str:
    """All parts that were measured."""
    lines = [
        HEADING,
        "",
        "A SuperLink and SuperNodes of Flower 1.41 as `partsong federation serve` and `join` start them, processes of "
        f"one machine, TLS and keys on. Method `exact`, k = {RANK}, m = {COLUMNS}, {ROWS} rows a site, float64.",
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
    return [f"```\n{part['command']}\n```", "", f"{part['processor']}; load of the machine {part['load']}.", ""]


def _long(part: dict[str, Any]) -> list[str]:
    seconds, killed, held = part["seconds"], part["killed after"], part["resident"]
    slope, error = slope_of(held[3:])
    waited = [one for one in seconds[killed:] if one > TIMEOUT]
    rest = [one for one in seconds[killed:] if one <= TIMEOUT]
    heard, told = sum(part["participants"]), part["participants"][-1]
    down = part["down by Flower"] * heard / (heard + told)
    rows = [
        ("up, in the audit logs", part["up"], up_of()),
        ("up, as Flower counts", part["up by Flower"], up_of()),
        ("down, as Flower counts", down, down_of(part["sites"])),
    ]
    return [
        f"## {part['sites']} sites, {part['rounds']} rounds, one site lost",
        "",
        *_about(part),
        f'`on_party_error = "skip"`, `--timeout {TIMEOUT}`; plain sums. One site was killed after round {killed} and '
        f"stayed away. All {part['rounds']} rounds were done: with {max(part['participants'])} sites at first, with "
        f"{part['participants'][-1]} in the end.",
        "",
        "| rounds | seconds, median (smallest–largest) |",
        "|---|---|",
        f"| 2 to {killed} (the first: {seconds[0]:.1f}) | {_spread(seconds[1:killed])} |",
        f"| {len(waited)} in which the lost site was waited for | {_spread(waited)} |",
        f"| {len(rest)} after that | {_spread(rest)} |",
        "",
        f"Bytes per site and round; formula: 8 (k m + k² + 3) + {ENVELOPE} up, 8 k m + {ENVELOPE} + {NAMED} × sites "
        f"down. The arrays are derived; {ENVELOPE} for header and signature, and {NAMED} for a name, are what such "
        f"messages were found to have. At most {100 * BYTES_ALLOWED:g} % off was asked for. Flower's "
        "count has its own envelopes and what is said before the first round in it; the model goes down once more when "
        "a run is over, which is counted as a round.",
        "",
        "| | measured | formula | off |",
        "|---|---|---|---|",
        *(
            f"| {name} | {value:.0f} | {formula} | {100 * (value / formula - 1):+.1f} % |"
            for name, value, formula in rows
        ),
        "",
        f"Resident memory of our server app: {held[2]:.1f} MB after the third round, {held[-1]:.1f} MB after the last; "
        f"{slope:+.3f} ± {error:.3f} MB a round (least squares from the fourth round on, one standard error).",
        "",
    ]


def _overhead(part: dict[str, Any]) -> list[str]:
    middle = {arm: statistics.median(seconds) for arm, seconds in part["seconds"].items()}
    alone = middle["Flower alone"]
    lines = [
        "## Beside Flower as it comes",
        "",
        *_about(part),
        f"{part['sites']} sites; {part['blocks']} blocks of {part['count']} rounds for each row, in turns (the first "
        "round of a run is not counted). Messages of the first row have as many random bytes as plain sums, and "
        "nothing is computed.",
        "",
        "| | seconds a round, median (smallest–largest) | over Flower alone |",
        "|---|---|---|",
        *(
            f"| {arm} | {_spread(seconds)} | {100 * (middle[arm] / alone - 1):+.0f} % |"
            for arm, seconds in part["seconds"].items()
        ),
        "",
        "*Flower alone*: `flower-superlink` and `flower-supernode` as they come, `grid.send_and_receive`; a new "
        "process for each message, and looks every three seconds. Nodes of `partsong federation join` answer without a "
        "new process, and their looks last until there is something to find: that rounds of ours are shorter is due to "
        "that, and what our layer costs is in the section above.",
        "",
    ]
    if up := part.get("masked up"):
        sites = part["sites"]
        formulas = [("a sum", up["sum"], masked_up_of(sites))]
        formulas += [("the first, with its set-up", up["first"], masked_up_of(sites) + set_up_of(sites))]
        lines += [
            "Bytes up per site under masks, with shares, from the audit logs; formulas of masked-sums.md, and "
            f"{ENVELOPE} for each message. A sum took {up['exchanges']:.0f} exchanges, the first "
            f"{up['exchanges of the first']:.0f}; in the open it is {up_of()} bytes and one exchange.",
            "",
            "| | measured | formula | off |",
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
