"""Private runs that were killed, and resumed from their folder: nothing is sent that was not paid for."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from partsong.core.interfaces import Outcome
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.methods import build
from partsong.methods.moment import MomentProgram
from partsong.methods.privacy_request import ROW_SETTINGS, RowPrivacy
from partsong.privacy.accounting import Ledger
from partsong.training.checkpoint import RunRecorder, load_run, save_run
from partsong.training.run_folder import RunFolder

EPSILON = 50.0
EXCHANGES = {"moment": 1, "centred": 2, "hybrid": 4, "rounds": 4}


class Killed(BaseException):
    """What nobody catches: the end of a process."""


def parts():
    rng = np.random.default_rng(5)
    H = rng.random((3, 8))
    return [rng.random((n, 3)) @ H for n in (60, 80, 50)]


def request(mechanism, **settings):
    return RowPrivacy(EPSILON, row_bound=1.0, mechanism=mechanism, **settings)


def fit(folder, privacy, *, resume=False, **settings):
    model = FederatedNMF(2, rounds=4, privacy=privacy, random_state=1, n_jobs=1, **settings)
    return model.fit(parts(), run_folder=folder, resume=resume)


@pytest.fixture
def sent(monkeypatch):
    """Uploads that parties have made, as (party, exchange), over all runs of a test."""
    plain, made = MomentProgram.local, []

    def local(self, shard, party, model):
        answer = plain(self, shard, party, model)
        made.append((shard.name, self.exchange_of(model)))
        return answer

    monkeypatch.setattr(MomentProgram, "local", local)
    return made


def killed(folder, privacy, exchange, within, **settings):
    """Run, and die as a killed process would: nothing is written after the checkpoint of so many exchanges.

    `within`: a party has already made its upload of the next exchange.
    """
    plain_save, plain_local, program = RunRecorder.save, MomentProgram.local, MomentProgram

    def save(self):
        if self.saved_index < exchange:
            plain_save(self)
        if self.saved_index >= exchange and not within:
            raise Killed

    def local(self, shard, party, model):
        answer = plain_local(self, shard, party, model)
        if within and self.exchange_of(model) == exchange:
            raise Killed
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunRecorder, "save", save)
        patch.setattr(program, "local", local)
        with pytest.raises(Killed):
            fit(folder, privacy, **settings)


def cost(program, exchanges):
    return Ledger(tuple((program.releases[exchange], 1) for exchange in exchanges)).epsilon(1e-5)


def require_paid(model, privacy, sent):
    """ε is that of the accountant for what was charged, covers what was sent, and is at most the budget."""
    program = privacy.program(build("exact", 2), 4, 3, False)
    for name in model.parties_:
        made = [exchange for party, exchange in sent if party == name]
        charged = model.accounts_.ledgers[name]
        assert charged.epsilon(1e-5) <= EPSILON
        assert cost(program, made) <= charged.epsilon(1e-5) + 1e-9
        counts, paid = Counter(program.releases[one] for one in made), dict(charged.entries)
        assert all(paid.get(release, 0) >= count for release, count in counts.items())
    assert model.epsilon_spent_ == model.accounts_.epsilon(1e-5) <= EPSILON


@pytest.mark.parametrize("within", [False, True], ids=["between exchanges", "within one"])
@pytest.mark.parametrize("exchange", [1, 2, 3])
def test_a_hybrid_pays_for_what_a_killed_process_may_have_sent(tmp_path, sent, exchange, within):
    """The exchange after the checkpoint is paid for twice, and the last one is not made."""
    privacy = request("hybrid")
    killed(tmp_path / "run", privacy, exchange, within)
    assert load_run(tmp_path / "run" / "checkpoint").is_under_way
    model = fit(tmp_path / "run", privacy, resume=True)
    require_paid(model, privacy, sent)
    assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
    assert model.epsilon_spent_ == pytest.approx(EPSILON, rel=1e-6)
    assert len(model.history_) == 3
    assert model.visible_directions_ is not None


def test_a_moment_is_never_made_twice():
    program = request("hybrid").program(build("exact", 2), 4, 3, False)
    assert program.releases[0] != program.releases[1]
    assert not program.traits.allows(1, 0)
    assert [program.traits.allows(made, made) for made in range(5)] == [True] * 4 + [False]
    assert program.traits.allows(3, 2), "a noisy round may be repeated, at the cost of another one"
    assert not program.traits.allows(0, 1), "no round is made in the place of the moment"


@pytest.mark.parametrize("within", [False, True], ids=["between exchanges", "within one"])
def test_a_centred_moment_that_may_have_been_sent_leaves_the_mean(tmp_path, sent, within):
    privacy = request("centred")
    killed(tmp_path / "run", privacy, 1, within)
    model = fit(tmp_path / "run", privacy, resume=True)
    require_paid(model, privacy, sent)
    assert max(Counter(sent).values()) == 1
    assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
    assert model.epsilon_spent_ == pytest.approx(EPSILON, rel=1e-6)
    assert model.visible_directions_ == 1
    mean = sum((X / np.linalg.norm(X, axis=1, keepdims=True)).sum(axis=0) for X in parts())
    H = model.components_ / np.linalg.norm(model.components_, axis=1, keepdims=True)
    assert (H @ mean / np.linalg.norm(mean)).max() > 0.95


@pytest.mark.parametrize("mechanism", ["centred", "hybrid"])
def test_a_run_that_was_stopped_between_two_exchanges_pays_for_none_twice(tmp_path, sent, mechanism):
    privacy = request(mechanism)
    whole = fit(tmp_path / "whole", privacy)
    sent.clear()
    killed(tmp_path / "run", privacy, 1, within=False)
    mark_closed(tmp_path / "run" / "checkpoint")
    model = fit(tmp_path / "run", privacy, resume=True)
    require_paid(model, privacy, sent)
    assert model.outcome_ is whole.outcome_ is Outcome.MAX_ROUNDS
    assert model.accounts_.to_json() == whole.accounts_.to_json()
    assert len(model.history_) == EXCHANGES[mechanism]


def test_a_moment_that_was_killed_within_its_only_exchange_begins_again(tmp_path, sent):
    """No file was written, and nobody but the killed process has seen anything: it is paid for once."""
    privacy = request("moment")
    killed(tmp_path / "run", privacy, 0, within=True)
    assert RunFolder(tmp_path / "run").is_unstarted
    model = fit(tmp_path / "run", privacy, resume=True)
    assert model.outcome_ is Outcome.MAX_ROUNDS
    assert model.epsilon_spent_ == cost(privacy.program(build("exact", 2), 4, 3, False), [0]) <= EPSILON


def test_a_moment_that_was_killed_after_its_only_exchange_is_not_sent_again(tmp_path, sent):
    privacy = request("moment")
    killed(tmp_path / "run", privacy, 1, within=False)
    model = fit(tmp_path / "run", privacy, resume=True)
    require_paid(model, privacy, sent)
    assert max(Counter(sent).values()) == 1
    assert model.outcome_ is Outcome.MAX_ROUNDS
    assert (model.n_iter_, len(model.components_)) == (1, 2)


@pytest.mark.parametrize("mechanism", ["centred", "hybrid", "rounds"])
def test_what_earlier_runs_have_spent_is_not_of_this_run(tmp_path, sent, mechanism):
    """Its uploads are not those that a resumed run still has."""
    first = fit(tmp_path / "first", RowPrivacy(10.0, row_bound=1.0, mechanism="moment"))
    privacy = request(mechanism, spent=first.accounts_)
    killed(tmp_path / "run", privacy, 1, within=False)
    mark_closed(tmp_path / "run" / "checkpoint")
    model = fit(tmp_path / "run", privacy, resume=True)
    assert model.outcome_ is Outcome.MAX_ROUNDS
    assert len(model.history_) == EXCHANGES[mechanism]
    assert {len(ledger) for ledger in model.accounts_.ledgers.values()} == {1 + EXCHANGES[mechanism]}
    assert EPSILON - 0.1 <= model.epsilon_spent_ <= EPSILON


def test_a_run_of_an_older_version_goes_on_with_rounds(tmp_path):
    """Its settings have no mechanism, and it had no other."""
    privacy = request("rounds")
    killed(tmp_path / "run", privacy, 2, within=False)
    path = tmp_path / "run" / "checkpoint"
    mark_closed(path)
    run = load_run(path)
    of_old = {name: value for name, value in run.about["settings"]["privacy"].items() if name not in ROW_SETTINGS[1:]}
    save_run(path, replace(run, about={**run.about, "settings": {**run.about["settings"], "privacy": of_old}}))
    assert "mechanism" not in of_old
    model = fit(tmp_path / "run", privacy, resume=True)
    assert (model.n_iter_, model.outcome_) == (4, Outcome.MAX_ROUNDS)


def test_a_killed_process_is_not_different(tmp_path):
    """A real one, that ends within the second noisy round of a hybrid, without a word."""
    script = """
        import os, sys
        sys.path.insert(0, sys.argv[1])
        import test_private_resume as tests
        plain = tests.MomentProgram.local

        def local(self, shard, party, model):
            answer = plain(self, shard, party, model)
            if self.exchange_of(model) == 2 and shard.name == "party-02":
                os._exit(9)
            return answer

        tests.MomentProgram.local = local
        tests.fit(sys.argv[2], tests.request("hybrid"))
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(Path(__file__).parent), str(tmp_path / "run")]
    assert subprocess.run(command, check=False).returncode == 9
    assert load_run(tmp_path / "run" / "checkpoint").checkpoint.index == 2
    model = fit(tmp_path / "run", request("hybrid"), resume=True)
    assert model.outcome_ is Outcome.PRIVACY_BUDGET_EXHAUSTED
    assert model.epsilon_spent_ == pytest.approx(EPSILON, rel=1e-6)
    assert model.epsilon_spent_ <= EPSILON
    assert len(model.history_) == 3


def mark_closed(path):
    """The same file as its owner's Ctrl-C would have left it."""
    save_run(path, replace(load_run(path), is_under_way=False))
