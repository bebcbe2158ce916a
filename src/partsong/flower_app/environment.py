"""What Flower is told by variables: no telemetry, no look for updates, nothing installed while it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}


def set_quiet(home: Path, variables: dict[str, str] | None = None) -> None:
    """For this process and its children, before Flower is imported; `home` is for Flower's own files.

    Flower starts its helpers by name, so that those of this Python come first.
    """
    own = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "")
    if path.split(os.pathsep)[0] != own:
        os.environ["PATH"] = os.pathsep.join((own, path))
    os.environ.update(QUIET)
    os.environ["FLWR_HOME"] = str(home)
    os.environ.update(variables or {})
