"""The registry: what follows from a method's registration, and that the generated files are up to date."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from method_tables import BETWEEN_PARTIES, EVERY, METHODS
from sklearn.base import clone

import partsong
from partsong import methods
from partsong.aggregation.barycenter import BARYCENTERS, FixedPoint, Hierarchical, KMeans
from partsong.core.parameters import (
    FACTOR,
    SHARE,
    Above,
    Choice,
    Number,
    Whole,
    WordOrNumber,
    parameters_of,
    parse_all,
    read_settings,
)
from partsong.errors import ParameterError
from partsong.methods import reference
from partsong.methods.averaging import AdoptModel, PersonalComponents
from partsong.methods.fnmf import fnmf_paper
from partsong.methods.registry import Problem, method
from partsong.methods.secure_sketched import SketchedSums
from partsong.solvers.update_rules import RULES, CoordinateDescent

ROOT = Path(__file__).parents[3]

TOY = '''
"""A method in one file."""

from typing import Annotated

from partsong.aggregation.server_update import Relaxation
from partsong.core.parameters import AtLeast, Steps
from partsong.methods.averaging import LocalAveraging
from partsong.methods.registry import Problem, method
from partsong.methods.init_modes import SHARED_INIT, InitMode


@method("toy", privacy=("party",))
def toy(
    problem: Problem,
    *,
    local_steps: Steps = 2,
    patience: Annotated[float, AtLeast(1)] = 3.0,
    init_mode: InitMode = SHARED_INIT,
) -> LocalAveraging:
    """Parties iterate twice, and the server moves a part of the way."""
    return LocalAveraging(problem.rank, steps=local_steps, init_mode=init_mode, server_update=Relaxation(patience))
'''

SHOW = """
import json, sys
import numpy as np
from partsong import methods
from partsong.methods import reference

import toy_method
import partsong
from method_tables import METHODS, SENDS_H, INIT_MODES
from partsong.cli.main import app
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy

X = [np.random.default_rng(seed).random((9, 6)) for seed in range(3)]
settings = {"method": "toy", "rounds": 2, "tol": 0, "random_state": 1}
model = partsong.FederatedNMF(2, method_options={"patience": 5}, **settings).fit(X)
toml = {"method": "toy", "rank": 2, "rounds": 3, "patience": 5}
private = partsong.FederatedNMF(2, privacy=partsong.PartyPrivacy(3.0), **settings).fit(X)
print(json.dumps({
    "names": "toy" in methods.names(),
    "changed": bool(abs(model.components_ - partsong.FederatedNMF(2, **settings).fit(X).components_).max() > 0),
    "compared": partsong.compare(X, 2, ["toy"], rounds=2).rows[0].method,
    "patience": Experiment.from_table(toml).program(3).server_update.rho,
    "allowed": "toy" in Policy().methods,
    "private": bool(private.epsilon_spent_ <= 3),
    "page": reference.page().split("## toy")[1],
    "table": reference.table().split("toy")[1] != "",
    "laws": ["toy" in METHODS, "toy" in SENDS_H, INIT_MODES["toy"]],
}))
app(sys.argv[1:])
"""


@pytest.fixture
def shown(tmp_path):
    """What a fresh process says that knows a method from one file more, and then does a command."""
    (tmp_path / "toy_method.py").write_text(TOY)

    def run(*command: object) -> tuple[dict, str]:
        paths = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'tests' / 'laws')!r}]"
        done = subprocess.run(
            [sys.executable, "-c", f"{paths}\n{SHOW}", *map(str, command)], capture_output=True, text=True, check=False,
            env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told, _, output = done.stdout.partition("\n")
        return json.loads(told), output

    return run


def test_a_method_in_one_file_is_everywhere(shown):
    told, help_page = shown("fit", "--help-all")
    assert told["names"]
    assert told["changed"]
    assert told["private"]
    assert told["allowed"]
    assert told["table"]
    assert (told["compared"], told["patience"], told["laws"]) == ("toy", 5, [True, True, ["shared", "local"]])
    assert "Parties iterate twice, and the server moves a part of the way." in told["page"]
    assert "| `patience` | number ≥ 1 | 3.0 |" in told["page"]
    assert "| `H` | k × m |" in told["page"]
    assert "toy: Parties iterate twice" in " ".join(help_page.replace("│", " ").split())


def test_a_method_in_one_file_is_fitted_from_the_command_line(shown, tmp_path):
    np.savetxt(tmp_path / "X.csv", np.random.default_rng(0).random((30, 5)), delimiter=",")
    shown("split", tmp_path / "X.csv", "--parties", 3, "-o", tmp_path / "parts")
    fit = ("fit", tmp_path / "parts", "-k", 2, "--method", "toy", "--rounds", 2, "--seed", 1, "--json")
    _, plain = shown(*fit, "-o", tmp_path / "plain.safetensors")
    _, other = shown(*fit, "-o", tmp_path / "other.safetensors", "--patience", 5)
    assert json.loads(plain)["relative_error"] != json.loads(other)["relative_error"]
    assert partsong.load_model(tmp_path / "other.safetensors").settings["method_options"] == {"patience": 5.0}


def test_the_lazy_table_is_that_of_the_registrations():
    written = reference.TABLE_FILE.read_text(encoding="utf-8")
    assert written == reference.table(), "python -m partsong.methods.reference --write"


def test_importing_names_imports_no_method():
    script = "import sys, partsong.methods; print(*(name for name in sys.modules if name.startswith('partsong.')))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"partsong.methods", "partsong.methods.table"}


@pytest.mark.parametrize("name", EVERY)
def test_what_a_method_sends_is_stated_with_a_meaning(name):
    specs = reference.specs_of(EVERY[name])
    assert specs
    for kind in specs:
        for array, spec in kind.items():
            assert spec.meaning, array
            assert all(isinstance(size, str) or size < 20 or "theta" in array for size in spec.shape), (
                array,
                spec.shape,
            )


@pytest.mark.parametrize("name", METHODS)
def test_options_are_values_or_their_names(name):
    for parameter in EVERY[name].parameters.values():
        for choice in parameter.names:
            value = parameter.parse(choice)
            assert parameter.parse(value) == value
            assert parameter.plain(value) == choice


@pytest.mark.parametrize("name", BETWEEN_PARTIES)
def test_a_summary_is_a_sentence(name):
    summary = EVERY[name].summary
    assert summary == methods.TABLE[name].summary
    assert summary[0].isupper()
    assert summary.endswith(".")


def test_options_reach_the_program_through_the_estimator_and_survive_a_clone_and_a_file(tmp_path):
    X = [np.random.default_rng(seed).random((9, 6)) for seed in range(3)]
    options = {"weighted": False}
    model = partsong.FederatedNMF(2, method="fedavg", method_options=options, rounds=2, random_state=0)
    assert clone(model).get_params()["method_options"] == options
    program = methods.build("fedavg", 2, weighted=False)
    given = partsong.FederatedNMF(2, method=program, rounds=2, random_state=0).fit(X)
    np.testing.assert_array_equal(model.fit(X).components_, given.components_)
    model.save(tmp_path / "m.safetensors")
    assert partsong.FederatedNMF.load(tmp_path / "m.safetensors").method_options == options
    plain = partsong.FederatedNMF(2, method="fedavg", rounds=2, random_state=0).fit(X)
    plain.save(tmp_path / "plain.safetensors")
    assert "method_options" not in partsong.load_model(tmp_path / "plain.safetensors").settings


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"method": "fedavg", "method_options": {"wieghted": False}}, "Did you mean 'weighted'"),
        ({"method": "fedavg", "method_options": {"rho": 2}}, "rho is for asyn-sd, asyn-ssd-v; the method is 'fedavg'"),
        ({"method": "fedavg", "method_options": {"weighted": 1}}, "weighted must be true or false"),
        ({"method": "fedavg", "method_options": "weighted"}, "method_options must be a mapping"),
        (
            {"method": "fedavg", "local_steps": 3, "method_options": {"local_steps": 4}},
            "local_steps is also in method_options",
        ),
        ({"method": "dsanls"}, "is for ranks, not for parties"),
        ({"method": "fednmf"}, "is for texts, not for parties"),
        ({"method": "then-exact"}, "needs first and first_rounds"),
        (
            {"method": "then-exact", "rounds": 3, "method_options": {"first": "fedavg", "first_rounds": 3}},
            "leaves no exact round among 3 rounds",
        ),
        (
            {"method": "then-exact", "method_options": {"first": "fedavg", "first_rounds": 1, "strength": 1}},
            'strength is for .*the method is "then-exact" with first = "fedavg"',
        ),
        ({"method": methods.build("fedavg", 2), "method_options": {"weighted": False}}, "combined with a Program"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(settings, match):
    with pytest.raises(ParameterError, match=match):
        partsong.FederatedNMF(2, **settings).fit([np.ones((4, 5)), np.ones((4, 5)) * 2])


def test_every_variant_of_the_papers_has_a_name():
    assert methods.build("fnmf-paper", 3) == methods.build("fnmf-local", 3, variant="paper", align="assignment")
    personal = methods.build("fnmf-personal", 3)
    assert isinstance(personal.synchronization, PersonalComponents)
    assert personal == methods.build("fnmf-local", 3, synchronization="personal")
    assert isinstance(methods.build("fnmf-local", 3).synchronization, AdoptModel)
    assert isinstance(methods.build("fnmf-local", 3, barycenter="hierarchical").aggregation, Hierarchical)
    assert isinstance(methods.build("fnmf-local", 3, barycenter="k-means").aggregation, KMeans)
    kinds = {type(methods.build("fnmf-local", 3, barycenter=name).aggregation) for name in BARYCENTERS.names}
    assert kinds == set(BARYCENTERS.values.values())
    assert FixedPoint in kinds
    assert isinstance(methods.build("secure-dsanls", 3), SketchedSums)
    assert methods.build("dsanls", Problem(3, rounds=7, n_rows=20)).iterations == 7


def test_two_functions_cannot_have_one_name():
    with pytest.raises(ValueError, match="registered twice"):
        method("fnmf-paper")(textwrap.dedent)
    assert EVERY["fnmf-paper"].builder is fnmf_paper


def signature(
    problem: Problem,
    *,
    share: Annotated[float, SHARE] = 0.5,
    rule: Annotated[object, RULES] = RULES["cd"],
    most: Annotated[int | None, Whole(2)] = None,
    is_so: bool = False,
    needed: Annotated[str, Choice.of("a", "b")],
) -> None:
    """Anything."""


class TestParameters:
    def test_are_read_from_a_signature(self):
        found = parameters_of(signature)
        assert list(found) == ["share", "rule", "most", "is_so", "needed"]
        assert [one.is_required for one in found.values()] == [False, False, False, False, True]
        assert found["most"].parse(None) is None
        assert found["rule"].parse("hals") == RULES["hals"]
        assert found["rule"].parse(CoordinateDescent(7)) == CoordinateDescent(7)
        assert found["rule"].plain(CoordinateDescent(7)) == repr(CoordinateDescent(7))
        assert found["rule"].plain(RULES["mu"]) == "mu"

    def test_without_a_kind_are_a_mistake_of_the_author(self):
        def wrong(problem: Problem, *, steps: int = 3) -> None: ...

        with pytest.raises(TypeError, match="Annotated"):
            parameters_of(wrong)

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"needed": "a", "share": 0}, "share must be above 0 and at most 1; got 0"),
            ({"needed": "a", "share": True}, "share must be a number"),
            ({"needed": "a", "share": "0.5"}, "share must be a number"),
            ({"needed": "a", "most": 1}, "most must be a whole number of at least 2"),
            ({"needed": "a", "most": 2.0}, "most must be a whole number"),
            ({"needed": "a", "is_so": 1}, "is_so must be true or false"),
            ({"needed": "c"}, "needed is 'c'. .*Known are: a, b"),
            ({"needed": ["a"]}, "needed is"),
            ({"needed": "a", "rule": CoordinateDescent}, "rule is"),
            ({}, "the thing needs needed: needed is"),
            ({"needed": "a", "shar": 1}, "the thing has no parameter 'shar'. Did you mean 'share'"),
        ],
    )
    def test_that_cannot_be_meant_are_refused_by_name(self, given, match):
        with pytest.raises(ParameterError, match=match):
            parse_all(parameters_of(signature), given, "the thing")

    @pytest.mark.parametrize(
        ("kind", "text", "value"),
        [
            (Whole(), "3", 3), (Number(above=0), ".2", 0.2), (FACTOR, "1", 1.0),
            (WordOrNumber("safe", Above(0)), "safe", "safe"),
            (WordOrNumber("safe", Above(0)), "0.1", 0.1), (RULES, "hals", "hals"), (Whole(), "three", "three"),
        ],
    )  # fmt: skip
    def test_are_read_from_the_text_of_a_command_line(self, kind, text, value):
        assert kind.read(text) == value

    def test_settings_of_a_command_line_are_names_and_values(self):
        assert read_settings(["sketch-ratio=.5", "rule = cd"], "--x") == {"sketch_ratio": ".5", "rule": "cd"}
        for wrong in (["rule"], ["=3"], ["a=1", "a=2"]):
            with pytest.raises(ParameterError, match="--x"):
                read_settings(wrong, "--x")


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"method": "syn-sd", "method_options": {"rule": CoordinateDescent(sweeps=2)}}, {"method_options": None}),
        (
            {"method": "then-exact", "local_steps": 7, "method_options": {"first": "fedavg", "first_rounds": 2}},
            {"local_steps": 7, "method_options": {"first": "fedavg", "first_rounds": 2}},
        ),
    ],
)
def test_what_was_saved_is_loaded(tmp_path, settings, kept):
    """A value without a name comes back as the method has it; options of a first leg are options as well."""
    rng = np.random.default_rng(0)
    fitted = partsong.FederatedNMF(2, rounds=3, random_state=0, **settings).fit([rng.random((20, 8)) for _ in range(3)])
    fitted.save(tmp_path / "m.safetensors")
    again = partsong.FederatedNMF.load(tmp_path / "m.safetensors").get_params()
    assert {name: again[name] for name in kept} == kept
