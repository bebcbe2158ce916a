"""python -m benchmarks.flower_node FOLDER: a node of ours that answers as the bare app does, with nothing of ours."""

from __future__ import annotations

import sys
from pathlib import Path

APP = b"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bare"
version = "1.0.0"
description = "Bytes to and fro"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "partsong"

[tool.flwr.app.components]
serverapp = "benchmarks.flower_bare:server"
clientapp = "benchmarks.flower_bare:client"

[tool.flwr.app.config]
rounds = 0
nodes = ""
down = 0
up = 0
way = ""
file = ""
"""


def bundle() -> bytes:
    """What Flower hands out."""
    from flwr.cli.build import build_fab_from_files

    return bytes(build_fab_from_files({"pyproject.toml": APP})[0])


def main(folder: Path) -> None:
    from partsong.consortium.site_folder import SiteFolder
    from partsong.flower_app import client, supernode
    from partsong.flower_app.environment import set_quiet

    site = SiteFolder.at(folder)
    set_quiet(site.path / "flower")
    from benchmarks import flower_bare

    client.app = flower_bare.client
    supernode.app_bundle = bundle
    supernode.join(site)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
