"""`partsong federation join` on a folder that is there: nothing changes before a yes, nor while its node runs, and what
an earlier folder has promised goes on.
"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.cli.main import app
from partsong.consortium.kit import Kit
from partsong.consortium.locking import held
from partsong.consortium.roster import Card
from partsong.consortium.server_folder import ServerFolder
from partsong.consortium.shared_key import SharedKey
from partsong.consortium.site_folder import SiteFolder
from partsong.federation.ledger import SiteLedger
from partsong.federation.transport import InProcess
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


def asked(here, place):
    """What a site answers, signed, to a request that releases nothing."""
    request = Request("north", Nonce("r", kind=Kind.FINISH)).written()
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
    (new / "site.toml").unlink()
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
