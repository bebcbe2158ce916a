"""A federation as docs/guide/federation.md has it made: what a site reads of its mistakes, and the server does not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cryptography")

from partsong.errors import FeatureError, SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.server.launch import run_experiment
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.transports.base import InProcess

SITES = ("north", "south", "west")
COLUMNS = ("Albumin", "Bilirubin", "Creatinine", "Ferritin")
LACKING = "Ferritin"


@pytest.fixture
def federation(told, tmp_path):
    """By the commands of that page, with the key that sites share and site.toml as it is made; south lacks a column."""
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
        assert ("partys", "not TOML")[number] in log_of(west)
    (west.path / "site.toml").write_text(policy)
    with pytest.raises(FeatureError, match="south: 0 extra, 1 missing") as caught:
        conducted(federation, tmp_path, seen)
    assert f"missing here are: {LACKING}." in log_of(federation["south"])
    everything = b"".join(seen) + str(caught.value).encode()
    everything += b"".join(path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert len(seen) > 10
    assert not any(name.encode() in everything for name in (*COLUMNS, "partys"))
