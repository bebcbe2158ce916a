"""What a coordinator is told to do about a site helps: where a run is closed there, it is not to be resumed."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from partsong.core.interfaces import Layout, Shard
from partsong.data.conversion import as_matrix
from partsong.errors import PartyError, UploadError
from partsong.federation.experiment import Experiment
from partsong.federation.policy import Policy
from partsong.federation.site.plan import SiteData, build_plan
from partsong.federation.transports.base import InProcess
from partsong.federation.wire import (
    NEVER_STARTED,
    RESUME,
    Kind,
    Refusal,
    Request,
    error_from_refusal,
    missing_result_advice,
    recovery_advice,
)
from partsong.secure_aggregation.fixed_point import Grid
from tests.federation.helpers import COLUMNS, Federation, rows_of, secret_of
from tests.federation.test_site_limits import Watched

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "federation.md").read_text(encoding="utf-8")


ANEW = "start a new run with another --name and another seed"


@pytest.mark.parametrize("code", ["diverged", "failed", "upload"])
def test_what_comes_to_nothing_again_and_again_needs_a_new_run(code):
    said = recovery_advice(Refusal(code))
    assert f"If the site refuses again, {ANEW}" in said
    assert RESUME not in said
    assert "mask_bound" in said or code != "upload"
    assert re.search(rf"^\| codes? [^|]*`{code}`", PAGE, re.MULTILINE), "it has a row where things break"


def test_a_number_beyond_the_bound_is_told_with_the_way_on_and_resuming_cannot_help(tmp_path):
    pytest.importorskip("cryptography")
    experiment = Experiment("exact", 2, 3, secure_aggregation=True, mask_bound=1.0)
    for _ in range(2):
        with pytest.raises(UploadError, match=r"code 'upload'.*beyond mask_bound") as caught:
            list(Federation(tmp_path, experiment).rounds())
        assert caught.value.__notes__[-1] == recovery_advice(Refusal("upload"))
    (tmp_path / "server").rename(tmp_path / "before")
    anew = Experiment("exact", 2, 3, secure_aggregation=True, mask_bound=1e6, seed=1)
    assert len(list(Federation(tmp_path, anew, run="run-2").rounds())) == 3


def told(federation, north=None):
    """The code and the way on with which a run ends, where north is another site than it should be."""
    sites = {**federation.transport().sites, **({} if north is None else {"north": north.answer})}
    with pytest.raises(PartyError) as caught:
        list(federation.rounds(InProcess(sites)))
    code = re.search(r"code '([\w-]+)'", str(caught.value))[1]
    assert caught.value.__notes__[-1] == recovery_advice(Refusal(code))
    return code


def failing(*told):
    """A plan whose work ends in an error."""
    plan = build_plan(*told)
    return replace(plan, program=Watched(plan.program, [], "failed"))


def test_numbers_that_diverge_in_the_open_do_so_again_and_take_a_new_run(tmp_path):
    """Rows that are scaled meanwhile are not those of the run."""
    federation = Federation(tmp_path, Experiment("fednmf", 3, 2, seed=1))
    large = federation.site("north", data=SiteData(rows_of("north") * 1e100, COLUMNS, secret_of("north")))
    assert [told(federation, large), told(federation, large), told(federation)] == ["diverged", "diverged", "data"]
    (tmp_path / "server").rename(tmp_path / "before")
    anew = replace(federation, run="run-2", experiment=Experiment("fednmf", 3, 2, seed=2))
    assert len(list(anew.rounds())) == 2


@pytest.mark.parametrize("is_masked", [False, True])
def test_work_that_fails_can_be_resumed_in_the_open_and_is_closed_under_masks(tmp_path, is_masked):
    federation = Federation(tmp_path, Experiment("exact", 3, 2, secure_aggregation=is_masked, seed=1))
    assert told(federation, replace(federation.site("north"), build=failing)) == "failed"
    if is_masked:
        assert told(federation) == "failed"
    else:
        assert len(list(federation.rounds())) == 2


@pytest.mark.parametrize("stage", [Kind.HELLO, Kind.START])
def test_what_fails_before_any_work_is_resumed_under_masks_too(tmp_path, monkeypatch, stage):
    federation = masked(tmp_path)

    def broken(*_):
        raise RuntimeError

    @dataclass
    class Breaking:
        site: object

        def answer(self, data):
            with monkeypatch.context() as patched:
                if Request.from_bytes(data).nonce.kind is stage:
                    patched.setattr("partsong.federation.site.service.require_valid_data", broken)
                return self.site.answer(data)

    assert told(federation, Breaking(federation.site("north"))) == "failed"
    assert len(list(federation.rounds())) == 2


@pytest.mark.parametrize(
    ("code", "policy"),
    [
        ("method", Policy(methods=("fnmf",))),
        ("rounds", Policy(maximum_rounds=1)),
        ("parties", Policy(minimum_parties=4)),
        ("columns", Policy(columns=("gene-1*",))),
    ],
)
def test_a_run_that_is_forbidden_in_its_middle_goes_on_once_it_is_allowed(tmp_path, code, policy):
    federation = masked(tmp_path)
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    assert told(federation, federation.site("north", policy=policy)) == code
    way = recovery_advice(Refusal(code))
    assert "update site.toml, then resume" in way or "Restore the rows and columns with which the run started" in way
    assert RESUME not in way
    assert [done.index for done in federation.rounds()] == [1]


def masked(folder):
    return Federation(folder, Experiment("exact", 3, 2, secure_aggregation=True, seed=1))


def uploads(experiment, parts):
    """What sites send in the first round, which begins with rows of H that are the longest of all."""
    program, layout = experiment.program(len(parts)), Layout(tuple("abc"), parts[0].shape[1], experiment.seed)
    _, model = program.start_server(layout)
    for name, rows in zip(layout.parties, parts, strict=True):
        shard = Shard(name, as_matrix(rows), 1)
        yield np.asarray(model["H"]), program.local(shard, program.start_party(shard, layout), model)[1]


COUNTS = [np.random.default_rng(seed).poisson(100, (60, 12)) for seed in range(3)]
KINDS = {
    "counts": COUNTS,
    "heavy": [np.floor(np.exp(np.random.default_rng(seed).normal(2, 2.5, (60, 12)))) for seed in range(3)],
    "shares": [np.random.default_rng(seed).random((60, 12)) * 1e-3 for seed in range(3)],
}


def test_the_bound_of_every_experiment_in_the_page_is_enough_for_ordinary_counts():
    tables = [tomllib.loads(text) for text in re.findall(r"```toml\n(# experiment.*?)```", PAGE, re.DOTALL)]
    bounds = [table["mask_bound"] for table in tables if "mask_bound" in table]
    assert len(bounds) == 3
    largest = max((rows.astype(float) ** 2).sum() for rows in COUNTS)
    assert all(100 * largest <= bound for bound in bounds)
    for _, upload in uploads(Experiment.from_table(tables[0]), COUNTS):
        assert max(np.asarray(array).max() for array in upload.arrays.values()) <= min(bounds)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_what_a_site_adds_is_within_what_the_page_says(kind):
    for rows, (H, upload) in zip(KINDS[kind], uploads(Experiment("exact", 4, 3), KINDS[kind]), strict=True):
        norms, energy, slack = np.linalg.norm(H, axis=1), (rows.astype(float) ** 2).sum(), 1 + 1e-12
        assert norms.min() >= 1
        assert (upload["gram"] <= slack * energy / np.outer(norms, norms)).all()
        columns = np.linalg.norm(rows, axis=0)
        assert (upload["cross"] <= slack * np.sqrt(energy) * np.outer(1 / norms, columns)).all()
        assert (float(upload["rows"]), float(upload["energy"])) == (len(rows), pytest.approx(energy))


@pytest.mark.parametrize("parties", [3, 10, 77])
@pytest.mark.parametrize("bound", [1e6, 3.3e9, 1e12])
def test_what_a_bound_costs_is_within_what_the_page_says(parties, bound):
    assert Grid(bound, parties).error <= parties**2 * bound / 2**62


def test_only_a_site_that_can_be_told_the_end_is_promised_that():
    def why(code):
        return str(error_from_refusal("north", Refusal(code), 3))

    assert "--resume sends it the final model" in missing_result_advice(why("data"))
    for lost in (why("not-started"), NEVER_STARTED):
        assert "--resume" not in missing_result_advice(lost)
        assert "include it in a new run" in missing_result_advice(lost).lower()
