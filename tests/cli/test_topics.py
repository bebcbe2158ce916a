"""`partsong topics`: fit, show and transform, advice of errors, and texts in other scripts and encodings."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import partsong
from partsong.cli.topics import show_topics
from partsong.topics import LANGUAGES
from partsong.topics.tokenizer import LISTS

PLANTED = (("cat", "dog", "horse", "sheep", "goat"), ("piano", "violin", "cello", "flute", "oboe"))
SECRET = "zanzibarquux"


def texts_about(seed, n=30):
    draw = np.random.default_rng(seed)
    rare = ("".join(draw.choice(list("qxzvjk"), 9)) for _ in range(n))
    return [" ".join([*draw.choice(PLANTED[draw.integers(2)], 4), SECRET + name]) for name in rare] + [""]


def write(path, texts, column="text"):
    with path.open("w", encoding="utf-8", newline="") as stream:
        rows = csv.writer(stream)
        rows.writerow(["id", column])
        rows.writerows(enumerate(texts))


@pytest.fixture
def files(tmp_path):
    for seed, name in enumerate("abc"):
        write(tmp_path / f"{name}.csv", texts_about(seed))
    return ["a.csv", "b.csv", "c.csv"]


def test_topics_of_parties_from_files_to_weights(files, invoke, told, tmp_path):
    fit = told("topics", "fit", *files, "-k", 2, "-o", "m.safetensors", "--html", "m.html", "--seed", 1)
    assert {frozenset(topic["words"]) for topic in fit["topics"]} == {frozenset(words) for words in PLANTED}
    assert fit["n_parties"] == 3
    assert fit["n_documents"] == 93
    assert fit["empty_documents"] == {"a": 1, "b": 1, "c": 1}
    assert fit["bytes_up"] > 0
    assert fit["agreement_bytes_up"] > 0
    shown = told("topics", "show", "m.safetensors", "-n", 3)
    assert [topic["words"] for topic in shown["topics"]] == [topic["words"][:3] for topic in fit["topics"]]
    weights = told("topics", "transform", "a.csv", "m.safetensors", "-o", "W.csv")
    assert (weights["n_documents"], weights["n_topics"], weights["n_zero"]) == (31, 2, 1)
    W = np.loadtxt(tmp_path / "W.csv", delimiter=",", skiprows=1)
    same = partsong.FederatedTopicModel(2, random_state=1).fit({name: texts_about(i) for i, name in enumerate("abc")})
    assert np.allclose(W, same.transform(texts_about(0)), atol=1e-12)
    for name in ("m.safetensors", "m.html", "W.csv"):
        assert SECRET.encode() not in (tmp_path / name).read_bytes()
    assert SECRET not in json.dumps([fit, shown, weights])
    assert invoke("topics", "show", "m.safetensors", "--html", "again.html").stdout.count("cello") == 1
    assert (tmp_path / "again.html").stat().st_size > 5000


def test_topics_of_one_file_for_people(files, invoke, tmp_path):
    result = invoke("topics", "fit", "a.csv", "-k", 2, "--method", "lda", "-o", "m.safetensors")
    assert "31 texts, 1 without a known word" in result.stdout
    assert "cello" in result.stdout
    assert SECRET not in result.stdout + result.stderr
    assert (tmp_path / "m.safetensors").exists()
    assert invoke("topics", "fit", "a.csv", "-k", 2, "--quiet", "--rounds", 2).stdout == ""


def test_options_reach_the_model(files, told, tmp_path):
    words = [word for topic in PLANTED for word in topic]
    (tmp_path / "words.txt").write_text("\n".join(words), encoding="utf-8")
    (tmp_path / "stop.txt").write_text("cat\n", encoding="utf-8")
    chosen = ("--method", "fednmf", "--server", "adam", "--participation", 0.7, "--rounds", 2)
    fit = told("topics", "fit", *files, "-k", 2, *chosen, "--vocabulary", "words.txt", "--stop-words", "stop.txt")
    assert (fit["method"], fit["rounds"], fit["n_words"]) == ("fednmf", 2, 9)
    assert told("topics", "fit", *files, "-k", 2, "--secure-aggregation", "--rounds", 2)["outcome"] == "max-rounds"
    assert told("topics", "fit", *files, "-k", 2, "--max-words", 6, "--min-parties", 3, "--rounds", 2)["n_words"] == 6
    write(tmp_path / "t.csv", texts_about(0), "title")
    assert told("topics", "fit", "t.csv", "-k", 2, "--text-column", "title", "--rounds", 2)["n_documents"] == 31


def test_descents_take_their_settings_and_a_device(files, told):
    fit = ("topics", "fit", *files, "-k", 2, "--rounds", 2, "--seed", 1)
    descent = ("--method", "fednmf-mi", "--epochs", 2, "--batch", 16, "--rate", 0.2, "--strength", 0.5)
    server = ("--server", "yogi", "--server-rate", 0.1)
    model = partsong.FederatedTopicModel(
        2, method="fednmf-mi", rounds=2, epochs=2, batch=16, rate=0.2, strength=0.5, server="yogi", server_rate=0.1,
        random_state=1,
    ).fit({name: texts_about(seed) for seed, name in enumerate("abc")})  # fmt: skip
    found = told(*fit, *descent, *server)
    assert found["topics"][0]["words"] == model.topics()[0]
    assert found["relative_error"] == model.relative_error_
    missing = told(*fit, *descent, "--device", "nowhere", code=2)
    assert "device" in missing["error"]
    pytest.importorskip("torch")
    assert told(*fit, *descent, *server, "--device", "cpu")["relative_error"] == pytest.approx(found["relative_error"])


def test_settings_of_the_critic_reach_the_model(files, told):
    fit = ("topics", "fit", *files, "-k", 2, "--rounds", 2, "--seed", 1, "--method", "fednmf-mi", "--epochs", 2)
    options = ("--critic", "separable", "--mi-gradient", "js", "--critic-rate", 0.5, "--warm-start-weights")
    chosen = {"critic": "separable", "mi_gradient": "js", "critic_rate": 0.5, "warm_start_weights": True}
    parties = {name: texts_about(seed) for seed, name in enumerate("abc")}
    settings = {"method": "fednmf-mi", "rounds": 2, "epochs": 2, "random_state": 1, "strength": 9.0}
    found = told(*fit, "--strength", 9, *options)["relative_error"]
    assert found == partsong.FederatedTopicModel(2, **settings, **chosen).fit(parties).relative_error_
    assert found != told(*fit, "--strength", 9)["relative_error"]


def test_weighting_shares_and_long_words_reach_the_model(files, told, invoke, tmp_path):
    long = "w" * 33
    for name in files:
        lines = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(f"{lines}99,{long} cat\n", encoding="utf-8")
    fit = ("topics", "fit", *files, "-k", 2, "--rounds", 2)
    assert told(*fit)["n_words"] == 10
    assert "the same larger max_word_bytes (in bytes of UTF-8)" in invoke(*fit, "-q").stderr
    assert told(*fit, "--max-word-bytes", 33)["n_words"] == 11
    assert told(*fit, "--max-df", 0.28)["n_words"] == 4  # goat, dog, piano and cello
    counted = told(*fit, "--weighting", "counts", "-o", "m.safetensors")
    assert counted["relative_error"] != told(*fit)["relative_error"]
    assert partsong.FederatedTopicModel.load(tmp_path / "m.safetensors").vectorizer_.weighting == "counts"
    assert told("topics", "fit", "a.csv", "-k", 2, "--rounds", 2, "--max-df", 0.4, "--weighting", "counts")


def test_a_given_vocabulary_is_taken_as_it_is(files, told, tmp_path):
    (tmp_path / "voc.txt").write_text("cat\ndog\npiano\ncello\noboe\n", encoding="utf-8")
    given = ("topics", "fit", *files, "-k", 2, "--rounds", 1, "--vocabulary")
    assert told(*given, "voc.txt")["n_words"] == 5
    asked = {"max-words": 3, "min-documents": 1000, "min-parties": 2, "max-df": 0.5, "max-word-bytes": 40}
    for name, value in asked.items():
        refused = told(*given, "voc.txt", f"--{name}", value, code=2)
        assert re.search(name.replace("-", "."), refused["error"])
        assert "used unchanged" in refused["error"]
        hashed = told(*given, "hash", f"--{name}", value, code=0 if name == "max-words" else 2)
        assert hashed.get("n_words") == 3 or "gives every word a column" in hashed["error"]


def test_help_names_the_lists_of_stop_words(invoke):
    shown = invoke("topics", "fit", "--help").stdout
    assert set(LANGUAGES) == set(LISTS)
    assert all(language in shown for language in LANGUAGES)


def test_what_makes_no_sense_is_a_usage_error(files, told):
    for words in (
        ("a.csv", "--secure-aggregation"),
        ("a.csv", "--method", "exact"),
        ("a.csv", "--server", "adam"),
        ("a.csv", "b.csv", "--method", "lda"),
        ("a.csv", "b.csv", "--method", "nope"),
        ("a.csv", "a.csv"),
        ("a.csv", "-o", "m.pkl"),
        ("a.csv", "-o", "a.csv"),
        ("a.csv", "-k", 0),
        ("a.csv", "--html", "m.txt"),
        ("a.csv", "--method", "lda", "--epochs", 2),
        ("a.csv", "--method", "nmf-sgd", "--strength", 0.1),
        ("a.csv", "--method", "nmf-sgd", "--rate", 0),
        ("a.csv", "--method", "nmf-sgd", "--rate", "nan"),
        ("a.csv", "b.csv", "--method", "fednmf", "--server-rate", -1),
        ("a.csv", "--server-rate", 1),
        ("a.csv", "--max-word-bytes", 40),
        ("a.csv", "b.csv", "--max-word-bytes", 2000),
        ("a.csv", "b.csv", "--max-df", 0),
        ("a.csv", "--weighting", "bm25"),
        ("a.csv", "--warm-start-weights"),
        ("a.csv", "--method", "nmf-sgd", "--critic", "separable"),
        ("a.csv", "b.csv", "--method", "fednmf", "--mi-gradient", "js"),
        ("a.csv", "b.csv", "--method", "fednmf", "--critic-rate", 0.5),
        ("a.csv", "b.csv", "--method", "fednmf-mi", "--critic-rate", 0),
        ("a.csv", "b.csv", "--method", "fednmf-mi", "--mi-gradient", "kl"),
    ):
        assert told("topics", "fit", *words, code=2)["exit_code"] == 2


@pytest.mark.parametrize(
    ("words", "way_out"),
    [
        (("a.csv", "--vocabulary", "agree"), "another vocabulary"),
        (("a.csv", "--device", "cpu"), "Remove it"),
        (("a.csv", "--language", "klingon"), "stop words"),
        (("a.csv", "--method", "lda", "--weighting", "tfidf"), "models counts"),
        (("a.csv", "b.csv", "--method", "fednmf", "--server-rate", 0.1), "one of these, or remove"),
        (("a.csv", "b.csv", "--method", "fednmf", "--server-rate", 0.1, "--server", "average"), "or remove"),
    ],
)
def test_what_the_model_refuses_is_told_with_the_way_out(words, way_out, files, told):
    assert way_out in told("topics", "fit", *words, "-k", 2, "--rounds", 1, code=2)["error"]


def test_a_strength_of_zero_is_the_method_without_a_critic(files, told):
    fit = ("topics", "fit", "a.csv", "b.csv", "-k", 2, "--rounds", 1, "--epochs", 1)
    without = told(*fit, "--method", "fednmf-mi", "--strength", 0)
    assert without["relative_error"] == told(*fit, "--method", "fednmf")["relative_error"]


def test_bad_input_is_told_without_its_text(files, told, invoke, tmp_path):
    (tmp_path / "latin.csv").write_bytes(f"text\n{SECRET}\xe9\n".encode("latin-1"))
    (tmp_path / "broken.csv").write_text(f'text\n"{SECRET}\n', encoding="utf-8")
    (tmp_path / "header.csv").write_text("text\n", encoding="utf-8")
    (tmp_path / "stops.csv").write_text("text\nthe\nof\n", encoding="utf-8")
    (tmp_path / "alien.csv").write_text(f"text\n{SECRET}\n", encoding="utf-8")
    for words, way_out in (
        (("a.csv", "--text-column", "nope"), "'nope' is not among"),
        (("missing.csv",), "missing.csv"),
        (("latin.csv",), "encoding"),
        (("a.csv", "--encoding", "klingon"), "encoding"),
        (("broken.csv",), "quotes"),
        (("header.csv",), "no documents"),
        (("stops.csv",), "empty"),
        (("a.csv", "-k", 500), "the number of words in the vocabulary; got 500"),
        (("a.csv", "alien.csv", "--min-documents", 30), "No word meets"),
        (("a.csv", "b.csv", "--min-parties", 3), "--min-parties must be at most 2"),
        (("a.csv", "b.csv", "--secure-aggregation"), "at least 3 parties"),
    ):
        failure = told("topics", "fit", *words, code=1)
        assert way_out in failure["error"], failure
        assert SECRET not in json.dumps(failure)
        assert SECRET not in invoke("topics", "fit", *words, code=1).stderr
    result = invoke("topics", "fit", "a.csv", "b.csv", "alien.csv", "-k", 2, "-q")
    assert "Party 'alien': none of 1 document has" in result.stderr
    assert SECRET not in result.stderr


def test_files_that_are_no_topics_are_refused(files, told, invoke, tmp_path):
    (tmp_path / "m.safetensors").write_bytes(b"nothing of the kind")
    assert told("topics", "show", "m.safetensors", code=1)["type"] == "FormatError"
    assert told("topics", "transform", "a.csv", "m.safetensors", "-o", "W.csv", code=1)["type"] == "FormatError"
    invoke("topics", "fit", "a.csv", "-k", 2, "--rounds", 1, "-o", "t.safetensors", "-q")
    swapped = told("topics", "transform", "t.safetensors", "a.csv", "-o", "W.csv", code=1)
    assert "partsong topics transform a.csv t.safetensors" in swapped["error"]
    assert "partsong-model" in told("info", "t.safetensors", code=1)["error"]


@pytest.mark.parametrize("command", ["fit", "show", "transform"])
def test_help_has_examples(command, invoke):
    assert f"partsong topics {command}" in invoke("topics", command, "--help").stdout


PLANTED_ADVICE = (("cat", "dog", "horse", "sheep"), ("piano", "violin", "cello", "flute"))


@pytest.fixture
def files_advice(tmp_path):
    for seed, name in enumerate("abc"):
        draw = np.random.default_rng(seed)
        with (tmp_path / f"{name}.csv").open("w", encoding="utf-8", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["text"])
            rows.writerows([" ".join(draw.choice(PLANTED_ADVICE[draw.integers(2)], 4))] for _ in range(20))
    return ["a.csv", "b.csv", "c.csv"]


@pytest.mark.parametrize(
    ("words", "ways"),
    [
        (("--method", "fednmf", "--rate", "1e9"), ("a smaller rate", "a larger batch")),
        (("--method", "fednmf", "--rate", "1e9", "--secure-aggregation"), ("a smaller rate", "a larger batch")),
        (("--method", "fednmf", "--rate", "1e9", "--weighting", "counts"), ("a smaller rate", 'weighting="tfidf"')),
        (("--method", "fednmf-mi", "--critic-rate", "1e9"), ("a smaller critic_rate", 'mi_gradient="js"')),
        (("--method", "fednmf", "--rate", "1e9", "--server", "yogi"), ("a smaller rate", "a smaller server_rate")),
    ],
)
def test_steps_that_are_too_large_are_told_with_the_ways_out(words, ways, files_advice, invoke, told):
    fit = ("topics", "fit", *files_advice, "-k", 2, "--rounds", 2)
    shown = invoke(*fit, *words, "-q", code=1).stderr
    for text in (shown, told(*fit, *words, code=1)["error"]):
        assert all(way in text for way in ways)
        assert not any(word in text for word in ("on_party_error", "checkpoint", "shards", "instead of counts"))
        assert ("tfidf" in text) == ("counts" in words)
    cured = [{"1e9": "1e-3"}.get(word, word) for word in words]
    assert told(*fit, *cured)["outcome"] == "max-rounds"


@pytest.mark.parametrize(
    ("words", "option", "code"),
    [
        (("-k", 9), "--topics", 1),
        (("-k", 2, "--min-parties", 4), "--min-parties", 1),
        (("-k", 2, "--participation", 0.5), "--participation", 1),
        (("-k", 2, "--method", "fnmf", "--secure-aggregation"), "--secure-aggregation", 2),
        (("-k", 2, "--server", "adam"), "--server", 2),
        (("-k", 2, "--method", "fednmf", "--device", "nowhere"), "--device", 2),
        (("-k", 2, "--language", "klingon"), "--language", 2),
    ],
)
def test_failures_name_the_option(words, option, code, files_advice, told):
    """With exit code 2 where no text can make it right."""
    error = told("topics", "fit", *files_advice, *words, code=code)["error"]
    assert re.match(rf"(Invalid value: |Invalid value for )?{option}\b", error), error


RUSSIAN = ("кошка собака лошадь", "кошка собака", "скрипка рояль", "скрипка рояль флейта")


def write_texts(path, lines, encoding="utf-8"):
    path.write_text("".join(f"{line}\n" for line in lines), encoding=encoding)


@pytest.mark.parametrize("asked", ["cp1252", "cp1252:replace"])
def test_words_outside_the_encoding_of_the_output_are_spelled_out(invoke, tmp_path, asked):
    write_texts(tmp_path / "ru.csv", ("text", *RUSSIAN))
    invoke("topics", "fit", "ru.csv", "-k", 1, "--language", "none", "--rounds", 2, "-o", "m.safetensors", "-q")
    done = subprocess.run(
        [sys.executable, "-m", "partsong", "topics", "show", "m.safetensors"],
        env={**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": asked, "COLUMNS": "200"},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    spelled = {word.encode("cp1252", "backslashreplace") for text in RUSSIAN[1:3] for word in text.split()}
    if asked == "cp1252":
        assert all(word in done.stdout for word in spelled)
    else:
        assert b"?????" in done.stdout
        assert b"\\u" not in done.stdout


def test_joiners_are_shown_as_they_are_and_controls_are_not(invoke, tmp_path, capsys):
    write_texts(tmp_path / "fa.csv", ("text", *2 * ("کتاب\u200cها می\u200cخواهم", "سگ گربه")))
    shown = invoke("topics", "fit", "fa.csv", "-k", 1, "--language", "none", "--rounds", 2).stdout
    assert "کتاب\u200cها" in shown
    show_topics([{"topic": 1, "share": 1.0, "coherence": None, "words": ["a\u200db", "c\u202ed\x1be"]}])
    assert "a\u200db, c\\u202ed\\x1be" in capsys.readouterr().out


def test_blank_lines_of_one_column_keep_weights_in_step(invoke, told, tmp_path):
    lines = ("text", "cats dogs cats", "", "pianos cellos", "cats dogs", "pianos cellos", "")
    write_texts(tmp_path / "a.csv", lines)
    fit = told("topics", "fit", "a.csv", "-k", 2, "-o", "m.safetensors")
    assert (fit["n_documents"], fit["empty_documents"]) == (5, 1)
    assert told("topics", "transform", "a.csv", "m.safetensors", "-o", "W.csv")["n_zero"] == 1
    W = np.loadtxt(tmp_path / "W.csv", delimiter=",", skiprows=1)
    assert (W.sum(axis=1) > 0).tolist() == [bool(line) for line in lines[1:6]]


def test_lists_that_are_not_utf_8_are_told_what_helps(told, tmp_path):
    write_texts(tmp_path / "a.csv", ("text", *2 * ("übung größe", "häuser übung")), "latin-1")
    write_texts(tmp_path / "list.txt", ("übung", "größe"), "latin-1")
    fit = ("topics", "fit", "a.csv", "-k", 1, "--language", "none", "--encoding", "latin-1", "--rounds", 2)
    for option in ("--stop-words", "--vocabulary"):
        error = told(*fit, option, "list.txt", code=1)["error"]
        assert "list.txt: not utf-8 text" in error
        assert "Save it as UTF-8: word lists" in error
        assert "--encoding" not in error
    write_texts(tmp_path / "list.txt", ("übung", "größe"))
    assert told(*fit, "--vocabulary", "list.txt")["n_words"] == 2
    assert told(*fit, "--stop-words", "list.txt")["n_words"] == 1


def test_words_left_out_for_their_length_are_told_with_the_option_that_helps(invoke, told, tmp_path):
    long = "достопримечательности"
    for name in ("a.csv", "b.csv"):
        write_texts(tmp_path / name, ("text", *(f"{text} {long}" for text in RUSSIAN)))
    fit = ("topics", "fit", "a.csv", "b.csv", "-k", 2, "--language", "none", "--rounds", 2)
    warned = invoke(*fit, "-q").stderr
    assert "more than 32 bytes: 1 at 'a', 1 at 'b'" in warned
    assert "larger max_word_bytes (in bytes" in warned
    assert long not in warned
    assert told(*fit, "--max-word-bytes", 42)["n_words"] == 1 + told(*fit)["n_words"]
    for name in ("a.csv", "b.csv"):
        write_texts(tmp_path / name, ("text", long))
    error = told(*fit, code=1)["error"]
    assert "No word meets the rule" in error
    assert "larger max_word_bytes (in bytes" in error


def test_a_column_that_differs_in_case_is_told_as_such(told, tmp_path):
    write_texts(tmp_path / "a.csv", ("Text", "cats dogs"))
    error = told("topics", "fit", "a.csv", "-k", 1, code=1)["error"]
    assert "differs only in case" in error
    assert "commas" not in error
