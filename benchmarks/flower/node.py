"""python -m benchmarks.flower.node MODULE FOLDER: a site whose answers come from the app benchmarks.flower.MODULE."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

APP = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "bare"
version = "1.0.0"
description = "Random bytes in both directions"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "partsong"

[tool.flwr.app.components]
serverapp = "benchmarks.flower.{module}:server"
clientapp = "benchmarks.flower.{module}:client"

[tool.flwr.app.config]
{settings}
"""
SETTINGS = {
    "bare": {"rounds": 0, "nodes": "", "down": 0, "up": 0, "file": ""},
    "layer": {"run": "", "file": ""},
}
"""Run configuration of each app's server."""


def bundle(module: str) -> bytes:
    """Build the app bundle (FAB) that Flower distributes."""
    from flwr.cli.build import build_fab_from_files

    settings = "\n".join(f"{name} = {value!r}" for name, value in SETTINGS[module].items()).replace("'", '"')
    text = APP.format(module=module, settings=settings)
    return bytes(build_fab_from_files({"pyproject.toml": text.encode()})[0])


def main(module: str, folder: Path) -> None:
    from partsong.federation.flower import site_process
    from partsong.federation.flower.control import configure_flower
    from partsong.federation.setup.site_folder import SiteFolder

    site = SiteFolder.at(folder)
    configure_flower(site.path / "flower")
    from flwr.app import Context, RecordDict

    client = import_module(f"benchmarks.flower.{module}").client
    context = Context(0, 0, {"site": str(site.path)}, RecordDict(), {})
    site_process.SiteNode._answer = lambda node, message, answer: client(message=message, context=context)
    site_process.app_bundle = lambda: bundle(module)
    site_process.join(site)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
