"""site.toml and experiment.toml: a key that nobody knows is an error, with the nearest name."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from partsong import federation
from partsong.aggregation.plaintext import PlainReduction
from partsong.errors import FileError, FormatError, ParameterError, SiteRefused
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.wire import CODES
from partsong.methods import build
from partsong.methods.private import PrivateSums
from partsong.secure_aggregation.protocol import SecureSum
from tests.federation.federations import Federation

SITE = """
recipes = ["exact", "fedavg"]
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
    told = Experiment.from_table(experiment.told())
    assert told == experiment
    assert told.program(3) == build("syn-ssd-uv", 5, local_steps=4) == experiment.program(3)
    assert told.schedule(3).rounds == build("syn-ssd-uv", 5, local_steps=4).exchanges(3, 3)
    assert isinstance(told.reduction(3), PlainReduction)


@pytest.mark.parametrize(
    ("table", "match"),
    [
        ({"recipe": ["exact"]}, "'recipes'"),
        ({"minimum_row": 3}, "'minimum_rows'"),
        ({"recipes": ["exakt"]}, "'exact'"),
        ({"minimum_rows": 0}, "at least 1"),
        ({"minimum_rows": True}, "whole number"),
        ({"maximum_rounds": "many"}, "whole number"),
        ({"maximum_runs": 0}, "at least 1"),
        ({"maximum_run": 3}, "'maximum_runs'"),
        ({"columns": "all"}, "list of texts"),
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
        ({"method": "asyn-sd", "rank": 3, "rounds": 3, "secure_aggregation": True}, "masks need several"),
        ({"method": "asyn-sd", "rank": 3, "rounds": 3, "tol": -1}, "tol must be"),
        ({"method": "syn-sd", "rank": 3, "rounds": 3, "time_budget": 5.0}, "time_budget can end a run of asyn-sd"),
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
    with pytest.raises(FormatError, match="not TOML"):
        Experiment.read(tmp_path / "bad.toml")


OF_EXPERIMENTS = 'method = "exact"\nrank = 3\nrounds = 2\n'


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (Policy.read, "recipes = ['exakt']", ": recipes has 'exakt'. Did you mean 'exact'?"),
        (Policy.read, "recipes = 'exact'", ": recipes must be a list of texts; got 'exact'. Correct it there."),
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
        (Experiment.read, "method = 'exact'\nrank = 3", " needs rounds: a whole number of at least 1. Add it."),
        (Experiment.read, OF_EXPERIMENTS + "options = {}", " has no setting 'options'."),
        (Experiment.read, OF_EXPERIMENTS + "seed = '7'", ": seed must be a whole number of at least 0 and at most"),
        (Experiment.read, OF_EXPERIMENTS + "mask_bound = 0", ": mask_bound must be a number above 0; got 0."),
        (Experiment.read, OF_EXPERIMENTS + "steps = 2", " has no setting 'steps'. Did you mean 'local_steps'"),
        (Experiment.read, OF_EXPERIMENTS + "accelerate = 1", ": accelerate is true or false; got 1."),
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
    plain = Experiment("exact", 3, 2).told()
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
    used = set(re.findall(r'(?:Denied|Refusal)\(\s*"([a-z-]+)"', source))
    assert len(used) > 10
    assert used <= CODES.keys()
    assert len(in_page) > 10
    assert in_page <= CODES.keys()
