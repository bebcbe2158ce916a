"""Masks are among sites that were told the same: a server that tells one something else gets no sum."""

from dataclasses import replace

import numpy as np
import pytest

from partsong.core.interfaces import Layout, Message
from partsong.errors import FileError, PartyError, SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.signing import bound_to, context_of, public_key, words_context_of
from partsong.federation.site.plan import Data, plan_of
from partsong.federation.wire import Kind, Request
from tests.federation.federations import COLUMNS, NAMES, Federation, rows_of, secret_of
from tests.federation.test_site import Recorded
from tests.federation.word_federations import TextFederation, texts_of

ROSTER = {name: public_key(secret_of(name), name) for name in NAMES[:3]}
MASKED = Policy(secure_aggregation=True, minimum_parties=3)
SETTINGS = {"rank": 2, "rounds": 2, "secure_aggregation": True, "mask_bound": 1e6}


class Pinned(Federation):
    def site(self, name, **changes):
        data = Data(rows_of(name), COLUMNS, secret_of(name))
        return replace(super().site(name), roster=ROSTER, data=data, **changes)

    def plan(self):
        return plan_of(self.experiment.told(), 3, ROSTER)


def lied_to(tmp_path, change, **experiment):
    federation = Pinned(tmp_path, Experiment.from_table({**SETTINGS, **experiment}), policy=MASKED)
    transport = Recorded(federation.transport().sites, change)
    with pytest.raises(PartyError, match=r"phase 0 \(keys\).*other settings"):
        list(federation.rounds(transport))
    assert {Request.read(request).nonce.phase for _, request, _ in transport.asked} == {0}, "nothing has been masked"


def test_a_server_that_tells_others_another_experiment_gets_no_sum(tmp_path):
    """Pulled to the model by force, the others would send nothing but that, and the sum would be one site's upload."""

    def change(name, request):
        read = Request.read(request)
        if name == "east" or read.note.get("experiment") is None:
            return request
        read.note["experiment"]["strength"] = 1e9
        return Request(name, read.nonce, read.body, read.note, read.seen).written()

    lied_to(tmp_path, change, method="fedprox", strength=0.0, local_steps=2)


def test_a_server_that_tells_one_other_columns_gets_no_sum(tmp_path):
    """In columns that are zero at all others, the sum would be one site's own."""

    def change(name, request):
        read = Request.read(request)
        if name != "east" or read.nonce.kind is not Kind.START:
            return request
        turned = Message({"columns": np.ascontiguousarray(np.asarray(read.body["columns"])[::-1])})
        return Request(name, read.nonce, turned, read.note, read.seen).written()

    lied_to(tmp_path, change, method="exact")


def of_texts(folder):
    experiment = Experiment("exact", 3, 2, secure_aggregation=True, mask_bound=1e6, words={"min_documents": 2})
    return TextFederation(folder, experiment, policies=dict.fromkeys(NAMES, MASKED))


def told_other_frequencies(tmp_path, lie):
    """A run over texts by tf-idf, masked, and all that was asked for after the agreement on words; `lie(name, m)`: df
    of each of m words, and n.
    """
    federation = of_texts(tmp_path)

    def change(name, request):
        read = Request.read(request)
        if read.nonce.kind is not Kind.FINISH or not read.nonce.run.endswith(".words"):
            return request
        documents, n_documents = lie(name, len(read.body["documents"]))
        told = {"documents": np.asarray(documents), "n_documents": np.array([n_documents])}
        body = Message({**read.body.arrays, **told}, read.body.weight)
        return Request(name, read.nonce, body, read.note, read.seen).written()

    transport = Recorded(federation.transport().sites, change)

    def rounds():
        list(federation.rounds(transport))

    return federation, transport, rounds


def test_a_server_that_tells_one_other_frequencies_of_words_gets_no_sum(tmp_path):
    """Weights of 1 and of 37 by turns: in some columns nearly all of a sum would be one site's own."""
    n, here = 2**52, len(texts_of("east"))
    _, transport, rounds = told_other_frequencies(
        tmp_path, lambda name, m: (np.where((np.arange(m) < 2) == (name == "east"), 3 * here, n - here), n)
    )
    with pytest.raises(PartyError, match=r"phase 0 \(keys\).*other settings"):
        rounds()
    nonces = [Request.read(request).nonce for _, request, _ in transport.asked]
    assert {nonce.phase for nonce in nonces if nonce.run == "run-1"} == {0}, "nothing has been masked"
    assert any(nonce.run == "run-1" and nonce.kind is Kind.WORK for nonce in nonces)


@pytest.mark.parametrize(
    "lie",
    [lambda m: (np.full(m, 2), 72), lambda m: (np.full(m, 71), 72), lambda m: (np.full(m, 23), 23)],
    ids=["below own", "above others", "fewer than here"],
)
def test_frequencies_that_cannot_be_sums_with_a_site_in_them_end_the_agreement_at_one_answer(tmp_path, lie):
    """Whether they can be is a comparison with what masks hide: no second one is answered, not of the true sums."""
    federation, _, rounds = told_other_frequencies(tmp_path, lambda name, m: lie(m))
    with pytest.raises(SiteRefused, match="'protocol'"):
        rounds()
    assert "not the sums" in federation.log("east")
    assert not any(word in federation.log("east") for text in texts_of("east") for word in text.split()[:4])
    with pytest.raises(SiteRefused, match="'protocol'"):
        list(federation.rounds())
    assert "closed here before" in federation.log("east")
    assert not list(tmp_path.glob("*/runs/run-1.words/vocabulary"))


def test_frequencies_that_are_none_are_refused_whatever_a_site_holds(tmp_path):
    lies = [(73, 72), (60, 2**53), (np.nan, 72), (60, np.inf), (60, -1)]
    federation, _, _ = told_other_frequencies(tmp_path, lambda name, m: None)
    for told in lies:
        _, _, rounds = told_other_frequencies(tmp_path, lambda name, m, told=told: (np.full(m, told[0]), told[1]))
        with pytest.raises(SiteRefused, match="'protocol'"):
            rounds()
    assert federation.log("east").count("cannot be used") == len(lies)
    assert len(list(federation.rounds())) == 2


def test_the_server_of_a_masked_run_over_texts_goes_on_with_the_record_of_their_words(tmp_path):
    federation = of_texts(tmp_path)
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    words = tmp_path / "server" / "words"
    words.rename(tmp_path / "moved")
    with pytest.raises(FileError, match="no record of the agreement on words"):
        list(federation.rounds())
    (tmp_path / "moved").rename(words)
    assert len(list(federation.rounds())) == 1


def test_the_context_is_that_of_all_that_a_start_tells():
    columns, layout = np.arange(32, dtype=np.uint8).reshape(2, 16), Layout(("a", "b", "c"), 2, 5, "float64")
    same = context_of({"x": 1, "y": [2]}, columns, layout)
    assert same == context_of({"y": [2], "x": 1}, columns.copy(), layout)
    others = [({"x": 1, "y": [3]}, columns, layout), ({"x": 1, "y": [2]}, columns[::-1], layout)]
    others += [({"x": 1, "y": [2]}, columns, replace(layout, seed=6))]
    assert len({same, *(context_of(*other) for other in others)}) == 4
    masks = Experiment.from_table({**SETTINGS, "method": "exact"}).reduction(3, ROSTER)
    assert bound_to(same, masks).context == same.encode()
    open_sums = Experiment.from_table({"method": "exact", "rank": 2, "rounds": 1}).reduction(3)
    assert bound_to(same, open_sums) == open_sums
    words = [words_context_of(*told) for told in (([1, 2], 3), ([2, 1], 3), ([1, 2], 4))]
    assert words[0] == words_context_of(np.array([1.0, 2.0]), np.float64(3))
    assert len({*words, same}) == 4
    assert bound_to(same, bound_to(words[0], masks)).context == (words[0] + same).encode()
