"""The experiments with the game run on small data; what they find is in docs/results/game.md."""

import json

import numpy as np
import pytest

from experiments.game import convergence as game_convergence
from experiments.game import datasets as game_datasets
from experiments.game import leak as game_leak
from experiments.game import parties as game_parties
from experiments.game import ratings as game_ratings
from experiments.game import report as game_report
from experiments.game import trajectories as game_trajectories
from experiments.game import workers as game_workers
from experiments.game.runs import MU, Method, overlap, planted, played, recovered, start
from experiments.shared import datasets
from experiments.shared.synthetic import smoothed_factors


class Given:
    """Stands in for a generator: numbers that are told, and not drawn."""

    def __init__(self, *arrays):
        self.arrays = list(arrays)

    def random(self, shape):
        values = np.broadcast_to(self.arrays.pop(0), shape)
        return values.astype(float)


@pytest.fixture
def small_ratings(tmp_path, monkeypatch):
    """A stand-in for MovieLens 100k."""
    from scipy.sparse import csr_matrix, save_npz

    draw = np.random.default_rng(0)
    cells = draw.integers(1, 6, (60, 40)) * (draw.random((60, 40)) < 0.4)
    save_npz(tmp_path / "movielens_100k.npz", csr_matrix(cells.astype(np.uint8)))
    monkeypatch.setenv(datasets.FOLDER, str(tmp_path))


def read(place):
    return [json.loads(line) for line in place.read_text("utf-8").splitlines()]


def test_generator_smooths_rows_by_a_gaussian_window_of_three():
    impulse = np.zeros((1, 7))
    impulse[0, 3] = 1.0
    spread = smoothed_factors(2, 7, 1, generator=Given(1.0, impulse)).H[0]
    weights = np.exp([-0.5, 0.0, -0.5]) / np.exp([-0.5, 0.0, -0.5]).sum()
    np.testing.assert_allclose(spread, [0, 0, *weights, 0, 0], atol=1e-15)
    np.testing.assert_allclose(weights, [0.274, 0.452, 0.274], atol=5e-4)
    np.testing.assert_allclose(smoothed_factors(2, 7, 1, generator=Given(1.0, 0.5)).H, 0.5)


def test_generator_has_the_sizes_of_the_paper():
    data = planted(0)
    assert data.X.shape == (100, 20)
    np.testing.assert_allclose(data.X, data.W @ data.H)
    assert data.H.shape == (3, 20)
    assert 0 < data.H.min() <= data.H.max() < 1


def test_multiplicative_updates_are_those_of_the_paper():
    X, (W, H) = planted(1).X, start(1, 0)
    for found, _ in zip(played(X, Method(MU), W, H, 3), range(3), strict=True):
        H = H * (W.T @ X) / (W.T @ W @ H)
        W = W * (X @ H.T) / (W @ H @ H.T)
        np.testing.assert_allclose(found[0], W, rtol=1e-9)
        np.testing.assert_allclose(found[1].T, H, rtol=1e-9)


def test_rows_are_recognised_in_any_order_and_scale():
    truth = planted(2).H
    assert recovered(truth, truth[[2, 0, 1]] * [[3.0], [0.1], [1.0]]) == pytest.approx([1.0] * 3)
    assert overlap(np.eye(3)) == 0
    assert overlap(np.ones((3, 5))) == pytest.approx(1.0)


@pytest.mark.parametrize("theta", [0.3, 1.0, 2.0])
def test_two_who_meet_never_lose_by_a_safe_step(theta):
    draw = np.random.default_rng(3)
    for _ in range(3000):
        w, h = (draw.random(3) * 10.0 ** draw.uniform(-2, 2) * (draw.random(3) < 0.8) for _ in range(2))
        x = 0.0 if draw.random() < 0.3 else 10.0 ** draw.uniform(-3, 4)
        e = x - w @ h
        if e == 0 or not (w.any() or h.any()):
            continue
        move = theta * e / (w @ w + h @ h + abs(e))
        after = x - np.maximum(0, w + move * h) @ np.maximum(0, h + move * w)
        assert abs(after) <= abs(e) + 1e-12 * max(x, w @ h)


def test_two_is_the_largest_safe_relaxation():
    w, h = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    e, theta = 1e-6, 2.1
    move = theta * e / (2 + e)
    assert abs(e - (w + move * h) @ (h + move * w)) > 1.05 * e


def test_all_at_once_lower_the_error_by_what_the_theorem_says():
    draw = np.random.default_rng(4)
    for _ in range(500):
        n, m, k = draw.integers(1, 7, 3)
        W, H = (draw.random(shape) * 10.0 ** draw.uniform(-2, 2) for shape in ((n, k), (k, m)))
        X = draw.random((n, m)) * 10.0 ** draw.uniform(-2, 3) * (draw.random() < 0.8)
        E = X - W @ H
        size, miss = max(np.linalg.norm(W, 2), np.linalg.norm(H, 2)) ** 2, np.linalg.norm(E)
        eta = 1 / (2 * size + miss)
        D, C = np.maximum(0, W + eta * E @ H.T) - W, np.maximum(0, H + eta * W.T @ E) - H
        fall = 0.5 * miss**2 - 0.5 * np.linalg.norm(X - (W + D) @ (H + C)) ** 2
        promised = (size / 2 + miss / 8) * ((D**2).sum() + (C**2).sum())
        assert fall >= promised - 1e-12 * (miss**2 + (X**2).sum())


def test_convergence_is_written_for_all_methods(tmp_path):
    place = tmp_path / "c.jsonl"
    game_convergence.main(["--quick", "--output", str(place)])
    runs = read(place)
    assert {run["order"] for run in runs} == {"", "sequential", "stratified", "simultaneous"}
    for run in runs:
        assert run["points"][-1][1] < run["points"][0][1]
        assert len(run["correlations"]) == 3


def test_at_the_printed_step_the_game_is_behind_mu_on_every_data_set(tmp_path):
    place = tmp_path / "d.jsonl"
    game_datasets.main(["--quick", "--output", str(place)])
    runs = read(place)
    last = {(r["data"], r["start"], r["method"], r["order"], r["eta"]): r["errors"][-1] for r in runs}
    for (data, which, *_), (_, frobenius, spectral) in last.items():
        assert spectral <= frobenius
        printed = last[data, which, "game", "sequential", 0.001]
        assert printed[1] > last[data, which, MU, "", None][1]


def test_turns_are_angles_between_steps():
    straight, corners = np.outer(np.arange(5.0), [1.0, 2.0]), np.array([[0, 0], [1, 0], [1, 1], [2, 1], [2, 2.0]])
    assert game_trajectories.turning(straight) == pytest.approx(0, abs=1e-5)
    assert game_trajectories.turning(corners) == pytest.approx(90)
    assert game_trajectories.detour(straight) == pytest.approx(1)
    assert game_trajectories.detour(corners) == pytest.approx(np.sqrt(2))
    pieces = np.linalg.norm(np.diff(game_trajectories.evenly(corners, 8), axis=0), axis=1)
    np.testing.assert_allclose(pieces, 0.5)


def test_trajectories_within_a_sweep_are_more_jagged_than_from_sweep_to_sweep(tmp_path):
    place = tmp_path / "t.jsonl"
    game_trajectories.main(["--quick", "--output", str(place)])
    runs = read(place)
    sweeps = next(r for r in runs if r["figure"] == "printed" and r["method"] == "game")
    inner = next(r for r in runs if r["figure"] == "after every row" and r["eta"] == sweeps["eta"])
    assert inner["turning"] > 10 * sweeps["turning"]
    assert all(0 < sum(run["shares"]) <= 1.0001 for run in runs if "shares" in run)


def test_workers_send_players_and_nothing_of_the_data(tmp_path):
    place = tmp_path / "w.jsonl"
    game_workers.main(["--quick", "--output", str(place)])
    runs = read(place)
    counted = [run for run in runs if run["kind"] == "counted"]
    assert [run["parties"] for run in counted] == list(game_workers.WORKERS)
    for run in counted:
        (_, m, k), parties = run["shape"], run["parties"]
        assert run["exchanges"] == parties
        assert run["uploads"] == parties**2
        assert run["player_numbers_up"] == parties * k * m


def test_one_exchange_tells_a_single_row():
    for number in range(3):
        found = game_leak.one_row(number)
        assert found["w"] < 1e-9
        assert found["x"] < 1e-8


def test_differences_of_many_rows_are_the_gradient_for_small_steps():
    near, far = (game_leak.several_rows(0, 10, eta)["away_from_gradient"] for eta in (1e-4, 1e-2))
    assert near < 0.01 < far


def test_held_out_ratings_are_not_learned_from(small_ratings, tmp_path):
    whole = game_workers.ratings("movielens_100k.npz")
    learned, stopping, held = game_ratings.split(whole, 0)
    dense = learned.by_row.toarray()
    assert not dense[held.rows, held.columns].any()
    assert not dense[stopping.rows, stopping.columns].any()
    np.testing.assert_array_equal(whole.by_row.toarray()[held.rows, held.columns], held.values)
    place = tmp_path / "r.jsonl"
    game_ratings.main(["--quick", "--output", str(place)])
    assert {run["method"] for run in read(place)} >= {"mean", "offsets", "game, safe step", "game, η", "exact, ridge"}


def test_parties_errors_fall_over_rounds(tmp_path):
    place = tmp_path / "p.jsonl"
    game_parties.main(["--quick", "--output", str(place)])
    for run in read(place):
        assert run["points"][-1][0] == 10
        assert run["points"][-1][2] < run["points"][0][2]


def test_report_replaces_tables_and_nothing_else(tmp_path):
    game_leak.main(["--quick", "--output", str(tmp_path / "game-leak.jsonl")])
    game_trajectories.main(["--quick", "--output", str(tmp_path / "game-trajectories.jsonl")])
    document = tmp_path / "game.md"
    document.write_text("# Before\n\n<!-- table: leak -->\nold\n<!-- end -->\n\nAfter.\n")
    game_report.main([str(tmp_path), "--document", str(document)])
    text = document.read_text()
    assert text.startswith("# Before\n\n<!-- table: leak -->\n| rows of the party |")
    assert text.endswith("<!-- end -->\n\nAfter.\n")
    assert "old" not in text
    assert (tmp_path / "game-ways-printed.svg").read_text().startswith("<svg")
    game_report.main([str(tmp_path), "--document", str(document)])
    assert document.read_text() == text
