"""`partsong fit --epsilon --unit row` by one noisy second moment: options, forecast, verdict, ranks, attacks."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import partsong
from partsong.data.table import Table
from partsong.io.party_folder import write_parts
from partsong.methods import moment
from partsong.training.checkpoint import load_run

K, N, M = 3, 3000, 10
PRIVATE = ("--epsilon", 3, "--unit", "row", "--seed", 1)
ROW = (*PRIVATE, "--row-bound", 0.1)
FIT = ("fit", "parts", "-o", "m.safetensors")


@pytest.fixture(autouse=True)
def parts(tmp_path):
    """Three directions far above the noise of ε = 3; rows are longer than a bound of 0.1 and shorter than 5."""
    draw = np.random.default_rng(0)
    H = np.kron(np.eye(3), np.ones(3))
    X = np.hstack([draw.dirichlet(np.full(3, 0.2), N) @ H, np.full((N, 1), 0.1)])
    rows = {name: np.arange(at, N, 3) for at, name in enumerate("abc")}
    write_parts(tmp_path / "parts", Table(X, tuple(f"gene {j}" for j in range(M)), None), rows, {})
    return tmp_path / "parts"


def forecast_of(result):
    return [line for line in result.stderr.splitlines() if line.startswith("Forecast: ")]


# ---- before anything is spent ------------------------------------------------------------------------------------


def test_without_a_number_of_rows_it_says_from_how_many_on_it_is_worth_it(invoke):
    (line,) = forecast_of(invoke(*FIT, "-k", K, *ROW))
    assert "more than the mean profile can be expected from about" in line
    assert "rows on" in line
    assert '"auto" takes one release of the second moment; n_rows' in line


def test_with_it_the_forecast_and_the_reason_for_the_mechanism(invoke):
    (line,) = forecast_of(invoke(*FIT, "-k", K, *ROW, "--n-rows", N))
    assert f"With {N} rows, {M} columns and ε = 3, expect the mean profile and each direction with more than" in line
    assert '"auto" takes one release' in line
    (line,) = forecast_of(invoke(*FIT, "-k", K, *ROW, "--n-rows", 10**6))
    assert '"auto" takes one release and 3 noisy rounds, since τ is below' in line


def test_auto_refuses_what_is_only_noise_and_nothing_is_written(invoke, tmp_path):
    result = invoke(*FIT, "-k", K, *ROW, "--n-rows", 15, "--checkpoint", "c.ckpt", code=1)
    assert "nothing but the mean profile" in result.stderr
    assert "nothing was spent" in result.stderr
    assert not (tmp_path / "c.ckpt").exists()
    assert "leaves nothing (" in invoke(*FIT, "-k", 1, *ROW, "--n-rows", 1, code=1).stderr
    invoke(*FIT, "-k", 1, *ROW, "--n-rows", 15)


def test_a_mechanism_that_was_asked_for_is_warned_of_even_in_quiet(invoke):
    result = invoke(*FIT, "-k", K, *ROW, "--n-rows", 15, "--mechanism", "moment", "-q")
    assert "Warning: With 15 rows, 10 columns and ε = 3, expect the mean profile alone" in result.stderr
    assert not forecast_of(result)
    assert not forecast_of(invoke(*FIT, "-k", K, *ROW, "-q"))


def test_python_says_the_same(tmp_path, capsys):
    parts = [np.random.default_rng(i).random((500, 6)) for i in range(3)]
    privacy = partsong.RowPrivacy(3.0, row_bound=0.1, n_rows=1500)
    model = partsong.FederatedNMF(2, privacy=privacy, random_state=0, verbose=1).fit(parts)
    said = capsys.readouterr().err
    assert said.startswith("With 1500 rows, 6 columns and ε = 3, expect")
    assert str(model.forecast_) in said
    assert model.forecast_ == privacy.forecast(6, 3)
    partsong.FederatedNMF(2, privacy=privacy, random_state=0).fit(parts)
    assert not capsys.readouterr().err
    guessed = privacy.forecast(6, 3, mean_error=0.3, pooled_error=0.1, rank=2)
    assert "about one direction" in str(guessed)
    with pytest.raises(partsong.errors.ParameterError, match="belong together"):
        privacy.forecast(6, 3, mean_error=0.3)


# ---- afterwards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "mechanism", "exchanges"),
    [
        ((*ROW, "--mechanism", "moment"), "moment", 1),
        ((*ROW, "--mechanism", "moment", "--buckets", 5), "moment", 1),
        ((*ROW, "--mechanism", "hybrid"), "hybrid", 4),
        ((*PRIVATE, "--mechanism", "centred", "--centre-radius", 0.5), "centred", 2),
        ((*ROW, "--mechanism", "moment", "--secure-aggregation"), "moment", 1),
        ((*ROW, "--method", "moment"), "moment", 1),
    ],
)
def test_what_a_release_has_shown_is_said_everywhere(told, tmp_path, words, mechanism, exchanges):
    said = told("fit", "parts", "-k", K, *words, "--n-rows", N, "--run-folder", "run", "--report", "page.html")
    assert (said["mechanism"], said["iterations"]) == (mechanism, exchanges)
    assert said["visible_directions"] >= 2
    assert "visible above the noise" in said["verdict"]
    assert said["forecast"]["n_rows"] == N
    assert said["forecast"]["sentence"].startswith(f"With {N} rows")
    assert 2.99 < said["epsilon_spent"] <= 3
    assert json.loads((tmp_path / "run/result.json").read_text())["verdict"] == said["verdict"]
    page = (tmp_path / "page.html").read_text()
    assert f"Mechanism {mechanism}: {said['visible_directions']} directions" in page


def test_people_read_the_verdict_once(invoke):
    result = invoke(*FIT, "-k", 10, *ROW)
    assert re.search("verdict        moment: . directions are visible above the noise; components", result.stdout)
    assert "above the noise" not in result.stderr
    assert "the only release of this mechanism" in result.stdout
    assert "all 4 releases of this mechanism" in invoke(*FIT, "-k", K, *ROW, "--mechanism", "hybrid").stdout
    assert "above the noise" in invoke(*FIT, "-k", 10, *ROW, "-q").stderr


def test_noisy_rounds_have_no_forecast(told, invoke):
    said = told(*FIT, "-k", K, *ROW, "--mechanism", "rounds", "--rounds", 2)
    assert said["mechanism"] == "rounds"
    assert said["forecast"] is said["verdict"] is said["visible_directions"] is None
    said = told(*FIT, "-k", K, "--epsilon", 3, "--unit", "party", "--method", "fedavg", "--rounds", 2)
    assert said["mechanism"] is said["forecast"] is None


def test_the_moment_of_parties(told, invoke):
    words = (*FIT, "-k", K, "--method", "moment", "--epsilon", 3, "--unit", "party")
    result = invoke(*words)
    assert "Warning: With 3 parties, 10 columns and ε = 3, expect nothing but noise" in result.stderr
    said = told(*words)
    assert (said["mechanism"], said["unit"]) == ("moment", "party")
    assert said["forecast"]["n_rows"] is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((*PRIVATE, "--row-bound", 1e-3, "--n-rows", N), "nearly all were cut to it"),
        ((*PRIVATE, "--row-bound", 5, "--n-rows", 20 * N), "The row bound is too large"),
        ((*PRIVATE, "--row-bound", 100, "--n-rows", N), "Use a smaller row_bound"),
        ((*PRIVATE, "--row-bound", 0.1), "rows at the row bound. If there are many more"),
        ((*PRIVATE, "--mechanism", "centred", "--centre-radius", 2), "A smaller one has less noise"),
        ((*PRIVATE, "--mechanism", "centred", "--centre-radius", 0.01), "cut to centre_radius"),
    ],
)
def test_a_bound_that_cuts_nothing_or_all_is_said_from_the_release(told, words, says):
    assert says in told(*FIT, "-k", K, *words)["verdict"]


# ---- several ranks -----------------------------------------------------------------------------------------------


def test_ranks_are_written_next_to_the_chosen_one(told, tmp_path):
    said = told(*FIT, "-k", "12,2,3", *ROW, "--run-folder", "run")
    assert said["n_components"] == 3
    assert said["ranks"] == {str(k): f"m-k{k:02}.safetensors" for k in (2, 3, 12)}
    assert 2.99 < said["epsilon_spent"] <= 3
    for stem in ("m", "run/model"):
        by_rank = {k: partsong.load_model(f"{stem}-k{k:02}.safetensors") for k in (2, 3, 12)}
        assert {k: len(one.components) for k, one in by_rank.items()} == {2: 2, 3: 3, 12: 12}
        assert np.array_equal(partsong.load_model(f"{stem}.safetensors").components, by_rank[3].components)
        assert "components beyond about" in by_rank[12].settings["privacy_spent"]["verdict"]
        assert by_rank[12].relative_error is None
    assert partsong.FederatedNMF.load("m-k02.safetensors").n_components_ == 2
    told("fit", "parts", "-k", 2, *ROW, "--run-folder", "run", "--overwrite")
    assert not list((tmp_path / "run").glob("model-k*")), "those of the run before are gone"


def test_the_summary_names_the_ranks(invoke):
    out = invoke(*FIT, "-k", "2,3,8", *ROW).stdout
    assert "components     3, of 2, 3, 8: the largest of which all directions are visible" in out
    assert "all ranks      m-k2.safetensors, m-k3.safetensors, m-k8.safetensors" in out
    assert "components     4\n" in invoke(*FIT, "-k", "4,4", *ROW).stdout


def test_several_ranks_never_take_noisy_rounds(told):
    said = told(*FIT, "-k", "2,3", *ROW, "--n-rows", 10**6)
    assert said["mechanism"] == "moment"
    assert said["ranks"].keys() == {"2", "3"}


def test_in_python_a_model_of_each_rank(tmp_path):
    parts = [np.random.default_rng(i).random((500, 6)) for i in range(3)]
    privacy = partsong.RowPrivacy(10.0, row_bound=0.1)
    model = partsong.FederatedNMF([1, 2, 5], privacy=privacy, random_state=0).fit(parts, run_folder=tmp_path / "run")
    assert model.at_rank(len(model.components_)) is model
    rank = 1 if len(model.components_) > 1 else 5
    other = model.at_rank(rank)
    assert np.array_equal(other.components_, model.components_by_rank_[rank])
    assert np.isnan(other.relative_error_)
    assert other.epsilon_spent_ == model.epsilon_spent_
    assert other.transform(parts[0]).shape == (500, rank)
    assert np.array_equal(
        partsong.load_model(tmp_path / f"run/model-k{rank}.safetensors").components, other.components_
    )
    with pytest.raises(partsong.errors.ParameterError, match=r"rank must be one of the ranks of this fit \(1, 2, 5\)"):
        model.at_rank(4)


# ---- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-k", "2,x", *ROW), "'2,x' is not a whole number above 0, nor several"),
        (("-k", 0, *ROW), "not a whole number above 0"),
        (("-k", "2,4"), "several ranks follow from one private release only"),
        (("-k", "2,4", *ROW, "--mechanism", "rounds"), "one private release of a second moment only"),
        (("-k", "2,4", *ROW, "--mechanism", "hybrid"), "one private release of a second moment only"),
        (("-k", "2,4", "--epsilon", 3, "--unit", "party", "--method", "fedavg"), "one private release"),
        (("-k", K, *ROW, "--buckets", 5), "--buckets: only for --mechanism moment; here it is auto"),
        (("-k", K, *ROW, "--centre-radius", 0.2), "--centre-radius: only for --mechanism centred"),
        (("-k", K, *ROW, "--mechanism", "centred"), "--mechanism centred scales every row to norm 1"),
        (("-k", K, *PRIVATE, "--mechanism", "centred", "--centre-radius", 3), "--centre-radius must be above 0"),
        (("-k", K, *ROW, "--mechanism", "moment", "--rounds", 3), "only for --mechanism rounds; here it is moment"),
        (("-k", K, *ROW, "--mechanism", "rounds", "--method", "moment"), 'method="moment" has no rounds'),
        (("-k", K, *PRIVATE), "--unit row needs a bound"),
        (("-k", K, *ROW, "--mechanism", "centered"), "Did you mean 'centred'"),
        (("-k", K, *ROW, "--n-rows", 0), "--n-rows"),
        (("-k", K, "--n-rows", 5), "needs --epsilon"),
        (
            ("-k", K, "--epsilon", 3, "--unit", "party", "--method", "fedavg", "--n-rows", 5),
            "not apply to --unit party",
        ),
        (
            ("-k", K, "--epsilon", 3, "--unit", "party", "--method", "moment", "--noise", "laplace"),
            "releases with Gaussian noise only",
        ),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(invoke, words, says):
    assert says in " ".join(invoke(*FIT, *words, code=2).stderr.replace("│", " ").split())


def test_ranks_need_parts(invoke, tmp_path):
    np.save(tmp_path / "X.npy", np.ones((4, 4)))
    assert "several ranks" in invoke("fit", "X.npy", "-k", "2,3", "-o", "m.safetensors", code=2).stderr


def test_more_buckets_than_columns(invoke):
    result = invoke(*FIT, "-k", K, *ROW, "--mechanism", "moment", "--buckets", 50, code=1)
    assert "--buckets must be at most the number of columns, 10; got 50" in result.stderr


def test_rounds_that_have_no_effect(invoke):
    assert "--rounds has no effect on mechanism 'moment'" in invoke(*FIT, "-k", K, *ROW, "--rounds", 3).stderr


@pytest.mark.parametrize(
    ("words", "way"), [((*ROW,), 'use buckets, or mechanism="rounds"'), (("--method", "moment"), 'use method="exact"')]
)
def test_more_columns_than_fit_into_memory(invoke, monkeypatch, tmp_path, words, way):
    monkeypatch.setattr(moment, "physical_memory", lambda: 1000)
    begin = (*FIT, "-k", K, *words, "--checkpoint", "c.ckpt")
    result = invoke(*begin, code=1)
    assert "The second moment of 10 columns needs" in result.stderr
    assert way in result.stderr
    assert not (tmp_path / "c.ckpt").exists(), "nothing was spent"


# ---- resume ------------------------------------------------------------------------------------------------------


def test_resume_keeps_mechanism_and_ranks(told, invoke):
    begin = (*FIT, "-k", "2,3", *ROW, "--mechanism", "moment", "--n-rows", N, "--checkpoint", "c.ckpt")
    first = told(*begin)
    assert load_run("c.ckpt").about["settings"]["n_components"] == [2, 3]
    again = told("fit", "parts", "--resume", "c.ckpt", "-o", "again.safetensors")
    assert again["ranks"] == {"2": "again-k2.safetensors", "3": "again-k3.safetensors"}
    for name in ("mechanism", "verdict", "epsilon_spent", "n_components", "visible_directions", "seed"):
        assert again[name] == first[name]
    for end in ("", "-k2", "-k3"):
        a, b = (partsong.load_model(f"{stem}{end}.safetensors").components for stem in ("m", "again"))
        assert np.array_equal(a, b)
    resume = ("fit", "parts", "--resume", "c.ckpt", "-o", "again.safetensors")
    assert "--mechanism (moment in the checkpoint, auto now)" in invoke(*resume, "--mechanism", "auto", code=1).stderr
    assert "--components ([2, 3] in the checkpoint, 4 now)" in invoke(*resume, "-k", 4, code=1).stderr


def test_rows_that_changed_after_the_release_are_another_run(invoke, parts):
    invoke(*FIT, "-k", K, *ROW, "--checkpoint", "c.ckpt")
    X = np.random.default_rng(9).random((N, M))
    rows = {name: np.arange(at, N, 3) for at, name in enumerate("abc")}
    for path in parts.iterdir():
        path.unlink()
    parts.rmdir()
    write_parts(parts, Table(X, tuple(f"gene {j}" for j in range(M)), None), rows, {})
    result = invoke("fit", "parts", "--resume", "c.ckpt", "-o", "again.safetensors", code=1)
    assert "other values" in result.stderr


# ---- without noise, and attacks ----------------------------------------------------------------------------------


def test_a_comparison_with_the_moment(told):
    said = told("compare", "parts", "-k", K, "--method", "moment", "--method", "exact", "--rounds", 10)
    (of_moment, of_exact) = said["methods"]
    assert of_moment["relative_error"] < of_exact["relative_error"] + 0.01


def test_without_noise_it_says_how_many_exchanges_and_that_rows_follow(invoke):
    out = invoke(*FIT, "-k", K, "--method", "moment").stdout
    assert "all 3 exchanges of this method" in out
    assert "exposure       rows. " in out


def test_several_ranks_are_attacked_as_one_run(told):
    told("fit", "parts", "-k", "2,3", *ROW, "--run-folder", "run", "--record")
    said = told("attack", "run", "--data", "parts")
    assert (said["n_components"], said["severity"]) == (3, "bounded")
    (note,) = said["parties"][0]["notes"]
    assert "The proof of privacy is the calibration of the noise" in note
    assert said["parties"][0]["tried"]
    assert not any(one["recovered"] for one in said["parties"])
