"""A server that is served as the help shows: reached by its own machine and by sites, whatever its address is."""

from __future__ import annotations

import importlib
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from partsong.federation.commands import demo
from partsong.federation.commands.server import _admit_nodes
from partsong.federation.commands.status import describe_server
from partsong.federation.flower import site_process
from partsong.federation.flower.control import ServerError, open_control
from partsong.federation.setup.server_folder import ServerFolder

pytest.importorskip("flwr")
from tests.integration.flower.flower_processes import PLAIN, federation, left_behind

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

SKEW = 60


def announced(site):
    """Its node begins and ends."""
    with site_process.register(site, lambda line: None):
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A server at an address of version 6, and a site whose card it has."""
    folder = tmp_path_factory.mktemp("served")
    server = ServerFolder.made(folder / "server", "demo", f"[::1]:{demo.free_port()}")
    site = demo.site_of(folder, server, "east")
    with demo.processes(folder) as running:
        demo.start_server(running, server)
        yield server, site
    assert left_behind(folder) == {}


def test_a_site_is_admitted_by_a_command_also_after_one_that_was_killed(served):
    server, site = served
    with open_control(server) as control:
        number = control.register(site.card().node_key, "east")
        assert control.register(site.card().node_key, "east") == number
        with pytest.raises(ServerError, match="takes no key twice"):
            control.register(site.card().node_key, "west")
        _admit_nodes(server, [site.card()])
        assert server.node_of("east") == number
        with site_process.register(site, lambda line: None) as node:
            assert node.number == number
            assert describe_server(server)["sites"] == {"east": "online"}
        assert describe_server(server)["sites"] == {"east": "offline"}


def test_a_key_that_was_taken_out_is_not_known_any_more(served):
    server, _ = served
    other = demo.site_of(server.path.parent, server, "west")
    with open_control(server) as control:
        number = control.register(other.card().node_key, "west")
        control.unregister(number)
        assert number not in control.nodes()
        assert control.find_node(other.card().node_key, "west") is None
        with pytest.raises(ServerError, match="takes no key twice"):
            control.register(other.card().node_key, "west")


def test_a_clock_that_is_ahead_is_named(served, monkeypatch):
    server, site = served
    _admit_nodes(server, [site.card()])
    ours = importlib.import_module("flwr.supernode.node_auth_http_interceptor")
    now = ours.now
    monkeypatch.setattr(ours, "now", lambda: now() + timedelta(seconds=SKEW))
    clock = SimpleNamespace(time=lambda: time.time() + SKEW, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(site_process, "time", clock)
    with pytest.raises(
        ServerError, match=rf"clock of this machine is (5|6)\d seconds ahead of .*{server.address[-5:]}"
    ):
        announced(site)


def test_a_certificate_that_the_server_does_not_show_yet_is_told(served):
    server, _ = served
    assert describe_server(server)["served_certificate_days"] is None
    server.renewed()
    assert describe_server(server)["served_certificate_days"] == 397


@pytest.mark.slow
def test_runs_are_taken_up_by_a_server_at_an_address_of_version_6(tmp_path, monkeypatch):
    made = ServerFolder.made
    monkeypatch.setattr(
        ServerFolder, "made", lambda path, name, address: made(path, name, address.replace("127.0.0.1", "[::1]"))
    )
    with federation(tmp_path) as found:
        code, told = found.run("trial", PLAIN + "rounds = 1\n")
        assert (code, told["rounds"]) == (0, 1)
        assert found.is_same("trial")
