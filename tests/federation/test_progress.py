"""What is told of a run has one line for each exchange, in order, wherever its process was killed."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from tests.federation.helpers import Killed, by_seed

pytest.importorskip("cryptography")

from partsong.federation.commands import demo
from partsong.federation.server.launch import run_on_transport
from partsong.federation.server.progress import JsonLines
from partsong.federation.transports.base import InProcess

SITES = demo.NAMES[:3]
ROUNDS = {
    "rounds": ('method = "exact"\nrank = 3\nrounds = 3\n', 3),
    "arrivals": ('method = "asyn-sd"\nrank = 3\nrounds = 2\nlocal_steps = 1\n', 6),
}


class Broken(io.BytesIO):
    """A file to which some characters of a line are written, and no more: the process is killed then."""

    def __init__(self, path, characters):
        io.BytesIO.__init__(self)
        self.path, self.characters = path, characters

    def write(self, text):
        with Path(self.path).open("ab") as file:
            file.write(text[: self.characters])
        raise Killed


def killing(monkeypatch, place, at, characters):
    """From now on the process is killed while it writes the line of the exchange `at`."""
    opened = Path.open

    def watched(path, mode="r", **settings):
        is_line = path == place.progress and mode in ("r+b", "wb")
        before = path.read_bytes().count(b"\n") if is_line and path.exists() else 0
        return Broken(path, characters) if is_line and before == at else opened(path, mode, **settings)

    monkeypatch.setattr(Path, "open", watched)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    server, sites = demo.set_up(tmp_path_factory.mktemp("progress"), SITES)
    for site in sites.values():
        (site.path / "site.toml").write_text("minimum_parties = 3\n")
    return server, sites


@pytest.mark.parametrize("characters", [0, 9])
@pytest.mark.parametrize("kind", ROUNDS)
def test_every_exchange_has_one_line_wherever_the_process_was_killed(monkeypatch, made, kind, characters):
    (server, sites), (text, exchanges) = made, ROUNDS[kind]
    place = server.run(f"{kind}-{characters}")
    place.folder.mkdir()
    place.experiment.write_text(f"seed = {characters}\n{text}")
    place.settings.write_text("{}")

    def transport():
        return InProcess({name: site.opened().answer for name, site in sites.items()}, by_seed(3))

    heard, told = JsonLines(place.progress), []
    for at in (0, exchanges - 1):
        with monkeypatch.context() as patched:
            killing(patched, place, at, characters)
            with pytest.raises(Killed):
                run_on_transport(transport, server, place)
        told += heard.read_new()
        assert list(JsonLines.from_end(place.progress).read_new()) == []
    assert run_on_transport(transport, server, place)["status"] == "done"
    lines = [json.loads(line) for line in place.progress.read_text().splitlines()]
    assert [line["round"] for line in lines] == list(range(1, exchanges + 1))
    assert [*told, *heard.read_new()] == lines
    assert all(len(line["participants"]) == (3 if kind == "rounds" else 1) for line in lines)
    result = json.loads(place.result.read_text())
    if kind == "arrivals":
        assert [line["participants"][0] for line in lines] == result["arrivals"]
