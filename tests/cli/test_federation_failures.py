"""What goes wrong on a first afternoon: killed commands, wrong addresses, clocks and folders, read-only copies."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import time
import zipfile
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from cryptography import x509

from partsong.errors import FileError, FormatError
from partsong.federation.commands import server as federation_server
from partsong.federation.commands.demo import free_port
from partsong.federation.commands.server import Engine
from partsong.federation.flower import control, server_process, site_process
from partsong.federation.locks import held
from partsong.federation.setup import credentials, server_folder
from partsong.federation.setup.credentials import Card, Kit, require_address
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.transports import files
from partsong.io.write import atomic_write, write_bytes

EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 1\nseed = 1\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A federation with one site that was admitted, over files, and one that has joined."""
    folder = tmp_path_factory.mktemp("made")
    np.save(folder / "rows.npy", np.random.default_rng(0).random((20, 6)))
    server = ServerFolder.made(folder / "liver", "liver", "nmf.example.org:8443")
    for site in ("north", "south"):
        kit = Kit.read(server.invite(site, folder / f"{site}.zip"))
        SiteFolder.joining(folder / f"site-{site}", kit, folder / "rows.npy", {})
    server.admit(Card.read(folder / "site-north" / "card.toml"))
    return folder


@pytest.fixture
def server(made, tmp_path):
    """A copy of it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return ServerFolder.at(tmp_path / "liver")


def left_draft(place, text):
    """What a process leaves that is killed while it writes a file."""
    with atomic_write(place) as draft:
        name = draft.name
    place.unlink()
    place.with_name(name).write_text(text)


@pytest.mark.parametrize("text", ["", 'federation = "liver"\n'])
def test_a_draft_of_a_card_is_no_card(server, told, tmp_path, text):
    left_draft(server.path / "sites" / "south.toml", text)
    assert list(told("federation", "status", "--folder", server.path)["sites"]) == ["north"]
    words = ("federation", "admit", tmp_path / "site-south" / "card.toml", "--folder", server.path, "--engine", "files")
    assert told(*words)["sites"] == ["north", "south"]


class Known:
    """A server that knows nodes by their keys, as Flower does."""

    def __init__(self):
        self.keys = {}

    def find_node(self, key, site):
        return self.keys.get((key, site))

    def register(self, key, site):
        return self.keys.setdefault((key, site), 40 + len(self.keys))

    def nodes(self):
        return dict.fromkeys(self.keys.values())

    def unregister(self, number):
        self.keys = {one: other for one, other in self.keys.items() if other != number}


@pytest.fixture
def running(server, monkeypatch):
    """The same federation, with a server that answers."""
    made = Known()

    @contextmanager
    def controlling(server):
        yield made

    monkeypatch.setattr(control, "open_control", controlling)
    return made


def test_a_site_whose_admission_was_killed_is_admitted_again(server, running, told, tmp_path):
    """Killed after the server knew the node, before its number was written down."""
    card = Card.read(tmp_path / "site-south" / "card.toml")
    server.admit(card)
    number = running.register(card.node_key, "south")
    assert server.node_of("south") is None
    told("federation", "admit", tmp_path / "site-south" / "card.toml", "--folder", server.path)
    assert server.node_of("south") == number


def test_a_node_whose_number_was_never_written_down_is_removed_too(server, running, told, tmp_path):
    card = Card.read(tmp_path / "site-north" / "card.toml")
    running.register(card.node_key, "north")
    with held(server.path / "server.lock", ""):
        told("federation", "remove", "north", "--folder", server.path)
    assert running.keys == {}


def test_the_number_of_an_old_key_is_not_that_of_a_new_one(server, running, told, tmp_path):
    card = tmp_path / "site-north" / "card.toml"
    running.keys["the key before", "north"] = 7
    server.set_node("north", 7)
    told("federation", "admit", card, "--folder", server.path)
    assert server.node_of("north") == running.find_node(Card.read(card).node_key, "north") != 7


@pytest.mark.parametrize("drafts", [0, 1])
def test_the_folder_of_a_run_that_was_killed_before_it_began_is_no_run(server, tmp_path, drafts):
    place = server.run("trial")
    place.folder.mkdir()
    if drafts:
        left_draft(place.experiment, "method")
    (tmp_path / "trial.toml").write_text(EXPERIMENT)
    words = (server, tmp_path / "trial.toml", "trial", False, Engine.FILES)
    place, seed = federation_server._prepare_run(*words)
    assert place.experiment.read_text() in (EXPERIMENT, f"seed = {seed}\n{EXPERIMENT}")


def test_a_run_that_cannot_be_called_after_its_file_is_told_of_name(server, told, tmp_path):
    (tmp_path / "mein versuch.toml").write_text(EXPERIMENT)
    words = (
        "federation",
        "run",
        "mein versuch.toml",
        "--folder",
        server.path,
        "--engine",
        "files",
        "--exchange-folder",
        "drop",
    )
    assert "--name" in told(*words, code=1)["error"]


def test_a_renewed_certificate_needs_a_new_start_of_the_server(server, invoke, monkeypatch):
    words = ("federation", "init", server.path, "--renew")
    assert "serve again" not in invoke(*words).stderr
    old = (server.path / "server.crt").read_bytes()
    monkeypatch.setattr(control, "served_certificate", lambda server: old)
    monkeypatch.setattr("partsong.federation.commands.status._sites", lambda server: {})
    status = ("federation", "status", "--folder", server.path)
    with held(server.path / "server.lock", ""):
        assert "serve again" not in invoke(*status).stdout
        assert "serve again" in invoke(*words).stderr
        assert "397 days left: restart it" in invoke(*status).stdout


def test_status_comes_to_its_hint_where_the_server_shows_a_certificate_that_has_expired(
    server, told, invoke, monkeypatch
):
    """Renewing once more cannot help then: nodes are not asked for, which would fail with the advice to renew."""
    old = (server.path / "server.crt").read_bytes()
    left = credentials.days_left
    monkeypatch.setattr(control, "served_certificate", lambda server: old)
    monkeypatch.setattr(credentials, "days_left", lambda shown: -0.4 if shown == old else left(shown))
    monkeypatch.setattr(control, "open_control", lambda server: pytest.fail("its certificate is not accepted"))
    status = ("federation", "status", "--folder", server.path)
    with held(server.path / "server.lock", ""):
        said = invoke(*status, code=1).stdout
        assert "expired 1 day ago" in said
        assert f"partsong federation init {server.path} --renew" in said
        server.renewed()
        said = invoke(*status, code=1).stdout
        assert "(the server uses another one, expired 1 day ago: restart it)" in said
        assert "--renew" not in said
        found = told(*status, code=1)
    assert (found["server"], found["certificate_days"], found["served_certificate_days"]) == ("running", 397, -1)
    assert found["sites"] == {"north": "unknown"}


def test_a_renewal_that_was_killed_between_its_two_files_is_told_and_mended_by_another(server, invoke, monkeypatch):
    def killed(place, content, *, private=False):
        if place.name == "server.crt":
            raise KeyboardInterrupt
        write_bytes(place, content, private=private)

    with monkeypatch.context() as dying:
        dying.setattr(server_folder, "write_bytes", killed)
        with pytest.raises(KeyboardInterrupt):
            server.renewed()
    said = invoke("federation", "serve", "--folder", server.path, code=1).stderr
    assert "server.crt does not match" in said
    renewing = shlex.split(said.rpartition(": partsong ")[2])
    invoke(*renewing)
    assert server.require_valid() > 396
    (server.path / "server.key").write_text("x")
    with pytest.raises(FileError, match="--renew"):
        server.require_valid()
    (server.path / "server.key").unlink()
    with pytest.raises(FileError, match=r"server\.key cannot be read.*--renew"):
        server.require_valid()
    (server.path / "ca.key").write_text("x")
    with pytest.raises(FormatError, match=r"ca\.key"):
        server.renewed()


@pytest.mark.parametrize("content", [None, b"", b"garbage"])
@pytest.mark.parametrize(
    ("name", "what", "way_out"),
    [
        ("server.crt", "certificate", "--renew"),
        ("server.key", "certificate", "--renew"),
        ("ca.crt", "authority", "Restore your backup, or copy ca.crt from any kit"),
    ],
)
def test_a_file_of_the_server_that_is_gone_or_damaged_is_named_with_the_way_out(
    server, told, invoke, tmp_path, name, what, way_out, content
):
    status, file = ("federation", "status", "--folder", server.path), server.path / name
    whole = told(*status)
    file.unlink() if content is None else file.write_bytes(content)
    said = told(*status, code=1)
    assert list(said["problems"]) == [what]
    assert str(file) in said["problems"][what]
    assert way_out in said["problems"][what]
    assert ("cannot be read: No such file" in said["problems"][what]) == (content is None)
    assert (said["sites"], said["runs"]) == (whole["sites"], whole["runs"])
    assert f"PROBLEM: {said['problems'][what]}" in invoke(*status, code=1).stdout
    with pytest.raises((FileError, FormatError), match=re.escape(said["problems"][what])):
        server.require_valid()
    if what == "certificate":
        invoke(*shlex.split(said["problems"][what].rpartition(": partsong ")[2]))
    else:
        with pytest.raises((FileError, FormatError), match=f"{file}.*Restore your backup"):
            server.renewed()
        shutil.unpack_archive(tmp_path / "north.zip", tmp_path / "kit")
        shutil.copyfile(tmp_path / "kit" / "ca.crt", file)
    assert server.require_valid() > 396
    assert told(*status)["fingerprint"] == whole["fingerprint"]


def test_status_without_the_coordinator_s_key_tells_what_there_is(server, told):
    (server.path / "coordinator.key").unlink()
    said = told("federation", "status", "--folder", server.path, code=1)
    assert "coordinator.key cannot be read" in said["problems"]["coordinator_key"]
    assert (said["fingerprint"], said["sites"], said["certificate_days"]) == (None, {"north": "unknown"}, 397)


@pytest.mark.parametrize("content", [None, b"garbage", "another"])
def test_no_certificate_is_made_without_the_authority_s_own_key(server, content):
    key, before = server.path / "ca.key", (server.path / "server.crt").read_bytes()
    if content is None:
        key.unlink()
    else:
        key.write_bytes(credentials.new_authority("liver").key if content == "another" else content)
    with pytest.raises((FileError, FormatError), match=f"{key}.*Restore your backup. Nothing can replace this key"):
        server.renewed()
    assert (server.path / "server.crt").read_bytes() == before


def test_a_folder_without_a_federation_is_told_with_a_command_that_makes_one(invoke, tmp_path):
    said = invoke("federation", "status", "--folder", "nope", code=1).stderr
    invoke(*shlex.split(said.rpartition("make one: partsong ")[2].replace("HOST:PORT", "nmf.example.org:8443")))
    assert ServerFolder.at(tmp_path / "nope").name == "NAME"
    said = invoke("federation", "stop", "first", "--folder", "nope", code=1).stderr
    assert "There are none yet." in said
    assert "Known are" not in said


@pytest.mark.parametrize("ending", [".zip", ".ZIP", ""])
def test_a_kit_is_a_zip_however_its_ending_is_written(server, tmp_path, ending):
    assert Kit.read(server.invite("west", tmp_path / f"west{ending}")).site == "west"


def test_a_fingerprint_is_compared_with_the_roster_that_is_pinned(server, told, tmp_path):
    words = ("federation", "join", "north.zip", "--yes", "--no-start")
    assert "--roster" in told(*words, "--fingerprint", "0" * 64, code=1)["error"]
    right = server.roster().fingerprint
    told(*words, "--roster", server.path / "roster.toml", "--fingerprint", right)
    wrong = right[:-1] + ("0" if right[-1] != "0" else "1")
    assert right in told(*words, "--fingerprint", wrong, code=1)["error"]
    assert told(*words, "--fingerprint", right.upper().replace("-", " "))["fingerprint"] == right


ADDRESSES = (
    "münchen.de:8443",
    "https://nmf.example.org:8443",
    "::1:8443",
    "[::1%lo]:8443",
    "[a]:8443",
    "a/b:1",
    "a.:1",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_no_certificate_can_be_for_is_no_address(told, address):
    failed = told("federation", "init", "x", "--name", "x", "--address", address, code=1)
    assert failed["type"] == "ParameterError"
    assert "xn--mnchen-3ya.de:8443" in failed["error"], "how other letters are written"


@pytest.mark.parametrize("address", ["nmf.example.org:8443", "192.0.2.1:8443", "[2001:db8::1]:8443", "vm_1:8443"])
def test_a_certificate_can_be_for_every_address(address):
    host, port = require_address(address)
    assert (f"[{host}]" if ":" in host else host, port) == (address.rpartition(":")[0], 8443)
    made = credentials.new_server_certificate(credentials.new_authority("x"), host).certificate
    names = x509.load_pem_x509_certificate(made).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    numbers = {str(one) for one in names.get_values_for_type(x509.IPAddress)}
    assert {host, "localhost", "127.0.0.1", "::1"} == numbers | set(names.get_values_for_type(x509.DNSName))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1", "::"])
def test_a_server_is_reached_from_its_own_machine_whatever_host_it_has(host):
    port = free_port()
    try:
        sockets = server_process.open_sockets(host, port)
    except FileError:
        if ":" in host and not socket.has_ipv6:
            pytest.skip("no version 6 here")
        raise
    try:
        assert host == "localhost" or host in [one.getsockname()[0] for one in sockets]
        for one in sockets:
            one.listen()
        socket.create_connection((control.LOOPBACK, port), 5).close()
        with pytest.raises(FileError, match=f"Port {port} of"):
            server_process.open_sockets(host, port)
    finally:
        for one in sockets:
            one.close()


def test_a_host_that_is_not_of_this_machine_is_told_with_the_way_out():
    for host in ("203.0.113.7", "no-such-host.invalid", f"{'a' * 70}.invalid"):
        with pytest.raises(FileError, match=rf"{host}.*--host 0\.0\.0\.0"):
            server_process.open_sockets(host, 18443)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (60, r"6[01] seconds ahead"),
        (-400, r"(400|399) seconds behind"),
        (0, "does not know the key"),
        (-200, "not know the key"),
    ],
)
def test_a_clock_that_is_wrong_is_named_before_the_key(server, seconds, said):
    site = SiteFolder.at(server.path.parent / "site-north")
    text = site_process.rejection_message(
        site, site_process.clock_offset(formatdate(time.time() - seconds, usegmt=True))
    )
    assert re.search(said, text)
    assert ("card.toml" in text) == (said.endswith("the key"))
    unsure = site_process.rejection_message(site, site_process.clock_offset(None))
    assert unsure.index("clock") < unsure.index("card.toml")


def test_the_command_that_comes_next_can_be_copied(server, invoke, tmp_path):
    os.rename(tmp_path / "south.zip", tmp_path / "my kit.zip")
    said = invoke("federation", "join", "my kit.zip", "--data", "rows.npy", "--folder", "my site", "--yes").stdout
    told = shlex.split(said.splitlines()[-1].rpartition("arrives, run: ")[2])
    assert told[2:] == ["join", "my kit.zip", "--folder", "my site", "--roster", "roster.toml"]
    with zipfile.ZipFile(server.invite("south", tmp_path / "my other kit.zip")) as archive:
        assert "join 'my other kit.zip' --data" in archive.read("README.txt").decode()
    said = invoke("federation", "init", "my liver", "--name", "liver", "--address", "nmf.example.org:8443").stdout
    assert shlex.split(said.splitlines()[-1])[-2:] == ["--folder", "my liver"]
    said = invoke("federation", "invite", "north", "--folder", "my liver").stdout
    assert shlex.split(said.splitlines()[-1])[-2:] == ["--folder", "my liver"]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_site_says_for_which_folder_it_waits(server, monkeypatch, tmp_path, is_there):
    monkeypatch.setattr(files.SiteMailbox, "serve", lambda *arguments: iter(()))
    if is_there:
        (tmp_path / "drop" / "north" / "in").mkdir(parents=True)
    said = []
    files.answer_requests(tmp_path / "drop", SiteFolder.at(tmp_path / "site-north"), said.append)
    assert said == ([] if is_there else [said[0]])
    assert is_there or f"{Path('drop', 'north', 'in')}; {tmp_path / 'drop'} does not exist" in said[0]


@pytest.mark.parametrize("folder", ["liver", "site-north"])
def test_status_writes_nothing(server, told, monkeypatch, tmp_path, folder):
    """So that it works on a copy that cannot be written."""
    for name in ("server.lock", "node.lock"):
        (tmp_path / folder / name).touch()
    opened, before = os.open, {path: path.lstat() for path in (tmp_path / folder).rglob("*")}

    def read_only(path, flags, *more, **others):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", read_only)
    told("federation", "status", "--folder", folder)
    after = {path: path.lstat() for path in (tmp_path / folder).rglob("*")}
    assert {path: (one.st_ino, one.st_mtime_ns) for path, one in after.items()} == {
        path: (one.st_ino, one.st_mtime_ns) for path, one in before.items()
    }


def test_a_roster_of_another_time_is_written_anew(server):
    """As `admit` leaves it that is killed between a card and the roster."""
    (server.path / "roster.toml").write_text("of another time")
    assert (server.path / "roster.toml").read_bytes() != server.roster().written()
    assert (server.path / "roster.toml").read_bytes() == server.roster().written()
