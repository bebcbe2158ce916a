"""What Flower runs at the server: an experiment over its grid. Where the federation's folder is, `serve` has said."""

from __future__ import annotations

from typing import Any

from flwr.serverapp import ServerApp

from partsong.federation.flower.server_process import end_with_the_server
from partsong.federation.server.launch import run_over_flower

app = ServerApp()


@app.main()
def main(grid: Any, context: Any) -> None:
    """The run that was named when this was started."""
    end_with_the_server()
    run_over_flower(grid, str(context.run_config["run"]))
