"""`partsong federation join` on a folder that is there: nothing changes before a yes, nor while its node runs, what an
earlier folder has promised goes on, and what a used one has lost is not made anew.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import tomllib
import zipfile
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.cli.main import app
from partsong.errors import FileError, FormatError, PartsongError
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import held
from partsong.federation.policy import Policy
from partsong.federation.setup import credentials, site_keys
from partsong.federation.setup import site_folder as continuing
from partsong.federation.setup.credentials import Card, Kit, SharedKey
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import Joining, SiteFolder
from partsong.federation.setup.site_keys import POLICY
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request
from tests.cli.conftest import runner

SITES = ("north", "south")
JOIN = ["federation", "join", "north.zip"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two sites that have joined, been admitted and pinned the roster, as far as that goes without a server."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "unpacked").mkdir()
    for name, rows in (("rows", 20), ("few", 3)):
        np.save(folder / f"{name}.npy", np.random.default_rng(rows).random((rows, 6)))
    (folder / "sites.key").write_text(SharedKey(bytes(16)).text)
    server = ServerFolder.made(folder / "liver", "liver", "nmf.example.org:8443")
    for name in SITES:
        kit = Kit.read(server.invite(name, folder / f"{name}.zip"), folder / "unpacked")
        SiteFolder.joining(folder / f"site-{name}", kit, folder / "rows.npy", {})
        server.admit(Card.read(folder / f"site-{name}" / "card.toml"))
    for name in SITES:
        SiteFolder.at(folder / f"site-{name}").pin(server.roster())
    return folder


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """Whether writes are in order does not depend on it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of it, in which commands are given."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def content_of(folder):
    """All that is in a folder, and whom it is for."""
    found = {path: path.read_bytes() if path.is_file() else b"" for path in [folder, *folder.rglob("*")]}
    return {path: (data, path.stat().st_mode, path.stat().st_mtime_ns) for path, data in found.items()}


def asked(here, place, request=None):
    """What a site answers, signed, to a request that releases nothing."""
    request = (request or Request("north", Nonce("r", kind=Kind.FINISH))).written()
    transport = ServerFolder.at(here / "liver").signed(InProcess({"north": place}))
    return Reply.read(transport.ask({"north": request}, 1.0)["north"]).answer


@pytest.mark.parametrize("answer", ["n\n", ""])
def test_who_does_not_say_yes_has_changed_nothing(here, answer):
    folder = here / "site-north"
    SiteLedger(folder / "state" / "ledger.jsonl").make_up(1, None, "before")
    folder.chmod(0o755)
    before = content_of(folder)
    result = runner().invoke(app, [*JOIN, "--data", "few.npy", "--shared-key", "sites.key"], input=answer)
    assert result.exit_code == 1
    assert "3 rows" in result.stdout
    assert content_of(folder) == before
    assert "removed" not in result.stderr
    assert not answer or f"Not joined. The folder {folder} is as it was before." in result.stderr


def test_a_new_folder_is_not_made_and_an_earlier_one_not_copied_before_a_yes(here):
    words = [*JOIN, "--data", "rows.npy", "--folder", "anew", "--continues", "site-north"]
    (here / "site-north" / "site.toml").write_text("minimum_parties = 7\n")
    result = runner().invoke(app, words, input="n\n")
    assert "at least 7 sites" in result.stdout
    assert f"The folder {here / 'anew'} was not made." in result.stderr
    assert not (here / "anew").exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [(("--data", "few.npy"), "data"), (("--transpose",), "reading"), (("--shared-key", "sites.key"), "shared key")],
)
def test_while_a_node_runs_its_folder_is_not_given_other_data_or_keys(here, told, words, what):
    folder = here / "site-north"
    with held(folder / "node.lock", ""):
        before = content_of(folder)
        said = told("federation", "join", "north.zip", *words, "--yes", "--no-start", code=1)
        assert content_of(folder) == before
        assert f"another value of {what}." in said["error"]
        told("federation", "join", "north.zip", "--yes", "--no-start")
        assert content_of(folder)[folder / "joined.toml"] == before[folder / "joined.toml"]
    told("federation", "join", "north.zip", *words, "--yes", "--no-start")
    assert content_of(folder) != before


@pytest.mark.parametrize("file", ["joined.toml", "shared.key", "secret"])
def test_a_node_answers_with_what_it_was_started_with_or_not_at_all(here, file):
    site = SiteFolder.at(here / "site-north")
    site.take(SharedKey(bytes(16)))
    party, kept = site.answering(), (site.path / file).read_bytes()
    assert asked(here, party) == Refusal("not-started")
    changed = {"joined.toml": kept.replace(b"rows.npy", b"few.npy"), "secret": bytes(32)}
    (site.path / file).write_bytes(changed.get(file, SharedKey(bytes([1] * 16)).text.encode()))
    assert asked(here, party) == Refusal("settings")
    assert "started with" in (site.path / "state" / "site.log").read_text()
    (site.path / file).write_bytes(kept)
    assert asked(here, party) == Refusal("not-started")


CONTINUING = ("federation", "join", "north.zip", "--data", "rows.npy", "--folder", "anew", "--yes", "--no-start")


def test_a_budget_is_not_lost_where_the_new_folder_was_there_before(here, told):
    old, new = here / "site-north", here / "anew"
    (old / "site.toml").write_text((old / "site.toml").read_text() + "[privacy]\nepsilon = 3\n")
    told(*CONTINUING)
    before = content_of(new)
    said = told(*CONTINUING, "--continues", "site-north", code=1)
    assert "privacy" in said["error"]
    assert "epsilon=3.0" in said["error"]
    assert "minimum_parties" not in said["error"]
    assert str(new / "site.toml") in said["error"]
    assert content_of(new) == before
    shutil.copy(old / "site.toml", new / "site.toml")
    told(*CONTINUING, "--continues", "site-north")
    assert SiteFolder.at(new).policy() == SiteFolder.at(old).policy()


def test_only_an_earlier_folder_of_the_same_site_goes_on(here, told):
    said = told(*CONTINUING, "--continues", "site-south", code=1)
    assert "the folder of 'south' in 'liver'" in said["error"]
    other = here / "site-north" / "joined.toml"
    other.write_text(other.read_text().replace('"liver"', '"heart"'))
    assert "in 'heart'" in told(*CONTINUING, "--continues", "site-north", code=1)["error"]
    assert not (here / "anew").exists()


def test_refusals_that_no_line_tells_of_go_on_with_the_audit_log(here, told):
    site = SiteFolder.at(here / "site-north")
    for _ in range(3):
        asked(here, site.answering())
    unlisted = json.loads((site.path / "state" / "refusals").read_text())["unlisted"]
    assert unlisted == {"not-started": 1}
    told(*CONTINUING, "--continues", "site-north")
    new = SiteFolder.at(here / "anew")
    new.answering()(b"of nobody")
    last = json.loads((new.path / "state" / "audit.jsonl").read_text().splitlines()[-1])
    assert (last["refusal"], last["unlisted"]) == ("unsigned", unlisted)
    counted = (new.path / "state" / "refusals").read_bytes()
    with (new.path / "site.toml").open("a") as policy:
        policy.write("[privacy]\nepsilon = 3\n")  # the new folder's own by now
    told(*CONTINUING, "--continues", "site-north")
    assert (new.path / "state" / "refusals").read_bytes() == counted


AGAIN = ("federation", "join", "north.zip", "--yes", "--no-start")
WITH_DATA = (*AGAIN, "--data", "rows.npy")


@pytest.mark.parametrize("left", ["joined.toml", "state/ledger.jsonl", "state/audit.jsonl", "state/had.toml"])
def test_a_used_folder_that_has_lost_its_policy_gets_no_other(here, told, left):
    folder = here / "site-north"
    SiteLedger(folder / "state" / "ledger.jsonl").make_up(1, None, "before")
    asked(here, SiteFolder.at(folder).answering())
    names = {"site.toml", "joined.toml", "card.toml", "roster.toml", "state/ledger.jsonl", "state/audit.jsonl"}
    for name in sorted({*names, "state/had.toml", "state/site.log", "state/lock", "state/refusals"} - {left}):
        (folder / name).unlink(missing_ok=True)
    before = content_of(folder)
    said = told(*WITH_DATA, code=1)
    assert said["type"] == "FileError"
    assert str(folder / "site.toml") in said["error"]
    assert "Put your own copy back" in said["error"]
    assert content_of(folder) == before


@pytest.mark.parametrize("name", ["secret", "node"])
def test_a_site_that_has_lost_a_key_of_its_own_is_not_given_another(here, invoke, name):
    """The command that the error tells goes on in a new folder."""
    folder = here / "site-north"
    np.savetxt(here / "my rows.csv", np.random.default_rng(0).random((20, 6)), delimiter=",")
    invoke(*AGAIN, "--data", "my rows.csv", "--no-header")
    (folder / name).unlink()
    before = content_of(folder)
    said = invoke(*AGAIN, code=1)
    assert str(folder / name) in said.stderr
    assert "What leaves" not in said.stdout
    assert content_of(folder) == before
    command = " ".join(said.stderr.split("partsong federation join")[1].split())
    invoke("federation", "join", *shlex.split(command), "--yes", "--no-start")
    new = SiteFolder.at(here / "site-north-new")
    assert (new.data, new.reading) == (here / "my rows.csv", {"header": False})
    (new.path / name).unlink()  # while people look at what leaves
    with pytest.raises(FileError, match="this site is known by it"):
        new.make((new.path / "ca.crt").read_bytes())


@pytest.mark.parametrize(
    "left", [("card.toml",), ("roster.toml",), ("state/had.toml",), ("state/ledger.jsonl",), ("state/audit.jsonl",)]
)
def test_a_folder_without_joined_toml_and_keys_is_known_to_be_used_by_what_else_is_there(here, told, left):
    folder = here / "site-north"
    SiteLedger(folder / "state" / "ledger.jsonl").make_up(1, None, "before")
    asked(here, SiteFolder.at(folder).answering())
    names = {"joined.toml", "secret", "node", "card.toml", "roster.toml"}
    for name in sorted({*names, *(f"state/{file}" for file in os.listdir(folder / "state"))} - {*left}):
        (folder / name).unlink()
    before = content_of(folder)
    assert "this site is known by it" in told(*WITH_DATA, code=1)["error"]
    assert content_of(folder) == before


def test_a_folder_whose_joined_toml_is_gone_is_that_of_its_card(here, told):
    old = here / "site-north"
    SiteLedger(old / "state" / "ledger.jsonl").make_up(1, None, "before")
    (old / "joined.toml").unlink()
    (old / "secret").unlink()
    kept = (old / "card.toml").read_bytes()
    (old / "card.toml").unlink()
    assert "sites/NAME.toml" in told(*CONTINUING, "--continues", "site-north", code=1)["error"]
    (old / "card.toml").write_bytes(kept.replace(b"north", b"south"))
    assert "the folder of 'south'" in told(*CONTINUING, "--continues", "site-north", code=1)["error"]
    assert not (here / "anew").exists()
    (old / "card.toml").write_bytes(kept)
    told(*CONTINUING, "--continues", "site-north")
    assert SiteLedger(here / "anew" / "state" / "ledger.jsonl").serial == 1


@pytest.mark.parametrize("name", ["node", "node.pub"])
@pytest.mark.parametrize("damage", ["empty", "cut", "other"])
def test_the_keys_of_a_node_are_whole_and_belong_together(here, told, name, damage):
    folder = here / "site-north"
    kept = (folder / name).read_bytes()
    other = (here / "site-south" / name).read_bytes()
    (folder / name).write_bytes({"empty": b"", "cut": kept[:60], "other": other}[damage])
    before = content_of(folder)
    said = told(*AGAIN, code=1)
    assert said["type"] == "FormatError"
    assert str(folder / name) in said["error"]
    assert "Put your own copy back" in said["error"]
    assert content_of(folder) == before


def test_the_public_key_of_a_node_that_is_gone_is_in_the_card(here, told):
    place = here / "site-north" / "node.pub"
    place.unlink()
    said = told(*AGAIN, code=1)
    assert said["type"] == "FileError"
    assert "node_key in card.toml" in said["error"]
    place.write_text(Card.read(here / "site-north" / "card.toml").node_key)
    told(*AGAIN)


@pytest.mark.parametrize("content", [None, b""])
def test_an_authority_that_is_gone_is_written_again_if_the_pinned_roster_names_it(here, told, content):
    place = here / "site-north" / "ca.crt"
    kept = place.read_bytes()
    other = ServerFolder.made(here / "other", "liver", "nmf.example.org:8443").authority
    kit = Kit.read(here / "north.zip", here / "unpacked")
    replace(kit, authority=other).save(here / "other.zip")
    place.unlink() if content is None else place.write_bytes(content)
    said = told("federation", "join", "other.zip", "--yes", "--no-start", code=1)
    assert "is not the one that site-north trusts" in said["error"]
    told(*AGAIN)
    assert place.read_bytes() == kept


@pytest.mark.parametrize("content", ["", "xx[", "foo = 1\n", 'roster = "yes"\nshared_key = true\n', "roster = true\n"])
def test_a_damaged_list_of_what_a_folder_has_had_is_told_with_what_it_should_say(here, invoke, told, content):
    place = here / "site-north" / "state" / "had.toml"
    invoke(*AGAIN, "--shared-key", "sites.key")
    place.write_text(content)
    before = content_of(here / "site-north")
    said = told(*AGAIN, code=1)
    assert said["type"] == "FormatError"
    assert f"{place} is damaged" in said["error"]
    assert content_of(here / "site-north") == before
    words = shlex.split(said["error"][said["error"].index("printf") :])
    place.write_text(words[1].replace("\\n", "\n"))
    invoke(*AGAIN)
    assert tomllib.loads(place.read_text()) == {"shared_key": True, "roster": True, "joined": True}


@pytest.mark.parametrize("content", [b"", b" \r\n\t\n", b"\xef\xbb\xbf\n"])
def test_an_emptied_policy_is_none_and_a_comment_is_one(here, told, content):
    site = SiteFolder.at(here / "site-north")
    party = site.answering()
    (site.path / "site.toml").write_bytes(content)
    before = content_of(site.path)
    assert f"{site.path / 'site.toml'} is empty" in told(*AGAIN, code=1)["error"]
    assert content_of(site.path) == before
    assert asked(here, party) == Refusal("storage")
    assert "is empty" in told(*CONTINUING, "--continues", "site-north", code=1)["error"]
    assert not (here / "anew").exists()
    (site.path / "site.toml").write_bytes(content + b"# all\n")
    told(*AGAIN)
    assert asked(here, party) == Refusal("not-started")


def test_a_policy_that_changes_while_data_are_read_is_obeyed(here, monkeypatch):
    site, read = SiteFolder.at(here / "site-north"), continuing.table_at

    def slowly(data, reading):
        table = read(data, reading)
        (site.path / "site.toml").write_text("minimum_parties = 7\n")
        return table

    monkeypatch.setattr(continuing, "table_at", slowly)
    assert site.opened().policy.minimum_parties == 7


@pytest.mark.skipif(os.name != "posix", reason="a command for a POSIX shell")
def test_the_usual_policy_is_written_by_the_command_that_the_error_tells(here, invoke):
    (here / "site-north" / "site.toml").unlink()
    assert asked(here, SiteFolder.at(here / "site-north").answering()) == Refusal("storage")
    line = next(line for line in invoke(*AGAIN, code=1).stderr.splitlines() if "printf" in line)
    subprocess.run(["sh", "-c", line[line.index("printf") :]], check=True)
    invoke(*AGAIN)
    assert SiteFolder.at(here / "site-north").policy() == Policy.from_table(tomllib.loads(POLICY))


@pytest.mark.parametrize("has_lines", [True, False])
def test_a_new_folder_that_was_used_does_not_get_the_policy_of_an_earlier_one(here, told, has_lines):
    if has_lines:
        asked(here, SiteFolder.at(here / "site-north").answering())
    told(*CONTINUING, "--continues", "site-north")
    (here / "anew" / "site.toml").unlink()
    assert "this folder was used" in told(*CONTINUING, "--continues", "site-north", code=1)["error"]
    with pytest.raises(FileError, match="this folder was used"):
        continuing.continue_from(here / "site-north", SiteFolder.at(here / "anew"))
    assert not (here / "anew" / "site.toml").exists()


def test_an_empty_policy_in_a_folder_that_was_never_used_is_not_the_one_that_is_shown(here, invoke):
    (here / "site-north" / "site.toml").write_text("minimum_parties = 7\n")
    for words, parties in ((), 3), (("--continues", "site-north"), 7):
        (here / "anew").mkdir()
        (here / "anew" / "site.toml").touch()
        assert f"at least {parties} sites" in invoke(*CONTINUING, *words).stdout
        assert SiteFolder.at(here / "anew").policy().minimum_parties == parties
        shutil.rmtree(here / "anew")


class CutOff(BaseException):
    """As a kill at that point."""


@pytest.fixture
def cut_off(monkeypatch):
    """Whether a call was cut off at its write with this number; none after that is made."""

    def cut(call, number):
        write, made = continuing.write, count()

        def counted(path, content, *, private=False):
            if next(made) >= number:
                raise CutOff
            write(path, content, private=private)

        with monkeypatch.context() as patched:
            for module in (continuing, site_keys, credentials, continuing, site_keys):
                patched.setattr(module, "write", counted)
            try:
                call()
            except CutOff:
                return True
        return False

    return cut


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_first_join_that_is_cut_off_at_any_write_can_be_given_again(here, cut_off, is_continued):
    """What it leaves is a folder that was never used, or one with its policy and its shared key."""
    old = SiteFolder.at(here / "site-north")
    old.take(SharedKey(bytes(16)))
    asked(here, old.answering())
    new, number, kit = here / "anew", 0, Kit.read(here / "north.zip", here / "unpacked")

    def joined():
        wanted = SiteFolder.wanted(new, kit, here / "rows.npy", {})
        Joining(wanted, kit, *((None, old.path) if is_continued else (SharedKey(bytes(16)), None))).agreed()

    while cut_off(joined, number):
        if site_keys.is_used(new):
            assert (new / "site.toml").exists()
            assert (new / "shared.key").exists()
        joined()
        assert SiteFolder.at(new).shared_key() == SharedKey(bytes(16))
        shutil.rmtree(new)
        number += 1
    assert number > 7


def test_a_folder_that_has_had_a_shared_key_sends_no_hash_without_one(here, told):
    site = SiteFolder.at(here / "site-north")
    told(*AGAIN, "--shared-key", "sites.key")
    (site.path / "shared.key").unlink()
    before = content_of(site.path)
    said = told(*AGAIN, code=1)
    assert said["type"] == "FileError"
    assert "--shared-key" in said["error"]
    assert content_of(site.path) == before
    with pytest.raises(FileError, match="has had a shared key"):
        site.opened()
    assert asked(here, site.answering()) == Refusal("storage")
    (site.path / "joined.toml").unlink()
    assert "has had a shared key" in told(*WITH_DATA, code=1)["error"]
    told(*WITH_DATA, "--shared-key", "sites.key")
    assert asked(here, SiteFolder.at(site.path).answering()) == Refusal("not-started")


def test_a_key_that_was_there_before_it_was_written_down_is_missed_as_well(here, told):
    site = SiteFolder.at(here / "site-north")
    site.take(SharedKey(bytes(16)))
    (site.path / "state" / "had.toml").unlink()
    told(*AGAIN)
    (site.path / "shared.key").unlink()
    assert "has had a shared key" in told(*AGAIN, code=1)["error"]


def test_a_new_folder_goes_on_with_the_shared_key(here, invoke, told):
    old, new = SiteFolder.at(here / "site-north"), here / "anew"
    old.take(SharedKey(bytes(16)))
    said = invoke(*CONTINUING, "--continues", "site-north")
    assert "with the key that sites share" in said.stdout
    assert "shares no key" not in said.stderr
    assert SiteFolder.at(new).shared_key() == SharedKey(bytes(16))
    shutil.rmtree(new)
    (old.path / "shared.key").unlink()
    assert "has had a shared key" in told(*CONTINUING, "--continues", "site-north", code=1)["error"]
    assert not new.exists()
    (here / "other.key").write_text(SharedKey(bytes([1] * 16)).text)
    told(*CONTINUING, "--continues", "site-north", "--shared-key", "other.key")
    assert SiteFolder.at(new).shared_key() == SharedKey(bytes([1] * 16))
    old.take(SharedKey(bytes(16)))
    told(*CONTINUING, "--continues", "site-north")
    assert SiteFolder.at(new).shared_key() == SharedKey(bytes([1] * 16))


def test_a_new_folder_that_has_lost_its_own_shared_key_does_not_get_the_earlier_one(here, told):
    """Which may be the one that was stolen."""
    old, new = SiteFolder.at(here / "site-north"), here / "anew"
    old.take(SharedKey(bytes(16)))
    (here / "other.key").write_text(SharedKey(bytes([1] * 16)).text)
    words = (*CONTINUING, "--continues", "site-north")
    told(*words, "--shared-key", "other.key")
    (new / "shared.key").unlink()
    before = content_of(new)
    assert "--shared-key" in told(*words, code=1)["error"]
    assert content_of(new) == before
    continuing.continue_from(old.path, SiteFolder.at(new))
    assert not (new / "shared.key").exists()
    told(*words, "--shared-key", "other.key")
    assert SiteFolder.at(new).shared_key() == SharedKey(bytes([1] * 16))


def test_a_folder_that_goes_on_misses_the_shared_key_wherever_its_first_join_was_cut_off(here, cut_off):
    """The earlier one has lost it, and the new one was not yet given another: no hash leaves without."""
    old, new, number = SiteFolder.at(here / "site-north"), here / "anew", 0
    old.take(SharedKey(bytes(16)))
    (old.path / "shared.key").unlink()
    SiteLedger(old.path / "state" / "ledger.jsonl").make_up(1, None, "before")
    kit = Kit.read(here / "north.zip", here / "unpacked")
    wanted = SiteFolder.wanted(new, kit, here / "rows.npy", {})
    missed = 0
    while cut_off(Joining(wanted, kit, SharedKey(bytes([1] * 16)), old.path).agreed, number):
        if (new / "state" / "ledger.jsonl").exists() and not (new / "shared.key").exists():
            with pytest.raises(FileError, match="has had a shared key"):
                Joining(wanted, kit, None, None).shared_key()
            missed += 1
        shutil.rmtree(new)
        number += 1
    assert missed > 3


@pytest.fixture
def newer(here):
    """A roster with one site more, in newer.toml; the kit has the one that is pinned."""
    server = ServerFolder.at(here / "liver")
    server.invite("north", here / "north.zip")
    pinned = server.roster()
    changed = replace(pinned, keys={**pinned.keys, "west": bytes(range(32))})
    (here / "newer.toml").write_bytes(changed.written())
    return changed


def test_the_roster_of_a_kit_does_not_take_the_place_of_the_one_that_is_pinned(here, told, newer):
    told(*AGAIN, "--roster", "newer.toml", "--fingerprint", newer.fingerprint)
    assert told(*AGAIN)["fingerprint"] == newer.fingerprint
    result = runner().invoke(app, [*JOIN, "--no-start"], input="y\n")
    assert result.exit_code == 0
    assert "which stays" in result.stderr
    assert "TWO OF THEM" not in result.output
    assert SiteFolder.at(here / "site-north").roster() == newer
    assert told(*AGAIN, "--fingerprint", newer.fingerprint)["fingerprint"] == newer.fingerprint
    other = "0" + newer.fingerprint[1:] if newer.fingerprint[0] != "0" else "1" + newer.fingerprint[1:]
    assert "has pinned has the fingerprint" in told(*AGAIN, "--fingerprint", other, code=1)["error"]
    assert SiteFolder.at(here / "site-north").roster() == newer


def test_the_roster_of_a_kit_is_taken_where_its_fingerprint_was_compared(here, told, newer):
    kit = Kit.read(here / "north.zip", here / "unpacked")
    replace(kit, roster=newer).save(here / "newer.zip")
    words = ("federation", "join", "newer.zip", "--yes", "--no-start")
    pinned = SiteFolder.at(here / "site-north").roster()
    assert told(*words, "--fingerprint", pinned.fingerprint)["fingerprint"] == pinned.fingerprint
    assert told(*words, "--fingerprint", newer.fingerprint.upper())["fingerprint"] == newer.fingerprint
    assert SiteFolder.at(here / "site-north").roster() == newer


def test_who_has_lost_the_pinned_roster_takes_none_unseen(here, told, newer):
    (here / "site-north" / "roster.toml").unlink()
    for words in ((), ("--roster", "newer.toml")):
        assert "is gone" in told(*AGAIN, *words, code=1)["error"]
        assert SiteFolder.at(here / "site-north").roster() is None
    told(*AGAIN, "--fingerprint", ServerFolder.at(here / "liver").roster().fingerprint)


def test_a_roster_that_is_given_while_the_node_runs_is_taken_and_used_by_it(here, invoke, newer):
    site = SiteFolder.at(here / "site-north")
    party = site.answering()
    told = Experiment("exact", 2, 1, masked=True, mask_bound=1e6).told()
    hello = Request("north", Nonce("r"), note={"parties": sorted(newer.keys), "experiment": told})
    words = ("federation", "join", "north.zip", "--yes", "--drop", "drop")
    with held(site.lock, ""):
        assert asked(here, party, hello) == Refusal("roster")
        said = invoke(*words, "--roster", "newer.toml", "--fingerprint", newer.fingerprint)
        assert "The roster was taken. The node of 'north' runs already" in said.stderr
        assert not isinstance(asked(here, party, hello), Refusal)
        assert "runs already" in invoke(*words, code=1).stderr


def test_columns_that_are_one_to_other_sites_are_refused_before_anything_is_made(here, told):
    header = ("a", "\u00e9", "b", "e\u0301")
    (here / "twins.csv").write_text("\n".join([",".join(header), *["1,2,3,4"] * 5]), encoding="utf-8")
    words = (*AGAIN, "--data", "twins.csv", "--folder", "anew")
    said = told(*words, code=1)
    assert said["type"] == "DataError"
    assert "columns 2 and 4" in said["error"]
    assert not (here / "anew").exists()
    (here / "anew").mkdir()
    (here / "anew" / "site.toml").write_text('columns = ["a", "b"]\n')
    told(*words)


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_that_is_not_whole_is_none(here, told, length):
    site = SiteFolder.at(here / "site-north")
    (site.path / "secret").write_bytes(b"x" * length)
    before = content_of(site.path)
    said = told(*AGAIN, code=1)
    assert said["type"] == "FormatError"
    assert f"has {length} bytes, and a secret has 32" in said["error"]
    assert content_of(site.path) == before
    with pytest.raises(FormatError, match="a secret has 32"):
        site.answering()


def test_a_kit_that_was_damaged_on_its_way_is_told_so_wherever_that_was(here, tmp_path_factory):
    scratch, kit = tmp_path_factory.mktemp("scratch"), here / "damaged.zip"
    with zipfile.ZipFile(here / "north.zip") as archive, zipfile.ZipFile(kit, "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in archive.namelist():
            deflated.writestr(name, archive.read(name))
    whole = kit.read_bytes()
    refused = 0
    for at in range(0, len(whole), 13):
        kit.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            Kit.read(kit, scratch)
        except PartsongError:
            refused += 1
    assert refused > len(whole) // 26


@pytest.mark.skipif(os.name != "posix", reason="names of files that are bytes")
def test_a_path_of_data_that_is_not_utf_8_is_told_so(here, told):
    try:
        shutil.copy(here / "rows.npy", os.fsencode(here) + b"/r\xff.npy")
    except OSError:
        pytest.skip("this disk has no such names")
    said = told(*AGAIN, "--data", os.fsdecode(b"r\xff.npy"), "--folder", "anew", code=1)
    assert said["type"] == "ParameterError"
    assert "not written in UTF-8" in said["error"]
    assert not (here / "anew").exists()
