"""`partsong federation` at the server: certificates, kits, rosters, addresses, and what goes wrong with them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import stat
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cryptography")

from cryptography import x509

from partsong.cli.main import app
from partsong.errors import FeatureError, FileError, FormatError, ParameterError, SiteRefused
from partsong.federation.commands import server as federation_server
from partsong.federation.commands.demo import free_port
from partsong.federation.commands.server import Engine
from partsong.federation.experiment import Experiment
from partsong.federation.flower import control, server_process, site_process
from partsong.federation.flower.server_process import Gate
from partsong.federation.locks import held
from partsong.federation.server.launch import run_experiment
from partsong.federation.setup import credentials, server_folder
from partsong.federation.setup.credentials import Card, Kit, Listed, require_address
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.transports import files
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request
from partsong.io.write import atomic_write, write_bytes
from tests.cli.conftest import runner


@pytest.fixture
def made(told, tmp_path):
    """A federation, and the rows of a site."""
    np.save(tmp_path / "rows.npy", np.random.default_rng(0).random((20, 6)))
    told("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443")
    return tmp_path / "liver"


@pytest.fixture
def joined(made, told, invoke, tmp_path):
    """Three sites that have joined and were admitted, as far as that goes without a server."""
    for site in ("east", "north", "south"):
        told("federation", "invite", site, "--folder", made, "-o", f"{site}.zip")
        told("federation", "join", f"{site}.zip", "--data", "rows.npy", "--yes")
        ServerFolder.at(made).admit(Card.read(tmp_path / f"site-{site}" / "card.toml"))
    return ServerFolder.at(made)


def test_a_certificate_is_for_the_host_and_by_the_authority(made):
    authority = x509.load_pem_x509_certificate((made / "ca.crt").read_bytes())
    server = x509.load_pem_x509_certificate((made / "server.crt").read_bytes())
    server.verify_directly_issued_by(authority)
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "nmf.example.org" in names.get_values_for_type(x509.DNSName)
    assert not server.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert server.not_valid_after_utc < datetime.now(UTC) + timedelta(days=398)


@pytest.mark.skipif(os.name != "posix", reason="permissions of files")
def test_what_is_secret_is_for_its_owner_alone(joined, tmp_path):
    secret = [joined.path / name for name in ("ca.key", "server.key", "control.key", "coordinator.key")]
    secret += [tmp_path / "site-east" / name for name in ("node", "secret")]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secret)
    assert stat.S_IMODE((tmp_path / "site-east").stat().st_mode) == 0o700


def test_a_kit_holds_no_secret_and_names_what_to_do(made, told):
    said = told("federation", "invite", "north", "--folder", made)
    assert said["roster"] is None
    with zipfile.ZipFile(said["kit"]) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    assert sorted(held) == ["README.txt", "ca.crt", "kit.toml"]
    assert held["ca.crt"] == (made / "ca.crt").read_bytes()
    assert b"partsong federation join" in held["README.txt"]
    text = b"".join(held.values())
    for name in ("ca.key", "server.key", "control.key", "coordinator.key"):
        assert (made / name).read_bytes() not in text
    assert b"PRIVATE" not in text


def test_a_second_federation_does_not_replace_the_first(made, told):
    before = (made / "ca.key").read_bytes()
    failed = told("federation", "init", "liver", "--name", "other", "--address", "a.b:1", code=1)
    assert failed["type"] == "FileError"
    assert (made / "ca.key").read_bytes() == before


def test_renewing_keeps_the_authority(made, told):
    authority, server = (made / "ca.crt").read_bytes(), (made / "server.crt").read_bytes()
    told("federation", "init", "liver", "--renew")
    assert (made / "ca.crt").read_bytes() == authority
    assert (made / "server.crt").read_bytes() != server


def test_an_expired_certificate_is_told_before_anything_starts(made, told, invoke, monkeypatch):
    monkeypatch.setattr(credentials, "days_left", lambda certificate: -3.0)
    assert told("federation", "status", "--folder", "liver", code=1)["certificate_days"] == -3
    renewing = f"partsong federation init {made} --renew"
    said = invoke("federation", "status", "--folder", "liver", code=1).stdout
    assert "expired 3 days ago" in said
    assert renewing in said
    said = invoke("federation", "serve", "--folder", "liver", code=1).stderr
    assert "expired 3 days ago" in said
    assert renewing in said, "a command that can be given as it is printed"


@pytest.mark.parametrize("address", ["nowhere", "host:", ":80", "host:0", "host:70000", "a b:80", "host:８０"])
def test_an_address_is_host_and_port(told, address):
    failed = told("federation", "init", "x", "--name", "x", "--address", address, code=1)
    assert failed["type"] == "ParameterError"
    assert "host:port" in failed["error"]


@pytest.mark.parametrize("name", ["../up", "a/b", ".x", "a b"])
def test_a_site_s_name_is_a_folder_s_name(made, told, name):
    assert told("federation", "invite", name, "--folder", made, code=1)["type"] == "ParameterError"


def test_joining_makes_keys_once_and_a_policy_that_stays(made, told, tmp_path):
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    said = told("federation", "join", "north.zip", "--data", "rows.npy", "--yes")
    assert said["fingerprint"] is None
    site = tmp_path / "site-north"
    card = Card.read(site / "card.toml")
    assert (card.federation, card.site) == ("liver", "north")
    (site / "site.toml").write_text("minimum_parties = 5\n")
    kept = {name: (site / name).read_bytes() for name in ("node", "secret", "card.toml", "site.toml")}
    told("federation", "join", "north.zip", "--yes")
    assert {name: (site / name).read_bytes() for name in kept} == kept


def test_the_policy_that_is_made_is_one_and_asks_for_masks(made, told, tmp_path):
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    told("federation", "join", "north.zip", "--data", "rows.npy", "--yes")
    policy = SiteFolder.at(tmp_path / "site-north").policy()
    assert policy.secure_aggregation
    assert policy.minimum_parties == 3


def test_what_would_leave_is_shown_and_no_means_no(made, invoke, tmp_path):
    invoke("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    from partsong.cli.main import app
    from tests.cli.conftest import runner

    result = runner().invoke(app, ["federation", "join", "north.zip", "--data", "rows.npy"], input="n\n")
    assert result.exit_code == 1
    assert "never    rows" in result.stdout
    assert "column names to the server" in result.stdout
    assert "to a site of the roster that lacks some of them: their names, encrypted" in result.stdout
    assert f"Not joined. The folder {tmp_path / 'site-north'} was not created." in result.stderr
    assert not (tmp_path / "site-north").exists()
    invoke("federation", "join", "north.zip", "--data", "rows.npy", "--yes")
    (tmp_path / "site-north" / "site.toml").write_text("tell_names = false\n")
    again = runner().invoke(app, ["federation", "join", "north.zip"], input="n\n")
    assert "not even the names of columns that one of them lacks" in again.stdout
    assert "sealed" not in again.stdout
    assert "20 rows" in result.stdout


def test_a_shared_key_is_taken_once_kept_for_its_owner_and_never_told(made, told, invoke, tmp_path):
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    warned = invoke("federation", "join", "north.zip", "--data", "rows.npy", "--yes")
    assert "list of likely column names" in warned.stderr
    assert "WITHOUT a shared key" in warned.stdout
    before = (tmp_path / "site-north" / "card.toml").read_bytes()
    assert told("federation", "shared-key", "-o", "sites.key") == {"file": "sites.key"}
    text = (tmp_path / "sites.key").read_text().strip()
    result = invoke("federation", "join", "north.zip", "--shared-key", "sites.key", "--yes")
    assert "list of likely column names" not in result.stderr
    assert "under the shared key" in result.stdout
    assert text not in result.stdout + result.stderr
    kept = tmp_path / "site-north" / "shared.key"
    assert kept.read_text().strip() == text
    if os.name == "posix":
        assert stat.S_IMODE(kept.stat().st_mode) == stat.S_IMODE((tmp_path / "sites.key").stat().st_mode) == 0o600
    assert (tmp_path / "site-north" / "card.toml").read_bytes() == before
    assert told("federation", "join", "north.zip", "--yes")["shared_key"] is True
    assert kept.read_text().strip() == text


def test_a_shared_key_can_come_from_standard_input_and_is_checked_before_anything_is_made(made, told, tmp_path):
    from partsong.cli.main import app
    from tests.cli.conftest import runner

    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    text = told("federation", "shared-key")["shared_key"]
    words = ["federation", "join", "north.zip", "--data", "rows.npy", "--shared-key", "-", "--yes"]
    wrong = runner().invoke(app, words, input=text[:-1] + ("A" if text[-1] != "A" else "B") + "\n")
    assert wrong.exit_code == 1
    assert "with a checksum" in wrong.stderr
    assert not (tmp_path / "site-north").exists()
    assert runner().invoke(app, words, input=text.lower() + "\n").exit_code == 0
    assert SiteFolder.at(tmp_path / "site-north").shared_key().text == text
    assert told("federation", "join", "north.zip", "--shared-key", "none", "--yes", code=1)["type"] == "FileError"
    assert told("federation", "shared-key", "-o", "rows.npy", code=1)["type"] == "FileError"


def test_what_is_not_signed_by_the_kit_s_coordinator_is_refused_in_a_site_s_folder(joined, told, tmp_path):
    told("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    place = SiteFolder.at(tmp_path / "site-north")
    request = Request("north", Nonce("r", kind=Kind.FINISH)).to_bytes()
    only = joined.signed(InProcess({"north": place.answering()}))
    assert Reply.from_bytes(only.ask({"north": request}, 1.0)["north"]).answer == Refusal("not-started")
    assert b"unsigned" in place.answering()(request)
    told("federation", "init", "false", "--name", "liver", "--address", "nmf.example.org:8443")
    false = ServerFolder.at(tmp_path / "false")
    for card in joined.cards().values():
        false.admit(card)
    answered = false.signed(InProcess({"north": place.answering()})).ask({"north": request}, 1.0)["north"]
    assert Reply.from_bytes(answered).answer == Refusal("unsigned")


def test_data_that_cannot_be_used_are_refused_before_a_key_is_made(made, told, tmp_path):
    np.save(tmp_path / "bad.npy", np.array([[1.0, -2.0], [3.0, np.nan]]))
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    assert told("federation", "join", "north.zip", "--data", "bad.npy", "--yes", code=1)["type"] == "DataError"
    assert not (tmp_path / "site-north").exists()


def test_a_roster_is_pinned_only_by_its_fingerprint(joined, told, tmp_path):
    roster = joined.roster()
    words = ("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    wrong = told(*words, "--fingerprint", "0" * 64, code=1)
    assert "not the one passed" in wrong["error"]
    assert not (tmp_path / "site-north" / "roster.toml").exists()
    spoken = roster.fingerprint.upper().replace("-", " ")
    assert told(*words, "--fingerprint", spoken)["fingerprint"] == roster.fingerprint


def test_another_roster_needs_another_telephone_call(joined, told, tmp_path):
    words = ("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    told(*words)
    told("federation", "invite", "west", "--folder", joined.path, "-o", "west.zip")
    told("federation", "join", "west.zip", "--data", "rows.npy", "--yes")
    joined.admit(Card.read(tmp_path / "site-west" / "card.toml"))
    changed = joined.roster()
    assert "pinned another roster" in told(*words, code=1)["error"]
    assert SiteFolder.at(tmp_path / "site-north").roster() != changed
    told(*words, "--fingerprint", changed.fingerprint)
    assert SiteFolder.at(tmp_path / "site-north").roster() == changed


def test_one_key_under_two_names_is_refused_in_rosters_and_cards(joined, told, tmp_path):
    roster = joined.roster()
    for key in (roster.keys["east"], roster.coordinator):
        with pytest.raises(ParameterError, match="one party under two names"):
            replace(roster, keys={**roster.keys, "west": key})
    text = (joined.path / "roster.toml").read_text()
    assert text.count(roster.keys["south"].hex()) == 1
    (tmp_path / "forged.toml").write_text(text.replace(roster.keys["south"].hex(), roster.keys["east"].hex()))
    words = ("federation", "join", "north.zip", "--roster", "forged.toml", "--yes", "--no-start")
    assert "one party under two names" in told(*words, code=1)["error"]
    card = Card.read(tmp_path / "site-south" / "card.toml")
    fresh = Card("liver", "west", credentials.public_node_key(credentials.new_node_key()), "ab" * 32)
    for taken in ({"node_key": card.node_key}, {"signing_key": card.signing_key}):
        with pytest.raises(ParameterError, match="a key of 'south'"):
            joined.admit(replace(fresh, **taken))
    assert joined.roster() == roster


def test_sites_compare_a_roster_with_each_other_and_not_with_the_coordinator_alone(joined, tmp_path):
    from partsong.cli.main import app
    from tests.cli.conftest import runner

    words = ["federation", "join", "north.zip", "--roster", str(joined.path / "roster.toml"), "--no-start"]
    result = runner().invoke(app, words, input="y\nn\n")
    assert result.exit_code == 1
    assert "TWO OF THEM read you this fingerprint" in result.output
    assert SiteFolder.at(tmp_path / "site-north").roster() is None
    with zipfile.ZipFile(joined.invite("north", tmp_path / "kit.zip")) as archive:
        assert "two other sites" in archive.read("README.txt").decode()


@pytest.mark.skipif(os.name != "posix", reason="permissions of files")
def test_a_folder_that_was_there_before_is_kept_from_others(made, told, tmp_path):
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    (tmp_path / "here").mkdir(mode=0o755)
    told("federation", "join", "north.zip", "--data", "rows.npy", "--yes", "--folder", "here")
    (tmp_path / "there").mkdir(mode=0o755)
    told("federation", "init", "there", "--name", "there", "--address", "a.b:1")
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("here", "there")} == {0o700}


@pytest.mark.parametrize("key", ["", "a" * 63, "a" * 65, "a" * 63 + "\n", "é" * 64])
def test_nothing_is_served_without_a_whole_control_key(made, key):
    assert len(ServerFolder.at(made).control_key) == 64
    (made / "control.key").write_text(key)
    with pytest.raises(FileError, match=r"control\.key"):
        _ = ServerFolder.at(made).control_key
    assert not Gate(None, "").admits({"path": "/v1/control/start-run", "headers": [], "client": ("10.0.0.7", 1)})


def test_a_roster_without_this_site_s_own_key_is_refused(joined, told, tmp_path):
    roster = joined.roster()
    forged = replace(roster, keys={**roster.keys, "north": bytes(range(32))})
    (tmp_path / "forged.toml").write_bytes(forged.written())
    words = ("federation", "join", "north.zip", "--roster", "forged.toml", "--yes", "--no-start")
    assert "with the key made here" in told(*words, code=1)["error"]


@pytest.mark.parametrize("change", [{"coordinator": bytes(32)}, {"authority": "0" * 64}])
def test_a_roster_with_another_coordinator_or_authority_than_the_kit_is_refused(joined, told, tmp_path, change):
    forged = replace(joined.roster(), **change)
    (tmp_path / "forged.toml").write_bytes(forged.written())
    words = ("federation", "join", "north.zip", "--roster", "forged.toml", "--yes", "--no-start")
    assert "changed in transit" in told(*words, "--fingerprint", forged.fingerprint, code=1)["error"]
    assert not (tmp_path / "site-north" / "roster.toml").exists()


def test_a_kit_with_another_coordinator_s_key_comes_out_when_the_roster_is_pinned(joined, told, tmp_path):
    spoiled(
        tmp_path / "north.zip",
        lambda held: held.update({"kit.toml": held["kit.toml"].replace(joined.coordinator.hex().encode(), b"00" * 32)}),
    )
    assert "not the one that" in told("federation", "join", "north.zip", "--yes", code=1)["error"]
    told("federation", "join", "north.zip", "--data", "rows.npy", "--folder", "new", "--yes")
    (joined.path / "sites" / "north.toml").unlink()
    joined.admit(Card.read(tmp_path / "new" / "card.toml"))
    words = ("federation", "join", "north.zip", "--folder", "new", "--roster", joined.path / "roster.toml", "--yes")
    assert "changed in transit" in told(*words, "--no-start", code=1)["error"]


def test_a_roster_that_nobody_has_compared_is_taken_with_a_warning(joined, invoke, tmp_path):
    words = ("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    assert "nobody compared" in invoke(*words).stderr
    assert "nobody compared" not in invoke(*words).stderr
    assert "nobody compared" not in invoke(*words, "--fingerprint", joined.roster().fingerprint).stderr


def test_a_roster_that_was_edited_is_refused(joined, tmp_path):
    text = (joined.path / "roster.toml").read_text()
    edited = tmp_path / "edited.toml"
    edited.write_text(text.replace("east =", "oest ="))
    with pytest.raises(FormatError, match="fingerprint"):
        Listed.read(edited)
    edited.write_text(text + '\n"more" = "x"\n')
    with pytest.raises(FormatError):
        Listed.read(edited)


def test_the_fingerprint_is_of_names_keys_and_federation():
    keys = {"east": bytes(32), "north": bytes([1] * 32)}
    one = Listed("liver", keys).fingerprint
    swapped = {"east": keys["north"], "north": keys["east"]}
    others = [Listed("heart", keys), Listed("liver", swapped), Listed("liver", {"east": keys["east"]})]
    others += [Listed("liver", keys, bytes([2] * 32)), Listed("liver", keys, b"", "0" * 64)]
    assert len({one, *(other.fingerprint for other in others)}) == 6
    assert Listed("liver", dict(reversed(keys.items()))).fingerprint == one


def test_another_key_under_a_known_name_is_refused(joined, made, told, tmp_path):
    told("federation", "join", "north.zip", "--data", "rows.npy", "--folder", "again", "--yes")
    with pytest.raises(ParameterError, match="other keys"):
        joined.admit(Card.read(tmp_path / "again" / "card.toml"))


def test_a_site_that_was_removed_is_in_no_roster_and_can_come_back(joined, told, tmp_path):
    before = joined.roster()
    said = told("federation", "remove", "north", "--folder", joined.path)
    assert said["sites"] == ["east", "south"]
    assert said["fingerprint"] == joined.roster().fingerprint != before.fingerprint
    assert "'south'" in told("federation", "remove", "sauth", "--folder", joined.path, code=1)["error"]
    words = ("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    assert "with the key made here" in told(*words, code=1)["error"]
    joined.admit(Card.read(tmp_path / "site-north" / "card.toml"))
    assert joined.roster() == before


def test_a_card_of_another_federation_is_refused(joined, told, tmp_path):
    told("federation", "init", "heart", "--name", "heart", "--address", "h:1")
    with pytest.raises(ParameterError, match="for federation 'liver'"):
        ServerFolder.at(tmp_path / "heart").admit(Card.read(tmp_path / "site-east" / "card.toml"))


def test_a_kit_with_another_authority_is_refused_where_one_is_trusted(joined, told, tmp_path):
    told("federation", "init", "false", "--name", "liver", "--address", "nmf.example.org:8443")
    told("federation", "invite", "north", "--folder", "false", "-o", "false.zip")
    failed = told("federation", "join", "false.zip", "--yes", "--folder", "site-north", code=1)
    assert "not the one that" in failed["error"]


def spoiled(path, change):
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    change(held)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in held.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("how", ["a path", "a stranger", "another authority", "an unknown key", "no address", "no zip"])
def test_kits_that_were_tampered_with_are_refused(made, told, tmp_path, how):
    path = tmp_path / "north.zip"
    told("federation", "invite", "north", "--folder", made, "-o", path)
    match how:
        case "a path":
            spoiled(path, lambda held: held.update({"../../evil": b"x"}))
        case "a stranger":
            spoiled(path, lambda held: held.update({"run.sh": b"x"}))
        case "another authority":
            spoiled(path, lambda held: held.update({"ca.crt": credentials.new_authority("x").certificate}))
        case "an unknown key":
            spoiled(path, lambda held: held.update({"kit.toml": held["kit.toml"] + b'paths = "/etc"\n'}))
        case "no address":
            spoiled(path, lambda held: held.update({"kit.toml": held["kit.toml"].replace(b"address", b"adress")}))
        case "no zip":
            path.write_bytes(b"PK not really")
    failed = told("federation", "join", path, "--data", "rows.npy", "--yes", code=1)
    assert failed["type"] in ("FormatError", "ParameterError")
    assert not (tmp_path / "site-north").exists()


@pytest.fixture
def written(joined, told, tmp_path):
    """Every file that people send each other, or that a command reads again, and how it is read."""
    told("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    shutil.unpack_archive(tmp_path / "north.zip", tmp_path / "kit")
    return {
        "kit.toml": (tmp_path / "kit", Kit.read),
        "federation.toml": (joined.path, ServerFolder.at),
        "joined.toml": (tmp_path / "site-north", SiteFolder.at),
        "card.toml": (tmp_path / "site-north", lambda folder: Card.read(folder / "card.toml")),
        "roster.toml": (tmp_path / "site-north", lambda folder: Listed.read(folder / "roster.toml")),
    }


def test_a_file_of_a_newer_version_or_with_a_mistake_is_named_with_the_way_out(written):
    for name, (folder, read) in written.items():
        place, kept = folder / name, (folder / name).read_text()
        read(folder)
        for text, said in (
            (f"version = 2\n{kept}", "has version = 2, and this partsong reads versions up to 1. Update partsong"),
            (f"adress = 'a.b:1'\n{kept}", "has no setting 'adress'"),
            (kept.replace(kept.splitlines()[0].partition(" = ")[2], "3", 1), "must be a string; got 3"),
            (f"{kept}\n= = =", "is not valid TOML"),
        ):
            place.write_text(text)
            with pytest.raises((FormatError, ParameterError), match=said) as caught:
                read(folder)
            assert str(place) in str(caught.value)
        place.write_text(kept)


def test_a_kit_whose_authority_has_expired_is_told_so(made, told, monkeypatch):
    kit = told("federation", "invite", "north", "--folder", made)["kit"]
    monkeypatch.setattr(credentials, "days_left", lambda certificate: -3.0)
    failed = told("federation", "join", kit, "--data", "rows.npy", "--yes", code=1)
    assert failed["type"] == "FormatError"
    assert "the certificate authority has expired. Ask for a new kit." in failed["error"]


def test_a_kit_as_a_folder_is_the_same_kit(made, told, tmp_path):
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    shutil.unpack_archive(tmp_path / "north.zip", tmp_path / "north-kit")
    assert Kit.read(tmp_path / "north.zip") == Kit.read(tmp_path / "north-kit")


def test_a_kit_has_the_roster_once_the_site_is_in_it(joined, told, tmp_path):
    said = told("federation", "invite", "north", "--folder", joined.path, "-o", "north.zip")
    assert said["roster"] == joined.roster().fingerprint
    assert told("federation", "join", "north.zip", "--yes", "--no-start")["fingerprint"] == said["roster"]


def test_the_party_in_a_site_s_folder_answers_as_itself(joined, told, tmp_path):
    told("federation", "join", "north.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
    site = SiteFolder.at(tmp_path / "site-north").opened()
    assert site.name == "north"
    assert site.data.n_rows == 20
    assert dict(site.roster) == dict(joined.roster().keys)


def test_status_without_a_server_and_stop_of_nothing(joined, told):
    said = told("federation", "status", "--folder", joined.path)
    assert (said["server"], sorted(said["sites"])) == ("stopped", ["east", "north", "south"])
    assert told("federation", "stop", "--server", "--folder", joined.path, code=1)["type"] == "FileError"
    assert told("federation", "stop", "nothing", "--folder", joined.path, code=1)["type"] == "FileError"
    assert told("federation", "stop", "--folder", joined.path, code=1)["type"] == "ParameterError"


def test_status_at_a_site_says_what_was_spent_and_where_results_are(joined, told, invoke, tmp_path):
    sites = {}
    for name in ("east", "north", "south"):
        words = ("federation", "join", f"{name}.zip", "--roster", joined.path / "roster.toml", "--yes", "--no-start")
        told(*words)
        sites[name] = SiteFolder.at(tmp_path / f"site-{name}")
        (sites[name].path / "site.toml").write_text("minimum_parties = 3\n")
    before = told("federation", "status", "--folder", "site-north")
    assert (before["node"], before["releases"], before["runs"], before["audit"]["lines"]) == ("stopped", 0, {}, 0)
    transport = joined.signed(InProcess({name: site.answering() for name, site in sites.items()}))
    list(run_experiment(Experiment("fedavg", 2, 1), transport, tmp_path / "run", "first"))
    said = told("federation", "status", "--folder", "site-north")
    result = tmp_path / "site-north" / "results" / "first"
    assert said["runs"] == {"first": {"status": "finished", "result": str(result)}}
    assert (said["releases"], said["audit"]["is_sound"], said["shared_key"]) == (1, True, False)
    assert (said["releases_without_noise"], said["epsilon_spent"]) == (1, None)
    assert str(result) in invoke("federation", "status", "--folder", "site-north").stdout
    info = told("info", result / "model.safetensors")
    assert (info["n_components"], info["n_features"], info["settings"]["method"]) == (2, 6, "fedavg")
    told("transform", "rows.npy", result / "model.safetensors", "-o", "W.npy")
    np.testing.assert_allclose(np.load(tmp_path / "W.npy"), np.load(result / "weights.npy"), rtol=1e-6, atol=1e-9)
    assert said["audit"]["head"] == told("audit", "verify", "site-north")["head"]


def test_an_experiment_is_checked_before_anything_is_asked(joined, told, tmp_path):
    (tmp_path / "wrong.toml").write_text('method = "exact"\nrank = 3\nroudns = 2\n')
    failed = told("federation", "run", "wrong.toml", "--folder", joined.path, code=1)
    assert "'rounds'" in failed["error"]
    assert not (joined.path / "runs" / "wrong").exists()
    (tmp_path / "right.toml").write_text('method = "exact"\nrank = 3\nrounds = 2\n')
    failed = told("federation", "run", "right.toml", "--folder", joined.path, "--name", "../up", code=1)
    assert failed["type"] == "ParameterError"
    failed = told("federation", "run", "right.toml", "--folder", joined.path, "--resume", code=1)
    assert "No run is called 'right'" in failed["error"]


def test_a_folder_without_a_federation_is_told_so(told, tmp_path):
    failed = told("federation", "status", "--folder", tmp_path, code=1)
    assert "partsong federation init" in failed["error"]


def test_one_command_makes_the_federation_and_a_kit_for_each_site(told, invoke, tmp_path):
    words = ("federation", "init", "liver", "--address", "nmf.example.org:8443", "--site", "north", "--site", "south")
    said = told(*words)
    assert (said["name"], sorted(said["kits"])) == ("liver", ["north", "south"])
    for name in ("north", "south"):
        kit = Kit.read(tmp_path / said["kits"][name])
        assert (kit.site, kit.federation, kit.address) == (name, "liver", "nmf.example.org:8443")
    failed = told("federation", "init", "other", "--address", "a.b:1", "--site", "../up", code=1)
    assert "A site cannot be called '../up'" in failed["error"]
    assert not (tmp_path / "other").exists()
    assert "needs an address" in told("federation", "init", "other", code=1)["error"]
    renewed = told("federation", "init", "liver", "--renew", "--site", "x", code=1)
    assert "cannot change the name, address or sites" in renewed["error"]


def test_one_join_waits_for_the_roster_that_its_card_brings_back(joined, tmp_path, monkeypatch):
    """One command for a site: it shows what leaves, makes keys, waits for the roster, compares, and starts the node."""
    from partsong.federation.commands import site as commands

    shutil.rmtree(tmp_path / "site-north")
    joined.remove("north")
    started, roster = [], joined.path / "roster.toml"
    monkeypatch.setattr(commands, "_start", lambda site, drop: started.append(site.roster().fingerprint))
    prompt = commands.typer.prompt

    def coordinator(text, **more):
        given = prompt(text, **more)
        if given == "roster":
            joined.admit(Card.read(tmp_path / "site-north" / "card.toml"))
            return str(roster)
        return given

    monkeypatch.setattr(commands.typer, "prompt", coordinator)
    words = ["federation", "join", "north.zip", "--data", "rows.npy"]
    result = runner().invoke(app, words, input="y\nnowhere.toml\nroster\ny\n")
    assert result.exit_code == 0, result.output
    assert "nowhere.toml" in result.stderr
    assert started == [joined.roster().fingerprint]


@pytest.mark.parametrize("answer", ["\n", ""])
def test_a_site_need_not_wait_for_the_roster(made, told, tmp_path, answer):
    told("federation", "invite", "north", "--folder", made, "-o", "north.zip")
    result = runner().invoke(app, ["federation", "join", "north.zip", "--data", "rows.npy"], input="y\n" + answer)
    assert result.exit_code == 0
    assert "partsong federation join north.zip --roster roster.toml" in result.stdout
    assert SiteFolder.at(tmp_path / "site-north").roster() is None


SITES = ("north", "south", "west")
COLUMNS = ("Albumin", "Bilirubin", "Creatinine", "Ferritin")
LACKING = "Ferritin"


@pytest.fixture
def federation(told, tmp_path):
    """By the commands of that page, under the shared key and site.toml as it is made; south lacks a column."""
    told("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443")
    told("federation", "shared-key", "-o", "sites.key")
    for number, site in enumerate(SITES):
        columns = [name for name in COLUMNS if site != "south" or name != LACKING]
        rows = np.random.default_rng(number).random((20, len(columns)))
        np.savetxt(tmp_path / f"{site}.csv", rows, delimiter=",", header=",".join(columns), comments="")
        told("federation", "invite", site, "--folder", "liver", "-o", f"{site}.zip")
        told("federation", "join", f"{site}.zip", "--data", f"{site}.csv", "--shared-key", "sites.key", "--yes")
    cards = [f"site-{site}/card.toml" for site in SITES]
    told("federation", "admit", *cards, "--folder", "liver", "--engine", "files")
    for site in SITES:
        told("federation", "join", f"{site}.zip", "--roster", "liver/roster.toml", "--yes", "--no-start")
    return {site: SiteFolder.at(tmp_path / f"site-{site}") for site in SITES}


def conducted(sites, folder, seen):
    """A masked run in one process, and all that its server has written and read."""

    def recording(answer):
        def answered(request):
            reply = answer(request)
            seen.extend((request, reply))
            return reply

        return answered

    server = ServerFolder.at(folder / "liver")
    transport = server.signed(InProcess({name: recording(site.answering()) for name, site in sites.items()}))
    experiment, roster = Experiment("exact", 2, 2, secure_aggregation=True, mask_bound=1e6), dict(server.roster().keys)
    return list(run_experiment(experiment, transport, folder / "run", "run-1", roster=roster))


def log_of(site):
    return (site.path / "state" / "site.log").read_text()


def test_a_site_reads_the_name_of_a_column_that_it_lacks_and_its_mistakes_and_the_server_does_not(federation, tmp_path):
    seen, west = [], federation["west"]
    policy = (west.path / "site.toml").read_text()
    for number, mistake in enumerate(("minimum_partys = 3\n", "minimum_parties = = 3\n")):
        (west.path / "site.toml").write_text(mistake)
        with pytest.raises(SiteRefused, match="'settings'"):
            conducted(federation, tmp_path, seen)
        assert log_of(west).count("[settings]") == number + 1
        assert ("partys", "not valid TOML")[number] in log_of(west)
    (west.path / "site.toml").write_text(policy)
    with pytest.raises(FeatureError, match="south: 0 extra, 1 missing") as caught:
        conducted(federation, tmp_path, seen)
    assert f"missing here are: {LACKING}." in log_of(federation["south"])
    everything = b"".join(seen) + str(caught.value).encode()
    everything += b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert len(seen) > 10
    assert not any(name.encode() in everything for name in (*COLUMNS, "partys"))


EXPERIMENT = 'method = "exact"\nrank = 2\nrounds = 1\nseed = 1\n'


@pytest.fixture(scope="module")
def with_two_sites(tmp_path_factory):
    """A federation with one site that was admitted, over files, and one that has joined."""
    folder = tmp_path_factory.mktemp("with_two_sites")
    np.save(folder / "rows.npy", np.random.default_rng(0).random((20, 6)))
    server = ServerFolder.made(folder / "liver", "liver", "nmf.example.org:8443")
    for site in ("north", "south"):
        kit = Kit.read(server.invite(site, folder / f"{site}.zip"))
        SiteFolder.joining(folder / f"site-{site}", kit, folder / "rows.npy", {})
    server.admit(Card.read(folder / "site-north" / "card.toml"))
    return folder


@pytest.fixture
def server(with_two_sites, tmp_path):
    """A copy of it."""
    shutil.copytree(with_two_sites, tmp_path, dirs_exist_ok=True)
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
    known = Known()

    @contextmanager
    def controlling(server):
        yield known

    monkeypatch.setattr(control, "open_control", controlling)
    return known


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
    place, seed, said = federation_server._prepare_run(*words)
    assert place.experiment.read_text() in (EXPERIMENT, f"seed = {seed}\n{EXPERIMENT}")
    assert said == []


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
    certificate = credentials.new_server_certificate(credentials.new_authority("x"), host).certificate
    names = (
        x509.load_pem_x509_certificate(certificate)
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
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
