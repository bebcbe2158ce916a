"""`partsong federation`: parties on their own machines, over TLS."""

from __future__ import annotations

import typer

from partsong.cli import (
    federation_demo,
    federation_readmit,
    federation_runs,
    federation_secret,
    federation_server,
    federation_site,
    federation_status,
)

app = typer.Typer(
    name="federation",
    help="Run experiments between institutions: one coordinator, and sites that keep their rows.",
    epilog="Coordinator: init, invite, serve, admit, run. Site: secret, join, status. All of it on this machine: demo.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

app.command(epilog=federation_server.INIT)(federation_server.init)
app.command(epilog=federation_server.INVITE)(federation_server.invite)
app.command(epilog=federation_server.ADMIT)(federation_server.admit)
app.command(epilog=federation_server.REMOVE)(federation_server.remove)
app.command(epilog=federation_server.SERVE)(federation_server.serve)
app.command(epilog=federation_secret.SECRET)(federation_secret.secret)
app.command(epilog=federation_site.JOIN)(federation_site.join)
app.command(epilog=federation_runs.RUN)(federation_runs.run)
app.command(epilog=federation_status.STATUS)(federation_status.status)
app.command(epilog=federation_runs.STOP)(federation_runs.stop)
app.command(epilog=federation_readmit.READMIT)(federation_readmit.readmit)
app.command(epilog=federation_demo.DEMO)(federation_demo.demo)
