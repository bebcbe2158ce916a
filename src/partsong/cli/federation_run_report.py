"""What `partsong federation run` says: a line for each exchange, whom it waits for, and how a run has ended."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from partsong.cli.outputs import put_json, warn

if TYPE_CHECKING:
    from partsong.consortium.server_folder import RunPlace


def line_of(told: Mapping[str, Any]) -> str:
    """What was told of a run under way, for people."""
    if "starting" in told:
        return f"starting the server's part of run {told['starting']!r}, which takes some seconds"
    if "waiting" in told:
        answered = f" ({told['answered']} of {told['of']} have answered)" if "of" in told else ""
        return f"waiting for {', '.join(told['waiting'])}{answered}"
    heard = f"{len(told['participants'])} site{'' if len(told['participants']) == 1 else 's'}"
    refused = "".join(f"; not {name}" for name in sorted(told["refused"]))
    most = max(told["bytes_up"].values(), default=0)
    is_step = "step" in told
    which = f"words, step {told['step']} of at most {told['steps']}" if is_step else _exchange(told)
    after = f"; next: {told['next']}" if is_step else ""
    return (
        f"{which}: {heard}{refused}, at most {most} bytes up and {told['bytes_down']} down each, "
        f"{told['seconds']:.1f} s{after}"
    )


def put_end(
    place: RunPlace, told: Mapping[str, Any], output: Path | None, as_json: bool, public: Sequence[str] = ()
) -> None:
    """Where the model of a run that is done goes, and how it went; `public` are names that were given for columns."""
    from partsong.federation.ways_on import way_to_result

    if output is not None:
        shutil.copyfile(place.model, output)
    model = output or place.model
    if as_json:
        named = {"named_columns": _named(place, public)} if public else {}
        put_json({**told, **named, "model": model, "folder": place.folder})
        return
    missed = missed_in(place, told)
    typer.echo(f"Done in {told['seconds']:.1f} s: {told['rounds']} exchanges, {missed} times a site was not there.")
    typer.echo(f"Model: {model}")
    for site, why in sorted(told.get("without_result", {}).items()):
        warn(f"Site {site!r} has no result of this run: {why} {way_to_result(why)}")
    if public and not _named(place, public):
        warn(
            f"No column is called by a name in --names ({len(public)} there), and all keep their hashes. Where sites "
            "share a key, nobody without it can tell: names are then known at the sites alone. Else compare the file "
            "with the names at a site, letter by letter."
        )


def _named(place: RunPlace, public: Sequence[str]) -> int:
    """How many columns of a run are called by names that are public."""
    from partsong.federation.columns import labels_of
    from partsong.federation.conducting import record_in

    record, known = record_in(place.state), set(public)
    labels = () if record is None else labels_of(record.columns, record.run, public)
    return sum(label in known for label in labels)


def missed_in(place: RunPlace, told: Mapping[str, Any]) -> int:
    """How often a site was not there that the experiment has asked for; who was not drawn for a round was not."""
    from partsong.federation.experiment import Experiment

    schedule = Experiment.read(place.experiment).schedule(len(told["parties"]))
    asked = {index: set(schedule.participants(told["parties"], int(index))) for index in told["absent"]}
    return sum(len(asked[index] & set(names)) for index, names in told["absent"].items())


def _exchange(told: Mapping[str, Any]) -> str:
    return f"exchange {told['round']} of {told['rounds']}"
