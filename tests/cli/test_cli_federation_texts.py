"""`partsong federation join --text-column`: sites with texts, from a kit to topics with words that the server lacks."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("cryptography")

from partsong.federation.server.state import Journal
from partsong.federation.setup.credentials import Card
from partsong.federation.setup.server_folder import ServerFolder
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.transports import files
from partsong.federation.transports.base import InProcess
from partsong.io.model_file import load_model

SITES = ("east", "north", "south")
COMMON = ("liver", "biopsy", "enzyme", "portal")
EXPERIMENT = (
    'method = "exact"\nrank = 2\nrounds = 1\nsecure_aggregation = true\nmask_bound = 1e6\n'
    '[words]\nweighting = "counts"\n'
)


def texts_of(site):
    return [f"{COMMON[number % 4]} {COMMON[(number + 1) % 4]} {site}ville" for number in range(8)]


def write_texts(folder):
    """As rows of a .csv, lines of a .jsonl, and files of a folder."""
    rows = "".join(f'{number},"{text}"\n' for number, text in enumerate(texts_of("east")))
    (folder / "east.csv").write_text(f"id,note\n{rows}")
    (folder / "north.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of("north")))
    (folder / "south").mkdir()
    for number, text in enumerate(texts_of("south")):
        (folder / "south" / f"{number}.txt").write_text(text)


@pytest.fixture
def joined(told, tmp_path):
    """Three sites with texts that have joined and were admitted, as far as that goes without a server."""
    write_texts(tmp_path)
    told("federation", "init", "notes", "--name", "notes", "--address", "nmf.example.org:8443")
    told("federation", "shared-key", "-o", "sites.key")
    places = {"east": ("east.csv", "--text-column", "note"), "north": ("north.jsonl",), "south": ("south",)}
    for site, words in places.items():
        told("federation", "invite", site, "--folder", "notes", "-o", f"{site}.zip")
        told("federation", "join", f"{site}.zip", "--data", *words, "--shared-key", "sites.key", "--yes")
        ServerFolder.at(tmp_path / "notes").admit(Card.read(tmp_path / f"site-{site}" / "card.toml"))
    return ServerFolder.at(tmp_path / "notes")


def require_steps_before_exchanges(said, place):
    """Each step of the agreement was told, and then the exchange of the run."""
    told = [line for line in said.splitlines() if " 3 sites, at most " in line]
    steps = Journal(place.state / "words").load().index
    assert steps > 2
    which = [*(f"words, step {number} of at most 24" for number in range(1, steps + 1)), "exchange 1 of 1"]
    assert [line.split(":")[0] for line in told] == which
    assert [line.endswith("; next: nothing") for line in told] == [False] * (steps - 1) + [True, False]


def test_sites_with_texts_end_with_words_and_the_server_with_hashes(joined, invoke, told, monkeypatch, tmp_path):
    sites = {}
    for site in SITES:
        place = SiteFolder.at(tmp_path / f"site-{site}")
        place.pin(joined.roster(), joined.roster().fingerprint)
        assert place.holds_texts
        sites[site] = place.opened().answer
    place = joined.run("first")
    monkeypatch.setattr(files, "requests_in", lambda *places: InProcess(sites))
    (tmp_path / "first.toml").write_text(EXPERIMENT)
    words = ("federation", "run", "first.toml", "--folder", "notes", "--engine", "files", "--exchange-folder", "drop")
    require_steps_before_exchanges(invoke(*words).stdout, place)
    done = json.loads(place.result.read_text())
    assert (done["status"], done["rounds"]) == ("done", 1)
    assert all(name.startswith("#") for name in load_model(place.model).feature_names)
    for site in SITES:
        results = tmp_path / f"site-{site}" / "results" / "first"
        assert sorted((results / "vocabulary.txt").read_text().split()) == sorted(COMMON)
        assert set(load_model(results / "model.safetensors").feature_names) == set(COMMON)
        runs = told("federation", "status", "--folder", f"site-{site}")["runs"]
        assert {name: run["status"] for name, run in runs.items()} == {"first": "over", "first.words": "over"}


def test_what_leaves_is_shown_and_no_word_of_a_text_is(joined, invoke, tmp_path):
    said = invoke("federation", "join", "east.zip", "--yes", "--no-start").output
    assert "words to the server" in said
    assert "8 texts" in said
    assert "eastville" not in said
    before = SiteFolder.at(tmp_path / "site-east")
    assert before.reading == {"text_column": "note"}
    words = ("--data", "east.csv", "--text-column", "note", "--folder", "anew")
    said = invoke("federation", "join", "east.zip", *words, "--yes", "--no-start").output
    assert "will refuse every run over its texts" in said


def test_texts_are_read_again_once_they_were_changed(joined, tmp_path):
    place = SiteFolder.at(tmp_path / "site-south")
    place.pin(joined.roster(), joined.roster().fingerprint)
    assert place.opened().data.n_rows == 8
    (tmp_path / "south" / "more.txt").write_text("one more")
    assert place.opened().data.n_rows == 9


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("--data", "east.csv", "--text-column", "text"), "'text' is not among the 2 titles"),
        (("--data", "east.csv", "--text-column", "note", "--label", "id"), "--label is for tables"),
        (("--data", "east.csv"), "name their column: --text-column"),
        (("--data", "east.csv", "--encoding", "latin-1"), "--encoding is for texts"),
        (("--data", "north.jsonl", "--encoding", "nonsense"), "nonsense"),
    ],
)
def test_what_cannot_be_meant_is_refused(told, tmp_path, words, match):
    write_texts(tmp_path)
    told("federation", "init", "notes", "--name", "notes", "--address", "nmf.example.org:8443")
    told("federation", "invite", "east", "--folder", "notes", "-o", "east.zip")
    said = told("federation", "join", "east.zip", *words, "--yes", code=1)
    assert match in said["error"]
    assert not (tmp_path / "site-east" / "joined.toml").exists()
