"""Laws of agreed vocabularies: the pooled rule comes out, and what is too rare leaves no trace that can be read."""

from __future__ import annotations

import gc
import hashlib
import re
import zlib
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from partsong.aggregation.plaintext import PlainReduction
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.engines.local import Parallel, Sequential
from partsong.errors import CompositionError, DataError, ParameterError, PartyError
from partsong.topics.agreement import encoding as cells_module
from partsong.topics.agreement import protocol as agreement_module
from partsong.topics.agreement.encoding import (
    MOST_IN_A_CELL,
    Cells,
    Packing,
    are_wide,
    fresh_key,
    hash_names,
    key_from_seed,
    session_key,
)
from partsong.topics.agreement.protocol import (
    DONE,
    TABLES,
    AgreementStep,
    LongWordsWarning,
    VocabularyAgreement,
    agree,
    secure_sum_for_words,
)
from partsong.topics.agreement.tables import BucketTables, CellSums, PartyWords, word_shards
from partsong.topics.tokenizer import Words

ALL = Words("none", shortest=1)
KEY = key_from_seed(3)
RARE, LONG_RARE = "zyzzogeton", "schwarzwaldmädchenklinik"
SHARED = ["cat", "dog", "überraschung", "extraordinarily", "hippopotamus"]


def shards_of(held, key=KEY, options=""):
    """Parties from {name: {word: documents}}."""
    return [
        Shard(
            name,
            PartyWords(tuple(sorted(words)), np.array([words[w] for w in sorted(words)], np.int64), 9, key, options),
            secret=number,
        )
        for number, (name, words) in enumerate(held.items())
    ]


def openly(held, rule, **options):
    return agree(shards_of(held), Sequential(), rule, reduction=PlainReduction(), **options)


def pooled(held, least_documents, least_parties):
    """The rule in the open: words, at how many parties they are, and in how many documents of all."""
    holders = Counter(word for words in held.values() for word, count in words.items() if count >= least_documents)
    documents = Counter()
    for words in held.values():
        documents.update(words)
    return {word: (count, documents[word]) for word, count in holders.items() if count >= least_parties}


def found(agreement):
    vocabulary = agreement.vocabulary
    return {
        word: (int(holders), int(documents))
        for word, holders, documents in zip(vocabulary.words, agreement.holders, vocabulary.documents, strict=True)
    }


letters = st.text(alphabet="abcdeé日x", min_size=1, max_size=14)
holdings = st.lists(st.dictionaries(letters, st.integers(1, 4), max_size=25), min_size=1, max_size=6).map(
    lambda listed: {f"p{number}": words for number, words in enumerate(listed)}
)


@given(holdings, st.integers(1, 3), st.data())
def test_the_pooled_rule_comes_out(held, least_documents, data):
    rule = VocabularyAgreement(
        least_documents,
        data.draw(st.integers(1, len(held))),
        words_expected=data.draw(st.sampled_from([1, 30, 500])),
        longest=60,
    )
    expected = pooled(held, rule.min_documents, rule.min_parties)
    if not expected:
        with pytest.raises(DataError, match="No word meets the rule"):
            openly(held, rule)
        return
    agreement = openly(held, rule)
    assert found(agreement) == expected
    assert agreement.vocabulary.n_documents == 9 * len(held)
    assert agreement.false_pass <= rule.false_pass


def corpus(parties=4):
    """Words that all share, words of two, and a rare one each."""
    held = {f"p{number}": dict.fromkeys(SHARED, 2) for number in range(parties)}
    for number, words in enumerate(held.values()):
        words |= {f"own{chr(97 + number)}{chr(97 + i)}": 1 + i % 3 for i in range(26)}
        words |= {f"pair{chr(97 + number // 2)}": 3}
    held["p0"] |= {RARE: 5, LONG_RARE: 2}
    return held


def test_masked_sums_give_the_same_and_so_do_threads():
    held, rule = corpus(), VocabularyAgreement(2, 2, words_expected=40)
    shards = shards_of(held)
    rounds = []
    masked = [agree(shards, engine, rule, seed=5, watch=rounds.append) for engine in (Sequential(), Parallel(2))]
    in_the_open = openly(held, rule, seed=5)
    assert found(in_the_open) == pooled(held, 2, 2)
    for one in masked:
        assert one.vocabulary == in_the_open.vocabulary
        assert found(one) == found(in_the_open)
    for last in (rounds[masked[0].exchanges - 1], rounds[-1]):
        states = last.checkpoint.parties.values()
        assert {state.words for state in states} == {in_the_open.vocabulary.words}


def test_documents_become_what_parties_hold():
    texts = {"a": ["Cat dog", "cat", ""], "b": ["dog cat cat"], "c": ["horse", None]}
    shards = word_shards(texts, ALL, fresh_key())
    agreement = agree(shards, Sequential(), VocabularyAgreement(1, 2, words_expected=5))
    assert found(agreement) == {"cat": (2, 3), "dog": (2, 2)}
    assert agreement.vocabulary.n_documents == 6


# What can be read from the traffic


def plain_hashes(word):
    text = word.encode()
    for name in ("md5", "sha1", "sha256", "sha512", "sha3_256", "blake2b", "blake2s"):
        yield hashlib.new(name, text).digest()
    yield hashlib.blake2b(text, digest_size=16).digest()
    yield zlib.crc32(text).to_bytes(4, "little") * 2


def traces(word):
    """What a word, its letters in other forms, or a hash of it without a key would look like in bytes."""
    yield from (word.encode(encoding) for encoding in ("utf-8", "utf-16-le", "utf-32-le"))
    yield np.frombuffer(word.encode(), np.uint8).astype(np.int64).tobytes()
    for digest in plain_hashes(word):
        for cut in (digest, digest[:8], digest[::-1][:8]):
            yield from (cut, cut.hex().encode())
        if len(digest) >= 16:
            yield np.frombuffer(digest[:16], np.uint8).astype(np.int64).tobytes()


def grep(messages, words):
    """Words of which some trace is in the messages; from five letters on chance does not make any."""
    haystack = b"\0".join(
        np.ascontiguousarray(array).tobytes() + name.encode()
        for message in messages
        for name, array in message.arrays.items()
    )
    return {word for word in words if any(trace in haystack for trace in traces(word))}


def seen(rounds):
    """All that passes through the server: what parties sent, and what it broadcast."""
    return [message for one in rounds for message in (*(m for _, _, m in one.traffic), one.model)]


@pytest.fixture(scope="module")
def recorded():
    held = corpus()
    shards = word_shards({name: [" ".join(words)] * 2 for name, words in held.items()}, ALL, fresh_key())
    rounds = []
    rule = VocabularyAgreement(2, 2, words_expected=40)
    return held, agree(shards, Sequential(record=True), rule, watch=rounds.append), rounds


def test_no_word_and_no_plain_hash_is_in_the_traffic(recorded):
    held, agreement, rounds = recorded
    assert RARE not in agreement.vocabulary
    assert LONG_RARE not in agreement.vocabulary
    assert set(SHARED) <= set(agreement.vocabulary.words)
    everything = {word for words in held.values() for word in words if len(word) > 4}
    messages = seen(rounds)
    assert all({name for name, _, _ in one.traffic} == set(held) for one in rounds)
    assert grep(messages, everything) == set()


def test_nor_in_what_the_server_sees_of_open_sums():
    """Without masks there is less to hide behind: hashes and pads alone keep the words from the server."""
    held, rounds = corpus(), []
    rule = VocabularyAgreement(1, 2, words_expected=40)
    agree(shards_of(held), Sequential(record=True), rule, reduction=PlainReduction(), watch=rounds.append)
    halves = [
        Message({name: array // 2 for name, array in m.arrays.items() if array.dtype == np.int64}) for m in seen(rounds)
    ]
    long = {word for words in held.values() for word in words if len(word) > 4}
    assert grep([*seen(rounds), *halves], long) == set()


@pytest.mark.parametrize("planted", [*traces(RARE)], ids=range(len([*traces(RARE)])))
def test_grep_finds_what_is_planted(recorded, planted):
    leak = Message({"body": np.frombuffer(b"\x01" * 8 + planted + b"\x02" * (-len(planted) % 8), np.uint8)})
    assert grep([*seen(recorded[2]), leak], {RARE, LONG_RARE}) == {RARE}


def test_pads_are_what_hides_agreed_words(monkeypatch):
    """With a pad of zeros the agreed words can be read from the cells, and grep says so."""
    monkeypatch.setattr(cells_module, "keystream", lambda key, purpose, count: np.zeros(count, np.uint8))
    rounds = []
    openly(corpus(), VocabularyAgreement(1, 2, words_expected=40), watch=rounds.append)
    sums = next(one.model["wide"] for one in rounds if "wide" in one.model.arrays)
    packing = Cells(0, len(sums) // 3, 32, 4).packing
    counted = packing.unpacked(sums)
    rows = packing.as_bytes(counted[:, 1:] // np.maximum(1, counted[:, :1]))
    assert "überraschung".encode() in rows.tobytes()


def guess(rounds, words, key, layout):
    """What a server with this key would take for held: words whose buckets are in use in all tables."""
    session = session_key(key, layout.seed, layout.parties)
    step = AgreementStep.from_array(VocabularyAgreement(1, 2, words_expected=400).start_server(layout)[1]["step"])
    in_use = np.ones(len(words), bool)
    for one in rounds:
        if step.stage == TABLES:
            tables = BucketTables(step.number, step.tables, step.buckets, len(layout.parties))
            total = sum(m["tables"] for _, _, m in one.traffic)
            places = tables.places(session, hash_names(session, [w.encode() for w in words]))
            in_use &= (tables.counters(total).reshape(-1)[places[:, : tables.tables]] > 0).all(axis=1)
            break
        step = AgreementStep.from_array(one.model["step"])
    return {word for word, yes in zip(words, in_use, strict=True) if yes}


def test_whoever_has_the_key_can_test_words_and_nobody_else():
    """The stated limit: a server that colludes with one party tests words; the planted bug of a public key is the same.

    Without the key a held word is hit as often as any other: by the share of buckets in use.
    """
    draws = np.random.default_rng(0)
    listed = ["".join(map(chr, draws.integers(97, 123, 8))) for _ in range(1500)]
    held = {f"p{number}": dict.fromkeys(listed[number * 200 : number * 200 + 200], 1) for number in range(3)}
    held = {name: words | {"cat": 1} for name, words in held.items()}
    rounds, rule = [], VocabularyAgreement(1, 2, words_expected=400)
    agree(shards_of(held), Sequential(record=True), rule, reduction=PlainReduction(), seed=7, watch=rounds.append)
    layout = Layout(("p0", "p1", "p2"), 0, 7)
    own, others = listed[:600], listed[600:]
    known = guess(rounds, listed, KEY, layout)
    assert set(own) <= known
    wrong = guess(rounds, listed, key_from_seed(99), layout)
    rates = [len(wrong & set(part)) / len(part) for part in (own, others)]
    assert max(rates) < 0.95
    assert abs(rates[0] - rates[1]) < 0.1
    assert len(known & set(others)) / len(others) < 0.95


def test_the_printed_probability_holds():
    """Rare words that pass, counted: at most the printed share of them, by four standard deviations."""
    draws = np.random.default_rng(1)
    listed = list({"".join(map(chr, draws.integers(97, 123, 9))) for _ in range(12_100)})
    held = {f"p{number}": dict.fromkeys(listed[4000 * number : 4000 * number + 4000], 1) for number in range(3)}
    for words in held.values():
        words |= dict.fromkeys(listed[12_000:], 1)
    shards = shards_of(held)
    rule = VocabularyAgreement(1, 2, words_expected=4000, false_pass=0.02)
    rounds = []
    agreement = agree(shards, Sequential(), rule, reduction=PlainReduction(), seed=2, watch=rounds.append)
    assert 1e-4 < agreement.false_pass <= 0.02
    left = sum(len(state.left.words) for state in rounds[-1].checkpoint.parties.values())
    passed = left - 3 * agreement.vocabulary.n_columns
    expected = 12_000 * agreement.false_pass
    assert passed <= expected + 4 * expected**0.5 + 4
    assert found(agreement) == pooled(held, 1, 2)


def test_tables_that_are_not_independent_break_the_printed_probability(monkeypatch):
    """The planted bug that the law above is for: every table with the hash of the first."""
    honest = BucketTables.places

    def same(self: BucketTables, key: bytes, names: Any) -> Any:
        first = honest(self, key, names)[:, :1]
        return first + (np.arange(self.count) * self.buckets).astype(np.int32)

    monkeypatch.setattr(BucketTables, "places", same)
    with pytest.raises(AssertionError):
        test_the_printed_probability_holds()


# Sums, cells and what can go wrong


@given(st.integers(1, 200), st.integers(1, 7), st.integers(1, 300), st.integers(0, 2**32))
def test_packed_counters_are_sums(parties, tables, buckets, seed):
    draws = np.random.default_rng(seed)
    shape = BucketTables(0, tables, buckets, parties)
    places = [
        draws.integers(0, buckets, (draws.integers(0, 5), shape.count)).astype(np.int32)
        + np.arange(shape.count, dtype=np.int32) * buckets
        for _ in range(parties)
    ]
    wide = [draws.random(len(own)) < 0.5 for own in places]
    packed = [shape.marked(own, is_wide) for own, is_wide in zip(places, wide, strict=True)]
    expected = np.zeros(shape.size, np.int64)
    for own, is_wide in zip(places, wide, strict=True):
        expected[np.unique(np.concatenate([own[:, :tables].ravel(), own[is_wide, tables:].ravel()]))] += 1
    total = sum(packed)
    assert total.max(initial=0) < 2**53
    assert all(np.abs(one).max(initial=0) <= secure_sum_for_words(parties).bound for one in packed)
    assert_array_equal(shape.counters(total).ravel(), expected)


@given(
    st.dictionaries(st.text(min_size=1, max_size=9).filter(lambda word: "\0" not in word), st.integers(1, 4)),
    st.integers(4, 60),
)
def test_cells_give_the_words_back(words, parties):
    texts = {word.encode("utf-8", "surrogatepass"): count for word, count in words.items()}
    is_wide = dict(zip(texts, are_wide(list(texts)), strict=True))
    for longest in (None, 40):
        some = {text: count for text, count in texts.items() if is_wide[text] == (longest is not None)}
        cells = Cells(1, Cells.enough_for(len(some)), longest, parties)
        held = [[text for text, count in some.items() if count > party] for party in range(4)]
        added = [cells.filled(KEY, own, hash_names(KEY, own)) for own in held]
        assert all(
            one.shape == cells.shape and np.abs(one).max() <= secure_sum_for_words(parties).bound for one in added
        )
        total = sum(added)
        assert total.max(initial=0) < 2**53
        reading = cells.read(KEY, total, partial(hash_names, KEY))
        assert reading.is_whole
        assert dict(zip(reading.words, reading.holders.tolist(), strict=True)) == some
        other = fresh_key()
        assert not some or not cells.read(other, total, partial(hash_names, other)).is_whole


@given(st.integers(1, 40), st.integers(1, 5000), st.data())
def test_packed_cells_add_up(text_bytes, parties, data):
    """The fullest cells there can be: every party with all that it may have, and codes of ones."""
    packing = Packing(text_bytes, parties)
    assert 1 <= packing.check_bytes <= packing.code_bytes - text_bytes
    assert packing.numbers == 1 or packing.code_bytes - packing.width < text_bytes + 1
    payload = np.array([data.draw(st.binary(min_size=packing.code_bytes, max_size=packing.code_bytes)), b"\xff" * 50])
    payload = np.array([list(one[: packing.code_bytes].ljust(packing.code_bytes, b"\0")) for one in payload], np.uint8)
    codes = packing.as_numbers(payload)
    assert_array_equal(packing.as_bytes(codes), payload)
    table = np.concatenate([np.full((2, 1), MOST_IN_A_CELL), MOST_IN_A_CELL * codes], axis=1)
    own = packing.packed(table)
    assert own.max() <= secure_sum_for_words(parties).bound
    assert own.max() * parties < 2**53
    assert_array_equal(packing.unpacked(own * parties), table * parties)


def test_cells_that_are_too_few_are_asked_for_again(monkeypatch):
    sizes = iter([1, 1, 30, 30, 400, 400])
    monkeypatch.setattr(Cells, "enough_for", staticmethod(lambda words: next(sizes)))
    held = corpus()
    agreement = openly(held, VocabularyAgreement(1, 2, words_expected=40))
    assert found(agreement) == pooled(held, 1, 2)
    assert agreement.exchanges > 4


def test_an_agreement_that_can_never_be_read_ends(monkeypatch):
    monkeypatch.setattr(Cells, "enough_for", staticmethod(lambda words: 1))
    with pytest.raises(PartyError, match="could not be decoded"):
        openly(corpus(), VocabularyAgreement(1, 2, words_expected=40))


@pytest.mark.parametrize("change", [{"key": fresh_key()}, {"options": "other"}])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_party_with_another_key_or_other_options_is_noticed(change, is_masked):
    held = corpus()
    shards = shards_of(held)
    shards[2] = shards_of(held, **{"key": KEY, "options": "", **change})[2]
    reduction = None if is_masked else PlainReduction()
    with pytest.raises(PartyError, match="different key or different word options") as caught:
        agree(shards, Sequential(), VocabularyAgreement(1, 2), reduction=reduction)
    assert not any(word in str(caught.value) for word in (*SHARED, RARE))


def test_a_sum_without_a_party_is_refused():
    rule, shards = VocabularyAgreement(1, 2, words_expected=40), shards_of(corpus())
    for absent in ({0: frozenset({"p1"})}, {2: frozenset({"p1"})}):
        schedule = Schedule(9, 1, absent=absent)
        with pytest.raises(PartyError, match="missing from a sum"):
            list(Sequential().run(rule, shards, schedule, reduction=PlainReduction()))
    with pytest.raises((PartyError, ParameterError)):
        list(
            Sequential().run(rule, shards, Schedule(24, 1, dropouts={2: {"p1": 0}}), reduction=secure_sum_for_words(4))
        )


def test_parties_without_any_word_take_part():
    held = corpus() | {"empty": {}, "stranger": {"nobodyelse": 4}}
    agreement = openly(held, VocabularyAgreement(1, 2, words_expected=40))
    assert found(agreement) == pooled(held, 1, 2)


def test_words_that_are_too_long_stay_at_home():
    held = corpus() | {"p9": {"ü" * 20: 3, "ok": 1}, "p8": {"ü" * 20: 3, "ok": 1}}
    with pytest.warns(LongWordsWarning, match=r"more than 32 bytes: 1 at 'p8', 1 at 'p9'\. .* larger max_word_bytes"):
        agreement = openly(held, VocabularyAgreement(1, 2, words_expected=40))
    assert found(agreement) == {word: n for word, n in pooled(held, 1, 2).items() if word != "ü" * 20}
    longer = openly(held, VocabularyAgreement(1, 2, words_expected=40, longest=40))
    assert found(longer) == pooled(held, 1, 2)
    assert set(longer.too_long.values()) == {0}
    assert "left out because" not in longer.summary()


def test_words_left_out_for_their_length_are_counted_at_their_party_and_nothing_of_them_is_sent():
    long = {"ж" * 17: 2, "य" * 11: 2, "z" * 33: 2, "ж" * 18: 1}
    fitting = {"ж" * 16: 2, "य" * 10: 2, "z" * 32: 2}
    without = {"a": {"cat": 2} | fitting, "b": {"cat": 2} | fitting, "c": {}}
    held = without | {"a": without["a"] | long}
    rule, models = VocabularyAgreement(2, 2, words_expected=40), []
    with pytest.warns(LongWordsWarning):
        agreement = openly(held, rule, seed=5, watch=lambda done: models.append((done.model.arrays, done.bytes_up)))
    assert agreement.too_long == {"a": 3, "b": 0, "c": 0}
    assert agreement.summary().endswith("have more than 32 bytes: 3 at 'a'.")
    assert not any(word in agreement.summary() for word in (*long, *fitting))
    others = []
    same = openly(without, rule, seed=5, watch=lambda done: others.append((done.model.arrays, done.bytes_up)))
    assert found(same) == found(agreement) == dict.fromkeys(("cat", *fitting), (2, 4))
    for (arrays, sent), (expected, expected_sent) in zip(models, others, strict=True):
        assert sent == expected_sent
        assert arrays.keys() == expected.keys()
        for name in arrays:
            assert_array_equal(arrays[name], expected[name])


def test_where_no_word_is_short_enough_the_error_says_so():
    rule = VocabularyAgreement(1, 2, words_expected=40)
    with pytest.raises(DataError, match=r"No word meets the rule.* 2 words .* larger max_word_bytes"):
        openly({"a": {"ж" * 17: 2, "ж" * 18: 2}, "b": {"ж" * 17: 2}}, rule)
    with pytest.raises(DataError, match="No word meets the rule") as caught:
        openly({"a": {"cat": 2}, "b": {"dog": 2}}, rule)
    assert "longest" not in str(caught.value)


def test_no_word_is_shown(recorded):
    _, agreement, rounds = recorded
    last = rounds[-1]
    shown = " ".join(
        map(
            repr,
            (agreement, agreement.summary(), last.checkpoint.server, *last.checkpoint.parties.values(), last.metrics),
        )
    )
    assert not any(word in shown for word in (*SHARED, RARE))
    assert re.search(r"at most \d\.\de-\d+", agreement.summary())
    assert all(word not in repr(shard) for shard in shards_of(corpus()) for word in SHARED)


def test_columns_come_in_an_order_that_needs_the_key():
    held, rule = corpus(), VocabularyAgreement(1, 2, words_expected=40)
    one, same = (openly(held, rule, seed=4).vocabulary.words for _ in range(2))
    other = agree(shards_of(held, key_from_seed(4)), Sequential(), rule, reduction=PlainReduction(), seed=4)
    assert one == same
    assert set(one) == set(other.vocabulary.words)
    assert one != other.vocabulary.words
    assert list(one) != sorted(one)


def test_rules_out_of_range():
    for options in ({"min_documents": 0}, {"min_parties": 0}, {"longest": 0}, {"false_pass": 0}, {"false_pass": 1.5}):
        with pytest.raises(ParameterError):
            VocabularyAgreement(**options)
    with pytest.raises(ParameterError, match=r"min_parties must be at most 4.*got 9"):
        openly(corpus(), VocabularyAgreement(1, 9))
    with pytest.raises(ParameterError, match="bytes"):
        PartyWords.of(["a"], ALL, b"short")
    with pytest.raises(CompositionError, match="word_shards"):
        VocabularyAgreement().local(
            Shard("a", np.ones((2, 0))), None, Message({"step": AgreementStep(0, 0).to_array()})
        )


def test_tables_beyond_measure_are_refused(monkeypatch):
    monkeypatch.setattr(agreement_module, "MOST_COUNTERS", 100)
    monkeypatch.setattr(
        AgreementStep, "from_request", classmethod(lambda cls, model, last, party: cls.from_array(model["step"]))
    )
    with pytest.raises(ParameterError, match="min_documents"):
        openly(corpus(), VocabularyAgreement(1, 2, words_expected=40))


@settings(max_examples=5)
@given(st.integers(0, 2**63 - 1))
def test_many_words_whatever_was_expected(seed):
    """A first table that is far too small, or too large, costs exchanges and nothing else."""
    draws = np.random.default_rng(seed)
    listed = sorted({"".join(map(chr, draws.integers(97, 123, draws.integers(2, 16)))) for _ in range(3000)})
    held = {f"p{number}": dict.fromkeys(draws.choice(listed, 900, replace=False).tolist(), 1) for number in range(5)}
    for expected in (1, 100_000):
        agreement = openly(held, VocabularyAgreement(1, 3, words_expected=expected))
        assert found(agreement) == pooled(held, 1, 3)


def sums_of(words, key=KEY, parties=4):
    """Cells of words that all of the parties hold."""
    narrow, wide = (Cells(1, Cells.enough_for(len(words)), longest, parties) for longest in (None, 40))
    filled = narrow.filled(key, words, hash_names(key, words)), wide.filled(key, [], hash_names(key, []))
    return CellSums(narrow, wide, tuple(parties * one for one in filled))


def test_parties_in_one_process_read_a_sum_once_and_forget_it_with_its_last_holder(monkeypatch):
    readings = []
    honest = Cells.read
    monkeypatch.setattr(Cells, "read", lambda self, *given: (readings.append(self), honest(self, *given))[1])
    sums = sums_of([b"cat", b"dog"])
    one, other = (sums.read(KEY, 2) for _ in range(2))
    assert one is other
    assert sorted(one.words) == ["cat", "dog"]
    assert len(readings) == 2
    assert sums.read(fresh_key(), 2) is None
    assert sums_of([b"cat", b"cow"]).read(KEY, 2) is not one
    assert sums.read(KEY, 5).words == ()
    before = len(readings)
    del one, other
    gc.collect()
    assert sums.read(KEY, 2) is not None
    assert len(readings) == before + 2


def test_a_sum_that_lacks_a_word_that_passed_is_noticed(monkeypatch):
    """A server that takes a word out of the sum of cells (it cannot, without the key) would be told."""
    honest = Cells.filled
    monkeypatch.setattr(Cells, "filled", lambda self, key, words, names: honest(self, key, [], names[:0]))
    with pytest.raises(PartyError, match="missing from the sum"):
        openly(corpus(), VocabularyAgreement(1, 2, words_expected=40))


# A server that lies


def lying(held, change, rule=None):
    """The agreement with a server that changes what it broadcasts; parties are asked in turn."""
    rule, shards = rule or VocabularyAgreement(1, 2, words_expected=40), shards_of(held)
    layout = Layout(tuple(sorted(held)), 0, 1)
    server, model = rule.start_server(layout)
    states = {shard.name: rule.start_party(shard, layout) for shard in shards}
    for _ in range(9):
        uploads = []
        for shard in shards:
            states[shard.name], upload = rule.local(shard, states[shard.name], model)
            uploads.append(upload)
        total = {name: sum(upload[name] for upload in uploads) for name in uploads[0].arrays}
        server, model = rule.finish(server, Message(total, float(len(shards))))
        if AgreementStep.from_array(model["step"]).stage == DONE:
            return states
        model = Message({**model.arrays, **change(model, AgreementStep.from_array(model["step"]))})
    raise AssertionError


def test_an_honest_server_is_believed():
    assert set(lying(corpus(), lambda model, step: {})["p0"].words) == set(pooled(corpus(), 1, 2))


def test_a_server_that_lets_all_words_pass_is_found_out():
    """Too late for the words, which parties have then seen of each other; the server reads none of them."""

    def all_pass(model, step):
        bits = {"bitmap": np.full_like(model["bitmap"], 255)} if "bitmap" in model.arrays else {}
        roomy = {} if step.stage == TABLES else {"step": replace(step, narrow=400, wide=400).to_array()}
        return bits | roomy

    with pytest.raises(PartyError, match="the server ignored its counts"):
        lying(corpus(), all_pass)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model, step: {"step": replace(step, number=step.number - 1).to_array()}, "answered once, in order"),
        (lambda model, step: {"step": replace(step, number=step.number + 1).to_array()}, "answered once, in order"),
        (lambda model, step: {"step": replace(step, stage=9).to_array()}, "answered once, in order"),
        (lambda model, step: {"step": np.zeros(2, np.int64)}, "order"),
        (lambda model, step: {"step": np.zeros(9, np.int64)}, "cannot be read"),
        (lambda model, step: {"step": np.array([np.nan] * 6)}, "cannot be read"),
        (lambda model, step: {"step": replace(step, buckets=1 << 40).to_array()}, "of invalid size"),
        (lambda model, step: {"step": replace(step, narrow=-1).to_array()}, "of invalid size"),
        (
            lambda model, step: {"bitmap": np.zeros(3, np.uint8)} if "bitmap" in model.arrays else {},
            "bitmap does not match",
        ),
        (
            lambda model, step: {"bitmap": model["bitmap"] * 1.0} if "bitmap" in model.arrays else {},
            "bitmap does not match",
        ),
        (
            lambda model, step: {"wide": model["wide"][1:]} if "wide" in model.arrays else {},
            "sums of words do not match",
        ),
    ],
)
def test_what_no_honest_server_asks_for_is_refused(change, told):
    """A step that is asked for twice would be two answers under one pad."""
    with pytest.raises(PartyError, match=told) as caught:
        lying(corpus(), change)
    assert not any(word in str(caught.value) for word in (*SHARED, RARE))


def test_an_agreement_with_the_same_key_later_shares_no_pad_and_no_place():
    held, rule = corpus(), VocabularyAgreement(1, 2, words_expected=40)
    told = []
    for seed in (1, 2):
        agree(shards_of(held), Sequential(), rule, reduction=PlainReduction(), seed=seed, watch=told.append)
    sums = [one.model["narrow"] for one in told if "narrow" in one.model.arrays]
    assert len(sums) == 2
    size = min(map(len, sums))
    codes = [set(one[:size, 1][one[:size, 0] > 0].tolist()) for one in sums]
    assert not codes[0] & codes[1]
