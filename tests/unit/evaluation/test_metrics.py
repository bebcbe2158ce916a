"""What a model is to one party: permuted copies come back in order, and sums over parties add up."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from partsong.core.interfaces import Shard
from partsong.data.conversion import as_matrix
from partsong.estimators.compare import Candidate, run_candidate
from partsong.evaluation.metrics import (
    LocalComponents,
    PartyResult,
    add_local_model,
    align_local_components,
    evaluate_party,
)
from partsong.methods import build
from partsong.reporting.run_report import Curve, MethodResult

RANK, FEATURES = 5, 12


def parts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((RANK, FEATURES)) ** 3


@pytest.mark.parametrize("seed", range(5))
def test_permuted_copies_come_back_in_the_order_of_the_shared_parts(seed: int) -> None:
    H, rng = parts(seed), np.random.default_rng(seed)
    order = rng.permutation(RANK)
    scales = rng.uniform(0.1, 10.0, (RANK, 1))
    own = align_local_components(scales * H[order], H)
    np.testing.assert_allclose(own.components / np.linalg.norm(own.components, axis=1, keepdims=True),
                               H / np.linalg.norm(H, axis=1, keepdims=True))  # fmt: skip
    assert [order[place] for place in own.places] == list(range(RANK))
    assert all(own.has_partner)
    copies = align_local_components(H[order], H)
    np.testing.assert_array_equal(copies.components, H)


def test_what_has_nothing_in_common_has_no_partner() -> None:
    H = np.zeros((3, 60))
    for a in range(3):
        H[a, 20 * a : 20 * a + 20] = 1.0 + np.arange(20)
    other = H[[2, 0, 1]].copy()
    other[1] = np.tile([1.0, 0.0], 30)
    own = align_local_components(other, H)
    assert own.places == (1, 2, 0)
    assert own.has_partner == (False, True, True)


def test_reordering_components_reorders_all_that_belongs_to_them() -> None:
    own = LocalComponents(np.arange(6.0).reshape(3, 2), (2, 0, 1), (True, False, True))
    party = PartyResult("p", 4, 1.0, 0.5, (0.5, 0.3, 0.2), own=own)
    found = MethodResult(
        "m", "", 0.5, 0.0, 0.0, 1, 0.0, "", Curve("m", (), (), ()), np.eye(3), (0.6, 0.3, 0.1), (),
        parties=(party,), after_first_round={"p": own},
    )  # fmt: skip
    moved = found.reorder([2, 0, 1])
    assert moved.shares == (0.1, 0.6, 0.3)
    assert moved.parties[0].shares == (0.2, 0.5, 0.3)
    for shown in (moved.parties[0].own, moved.after_first_round["p"]):
        assert shown is not None
        assert shown.places == (1, 2, 0)
        assert shown.has_partner == (True, True, False)
        np.testing.assert_array_equal(shown.components[:, 0], [4.0, 0.0, 2.0])


def test_drift_by_position_sees_the_order_and_aligned_drift_does_not() -> None:
    H, X = parts(0), np.random.default_rng(1).random((7, FEATURES))
    shard, solver = Shard("p", as_matrix(X)), build("fedavg", RANK, local_steps=10).solver
    party = add_local_model(evaluate_party(shard, H, solver), shard, H[[1, 2, 3, 4, 0]], (H, H), solver)
    assert party.drift == pytest.approx(np.square(H - H[[1, 2, 3, 4, 0]]).sum() / np.square(H).sum())
    assert party.aligned_drift == pytest.approx(0.0, abs=1e-12)
    assert party.own_error == pytest.approx(party.relative_error, rel=1e-9)
    lost = add_local_model(evaluate_party(shard, H, solver), shard, np.full_like(H, np.inf), (H, H), solver)
    assert (lost.drift, lost.own) == (math.inf, None)


@pytest.mark.parametrize(
    "program",
    [build("fnmf-local", 3, local_steps=5, align="assignment"), build("fedavg", 3, local_steps=2, init_mode="local")],
)
def test_the_drift_of_a_run_is_the_sum_over_its_parties(program) -> None:
    rng = np.random.default_rng(2)
    shards = [Shard(name, as_matrix(rng.random((9, 8))), i) for i, name in enumerate("abc")]
    rows = []
    found = run_candidate(Candidate("m", "", program, 3, "local"), shards, 0, lambda done, row: rows.append(row))
    best = min(rows, key=lambda row: (row.objective, -row.iteration))
    assert (found.drift, found.aligned_drift) == pytest.approx((best.drift, best.aligned_drift))
    assert set(found.after_first_round) == {"a", "b", "c"}
    norms = {shard.name: float(shard.matrix.squared_norm) for shard in shards}
    squares = sum(norms[party.name] * party.relative_error**2 for party in found.parties)
    assert found.relative_error == pytest.approx(math.sqrt(squares / sum(norms.values())))


WARM = """
import importlib, pathlib
import numpy as np
import partsong.kernels
from partsong.cli import demo
from partsong.estimators.compare import run_candidate, warm_up
from partsong.core.interfaces import Shard
from partsong.data.conversion import as_matrix

modules = [importlib.import_module(f"partsong.kernels.{path.stem}")
           for path in pathlib.Path(partsong.kernels.__file__).parent.glob("[!_]*.py") if "torch" not in path.stem]
assert len(modules) > 5
def compiled():
    known = [value for module in modules for value in vars(module).values() if hasattr(value, "signatures")]
    return sorted((value.py_func.__name__, str(signature)) for value in known for signature in value.signatures)

X = np.random.default_rng(0).random((300, 64))
shards = [Shard(str(i), as_matrix(X[i::3]), i) for i in range(3)]
entered = demo.candidates(2)
warm_up((candidate.program for candidate in entered), shards)
before = compiled()
for candidate in entered:
    run_candidate(candidate, shards, 0)
assert before, "nothing was compiled"
print(set(compiled()) - set(before))
"""


def test_nothing_is_compiled_while_the_clock_runs() -> None:
    done = subprocess.run([sys.executable, "-c", WARM], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "set()"
