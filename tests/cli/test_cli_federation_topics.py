"""`partsong federation run` with methods of topics: what is said of their keys."""

from __future__ import annotations

import re

import numpy as np
import pytest

import partsong

pytest.importorskip("cryptography")

from partsong.federation.site.results import TOPICS, save_topic_result
from partsong.solvers.lda import TopicRows

HEAD = "rank = 2\nrounds = 4\nseed = 6\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('method = "exact"\nserver_rate = 0.1\n', "experiment.toml: server_rate is for fednmf, fednmf-mi"),
        ('method = "fedlda"\nlocal_steps = 2\n', "experiment.toml: local_steps is for exact, fnmf"),
        (
            'method = "fednmf"\nepoch = 2\n',
            "experiment.toml has no setting 'epoch'. Did you mean 'epochs'",
        ),
    ],
)
def test_keys_of_the_file_are_told_as_keys_and_not_as_options(told, tmp_path, text, said):
    told("federation", "init", "liver", "--name", "liver", "--address", "nmf.example.org:8443")
    (tmp_path / "experiment.toml").write_text(HEAD + text)
    found = told("federation", "run", "experiment.toml", "--folder", "liver", code=1)
    assert found["error"].startswith(said)


def test_the_result_of_a_site_is_shown_and_transforms_texts(invoke, told, tmp_path):
    H = np.array([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.3, 0.5]])
    words = ("apple", "bread", "chess", "dance")
    save_topic_result(tmp_path / TOPICS, H, words, {"method": "fedlda", "rounds": 3, "seed": 6}, TopicRows(0.5))
    shown = told("topics", "show", TOPICS)
    assert shown["topics"][0]["words"][:2] == ["apple", "bread"]
    assert (shown["settings"]["method"], shown["settings"]["weighting"]) == ("fedlda", "counts")
    (tmp_path / "new.csv").write_text("text\napple bread apple\nDANCE chess\nnothing\n")
    invoke("topics", "transform", "new.csv", TOPICS, "-o", "W.npy")
    W = np.load(tmp_path / "W.npy")
    assert W.argmax(axis=1).tolist()[:2] == [0, 1]
    np.testing.assert_allclose(W.sum(axis=1), [1, 1, 0])


@pytest.mark.parametrize("kind", [partsong.TopicModel, partsong.FederatedTopicModel])
def test_sizes_of_topics_that_nobody_has_measured_are_not_made_up(kind, invoke, told, tmp_path):
    H = np.array([[0.5, 0.3, 0.1, 0.1], [0.1, 0.1, 0.3, 0.5], [0.2, 0.4, 0.1, 0.3]])
    words = ("apple", "bread", "chess", "dance")
    save_topic_result(tmp_path / TOPICS, H, words, {"method": "fedlda", "rounds": 3, "seed": 6}, TopicRows(0.5))
    assert [topic["share"] for topic in told("topics", "show", TOPICS)["topics"]] == [None] * 3
    shown = invoke("topics", "show", TOPICS, "--html", "shown.html").stdout
    assert "%" not in shown
    assert "apple, bread" in shown
    model = kind.load(tmp_path / TOPICS)
    assert model.topic_shares_ is None
    model.to_html(tmp_path / "loaded.html")
    for name in ("shown.html", "loaded.html"):
        page = (tmp_path / name).read_text(encoding="utf-8")
        assert re.findall(r"<figcaption><b>Topic \d</b><span>(.*?)</span>", page) == ["\N{EN DASH}"] * 3
        assert re.findall(r"<title>(Topic \d.*?): ", page) == ["Topic 1", "Topic 2", "Topic 3"]
        assert "Sizes of topics are not known: all discs are alike." in page
        assert "The area of a disc" not in page
        assert len(set(re.findall(r'<circle[^>]* r="([0-9.]+)"', page))) == 1
    model.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / TOPICS).read_bytes()
    np.testing.assert_allclose(model.transform(["apple bread apple", "nothing"]).sum(axis=1), [1, 0])
