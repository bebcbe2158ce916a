"""What `partsong.compare` found: a table for people, numbers for programs, a page for colleagues."""

from __future__ import annotations

import os
import platform
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from partsong import __version__, threads
from partsong.core import Outcome
from partsong.evaluate.at_party import AtParty
from partsong.evaluate.findings import MethodFindings, Party, Report
from partsong.evaluate.page import Column, Markup, element, percent, row, significant, size
from partsong.evaluate.report import write_report

HEADINGS = (
    "method", "start", "rounds", "steps", "relative error", "explained", "worst party", "sent per party", "seconds",
    "drift", "aligned", "outcome",
)  # fmt: skip

NEVER_SENT = (
    "The rows X_p and the weights W_p never left a party. Sums and components that a party sends in the open still "
    "tell about its rows, the more the fewer rows it has: they are not anonymous."
)


class IncompleteWarning(UserWarning):
    """A comparison was interrupted: methods are missing, or one was broken off."""


class ComparisonRow(NamedTuple):
    """One method: what it reached over all rows, what it cost, its error at each party, and how it ended.

    Rounds and steps are those really made: where parties iterate alone, the fewest that one of them made.
    `relative_error` is ‖X − W H‖ / ‖X‖ over all rows; of "local", with every party's own H. Drifts are
    Σ_p ‖H_p − H‖² / ‖H‖², by position and after alignment: NaN where parties have no H of their own, or share none.
    """

    method: str
    start: str
    rounds: int
    local_steps: int
    relative_error: float
    explained_variance: float
    bytes_up_per_party: float
    bytes_down_per_party: float
    seconds: float
    drift: float
    aligned_drift: float
    party_errors: Mapping[str, float]
    outcome: Outcome


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Comparison:
    """The findings of every method, in the order asked for; print it, or show it in a notebook.

    `missing` are the methods that Ctrl-C left no time for, `left_out` the parties whose data cannot be used, and why.
    """

    findings: tuple[MethodFindings, ...]
    n_components: int
    seed: int
    local_steps: Mapping[str, int]
    feature_names: tuple[str, ...] | None = None
    missing: tuple[str, ...] = ()
    was_interrupted: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> tuple[ComparisonRow, ...]:
        """One line for each method."""
        return tuple(
            ComparisonRow(
                m.name, m.start, m.rounds, self.local_steps[m.name], m.relative_error, m.explained_variance,
                m.bytes_up_per_party, m.bytes_down_per_party, m.seconds, m.drift, m.aligned_drift,
                {party.name: party.relative_error for party in m.parties}, Outcome(m.outcome),
            )
            for m in self.findings
        )  # fmt: skip

    @property
    def per_party(self) -> dict[str, dict[str, AtParty]]:
        """By method, then by party: its fit, its drift, and the share of each component there."""
        return {m.name: {party.name: party for party in m.parties} for m in self.findings}

    @property
    def components(self) -> dict[str, np.ndarray]:
        """The shared H (k × m) of every method that has one."""
        return {m.name: m.components for m in self.findings if len(m.components)}

    @property
    def is_complete(self) -> bool:
        """Whether all methods are here, and none was broken off."""
        return not self.missing and not self._broken_off

    @property
    def notice(self) -> str:
        """What a comparison that is not complete lacks; empty where it is complete."""
        said = [f"{name} was broken off, and its numbers are those of its way so far" for name in self._broken_off]
        said += [f"not begun: {', '.join(self.missing)}"] if self.missing else []
        return f"Incomplete, as it was interrupted: {'; '.join(said)}." if said else ""

    @property
    def _broken_off(self) -> list[str]:
        return [m.name for m in self.findings if m.outcome == Outcome.INTERRUPTED]

    @property
    def caption(self) -> str:
        """What is missing, if anything, and how the methods were treated."""
        absent = f"Left out, as their data cannot be used: {', '.join(self.left_out)}. " if self.left_out else ""
        lacking = (f"{self.notice} " if self.notice else "") + absent
        return lacking + (
            f"Rank {self.n_components}, seed {self.seed}, {len(self.findings[0].parties)} parties, simulated. Errors "
            "are over all rows, with weights fitted to the model; “local” has a model of its own for every party. "
            "Start: one H common to all, the same for every method, or one of its own for each party. Steps: local "
            "iterations, or sweeps, in each round. Seconds are those of the rounds; compiling is not counted. Drift: "
            "how far parties are from the shared H, by position and after alignment."
            f"{self._unequal}"
        )

    @property
    def _unequal(self) -> str:
        """That the same iteration was not made equally often everywhere, where that is so."""
        made = {m.name: len(m.curve.rounds) for m in self.findings if m.name in ("local", "exact", "pooled")}
        if "exact" not in made or len(set(made.values())) == 1:
            return ""
        others = " and ".join(f"“{name}” {count}" for name, count in made.items() if name != "exact")
        same = "; “exact” would be “pooled” after as many" if made.get("pooled", made["exact"]) != made["exact"] else ""
        return f" Of the same iteration “exact” made {made['exact']}, {others}{same}."

    def to_table(self) -> str:
        """Plain text, one line for each method."""
        cells = [HEADINGS, *(_cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                text.ljust(width) if i < 2 else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in cells
        ]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def __str__(self) -> str:
        told = self.to_table()
        return f"{told}\n\n{textwrap.fill(self.caption, max(map(len, told.splitlines())))}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """For notebooks: the same table."""
        columns = [Column(heading, i > 1) for i, heading in enumerate(HEADINGS)]
        heads = element("tr", *(element("th", column.label, scope="col") for column in columns))
        lines = [row(columns, _cells(line)) for line in self.rows]
        whole = element("table", element("thead", heads), element("tbody", *lines))
        return str(Markup(whole + element("p", self.caption)))

    def save_report(
        self, path: str | os.PathLike[str], *, image_shape: tuple[int, int] | None = None, title: str = "Comparison"
    ) -> Path:
        """Write one self-contained page with curves, parts (as pictures of `image_shape`), and every party's own."""
        parties = tuple(Party(party.name, party.rows, {}) for party in self.findings[0].parties)
        settings = {"rank": str(self.n_components), "seed": str(self.seed), "threads": str(threads.available())}
        versions = {"partsong": __version__, "python": platform.python_version(), "numpy": np.__version__}
        told = Report(
            title, self.caption, parties, self.findings, image_shape, self.feature_names, settings, versions, NEVER_SENT
        )
        return write_report(path, told)


def _cells(row: ComparisonRow) -> tuple[str, ...]:
    sent = {"pooled": "all rows", "local": "nothing"}.get(row.method, size(row.bytes_up_per_party))
    sent = sent.replace("\N{NO-BREAK SPACE}", " ")
    return (
        row.method, row.start, str(row.rounds), str(row.local_steps), percent(row.relative_error),
        percent(row.explained_variance), percent(max(row.party_errors.values())), sent,
        significant(row.seconds), significant(row.drift), significant(row.aligned_drift), str(row.outcome),
    )  # fmt: skip
