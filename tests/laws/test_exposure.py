"""Laws of exposure: docs/reference/exposure.md lists what leaves, and states what sums without noise give away."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from method_tables import METHODS, SENDS_H
from typer.testing import CliRunner

from partsong import methods
from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.findings import NO_GUARANTEE, PartyFindings, verdict_of
from partsong.attacks.runner import RecordedRun, attack, findings
from partsong.attacks.transcript import of_party, replay_party, transcript
from partsong.cli.main import app
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.core.streams import key
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.data.table import Table
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous, Durations
from partsong.errors import PartyError
from partsong.estimators.federated_nmf import FederatedNMF
from partsong.federation.exposure_limit import ZERO
from partsong.federation.policy import Policy, PrivacyBudget, Terms
from partsong.io.party_folder import write_parts
from partsong.methods import build
from partsong.methods.dsanls import SketchExchange
from partsong.methods.fnmf import LONG_ROUNDS
from partsong.methods.privacy_request import PartyPrivacy, RowPrivacy
from partsong.methods.private import party_private, row_private
from partsong.methods.secure_sketched import SketchedSums
from partsong.methods.two_stage import exact_after
from partsong.privacy.exposure import (
    LIMITS,
    Exposure,
    PartyExposure,
    Support,
    counted,
    directions_after,
    directions_of,
)
from partsong.sketch.kinds import Gaussian


def sparse(n, m, density, seed=0):
    rng = np.random.default_rng(seed)
    return rng.gamma(1.0, size=(n, m)) * (rng.random((n, m)) < density)


def shards_of(parts):
    names = [f"p{i:02d}" for i in range(len(parts))]
    return [Shard(name, as_matrix(part), key(7, name)) for name, part in zip(names, parts, strict=True)]


def recorded(program, parts, exchanges, seed=3):
    """The layout of a run, its rounds, and its exchanges with the models that were answered."""
    shards = shards_of(parts)
    engine = Sequential(record=True)
    rounds = list(engine.run(program, shards, Schedule(exchanges, seed), reduction=PlainReduction()))
    layout = Layout.of(shards, seed)
    return layout, rounds, transcript([done.traffic for done in rounds], program, layout, asynchronous=False)


# ---- the column theorem -----------------------------------------------------------------------------------------


def weights_of(parts, rank, rounds):
    """[W_1 … W_T] (n × Σk) of the first party, and the crosses that it sent."""
    _, done, exchanges = recorded(build("exact", rank, local_steps=3), parts, rounds)
    weights = [each.checkpoint.parties["p00"].W for each in done]
    return weights, [upload["cross"] for _, upload in of_party(exchanges, "p00", "cross")]


@pytest.mark.parametrize("density", [0.3, 0.5, 1.0])
def test_a_column_with_more_rows_than_directions_can_be_another_with_the_same_sums(density):
    X = sparse(60, 40, density)
    weights, crosses = weights_of([X, sparse(50, 40, density, 1)], 4, 5)
    for W, cross in zip(weights, crosses, strict=True):
        np.testing.assert_allclose(W.T @ X, cross, rtol=1e-12)
    stacked, moved, rng = np.hstack(weights), 0, np.random.default_rng(0)
    for j in np.flatnonzero((X > 0).sum(axis=0) > 20):
        x = X[:, j]
        support = x > 0
        kernel = np.linalg.svd((stacked[support] * x[support, None]).T)[2][20:]
        shares = kernel.T @ kernel @ rng.standard_normal(support.sum())
        v = np.zeros(len(X))
        v[support] = 0.9 * x[support] * shares / np.abs(shares).max()
        assert np.linalg.norm(stacked.T @ v) < 1e-13 * np.linalg.norm(stacked) * np.linalg.norm(x)
        for other in (x + v, x - v):
            assert other.min() >= 0
            assert np.linalg.norm(other - x) > 1e-3 * np.linalg.norm(x)
            for W, cross in zip(weights, crosses, strict=True):
                np.testing.assert_allclose(W.T @ other, cross[:, j], rtol=1e-12, atol=1e-13 * cross.max())
        moved += 1
    assert moved >= (7 if density < 0.5 else 40)


def test_a_column_with_fewer_rows_than_directions_follows_from_the_weights():
    X = sparse(60, 40, 0.3)
    weights, crosses = weights_of([X, sparse(50, 40, 0.3, 1)], 4, 5)
    stacked, sent, computed = np.hstack(weights), np.vstack(crosses), 0
    for j in np.flatnonzero((X > 0).sum(axis=0) <= 20):
        support = X[:, j] > 0
        values = np.linalg.svd(stacked[support].T, compute_uv=False)
        assert values[-1] > 1e-6 * values[0]  # no v but zero
        found = np.linalg.lstsq(stacked[support].T, sent[:, j], rcond=None)[0]
        np.testing.assert_allclose(found, X[support, j], rtol=1e-6)
        computed += 1
    assert computed >= 25


@pytest.mark.parametrize("density", [0.4, 0.8])
def test_at_membership_every_column_can_be_another_even_for_somebody_who_knows_the_weights(density):
    X = sparse(80, 12, density)
    support = Support.of(X)
    rounds = support.max_directions(Exposure.MEMBERSHIP) // 3
    weights, _ = weights_of([X, sparse(50, 12, density, 1)], 3, rounds)
    assert support.exposure(3 * rounds) is Exposure.MEMBERSHIP
    for column in X.T:
        assert np.linalg.matrix_rank(np.hstack(weights)[column > 0]) < (column > 0).sum()


# ---- the counting theorem ---------------------------------------------------------------------------------------


class Sums:
    """All numbers that a party sends in a run, as a function of the values of its table on a fixed support."""

    def __init__(self, X, rank, rounds):
        self.program, self.X = build("exact", rank, local_steps=3), X
        self.layout, _, exchanges = recorded(self.program, [X, sparse(*X.shape, 0.7, 5)], rounds)
        seen = of_party(exchanges, "p00")
        self.models = [model for model, _ in seen]
        self.support = X > 0
        self.start = X[self.support]
        upload = np.concatenate([flat(upload) for _, upload in seen])
        np.testing.assert_array_equal(self(self.start), upload)

    def __call__(self, values):
        table = np.zeros_like(self.X)
        table[self.support] = values
        answers = replay_party(self.program, self.layout, "p00", self.models, table)
        return np.concatenate([flat(upload) for upload in answers])

    def jacobian(self, values, step=1e-6):
        """(numbers sent × values), by differences."""
        moves = np.diag(step * values)
        slopes = [(self(values + move) - self(values - move)) / (2 * move.sum()) for move in moves]
        return np.array(slopes).T


def flat(upload):
    """Every number of an upload but the lower half of the gram, which is the upper one."""
    arrays = {name: np.asarray(array, np.float64) for name, array in upload.arrays.items()}
    np.testing.assert_array_equal(arrays["gram"], arrays["gram"].T)
    arrays["gram"] = arrays["gram"][np.triu_indices(len(arrays["gram"]))]
    return np.concatenate([array.ravel() for _, array in sorted(arrays.items())])


def rank_of(jacobian, tolerance=1e-7):
    sizes = np.linalg.norm(jacobian, axis=1)
    values = np.linalg.svd(jacobian[sizes > 0] / sizes[sizes > 0, None], compute_uv=False)
    return int((values > tolerance * values[0]).sum())


def numbers_sent(m, k, rounds):
    return rounds * (k * m + k * (k + 1) // 2 + 2)


FEWER = [(12, 6, 1.0, 1), (12, 6, 1.0, 2), (12, 6, 0.5, 1), (20, 10, 0.5, 1), (20, 10, 0.5, 2), (20, 10, 1.0, 4)]


@pytest.mark.parametrize(("n", "m", "density", "rounds"), FEWER)
def test_fewer_numbers_than_values_leave_another_table_with_the_same_sums(n, m, density, rounds):
    """The rank is too small, and a few steps of Newton from along the kernel end at that other table."""
    X = sparse(n, m, density, 4)
    sums, sent = Sums(X, 3, rounds), numbers_sent(m, 3, rounds)
    wanted, values = sums(sums.start), len(sums.start)
    assert len(wanted) == sent
    assert sent < values
    jacobian = sums.jacobian(sums.start)
    assert rank_of(jacobian) <= sent
    assert rank_of(jacobian) < values
    open_way = np.linalg.svd(jacobian)[2][-1]
    other = sums.start + 0.1 * np.min(sums.start / np.abs(open_way)) * open_way
    for _ in range(4):
        other = other - np.linalg.lstsq(sums.jacobian(other), sums(other) - wanted, rcond=1e-7)[0]
    assert other.min() > 0
    assert np.linalg.norm(other - sums.start) > 3e-4 * np.linalg.norm(sums.start)
    assert np.linalg.norm(sums(other) - wanted) < 1e-12 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("n", "m", "rounds"), [(12, 6, 2), (12, 6, 4), (20, 10, 3), (20, 10, 6)])
def test_more_numbers_than_values_leave_no_open_way_for_sparse_rows(n, m, rounds):
    """So that the rank above is small for want of numbers, and not for want of accuracy."""
    sums = Sums(sparse(n, m, 0.5, 4), 3, rounds)
    assert numbers_sent(m, 3, rounds) >= len(sums.start)
    assert rank_of(sums.jacobian(sums.start)) == len(sums.start)


# ---- words ------------------------------------------------------------------------------------------------------

SENDS_SUMS = ("exact", "fnmf", "game")
MOMENT = build("moment", 3)
TABLES = [np.random.default_rng(5).random((n, 9)) + 0.1 for n in (60, 40, 50)]


def fitted(method, rounds, tables=TABLES, **settings):
    settings = {"tol": 0, "random_state": 1, **settings}
    if method not in ("exact", "game", "moment"):
        settings |= {"local_steps": 2}
    return FederatedNMF(2, method=method, rounds=rounds, **settings).fit(tables)


@pytest.mark.parametrize("method", METHODS)
def test_the_word_is_unknown_where_h_alone_is_sent_and_grows_with_the_rounds_where_sums_are(method):
    words = [fitted(method, rounds).exposure_ for rounds in (1, 2, 3, 6, 12)]
    if method not in SENDS_SUMS:
        assert set(words) == {Exposure.UNKNOWN}
        return
    first = 1 if method == "fnmf" else 0  # its first round sends H
    assert set(words[:first]) <= {Exposure.UNKNOWN}
    assert set(words[first:]) <= set(LIMITS)
    severities = [word.severity for word in words]
    assert severities == sorted(severities)
    assert {words[first], words[-1]} == {Exposure.GUESS, Exposure.ROWS}


@pytest.mark.parametrize("method", SENDS_H)
def test_the_word_is_bounded_with_noise_for_parties(method):
    model = fitted(method, 3, privacy=PartyPrivacy(3.0))
    assert model.exposure_ is Exposure.BOUNDED
    assert {one.level for one in model.exposures_.values()} == {Exposure.BOUNDED}


@pytest.mark.parametrize("rounds", [1, 40])
def test_the_word_is_bounded_with_noise_for_rows_in_any_number_of_rounds(rounds):
    privacy = RowPrivacy(3.0, row_bound=3.0, mechanism="rounds")
    assert fitted("exact", rounds, privacy=privacy).exposure_ is Exposure.BOUNDED


@pytest.mark.parametrize("mechanism", ["moment", "centred", "hybrid"])
def test_the_word_is_bounded_with_noise_in_the_moment_of_rows(mechanism):
    privacy = RowPrivacy(3000.0, row_bound=3.0, mechanism=mechanism)
    assert fitted("moment", 1, privacy=privacy).exposure_ is Exposure.BOUNDED


@pytest.mark.parametrize("n", [60, 6000])
def test_the_word_is_rows_for_a_moment_without_noise_of_any_number_of_rows(n):
    """It determines XᵀX at once, so that all rows are counted; masks and a limit by their number change nothing."""
    draw = np.random.default_rng(5)
    model = fitted("moment", 1, [draw.random((n, 9)) + 0.1 for _ in range(3)])
    assert model.exposure_ is Exposure.ROWS
    assert {one.directions for one in model.exposures_.values()} == {n}
    assert {one.max_exchanges for one in model.exposures_.values()} == {0}
    support = Support(n, n, float(n))
    for limit in LIMITS[:-1]:
        assert support.max_directions(limit) < counted(directions_after(MOMENT, 1, 3), n)


def test_directions_of_a_moment_are_those_of_the_uploads_that_were_recorded():
    _, _, exchanges = recorded(MOMENT, TABLES, 3)
    counts = [sum(directions_of(MOMENT, model) for model, _ in of_party(exchanges[:t], "p01")) for t in range(4)]
    assert counts == [directions_after(MOMENT, t, len(TABLES)) for t in range(4)]
    assert [counted(one, 40) for one in counts] == [0, 40, 40, 40]


@pytest.mark.parametrize("method", METHODS)
def test_the_word_of_a_run_is_the_worst_of_its_parties_and_the_support_is_their_own(method):
    model = fitted(method, 3)
    assert model.exposure_ is max((one.level for one in model.exposures_.values()), key=lambda one: one.severity)
    for one, table in zip(model.exposures_.values(), TABLES, strict=True):
        assert one.support == Support(len(table), len(table), float(len(table)))


PROGRAMS = {
    "exact": build("exact", 3, local_steps=5),
    "fnmf": exact_after(build("fnmf-local", 3, local_steps=2, align="assignment"), LONG_ROUNDS),
    "long fnmf": exact_after(build("fnmf-local", 3, local_steps=2, align="assignment"), 4),
    "game": build("game", 3),
    "sketches": SketchedSums(3, Gaussian(5)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_directions_are_those_of_the_uploads_that_were_recorded(name):
    program = PROGRAMS[name]
    _, _, exchanges = recorded(program, TABLES, 6)
    counts = [sum(directions_of(program, model) for model, _ in of_party(exchanges[:t], "p01")) for t in range(7)]
    assert counts == [directions_after(program, t, len(TABLES)) for t in range(7)]
    assert counts[-1] > 0


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("parties", [1, 3])
def test_exchanges_never_lower_the_severity_and_the_most_that_stay_at_membership_are_exact(name, parties):
    program, support = PROGRAMS[name], Support(120, 100, 110.0)
    after = [PartyExposure.of("p", program, exchanges, support, parties) for exchanges in range(130)]
    severities = [one.level.severity for one in after]
    assert severities == sorted(severities)
    (most,) = {one.max_exchanges for one in after}
    assert 0 < most < len(after) - 1
    assert after[most].level.within(Exposure.MEMBERSHIP)
    assert not after[most + 1].level.within(Exposure.MEMBERSHIP)
    if name == "exact":
        assert {one.level for one in after[1:]} == set(LIMITS)


@pytest.mark.parametrize("method", ["exact", "fnmf"])
def test_a_run_of_the_most_rounds_stays_at_membership_and_one_more_round_does_not(method):
    model = fitted(method, 2)
    most = min(one.max_exchanges for one in model.exposures_.values())
    assert most == 10 + (LONG_ROUNDS if method == "fnmf" else 0)  # 40 rows / 2 / rank 2
    assert fitted(method, most).exposure_ is Exposure.MEMBERSHIP
    assert not fitted(method, most + 1).exposure_.within(Exposure.MEMBERSHIP)


@pytest.mark.parametrize("method", ["exact", "fnmf", "game"])
def test_the_rounds_in_the_sentence_are_those_of_the_run(method):
    """A site that asks for as many rounds as the sentence allows stays at membership."""
    model = fitted(method, 4)
    said = {str(one) for one in model.exposures_.values()}
    assert all(f"{model.n_iter_} rounds × 2 components" in each for each in said)
    most = min(int(re.search(r"At most (\d+) rounds", each)[1]) for each in said)
    assert fitted(method, most).exposure_.within(Exposure.MEMBERSHIP)


@pytest.mark.parametrize("density", [0.5, 1.0])
def test_each_word_has_the_condition_that_its_table_states(density):
    X = sparse(200, 30, density)
    X[:, 3] = 0
    counts = [int((column > 0).sum()) for column in X.T if (column > 0).any()]
    support = Support.of(X)
    assert (support.rows, support.rarest) == (200, min(counts))
    assert support.mean == pytest.approx(np.mean(counts))
    for directions in range(1, 220):
        word = support.exposure(directions)
        assert (word is Exposure.GUESS) == (directions <= min(counts) / 10)
        assert word.within(Exposure.MEMBERSHIP) == (directions <= min(counts) / 2)
        assert (word is Exposure.ROWS) == (directions > max(support.mean, min(counts)) / 2)
    for limit in LIMITS[:-1]:
        assert support.exposure(support.max_directions(limit)).within(limit)
        assert not support.exposure(support.max_directions(limit) + 1).within(limit)


# ---- crafted models ---------------------------------------------------------------------------------------------
#
# h_1 = e_j and h_2 = 1 elsewhere, β at j: a row has w_1 > 0 only if x_j is more than β times the mean of its others.


def crafted(column, beta, m):
    H = np.ones((2, m))
    H[0] = np.arange(m) == column
    H[1, column] = beta
    return Message({"H": H, "amount": np.array(0.0), "restart": np.array(1.0)})


def read_by_crafted_models(tables, rounds):
    """Rows that a coordinator has read from the sums of these tables alone.

    β climbs towards the ratio of the combination that was seen, which is below that of some row. Once one row is left,
    two models in turn show the same combination, and no other case does: that is how the coordinator knows.
    """
    program, shards, m = build("exact", 2, local_steps=3), shards_of(tables), tables[0].shape[1]
    layout = Layout.of(shards, 0)
    states = [program.start_party(shard, layout) for shard in shards]
    read, column, beta, before = [], 0, 1.0, None
    for _ in range(rounds):
        model = crafted(column, beta, m)
        assert model["H"].min() >= 0
        answers = [program.local(shard, state, model) for shard, state in zip(shards, states, strict=True)]
        states = [state for state, _ in answers]
        square, cross = (sum(np.asarray(upload[name])[0] for _, upload in answers) for name in ("gram", "cross"))
        if square[0] == 0:  # no row
            beta, before = 0.8 * beta, None
            continue
        row = cross / np.sqrt(square[0])
        if before is not None and np.linalg.norm(row - before) <= 1e-9 * np.linalg.norm(row):
            read.append(row)
            column, beta, before = column + 1, 0.7 * beta, None
            continue
        beta, before = beta + 0.9 * (row[column] / np.delete(row, column).mean() - beta), row
    return np.array(read)


@pytest.mark.parametrize("parties", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_a_coordinator_that_crafts_models_reads_rows_while_the_count_says_guess(parties, seed):
    n, m, rounds = 400, 30, 20
    tables = [np.random.default_rng([seed, party]).gamma(2.0, size=(n, m)) for party in range(parties)]
    sent = rounds * directions_of(build("exact", 2, local_steps=5), crafted(0, 1.0, m))
    assert sent <= n / 10
    assert {Support.of(X).exposure(sent) for X in tables} == {Exposure.GUESS}
    rows, X = read_by_crafted_models(tables, rounds), np.vstack(tables)
    apart = np.linalg.norm(rows[:, None] - X[None], axis=2) / np.linalg.norm(X, axis=1)
    assert apart.min(axis=1).max() < 1e-9
    assert 3 <= len(set(apart.argmin(axis=1))) <= 5, "as docs/reference/exposure.md says"


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_a_model_of_unit_vectors_is_answered_with_rows_of_the_second_moment(density):
    X = sparse(400, 30, density)
    program, (shard,) = build("exact", 3, local_steps=3), shards_of([X])
    columns = [2, 11, 29]
    model = Message({"H": np.eye(30)[columns], "amount": np.array(0.0), "restart": np.array(1.0)})
    _, upload = program.local(shard, program.start_party(shard, Layout.of([shard], 0)), model)
    moment = X.T @ X
    np.testing.assert_allclose(upload["cross"], moment[columns], rtol=1e-12)
    np.testing.assert_allclose(upload["gram"], moment[np.ix_(columns, columns)], rtol=1e-12)


# ---- wording ----------------------------------------------------------------------------------------------------

LEVELS = "|".join(Exposure)
STATED = re.compile(rf"(?:severity|by the numbers|by the numbers alone|exposure now)\W+({LEVELS})\b", re.IGNORECASE)
SOOTHING = re.compile(r"\b(nothing|safe)\b", re.IGNORECASE)


def require_level(text, level=None):
    """Soothing words need a stated level; "rows" in passing does not count as one."""
    if SOOTHING.search(text):
        stated = STATED.findall(text)
        assert stated, text
        assert level is None or str(level) in stated, text


def outcome(level, *, tried=(), is_sum=False, party="a"):
    return PartyFindings(party, "server", (), 0, 0, tried, (), is_sum=is_sum, by_law=level)


@pytest.mark.parametrize("level", Exposure)
def test_verdicts_without_a_finding_state_the_level(level):
    for tried, is_sum in itertools.product([(), ("rows from sums",)], [False, True]):
        one = outcome(level, tried=tried, is_sum=is_sum)
        assert str(level) in one.verdict
        require_level(one.verdict, level)
        for others in ([], [outcome(Exposure.BOUNDED, party="b")]):
            said = verdict_of([one, *others])
            assert f"By the numbers alone: {level}." in said
            assert said.endswith(NO_GUARANTEE)
            require_level(said, level)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("with_rows", [False, True])
def test_verdicts_on_recorded_runs_state_the_level(name, with_rows):
    layout, rounds, _ = recorded(PROGRAMS[name], TABLES, 2)
    run = RecordedRun([done.traffic for done in rounds], PROGRAMS[name], layout)
    run = replace(run, truth=dict(zip(layout.parties, TABLES, strict=True)) if with_rows else {})
    found = findings(run, seconds=5)
    for each in found:
        assert each.found or str(each.by_law) in each.verdict
        require_level(each.verdict, each.by_law)
    require_level(verdict_of(found))
    assert any(f"By the numbers alone: {each.by_law}." in verdict_of(found) for each in found)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A clinic of one row, a table with a rare column, and one without zeros."""
    rng = np.random.default_rng(5)
    X = rng.gamma(2.0, size=(121, 8))
    X[2:60, 3] = 0
    rows = {"clinic": np.arange(1), "rare": np.arange(1, 60), "dense": np.arange(60, 121)}
    place = tmp_path_factory.mktemp("parts") / "parts"
    write_parts(place, Table(X, tuple(f"gene {j}" for j in range(8))), rows, {})
    return place


def printed(*words):
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


FITS = {
    "exact": ["--method", "exact"],
    "secure_aggregation": ["--method", "exact", "--secure-aggregation"],
    "noise": ["--method", "exact", "--epsilon", 1, "--unit", "row", "--row-bound", 5],
    "fedavg": ["--method", "fedavg"],
    "game": ["--method", "game"],
}


@pytest.mark.parametrize("name", FITS)
def test_the_attack_command_never_soothes_without_a_level(name, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    printed("fit", parts, "-k", 2, "--rounds", 2, "--seed", 3, "--run-folder", "run", "--record", "-q", *FITS[name])
    targets = [[], ["--party", "dense"], ["--party", "rare"]]
    for data, attacker, target in itertools.product([[], ["--data", parts]], ["server", "colluders"], targets):
        said = printed("attack", "run", "--attacker", attacker, "--seconds", 5, "--report", "page.html", *data, *target)
        assert re.match(rf"severity\s+({LEVELS})\b", said)
        for paragraph in (said, said.split("\n\n")[-1]):  # the last one is the verdict
            require_level(paragraph)
        require_level(re.sub(r"<style.*?</style>|<[^>]*>", " ", (tmp_path / "page.html").read_text(), flags=re.DOTALL))


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("sent", [0, 3, 12, 40])
@pytest.mark.parametrize("density", [0.3, 1.0])
def test_the_terms_that_a_site_reads_never_soothe_without_the_level(limit, sent, density):
    X = sparse(60, 8, density)
    for change in ({}, {"rare_columns": ZERO}, {"privacy": PrivacyBudget(1.0, unit="row")}):
        terms = Terms(Policy(maximum_exposure=limit, **change), sent, uncounted=sent)
        said, _ = terms.of_table(X, range(8))
        require_level(said, Support.of(X).exposure(sent))
        require_level(terms.of_texts())
        assert limit is not Exposure.ROWS or not SOOTHING.search(said)
        if limit is not Exposure.ROWS and "privacy" not in change:
            assert str(Support.of(X).exposure(sent)) in STATED.findall(said)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "exposure.md").read_text("utf-8")
K, M, ROWS, SEED = 3, 59, (37, 41, 43), 11
SIZES = {
    "k": K,
    "m": M,
    "w": -(-M // len(ROWS)),
    "d": 6,  # ⌈m/10⌉
    "e": 13,  # ⌈Σn/10⌉
    "g": 4 * K,
    "t": M * (M + 1) // 2,
    "c": M + 1,
    "b": 7 * M,  # of 7 buckets
}
NEARLY, ROUGHLY = 0.1, 0.5
EQUALLY_FAST = Durations({"p0": 1.0, "p1": 1.0, "p2": 1.0})


@dataclass(frozen=True)
class Case:
    """A recipe as it is run here: how many exchanges, and by which engine."""

    program: Any
    rounds: int = 3
    engine: Any = Sequential(record=True)
    is_two_sided: bool = False

    @property
    def is_asynchronous(self) -> bool:
        return isinstance(self.engine, Asynchronous)


def moment_case(rounds: int, privacy: Any) -> Case:
    return Case(privacy.program(build("moment", K), 1, len(ROWS), False, M), rounds)


def of_rows(**settings: Any) -> RowPrivacy:
    return RowPrivacy(1.0, row_bound=1.0, **settings)


CASES = {
    "exact": Case(build("exact", K, local_steps=5)),
    "moment": Case(build("moment", K)),
    "row-moment": moment_case(1, of_rows(mechanism="moment")),
    "row-buckets": moment_case(1, of_rows(mechanism="moment", buckets=7)),
    "row-centred": moment_case(2, of_rows(mechanism="centred")),
    "row-hybrid": moment_case(4, of_rows(mechanism="hybrid")),
    "party-moment": moment_case(1, PartyPrivacy(1.0)),
    "row-private": Case(row_private(K, epsilon=1.0, row_bound=1.0, rounds=3)),
    "party-private": Case(party_private(build("fedavg", K, local_steps=10), epsilon=1.0, delta=1e-5, rounds=3)),
    "then-exact": Case(exact_after(build("fedavg", K, local_steps=10), 2), 4),
    "fedavg": Case(build("fedavg", K, local_steps=10)),
    "fedprox": Case(build("fedprox", K)),
    "fnmf-local": Case(build("fnmf-local", K, align="assignment")),
    "fnmf-paper": Case(build("fnmf-paper", K)),
    "fnmf-personal": Case(build("fnmf-personal", K)),
    "fnmf": Case(build("fnmf", K), 4),
    "fnmf-by-sums": Case(build("fnmf-by-sums", K), 6),
    "local-only": Case(build("local-only", K), 1),
    "one-shot-ipalm": Case(build("one-shot-ipalm", K, local_steps=200), 1),
    "one-shot-mu": Case(build("one-shot-mu", K, local_steps=200), 1),
    "game-consensus": Case(build("game-consensus", K)),
    "syn-sd": Case(build("syn-sd", K)),
    "syn-ssd-u": Case(build("syn-ssd-u", K), 33),
    "syn-ssd-v": Case(build("syn-ssd-v", K), 33),
    "syn-ssd-uv": Case(build("syn-ssd-uv", K), 33),
    "asyn-sd": Case(build("asyn-sd", K), 12, Asynchronous(EQUALLY_FAST, record=True)),
    "asyn-ssd-v": Case(build("asyn-ssd-v", K), 12, Asynchronous(EQUALLY_FAST, record=True)),
    "secure-dsanls": Case(build("secure-dsanls", K), 4),
    "dsanls": Case(SketchExchange(K, iterations=4, every=2, n_rows=sum(ROWS)), 9, is_two_sided=True),
    "game": Case(build("game", K), 6),
}


def rows_of(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its head."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


SIZE = r"number|(?:\d+|[a-z])(?: × (?:\d+|[a-z]))*"
SENT = [
    (method, array, size, weight)
    for methods_, arrays, weight, *_ in rows_of("What is sent")
    for method in re.findall(r"`([\w-]+)`", methods_)
    for array, size in re.findall(rf"`(\w+)` ({SIZE})(?=,|$)", arrays)
]
"""Method, array, size and weight: a row of the table is about several of each."""

ALONE = {
    method: (found, error)
    for found, methods_, _ in rows_of("A party with a single row")
    for method, error in re.findall(r"`([\w-]+)` ?([\d.e-]*)", methods_)
}


def parts_of_data(rows: tuple[int, ...]) -> list[np.ndarray]:
    draw = np.random.default_rng(4)
    X = draw.gamma(0.4, size=(sum(rows), K)) @ draw.gamma(0.4, size=(K, M)) + 0.05 * draw.random((sum(rows), M))
    return np.split(X * (draw.random(X.shape) < 0.7), np.cumsum(rows)[:-1])


def shards_of_case(case: Case, rows: tuple[int, ...]) -> list[Shard]:
    parts = parts_of_data(rows)
    blocks = two_sided_blocks(np.vstack(parts), len(rows)) if case.is_two_sided else map(as_matrix, parts)
    return [Shard(f"p{i}", block, key(5, f"p{i}")) for i, block in enumerate(blocks)]


@cache
def recorded_case(recipe: str, rows: tuple[int, ...] = ROWS) -> tuple[Any, ...]:
    case = CASES[recipe]
    shards = shards_of_case(case, rows)
    done = case.engine.run(case.program, shards, Schedule(case.rounds, SEED), reduction=PlainReduction())
    return tuple(done)


def messages(recipe: str) -> list[Any]:
    return [message for done in recorded_case(recipe) for _, _, message in done.traffic]


WITH_NOISE = {"row-private", "row-moment", "row-buckets", "row-centred", "row-hybrid", "party-private", "party-moment"}
"""Rows about methods with `privacy=…`."""


def test_the_page_is_about_every_method():
    named = {*methods.names(), *methods.names(methods.RANKS)} | WITH_NOISE
    assert named == set(CASES) == {name for name, *_ in SENT} == set(ALONE)
    assert len({(name, array) for name, array, *_ in SENT}) == len(SENT), "an array is listed twice"
    for _, arrays, *_ in rows_of("What is sent"):
        assert len(re.findall(rf"`\w+` (?:{SIZE})(?=,|$)", arrays)) == arrays.count("`") / 2, "an array without a size"


@pytest.mark.parametrize("recipe", CASES)
def test_every_array_that_leaves_is_listed_with_its_size_and_nothing_else_leaves(recipe):
    listed = {
        array: () if size == "number" else tuple(SIZES.get(part) or int(part) for part in size.split(" × "))
        for name, array, size, *_ in SENT
        if name == recipe
    }
    seen = {name: tuple(array.shape) for message in messages(recipe) for name, array in message.arrays.items()}
    assert seen == listed


@pytest.mark.parametrize("recipe", CASES)
def test_a_message_is_as_large_as_its_arrays_and_one_number_more(recipe):
    for message in messages(recipe):
        assert message.nbytes == 8 * sum(int(np.prod(array.shape)) for array in message.arrays.values()) + 8


@pytest.mark.parametrize("recipe", CASES)
def test_the_weight_is_what_the_page_says(recipe):
    told = {weight for name, _, _, weight, *_ in SENT if name == recipe}
    seen = {(party, message.weight) for done in recorded_case(recipe) for party, _, message in done.traffic}
    counts = {f"p{i}": float(n) for i, n in enumerate(ROWS)}
    kinds = {"n_p" if weight == counts[party] else "1" if weight == 1 else "?" for party, weight in seen}
    assert kinds == told


@pytest.mark.parametrize("recipe", [name for name, case in CASES.items() if not case.is_two_sided])
def test_no_row_of_the_data_and_nothing_with_an_entry_for_each_row_leaves(recipe):
    parts = dict(zip(("p0", "p1", "p2"), parts_of_data(ROWS), strict=True))
    for done in recorded_case(recipe):
        for party, _, message in done.traffic:
            for array in (np.asarray(array) for array in message.arrays.values()):
                assert len(parts[party]) not in array.shape
                if array.ndim == 2 and M in array.shape:
                    vectors = array if array.shape[1] == M else array.T
                    assert (
                        np.abs(np.corrcoef(parts[party], vectors)[: len(parts[party]), len(parts[party]) :]).max()
                        < 1 - 1e-6
                    )


@pytest.mark.parametrize("recipe", [name for name, case in CASES.items() if not case.is_two_sided])
def test_what_a_party_with_a_single_row_discloses_is_what_the_page_says(recipe):
    rows, (told, stated) = (1, *ROWS[1:]), ALONE[recipe]
    if told.startswith("it refuses to send"):
        with pytest.raises(PartyError, match="sends no more"):
            recorded_case(recipe, rows)
        return
    case, shards = CASES[recipe], shards_of_case(CASES[recipe], rows)
    found = attack(
        [done.traffic for done in recorded_case(recipe, rows)],
        case.program,
        Layout.of(shards, SEED),
        truth=dict(zip(("p0", "p1", "p2"), parts_of_data(rows), strict=True)),
        asynchronous=case.is_asynchronous,
    )
    errors = {finding.array: finding.error for finding in found if finding.party == "p0" and "X_p" in finding.array}
    if told.startswith("nothing by"):
        assert not errors
        return
    least = min(errors.values())
    bound = {"exactly": 1e-6, "nearly": NEARLY, "roughly": ROUGHLY}[told.split(",")[0]]
    assert least < bound
    assert ("up to a factor" in told) == (set(errors) == {"X_p up to a factor"})
    assert least < 10 * float(stated)
    assert told.startswith("exactly") or least > 1e-9, "the page could say more"
