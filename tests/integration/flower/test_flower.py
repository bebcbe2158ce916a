"""Flower as a transport: bytes as they are, who is silent is lost, and real processes give the bits of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from partsong.errors import FormatError, ParameterError
from partsong.federation.commands import demo
from partsong.federation.flower.control import CONTROL_HEADER, ServerError, app_bundle
from partsong.federation.flower.server_process import Gate
from partsong.federation.transports import flower
from partsong.federation.transports.base import NoReply
from partsong.federation.transports.flower import (
    FlowerTransport,
    PullCalls,
    message_bytes,
    reply_message,
    request_message,
)

pytest.importorskip("flwr")
from tests.integration.flower.flower_kills import require_unharmed
from tests.integration.flower.flower_processes import PLAIN, SITES, federation

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")

NODES = {"east": 11, "north": 12}


@pytest.fixture(autouse=True)
def task(monkeypatch):
    """Messages are made inside a task of Flower."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """A grid in memory: what nodes answer is a function of their number and of how often they were asked."""

    def __init__(self, answers):
        self.answers, self.pushed, self.replies, self.born, self.faults = answers, [], {}, {}, 0

    def get_nodes(self):
        return [SimpleNamespace(node_id=node, last_activated_at=self.born.get(node, "")) for node in NODES.values()]

    def push_messages(self, messages):
        if self.faults:
            self.faults -= 1
            raise ConnectionError("UNEXPECTED_EOF")
        return [self._given(message) for message in messages]

    def _given(self, message):
        given = f"message {len(self.pushed)}"
        message.metadata.__dict__["_message_id"] = given
        message.metadata.__dict__["_src_node_id"] = 1
        node = message.metadata.dst_node_id
        reply = self.answers(node, sum(one == node for one, _ in self.pushed), message)
        self.pushed.append((node, message_bytes(message)))
        if reply is not None:
            self.replies[given] = reply
        return given

    def pull_messages(self, ids):
        return [self.replies.pop(one) for one in ids if one in self.replies]


def replying(node, count, message):
    """The same bytes, backwards."""
    return reply_message(message, message_bytes(message)[::-1])


def failing(code, message):
    from flwr.app import Error, Message

    return Message(Error(code=code, reason="a secret"), reply_to=message)


def transport(grid, **settings):
    return FlowerTransport(grid, NODES, **{"poll": 0.001, "refresh_after": 0.005, **settings})


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001])
def test_few_bytes_pass_as_they_are_in_as_few_objects_as_can_be(monkeypatch, size):
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    monkeypatch.setattr(flower, "SMALL_BYTES", 1000)
    data = os.urandom(size)
    message = request_message(data, 11, 60.0)
    assert message_bytes(message) == data
    assert len(get_all_nested_objects(message)) == (3 if size <= 1000 else 6)


def test_few_bytes_that_were_changed_or_are_too_many_are_not_used():
    message = request_message(bytes(range(35)), 11, 60.0)
    with pytest.raises(FormatError, match="longer"):
        message_bytes(message, max_bytes=34)
    message.content["about"]["whole"] = bytes(range(1, 36))
    with pytest.raises(FormatError, match="changed"):
        message_bytes(message)


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 5000])
def test_bytes_pass_as_they_are_in_pieces(monkeypatch, size):
    monkeypatch.setattr(flower, "PIECE_BYTES", 1000)
    monkeypatch.setattr(flower, "SMALL_BYTES", -1)
    data = os.urandom(size)
    message = request_message(data, 11, 60.0)
    assert message_bytes(message) == data
    assert len(message.content["arrays"]) == max(1, -(-size // 1000))


def test_what_was_changed_cut_short_or_is_too_long_is_not_used(monkeypatch):
    monkeypatch.setattr(flower, "PIECE_BYTES", 10)
    monkeypatch.setattr(flower, "SMALL_BYTES", -1)
    message = request_message(bytes(range(35)), 11, 60.0)
    with pytest.raises(FormatError, match="longer"):
        message_bytes(message, max_bytes=34)
    del message.content["arrays"]["3"]
    with pytest.raises(FormatError, match="truncated"):
        message_bytes(message)
    other = request_message(bytes(range(1, 36)), 11, 60.0)
    other.content["about"]["sha256"] = request_message(bytes(35), 11, 60.0).content["about"]["sha256"]
    with pytest.raises(FormatError, match="changed"):
        message_bytes(other)
    del other.content["about"]
    with pytest.raises(FormatError, match="unexpected"):
        message_bytes(other)


def test_all_are_asked_and_answer():
    found = transport(Grid(replying)).ask({"east": b"abc", "north": b"xyz"}, 5)
    assert found == {"east": b"cba", "north": b"zyx"}


def test_who_is_silent_is_lost_and_the_others_are_not():
    grid = Grid(lambda node, count, message: replying(node, count, message) if node == 11 else None)
    found = transport(grid).ask({"east": b"abc", "north": b"xyz"}, 0.05)
    assert found["east"] == b"cba"
    assert isinstance(found["north"], NoReply)


def test_who_was_waited_for_in_vain_is_not_waited_for_again_before_its_node_is_back():
    grid = Grid(lambda node, count, message: replying(node, count, message) if node == 11 or count else None)
    online = grid.get_nodes
    grid.get_nodes = lambda: online()[:1]
    asked = transport(grid)
    requests = {"east": b"abc", "north": b"xyz"}
    assert isinstance(asked.ask(requests, 0.05)["north"], NoReply)
    began = time.monotonic()
    found = asked.ask(requests, 60)
    assert found == {"east": b"cba", "north": NoReply("its node is still absent")}
    assert sum(node == 12 for node, _ in grid.pushed) == 1
    assert time.monotonic() - began < 10
    grid.get_nodes = online
    time.sleep(0.01)
    assert asked.ask(requests, 5) == {"east": b"cba", "north": b"zyx"}
    grid.get_nodes = lambda: online()[:1]
    time.sleep(0.01)
    assert asked.ask(requests, 5) == {"east": b"cba", "north": b"zyx"}


def test_a_reply_that_comes_too_late_is_never_used():
    late = {}

    def answers(node, count, message):
        if count == 0:
            late["reply"] = replying(node, count, message)
            return None
        return replying(node, count, message)

    grid = Grid(answers)
    assert isinstance(transport(grid).ask({"east": b"first"}, 0.02)["east"], NoReply)
    grid.replies["message 0"] = late["reply"]
    assert transport(grid).ask({"east": b"second"}, 1)["east"] == b"dnoces"


def test_a_node_that_was_started_anew_is_asked_again():
    def answers(node, count, message):
        grid.born[11] = "later"
        return replying(node, count, message) if count else None

    grid = Grid(answers)
    assert transport(grid).ask({"east": b"abc"}, 5)["east"] == b"cba"
    assert [request for _, request in grid.pushed] == [b"abc", b"abc"]


def test_a_request_is_repeated_after_a_while():
    grid = Grid(lambda node, count, message: replying(node, count, message) if count else None)
    assert transport(grid, retry_after=0.01).ask({"east": b"abc"}, 5)["east"] == b"cba"


def test_a_broken_connection_and_a_node_that_is_away_are_waited_for():
    grid = Grid(lambda node, count, message: replying(node, count, message) if count else failing(5, message))
    grid.faults = 3
    assert transport(grid).ask({"east": b"abc"}, 5)["east"] == b"cba"


def test_an_app_that_fails_again_and_again_is_lost_and_its_words_are_not_repeated():
    grid = Grid(lambda node, count, message: failing(2, message))
    found = transport(grid).ask({"east": b"abc"}, 5)["east"]
    assert isinstance(found, NoReply)
    assert "secret" not in found.reason
    assert len(grid.pushed) == flower.MAX_APP_FAILURES


def test_a_reply_of_another_node_is_not_used():
    def answers(node, count, message):
        reply = replying(node, count, message)
        reply.metadata.__dict__["_src_node_id"] = 12
        return reply

    assert "another node" in transport(Grid(answers)).ask({"east": b"abc"}, 1)["east"].reason


def test_replies_are_heard_as_they_come():
    """The first of north is never answered, and holds up nobody."""
    grid = Grid(lambda node, count, message: replying(node, count, message) if node == 11 or count else None)
    asked = transport(grid)
    asked.push({"east": b"abc", "north": b"xyz"}, 60)
    assert asked.next_reply(5) == ("east", b"cba")
    asked.push({"east": b"next"}, 60)
    assert asked.next_reply(5) == ("east", b"txen")
    assert asked.next_reply(0.02) is None
    grid.born[12] = "later"
    assert asked.next_reply(5) == ("north", b"zyx")
    assert [data for node, data in grid.pushed if node == 12] == [b"xyz", b"xyz"]
    assert asked.next_reply(5) is None


def test_replies_that_come_together_are_heard_one_by_one():
    asked = transport(Grid(replying))
    asked.push({"east": b"abc", "north": b"xyz"}, 60)
    assert {asked.next_reply(5), asked.next_reply(0)} == {("east", b"cba"), ("north", b"zyx")}


class Halting(Grid):
    """A call for the first reply of north, which was killed while it sent it, does not come back by itself."""

    def __init__(self, answers):
        Grid.__init__(self, answers)
        self.rest, self.halted = threading.Event(), []

    def pull_messages(self, ids):
        nodes = [self.pushed[int(one.removeprefix("message "))][0] for one in ids]
        if 12 in nodes and not self.halted:
            self.halted.append(list(ids))
            found = Grid.pull_messages(self, ids)
            assert self.rest.wait(20)
            return found
        return Grid.pull_messages(self, ids)


def test_a_site_that_was_killed_while_it_sent_holds_up_nobody():
    """Also not one whose reply was to come with the same call: it is asked again, and sends the same."""
    grid = Halting(replying)
    asked = transport(grid, pulls=PullCalls(0.05))
    asked.push({"east": b"abc", "north": b"xyz"}, 60)
    assert len(grid.halted) == 0
    assert {asked.next_reply(5), asked.next_reply(5)} == {("east", b"cba"), ("north", b"zyx")}
    assert [len(ids) for ids in grid.halted] == [2]
    asked.push({"east": b"next"}, 60)
    assert asked.next_reply(5) == ("east", b"txen")
    grid.rest.set()
    asked.push({"north": b"last"}, 60)
    assert asked.next_reply(5) == ("north", b"tsal")


def test_a_call_that_does_not_come_back_does_not_outlast_the_time_there_is():
    grid = Halting(replying)
    began = time.monotonic()
    found = transport(grid).ask({"north": b"xyz"}, 0.1)
    assert isinstance(found["north"], NoReply)
    assert time.monotonic() - began < 5
    grid.rest.set()


def test_the_reply_to_a_request_that_another_took_the_place_of_is_never_used():
    late = {}

    def answers(node, count, message):
        if count == 0:
            late["reply"] = replying(node, count, message)
            return None
        return replying(node, count, message)

    grid = Grid(answers)
    asked = transport(grid)
    asked.push({"east": b"first"}, 60)
    assert asked.next_reply(0.01) is None
    grid.replies["message 0"] = late["reply"]
    asked.push({"east": b"second"}, 60)
    assert asked.next_reply(5) == ("east", b"dnoces")
    asked.push({"east": b"third"}, 60)
    assert asked.cancel() == {"east": NoReply("no reply in time")}
    assert asked.next_reply(5) is None


def test_two_sites_are_not_one_node():
    with pytest.raises(ParameterError, match="same node"):
        FlowerTransport(None, {"east": 1, "north": 1})


def scope(path, key=None, client="10.0.0.7"):
    headers = [] if key is None else [(CONTROL_HEADER.encode(), key.encode())]
    return {"type": "http", "path": path, "headers": headers, "client": (client, 4711)}


def test_the_gate_lets_nodes_be_nodes_and_nothing_else():
    gate = Gate(None, "the key")
    assert gate.admits(scope("/v1/fleet/pull-messages"))
    assert not gate.admits(scope("/v1/control/start-run"))
    assert not gate.admits(scope("/v1/control/start-run", "another"))
    assert not gate.admits(scope("/v1/control/start-run", "", "127.0.0.1"))
    assert gate.admits(scope("/v1/control/start-run", "the key"))
    assert not gate.admits(scope("/v1/runtime/acquire-task"))
    assert not gate.admits(scope("/v1/runtime/acquire-task", "the key"))
    assert gate.admits(scope("/v1/runtime/acquire-task", client="127.0.0.1"))
    assert not gate.admits(scope("//v1/control/start-run"))


def test_what_sites_are_sent_as_an_app_holds_no_code():
    import io
    import zipfile

    bundle = app_bundle()
    assert bundle == app_bundle()
    names = [one for one in zipfile.ZipFile(io.BytesIO(bundle)).namelist() if not one.startswith(".info/")]
    assert names == ["pyproject.toml"]


@pytest.mark.slow
def test_a_server_that_is_killed_goes_on_to_the_same_bits(tmp_path):
    """Real processes, TLS and keys; then kill -9 of the server, and what outsiders can do at its port."""
    text = PLAIN + "rounds = 3\n"
    with federation(tmp_path) as made:
        require_closed(made.server)
        require_foreign_app_dropped(made)
        made.begin("first", text)
        made.wait(lambda: made.done("first") >= 1)
        made.running.kill("server")
        assert made.ended("first")[0] == 1
        assert not made.server.run("first").result.exists()
        demo.start_server(made.running, made.server)
        made.wait_for_nodes()
        code, told = made.run("first", text, "--resume")
        assert (code, told["status"], told["rounds"]) == (0, "done", 3)
        told = status_of(made.server)
        assert told["sites"] == dict.fromkeys(made.names, "online")
        assert told["runs"]["first"] == {"status": "done", "rounds_done": 3}
        group = made.running.running["server"].pid
    with pytest.raises(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    assert made.is_same("first")
    assert all(site.opened().ledger.serial == 3 for site in made.sites.values())


def status_of(server):
    """As the command tells it."""
    command = [sys.executable, "-m", "partsong", "federation", "status", "--folder", str(server.path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    return json.loads(done.stdout.splitlines()[-1])


def require_closed(server):
    """Without the key no run is started; with another key no node is let in."""
    import httpx

    found = httpx.post(f"https://{server.address}/v1/control/start-run", verify=str(server.path / "ca.crt"))
    assert found.status_code == 403
    import ssl

    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{server.address}/health", verify=ssl.create_default_context())


def require_foreign_app_dropped(made):
    """A run of another app, as a server could start it: no site takes it up."""
    import hashlib

    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto, user_config_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    ours = app_bundle()
    text = (demo.Path(demo.__file__).parents[1] / "flower" / "app" / "pyproject.toml").read_bytes()
    content = build_fab_from_files({"pyproject.toml": text.replace(b'version = "1.0.0"', b'version = "6.6.6"')})[0]
    assert content != ours
    place = made.server.run("foreign")
    place.folder.mkdir()
    place.experiment.write_text(PLAIN + "rounds = 3\n")
    place.settings.write_text('{"timeout": 8}')
    fab = fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))
    request = StartRunRequest(fab=fab, override_config=user_config_to_proto({"run": "foreign"}))
    with made.open_control() as control:
        number = control.client.StartRun(request).run_id
        made.wait(lambda: control.status(number).is_over)
    told = json.loads(place.result.read_text())
    assert (told["status"], told["type"]) == ("failed", "SiteLost")
    assert all("not pinned" in (made.folder / f"{name}.log").read_text() for name in made.names)


ASYNCHRONOUS = 'method = "asyn-sd"\nrank = 3\nrounds = 12\nlocal_steps = 3\nseed = 5\non_party_error = "skip"\n'


@pytest.mark.slow
def test_an_asynchronous_run_is_held_up_by_nobody_and_can_be_repeated_in_one_process(tmp_path):
    """Real processes; a site is killed, is away while others go on, and comes back."""
    with federation(tmp_path) as made:
        made.begin("first", ASYNCHRONOUS)
        made.wait(lambda: made.done("first") >= 3)
        made.running.kill("north")
        away = made.done("first")
        made.wait(lambda: made.done("first") >= away + 3)
        made.start_node("north")
        code, told = made.ended("first")
    assert code == 0
    require_unharmed(made, "first", told, 12)
    order = told["arrivals"]
    assert order[away : away + 3].count("north") <= 1
    assert order.count("north") > order[: away + 3].count("north")


@pytest.mark.slow
def test_a_node_whose_key_is_not_known_is_not_let_in(tmp_path):
    from partsong.federation.flower.site_process import register

    server, sites = demo.set_up(tmp_path, SITES)
    with demo.processes(tmp_path) as running:
        demo.start_server(running, server)
        with pytest.raises(ServerError, match=r"does not know the key"):
            register(sites["east"], lambda line: None).__enter__()
        other, strangers = demo.set_up(tmp_path / "other", SITES)
        stranger = demo.SiteFolder(strangers["east"].path, "demo", "east", server.address, strangers["east"].data)
        with pytest.raises(ServerError, match="no certificate by the authority"):
            register(stranger, lambda line: None).__enter__()
    assert other.address != server.address


@pytest.mark.slow
def test_the_demo_ends_with_the_same_bits(tmp_path):
    told = demo.run_demo(tmp_path, print)
    assert told["is_same"]
    assert told["absent"] == {}
