"""The folder of one run at the server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 600.0  # seconds that a site may take to answer, where nobody says otherwise


@dataclass(frozen=True, slots=True)
class RunPlace:
    """That folder, and what is where in it."""

    folder: Path

    @property
    def name(self) -> str:
        """The run's."""
        return self.folder.name

    @property
    def experiment(self) -> Path:
        """What is run."""
        return self.folder / "experiment.toml"

    @property
    def is_begun(self) -> bool:
        """Whether there is anything in it; drafts of a process that was killed are nothing."""
        return self.folder.is_dir() and any(not path.name.startswith(".") for path in self.folder.iterdir())

    @property
    def settings(self) -> Path:
        """How patiently, as JSON."""
        return self.folder / "settings.json"

    @property
    def state(self) -> Path:
        """The journal of the run."""
        return self.folder / "state"

    @property
    def progress(self) -> Path:
        """One line of JSON for each round that was done."""
        return self.folder / "progress.jsonl"

    @property
    def result(self) -> Path:
        """How it ended, as JSON."""
        return self.folder / "result.json"

    @property
    def model(self) -> Path:
        """What came out."""
        return self.folder / "model.safetensors"

    @property
    def number(self) -> Path:
        """The number that Flower gave it last."""
        return self.folder / "flower-run"

    @property
    def lock(self) -> Path:
        """Held while somebody works on it."""
        return self.folder / "lock"

    @property
    def command(self) -> Path:
        """Held by the command that has it worked on, also before that begins."""
        return self.folder / "command.lock"
