"""Tiny runs: clocks, contestants against public functions, and the command from end to end."""

import gzip
import math
import time
from itertools import islice, pairwise

import numpy as np
import pytest
from scipy.sparse import csr_array, random_array
from sklearn.decomposition import NMF as ReferenceNMF

from benchmarks import machine
from benchmarks.__main__ import main
from benchmarks.memory import fit as memory
from benchmarks.speed import floor, workloads
from benchmarks.speed.clock import Enough, Recorder
from benchmarks.speed.contestants import BUILT_IN, Contestant, chosen, run
from benchmarks.speed.evaluation import Problem
from benchmarks.speed.iterations import factors, iterate
from benchmarks.speed.measure import Rounds
from benchmarks.speed.peers import PEERS
from benchmarks.tuning import sweeps as tuning
from partsong import NMF
from partsong.data.conversion import as_matrix
from partsong.solvers.initialization import InitialFactors
from partsong.solvers.squared_error import accelerated_hals


@pytest.fixture
def dense():
    generator = np.random.default_rng(0)
    return Problem(
        (generator.gamma(0.5, size=(90, 4)) @ generator.gamma(0.5, size=(4, 30))).astype(np.float32) + 0.1, 4
    )


@pytest.fixture
def sparse():
    return Problem(random_array((90, 30), density=0.2, rng=np.random.default_rng(1), dtype=np.float32).tocsr(), 4)


@pytest.fixture(params=["dense", "sparse"])
def problem(request):
    return request.getfixturevalue(request.param)


class Watcher(Recorder):
    """Keeps the factors after some iterations and stops."""

    def __init__(self, problem, iterations):
        super().__init__(problem, limit=math.inf)
        self.left = iterations

    def __call__(self, W, H):
        self.left -= 1
        if self.left == 0:
            self.W, self.H = None if W is None else W.copy(), H.copy()
            raise Enough


def test_explained_variance_equals_its_definition(problem):
    W, H = problem.random_start(3)
    X = problem.X.toarray() if problem.is_sparse else problem.X
    X, exact = X.astype(np.float64), W.astype(np.float64) @ H.astype(np.float64)
    assert problem.explained(W, H) == pytest.approx(1 - np.square(X - exact).sum() / np.square(X).sum(), rel=1e-12)


def test_the_clock_stands_still_during_evaluation(dense, monkeypatch):
    now = [100.0]

    def spend(seconds):
        now[0] += seconds
        return 0.5

    monkeypatch.setattr("benchmarks.speed.clock.time.perf_counter", lambda: now[0])
    monkeypatch.setattr(Problem, "explained", lambda *_: spend(50.0))
    recorder = Recorder(dense, limit=1000.0)
    recorder.start()
    for _ in range(4):
        spend(2.0)
        recorder(1, 1)
    assert recorder.elapsed == pytest.approx(8.0)
    assert [at for at, _ in recorder.points] == pytest.approx([2.0, 4.0, 6.0, 8.0])


@pytest.mark.parametrize(
    ("values", "settings", "why"),
    [
        ([0.1, 0.2, 0.9], {"limit": 10.0, "goal": 0.8}, "goal"),
        ([0.1], {"limit": 0.0}, "limit"),
        ([math.nan], {"limit": 10.0}, "diverged"),
    ],
)
def test_a_run_ends_for_a_reason(dense, monkeypatch, values, settings, why):
    left = list(values)
    monkeypatch.setattr(Problem, "explained", lambda *_: left.pop(0))
    recorder = Recorder(dense, **settings)
    recorder.start()
    for _ in values[:-1]:
        recorder(1, 1)
        time.sleep(0.001)
    with pytest.raises(Enough):
        recorder(1, 1)
    assert recorder.stopped == why


def test_a_run_that_stands_still_is_ended(dense):
    recorder = Recorder(dense, limit=6.0, elapsed=3.0, points=[(0.1, 0.1), (1.9, 0.9), (3.0, 0.9000001)])
    assert recorder._is_late()
    assert recorder._is_flat()
    recorder.points[1] = (1.9, 0.89)
    assert not recorder._is_flat()


def test_a_run_that_cannot_get_there_in_time_is_ended(dense):
    recorder = Recorder(dense, limit=6.0, elapsed=3.0, points=[(0.1, 0.1), (2.0, 0.70), (3.0, 0.75)])
    for targets, verdict in (((0.74, 1.04), False), ((0.74, 1.06), True), ((0.5, 0.7), False), ((), False)):
        recorder.targets = targets
        assert recorder._is_hopeless() is verdict  # 0.75 + 2 · 0.05 per second · 3 seconds = 1.05


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("sklearn-cd-random", {"solver": "cd", "init": "random"}),
        ("sklearn-cd-nndsvda", {"solver": "cd", "init": "nndsvda"}),
        ("sklearn-mu-random", {"solver": "mu", "init": "random"}),
        ("sklearn-mu-nndsvda", {"solver": "mu", "init": "nndsvda"}),
    ],
)
def test_scikit_learn_step_by_step_is_the_public_nmf(problem, name, settings):
    watcher = Watcher(problem, 6)
    (contestant,) = chosen(name)
    run(contestant, problem, 5, 1, watcher)
    public = ReferenceNMF(problem.rank, max_iter=6, tol=0.0, random_state=5, **settings)
    np.testing.assert_allclose(watcher.W, public.fit_transform(problem.X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(watcher.H, public.components_, rtol=1e-5, atol=1e-6)


def test_the_common_start_is_the_same_for_both(problem):
    W, H = problem.random_start(2)
    watcher = Watcher(problem, 3)
    (contestant,) = chosen("sklearn-cd-same-start")
    run(contestant, problem, 2, 1, watcher)
    public = ReferenceNMF(problem.rank, init="custom", max_iter=3, tol=0.0)
    np.testing.assert_allclose(watcher.W, public.fit_transform(problem.X, W=W.copy(), H=H.copy()), rtol=1e-5, atol=1e-6)
    assert all(np.array_equal(a, b) for a, b in zip((W, H), problem.random_start(2), strict=True))


@pytest.mark.parametrize("solver", ["hals", "cd", "mu"])
def test_history_is_the_error_of_the_iterate_evaluated_independently(problem, solver):
    W, H = problem.random_start(4)
    model = NMF(problem.rank, solver=solver, init="custom", tol=0.0, max_iter=12, n_threads=1).fit(problem.X, W=W, H=H)
    matrix = as_matrix(problem.X)
    rounds = iterate(matrix, problem.rank, model._solver(), InitialFactors(np.ascontiguousarray(H.T), W), 1, 12)
    least = np.inf
    for row, done in zip(model.history_, rounds, strict=True):
        assert min(factor.min() for factor in factors(done)) >= 0
        if done.checkpoint.server.pace.must_restart:  # H was taken back: the row tells why
            assert row.relative_error > least
            continue
        evaluated = problem.explained(*factors(done))
        assert 1 - row.relative_error**2 == pytest.approx(evaluated, abs=2e-6)
        least = min(least, row.relative_error)
    assert np.all(np.diff([row.seconds for row in model.history_]) > 0)


def test_partsong_delivers_what_its_history_claims_and_its_clock_covers_the_fit(problem):
    recorder = Recorder(problem, limit=0.1)
    began = time.perf_counter()
    run(BUILT_IN[0], problem, 0, 1, recorder)
    whole = time.perf_counter() - began
    assert recorder.stopped == "limit"
    assert recorder.note == ""
    assert 0.05 <= recorder.elapsed <= whole, "the limit, less what the last solve will need"
    assert 0 <= recorder.after <= whole - recorder.elapsed


@pytest.mark.parametrize("contestant", [*BUILT_IN, *PEERS], ids=lambda contestant: contestant.name)
def test_every_contestant_explains_more_and_more(problem, contestant):
    if not contestant.is_installed:
        pytest.skip(f"{contestant.package} is not installed")
    if not contestant.takes(problem):
        pytest.skip(f"{contestant.name} does not take such data")
    recorder = Recorder(problem, limit=0.08)
    run(contestant, problem, 0, 1, recorder)
    assert recorder.note == ""
    seconds, values = zip(*recorder.points, strict=True)
    assert all(a < b for a, b in pairwise(seconds))
    assert 0.3 < max(values) < 1
    assert max(values) >= values[0]


def test_tensorly_in_pieces_is_tensorly_at_once(dense):
    decomposition = pytest.importorskip("tensorly.decomposition")
    watcher = Watcher(dense, 5)
    (contestant,) = chosen("tensorly")
    run(contestant, dense, 1, 1, watcher)
    seeded = np.random.RandomState(1)
    whole = decomposition.non_negative_parafac_hals(dense.X, 4, n_iter_max=5, init="random", tol=0, random_state=seeded)
    np.testing.assert_allclose(watcher.W, whole.factors[0], rtol=1e-4, atol=1e-5)


def test_an_error_ends_one_run_and_is_noted(dense):
    def play(*_):
        raise ValueError("no such luck\nat all")

    recorder = Recorder(dense, limit=1.0)
    run(Contestant("broken", play, ""), dense, 0, 1, recorder)
    assert (recorder.stopped, recorder.note) == ("failed", "ValueError: no such luck")


def scripted(name, values, played):
    """A contestant whose run is written down: one value per second."""

    def play(problem, seed, threads, recorder):
        if recorder.limit < 1:
            return
        played.append((seed, name))
        for second, value in enumerate(values, 1):
            recorder.add(float(second), value)
            if value >= recorder.goal:
                recorder.stopped = "goal"
                raise Enough
        recorder.stopped = "limit"

    return Contestant(name, play, "", always_asked=name == "asked")


def test_what_a_target_depends_on_is_always_asked(dense):
    played = []
    contestants = [scripted("full", [1.0], played), scripted("asked", [0.5, 0.6], played)]
    Rounds("made up", dense, 10.0, 1, say=lambda line: None).measure(contestants, 2)
    assert played == [(0, "full"), (0, "asked"), (1, "asked"), (1, "full")]


def test_rounds_rotate_and_spare_what_cannot_get_there(dense):
    played = []
    full, middling, hopeless = [0.5, 0.9992, 1.0], [0.5, 0.992, 0.9951, 0.996], [0.5, 0.6]
    contestants = [
        scripted("full", full, played),
        scripted("middling", middling, played),
        scripted("hopeless", hopeless, played),
    ]
    rounds = Rounds("made up", dense, 10.0, 1, say=lambda line: None)
    runs = rounds.measure(contestants, 3)
    assert played[:3] == [(0, "full"), (0, "middling"), (0, "hopeless")]
    assert played[3:] == [(1, "middling"), (1, "full"), (2, "full"), (2, "middling")]
    lengths = {(one.contestant, one.seed): len(one.points) for one in runs}
    assert lengths[("full", 0)] == 3
    assert lengths[("full", 1)] == 3  # 0.9992 has not yet gone three tenths of the way from 0.999 to 1
    assert lengths[("middling", 1)] == 3  # ends once well past 99 %


def test_the_floor_is_measured_with_the_same_matrix(problem):
    found = floor.measure(problem, 1, 5)
    assert found["products"] == min(found["one pass"], found["two passes"]) > 0
    assert found["ratio"] == pytest.approx(found["one sweep"] / found["products"])


def test_memory_counts_the_data_and_the_factors():
    problem = Problem(np.random.default_rng(0).random((6000, 500), np.float32), 8)
    found = memory.measure(problem, 1)
    assert found["data"] == 12_000_000
    assert found["allowance"] == 12_000_000 + 4 * 6500 * 8 * 4 + 64_000_000
    assert 11e6 < found["peak"] < found["allowance"]


def test_a_mapped_file_is_measured_against_an_allowance_without_the_data(monkeypatch):
    seen = []

    def instead(kind, file, small, *_):
        seen.append((kind, np.load(file, mmap_mode="r").shape, np.load(small).shape))
        return {"peak": 1}

    monkeypatch.setattr(memory, "_in_a_process", instead)
    found = memory.measure_mapped(1, (12_000, 50))
    assert seen == [("mapped", (12_000, 50), (memory.SMALL_ROWS, 50))]
    assert found["data"] == 12_000 * 50 * 4 + 128
    assert found["allowance"] == 4 * 12_050 * memory.MAPPED_RANK * 4 + 64_000_000


def test_tuning_sorts_settings_by_cost(tmp_path):
    outcomes = tuning.measure(1, 1, 0.05, True, say=lambda line: None)
    assert len(outcomes) == 2 * 2 * 4
    table = tuning.written(outcomes, "# Heading")
    costs = [float(line.split("|")[-2]) for line in table.splitlines() if line.startswith(("| 1", "| 2"))]
    assert costs == sorted(costs)
    assert costs[0] >= 1


def test_workloads_say_what_is_missing_and_read_what_is_there(tmp_path, monkeypatch):
    monkeypatch.delenv(workloads.FOLDER, raising=False)
    (text,) = workloads.chosen("stack-overflow")
    assert "PARTSONG_DATA" in text.missing()
    monkeypatch.setenv(workloads.FOLDER, str(tmp_path))
    assert "no stack_overflow.csv.gz" in text.missing()
    with gzip.open(tmp_path / "stack_overflow.csv.gz", "wt", encoding="utf-8") as out:
        out.write('label,label_id,text\na,1,"sorting a list, quickly"\na,1,lists and loops\n')
    assert text.missing() == ""
    X = text.load(False)
    assert X.format == "csr"
    assert X.dtype == np.float32
    with pytest.raises(SystemExit, match="Unknown workload nothing"):
        workloads.chosen("nothing")


def test_generated_workloads_have_their_rank_and_type():
    for name in ("planted-dense", "generated-text", "small"):
        (workload,) = workloads.chosen(name)
        X = workload.load(True)
        assert X.dtype == np.float32
        assert (X.min() if not isinstance(X, csr_array) else X.data.min()) >= 0
        assert workload.rank_for(True) < min(X.shape)


def test_the_command_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.delenv(workloads.FOLDER, raising=False)
    output, kept = tmp_path / "results" / "speed.md", tmp_path / "kept.json"
    common = ["--quick", "--seconds", "0.1", "--threads", "1", "--output", str(output), "--keep", str(kept)]
    where = ["--workloads", "mnist,generated-text,small"]
    main(["speed", "floor", *common, *where, "--contestants", "partsong,sklearn-cd-random"])
    main(["speed", *common, *where, "--contestants", "sklearn-cd-nndsvda"])
    main(["report", *common])
    text = output.read_text(encoding="utf-8")
    assert "mnist: skipped: set PARTSONG_DATA to the folder that holds mnist.npz." in text
    for expected in (
        "## small",
        "## generated-text",
        "| partsong |",
        "| sklearn-cd-nndsvda |",
        "## Above the product floor",
    ):
        assert expected in text
    assert str(tmp_path) not in text
    assert (output.parent / "speed-small.svg").read_text(encoding="utf-8").startswith("<svg")
    assert machine.processor() in text


def test_the_command_is_shown_without_folders(monkeypatch):
    monkeypatch.setenv("PARTSONG_DATA", "/somewhere/private")
    words = ["speed", "--output=/a/b/speed.md", "--keep", "/a/c/kept.json", "--seeds", "3"]
    assert machine.command(words) == (
        "PARTSONG_DATA=… python -m benchmarks speed --output=speed.md --keep kept.json --seeds 3"
    )


def test_a_picture_is_well_formed():
    from xml.etree import ElementTree

    from benchmarks.speed.curves import Run
    from benchmarks.speed.picture import drawn

    runs = [Run("w", f"method {i}", 0, tuple((0.1 * t, 1 - 0.5**t) for t in range(1, 20 + i))) for i in range(11)]
    root = ElementTree.fromstring(drawn(runs, 1.0))
    labels = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert all(run.contestant in labels for run in runs)


def test_iterations_are_those_of_the_default_solver(dense):
    """`iterate` is what the floor and the tuning are measured on; it must stay what `NMF.fit` does."""
    W, H = dense.random_start(0)
    start = InitialFactors(np.ascontiguousarray(H.T), W)
    rounds = iterate(as_matrix(dense.X), 4, accelerated_hals(), start, 1, 5)
    errors = [done.metrics["relative_error"] for done in islice(rounds, 5)]
    model = NMF(4, init="custom", tol=0.0, max_iter=5, n_threads=1).fit(dense.X, W=W, H=H)
    assert [row.relative_error for row in model.history_] == errors


def test_what_a_federation_costs_is_measured_and_written(tmp_path):
    from benchmarks.flower import in_process as federation

    found = federation.measure(2, True, lambda line: None)
    assert all(0 < one["aligning"] < one["round"] for label, one in found.items() if label.startswith("share"))
    assert all(one["ratio"] > 0 for label, one in found.items() if label.startswith("parallel"))
    assert found["memory"]["most"] >= found["memory"]["last"] > found["memory"]["data"]
    text = federation.written(found)
    assert text.count("| 1200 rows a party") == 3
    assert "at most 5 %" in text
