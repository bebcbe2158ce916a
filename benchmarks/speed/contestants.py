"""The compared methods: partsong and scikit-learn; other libraries are in `benchmarks.speed.peers`.

A contestant converts the data to its preferred format, starts the recorder's clock, and passes W and H after each
iteration. Initialization counts; conversion, imports, compiling and evaluation do not.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.speed.clock import Enough, Recorder
from benchmarks.speed.evaluation import Problem

MOST_ITERATIONS = 10_000_000
OURS = "partsong"

Play = Callable[[Problem, int, int, Recorder], None]


@dataclass(frozen=True, slots=True)
class Contestant:
    """A method: `play(problem, seed, threads, recorder)`, and a description of its time points.

    `against`: the variant of partsong that it is compared with. `always_asked`: run to the highest level even if the
    first run missed it, because a target refers to it.
    """

    name: str
    play: Play
    clock: str
    module: str = "sklearn"
    package: str = "scikit-learn"
    takes_sparse: bool = True
    takes_dense: bool = True
    against: str = OURS
    always_asked: bool = False

    @property
    def is_installed(self) -> bool:
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:
            return False

    def takes(self, problem: Problem) -> bool:
        return self.takes_sparse if problem.is_sparse else self.takes_dense


def run(contestant: Contestant, problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    """Run to the end; an error ends the run and is recorded."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            contestant.play(problem, seed, threads, recorder)
    except Enough:
        pass
    except Exception as error:
        recorder.stopped = "failed"
        recorder.note = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]


def _partsong(init: str) -> Play:
    def play(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
        from partsong import NMF

        given = dict(zip("WH", problem.random_start(seed), strict=True)) if init == "custom" else {}
        for budget in sorted({min(recorder.hint, recorder.limit), recorder.limit}):
            model = NMF(
                problem.rank,
                init=init,
                tol=0.0,
                max_iter=MOST_ITERATIONS,
                time_budget=budget,
                random_state=seed,
                n_threads=threads,
            )
            began = time.perf_counter()
            W = model.fit_transform(problem.X, **given)
            whole = time.perf_counter() - began
            best = 1.0 - min(row.relative_error for row in model.history_) ** 2
            if best >= recorder.goal:
                break
        _keep_history(recorder, model.history_)
        recorder.stopped = "goal" if best >= recorder.goal else "limit"
        recorder.after = whole - model.history_[-1].seconds
        delivered = problem.explained(W, model.components_)
        if delivered < best - 1e-4 * abs(best):
            recorder.note = f"history claims an explained variance of {best:.6f}, the model delivers {delivered:.6f}"

    return play


def _keep_history(recorder: Recorder, history: Any) -> None:
    """Thin out the history to the common stride; keep the last row."""
    for row in history:
        if recorder.is_due(row.seconds) or row is history[-1]:
            recorder.add(row.seconds, 1.0 - row.relative_error**2)
    recorder.elapsed = history[-1].seconds


def _begun(problem: Problem, seed: int, solver: str, init: str, W: Any = None, H: Any = None) -> tuple[Any, Any, Any]:
    """Do what scikit-learn's fit does before its loop: check X and initialize W and H."""
    from sklearn.decomposition import NMF
    from sklearn.utils.validation import check_non_negative, validate_data

    model = NMF(problem.rank, solver=solver, init=init, tol=0.0, random_state=seed)
    X = validate_data(model, problem.X, accept_sparse=("csr", "csc"), dtype=[np.float64, np.float32])
    check_non_negative(X, "NMF (input X)")
    model._check_params(X)
    return X, *model._check_w_h(X, W, H, True)


def _coordinate_descent(init: str) -> Play:
    def play(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
        from sklearn.decomposition._nmf import _update_coordinate_descent

        given = problem.random_start(seed) if init == "custom" else (None, None)
        recorder.start()
        X, W, H = _begun(problem, seed, "cd", init, *given)
        W, Ht = np.ascontiguousarray(W), np.ascontiguousarray(H.T)
        for _ in range(MOST_ITERATIONS):
            _update_coordinate_descent(X, W, Ht, 0.0, 0.0, False, None)
            _update_coordinate_descent(X.T, Ht, W, 0.0, 0.0, False, None)
            recorder(W, Ht.T)

    return play


def _multiplicative(init: str) -> Play:
    def play(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
        from sklearn.decomposition._nmf import _multiplicative_update_h, _multiplicative_update_w

        recorder.start()
        X, W, H = _begun(problem, seed, "mu", init)
        for _ in range(MOST_ITERATIONS):
            W, *_ = _multiplicative_update_w(X, W, H, 2.0, 0.0, 0.0, 1.0)
            H = _multiplicative_update_h(X, W, H, 2.0, 0.0, 0.0, 1.0)
            recorder(W, H)

    return play


def _mini_batch(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    from sklearn.decomposition import MiniBatchNMF

    class Watched(MiniBatchNMF):
        def _minibatch_convergence(self, X, batch_cost, H, H_buffer, n_samples, step, n_steps):  # type: ignore[no-untyped-def]
            recorder(None, H)
            return False

    model = Watched(problem.rank, tol=0.0, max_no_improvement=None, max_iter=MOST_ITERATIONS, random_state=seed)
    recorder.start()
    model.fit(problem.X)


FIT = "history_ of the public fit, whose clock starts with the call"
LOOP = "scikit-learn's own checks, start and updates, called as its fit does; tested against the public NMF"

BUILT_IN = (
    Contestant(OURS, _partsong("auto"), FIT, "partsong", "partsong"),
    Contestant("partsong-random", _partsong("random"), FIT, "partsong", "partsong"),
    Contestant("partsong-same-start", _partsong("custom"), FIT, "partsong", "partsong"),
    Contestant("sklearn-cd-random", _coordinate_descent("random"), LOOP, always_asked=True),
    Contestant("sklearn-cd-nndsvda", _coordinate_descent("nndsvda"), LOOP, always_asked=True),
    Contestant("sklearn-cd-same-start", _coordinate_descent("custom"), LOOP, against="partsong-same-start"),
    Contestant("sklearn-mu-random", _multiplicative("random"), LOOP),
    Contestant("sklearn-mu-nndsvda", _multiplicative("nndsvda"), LOOP),
    Contestant(
        "sklearn-minibatch",
        _mini_batch,
        "a subclass that looks at H after each mini-batch; W is fitted outside the clock",
    ),
)


def everyone() -> tuple[Contestant, ...]:
    from benchmarks.speed.peers import PEERS

    return BUILT_IN + PEERS


def chosen(names: str) -> list[Contestant]:
    """Select contestants by comma-separated names, in that order; an empty list selects all."""
    known = {contestant.name: contestant for contestant in everyone()}
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(known)
    strange = [name for name in wanted if name not in known]
    if strange:
        raise SystemExit(f"Unknown contestant {', '.join(strange)}; choose from {', '.join(known)}.")
    return [known[name] for name in known if name in wanted]
