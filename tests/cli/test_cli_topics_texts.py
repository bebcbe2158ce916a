"""`partsong topics` and texts as people have them: other scripts, other encodings, blank lines."""

import os
import subprocess
import sys

import numpy as np
import pytest

from partsong.cli.topics import show_topics

RUSSIAN = ("кошка собака лошадь", "кошка собака", "скрипка рояль", "скрипка рояль флейта")


def write(path, lines, encoding="utf-8"):
    path.write_text("".join(f"{line}\n" for line in lines), encoding=encoding)


@pytest.mark.parametrize("asked", ["cp1252", "cp1252:replace"])
def test_words_outside_the_encoding_of_the_output_are_spelled_out(invoke, tmp_path, asked):
    write(tmp_path / "ru.csv", ("text", *RUSSIAN))
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
    write(tmp_path / "fa.csv", ("text", *2 * ("کتاب\u200cها می\u200cخواهم", "سگ گربه")))
    shown = invoke("topics", "fit", "fa.csv", "-k", 1, "--language", "none", "--rounds", 2).stdout
    assert "کتاب\u200cها" in shown
    show_topics([{"topic": 1, "share": 1.0, "coherence": None, "words": ["a\u200db", "c\u202ed\x1be"]}])
    assert "a\u200db, c\\u202ed\\x1be" in capsys.readouterr().out


def test_blank_lines_of_one_column_keep_weights_in_step(invoke, told, tmp_path):
    lines = ("text", "cats dogs cats", "", "pianos cellos", "cats dogs", "pianos cellos", "")
    write(tmp_path / "a.csv", lines)
    fit = told("topics", "fit", "a.csv", "-k", 2, "-o", "m.safetensors")
    assert (fit["n_documents"], fit["empty_documents"]) == (5, 1)
    assert told("topics", "transform", "a.csv", "m.safetensors", "-o", "W.csv")["n_zero"] == 1
    W = np.loadtxt(tmp_path / "W.csv", delimiter=",", skiprows=1)
    assert (W.sum(axis=1) > 0).tolist() == [bool(line) for line in lines[1:6]]


def test_lists_that_are_not_utf_8_are_told_what_helps(told, tmp_path):
    write(tmp_path / "a.csv", ("text", *2 * ("übung größe", "häuser übung")), "latin-1")
    write(tmp_path / "list.txt", ("übung", "größe"), "latin-1")
    fit = ("topics", "fit", "a.csv", "-k", 1, "--language", "none", "--encoding", "latin-1", "--rounds", 2)
    for option in ("--stop-words", "--vocabulary"):
        error = told(*fit, option, "list.txt", code=1)["error"]
        assert "list.txt: its bytes are not utf-8 text" in error
        assert "Save it as UTF-8: lists of words" in error
        assert "--encoding" not in error
    write(tmp_path / "list.txt", ("übung", "größe"))
    assert told(*fit, "--vocabulary", "list.txt")["n_words"] == 2
    assert told(*fit, "--stop-words", "list.txt")["n_words"] == 1


def test_words_left_out_for_their_length_are_told_with_the_option_that_helps(invoke, told, tmp_path):
    long = "достопримечательности"
    for name in ("a.csv", "b.csv"):
        write(tmp_path / name, ("text", *(f"{text} {long}" for text in RUSSIAN)))
    fit = ("topics", "fit", "a.csv", "b.csv", "-k", 2, "--language", "none", "--rounds", 2)
    warned = invoke(*fit, "-q").stderr
    assert "more than 32 bytes: 1 at 'a', 1 at 'b'" in warned
    assert "larger max_word_bytes, in bytes" in warned
    assert long not in warned
    assert told(*fit, "--max-word-bytes", 42)["n_words"] == 1 + told(*fit)["n_words"]
    for name in ("a.csv", "b.csv"):
        write(tmp_path / name, ("text", long))
    error = told(*fit, code=1)["error"]
    assert "No word meets the rule" in error
    assert "larger max_word_bytes, in bytes" in error


def test_a_column_that_differs_in_case_is_told_as_such(told, tmp_path):
    write(tmp_path / "a.csv", ("Text", "cats dogs"))
    error = told("topics", "fit", "a.csv", "-k", 1, code=1)["error"]
    assert "upper and lower case alone" in error
    assert "commas" not in error
