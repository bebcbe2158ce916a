"""`partsong federation status` at a site: what it says of the ledger is what the site would say to a request."""

from __future__ import annotations

import shlex

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.federation.audit_log import AuditLog
from partsong.federation.consistency import require_consistent
from partsong.federation.ledger import SiteLedger
from partsong.federation.setup.credentials import Kit, SharedKey
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.wire import RequestRefused
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.spending import DEFAULT_DELTA
from tests.federation.helpers import charge, depart

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
