"""From texts to words: the same words however a text was typed, and nothing lost when options are saved."""

import pickle
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partsong.errors import DataTypeError, FormatError, ParameterError
from partsong.text.stop_words import LISTS
from partsong.text.words import Words, stop_words_of


def test_words_are_runs_of_letters_in_lower_case():
    assert Words("none").of("Two words, 3 numbers: x1 and Größe_neu") == [
        "two",
        "words",
        "numbers",
        "and",
        "größe",
        "neu",
    ]
    assert Words("none", shortest=4).of("one three") == ["three"]
    assert Words("none", lower=False).of("One") == ["One"]
    assert Words("none", pattern=r"#(\w+)").of("#Tag and word") == ["tag"]
    assert Words("english").of("the cat isn't here") == ["cat"]


@given(st.text(max_size=60))
def test_composed_and_decomposed_letters_are_the_same_words(text):
    for words in (Words("none"), Words("none", strip_accents=True)):
        assert words.of(unicodedata.normalize("NFD", text)) == words.of(unicodedata.normalize("NFC", text))


def test_accents_can_be_stripped_from_stop_words_too():
    assert Words("german", strip_accents=True).of("Übermut über für Größe") == ["ubermut", "große"]
    assert Words("french", strip_accents=True).of("été où naïve") == ["naive"]


@pytest.mark.parametrize("language", [name for name in LISTS if name != "none"])
def test_stop_words_are_words(language):
    listed = LISTS[language]
    assert len(listed) > 100
    every = Words("none", shortest=1)
    assert all(every.of(word) == [word] for word in listed)
    assert Words(language, shortest=1).of(" ".join(listed)) == []


def test_stop_words_of_a_file_are_added(tmp_path):
    (tmp_path / "own.txt").write_text("Katze\n\n  hund \n", encoding="utf-8")
    own = stop_words_of(tmp_path / "own.txt")
    assert own == ("Katze", "hund")
    assert Words("german", own).of("die Katze und der Hund und das Pferd") == ["pferd"]


@given(st.sampled_from(sorted(LISTS)), st.lists(st.text(max_size=5), max_size=4), st.integers(1, 5), st.booleans())
def test_options_survive_saving(language, stop_words, shortest, flag):
    words = Words(language, tuple(stop_words), shortest=shortest, strip_accents=flag)
    text = "The Größe of it, naïve and über " + " ".join(stop_words)
    for again in (Words.from_json(words.to_json()), pickle.loads(pickle.dumps(words))):
        assert again == words
        assert again.of(text) == words.of(text)


@pytest.mark.parametrize("text", ["", "[]", '{"language": "klingon"}', '{"other": 1}', '{"shortest": "x"}'])
def test_damaged_options_are_refused(text):
    with pytest.raises(FormatError):
        Words.from_json(text)


def test_options_out_of_range():
    for options in ({"language": "klingon"}, {"shortest": 0}, {"pattern": "("}, {"pattern": "(a)(b)"}):
        with pytest.raises(ParameterError):
            Words(**options)
    with pytest.raises(DataTypeError):
        Words(stop_words="the")
