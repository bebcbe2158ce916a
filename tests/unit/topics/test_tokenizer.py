"""From texts to words: the same words however a text was typed, and nothing lost when options are saved."""

import pickle
import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partsong.errors import DataTypeError, FormatError, ParameterError
from partsong.topics import tokenizer
from partsong.topics.tokenizer import LETTERS, LISTS, Words, find_runs, marks, stop_words_of
from partsong.topics.vocabulary import Vocabulary


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


WRITTEN = {
    "devanagari": "हिन्दी भाषा में लिखा गया पाठ",
    "tamil": "தமிழ் மொழியில் எழுதிய உரை",
    "arabic with harakat": "كَتَبَ الطَّالِبُ رِسَالَةً",
    "hebrew with points": "שָׁלוֹם עֲלֵיכֶם",
    "thai, cut by hand": "ภาษา ไทย กิน ที่",
    "persian with ZWNJ": "می\u200cخواهم کتاب\u200cها",
    "sinhala with ZWJ": "ශ්\u200dරී ලංකා",
    "bengali, ZWJ before a mark": "র\u200d্যাব হিসাব",
    "latin without a composed letter": "x̌amu q̓a",
    "above U+FFFF": "𑄌𑄋𑄴𑄟𑄳𑄦 𑄌𑄋𑄴",
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN.keys())
def test_marks_belong_to_the_word_that_they_stand_in(text):
    normal = unicodedata.normalize("NFC", text)
    assert Words("none").of(f"({text}), 12 «{text}»!") == 2 * normal.split()
    assert Words("none", stop_words=(text.split()[0],)).of(text) == normal.split()[1:]


def test_marks_are_those_of_unicode_and_each_is_found():
    every = [place for place in range(sys.maxunicode + 1) if unicodedata.category(chr(place)) in ("Mn", "Mc")]
    assert list(marks()) == every
    assert [place for place in every if find_runs(f"a{chr(place)}b") != [f"a{chr(place)}b"]] == []


def test_marks_and_joiners_without_a_letter_are_no_words():
    assert find_runs("\u0301 \u093e12\u0301 \u200d❤\ufe0f") == []
    assert find_runs("\u0301ab\u200d cd\u200c! \u200def") == ["ab", "cd", "ef"]
    assert find_runs("ab\u200d\u200ccd e\u0301\u0302") == ["ab\u200d\u200ccd", "e\u0301\u0302"]


def test_marks_count_as_characters():
    assert Words("none").of("में ग घी") == ["में", "घी"]
    assert Words("none", shortest=3).of("में घी") == ["में"]


@given(st.text(max_size=60).filter(lambda text: not set(map(ord, text)) & set(marks())))
def test_texts_without_marks_and_joiners_are_split_by_the_pattern_alone(text):
    plain = text.replace("\u200c", "").replace("\u200d", "")
    assert find_runs(plain) == re.findall(LETTERS, plain)


def test_marks_are_looked_up_when_a_text_needs_them():
    for made in (tokenizer.marks, tokenizer._likely, tokenizer._with_marks):
        made.cache_clear()
    assert Words("none").of("Größe – “quoted” слово λόγος €5") == ["größe", "quoted", "слово", "λόγος"]
    assert marks.cache_info().misses == 0
    assert Words("none").of("घी") == ["घी"]
    assert marks.cache_info().misses == 1


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


def test_a_list_that_is_not_utf_8_has_a_way_out_that_works(tmp_path):
    path = tmp_path / "own.txt"
    path.write_bytes("für\nkatze\n".encode("latin-1"))
    for read in (stop_words_of, Vocabulary.of_file):
        with pytest.raises(FormatError, match=r"byte position 1\. Save it as UTF-8: word lists") as caught:
            read(path)
        assert "encoding=" not in str(caught.value)
        assert "für" not in str(caught.value)
    path.write_text(path.read_text(encoding="latin-1"), encoding="utf-8")
    assert stop_words_of(path) == ("für", "katze")
    assert Vocabulary.of_file(path).words == ("für", "katze")


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
