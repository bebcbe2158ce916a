"""`partsong federation join` and `status` at a site."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import zipfile
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.cli.main import app
from partsong.errors import FileError, FormatError, PartsongError
from partsong.federation.audit_log import AuditLog
from partsong.federation.consistency import require_consistent
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import SiteLedger
from partsong.federation.locks import held
from partsong.federation.policy import is_used
from partsong.federation.setup import site_folder
from partsong.federation.setup.credentials import Card, Kit, SharedKey
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request, RequestRefused
from partsong.io.write import atomic_write
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.spending import DEFAULT_DELTA
from tests.cli.conftest import runner
from tests.federation.helpers import charge, depart

SITES = ("north", "south")
JOIN = ["federation", "join", "north.zip"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two sites that have joined, been admitted and pinned the roster, as far as that goes without a server."""
    folder = tmp_path_factory.mktemp("made")
    for name, rows in (("rows", 20), ("few", 3)):
        np.save(folder / f"{name}.npy", np.random.default_rng(rows).random((rows, 6)))
    (folder / "sites.key").write_text(SharedKey(bytes(16)).text)
    server = ServerFolder.made(folder / "liver", "liver", "nmf.example.org:8443")
    for name in SITES:
        kit = Kit.read(server.invite(name, folder / f"{name}.zip"))
        SiteFolder.joining(folder / f"site-{name}", kit, folder / "rows.npy", {})
        server.admit(Card.read(folder / f"site-{name}" / "card.toml"))
    for name in SITES:
        SiteFolder.at(folder / f"site-{name}").pin(server.roster())
    return folder


@pytest.fixture
def quick_disk(monkeypatch):
    """Whether writes are in order does not depend on it."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    """A copy of it, in which commands are given."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def charge_rounds(folder, count):
    """Releases of a run that this site has taken part in; its log has them too."""
    state = folder / "state"
    for number in range(count):
        charge(SiteLedger(state / "ledger.jsonl"), place=("before", number, 0))
        depart(AuditLog(state / "audit.jsonl"), ("before", number, 0))


def with_key(folder):
    """The site in a folder, with a shared key from now on."""
    site = SiteFolder.at(folder)
    return site.make(site.authority(), SharedKey(bytes(16)))


def content_of(folder):
    """All that is in a folder, and whom it is for."""
    found = {path: path.read_bytes() if path.is_file() else b"" for path in [folder, *folder.rglob("*")]}
    return {path: (data, path.stat().st_mode, path.stat().st_mtime_ns) for path, data in found.items()}


def asked(here, place, request=None):
    """What a site answers, signed, to a request that releases nothing."""
    request = (request or Request("north", Nonce("r", kind=Kind.FINISH))).to_bytes()
    transport = ServerFolder.at(here / "liver").signed(InProcess({"north": place}))
    return Reply.from_bytes(transport.ask({"north": request}, 1.0)["north"]).answer


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("answer", ["n\n", ""])
def test_who_does_not_say_yes_has_changed_nothing(here, answer):
    folder = here / "site-north"
    charge_rounds(folder, 1)
    folder.chmod(0o755)
    before = content_of(folder)
    result = runner().invoke(app, [*JOIN, "--data", "few.npy", "--shared-key", "sites.key"], input=answer)
    assert result.exit_code == 1
    assert "3 rows" in result.stdout
    assert content_of(folder) == before
    assert "removed" not in result.stderr
    assert not answer or f"Not joined. The folder {folder} is unchanged." in result.stderr


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("words", [("--data", "few.npy"), ("--transpose",), ("--shared-key", "sites.key")])
def test_while_a_node_runs_its_folder_is_not_given_other_data_or_keys(here, told, words):
    folder = here / "site-north"
    with held(folder / "node.lock", ""):
        before = content_of(folder)
        said = told("federation", "join", "north.zip", *words, "--yes", "--no-start", code=1)
        assert content_of(folder) == before
        assert "would change its data, their reading options or a key. Nothing was changed." in said["error"]
        told("federation", "join", "north.zip", "--yes", "--no-start")
        assert content_of(folder)[folder / "joined.toml"] == before[folder / "joined.toml"]
    told("federation", "join", "north.zip", *words, "--yes", "--no-start")
    assert content_of(folder) != before


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("file", ["joined.toml", "shared.key", "secret"])
def test_a_node_answers_with_what_it_was_started_with_or_not_at_all(here, file):
    site = with_key(here / "site-north")
    party, kept = site.answering(), (site.path / file).read_bytes()
    assert asked(here, party) == Refusal("not-started")
    changed = {"joined.toml": kept.replace(b"rows.npy", b"few.npy"), "secret": bytes(32)}
    (site.path / file).write_bytes(changed.get(file, SharedKey(bytes([1] * 16)).text.encode()))
    assert asked(here, party) == Refusal("settings")
    assert "after this node started" in (site.path / "state" / "site.log").read_text()
    (site.path / file).write_bytes(kept)
    assert asked(here, party) == Refusal("not-started")


NEW = ("federation", "join", "north.zip", "--data", "rows.npy", "--folder", "anew", "--yes", "--no-start")
MOVED = ("site.toml", "shared.key", "state/ledger.jsonl", "state/audit.jsonl", "state/refusals")


AGAIN = ("federation", "join", "north.zip", "--yes", "--no-start")
WITH_DATA = (*AGAIN, "--data", "rows.npy")


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("damage", ["empty", "cut", "other"])
def test_the_key_of_a_node_is_whole_and_the_one_of_the_card(here, told, damage):
    folder = here / "site-north"
    kept = (folder / "node").read_bytes()
    other = (here / "site-south" / "node").read_bytes()
    (folder / "node").write_bytes({"empty": b"", "cut": kept[:60], "other": other}[damage])
    before = content_of(folder)
    said = told(*AGAIN, code=1)
    assert said["type"] == "FormatError"
    assert str(folder / "node") in said["error"]
    assert "Restore your backup" in said["error"]
    assert content_of(folder) == before


@pytest.mark.usefixtures("quick_disk")
def test_an_authority_that_is_gone_is_not_replaced_by_that_of_a_kit(here, told):
    place = here / "site-north" / "ca.crt"
    kept = place.read_bytes()
    place.unlink()
    said = told(*AGAIN, code=1)
    assert said["type"] == "FileError"
    assert f"{place} cannot be read" in said["error"]
    place.write_bytes(b"")
    assert f"{place} is damaged" in told(*AGAIN, code=1)["error"]
    place.write_bytes(kept)
    told(*AGAIN)


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("content", [b"", b" \r\n\t\n", b"\xef\xbb\xbf\n"])
def test_an_emptied_policy_is_none_and_a_comment_is_one(here, told, content):
    site = SiteFolder.at(here / "site-north")
    party = site.answering()
    (site.path / "site.toml").write_bytes(content)
    before = content_of(site.path)
    assert f"{site.path / 'site.toml'} is empty" in told(*AGAIN, code=1)["error"]
    assert content_of(site.path) == before
    assert asked(here, party) == Refusal("storage")
    (site.path / "site.toml").write_bytes(content + b"# all\n")
    told(*AGAIN)
    assert asked(here, party) == Refusal("not-started")


@pytest.mark.usefixtures("quick_disk")
def test_a_policy_that_changes_while_data_are_read_is_obeyed(here, monkeypatch):
    site, read = SiteFolder.at(here / "site-north"), site_folder.table_at

    def slowly(data, reading):
        table = read(data, reading)
        (site.path / "site.toml").write_text("minimum_parties = 7\n")
        return table

    monkeypatch.setattr(site_folder, "table_at", slowly)
    assert site.opened().policy.minimum_parties == 7


class CutOff(BaseException):
    """As a kill at that point."""


@pytest.fixture
def cut_off(monkeypatch):
    """Whether a call was cut off at its write with this number; none after that is made."""

    def cut(call, number):
        made = count()

        def counted(path, *, private=False):
            if next(made) >= number:
                raise CutOff
            return atomic_write(path, private=private)

        with monkeypatch.context() as patched:
            patched.setattr("partsong.io.write.atomic_write", counted)
            try:
                call()
            except CutOff:
                return True
        return False

    return cut


@pytest.mark.usefixtures("quick_disk")
def test_a_new_folder_is_not_made_before_a_yes(here):
    result = runner().invoke(app, [*JOIN, "--data", "rows.npy", "--folder", "anew"], input="n\n")
    assert f"The folder {here / 'anew'} was not created." in result.stderr
    assert not (here / "anew").exists()


@pytest.mark.usefixtures("quick_disk")
def test_a_first_join_that_is_cut_off_at_any_write_can_be_given_again(here, cut_off):
    """What it leaves is a folder that was never used, or one with its policy and its shared key."""
    new, number, kit = here / "anew", 0, Kit.read(here / "north.zip")

    def joined():
        SiteFolder.joining(new, kit, here / "rows.npy", {}, SharedKey(bytes(16)))

    while cut_off(joined, number):
        if is_used(new):
            assert (new / "site.toml").exists()
            assert (new / "shared.key").exists()
        joined()
        assert SiteFolder.at(new).shared_key() == SharedKey(bytes(16))
        shutil.rmtree(new)
        number += 1
    assert number > 6


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("left", ["joined.toml", "state/ledger.jsonl", "state/audit.jsonl"])
def test_a_used_folder_that_has_lost_its_policy_gets_no_other(here, told, left):
    folder = here / "site-north"
    charge_rounds(folder, 1)
    asked(here, SiteFolder.at(folder).answering())
    names = {"site.toml", "joined.toml", "card.toml", "roster.toml", "state/ledger.jsonl", "state/audit.jsonl"}
    for name in sorted({*names, "state/site.log", "state/lock", "state/refusals"} - {left}):
        (folder / name).unlink(missing_ok=True)
    before = content_of(folder)
    said = told(*WITH_DATA, code=1)
    assert said["type"] == "FileError"
    assert str(folder / "site.toml") in said["error"]
    assert "Restore your backup" in said["error"]
    assert content_of(folder) == before


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("name", ["secret", "node"])
def test_a_site_that_has_lost_a_key_of_its_own_is_not_given_another(here, invoke, name):
    folder = here / "site-north"
    (folder / name).unlink()
    before = content_of(folder)
    said = invoke(*AGAIN, code=1)
    assert str(folder / name) in said.stderr
    assert "join there, and send the coordinator the new card" in " ".join(said.stderr.split())
    assert "What leaves" not in said.stdout
    assert content_of(folder) == before


@pytest.mark.usefixtures("quick_disk")
def test_a_key_that_is_lost_while_people_look_at_what_leaves_is_missed_too(here):
    kit = Kit.read(here / "north.zip")
    site = SiteFolder.wanted(here / "site-north", kit, here / "rows.npy", {})
    (site.path / "secret").unlink()
    with pytest.raises(FileError, match="secret cannot be read"):
        site.make(kit.authority)


@pytest.mark.usefixtures("quick_disk")
def test_a_site_moves_by_copying_its_folder(here, told):
    """Policy, budget, ledger, keys and roster come along; other parties see the site that they know."""
    old, new = here / "site-north", here / "anew"
    with_key(old)
    (old / "site.toml").write_text((old / "site.toml").read_text() + "[privacy]\nepsilon = 3\n")
    charge_rounds(old, 2)
    shutil.copytree(old, new)
    shutil.rmtree(old)
    told(*NEW)
    site = SiteFolder.at(new)
    assert (site.policy().privacy.epsilon, SiteLedger(new / "state" / "ledger.jsonl").serial) == (3.0, 2)
    assert site.shared_key() == SharedKey(bytes(16))
    assert site.roster().keys["north"] == bytes.fromhex(site.card().signing_key)


@pytest.mark.usefixtures("quick_disk")
def test_a_site_that_has_lost_its_keys_goes_on_with_its_ledger_in_a_new_folder(here, told):
    """It makes new keys, for which the coordinator needs the new card; releases and policy still count."""
    old, new = here / "site-north", here / "anew"
    with_key(old)
    (old / "site.toml").write_text("minimum_parties = 5\n")
    charge_rounds(old, 3)
    for _ in range(3):
        asked(here, SiteFolder.at(old).answering())
    unlisted = json.loads((old / "state" / "refusals").read_text())["unlisted"]
    assert unlisted == {"not-started": 1}
    (old / "secret").unlink()
    (new / "state").mkdir(parents=True)
    for name in MOVED:
        shutil.copy(old / name, new / name)
    told(*NEW)
    site, ledger = SiteFolder.at(new), SiteLedger(new / "state" / "ledger.jsonl")
    assert (site.policy().minimum_parties, ledger.serial) == (5, 3)
    assert (site.shared_key(), site.roster()) == (SharedKey(bytes(16)), None)
    assert site.card().signing_key != Card.read(old / "card.toml").signing_key
    site.answering()(b"of nobody")
    last = json.loads((new / "state" / "audit.jsonl").read_text().splitlines()[-1])
    assert (last["refusal"], last["unlisted"]) == ("unsigned", unlisted)


@pytest.mark.usefixtures("quick_disk")
def test_a_copied_folder_that_is_used_beside_its_original_is_refused_by_itself(here, told):
    """The server has seen what the original has released since, and the copy's ledger does not know of it."""
    old, new = here / "site-north", here / "anew"
    shutil.copytree(old, new)
    charge_rounds(old, 1)
    request = Request("north", Nonce("r", kind=Kind.FINISH), seen=SiteLedger(old / "state" / "ledger.jsonl").serial)
    assert asked(here, SiteFolder.at(new).answering(), request) == Refusal("behind")
    assert asked(here, SiteFolder.at(old).answering(), request) != Refusal("behind")


@pytest.mark.usefixtures("quick_disk")
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
    told(*WITH_DATA, "--shared-key", "sites.key")
    assert asked(here, SiteFolder.at(site.path).answering()) == Refusal("not-started")


@pytest.fixture
def newer(here):
    """A roster with one site more, in newer.toml; the kit has the one that is pinned."""
    server = ServerFolder.at(here / "liver")
    server.invite("north", here / "north.zip")
    pinned = server.roster()
    changed = replace(pinned, keys={**pinned.keys, "west": bytes(range(32))})
    (here / "newer.toml").write_bytes(changed.written())
    return changed


@pytest.mark.usefixtures("quick_disk")
def test_the_roster_of_a_kit_does_not_take_the_place_of_the_one_that_is_pinned(here, told, newer):
    told(*AGAIN, "--roster", "newer.toml", "--fingerprint", newer.fingerprint)
    assert told(*AGAIN)["fingerprint"] == newer.fingerprint
    result = runner().invoke(app, [*JOIN, "--no-start"], input="y\n")
    assert result.exit_code == 0
    assert "pinned roster stays" in result.stderr
    assert "TWO OF THEM" not in result.output
    assert SiteFolder.at(here / "site-north").roster() == newer
    assert told(*AGAIN, "--fingerprint", newer.fingerprint)["fingerprint"] == newer.fingerprint
    other = "0" + newer.fingerprint[1:] if newer.fingerprint[0] != "0" else "1" + newer.fingerprint[1:]
    assert "The fingerprint of this roster is" in told(*AGAIN, "--fingerprint", other, code=1)["error"]
    assert SiteFolder.at(here / "site-north").roster() == newer


@pytest.mark.usefixtures("quick_disk")
def test_the_roster_of_a_kit_is_taken_where_its_fingerprint_was_compared(here, told, newer):
    kit = Kit.read(here / "north.zip")
    replace(kit, roster=newer).save(here / "newer.zip")
    words = ("federation", "join", "newer.zip", "--yes", "--no-start")
    pinned = SiteFolder.at(here / "site-north").roster()
    assert told(*words, "--fingerprint", pinned.fingerprint)["fingerprint"] == pinned.fingerprint
    assert told(*words, "--fingerprint", newer.fingerprint.upper())["fingerprint"] == newer.fingerprint
    assert SiteFolder.at(here / "site-north").roster() == newer


@pytest.mark.usefixtures("quick_disk")
def test_who_has_lost_the_pinned_roster_takes_none_unseen(here, told, newer):
    (here / "site-north" / "roster.toml").unlink()
    for words in ((), ("--roster", "newer.toml")):
        assert "lost its pinned roster" in told(*AGAIN, *words, code=1)["error"]
        assert SiteFolder.at(here / "site-north").roster() is None
    told(*AGAIN, "--fingerprint", ServerFolder.at(here / "liver").roster().fingerprint)


@pytest.mark.usefixtures("quick_disk")
def test_a_roster_that_is_given_while_the_node_runs_is_taken_and_used_by_it(here, invoke, newer):
    site = SiteFolder.at(here / "site-north")
    party = site.answering()
    told = Experiment("exact", 2, 1, secure_aggregation=True, mask_bound=1e6).to_dict()
    hello = Request("north", Nonce("r"), note={"parties": sorted(newer.keys), "experiment": told})
    words = ("federation", "join", "north.zip", "--yes", "--exchange-folder", "drop")
    with held(site.lock, ""):
        assert asked(here, party, hello) == Refusal("roster")
        said = invoke(*words, "--roster", "newer.toml", "--fingerprint", newer.fingerprint)
        assert "The roster was saved. The node of 'north' is running" in said.stderr
        assert not isinstance(asked(here, party, hello), Refusal)
        assert "is already running" in invoke(*words, code=1).stderr


@pytest.mark.usefixtures("quick_disk")
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


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_secret_that_is_not_whole_is_none(here, told, length):
    site = SiteFolder.at(here / "site-north")
    (site.path / "secret").write_bytes(b"x" * length)
    before = content_of(site.path)
    said = told(*AGAIN, code=1)
    assert said["type"] == "FormatError"
    assert f"has {length} bytes instead of 32" in said["error"]
    assert content_of(site.path) == before
    with pytest.raises(FormatError, match="instead of 32"):
        site.answering()


@pytest.mark.usefixtures("quick_disk")
def test_a_kit_that_was_damaged_on_its_way_is_told_so_wherever_that_was(here):
    kit = here / "damaged.zip"
    with zipfile.ZipFile(here / "north.zip") as archive, zipfile.ZipFile(kit, "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in archive.namelist():
            deflated.writestr(name, archive.read(name))
    whole = kit.read_bytes()
    refused = 0
    for at in range(0, len(whole), 13):
        kit.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            Kit.read(kit)
        except PartsongError:
            refused += 1
    assert refused > len(whole) // 26


@pytest.mark.usefixtures("quick_disk")
@pytest.mark.skipif(os.name != "posix", reason="names of files that are bytes")
def test_a_path_of_data_that_is_not_utf_8_is_told_so(here, told):
    try:
        shutil.copy(here / "rows.npy", os.fsencode(here) + b"/r\xff.npy")
    except OSError:
        pytest.skip("this disk has no such names")
    said = told(*AGAIN, "--data", os.fsdecode(b"r\xff.npy"), "--folder", "anew", code=1)
    assert said["type"] == "ParameterError"
    assert "not valid UTF-8" in said["error"]
    assert not (here / "anew").exists()


STATUS = ("federation", "status", "--folder", "site-north")


@pytest.fixture
def books(tmp_path):
    """Ledger and audit log of a site that has joined, with a release that is in both."""
    np.save(tmp_path / "rows.npy", np.ones((5, 3)))
    server = ServerFolder.made(tmp_path / "liver", "liver", "nmf.example.org:8443")
    kit = Kit.read(server.invite("north", tmp_path / "north"))
    state = SiteFolder.joining(tmp_path / "site-north", kit, tmp_path / "rows.npy", {}).path / "state"
    ledger, audit = SiteLedger(state / "ledger.jsonl"), AuditLog(state / "audit.jsonl")
    charge(ledger, place=("first", 0, 0))
    depart(audit, ("first", 0, 0))
    return ledger, audit


@pytest.mark.parametrize("lost", ["the ledger", "the log"])
def test_where_a_site_refuses_everything_status_says_why_and_fails(books, told, invoke, lost):
    assert told(*STATUS)["refuses"] is None
    ledger, audit = books
    (ledger if lost == "the ledger" else audit).path.unlink()
    with pytest.raises(RequestRefused) as caught:
        require_consistent(ledger, audit)
    assert told(*STATUS, code=1)["refuses"] == str(caught.value)
    said = invoke(*STATUS, code=1).stdout
    assert "REFUSES EVERY REQUEST" in said
    assert "partsong audit opening" in said


def test_what_a_site_does_while_its_files_are_read_is_no_reason_to_say_that_it_refuses(books, told, monkeypatch):
    ledger, audit = books
    read, now = AuditLog.history, ("first", 1, 0)

    def after_an_answer(self):
        if ledger.serial == 1:
            charge(ledger, place=now)
            depart(audit, now)
        return read(self)

    monkeypatch.setattr(AuditLog, "history", after_an_answer)
    assert told(*STATUS)["refuses"] is None
    assert ledger.serial == 2


def test_a_site_that_has_released_nothing_with_noise_has_spent_no_epsilon(told, invoke, tmp_path):
    np.save(tmp_path / "rows.npy", np.ones((5, 3)))
    server = ServerFolder.made(tmp_path / "liver", "liver", "nmf.example.org:8443")
    kit = Kit.read(server.invite("north", tmp_path / "north"))
    SiteFolder.joining(tmp_path / "site-north", kit, tmp_path / "rows.npy", {})
    assert told(*STATUS)["epsilon_spent"] is None
    assert "Released: 0 times; ε spent: 0 (no budget in site.toml)" in invoke(*STATUS).stdout


def test_a_ledger_that_was_edited_is_told_with_what_else_there_is(books, told, invoke):
    ledger, _ = books
    ledger.path.write_text(ledger.path.read_text().replace("first", "other"))
    said = told(*STATUS, code=1)
    assert (said["releases"], said["audit"]["lines"]) == (None, 1)
    assert str(ledger.path) in said["refuses"]
    assert "Released: unknown" in invoke(*STATUS, code=1).stdout


def test_of_promises_that_do_not_compose_no_epsilon_is_told(books, told, invoke):
    ledger, _ = books
    party, row = Release("gaussian", 2.0, "party", "replace"), Release("gaussian", 3.0, "row", "add-or-remove")
    charge(ledger, party, count=3)
    spent = Ledger().after(party, 3).epsilon(DEFAULT_DELTA)
    assert told(*STATUS)["epsilon_spent"] == pytest.approx(spent)
    assert f"ε spent by the other releases: {spent:.4g} (no budget" in invoke(*STATUS).stdout
    charge(ledger, row, count=3)
    assert told(*STATUS)["epsilon_spent"] is None
    assert "releases with different units or relations do not compose" in invoke(*STATUS).stdout


@pytest.mark.parametrize(
    ("name", "content", "what", "way_out"),
    [
        ("shared.key", None, "shared_key", "--shared-key FILE"),
        ("shared.key", b"\xff\xfe", "shared_key", "Compare it"),
        ("site.toml", None, "policy", "Restore your backup"),
        ("site.toml", b"[privacy]\nepsilon = -1\n", "policy", "epsilon"),
        ("secret", None, "secret", "Restore your backup"),
        ("roster.toml", None, "roster", "--fingerprint FINGERPRINT"),
        ("roster.toml", b"", "roster", "remove it, ask two other sites"),
    ],
)
def test_what_a_site_has_lost_is_told_beside_all_that_there_is(
    books, told, invoke, tmp_path, name, content, what, way_out
):
    site, server = SiteFolder.at(tmp_path / "site-north"), ServerFolder.at(tmp_path / "liver")
    (site.path / "state" / "runs" / "first").mkdir(parents=True)
    site = site.make(site.authority(), SharedKey.made())
    server.admit(site.card())
    site.pin(server.roster(), server.roster().fingerprint)
    whole = told(*STATUS)
    assert whole["problems"] == {}
    if content is None:
        (site.path / name).unlink()
    else:
        (site.path / name).write_bytes(content)
    said = told(*STATUS, code=1)
    assert list(said["problems"]) == [what]
    assert str(site.path / name) in said["problems"][what]
    assert way_out in said["problems"][what]
    rest = (
        "releases",
        "releases_without_noise",
        "directions",
        "epsilon_spent",
        "audit",
        "refuses",
        "runs",
    )
    assert {key: said[key] for key in rest} == {key: whole[key] for key in rest}
    text = invoke(*STATUS, code=1).stdout
    assert f"PROBLEM: {said['problems'][what]}" in text
    assert "Released: 1 time" in text
    assert "none yet" not in text
    assert "Shared key: NONE" not in text
    assert ("budget unknown" in text, "no budget in site.toml" in text) == (what == "policy", what != "policy")


def test_a_run_that_was_broken_off_is_told_with_the_way_on(books, invoke, tmp_path):
    place = ServerFolder.at(tmp_path / "liver").run("first")
    place.folder.mkdir()
    place.experiment.write_text('method = "exact"\nrank = 2\nrounds = 1\n')
    words = ("federation", "status", "--folder", "liver")
    assert "--resume" not in invoke(*words).stdout
    place.settings.write_text('{"timeout": 600.0, "names": []}')
    assert "--resume" in invoke(*words).stdout, "without a folder for files it was by Flower"
    place.settings.unlink()
    place.number.write_text("7")
    way_on = shlex.split(invoke(*words).stdout.splitlines()[-1].rpartition(": partsong ")[2])
    said = invoke(*way_on, "--engine", "files", "--exchange-folder", "x", code=1).stderr
    assert "No site is admitted" in said
    place.result.write_text('{"status": "done"}')
    assert "--resume" not in invoke(*words).stdout
