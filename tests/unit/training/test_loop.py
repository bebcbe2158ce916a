"""Laws of following a run: when it ends and why, which round is the best, and what a Ctrl-C or a budget leaves."""

import math
import signal
import threading
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.testing import assert_array_equal

import partsong
from partsong.core.interfaces import Checkpoint, Message, Outcome, Round, Schedule, Shard
from partsong.core.runtime import InterruptCounter, graceful_interrupt
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.errors import DivergenceError, DivergenceWarning, PartyError
from partsong.methods import build
from partsong.methods.averaging import LocalAveraging
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import ProjectedGradient
from partsong.training import loop, result
from partsong.training.loop import (
    WINDOW,
    HistoryRow,
    Measures,
    Progress,
    ProgressByCohort,
    ResumePoint,
    StoppingRule,
    Training,
    measure,
    train,
)
from partsong.training.loop import run as run_fit
from partsong.training.result import EmptyModelWarning, finish
from partsong.training.simulation import FederatedFit


def rounds_of(objectives, participants=None, pause=0.0):
    """Rounds whose server state is their own number."""
    everybody = {name: () for names in participants or [("a", "b")] for name in names}
    for index, value in enumerate(objectives):
        time.sleep(pause)
        names = ("a", "b") if participants is None else participants[index]
        metrics = {"relative_error": math.sqrt(max(value, 0.0)), "objective": value}
        point = Checkpoint(index + 1, everybody, index, Message({}))
        yield Round(index, Message({}), metrics, names, dict.fromkeys(names, 5), 7, pause, point)


def trained(rounds, stop=StoppingRule(), measures=Measures(), ends_round=lambda done: True, **more) -> Training:
    """Rounds that are followed to their end; `more` are fields of the training."""
    training = Training(**more)
    for _ in train(measure(rounds, measures, ends_round=ends_round, last=training.last), stop, training):
        pass
    return training


def follow(objectives, tol=1e-4, participants=None, **more) -> Training:
    return trained(rounds_of(objectives, participants), StoppingRule(tol), **more)


def test_history_has_a_row_for_each_round():
    run = follow([0.9, 0.5], participants=[("a", "b"), ("a",)])
    assert [(row.iteration, row.objective, row.bytes_up, row.bytes_down) for row in run.history] == [
        (1, 0.9, 10, 7),
        (2, 0.5, 5, 7),
    ]
    assert run.outcome is Outcome.MAX_ROUNDS
    assert run.history[0].seconds <= run.history[1].seconds


@pytest.mark.parametrize("tol", [1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("left", [0.01, 0.1, 0.3, 0.5, 0.9, 0.999])
def test_converged_means_that_the_objective_falls_by_less_than_tol_of_its_yardstick_per_round(tol, left):
    """Falling by three times tol of the lesser of explained and left goes on; by a third of it ends, soon after.

    Where little is left, it is the geometric mean of that and a fifth.
    """
    small = min(math.sqrt(0.2 * left) if left < 0.2 else left, 1 - left)
    steep = [left + 3 * tol * small * (50 - i) for i in range(50)]
    assert follow(steep, tol).outcome is Outcome.MAX_ROUNDS
    gentle = [left - tol / 3 * small * i for i in range(50)]
    run = follow(steep + gentle, tol)
    assert run.outcome is Outcome.CONVERGED
    assert len(steep) < len(run.history) <= len(steep) + 2 * WINDOW
    assert follow(steep + gentle, 0).outcome is Outcome.MAX_ROUNDS, "tol=0 never converges"


def test_a_run_is_not_converged_while_it_lies_above_its_best_or_swings():
    risen = [0.5] * 4 + [0.6] * 30
    assert follow(risen).outcome is Outcome.MAX_ROUNDS
    assert follow([1.0, 300.0] * 20).outcome is Outcome.MAX_ROUNDS
    assert follow([0.5] * 20).outcome is Outcome.CONVERGED
    assert len(follow([0.5] * 20).history) == WINDOW + 1
    assert follow([0.5, 1e-15] + [0.0, -1e-16] * 5).outcome is Outcome.CONVERGED, "nothing is left to explain"


@pytest.mark.parametrize("lost", [math.nan, math.inf, 1e9])
def test_divergence_is_an_outcome_and_the_best_round_is_kept(lost):
    run = follow([0.9, 0.8, 2.0, lost, 0.1])
    assert run.outcome is Outcome.DIVERGED
    assert len(run.history) == 4
    assert run.best == 1


def test_uploads_that_are_not_finite_end_a_run_that_has_begun():
    def rounds():
        yield from rounds_of([0.9, 0.8])
        raise DivergenceError("Party 'x' sent NaN")

    run = trained(rounds())
    assert (run.outcome, run.best, run.error_text) == (Outcome.DIVERGED, 1, "Party 'x' sent NaN")

    def at_once():
        raise DivergenceError("Party 'x' sent NaN")
        yield

    with pytest.raises(PartyError, match="'x'"):
        trained(at_once())


def test_the_best_round_need_not_be_the_last_and_of_equals_the_later_one_counts():
    assert follow([0.9, 0.3, 0.5]).best == 1
    assert follow([0.9, 0.3, 0.3, 0.5]).best == 2


def test_rounds_are_compared_with_rounds_of_the_same_parties_only():
    few, all_ = ("a",), ("a", "b")
    assert follow([0.9, 0.1, 0.8], participants=[all_, few, all_]).best == 2, "all were there a moment ago"
    assert follow([0.1, 0.9], participants=[few, all_]).best == 1, "more parties: judged anew"
    leaving = follow([0.1] + [0.9] * 3 + [0.5] * 30, participants=[all_] + [few] * 33)
    assert leaving.outcome is Outcome.CONVERGED, "those who are left are at rest"
    assert leaving.best == len(leaving.history) - 1, "and theirs is the model"
    lost = follow([0.9, 0.9, 1e9, 0.1], participants=[all_, few, few, few])
    assert lost.outcome is Outcome.DIVERGED
    turns = [("a", "b"), ("b", "c"), ("a", "c")] * 12
    values = [0.3, 0.2, 0.1] * 12
    run = follow(values, participants=turns)
    assert run.outcome is Outcome.CONVERGED, "each set of parties is at rest"
    assert run.best == len(run.history) - 1
    falling = [value * 0.9 ** (i // 3) for i, value in enumerate(values)]
    assert follow(falling, participants=turns).outcome is Outcome.MAX_ROUNDS


@pytest.fixture
def clock(monkeypatch):
    """A clock that goes by `sleep` alone."""
    now = [100.0]
    passing = SimpleNamespace(perf_counter=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    for module in (loop, result):
        monkeypatch.setattr(module, "time", passing)
    monkeypatch.setitem(globals(), "time", passing)
    return passing


def test_a_time_budget_ends_a_run_and_keeps_time_for_its_end(clock):
    budget = StoppingRule(tol=0, time_budget=0.2)

    def spend(**more):
        return trained(rounds_of([0.5] * 100, pause=0.03), budget, began=clock.perf_counter(), **more)

    run = spend()
    assert run.outcome is Outcome.TIME_LIMIT
    assert run.history[-1].seconds == pytest.approx(0.18), "no round is begun that the budget does not hold"
    shorter = spend(reserve=lambda done, seconds: 0.1)
    assert shorter.outcome is Outcome.TIME_LIMIT
    assert shorter.history[-1].seconds == pytest.approx(0.09)


def test_what_the_caller_does_between_rounds_is_not_in_the_history_but_in_the_budget(clock):
    training = Training(began=clock.perf_counter())
    for _ in train(measure(rounds_of([0.5] * 100, pause=0.1)), StoppingRule(0, time_budget=1.0), training):
        clock.sleep(0.2)
    assert training.outcome is Outcome.TIME_LIMIT
    assert [row.seconds for row in training.history] == pytest.approx([0.1, 0.2, 0.3, 0.4])


def test_the_time_that_only_a_simulation_takes_is_not_in_the_history(clock):
    class Slow(Measures):
        def error(self, done):
            time.sleep(0.05)
            return 0.5

    began = clock.perf_counter()
    run = trained(rounds_of([0.5] * 4, pause=0.01), StoppingRule(0), Slow(), began=began)
    assert run.history[-1].seconds == pytest.approx(0.04)
    budget = StoppingRule(0, time_budget=0.13)
    spent = trained(rounds_of([0.5] * 40), budget, Slow(), began=clock.perf_counter())
    assert spent.outcome is Outcome.TIME_LIMIT, "but a budget is wall time"
    assert len(spent.history) == 2


def test_an_earlier_part_counts_for_convergence_best_and_time():
    rows = tuple(HistoryRow(i + 1, float(i), 0.7, 0.49, 0, 0) for i in range(WINDOW))
    run = trained(rounds_of([0.49] * 9), history=list(rows), progress=ProgressByCohort.of(rows))
    assert run.outcome is Outcome.CONVERGED
    assert len(run.history) == WINDOW + 1
    assert run.history[-1].seconds >= WINDOW - 1
    worse = trained(rounds_of([0.6, 0.55]), history=list(rows), progress=ProgressByCohort.of(rows))
    assert worse.best is None, "the best lies in the earlier part"


def test_interrupts_end_the_run_after_a_round():
    presses = InterruptCounter()

    def watch(done, row):
        presses.count += done.index == 2

    run = follow([0.9, 0.8, 0.7, 0.6], watch=watch, interrupts=presses)
    assert (run.outcome, len(run.history), run.best) == (Outcome.INTERRUPTED, 3, 2)

    def at_once(done, row):
        raise KeyboardInterrupt

    assert follow([0.9, 0.8], watch=at_once).outcome is Outcome.INTERRUPTED


@pytest.fixture
def interrupts_work():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="no signals")
def test_held_counts_the_first_and_lets_the_second_through(interrupts_work):
    with graceful_interrupt() as presses:
        signal.raise_signal(signal.SIGINT)
        with graceful_interrupt() as inner:
            assert inner is presses
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    assert presses.count == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    seen = []

    def elsewhere():
        with graceful_interrupt() as presses:
            seen.append(presses.count)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("moment", ["initial_factors", "complete"])
def test_ctrl_c_in_the_start_or_the_end_of_a_fit_loses_nothing(interrupts_work, monkeypatch, moment):
    from partsong.training import centralized

    home = centralized if moment == "initial_factors" else result
    plain = getattr(home, moment)

    def pressed(*given, **more):
        signal.raise_signal(signal.SIGINT)
        return plain(*given, **more)

    monkeypatch.setattr(home, moment, pressed)
    X = np.random.default_rng(0).random((40, 8))
    model = partsong.NMF(3, random_state=0, tol=0, max_iter=9).fit(X)
    assert model.components_.shape == (3, 8)
    assert model.outcome_ is (Outcome.INTERRUPTED if moment == "initial_factors" else Outcome.MAX_ROUNDS)
    assert model.n_iter_ == (1 if moment == "initial_factors" else 9)


FITS = {
    "NMF": lambda X: partsong.NMF(3, random_state=0, tol=0, max_iter=5).fit(X),
    "FederatedNMF": lambda X: partsong.FederatedNMF(3, random_state=0, tol=0, rounds=5, n_jobs=1).fit([X[:20], X[20:]]),
}


@pytest.mark.parametrize("which", FITS)
@pytest.mark.parametrize("round_", [1, 3])
def test_a_second_ctrl_c_before_any_round_is_done_returns_no_model(interrupts_work, monkeypatch, capsys, which, round_):
    plain, seen = SquaredError.column_step, []

    def column_step(self, columns, sums):
        seen.append(None)
        if len(seen) == round_:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return plain(self, columns, sums)

    monkeypatch.setattr(SquaredError, "column_step", column_step)
    X = np.random.default_rng(0).random((40, 8))
    if round_ == 1:
        with pytest.raises(KeyboardInterrupt):
            FITS[which](X)
    else:
        model = FITS[which](X)
        assert (model.n_iter_, model.outcome_) == (2, Outcome.INTERRUPTED)
    assert capsys.readouterr().err.count("Press Ctrl-C again") == 1


def row_of(iteration, objective, parties, cohort):
    return HistoryRow(iteration, 0.0, objective, objective, 0, 0, parties=parties, cohort=cohort)


def test_a_run_that_goes_on_with_fewer_parties_does_not_wait_for_the_others():
    history = [row_of(1, 0.5, 5, 0), row_of(2, 0.4, 5, 0)]
    without = [row_of(3, 0.6, 4, 7), row_of(4, 0.5, 4, 7), row_of(5, 0.55, 4, 7), row_of(6, 0.1, 3, 9)]
    for present, best in ((5, [False] * 4), (4, [True, True, False, False]), (math.inf, [False] * 4)):
        progress = ProgressByCohort.of(history, present)
        assert [progress.add(row) for row in without] == best
    resumed = ProgressByCohort.of([*history, *without[:3]], 4)
    assert resumed.owner == 7, "the same when it is resumed once more"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("step", [0.05, 5.0])
def test_a_rule_that_runs_away_is_told_as_such(dtype, step):
    X = planted().astype(dtype)
    rule = ProjectedGradient(step, absolute=True)
    with pytest.warns(DivergenceWarning, match="diverged"):
        model = partsong.NMF(5, solver=rule, init="random", random_state=0).fit(X)
    assert model.outcome_ is Outcome.DIVERGED
    assert np.isfinite(model.components_).all()
    errors = [row.relative_error for row in model.history_]
    assert max(errors) > 1e3, "it did run away"
    assert model.relative_error_ <= min(errors) * (1 + 1e-6), "the best round, with its weights solved for"
    assert model.relative_error_ < 0.99


@pytest.mark.filterwarnings("ignore::partsong.errors.DivergenceWarning")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("step", [0.05, 50.0])
def test_parties_that_run_away_leave_the_best_of_their_finite_models(dtype, step):
    """The server sees H alone: overflow at a party raises nothing and never becomes part of a model."""
    X = planted().astype(dtype)
    program = LocalAveraging(5, SquaredError(ProjectedGradient(step, absolute=True)), steps=40)
    model = partsong.FederatedNMF(5, method=program, rounds=10, random_state=0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.fit([X[:90], X[90:]])
    assert np.isfinite(model.components_).all()
    errors = [row.relative_error for row in model.history_]
    assert model.relative_error_ == pytest.approx(np.nanmin(errors), rel=1e-5)
    is_zero = not (model.transform(X) @ model.components_).any()
    assert is_zero == (abs(model.relative_error_ - 1) < 1e-12)
    assert is_zero == any(issubclass(warning.category, EmptyModelWarning) for warning in told)


def planted():
    rng = np.random.default_rng(0)
    return rng.random((200, 5)) @ rng.random((5, 40))


def test_a_task_goes_on_from_an_earlier_part_with_its_best():
    """The earlier part's best is the best of all while nothing later is as good."""
    shards = [Shard("a", as_matrix(planted()))]
    task = FederatedFit(build("exact", 5, local_steps=5), shards, Schedule(4), StoppingRule(0), Sequential())
    run = run_fit(task)
    checkpoint = next(iter(Sequential().run(task.program, shards, task.schedule, reduction=task.reduction))).checkpoint
    perfect = tuple(row._replace(objective=-1.0) for row in run.history[:1])
    kept = run_fit(task, resume=ResumePoint(checkpoint, perfect, run.best))
    assert kept.best is run.best
    better = run_fit(task, resume=ResumePoint(checkpoint, tuple(run.history[:1]), checkpoint.server))
    assert better.best is not checkpoint.server
    assert finish(task, better).relative_error == pytest.approx(finish(task, run).relative_error)


def best_of(objectives, participants, cut=None):
    """The best round of a run, in one piece or broken off after `cut` rounds and resumed."""
    rounds, history, best = list(rounds_of(objectives, participants)), [], None
    if cut is not None:
        first = trained(rounds[:cut], StoppingRule(0))
        history, best = [HistoryRow(*map(float, row)) for row in first.history], first.best  # as a file gives them back
    rest = Training(history, ProgressByCohort.of(history), best)
    for _ in train(measure(rounds[cut:]), StoppingRule(0), rest):
        pass
    return rest.best


@pytest.mark.parametrize("seed", range(30))
def test_a_resumed_run_chooses_the_same_best_round_whoever_was_absent(seed):
    """Rotating, random and leaving parties; objectives of different parties say nothing about each other."""
    rng = np.random.default_rng(seed)
    names, level = "abcd", dict(zip("abcd", rng.random(4), strict=True))
    absent = [
        lambda i: {names[i % 4]},
        lambda i: set(rng.choice(list(names), rng.integers(0, 3), replace=False)),
        lambda i: {"a"} if i > 6 else set(),
        lambda i: {names[i % 4], names[(i + 1) % 4]} if i % 5 else set(),
    ][seed % 4]
    participants = [tuple(sorted(set(names) - absent(i))) for i in range(16)]
    values = [np.mean([level[n] for n in who]) * rng.uniform(0.5, 1.1) for who in participants]
    whole = best_of(values, participants)
    assert [best_of(values, participants, cut) for cut in range(16)] == [whole] * 16


def test_a_resumed_federation_with_rotating_absence_ends_with_the_same_model():
    """Parties of very different difficulty: the round with the least objective is the one that missed the hard rows."""
    rng = np.random.default_rng(0)
    parts = {"a": planted()[:60], "b": planted()[60:] * 0.1, "c": rng.random((60, 40)), "d": planted()[:50]}
    shards = [Shard(name, as_matrix(X)) for name, X in parts.items()]
    turns = {i: frozenset("abcd"[i % 4]) for i in range(12)}
    program, schedule = build("exact", 5, local_steps=5), Schedule(12, absent=turns)
    task = FederatedFit(program, shards, schedule, StoppingRule(0), Sequential())
    points = []
    whole = run_fit(task, watch=lambda done, row: points.append(done.checkpoint))
    least = min(whole.history, key=lambda row: row.objective)
    assert least.iteration == 11, "without the hard rows"
    assert whole.best is points[11].server, "which says nothing about the round after it"
    for cut in range(1, 12):
        first = run_fit(replace(task, schedule=replace(task.schedule, rounds=cut)))
        again = run_fit(task, resume=ResumePoint(points[cut - 1], tuple(first.history), first.best))
        assert [row.objective for row in again.history] == [row.objective for row in whole.history]
        assert [row.cohort for row in again.history] == [row.cohort for row in whole.history]
        assert_array_equal(task.program.components(again.best), task.program.components(whole.best))


def test_rows_tell_who_took_part_without_naming_them():
    run = follow([0.9] * 4, participants=[("a", "b"), ("a",), ("b",), ("a",)])
    everybody, a, b, again = run.history
    assert [row.parties for row in run.history] == [2, 1, 1, 1]
    assert everybody.cohort == 0
    assert 0 < a.cohort == again.cohort != b.cohort
    assert int(float(a.cohort)) == a.cohort


def test_a_run_that_had_come_to_its_end_is_not_gone_on_with():
    shards = [Shard("a", as_matrix(planted()))]
    task = FederatedFit(build("exact", 5, local_steps=5), shards, Schedule(9), StoppingRule(1e-4), Sequential())
    checkpoint = next(iter(Sequential().run(task.program, shards, task.schedule, reduction=task.reduction))).checkpoint
    flat = tuple(HistoryRow(i + 1, float(i), 0.7, 0.49, 0, 0) for i in range(WINDOW + 1))
    lost = (flat[0], flat[0]._replace(objective=math.inf))
    for history, outcome in ((flat, Outcome.CONVERGED), (lost, Outcome.DIVERGED)):
        run = run_fit(task, resume=ResumePoint(checkpoint, history, "the best"))
        assert (run.outcome, tuple(run.history), run.best) == (outcome, history, "the best")


def test_progress_is_constant_memory():
    progress = Progress()
    for i in range(10_000):
        progress.add(float(i))
    assert len(progress.values) == len(progress.minima) == WINDOW + 1
    assert progress.least == 0.0


def whole_thirds(objectives, **more) -> Training:
    """Rounds of three exchanges each, of which the last ends a round."""
    return follow(
        [value for value in objectives for _ in range(3)], ends_round=lambda done: done.index % 3 == 2, **more
    )


def test_exchanges_within_a_round_are_listed_but_neither_measured_nor_compared():
    run = whole_thirds([0.9, 0.5, 0.7])
    assert [row.iteration for row in run.history] == list(range(1, 10))
    assert [row.objective for row in run.history if not math.isnan(row.objective)] == [0.9, 0.5, 0.7]
    assert all(math.isnan(row.relative_error) for row in run.history if row.iteration % 3)
    assert run.best == 5, "the last exchange of the best round"


def test_only_whole_rounds_count_for_convergence():
    falling = [0.9 * 0.9**i for i in range(3 * WINDOW)]
    assert whole_thirds(falling).outcome is Outcome.MAX_ROUNDS
    flat = whole_thirds([0.5] * 3 * WINDOW)
    assert flat.outcome is Outcome.CONVERGED
    assert len(flat.history) == 3 * (WINDOW + 1)


def test_runs_end_with_whole_rounds_only():
    thirds = {"ends_round": lambda done: done.index % 3 == 2}
    late = trained(rounds_of([0.9] * 9), StoppingRule(time_budget=1e-9), **thirds)
    assert (late.outcome, len(late.history), late.best) == (Outcome.TIME_LIMIT, 3, 2)
    pressed = InterruptCounter()
    pressed.count = 1
    wished = follow([0.9] * 9, interrupts=pressed, **thirds)
    assert (wished.outcome, len(wished.history), wished.best) == (Outcome.INTERRUPTED, 3, 2)
    assert follow([0.9] * 3, ends_round=lambda done: False, last=3).history[-1].objective == 0.9


def test_an_objective_that_is_no_number_ends_a_run():
    assert follow([0.9, math.nan, 0.8]).outcome is Outcome.DIVERGED
    assert follow([math.nan, 0.8]).outcome is Outcome.DIVERGED
