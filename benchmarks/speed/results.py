"""Results of a benchmark in a file, so that a long one can be measured in parts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.speed.curves import Run


@dataclass(slots=True)
class Results:
    """Runs by workload, method and seed; floor and memory by workload; compile times; how it was done."""

    runs: list[Run] = field(default_factory=list)
    floor: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    compiling: dict[str, dict[str, float]] = field(default_factory=dict)
    shapes: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)

    def add(self, runs: list[Run]) -> None:
        """Add runs; a method that is measured again on the same data replaces its earlier runs."""
        again = {(run.workload, run.contestant) for run in runs}
        self.runs = [*(run for run in self.runs if (run.workload, run.contestant) not in again), *runs]

    def of(self, workload: str, contestant: str = "") -> list[Run]:
        return [run for run in self.runs if run.workload == workload and contestant in ("", run.contestant)]

    def best(self, workload: str) -> float:
        """The largest explained variance that any method reached."""
        return max((run.best for run in self.of(workload)), default=-math.inf)

    def save(self, file: Path) -> None:
        held = {name: getattr(self, name) for name in self.__dataclass_fields__}
        held["runs"] = [run.as_dict() for run in self.runs]
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(file.name + ".partial")
        partial.write_text(json.dumps(held), encoding="utf-8")
        os.replace(partial, file)

    @staticmethod
    def load(file: Path) -> Results:
        if not file.is_file():
            return Results()
        held = json.loads(file.read_text(encoding="utf-8"))
        return Results(**{**held, "runs": [Run.of(entry) for entry in held["runs"]]})
