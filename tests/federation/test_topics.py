"""Topics in federations: each method by its name and keys, with the bits of one process, and files that can be used."""

from __future__ import annotations

import json
import tomllib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from method_tables import METHODS, ONLY_TEXTS, TOGETHER, fednmf, fednmf_mi

import partsong
from partsong.core.interfaces import Schedule
from partsong.engines.rounds import sample_participants
from partsong.errors import FormatError, ParameterError, SiteRefused, TooFewParties
from partsong.federation.experiment import METHODS as NAMED
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.site.results import save_topic_result
from partsong.federation.transports.base import InProcess, NoReply
from partsong.federation.wire import Kind, Request
from partsong.io.model_file import Model, load_model, now, save_model
from partsong.methods.fedlda import FederatedLDA
from partsong.topics.fitting import topic_program
from partsong.topics.tokenizer import Words
from partsong.topics.vocabulary import TextVectorizer, Vocabulary
from tests.federation.helpers import N_DOCUMENTS, NAMES, TOPIC_WORDS, Counting, counts_of, model_of, topic_texts_of
from tests.federation.site_process import mailbox_of
from tests.federation.test_files import answering, folders_of

QUICK = {"epochs": 2, "batch": 8}
RUNS = {
    "fednmf": {"method": "fednmf", **QUICK},
    "fednmf of half, adaptive": {
        "method": "fednmf",
        **QUICK,
        "participation": 0.5,
        "server": "adam",
        "warm_start_weights": True,
    },
    "fednmf of three of four, masked": {"method": "fednmf", **QUICK, "participation": 0.75, "secure_aggregation": True},
    "fednmf-mi": {"method": "fednmf-mi", **QUICK, "strength": 0.2, "participation": 0.75, "mi_gradient": "js"},
    "fednmf-mi, masked": {
        "method": "fednmf-mi",
        **QUICK,
        "critic": "separable",
        "critic_rate": 0.01,
        "secure_aggregation": True,
    },
    "fedlda": {"method": "fedlda"},
    "fedlda of half": {"method": "fedlda", "participation": 0.5},
    "fedlda, masked": {"method": "fedlda", "secure_aggregation": True},
}


def experiment_of(**table):
    return Experiment.from_table({"rank": 2, "rounds": 3, "seed": 6, **table})


def written(table):
    """As experiment.toml."""
    values = {"rank": 2, "rounds": 3, "seed": 6, **table}
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items())


def toml_of(folder, table):
    (folder / "experiment.toml").write_text(written(table))
    return Experiment.read(folder / "experiment.toml")


@pytest.mark.parametrize("run", RUNS)
def test_a_method_of_topics_has_the_bits_of_one_process_with_the_sites_that_the_seed_draws(tmp_path, run):
    federation = Counting(tmp_path, toml_of(tmp_path, RUNS[run]), NAMES)
    rounds, expected = list(federation.rounds()), federation.sequentially()
    assert [done.participants for done in rounds] == [done.participants for done in expected]
    assert [model_of(done) for done in rounds] == [model_of(done) for done in expected]
    asked = {len(done.participants) for done in rounds}
    assert asked == {round(4 * RUNS[run].get("participation", 1))}
    assert federation.record().absent() == sample_participants(NAMES, 3, RUNS[run].get("participation", 1), 6)


@pytest.mark.parametrize("run", ["fednmf of half, adaptive", "fednmf-mi", "fedlda of half"])
def test_a_run_that_was_broken_off_goes_on_to_the_same_bits(tmp_path, run):
    """From the files of server and sites alone."""
    federation = Counting(tmp_path, toml_of(tmp_path, RUNS[run]), NAMES)
    first = federation.rounds()
    next(first)
    first.close()
    again = Counting(tmp_path, toml_of(tmp_path, RUNS[run]), NAMES)
    rounds, expected = list(again.rounds()), again.sequentially()
    assert [done.index for done in rounds] == [1, 2]
    assert [model_of(done) for done in rounds] == [model_of(done) for done in expected[1:]]


def test_over_files_the_bits_are_the_same(tmp_path):
    federation = Counting(tmp_path, experiment_of(method="fednmf-mi", **QUICK, participation=0.7), NAMES[:3])
    with ExitStack() as sites:
        for name in federation.names:
            sites.enter_context(answering(mailbox_of(tmp_path, name), federation.site(name).answer))
        rounds = list(federation.rounds(folders_of(tmp_path)))
    assert [model_of(done) for done in rounds] == [model_of(done) for done in federation.sequentially()]


def test_defaults_are_those_of_the_estimator():
    model = partsong.FederatedTopicModel()
    names = ("epochs", "batch", "rate", "strength", "server", "server_rate")
    options = {name: getattr(model, name) for name in names}
    for method in ONLY_TEXTS:
        assert experiment_of(method=method).program(4) == topic_program(method, 2, options, TOGETHER)
    assert experiment_of(method="fednmf").fraction == model.participation


def test_keys_are_those_of_the_methods():
    keys = {"epochs": 3, "batch": 5, "rate": 0.01, "weight_step": "batch", "server": "yogi", "server_rate": 0.1}
    assert experiment_of(method="fednmf", **keys, warm_start_weights=True).program(4) == fednmf(
        2, **keys, warm_start_weights=True
    )
    keys |= {"strength": 0.5, "critic": "separable", "mi_gradient": "js", "critic_rate": 0.2}
    assert experiment_of(method="fednmf-mi", **keys).program(4) == fednmf_mi(2, **keys)
    told = experiment_of(method="fednmf-mi", **keys).to_dict()
    assert Experiment.from_table(told).program(4) == fednmf_mi(2, **keys)


def test_the_experiment_on_the_page_is_one():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "federation.md").read_text(encoding="utf-8")
    block = page.split("### Topics")[1].split("```toml")[1].split("```")[0]
    experiment = Experiment.from_table(tomllib.loads(block))
    keys = {name: value for name, value in experiment.options.items() if name != "participation"}
    assert experiment.program(6) == fednmf_mi(50, weight_step="document", **keys)
    assert (experiment.reduction(6).fewest, experiment.request(6).parties) == (3, 3)


def test_other_methods_are_told_without_these_keys():
    """Sites with an older partsong know none of them."""
    assert not experiment_of(method="exact").to_dict().keys() & {"epochs", "participation", "topics"}
    assert type(experiment_of(method="exact").schedule(4)) is Schedule


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"method": "fednmf", "epoch": 3}, "no setting 'epoch'. Did you mean 'epochs'"),
        ({"method": "fednmf", "n_topics": 3}, "no setting 'n_topics'. Did you mean 'rank'"),
        ({"method": "fednmf", "participaton": 0.5}, "Did you mean 'participation'"),
        ({"method": "fnmf", "epochs": 3}, "epochs is for fednmf, fednmf-mi; the method is 'fnmf'. Remove it"),
        ({"method": "exact", "participation": 0.5}, "participation is for fednmf, fednmf-mi, fedlda"),
        ({"method": "fednmf", "strength": 0.5}, "strength is for .*fednmf-mi; the method is 'fednmf'"),
        ({"method": "fedlda", "rate": 0.5}, "rate is for fednmf, fednmf-mi"),
        ({"method": "fednmf", "local_steps": 3}, "local_steps is for exact, fnmf.*the method is 'fednmf'"),
        ({"method": "fedlda", "align": "sinkhorn"}, "align is for fnmf-local, fnmf, .*the method is 'fedlda'"),
        ({"method": "fednmf", "init_mode": "shared"}, "init_mode is for exact"),
        ({"method": "fednm"}, "Did you mean 'fednmf'"),
        ({"method": "fednmf", "tol": 0.1}, "tol can end only runs of asyn-sd"),
        ({"method": "fednmf", "epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"method": "fednmf", "batch": 2.5}, "batch must be a whole number"),
        ({"method": "fednmf", "rate": 0.0}, "rate must be a number above 0"),
        ({"method": "fednmf", "rate": "fast"}, "rate must be a number"),
        ({"method": "fednmf", "server": "adan"}, "server is 'adan'. Did you mean 'adam'"),
        ({"method": "fednmf", "server": ["adam"]}, "server is"),
        ({"method": "fednmf", "server_rate": 0.1}, "an average has no rate. Set server .*or remove server_rate"),
        ({"method": "fednmf", "server": "average", "server_rate": 0.1}, "an average has no rate"),
        ({"method": "fednmf", "server": "adam", "server_rate": -1}, "above"),
        (
            {"method": "fednmf-mi", "strength": 0, "critic": "separable"},
            "strength = 0 there is no critic. Remove critic",
        ),
        ({"method": "fednmf", "participation": 0}, "above 0 and at most 1"),
        ({"method": "fednmf", "participation": 1.5}, "above 0 and at most 1"),
        ({"method": "fednmf", "warm_start_weights": 1}, "true or false"),
        ({"method": "fednmf-mi", "critic": "separate"}, "'separable'"),
        ({"method": "fednmf-mi", "mi_gradient": "dw"}, "'dv'"),
        ({"method": "fednmf-mi", "strength": -1}, "strength"),
        ({"method": "fedlda", "secure_aggregation": True, "participation": 0.5}, "words of single sites"),
        ({"method": "fednmf", "privacy": {"unit": "party", "epsilon": 1}}, "no differential privacy guarantee"),
        (
            {"method": "fedlda", "privacy": {"unit": "row", "epsilon": 1, "row_bound": 1}},
            "no differential privacy guarantee",
        ),
    ],
)
def test_keys_that_cannot_be_meant_are_refused_with_the_way_out(table, match):
    with pytest.raises(ParameterError, match=match):
        experiment_of(**table)


def test_masks_need_three_sites_in_every_round():
    experiment = experiment_of(method="fednmf", secure_aggregation=True, participation=0.5)
    assert experiment.reduction(6).fewest == 3
    with pytest.raises(ParameterError, match="at least 3 sites in every round, and there are 2"):
        experiment.reduction(4)


def test_a_masked_sum_of_fedlda_is_over_all_sites_or_not_formed(tmp_path):
    """Without one of them it would differ from the sum before by that one's words."""
    experiment = experiment_of(method="fedlda", secure_aggregation=True, on_party_error="skip")
    federation = Counting(tmp_path, experiment, NAMES)

    class Deserted(InProcess):
        __slots__ = ()

        def ask(self, requests, timeout):
            found = InProcess.ask(self, requests, timeout)
            is_late = [name for name, data in requests.items() if is_second_work(Request.from_bytes(data))]
            return found | {name: NoReply("cut off") for name in is_late if name == "west"}

    def is_second_work(request):
        return request.nonce.kind is Kind.WORK and request.nonce.round == 1

    rounds = federation.rounds(Deserted(federation.transport().sites))
    assert len(next(rounds).participants) == 4
    with pytest.raises(TooFewParties):
        next(rounds)
    rounds.close()
    assert [len(done.participants) for done in federation.rounds()] == [4, 4]


def test_a_site_allows_methods_of_topics_by_name(tmp_path):
    assert set(NAMED) >= {*METHODS, "fednmf", "fednmf-mi", "fedlda"}
    assert Policy.from_table({"methods": ["fedlda"]}).methods == ("fedlda",)
    with pytest.raises(ParameterError, match="'fednmf'"):
        Policy.from_table({"methods": ["fednfm"]})
    federation = Counting(tmp_path, experiment_of(method="fednmf"), policy=Policy(methods=("exact", "fednmf-mi")))
    with pytest.raises(SiteRefused, match="'method'"):
        list(federation.rounds())


@pytest.mark.parametrize(
    ("policy", "keys", "code"),
    [
        (Policy(minimum_parties=3), {"participation": 0.5}, "parties"),
        (Policy(secure_aggregation=True), {}, "masks"),
        (Policy(maximum_rounds=2), {}, "rounds"),
        (Policy(), {"rank": N_DOCUMENTS}, "rows"),
        (Policy(privacy=PrivacyBudget(1.0), minimum_rows=1), {}, "privacy-needed"),
    ],
)
def test_what_a_site_asks_for_it_asks_of_methods_of_topics(tmp_path, policy, keys, code):
    federation = Counting(tmp_path, experiment_of(method="fednmf", **keys), NAMES, policy=policy)
    with pytest.raises(SiteRefused, match=f"'{code}'"):
        list(federation.rounds())
    assert not federation.site("east").ledger.serial


@pytest.mark.parametrize("method", ONLY_TEXTS)
def test_every_site_has_topics_that_the_topic_commands_read(tmp_path, method):
    federation = Counting(tmp_path, experiment_of(method=method, **(QUICK if method != "fedlda" else {})))
    *_, last = federation.rounds()
    H = federation.plan().program.components(last.checkpoint.server)
    for name in federation.names:
        folder = tmp_path / name / "results" / federation.run
        model = partsong.FederatedTopicModel.load(folder / "topics.safetensors")
        assert (model.method, model.vocabulary_, model.n_iter_) == (method, list(TOPIC_WORDS), 3)
        np.testing.assert_array_equal(model.components_, H)
        W = np.load(folder / "weights.npy")
        np.testing.assert_allclose(model.transform(topic_texts_of(name)), W, rtol=1e-6, atol=1e-9)
        told = json.loads((folder / "result.json").read_text())
        assert ("relative_error" in told) == (method != "fedlda")
    if method == "fedlda":
        with pytest.raises(FormatError, match="partsong-topics"):
            load_model(folder / "model.safetensors")
        np.testing.assert_allclose(W.sum(axis=1), 1)
    else:
        rows = partsong.NMF.load(folder / "model.safetensors")
        assert list(rows.feature_names_in_) == list(TOPIC_WORDS)


def test_words_weigh_what_they_did_in_the_run_in_whatever_order_columns_were_agreed_on(tmp_path):
    H, order = np.array([[3.0, 1.0, 0.0], [0.0, 1.0, 2.0]]), [2, 0, 1]
    weighing = TextVectorizer(Words("none"), Vocabulary(("apple", "bread", "chess")), np.array([5, 3, 1]), 9)
    solver = experiment_of(method="exact").program(3).solver
    for name, columns in (("one", [0, 1, 2]), ("other", order)):
        words = tuple(weighing.names[column] for column in columns)
        save_topic_result(tmp_path / f"{name}.safetensors", H[:, columns], words, {"method": "exact"}, solver, weighing)
    one, other = (partsong.TopicModel.load(tmp_path / f"{name}.safetensors") for name in ("one", "other"))
    assert other.vectorizer_.documents.tolist() == [1, 5, 3]
    texts = ["apple bread", "chess chess bread"]
    np.testing.assert_allclose(one.transform(texts), other.transform(texts))


def test_a_server_s_file_of_topics_that_are_mixtures_is_not_read_as_least_squares(tmp_path):
    H = np.full((2, 3), 1 / 3)
    save_model(tmp_path / "model.safetensors", Model(H, None, {"method": "fedlda"}, 0, None, None, now(), {}))
    for kind in (partsong.NMF, partsong.FederatedNMF):
        with pytest.raises(FormatError, match=r"LDA topics.*topics.safetensors"):
            kind.load(tmp_path / "model.safetensors")


def test_an_estimator_does_not_save_what_it_could_not_load(tmp_path):
    parts = [counts_of(name).astype(float) for name in NAMES[:2]]
    model = partsong.FederatedNMF(2, method=FederatedLDA(2), rounds=2, tol=0, random_state=0).fit(parts)
    with pytest.raises(ParameterError, match="FederatedTopicModel"):
        model.save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
