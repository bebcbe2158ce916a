"""Texts over real processes of Flower: words that no file of the server has, a site that is killed, the same bits."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from tests.federation.helpers import KEY, RARE, SHARED, texts_of

pytest.importorskip("flwr")
from partsong.core.interfaces import Schedule, Shard
from partsong.engines.local import Sequential
from partsong.federation.columns import hashed
from partsong.federation.experiment import Experiment
from partsong.federation.server.state import Journal
from partsong.federation.setup.credentials import Kit
from partsong.federation.setup.site_folder import SiteFolder
from partsong.federation.site.plan import build_plan
from partsong.federation.site.state import RunFolder
from partsong.io.model_file import load_model
from partsong.topics.vocabulary import rows_as_matrix
from tests.integration.flower.flower_processes import SITES, federation

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning")
EXPERIMENT = 'method = "exact"\nrank = 3\nrounds = 1\nseed = 5\nsecure_aggregation = true\n[words]\nmin_documents = 2\n'


def with_texts(folder, site):
    """The same site, whose texts are rows of a .csv, lines of a .jsonl, or files in a folder."""
    texts = texts_of(site.site)
    place = folder / f"{site.site}{dict(zip(SITES, ('.csv', '.jsonl', ''), strict=True))[site.site]}"
    match place.suffix:
        case ".csv":
            with place.open("w", newline="") as file:
                csv.writer(file).writerows([["number", "text"], *enumerate(texts)])
        case ".jsonl":
            place.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        case _:
            place.mkdir()
            for number, text in enumerate(texts):
                (place / f"{number:03}.txt").write_text(text)
    kit = Kit.read(folder / f"{site.site}.zip")
    joined = SiteFolder.joining(site.path, kit, place, {"text_column": "text"}, KEY)
    policy = (
        'maximum_exposure = "rows"\nminimum_parties = 3\nsecure_aggregation = true\n[words]\nminimum_documents = 2\n'
    )
    (joined.path / "site.toml").write_text(policy)
    return joined


def words_done(place):
    record = Journal(place.state / "words").load()
    return 0 if record is None else record.index


def given_texts(made):
    made.sites = {name: with_texts(made.folder, site) for name, site in made.sites.items()}


def test_words_are_agreed_on_while_a_site_is_killed_and_the_bits_are_those_of_one_process(tmp_path):
    with federation(tmp_path, prepare=given_texts) as made:
        place = made.server.run("notes")
        made.begin("notes", EXPERIMENT)
        made.wait(lambda: words_done(place) >= 1 or not made.is_running("notes"))
        made.running.kill("north")
        made.start_node("north")
        code, told = made.ended("notes")
        assert code == 0, told
        assert len((place.state / "words" / "steps.jsonl").read_text().splitlines()) == words_done(place)
        require_no_word_in(made.server.path)
    require_same_bits(place, made.sites)


def require_no_word_in(folder):
    """Files of the server, and Flower's own, which has all messages in the clear."""
    held = b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"notes.words" in held
    for word in (*(RARE[name] for name in SITES), "biopsy", "enzyme", "fibrosis"):
        assert word.encode() not in held
        for run in ("notes", "notes.words"):
            assert hashed([word], run)[0].tobytes() not in held


def require_same_bits(place, sites):
    experiment, record = Experiment.read(place.experiment), Journal(place.state).load()
    found = {
        name: RunFolder(site.path / "state" / "runs" / "notes.words").load_vocabulary() for name, site in sites.items()
    }
    weighing = experiment.text_rule.weighing(found["east"].vocabulary)
    assert sorted(weighing.names) == sorted(SHARED)
    shards = []
    for name, site in sorted(sites.items()):
        assert (site.path / "results" / "notes" / "vocabulary.txt").read_text().splitlines() == list(weighing.names)
        rows = weighing.weighed(weighing.counted(texts_of(name))).rows
        shards.append(Shard(name, rows_as_matrix(rows, "float64"), site.secret()))
        charged = [tuple(line["attempt"]) for line in site.opened().ledger.chain.lines()]
        assert len(set(charged)) == len(charged) == record.index + words_done(place)
    plan = build_plan(experiment.to_dict(), 3, None)
    schedule = Schedule(plan.exchanges, experiment.seed, record.absent(), record.dropouts())
    *_, last = Sequential().run(plan.program, shards, schedule, reduction=plan.reduction)
    expected = np.ascontiguousarray(np.asarray(plan.program.components(last.checkpoint.server)))
    assert load_model(place.model).components.tobytes() == expected.tobytes()
    assert all(name.startswith("#") for name in load_model(place.model).feature_names)
