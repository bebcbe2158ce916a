"""Laws of a private second moment between sites: what each exchange costs, and that nobody pays or sends twice."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import partsong
from partsong.core.interfaces import Message
from partsong.errors import BudgetSpent, ParameterError, PartsongError, SiteRefused
from partsong.federation.chain import Chain
from partsong.federation.consistency import add_opening_balance, require_consistent
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.server import setup_phase
from partsong.federation.server.launch import build_model, describe_release, run_experiment
from partsong.federation.server.state import Journal
from partsong.federation.site.plan import SiteData, build_plan
from partsong.federation.wire import Kind, Request, refusal_from_error
from partsong.methods.moment import CentredMoment, MomentProgram
from partsong.methods.private import PrivateSums
from partsong.privacy.accounting import Ledger, Release
from partsong.privacy.exposure import Exposure
from partsong.privacy.forecast import HYBRID_TAU
from tests.federation.helpers import (
    COLUMNS,
    NAMES,
    Federation,
    Killed,
    assert_same,
    noisy_plan,
    rows_of,
    secret_of,
)
from tests.federation.test_exposure_limit import again, log_of, made, refusal
from tests.federation.test_kills import Cut
from tests.federation.test_site import of_kind, recorded
from tests.federation.test_site_limits import request_of, said

EPSILON, DELTA = 8.0, 1e-5
ROWS = {"unit": "row", "epsilon": EPSILON, "row_bound": 2.0}
OWN = PrivacyBudget(EPSILON * (1 + 1e-9), insecure_noise=True)
EXCHANGES = {"moment": 1, "centred": 2, "hybrid": 4}


def experiment_of(mechanism, **settings):
    privacy = {**ROWS, **({} if mechanism is None else {"mechanism": mechanism})}
    return Experiment(**{"method": "exact", "rank": 3, "seed": 1, "privacy": privacy, **settings})


def private(folder, mechanism, names=NAMES[:3], budget=OWN, **settings):
    experiment = experiment_of(mechanism, **settings)
    return Federation(folder, experiment, names, policy=Policy(privacy=budget), build=noisy_plan)


def releases_of(federation, name):
    """What a site was charged for, line by line."""
    return [Release.from_json(line["release"]) for line in federation.site(name).ledger.chain.lines()]


def spent(releases):
    return Ledger(tuple((one, 1) for one in releases)).epsilon(DELTA)


def logged(site):
    return [line for line in Chain(site.audit.path).lines() if line["kind"] in ("work", "reduce")]


# --- cost by exchange ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("mechanism", EXCHANGES)
def test_each_exchange_is_charged_at_its_own_price_and_all_together_are_the_budget(tmp_path, mechanism, masked):
    federation = private(tmp_path, mechanism, secure_aggregation=masked)
    rounds = list(federation.rounds())
    assert len(rounds) == EXCHANGES[mechanism]
    assert_same(federation, rounds)
    program = federation.plan().program
    for name in federation.names:
        site = federation.site(name)
        charged = releases_of(federation, name)
        assert charged == list(program.releases)
        assert spent(charged) == pytest.approx(EPSILON, rel=1e-6)
        assert spent(charged) == site.ledger.load().epsilon(DELTA) <= EPSILON
        assert federation.record().accounts.ledgers[name].costs == site.ledger.load().privacy_ledger.costs
        require_consistent(site.ledger, site.audit)
        for line in logged(site):
            assert Release.from_json(line["release"]) == charged[line["round"]]
            assert line["noise_multiplier"] == charged[line["round"]].noise_multiplier
            assert line["clip"] == program.row_bound
        assert logged(site)[-1]["epsilon"] == pytest.approx(EPSILON, rel=1e-6)
    assert (
        len({one.noise_multiplier for one in program.releases}) == {"moment": 1, "centred": 2, "hybrid": 2}[mechanism]
    )


def test_an_opening_balance_takes_each_price_from_the_log(tmp_path):
    federation = private(tmp_path, "hybrid")
    list(federation.rounds())
    (tmp_path / "east" / "ledger.jsonl").unlink()
    stated = add_opening_balance(tmp_path / "east", "the ledger is lost")
    assert stated.releases == 4
    costs = Ledger(tuple((one, 1) for one in federation.plan().program.releases))
    assert stated.epsilon == pytest.approx(costs.epsilon(DELTA / 2), rel=1e-12)


def test_two_runs_add_up_and_the_second_is_refused_where_the_budget_covers_one(tmp_path):
    federation = private(tmp_path, "moment")
    list(federation.rounds())
    again = replace(federation.experiment, seed=2)
    with pytest.raises(BudgetSpent, match="'budget'"):
        list(run_experiment(again, federation.transport(), tmp_path / "other", "run-2", build=noisy_plan))
    assert federation.site("east").ledger.serial == 1
    twice = spent(2 * releases_of(federation, "east"))
    federation.policy = Policy(privacy=replace(OWN, epsilon=twice * (1 + 1e-9)))
    list(run_experiment(again, federation.transport(), tmp_path / "other", "run-2", build=noisy_plan))
    assert federation.site("east").ledger.load().epsilon(DELTA) == twice


def test_a_budget_that_covers_the_moment_and_not_the_rounds_after_it_refuses_at_the_start(tmp_path):
    first = experiment_of("hybrid").program(3).releases[:1]
    federation = private(tmp_path, "hybrid", budget=PrivacyBudget(spent(first) * 1.2, insecure_noise=True))
    with pytest.raises(BudgetSpent, match="'budget'"):
        list(federation.rounds())
    for name in federation.names:
        assert not federation.site(name).ledger.serial
    assert "After 4 more releases" in (tmp_path / "east" / "site.log").read_text()


def test_the_budget_is_asked_for_each_exchange_at_its_own_price(tmp_path):
    """Of a run under way the rest fits exactly, and a budget that was cut in between is asked about again."""
    federation = private(tmp_path, "hybrid")
    asked, site = recorded(federation, 2), federation.site("east")
    charged = spent(releases_of(federation, "east"))
    assert charged < EPSILON
    less = replace(site, policy=replace(site.policy, privacy=replace(OWN, epsilon=charged * (1 + 1e-9))))
    assert said(site, request_of(asked, Kind.START)) is None
    assert said(less, request_of(asked, Kind.START)) is None, "what is charged is covered"
    federation.sites = {"east": less}
    with pytest.raises(BudgetSpent, match=r"round 2.*'budget'"):
        list(federation.rounds())
    assert site.ledger.serial == 2
    federation.sites = {}
    assert [done.index for done in federation.rounds()] == [2, 3]
    assert spent(releases_of(federation, "east")) == pytest.approx(EPSILON, rel=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_a_request_that_is_repeated_gets_the_same_bytes_without_a_charge(tmp_path, masked):
    federation = private(tmp_path, "moment", secure_aggregation=masked)
    asked = recorded(federation_cut(federation))
    site = federation.site("east")
    work = [pair for pair in asked if pair[0] == "east" and Request.from_bytes(pair[1]).nonce.kind is Kind.WORK]
    for _, request, reply in work:
        assert site.answer(request) == reply
    assert site.ledger.serial == 1
    again = Request.from_bytes(work[0][1])
    other = replace(again, body=Message({"stage": np.array([0], np.int16), "more": np.zeros(1)}))
    assert said(site, other) == "conflict"
    assert site.ledger.serial == 1


def federation_cut(federation):
    """The same, but without the end of the run, after which nothing is answered."""

    class Unended(Federation):
        def rounds(self, transport=None, **settings):
            for done in Federation.rounds(self, transport, **settings):
                yield done
                return

    return Unended(**{name: getattr(federation, name) for name in Federation.__dataclass_fields__})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_answered", [False, True])
def test_a_server_that_asks_for_the_moment_again_gets_what_was_stored(tmp_path, masked, is_answered):
    """Killed after the sites have computed, and before it has written anything of it."""
    federation = private(tmp_path, "hybrid", secure_aggregation=masked)
    with pytest.raises(Killed):
        list(federation.rounds(Cut(federation.transport().sites, (0, 0), is_answered)))
    left = {name: [line["sha256"] for line in logged(federation.site(name))] for name in federation.names}
    rounds = list(federation.rounds())
    assert_same(federation, rounds)
    for name in federation.names:
        assert releases_of(federation, name) == list(federation.plan().program.releases)
        found = [line["sha256"] for line in logged(federation.site(name)) if line["round"] == 0]
        assert bool(left[name]) == is_answered
        assert found[: len(left[name])] == left[name]
        if is_answered:
            assert found[len(left[name])] == left[name][0]


@pytest.mark.parametrize(("mechanism", "heard"), [("hybrid", [2, 3, 3]), ("centred", [2])])
def test_a_site_that_lost_its_files_goes_on_where_it_was(tmp_path, mechanism, heard):
    """It misses a round, and what it sends afterwards costs what is planned for it: its ledger knows what has left."""
    federation = private(tmp_path, mechanism)
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    shutil.rmtree(tmp_path / "east" / "runs")
    assert [len(done.participants) for done in federation.rounds()] == heard
    planned = federation.plan().program.releases
    assert releases_of(federation, "east") == [planned[0], *planned[2:]]
    assert releases_of(federation, "north") == list(planned)


# --- rows that change after the release ------------------------------------------------------------------------------

CHANGES = {
    "data": lambda X: np.vstack([X[:-1], X[-1:] + 1]),
    "layout": lambda X: np.vstack([X, X[:1]]),
}


@pytest.mark.parametrize("code", CHANGES)
@pytest.mark.parametrize("mechanism", ["moment", "hybrid"])
def test_rows_that_change_after_the_release_are_refused_with_the_way_out(tmp_path, mechanism, code):
    """The next exchange, the answer that was sent, and the end of the run, which compares the model with the rows."""
    federation = private(tmp_path, mechanism)
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    serial = federation.site("east").ledger.serial
    other = SiteData(CHANGES[code](rows_of("east")), COLUMNS, secret_of("east"))
    federation.sites = {"east": federation.site("east", data=other)}
    if mechanism == "hybrid":
        with pytest.raises(SiteRefused, match=rf"round 1.*'{code}'"):
            list(federation.rounds())
    else:
        assert list(federation.rounds()) == []
        assert f"'{code}'" in federation.record().without_result["east"]
    assert federation.site("east").ledger.serial == serial
    assert "Restore the data, or start a new run with the new rows." in log_of(federation)
    federation.sites = {}
    assert len(list(federation.rounds())) == EXCHANGES[mechanism] - 1
    assert federation.record().without_result == {}
    assert spent(releases_of(federation, "east")) <= EPSILON


# --- one mechanism for the whole run ---------------------------------------------------------------------------------


def plain_of(experiment):
    return experiment.to_dict()["privacy"]


def test_without_a_mechanism_a_new_run_takes_the_moment_and_says_so_to_every_site(tmp_path):
    federation = private(tmp_path, None)
    assert isinstance(federation.plan().program, MomentProgram)
    asked = recorded(federation)
    for name in federation.names:
        [(hello, _)] = of_kind(asked, name, Kind.HELLO)
        assert Request.from_bytes(hello).note["experiment"]["privacy"]["mechanism"] == "moment"
        started = federation.site(name).load_start("run-1")
        assert started.experiment["privacy"]["mechanism"] == "moment"


def test_rounds_are_written_as_by_versions_that_know_nothing_else():
    """A site of 0.1.0 reads them, and plain values that it has written are noisy rounds here."""
    rounds = experiment_of("rounds", rounds=5)
    assert plain_of(rounds) == ROWS
    assert Experiment.from_message(rounds.to_dict()) == rounds
    assert isinstance(build_plan(rounds.to_dict(), 3, None).program, PrivateSums)
    for mechanism in EXCHANGES:
        experiment = experiment_of(mechanism)
        assert plain_of(experiment)["mechanism"] == mechanism
        assert Experiment.from_message(experiment.to_dict()) == experiment
    assert plain_of(experiment_of(None))["mechanism"] == "auto"
    party = Experiment("fedavg", 3, 2, privacy={"unit": "party", "epsilon": 1.0})
    assert plain_of(party) == {"unit": "party", "epsilon": 1.0}
    assert Experiment.from_message(party.to_dict()) == party


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_that_an_older_version_has_started_keeps_its_rounds(tmp_path, masked):
    """Its files say nothing of a mechanism, at the server as at the sites; neither does its experiment.toml."""
    settings = {"rounds": 4, "secure_aggregation": masked}
    old = private(tmp_path, "rounds", **settings)
    rounds = old.rounds()
    done = [next(rounds), next(rounds)]
    rounds.close()
    assert "mechanism" not in Journal(tmp_path / "server").load().experiment["privacy"]
    assert "mechanism" not in old.site("east").load_start("run-1").experiment["privacy"]
    resumed = private(tmp_path, None, **settings)
    done += list(resumed.rounds())
    assert [one.index for one in done] == [0, 1, 2, 3]
    assert_same(old, done)
    assert len(set(releases_of(old, "east"))) == 1
    assert spent(releases_of(old, "east")) == pytest.approx(EPSILON, rel=1e-6)


@pytest.mark.parametrize("mechanism", ["moment", "hybrid"])
def test_a_run_that_has_started_with_another_mechanism_is_not_resumed(tmp_path, mechanism):
    old = private(tmp_path, "rounds", rounds=4)
    next(old.rounds())
    with pytest.raises(ParameterError, match="other settings"):
        list(private(tmp_path, mechanism, rounds=4).rounds())


def with_numbers(n_rows, n_features=12, **settings):
    privacy = {**ROWS, "n_rows": n_rows, "n_features": n_features}
    return Experiment("exact", settings.pop("rank", 3), seed=1, privacy=privacy, **settings)


def test_public_numbers_decide_once_and_for_all_sites(tmp_path, monkeypatch):
    """Also where another version would decide otherwise: a run keeps what it has started with."""
    assert with_numbers(10**6).with_mechanism_for(3).privacy["mechanism"] == "hybrid"
    assert with_numbers(300).with_mechanism_for(3).privacy["mechanism"] == "moment"
    with pytest.raises(ParameterError, match=r"nothing but the mean profile.*nothing was spent"):
        with_numbers(4).program(3)
    federation = replace(private(tmp_path, None), experiment=with_numbers(10**6))
    rounds = federation.rounds()
    done = [next(rounds)]
    rounds.close()
    assert federation.site("east").load_start("run-1").experiment["privacy"]["mechanism"] == "hybrid"
    with monkeypatch.context() as patched:
        patched.setattr("partsong.privacy.forecast.HYBRID_TAU", 0.0)
        done += list(federation.rounds())
    assert [one.index for one in done] == [0, 1, 2, 3]
    assert_same(federation, done)


def test_other_columns_than_were_promised_are_refused_before_anything_is_spent(tmp_path, monkeypatch):
    federation = replace(private(tmp_path, None), experiment=with_numbers(300, n_features=40))
    with pytest.raises(ParameterError, match=r"agree on 12 columns.*n_features = 40.*Nothing was spent"):
        list(federation.rounds())
    monkeypatch.setattr(setup_phase, "MAX_COLUMNS", 11)
    federation = private(tmp_path / "many", "hybrid")
    with pytest.raises(ParameterError, match="Set n_features = 12 in the table privacy"):
        list(federation.rounds())
    assert not any(federation.site(name).ledger.path.exists() for name in federation.names)
    named = {**ROWS, "mechanism": "moment", "n_features": 12}
    confirmed = replace(federation, experiment=replace(federation.experiment, privacy=named))
    assert len(list(confirmed.rounds())) == 1


# --- rounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", EXCHANGES)
def test_rounds_have_no_effect_where_the_mechanism_sets_the_exchanges(mechanism):
    """Policies and schedules count exchanges."""
    for settings in ({}, {"rounds": 1}, {"rounds": 50}):
        experiment = experiment_of(mechanism, **settings)
        assert experiment.schedule(3).rounds == experiment.request(3).rounds == EXCHANGES[mechanism]
        assert experiment.program(3) == experiment_of(mechanism).program(3)
    policy = Policy(maximum_rounds=EXCHANGES[mechanism])
    policy.require(experiment.request(3), 16)
    if EXCHANGES[mechanism] > 1:
        with pytest.raises(PartsongError) as caught:
            replace(policy, maximum_rounds=EXCHANGES[mechanism] - 1).require(experiment.request(3), 16)
        assert refusal_from_error(caught.value).code == "rounds"


def test_rounds_are_needed_wherever_they_have_an_effect():
    for table in ({}, {"privacy": {**ROWS, "mechanism": "rounds"}}):
        with pytest.raises(ParameterError, match=r'method = "exact" needs rounds: a whole number.*Add it'):
            Experiment("exact", 3, **table)
    assert Experiment("moment", 3).request(3).rounds == 3
    assert Experiment("one-shot-mu", 3).schedule(3).rounds == 1


def test_buckets_that_auto_takes_with_many_columns_are_those_of_every_site():
    experiment = Experiment("exact", 3, privacy={**ROWS, "n_features": 6000})
    decided = experiment.with_mechanism_for(3)
    assert (decided.privacy["mechanism"], decided.privacy["buckets"]) == ("moment", 200)
    assert build_plan(decided.to_dict(), 3, None).program == experiment.program(3)
    later = replace(experiment, privacy={**ROWS, "n_features": 6000, "epsilon": 9.0})
    assert (
        later.with_mechanism_for(3, replace(decided, privacy={**decided.privacy, "buckets": 50}).to_dict()).privacy[
            "buckets"
        ]
        == 50
    )


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"mechanism": "momet"}, "'moment'"),
        ({"mechanism": 3}, "mechanism"),
        ({"centre_radius": 0.2}, 'centre_radius is for mechanism = "centred"; got no mechanism. Remove it'),
        ({"mechanism": "hybrid", "centre_radius": 0.2}, 'got mechanism = "hybrid". Remove it'),
        ({"mechanism": "centred", "centre_radius": 3}, "centre_radius must be above 0 and at most 2"),
        ({"mechanism": "hybrid", "buckets": 5}, 'buckets needs mechanism="moment"'),
        ({"mechanism": "moment", "buckets": 0}, "buckets must be a whole number of at least 1"),
        ({"n_rows": 100}, "n_rows = 100 says nothing without the number of columns. Add n_features"),
        ({"n_rows": 0, "n_features": 5}, "n_rows must be a whole number of at least 1"),
        ({"n_rows": 1.5, "n_features": 5}, "n_rows must be a whole number"),
        ({"n_row": 100}, "no setting 'n_row'. Did you mean 'n_rows'"),
    ],
)
def test_keys_of_a_mechanism_that_cannot_be_meant_are_refused_with_the_way_out(table, match):
    with pytest.raises(ParameterError, match=match):
        Experiment.from_table({"method": "exact", "rank": 3, "rounds": 2, "privacy": {**ROWS, **table}})


def test_the_table_on_the_page_is_that_of_an_experiment():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "federation.md").read_text(encoding="utf-8")
    section = page.split("### Privacy of rows")[1].split("\n### ")[0]
    example = tomllib.loads(section.split("```toml")[1].split("```")[0])
    experiment = Experiment.from_table(example)
    assert experiment.with_mechanism_for(4).privacy["mechanism"] == "moment"
    assert experiment.privacy_plan(4).forecast.is_mean is False
    assert f"below τ = {HYBRID_TAU}" in section
    for mechanism, exchanges in EXCHANGES.items():
        assert f"| `{mechanism}` | {exchanges}" in section


def test_keys_of_rows_are_none_of_parties():
    with pytest.raises(ParameterError, match='"party" has no mechanism'):
        Experiment("moment", 3, privacy={"unit": "party", "epsilon": 1.0, "mechanism": "moment"})
    with pytest.raises(ParameterError, match='needs method="exact"'):
        Experiment("moment", 3, privacy={**ROWS, "mechanism": "rounds"}).program(3)


def test_all_keys_are_those_of_the_program():
    named = {**ROWS, "mechanism": "centred", "centre_radius": 0.25, "n_rows": 1000, "n_features": 12}
    statistic = Experiment("exact", 3, privacy=named).program(3).statistic
    assert isinstance(statistic, CentredMoment)
    assert statistic.residual.bound == 0.25
    bucketed = Experiment("exact", 3, privacy={**ROWS, "mechanism": "moment", "buckets": 5}).program(3).statistic
    assert bucketed.moment.buckets == 5
    party = Experiment("moment", 3, privacy={"unit": "party", "epsilon": 1.0, "clip": 4.0}).program(3)
    assert (party.row_bound, party.traits.release.unit) == (4.0, "party")


# --- without noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
def test_a_moment_without_noise_is_refused_by_default_and_says_why(tmp_path, masked):
    """Rank and rounds do not matter: it counts as all rows, of which the coordinator learns no number."""
    federation = made(tmp_path, Experiment("moment", 1, secure_aggregation=masked), rows=1000)
    told = refusal(federation)
    assert "code 'exposure'" in told
    assert "XᵀX without noise counts as all rows; use noise (a table privacy) or another method" in told
    assert "1000" not in told
    assert "counts as all 1000 rows of this site" in log_of(federation)
    assert 'set maximum_exposure = "rows" in site.toml' in log_of(federation)
    assert str(1 << 40) not in told + log_of(federation)
    assert not (tmp_path / "east" / "ledger.jsonl").exists()
    entries = replace(federation, exposure=Exposure.ENTRIES)
    assert "all rows" in refusal(entries)


@pytest.mark.parametrize("masked", [False, True])
def test_a_moment_without_noise_is_charged_with_the_number_of_rows(tmp_path, masked):
    federation = made(tmp_path, Experiment("moment", 2, secure_aggregation=masked), rows=30, exposure=Exposure.ROWS)
    rounds = list(federation.rounds())
    assert len(rounds) == 3
    assert [line["directions"] for line in Chain(tmp_path / "east" / "ledger.jsonl").lines()] == [30, 2, 2]
    text = (tmp_path / "east" / "ledger.jsonl").read_text() + (tmp_path / "east" / "audit.jsonl").read_text()
    assert str(1 << 40) not in text
    assert federation.site("east").ledger.load().directions() == 34
    later = again(federation, "run-2", method="exact", seed=9)
    assert "code 'exposure'" in refusal(replace(later, exposure=Exposure.MEMBERSHIP))
    assert "before this run: 34" in log_of(federation)


def test_a_moment_without_noise_may_be_sent_again_where_rows_may(tmp_path):
    """Its first model is the same in all runs, so no seed would make another of it; a seed is still for one run."""
    federation = made(tmp_path, Experiment("moment", 2, seed=1), rows=30, exposure=Exposure.ROWS)
    assert len(list(federation.rounds())) == 3
    assert "code 'answered'" in refusal(again(federation, "run-2"))
    assert len(list(again(federation, "run-2", seed=2).rounds())) == 3
    assert federation.site("east").ledger.load().directions() == 68


def test_a_moment_without_noise_is_refused_where_there_is_a_budget(tmp_path):
    policy = Policy(privacy=PrivacyBudget(1.0))
    with pytest.raises(SiteRefused, match="'privacy-needed'"):
        list(Federation(tmp_path, Experiment("moment", 2), policy=policy).rounds())


# --- what the server says --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mechanism", EXCHANGES)
def test_what_was_expected_and_what_was_seen_are_in_the_result(tmp_path, mechanism):
    federation = private(tmp_path, mechanism)
    numbers = {**federation.experiment.privacy, "n_rows": 48, "n_features": 12}
    federation.experiment = replace(federation.experiment, privacy=numbers)
    list(federation.rounds())
    found = describe_release(federation.experiment, federation.plan(), federation.record())["privacy"]
    assert found["mechanism"] == mechanism
    assert "48 rows, 12 columns" in found["forecast"]["sentence"]
    assert found["visible_directions"] == federation.record().server.spectrum.visible
    assert "visible above the noise" in found["verdict"]
    model = build_model(federation.experiment, federation.plan(), federation.record())
    assert model.settings["privacy"]["mechanism"] == mechanism


@pytest.mark.parametrize("experiment", [Experiment("exact", 3, 1), Experiment("moment", 3)])
def test_without_a_private_moment_there_is_nothing_to_expect(tmp_path, experiment):
    federation = Federation(tmp_path, experiment)
    list(federation.rounds())
    assert describe_release(experiment, federation.plan(), federation.record()) == {}


def test_every_site_has_the_model_of_the_moment_and_its_own_weights(tmp_path):
    federation = private(tmp_path, "moment", secure_aggregation=True)
    [done] = federation.rounds()
    H = federation.plan().program.components(done.checkpoint.server)
    for name in federation.names:
        found = partsong.NMF.load(tmp_path / name / "results" / "run-1" / "model.safetensors")
        np.testing.assert_array_equal(found.components_, H)
        assert np.load(tmp_path / name / "results" / "run-1" / "weights.npy").shape == (16, 3)
