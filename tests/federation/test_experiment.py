"""Every method in experiment.toml: by its name and keys, with the bits of one process; or a reason why it is not."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from method_tables import ASYNCHRONOUS, BETWEEN_PARTIES, EVERY

import partsong
from partsong import methods
from partsong.aggregation.alignment import ALIGNMENTS
from partsong.aggregation.barycenter import FixedPoint, FromPrevious
from partsong.aggregation.server_update import Relaxation
from partsong.core.interfaces import Layout, Schedule
from partsong.engines.upload_checks import check_compatibility
from partsong.errors import CompositionError, ParameterError, SiteRefused
from partsong.federation.experiment import ADVICE, METHODS, NOT_BETWEEN_SITES, Experiment
from partsong.federation.policy import Policy
from partsong.methods import build, reference
from partsong.methods.averaging import AdoptModel, LocalAveraging
from partsong.methods.exact import SharedSums
from partsong.methods.game import FederatedGame
from partsong.methods.init_modes import LocalInit
from partsong.methods.private import PrivateAveraging
from partsong.methods.registry import Problem
from partsong.methods.secure_sketched import SketchedAveraging, SketchedSums
from partsong.methods.two_stage import FirstStage, exact_after
from partsong.sketch.crossing import Proportion
from partsong.sketch.kinds import Gaussian, Hadamard, Subsampling
from partsong.solvers.coupling import ProximalTerm
from partsong.solvers.game import DecayingStep, Game, ShrinkOthers
from partsong.solvers.game_orders import Raster
from partsong.solvers.squared_error import SquaredError
from partsong.solvers.update_rules import CoordinateDescent, Extrapolation, ProjectedGradient, ProximalDescent
from tests.federation.helpers import Federation, assert_same, model_of
from tests.federation.test_asynchronous import arrivals_of, assert_replayed

RUNS = {
    "exact": {"accelerate": True},
    "fnmf": {"variant": "paper", "every": 2, "client_align": "nearest", "strength": 0.2, "local_steps": 3},
    "fnmf-local": {"align": "softmax", "server_align": "sinkhorn", "synchronization": "personal", "local_steps": 3},
    "fnmf-paper": {"barycenter": "hierarchical", "local_steps": 3},
    "fnmf-personal": {"barycenter": "k-means", "local_steps": 3},
    "fnmf-by-sums": {"sweeps": 3, "align": "sinkhorn", "strength": 0.3, "local_steps": 3},
    "fnmf-by-sums, masked": {"local_steps": 3, "secure_aggregation": True},
    "fedavg": {"weighted": False, "init_mode": "local"},
    "fedprox": {"strength": 0.5, "local_steps": 2},
    "one-shot-ipalm": {"local_steps": 3},
    "one-shot-mu": {"local_steps": 3, "init_mode": "shared"},
    "local-only": {"local_steps": 3},
    "syn-sd": {"rule": "cd", "local_steps": 2},
    "syn-ssd-u": {"sketch": "gaussian", "sketch_ratio": 0.5, "local_steps": 2},
    "syn-ssd-v": {"sketch": "count", "local_steps": 2},
    "syn-ssd-uv": {"sketch_ratio": 0.5, "local_steps": 2},
    "asyn-sd": {"rho": 1.5, "rule": "pg", "local_steps": 2},
    "asyn-ssd-v": {"rho": 2, "sketch": "hadamard", "sketch_ratio": 0.5, "local_steps": 2},
    "secure-dsanls": {"rounds": 3, "sketch_dimension": 4, "columns_sketch": "gaussian", "columns_ratio": 0.5},
    "secure-dsanls, masked": {"rounds": 3, "sketch": "hadamard", "sketch_dimension": 4, "secure_aggregation": True},
    "moment": {},
    "moment, masked": {"secure_aggregation": True},
    "game": {"order": "random", "step": 0.01, "step_decay": 0.1, "leader": "rows"},
    "game-consensus": {"order": "alternating", "self_play": "max", "shrink": 0.9, "local_steps": 2},
    "game-consensus, masked": {"local_steps": 2, "secure_aggregation": True},
    "then-exact": {"first": "fedavg", "first_rounds": 1, "weighted": False},
    "then-exact, masked": {"first": "fnmf-by-sums", "first_rounds": 1, "local_steps": 3, "secure_aggregation": True},
}


FIRST_LEGS = FirstStage().names

ANY = Policy(methods=BETWEEN_PARTIES)


def experiment_of(**table):
    return Experiment.from_table({"rank": 2, "rounds": 3, "seed": 5, **table})


def run_of(name, folder):
    """One of these, from a file."""
    table = {"method": name.split(",")[0], "rank": 2, "rounds": 2, "seed": 5, **RUNS[name]}
    path = folder / "experiment.toml"
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items()))
    return Experiment.read(path)


@pytest.mark.parametrize("name", RUNS)
def test_a_method_that_was_broken_off_in_the_middle_has_the_bits_of_one_process(tmp_path, name):
    """All that goes on after the break is read from files of server and sites."""
    runs = arrivals_of if name.startswith("asyn") else Federation.rounds
    first = runs(Federation(tmp_path, run_of(name, tmp_path), policy=ANY))
    rounds = [next(first)]
    first.close()
    federation = Federation(tmp_path, run_of(name, tmp_path), policy=ANY)
    rounds += list(runs(federation))
    assert [done.index for done in rounds] == list(range(federation.plan().exchanges))
    (assert_replayed if name.startswith("asyn") else assert_same)(federation, rounds)
    H = federation.plan().program.components(rounds[-1].checkpoint.server)
    for site in federation.names:
        model = partsong.NMF.load(tmp_path / site / "results" / "run-1" / "model.safetensors")
        np.testing.assert_array_equal(model.components_, H)
    assert len({str(model_of(done)) for done in rounds}) == len(rounds)


def test_there_is_a_run_above_of_every_method_and_every_key():
    assert {name.split(",")[0] for name in RUNS} == set(BETWEEN_PARTIES)
    keys = {name for method in BETWEEN_PARTIES for name in EVERY[method].parameters}
    assert {key for run in RUNS.values() for key in run} == {*keys, "secure_aggregation", "rounds"}


def test_what_is_no_method_of_an_experiment_has_a_reason_not_to_be():
    for name in (*NOT_BETWEEN_SITES, *(set(methods.TABLE) - set(METHODS))):
        with pytest.raises(ParameterError, match=rf"'{name}' .*(Use|table privacy)"):
            experiment_of(method=name)


def test_every_parameter_of_a_method_is_a_key_and_what_is_a_sites_own_is_none():
    for method in BETWEEN_PARTIES:
        given = {name: one.plain(one.kind.example) for name, one in EVERY[method].parameters.items()}
        given = {name: value for name, value in given.items() if name not in ("step_decay", "shrink")}
        given |= {name: value for name, value in {"rule": "sanls", "sketch_dimension": 4}.items() if name in given}
        assert experiment_of(method=method, **given).program(3) == build(method, Problem(2, 3, 3), **given)
        assert not given.keys() & ADVICE.keys()


@pytest.mark.parametrize("method", [name for name in BETWEEN_PARTIES if not EVERY[name].required])
def test_without_keys_a_method_is_that_of_the_registry(method):
    assert experiment_of(method=method).program(3) == build(method, 2)


def test_without_keys_of_its_own_a_first_leg_is_its_method():
    for first in FIRST_LEGS:
        made = experiment_of(method="then-exact", first=first, first_rounds=2)
        leg = experiment_of(method=first).program(3)
        exchanges = 4 if first == "fnmf-by-sums" else 2
        assert made.program(3) == exact_after(leg, exchanges)
        assert made.schedule(3) == Schedule(exchanges + 1, 5)


def test_keys_are_those_of_the_programs():
    half, align = Proportion(Subsampling, 0.5), ALIGNMENTS["nearest"]
    game = Game(Raster(), DecayingStep(0.1, 0.2), ShrinkOthers(0.5), "columns")
    names = {"order": "sequential", "step": 0.1, "step_decay": 0.2, "self_play": "max", "shrink": 0.5}
    names["leader"] = "columns"
    hals = SquaredError(CoordinateDescent(sweeps=4), momentum=Extrapolation())
    alone, damped = build("fnmf-local", 2), SquaredError(ProximalDescent())
    made = {
        "exact": ({"accelerate": True, "local_steps": 4}, SharedSums(2, hals)),
        "fnmf-local": (
            {"align": "nearest", "every": 3},
            replace(
                alone,
                aggregation=FixedPoint(align, FromPrevious()),
                coupling=replace(alone.coupling, align=align, every=3),
                synchronization=AdoptModel(align),
            ),
        ),
        "fedprox": ({"strength": 0.4}, replace(build("fedprox", 2), coupling=ProximalTerm(0.4))),
        "syn-ssd-uv": ({"sketch_ratio": 0.5}, SketchedAveraging(2, damped, 10, half, half)),
        "asyn-ssd-v": (
            {"rho": 1.0, "sketch_ratio": 0.5},
            replace(build("asyn-sd", 2), server_update=Relaxation(1.0), sketch=half),
        ),
        "asyn-sd": ({"rule": "pg"}, replace(build("asyn-sd", 2), solver=SquaredError(ProjectedGradient()))),
        "secure-dsanls": ({"sketch": "hadamard"}, SketchedSums(2, Hadamard(8))),
        "game": (names, FederatedGame(2, game)),
        "game-consensus": (
            {**names, "init_mode": "local"},
            LocalAveraging(2, steps=10, game=game, init_mode=LocalInit()),
        ),
    }
    for method, (keys, program) in made.items():
        assert experiment_of(method=method, **keys).program(3) == program
    columns = experiment_of(method="secure-dsanls", sketch_dimension=3, columns_sketch="subsampling").program(3)
    assert columns == SketchedSums(2, Gaussian(3), columns_sketch=Proportion())


@pytest.mark.parametrize("name", RUNS)
def test_no_key_is_without_effect_and_a_site_is_told_all_of_them(tmp_path, name):
    experiment = run_of(name, tmp_path)
    assert Experiment.from_table(experiment.to_dict()) == experiment
    kept = {"step", "self_play", "columns_sketch", "first", "first_rounds", "local_steps"}
    for key in experiment.options.keys() - kept:
        table = {one: value for one, value in experiment.to_dict().items() if one != key}
        assert Experiment.from_table(table).program(3) != experiment.program(3), key


def test_methods_without_such_keys_are_told_as_before():
    """A run that has begun goes on, and sites with an older partsong know what is asked."""
    told = (
        "method",
        "rank",
        "rounds",
        "local_steps",
        "align",
        "init_mode",
        "seed",
        "secure_aggregation",
        "mask_bound",
        "columns",
    )
    assert set(experiment_of(method="fnmf").to_dict()) == {*told, "privacy"}


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"method": None}, "needs method"),
        ({"method": "fnmf_by_sums"}, "Did you mean 'fnmf-by-sums'"),
        ({"method": "fedavg", "wieghted": True}, "no setting 'wieghted'. Did you mean 'weighted'"),
        ({"method": "asyn-sd", "roh": 2}, "Did you mean 'rho'"),
        ({"method": "fedavg", "steps": 2}, "Did you mean 'local_steps'"),
        ({"method": "game", "play": "random"}, "Did you mean 'order'"),
        ({"method": "exact", "weighted": True}, "weighted is for fedavg; the method is 'exact'. Remove it"),
        ({"method": "exact", "sweeps": 2}, "are its local_steps"),
        ({"method": "fedavg", "sweeps": 2}, "sweeps is for fnmf-by-sums; the method is 'fedavg'"),
        ({"method": "syn-sd", "rho": 2.0}, "rho is for asyn-sd, asyn-ssd-v; the method is 'syn-sd'"),
        ({"method": "syn-sd", "sketch": "count"}, "sketch is for syn-ssd-u.*secure-dsanls.*; the method is 'syn-sd'"),
        ({"method": "exact", "strength": 0.1}, "strength is for fnmf.*fedprox, fednmf-mi; the method is 'exact'"),
        ({"method": "fednmf", "rho": 1.0}, "rho is for asyn-sd, asyn-ssd-v; the method is 'fednmf'"),
        ({"method": "fedlda", "strength": 1.0}, "strength is for fnmf.*fednmf-mi"),
        ({"method": "fedavg", "align": "sinkhorn"}, "align is for fnmf-local, fnmf,.*fnmf-by-sums; the method"),
        ({"method": "fnmf-by-sums", "server_align": "nearest"}, "server_align is for fnmf-local, fnmf"),
        ({"method": "secure-dsanls", "local_steps": 3}, "local_steps is for exact"),
        ({"method": "local-only", "init_mode": "shared"}, "init_mode is 'shared'.*draw their own start"),
        ({"method": "game", "init_mode": "local"}, "All parties of this method start from one H"),
        ({"method": "exact", "accelerate": 1}, "accelerate must be true or false"),
        ({"method": "fnmf", "variant": "papr"}, "variant is 'papr'. Did you mean 'paper'"),
        ({"method": "fnmf", "every": 0}, "every must be a whole number"),
        ({"method": "fnmf", "strength": -1}, "strength must be a number of at least 0"),
        ({"method": "fnmf", "client_align": ["nearest"]}, "client_align is"),
        ({"method": "syn-sd", "rule": "hal"}, "rule is 'hal'. Did you mean 'hals'"),
        ({"method": "asyn-sd", "rho": 0}, "rho must be a number above 0"),
        ({"method": "asyn-sd", "rho": float("inf")}, "rho must be a number above 0"),
        ({"method": "asyn-sd", "rho": True}, "rho must be a number"),
        ({"method": "asyn-sd", "rho": 1.0, "secure_aggregation": True}, "cannot use secure aggregation"),
        ({"method": "syn-ssd-u", "sketch": "gauss"}, "Did you mean 'gaussian'"),
        ({"method": "syn-ssd-u", "sketch_ratio": 1.5}, "sketch_ratio must be above 0 and at most 1"),
        (
            {"method": "secure-dsanls", "sketch": "count"},
            "Known are: gaussian, hadamard. Other sketches would send rows unchanged",
        ),
        (
            {"method": "secure-dsanls", "sketch_dimension": 1},
            "rank must be from 1 to d = 1, the dimension of the sketch; got 2",
        ),
        ({"method": "secure-dsanls", "columns_ratio": 0.5}, "needs columns_sketch"),
        ({"method": "secure-dsanls", "is_guarded": False}, "cannot set how many sketches"),
        ({"method": "secure-dsanls", "budget": "total"}, "only from the server"),
        ({"method": "game", "order": "simultaneous"}, "all rows in one place"),
        ({"method": "game", "step": "fast"}, 'step must be "safe" or a number'),
        ({"method": "game", "step": 0}, "step must be a number above 0"),
        ({"method": "game", "step_decay": 0.1}, "step_decay needs a numeric step"),
        ({"method": "game", "shrink": 0.5}, 'shrink needs self_play = "min" or "max"'),
        ({"method": "game", "self_play": "min", "shrink": 2}, "shrink must be from 0 to 1"),
        ({"method": "game", "leader": "row"}, "Did you mean 'rows'"),
        ({"method": "then-exact"}, "needs first and first_rounds.*fedavg"),
        (
            {"method": "then-exact", "first": "game", "first_rounds": 1},
            "first is 'game'. Did you mean 'game-consensus'",
        ),
        ({"method": "then-exact", "first": "fedavg", "first_rounds": 3}, "leaves no exact round among 3 rounds"),
        ({"method": "then-exact", "first": "fedavg", "first_rounds": 1, "strength": 1.0}, 'with first = "fedavg"'),
        ({"method": "exact", "first": "fedavg"}, "first is for then-exact"),
        ({"method": "game-consensus", "privacy": {"unit": "party", "epsilon": 1}}, "PartyPrivacy needs"),
        (
            {"method": "then-exact", "first": "fedavg", "first_rounds": 1, "privacy": {"unit": "party", "epsilon": 1}},
            "PartyPrivacy needs",
        ),
        (
            {"method": "secure-dsanls", "privacy": {"unit": "row", "epsilon": 1, "row_bound": 1}},
            "RowPrivacy needs",
        ),
        (
            {"method": "exact", "accelerate": True, "privacy": {"unit": "row", "epsilon": 1, "row_bound": 1}},
            "accelerate of exact cannot be combined with RowPrivacy",
        ),
    ],
)
def test_keys_that_cannot_be_meant_are_refused_with_the_way_out(table, match):
    with pytest.raises(ParameterError, match=match):
        experiment_of(**table)


def test_a_leader_needs_an_order_of_single_cells():
    with pytest.raises(CompositionError, match="leader needs an order that plays single cells"):
        experiment_of(method="game-consensus", order="simultaneous", leader="rows")


def test_a_promise_is_kept_with_keys_where_there_is_one():
    program = experiment_of(method="fedavg", weighted=False, privacy={"unit": "party", "epsilon": 1}).program(3)
    assert isinstance(program, PrivateAveraging)
    assert program.program == build("fedavg", 2, local_steps=3, weighted=False)


@pytest.mark.parametrize(
    "table", [{"method": "fnmf"}, {"method": "game"}, {"method": "fnmf-by-sums", "align": "partial-sinkhorn"}]
)
def test_what_is_no_sum_is_not_masked_and_nothing_has_left(tmp_path, table):
    federation = Federation(tmp_path, experiment_of(**table, secure_aggregation=True))
    with pytest.raises(CompositionError, match=r"reads individual uploads|one party alone"):
        list(federation.rounds())
    assert not any(federation.site(name).ledger.serial for name in federation.names)


def test_a_site_sends_no_more_sketches_than_leave_its_rows_open(tmp_path):
    """16 rows, sketches of dimension 4: the first exchange counts rows, three sketch them, and the next is refused."""
    federation = Federation(tmp_path, experiment_of(method="secure-dsanls", sketch_dimension=4, rounds=6), policy=ANY)
    rounds = federation.rounds()
    assert [next(rounds).index for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(SiteRefused, match="round 4"):
        next(rounds)
    for name in federation.names:
        assert {index for index, _ in federation.site(name).audit.run_releases("run-1").attempts} == {0, 1, 2, 3}


def test_a_site_bounds_the_sums_of_rounds_that_have_several(tmp_path):
    experiment = experiment_of(method="fnmf-by-sums", sweeps=4)
    assert experiment.request(3).rounds == experiment.schedule(3).rounds == 12
    federation = Federation(tmp_path, experiment, policy=Policy(maximum_rounds=11))
    with pytest.raises(SiteRefused, match="'rounds'"):
        list(federation.rounds())
    assert experiment_of(method="then-exact", first="fnmf-by-sums", sweeps=4, first_rounds=1).request(3).rounds == 6


def test_a_site_allows_methods_by_name(tmp_path):
    assert (
        set(METHODS) - set(Policy().methods) == set(METHODS) - set(Policy.from_table({}).methods) == {"secure-dsanls"}
    )
    assert Policy.from_table({"methods": list(BETWEEN_PARTIES)}).methods == BETWEEN_PARTIES
    federation = Federation(tmp_path, experiment_of(method="game-consensus"), policy=Policy(methods=("game", "exact")))
    with pytest.raises(SiteRefused, match="'method'"):
        list(federation.rounds())


def test_the_page_says_whether_a_method_can_be_masked():
    page = reference.page()
    for method in BETWEEN_PARTIES:
        section = page.split(f"\n## {method}\n")[1].split("\n## ")[0]
        assert ("sums can be masked" in section) == can_be_masked(method), method


def test_the_experiment_on_the_page_is_one():
    page = (Path(__file__).parents[2] / "docs" / "guide" / "federation.md").read_text(encoding="utf-8")
    section = page.split("### Methods and their keys")[1].split("\n### ")[0]
    example = Experiment.from_table(tomllib.loads(section.split("```toml")[1].split("```")[0]))
    first = build("fnmf-by-sums", 10, align=ALIGNMENTS["sinkhorn"])
    assert example.program(3) == exact_after(first, 6)


def can_be_masked(method):
    if method in ASYNCHRONOUS:
        return False
    more = {"first": "fedavg", "first_rounds": 1} if method == "then-exact" else {}
    experiment = experiment_of(method=method, secure_aggregation=True, **more)
    program, layout = experiment.program(3), Layout(("a", "b", "c"), 9, 0)
    try:
        check_compatibility(program, experiment.reduction(3), program.upload_spec(layout))
    except CompositionError:
        return False
    return True
