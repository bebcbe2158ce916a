"""Runs over texts: sites agree on words first, by sums; nobody learns a rare one, and the model is that of one."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
from contextlib import ExitStack
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partsong import FederatedTopicModel
from partsong.core.interfaces import Message
from partsong.errors import DataError, ParameterError, PartyError, SiteLost, SiteRefused
from partsong.federation.chain import Chain
from partsong.federation.columns import find_columns, hashed, labels_of
from partsong.federation.experiment import Experiment, TextRule
from partsong.federation.policy import Policy, PrivacyBudget, WordPolicy
from partsong.federation.server.state import Journal
from partsong.federation.setup.credentials import SharedKey
from partsong.federation.site.plan import SiteData
from partsong.federation.site.service import Site
from partsong.federation.site.state import RunFolder
from partsong.federation.transports.base import InProcess, NoReply
from partsong.federation.wire import Kind, Nonce, Refusal, Reply, Request, RequestRefused, load_state, save_state
from partsong.topics.shared_vocabulary import prepare
from partsong.topics.tokenizer import Words
from tests.federation.helpers import (
    KEY,
    NAMES,
    RARE,
    SHARED,
    WORDS,
    Federation,
    Haunted,
    Killed,
    Killer,
    TextFederation,
    model_of,
    secret_of,
    texts_of,
)
from tests.federation.site_process import mailbox_of
from tests.federation.test_files import answering, folders_of
from tests.federation.test_site import Recorded


def exact(**words):
    return Experiment("exact", 3, 2, seed=5, words={**WORDS, **words})


def code_of(reply):
    answer = Reply.from_bytes(reply).answer
    return answer.code if isinstance(answer, Refusal) else None


class Twice(Recorded):
    """Asks for everything twice, and for every step of an agreement once more with another model under its nonce."""

    __slots__ = ()

    def ask(self, requests, timeout):
        replies = Recorded.ask(self, requests, timeout)
        for name, request in requests.items():
            assert self.sites[name](request) == replies[name]
            read = Request.from_bytes(request)
            if read.nonce.kind is Kind.WORK and read.nonce.run.endswith(".words"):
                step = read.body["step"] + np.array([0, 0, 0, 1, 1, 1])
                other = Message({**read.body.arrays, "step": step}, read.body.weight)
                changed = Request(name, read.nonce, other, read.note, read.seen)
                assert code_of(self.sites[name](changed.to_bytes())) == "conflict"
        return replies


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that is over, and all that was said in it; tests ask its sites for more, and change nothing."""
    words = {"min_documents": 2, "max_df": 0.6, "max_words": 6}
    policies = dict.fromkeys(NAMES, Policy(secure_aggregation=True, maximum_runs=1))
    experiment = Experiment("exact", 3, 2, seed=1, secure_aggregation=True, words=words)
    federation = TextFederation(tmp_path_factory.mktemp("finished"), experiment, policies=policies)
    transport = Twice(federation.transport().sites)
    return federation, list(federation.rounds(transport)), transport.asked


def test_words_and_model_are_those_of_one_process(finished):
    """Where everything was asked for twice, and answered with the same bytes."""
    federation, rounds, _ = finished
    require_same(federation, rounds)


@pytest.mark.slow
@pytest.mark.parametrize(
    "told",
    [
        {"method": "fnmf", "words": {"stop_words": ["vein"], "shortest": 5}},
        {"method": "fedlda", "secure_aggregation": True, "words": {}},
        {"method": "fednmf", "epochs": 2, "words": {"max_words": 6}},
    ],
)
def test_words_and_model_are_those_of_one_process_for_other_methods(tmp_path, told):
    federation = TextFederation(tmp_path, Experiment.from_table({"rank": 2, "rounds": 3, "seed": 2, **told}))
    require_same(federation, list(federation.rounds()))


def require_same(federation, rounds):
    assert [model_of(done) for done in rounds] == [model_of(done) for done in federation.in_process()]
    words = federation.experiment.text_rule.rule.pruned(federation.agreed_in_process()).words
    assert all(federation.vocabulary(name) == list(words) for name in federation.names)
    labels = labels_of(federation.record().columns, federation.run, SHARED)
    assert len(labels) == len(words)
    assert all(label.startswith("#") for label in labels)


@pytest.mark.parametrize("words", [{"min_documents": 2}, {"max_df": 0.6, "max_words": 6, "weighting": "counts"}])
def test_rows_are_those_of_the_estimator_but_for_the_order_of_words(tmp_path, words):
    federation = TextFederation(tmp_path, Experiment("exact", 2, 1, words=words))
    rule, texts = federation.experiment.text_rule, {name: texts_of(name) for name in NAMES[:3]}
    prepared = prepare(rule.rule, texts, rule.words, 0, rule.weighting)
    weighing = rule.weighing(federation.agreed_in_process())
    order = [prepared.weighing.vocabulary.column(word) for word in weighing.names]
    assert sorted(order) == list(range(len(prepared.weighing.names)))
    for name, counted in prepared.rows.items():
        own = federation.site(name).texts.counted(weighing).rows
        assert np.array_equal(own.toarray(), counted.rows.astype(np.float64).toarray()[:, order])


def test_longer_words_take_part_where_the_rule_says_so():
    assert TextRule.from_table({}, "exact").rounds.longest == 32
    longer = TextRule.from_table({"max_word_bytes": 64}, "exact")
    assert longer.rounds.longest == 64
    assert longer.key != TextRule.from_table({}, "exact").key


def test_topics_that_a_site_keeps_take_new_texts_as_they_took_its_own(finished):
    federation, _, _ = finished
    for name in federation.names:
        place = federation.folder / name / "results" / "run-1"
        found = FederatedTopicModel.load(place / "topics.safetensors").transform(list(texts_of(name)))
        assert np.allclose(found, np.load(place / "weights.npy"), rtol=1e-6, atol=1e-9)


def searched(word, runs):
    """The word, and what whoever has no key could make of it."""
    plain = word.encode()
    yield plain
    for run in (*runs, ""):
        yield hashed([word], run)[0].tobytes()
        yield hashed([word], run)[0].tobytes().hex().encode()
    for name in ("sha256", "sha1", "md5", "blake2b", "blake2s"):
        digest = hashlib.new(name, plain).digest()
        yield from (digest, digest[:16], digest.hex().encode())
    yield from (hashlib.blake2b(plain, digest_size=size).digest() for size in (8, 16, 32))


def test_no_word_nor_its_hash_reaches_the_server_or_a_log(finished):
    federation, _, asked = finished
    heard = [bytes(reply) for _, _, reply in asked]
    heard += [path.read_bytes() for path in (federation.folder / "server").rglob("*") if path.is_file()]
    for name in federation.names:
        heard += [(federation.folder / name / log).read_bytes() for log in ("audit.jsonl", "ledger.jsonl")]
        heard.append(federation.log(name).encode())
    assert len(asked) > 40
    everything = b"\n".join(heard)
    for word in (*(RARE[name] for name in federation.names), *SHARED, *texts_of("east")):
        for trace in searched(word, ("run-1", "run-1.words")):
            assert trace not in everything
    for secret in (KEY.secret, KEY.key_for("words"), KEY.key_for("columns")):
        assert secret not in everything
    kept = federation.folder / "east" / "runs" / "run-1.words" / "start"
    assert RARE["east"].encode() in kept.read_bytes(), "what is searched for would be found"
    assert not any(RARE[name] in federation.vocabulary("east") for name in federation.names)


def ran_to_the_end(federation, killer, victim):
    transport, rounds = Haunted(federation, killer, victim), {}
    for _ in range(3):
        try:
            killer.is_awake = victim == "server" and killer.at is not None and killer.count < killer.at
            rounds |= {done.index: done for done in federation.rounds(transport)}
            break
        except Killed:
            transport.deaths.append("server")
    killer.is_awake = False
    return transport.deaths, rounds


def require_unharmed(federation):
    """The same words and bits; one line of the ledger for each exchange; one payload for each nonce."""
    assert model_of(federation.record()) == model_of(federation.in_process()[-1])
    words = list(federation.agreed_in_process().words)
    for name in federation.names:
        assert federation.vocabulary(name) == words
        charged = [line["attempt"] for line in federation.site(name).ledger.chain.lines()]
        of_words = [attempt for attempt in charged if attempt[0] == "run-1.words"]
        assert of_words == [["run-1.words", index, 0] for index in range(len(of_words))]
        assert charged == of_words + [["run-1", index, 0] for index in range(2)]
        sent = {}
        for line in Chain(federation.site(name).audit.path).lines():
            nonce = (line["run"], line["round"], line["attempt"], line["kind"], line["phase"])
            assert sent.setdefault(nonce, line["sha256"]) == line["sha256"]


def kill_at(monkeypatch, folder, victim, points):
    for at in points:
        federation = TextFederation(folder / f"at-{at}")
        with monkeypatch.context() as patched:
            killer = Killer(patched, at)
            deaths, _ = ran_to_the_end(federation, killer, victim)
        if not deaths:
            return at
        require_unharmed(federation)
    return None


@pytest.mark.parametrize(("victim", "points"), [("north", (200,)), ("server", (110,))])
def test_a_kill_between_two_writes_loses_nothing(monkeypatch, tmp_path, victim, points):
    assert kill_at(monkeypatch, tmp_path, victim, points) is None


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["north", "server"])
def test_a_kill_between_any_two_writes_loses_nothing(monkeypatch, tmp_path, victim):
    """At every seventh point, to the end of the run."""
    assert kill_at(monkeypatch, tmp_path, victim, itertools.count(1, 7)) > 220


class Losing(InProcess):
    """What north answers to its second step is lost."""

    __slots__ = ()

    def ask(self, requests, timeout):
        nonce = Request.from_bytes(next(iter(requests.values()))).nonce
        is_lost = (nonce.kind, nonce.round) == (Kind.WORK, 1)
        return {**InProcess.ask(self, requests, timeout), **({"north": NoReply("cut off")} if is_lost else {})}


def test_an_agreement_waits_for_all_and_goes_on_over_another_transport(tmp_path):
    federation = TextFederation(tmp_path, replace(exact(), on_party_error="skip"))
    with pytest.raises(SiteLost, match="'north' did not reply in round 1"):
        list(federation.rounds(Losing(federation.transport().sites)))
    with ExitStack() as sites:
        for name in federation.names:
            sites.enter_context(answering(mailbox_of(tmp_path, name), federation.site(name).answer))
        list(federation.rounds(folders_of(tmp_path)))
    require_unharmed(federation)


@pytest.mark.parametrize(
    ("key", "code", "way_out"),
    [(None, "no-shared-key", "partsong federation shared-key"), (SharedKey(bytes(16)), "shared-key", "--shared-key")],
)
def test_a_site_without_the_key_of_the_others_refuses(tmp_path, key, code, way_out):
    federation = TextFederation(tmp_path, keys={"north": key})
    with pytest.raises(SiteRefused, match=f"'north' refuses .*'{code}'"):
        list(federation.rounds())
    assert way_out in federation.log("north")
    assert federation.log("south") == ""
    assert federation.record() is None


def test_sites_that_were_told_other_rules_find_out_before_a_word_is_told(tmp_path):
    """A server that asks one site for less than the others."""

    def change(name, request):
        read = Request.from_bytes(request)
        told = read.note.get("experiment")
        if name != "north" or told is None:
            return request
        told["words"]["min_documents"] = 1
        return Request(name, read.nonce, read.body, read.note, read.seen).to_bytes()

    federation = TextFederation(tmp_path)
    transport = Recorded(federation.transport().sites, change)
    with pytest.raises(PartyError, match=r"'north', phase 0 .*other settings"):
        list(federation.rounds(transport))
    phases = {nonce.phase for nonce in (Request.from_bytes(request).nonce for _, request, _ in transport.asked)}
    assert phases == {0}, "no table has been sent, masked or not"


def test_every_sum_of_an_agreement_is_over_all_sites(tmp_path):
    def change(name, request):
        read = Request.from_bytes(request)
        if read.nonce.kind is not Kind.WORK or name == "west":
            return request
        return Request(
            name, read.nonce, read.body, {**read.note, "participants": list(NAMES[:3])}, read.seen
        ).to_bytes()

    federation = TextFederation(tmp_path, names=NAMES)
    with pytest.raises(SiteRefused, match="'parties'"):
        list(federation.rounds(Recorded(federation.transport().sites, change)))
    assert "at least 4 are needed" in federation.log("east")


def test_two_sites_do_not_agree_on_words(tmp_path):
    federation = TextFederation(tmp_path, names=NAMES[:2])
    with pytest.raises(ParameterError, match="at least 3"):
        list(federation.rounds())
    asked = {"experiment": federation.experiment.to_dict(), "parties": list(NAMES[:2])}
    hello = Request("east", Nonce("run-1.words"), note=asked)
    assert code_of(federation.site("east").answer(hello.to_bytes())) == "parties"
    assert code_of(federation.site("east", roster=None).answer(hello.to_bytes())) == "roster"


@pytest.mark.parametrize(
    ("policy", "code", "reason"),
    [
        (Policy(words=WordPolicy(allowed=False)), "words", "words.allowed"),
        (
            Policy(words=WordPolicy(minimum_documents=3)),
            "words",
            "min_documents = 2; site.toml requires 3",
        ),
        (Policy(words=WordPolicy(minimum_parties=3)), "words", "min_parties = 2; site.toml requires 3"),
        (Policy(columns=("liver",)), "words", "which texts do not have"),
        (Policy(minimum_rows=25), "rows", "24 rows"),
        (Policy(secure_aggregation=True), "masks", "uses plain sums; site.toml requires"),
        (Policy(methods=("fedavg",)), "method", "'exact'"),
        (Policy(privacy=PrivacyBudget(1.0)), "privacy-needed", "but this program"),
    ],
)
def test_what_a_site_does_not_allow_is_refused_before_a_word_leaves(tmp_path, policy, code, reason):
    federation = TextFederation(tmp_path, policies={"north": policy})
    with pytest.raises(SiteRefused, match=f"'north' refuses .*'{code}'") as caught:
        list(federation.rounds())
    assert reason in federation.log("north")
    assert reason not in str(caught.value)
    assert all(federation.site(name).ledger.serial == 0 for name in federation.names)


def test_all_sites_agree_on_words_also_where_some_are_drawn_for_each_round(tmp_path):
    """And who asks for more in a sum than are drawn says so before a word leaves."""
    told = {"method": "fednmf", "rank": 3, "rounds": 1, "seed": 5, "participation": 0.5, "words": WORDS}
    drawn = TextFederation(tmp_path / "drawn", Experiment.from_table(told), NAMES)
    [done] = drawn.rounds()
    assert len(done.participants) == 2
    assert drawn.vocabulary("north") == list(drawn.agreed_in_process().words)
    strict = replace(drawn, folder=tmp_path / "strict", policies={"north": Policy(minimum_parties=3)})
    with pytest.raises(SiteRefused, match="'parties'"):
        list(strict.rounds())
    assert not any((tmp_path / "strict" / name / "ledger.jsonl").exists() for name in NAMES)


def test_texts_are_not_a_table_and_a_table_has_no_words(tmp_path):
    federation = TextFederation(tmp_path / "texts")
    table = SiteData(np.ones((30, 3)), ("a", "b", "c"), secret_of("north"))
    federation.sites["north"] = Site("north", tmp_path / "table", table, roster=federation.roster())
    with pytest.raises(SiteRefused, match="'texts'"):
        list(federation.rounds())
    assert "--text-column" in (tmp_path / "table" / "site.log").read_text()
    tables = Federation(tmp_path / "tables", Experiment("exact", 3, 2))
    tables.sites["north"] = TextFederation(tmp_path / "tables").site("north")
    with pytest.raises(SiteRefused, match="'texts'"):
        list(tables.rounds())


def test_a_run_does_not_begin_without_its_agreement(finished):
    federation, _, _ = finished
    asked, site = {"experiment": federation.experiment.to_dict(), "parties": list(federation.names)}, "east"

    def code(run, texts=None, **words):
        told = {**asked["experiment"], "words": {**asked["experiment"]["words"], **words}}
        hello = Request(site, Nonce(run), note={**asked, "experiment": told}).to_bytes()
        changed = replace(federation, texts={} if texts is None else {site: texts})
        return code_of(changed.site(site).answer(hello))

    assert code("run-1") is None
    assert code("run-9") == "no-words"
    assert code("run-1", max_words=4) == "conflict"
    assert code("run-1", texts_of(site, 25)) == "layout"


def test_a_site_without_a_shared_word_takes_part_with_rows_of_zeros(tmp_path):
    alone = tuple(f"{RARE['north']} {number}" for number in range(20))
    federation = TextFederation(tmp_path, texts={"north": alone})
    rounds = list(federation.rounds())
    assert rounds[-1].participants == federation.names
    assert model_of(rounds[-1]) == model_of(federation.in_process()[-1])
    assert "None of the 20 texts here has a word" in federation.log("north")
    assert federation.log("east") == ""
    assert not np.load(tmp_path / "north" / "results" / "run-1" / "weights.npy").any()
    assert sorted(federation.vocabulary("north")) == sorted(SHARED)


class UntilWork(Recorded):
    """Asks for everything twice, and ends when the first work is done."""

    __slots__ = ()

    def ask(self, requests, timeout):
        replies = Recorded.ask(self, requests, timeout)
        assert all(self.sites[name](request) == replies[name] for name, request in requests.items())
        if any(Request.from_bytes(request).nonce.kind is Kind.WORK for request in requests.values()):
            raise Killed
        return replies


def test_words_that_are_too_long_are_counted_in_the_log_of_their_site_and_nowhere_else(tmp_path):
    long = ("hypergammaglobulinaemia", "pseudohypoparathyroidism", "cholangiopancreatography")
    own = tuple(f"{text} {' '.join(long[: 1 + number % 3])}" for number, text in enumerate(texts_of("north")))
    said, worked = {}, {}
    for folder, texts in (("with", {"north": own}), ("without", {})):
        federation = TextFederation(tmp_path / folder, exact(max_word_bytes=16), texts=texts)
        transport = UntilWork(federation.transport().sites)
        with pytest.raises(Killed):
            list(federation.rounds(transport))
        said[folder] = [
            reply for _, request, reply in transport.asked if Request.from_bytes(request).nonce.kind != Kind.WORK
        ]
        worked[folder] = RunFolder(federation.folder / "north" / "runs" / "run-1.words").load_work((0, 0)).upload
        notes = [line for line in federation.log("north").splitlines() if "[note]" in line]
        assert len(notes) == (folder == "with")
        assert federation.log("east") == ""
        if notes:
            assert "run run-1.words" in notes[0]
            assert "3 different words here, each in at least 2 of the texts, have more than 16 bytes" in notes[0]
            assert not any(word in federation.log("north") for word in long)
    assert len(said["with"]) >= 2 * len(NAMES[:3])
    assert said["with"] == said["without"]
    assert worked["with"].signature == worked["without"].signature
    for name, array in worked["with"].arrays.items():
        assert np.array_equal(array, worked["without"][name]), "what the sum is made of is the same"


@pytest.mark.parametrize(
    ("words", "error", "match"),
    [
        ({"min_documents": 24}, DataError, "No word meets the rule: 0"),
        ({"max_df": 0.01}, DataError, "No word meets the rule: 8"),
        ({"max_words": 2}, ParameterError, "at most 2, the number of words in the vocabulary"),
        ({"min_parties": 4}, SiteRefused, "'parties'"),
    ],
)
def test_a_rule_that_leaves_too_few_words_is_told_and_stays_so(tmp_path, words, error, match):
    federation = TextFederation(tmp_path, exact(**words))
    for _ in range(2):
        with pytest.raises(error, match=match):
            list(federation.rounds())
    assert federation.record() is None


def test_an_agreement_and_its_run_count_as_one(finished, tmp_path):
    """Of one that is allowed; a second one is not begun."""
    federation, _, _ = finished
    sites = federation.transport()
    with pytest.raises(SiteRefused, match="'runs'"):
        list(replace(federation, folder=tmp_path, run="run-2").rounds(sites))


def test_two_runs_do_not_share_pads_or_hashes(tmp_path):
    """With the same seed, texts and key: what a step sends would else be two messages under one pad."""
    texts, rule = TextFederation(tmp_path).site("east").texts, exact().text_rule
    cases = [("a", {}), ("b", {}), ("a", {"east": b"1"}), ("a", {"east": b"2"})]
    assert len({texts.held(rule, run, roster).rows.key for run, roster in cases}) == len(cases)


def test_sites_that_do_not_wait_for_each_other_agree_on_words_as_well(tmp_path):
    federation = TextFederation(tmp_path, Experiment("asyn-sd", 2, 2, local_steps=1, seed=5, words=WORDS))
    assert len(list(federation.rounds())) == 6
    assert sorted(federation.vocabulary("east")) == sorted(SHARED)


def test_a_word_is_in_no_reason_of_a_refusal(finished):
    """Where a server leaves a column out, or asks for names as if one were missing."""
    federation, _, _ = finished
    wanted = hashed(SHARED[1:], "run-1", b"key")
    with pytest.raises(
        RequestRefused, match="columns that are missing here: 0; here but not at most other sites: 1"
    ) as caught:
        find_columns(wanted, SHARED, "run-1", b"key", are_secret=True)
    assert caught.value.refusal == Refusal("columns", {"missing": 0, "extra": 1})
    ask = Request("east", Nonce("run-1", kind=Kind.NAMES)).to_bytes()
    assert code_of(federation.site("east").answer(ask)) == "names"
    data = federation.site("east").texts.counted(
        federation.experiment.text_rule.weighing(federation.agreed_in_process())
    )
    with pytest.raises(RequestRefused, match="no longer here: 1 of them"):
        data.order((*data.columns, RARE["east"]))


@pytest.mark.parametrize("name", ["run-1.words", "r" * 60])
def test_a_name_that_leaves_no_room_for_the_agreement_is_refused(tmp_path, name):
    with pytest.raises(ParameterError, match="at most 58 letters"):
        list(TextFederation(tmp_path, run=name).rounds())


def test_a_lost_word_of_an_error_is_not_logged(tmp_path, monkeypatch):
    def fail(*_):
        raise KeyError(RARE["north"])

    federation = TextFederation(tmp_path)
    monkeypatch.setattr("partsong.federation.texts._held", fail)
    with pytest.raises(SiteRefused, match="'failed'"):
        list(federation.rounds())
    assert "KeyError" in federation.log("east")
    assert RARE["north"] not in federation.log("east")


def test_the_rule_has_the_names_and_defaults_of_the_estimator():
    told = inspect.signature(FederatedTopicModel).parameters | inspect.signature(Words).parameters
    assert {one.name for one in fields(TextRule)} <= told.keys()
    for method in ("exact", "fedlda"):
        rule = TextRule.from_table({}, method)
        assert rule.words == Words()
        assert (rule.rule.min_documents, rule.rule.max_df) == (told["min_documents"].default, 1.0)
        assert (rule.max_words, rule.min_parties) == (None, 2)
        assert rule.weighting == ("counts" if method == "fedlda" else "tfidf")
    assert told["min_parties"].default is None, "which means 2"
    for name in ("min_documents", "max_df", "max_words", "max_word_bytes", "language"):
        assert TextRule.from_table({name: told[name].default}, "exact") == TextRule.from_table({}, "exact")


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ({"min_document": 2}, "'min_documents'"),
        ({"pattern": ".*"}, "no setting 'pattern'"),
        ({"min_documents": 0}, "min_documents must be a whole number"),
        ({"min_parties": True}, "min_parties must be"),
        ({"max_df": 0}, "max_df must be a number above 0 and at most 1"),
        ({"max_words": 1.5}, "max_words must be"),
        ({"weighting": "tf-idf"}, "tfidf, counts"),
        ({"language": "klingon"}, "no list of stop words"),
        ({"language": []}, "language must be a string"),
        ({"stop_words": "liver"}, "list of strings"),
        ({"shortest": "2"}, "shortest must be"),
        ({"lower": 1}, "true or false"),
        (3, "table of settings"),
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(words, match):
    with pytest.raises(ParameterError, match=match):
        Experiment("exact", 3, 2, words=words)


def test_no_privacy_is_promised_over_texts_and_a_policy_has_known_keys():
    with pytest.raises(ParameterError, match="without noise"):
        Experiment(
            "exact", 3, 2, secure_aggregation=True, words={}, privacy={"unit": "row", "epsilon": 1.0, "row_bound": 1.0}
        )
    found = Policy.from_table({"words": {"allowed": False, "minimum_documents": 4, "minimum_parties": 3}})
    assert found.words == WordPolicy(False, 4, 3)
    for table, match in (({"minimum_party": 3}, "'minimum_parties'"), ({"allowed": 1}, "true or false"), (1, "table")):
        with pytest.raises(ParameterError, match=match):
            Policy.from_table({"words": table})


def test_plain_values_make_the_same_experiment_and_tables_are_told_as_before():
    experiment = exact(stop_words=["vein"])
    assert Experiment.from_table(experiment.to_dict()) == experiment
    assert "words" not in Experiment("exact", 3, 2).to_dict()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=5), min_size=1, max_size=6))
def test_many_short_bytes_come_back_from_a_file(tmp_path_factory, pieces):
    place = tmp_path_factory.mktemp("pieces") / "state"
    save_state(place, (tuple(pieces), "and", b"alone"))
    assert load_state(place, tuple) == (tuple(pieces), "and", b"alone")


def test_each_step_of_an_agreement_has_a_line_wherever_the_server_was_killed(tmp_path):
    federation = TextFederation(tmp_path, exact())

    class Cut(InProcess):
        __slots__ = ()

        def ask(self, requests, timeout):
            if any(Request.from_bytes(data).nonce.round == 2 for data in requests.values()):
                raise Killed
            return InProcess.ask(self, requests, timeout)

    with pytest.raises(Killed):
        list(federation.rounds(Cut(federation.transport().sites)))
    place = tmp_path / "server" / "words" / "steps.jsonl"
    with place.open("a") as file:
        file.write('{"step": 3, "steps"')
    assert len(list(federation.rounds())) == 2
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, Journal(place.parent).load().index + 1))
    assert all(line["participants"] == list(federation.names) for line in lines)
    assert [line["next"] for line in lines][-3:] == ["the words", "documents with each word", "nothing"]
