"""site.toml and experiment.toml: types, unknown keys with the nearest name, and limits of a policy."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from msgspec import Meta

from partsong import federation
from partsong.aggregation.plaintext import PlainReduction
from partsong.core.parameters import read_toml
from partsong.errors import FileError, FormatError, ParameterError, SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.toml_files import format_toml, load_toml, parse_table, save_toml
from partsong.federation.wire import CODES
from partsong.methods import build
from partsong.methods.private import PrivateSums
from partsong.secure_aggregation.protocol import SecureSum
from tests.federation.helpers import Federation


@dataclass(frozen=True, slots=True)
class Budget:
    ADVICE: ClassVar[Mapping[str, str]] = {"sigma": "Noise follows from epsilon."}
    epsilon: Annotated[float, Meta(gt=0)]
    unit: Literal["row", "party"] = "row"

    def __post_init__(self):
        if self.unit == "party" and self.epsilon > 5:
            raise ParameterError("epsilon is too large for a party. Use 5 or less.")


@dataclass(frozen=True, slots=True)
class Settings:
    VERSION: ClassVar[int] = 2
    rank: Annotated[int, Meta(ge=1)] | None = None
    secure_aggregation: bool = False
    columns: tuple[str, ...] | None = None
    budget: Budget | None = None
    sites: Mapping[str, str] = field(default_factory=dict)


@pytest.fixture
def load(tmp_path):
    path = tmp_path / "settings.toml"

    def loaded(text, **how):
        path.write_text(text, encoding="utf-8")
        return load_toml(path, Settings, **how)

    loaded.path = path
    return loaded


def test_values_are_typed_and_survive_a_file(load):
    wanted = Settings(3, True, ("a", 'q"\n\x7f'), Budget(1.5, "party"), {"dots. and é": "x"})
    save_toml(load.path, wanted)
    assert load_toml(load.path, Settings) == wanted
    assert load("version = 2\n[budget]\nepsilon = 1\n") == Settings(budget=Budget(1.0))
    assert isinstance(load("budget.epsilon = 1").budget.epsilon, float)
    assert load_toml(load.path, Settings) == load("\ufeffbudget.epsilon = 1")


def test_none_is_left_out(load):
    assert format_toml(Settings(3)) == "rank = 3\nsecure_aggregation = false\n\n[sites]\n"
    save_toml(load.path, {"a": None, "b": {"c": None, "d": 1}}, private=True)
    assert read_toml(load.path) == {"b": {"d": 1}}
    assert load.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("secure_agregation = true", ("has no setting 'secure_agregation'", "Did you mean 'secure_aggregation'?")),
        ("budget.epsilo = 1", ("has no setting 'budget.epsilo'", "Did you mean 'epsilon'?")),
        ("budget.sigma = 1", ("has no setting 'budget.sigma'", "Noise follows from epsilon.")),
        ("rank = 'x'", (": rank must be a whole number of at least 1; got 'x'. Correct it there.",)),
        ("rank = true", (": rank must be a whole number of at least 1; got True.",)),
        ("rank = 0", (": rank must be a whole number of at least 1; got 0.",)),
        ("secure_aggregation = 1", (": secure_aggregation must be true or false; got 1.",)),
        ("columns = 'all'", (": columns must be a list of strings; got 'all'.",)),
        ("columns = ['a', 1]", (": columns must be a list of strings; got ['a', 1].",)),
        ("budget.unit = 'row'", (" needs budget.epsilon: a number above 0. Add it.",)),
        ("budget = 3", (": budget must be a table of settings; got 3.",)),
        ("budget.epsilon = nan", (": budget.epsilon must be a number above 0; got nan.",)),
        ("budget.epsilon = 0x" + "f" * 5000, ("budget.epsilon", "thousands of digits")),
        ("[budget]\nepsilon = 1\nunit = 'cell'", ("budget.unit must be", '"row"', "'cell'")),
        ("[budget]\nepsilon = 9\nunit = 'party'", (": epsilon is too large for a party. Use 5 or less.",)),
        ("[sites]\nnorth = 3", (": sites must be a table", "{'north': 3}")),
    ],
)
def test_errors_name_file_key_value_and_way_out(load, text, words):
    with pytest.raises(ParameterError) as caught:
        load(text)
    for word in (str(load.path), *words):
        assert word in str(caught.value)


def test_a_file_of_a_newer_version_asks_for_an_update(load):
    with pytest.raises(FormatError, match=r"settings\.toml has version = 3.*up to 2.*Update partsong"):
        load("version = 3\nunknown = 1")
    for text in ("version = 0", "version = 'two'", "version = true"):
        with pytest.raises(FormatError, match="version must be a whole number"):
            load(text)


def test_files_that_cannot_be_read(load, tmp_path):
    with pytest.raises(FileError, match="Check the path"):
        load_toml(tmp_path / "none.toml", Settings)
    with pytest.raises(FormatError, match="not valid TOML"):
        load("a = = b")
    load.path.write_bytes(b"a = '\xff'")
    with pytest.raises(FileError, match="cannot be read"):
        load_toml(load.path, Settings)


def test_received_files_have_their_own_error_and_way_out(load):
    for text in ("rank = 'x'", "unknown = 1"):
        with pytest.raises(FormatError, match=r"settings\.toml"):
            load(text, error=FormatError, way_out="Ask for it again.")
    with pytest.raises(FormatError, match="Ask for it again"):
        load("rank = 'x'", error=FormatError, way_out="Ask for it again.")


def test_a_table_of_a_message_is_named_by_what_it_is():
    assert parse_table({"rank": None, "columns": ("a",)}, Settings, "The message") == Settings(columns=("a",))
    with pytest.raises(ParameterError, match=r"^The message must be a table of settings; got 3\.$"):
        parse_table(3, Settings, "The message")
    with pytest.raises(ParameterError, match=r"^The message: secure_aggregation must be true or false; got None\.$"):
        parse_table({"secure_aggregation": None}, Settings, "The message")
    assert math.isinf(parse_table({"epsilon": math.inf}, Budget, "The message").epsilon)


SITE = """
methods = ["exact", "fedavg"]
minimum_rows = 50
minimum_parties = 3
maximum_rounds = 200
secure_aggregation = true
columns = ["ENSG*"]
[privacy]
epsilon = 3
delta = 1e-6
unit = "party"
"""

ROWS = {"unit": "row", "epsilon": 1, "row_bound": 1}

EXPERIMENT = """
method = "exact"
rank = 5
rounds = 20
seed = 11
secure_aggregation = true
on_party_error = "skip"
[privacy]
unit = "row"
epsilon = 3.0
row_bound = 10.0
mechanism = "rounds"
"""


def test_a_site_s_policy_is_read(tmp_path):
    path = tmp_path / "site.toml"
    path.write_text(SITE)
    policy = Policy.read(path)
    assert (policy.minimum_rows, policy.minimum_parties, policy.maximum_rounds, policy.secure_aggregation) == (
        50,
        3,
        200,
        True,
    )
    assert (policy.privacy.epsilon, policy.privacy.delta, policy.privacy.unit) == (3.0, 1e-6, "party")
    assert policy.leaving(("ENSG1", "name", "ENSG2")) == ("ENSG1", "ENSG2")


def test_an_experiment_is_a_program_a_reduction_and_a_schedule(tmp_path):
    path = tmp_path / "experiment.toml"
    path.write_text(EXPERIMENT)
    experiment = Experiment.read(path)
    program = experiment.program(4)
    assert isinstance(program, PrivateSums)
    assert program.shares == 2
    assert isinstance(experiment.reduction(4), SecureSum)
    assert experiment.reduction(4).fewest == 4
    assert (experiment.schedule(4).rounds, experiment.schedule(4).seed) == (20, 11)
    assert experiment.schedule(4).on_party_error == "skip"


def test_plain_values_make_the_same_experiment_at_a_site():
    experiment = Experiment("syn-ssd-uv", 5, 3, local_steps=4, seed=2)
    told = Experiment.from_table(experiment.to_dict())
    assert told == experiment
    assert told.program(3) == build("syn-ssd-uv", 5, local_steps=4) == experiment.program(3)
    assert told.schedule(3).rounds == build("syn-ssd-uv", 5, local_steps=4).exchanges(3, 3)
    assert isinstance(told.reduction(3), PlainReduction)


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"recipes": ["exact"]}, "called 'methods' since"),
        ({"minimum_row": 3}, "'minimum_rows'"),
        ({"methods": ["exakt"]}, "'exact'"),
        ({"minimum_rows": 0}, "at least 1"),
        ({"minimum_rows": True}, "whole number"),
        ({"maximum_rounds": "many"}, "whole number"),
        ({"maximum_runs": 0}, "at least 1"),
        ({"maximum_run": 3}, "'maximum_runs'"),
        ({"columns": "all"}, "list of strings"),
        ({"secure_aggregation": 1}, "true or false"),
        ({"privacy": {"epsilon": 1, "sigma": 2}}, "no setting 'privacy.sigma'"),
        ({"privacy": {"delta": 1e-5}}, "needs privacy.epsilon"),
        ({"privacy": {"epsilon": -1}}, "epsilon"),
        ({"privacy": {"epsilon": 1, "unit": "cell"}}, '"party" or "row"; got .cell.'),
        ({"privacy": 3}, "table of settings"),
    ],
)
def test_a_policy_that_cannot_be_meant_is_refused(table, match):
    with pytest.raises(ParameterError, match=match):
        Policy.from_table(table)


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"methode": "exact"}, "'method'"),
        ({"method": "exact", "rank": 3}, "needs rounds"),
        ({"method": "fedavgg", "rank": 3, "rounds": 3}, "'fedavg'"),
        ({"method": "asyn-sdd", "rank": 3, "rounds": 3}, "'asyn-sd'"),
        ({"method": "asyn-sd", "rank": 3, "rounds": 3, "secure_aggregation": True}, "cannot use secure aggregation"),
        ({"method": "asyn-sd", "rank": 3, "rounds": 3, "tol": -1}, "tol must be"),
        ({"method": "syn-sd", "rank": 3, "rounds": 3, "time_budget": 5.0}, "time_budget can end only runs of asyn-sd"),
        ({"method": "exact", "rank": 0, "rounds": 3}, "rank must be"),
        ({"method": "exact", "rank": 3, "rounds": 3, "on_party_error": "go on"}, "on_party_error"),
        ({"method": "exact", "rank": 3, "rounds": 3, "columns": "all"}, "columns"),
        ({"method": "exact", "rank": 3, "rounds": 3, "seed": -1}, "seed"),
        ({"method": "exact", "rank": 3, "rounds": 3, "align": "sinkhorn"}, "align"),
        (
            {"method": "fedavg", "rank": 3, "rounds": 3, "privacy": {"unit": "row", "epsilon": 1, "row_bound": 1}},
            "exact",
        ),
        ({"method": "exact", "rank": 3, "rounds": 3, "privacy": {"unit": "row", "epsilo": 1}}, "'epsilon'"),
    ],
)
def test_an_experiment_that_cannot_be_meant_is_refused(table, match):
    with pytest.raises(ParameterError, match=match):
        Experiment.from_table(table)


def test_runs_are_counted_over_all_time(tmp_path):
    assert Policy.from_table({"maximum_runs": 2}).maximum_runs == 2
    experiment, policy = Experiment("fedavg", 3, 1), Policy(maximum_runs=2)
    for run in ("one", "two"):
        list(Federation(tmp_path, experiment, policy=policy, run=run).rounds())
        shutil.rmtree(tmp_path / "server")
    shutil.rmtree(tmp_path / "east" / "runs")
    with pytest.raises(SiteRefused, match="'runs'"):
        list(Federation(tmp_path, experiment, policy=policy, run="three").rounds())


def test_files_that_cannot_be_read_are_told(tmp_path):
    with pytest.raises(FileError, match="Check the path"):
        Policy.read(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = = b")
    with pytest.raises(FormatError, match="not valid TOML"):
        Experiment.read(tmp_path / "bad.toml")


OF_EXPERIMENTS = 'method = "exact"\nrank = 3\nrounds = 2\n'


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (Policy.read, "methods = ['exakt']", ": methods has 'exakt'. Did you mean 'exact'?"),
        (Policy.read, "methods = 'exact'", ": methods must be a list of strings; got 'exact'. Correct it there."),
        (Policy.read, "maximum_exposure = 'none'", ": maximum_exposure has 'none'. Known are: guess, membership,"),
        (
            Policy.read,
            "maximum_exposure = 2",
            ": maximum_exposure must be one of guess, membership, entries, rows; got 2",
        ),
        (Policy.read, "rare_columns = 'drop'", ': rare_columns must be "refuse" or "zero"; got \'drop\'.'),
        (Policy.read, "minimum_mask_bound = inf", ": minimum_mask_bound must be a number of at least 0; got inf."),
        (Policy.read, "privacy.epsilon = -1", ", table privacy: epsilon must be a positive number; got -1"),
        (Policy.read, "words.minimum_party = 3", " has no setting 'words.minimum_party'. Did you mean"),
        (
            Policy.read,
            "version = 2\nminimum_raws = 3",
            " has version = 2, and this partsong reads versions up to 1. Update",
        ),
        (Experiment.read, "methode = 'exact'", " has no setting 'methode'. Did you mean 'method'?"),
        (
            Experiment.read,
            "method = 'exact'\nrank = 3",
            ': method = "exact" needs rounds: a whole number of at least 1. Add it.',
        ),
        (Experiment.read, OF_EXPERIMENTS + "options = {}", " has no setting 'options'."),
        (Experiment.read, OF_EXPERIMENTS + "seed = '7'", ": seed must be a whole number of at least 0 and at most"),
        (Experiment.read, OF_EXPERIMENTS + "mask_bound = 0", ": mask_bound must be a number above 0; got 0."),
        (Experiment.read, OF_EXPERIMENTS + "steps = 2", " has no setting 'steps'. Did you mean 'local_steps'"),
        (Experiment.read, OF_EXPERIMENTS + "accelerate = 1", ": accelerate must be true or false; got 1."),
        (
            Experiment.read,
            OF_EXPERIMENTS + "privacy.epsilo = 1",
            ": privacy has no setting 'epsilo'. Did you mean 'eps",
        ),
        (Experiment.read, OF_EXPERIMENTS + "words.lower = 1", ": words: lower must be true or false; got 1."),
        (Experiment.read, "version = 2", " has version = 2, and this partsong reads versions up to 1. Update"),
    ],
)
def test_errors_of_files_name_the_file_the_key_and_the_value(tmp_path, read, text, said):
    path = tmp_path / "some.toml"
    path.write_text(text)
    with pytest.raises(ParameterError if "version" not in text else FormatError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}{said}")


def test_what_a_server_sends_is_checked_like_a_file():
    plain = Experiment("exact", 3, 2).to_dict()
    assert Experiment.from_table({**plain, "mask_bound": None}) == Experiment("exact", 3, 2)
    for change, said in (
        ({"rank": "3"}, "The experiment: rank must be a whole number of at least 1; got '3'."),
        ({"secure_aggregation": "no"}, "The experiment: secure_aggregation must be true or false; got 'no'."),
        ({"privacy": 3}, "The experiment: privacy must be a table of settings; got 3."),
        ({"unknown": 1}, "The experiment has no setting 'unknown'."),
    ):
        with pytest.raises(ParameterError) as caught:
            Experiment.from_table({**plain, **change})
        assert str(caught.value).startswith(said)


def test_every_refusal_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    in_page = set(re.findall(r"\(`([a-z-]+)`[);]", page))
    source = "".join(path.read_text(encoding="utf-8") for path in Path(federation.__file__).parent.rglob("*.py"))
    used = set(re.findall(r'(?:RequestRefused|Refusal)\(\s*"([a-z-]+)"', source))
    assert len(used) > 10
    assert used <= CODES.keys()
    assert len(in_page) > 10
    assert in_page <= CODES.keys()
