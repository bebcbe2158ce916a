"""Laws of the exposure limit: what leaves without noise is counted over all runs and refused before it is too much."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field, fields, replace

import numpy as np
import pytest
import scipy.sparse as sp

from partsong.core.interfaces import Message
from partsong.errors import ParameterError, PartsongError, SiteRefused
from partsong.federation.chain import Chain
from partsong.federation.experiment import Experiment
from partsong.federation.ledger import OpeningBalance, SiteLedger
from partsong.federation.policy import Policy, PrivacyBudget
from partsong.federation.site.plan import SiteData, build_plan
from partsong.federation.site.state import RunFolder
from partsong.federation.wire import Kind, Request, RequestRefused
from partsong.io.model_file import load_model
from partsong.privacy.exposure import Exposure, column_supports
from tests.federation.helpers import NAMES, WORDS, Federation, TextFederation, charge, secret_of

COLUMNS = tuple(f"gene-{number}" for number in range(12))


def dense(name, rows):
    return np.random.default_rng(NAMES.index(name)).random((rows, len(COLUMNS))) + 0.1


@dataclass
class Tables(Federation):
    """Sites with tables of their own, held to `membership`."""

    tables: dict = field(default_factory=dict)
    columns: dict = field(default_factory=dict)
    exposure: Exposure = Exposure.MEMBERSHIP

    def site(self, name, **changes):
        data = SiteData(self.tables[name], self.columns.get(name, COLUMNS), secret_of(name))
        return Federation.site(self, name, data=data, **changes)


def made(folder, experiment, rows=100, **changes):
    tables = {name: dense(name, rows) for name in NAMES[:3]}
    return Tables(folder, experiment, **{"tables": tables, **changes})


def again(federation, run, **changes):
    """Another run of the same sites, with a server's folder of its own."""
    shutil.rmtree(federation.folder / "server", ignore_errors=True)
    return replace(federation, run=run, experiment=replace(federation.experiment, **changes))


def refusal(federation):
    with pytest.raises(SiteRefused) as caught:
        list(federation.rounds())
    return str(caught.value)


def log_of(federation, name="east"):
    return (federation.folder / name / "site.log").read_text()


def directions(federation, name="east"):
    return federation.site(name).ledger.load().directions()


@pytest.mark.parametrize("masked", [False, True])
def test_a_run_within_the_limit_is_charged_round_by_round(tmp_path, masked):
    federation = made(tmp_path, Experiment("exact", 5, 6, secure_aggregation=masked))
    assert len(list(federation.rounds())) == 6
    assert directions(federation) == 30
    assert [line["directions"] for line in Chain(tmp_path / "east" / "ledger.jsonl").lines()] == [5] * 6


def test_a_run_beyond_the_limit_is_refused_before_it_begins_with_the_rounds_that_are_allowed(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 40))
    said = refusal(federation)
    assert "code 'exposure'" in said
    assert "rounds: 10" in said  # 10 × 5 = 100 / 2
    assert "At most 10 rounds of this rank or rank 1 in as many rounds would be allowed" in said
    assert "At most 10 rounds of this rank or rank 1" in log_of(federation)
    assert not (tmp_path / "east" / "ledger.jsonl").exists()


def test_under_masks_tables_with_as_many_binary_digits_are_answered_alike(tmp_path):
    answers = {}
    for rows in (128, 200, 255):
        federation = made(tmp_path / str(rows), Experiment("exact", 5, 40, secure_aggregation=True), rows)
        answers[rows] = refusal(federation)
        assert f"of {rows} rows" in log_of(federation)
    assert len(set(answers.values())) == 1
    assert "rank: 1, rounds: 8" in answers[128]  # 64 / 5 = 12, rounded down
    allowed = made(tmp_path / "allowed", Experiment("exact", 4, 16, secure_aggregation=True), 128)
    assert len(list(allowed.rounds())) == 16
    too_many = made(tmp_path / "too-many", Experiment("exact", 5, 13, secure_aggregation=True), 255)
    assert "exposure" in refusal(too_many)  # 65 count as 128


def test_where_no_round_is_allowed_that_is_said(tmp_path):
    tables = {name: dense(name, 100) for name in NAMES[:3]}
    tables["east"][1:, 3] = 0  # one row alone has a value
    federation = made(tmp_path, Experiment("exact", 5, 2), tables=tables)
    assert "No round without noise is allowed" in refusal(federation)
    assert "No round without noise is allowed" in log_of(federation)
    assert "1 of 12 columns have values in fewer than 20 rows; they hold 0.00% of the squared norm" in log_of(
        federation
    )


CHANGES = {
    "one row": lambda X: np.vstack([X[:-1], X[-1:] + 1]),
    "one more row": lambda X: np.vstack([X, X[:1] + 1]),
    "the type": lambda X: X.astype(np.float32),
    "the storage": sp.csr_array,
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", ["nothing", *CHANGES, "the order of columns"])
def test_two_runs_add_up_whatever_was_changed_in_between(tmp_path, masked, change):
    federation = made(tmp_path, Experiment("exact", 5, 6, secure_aggregation=masked))
    list(federation.rounds())
    if change in CHANGES:
        federation.tables["east"] = CHANGES[change](federation.tables["east"])
    if change == "the order of columns":
        federation.tables["east"] = federation.tables["east"][:, ::-1]
        federation.columns["east"] = COLUMNS[::-1]
    said = refusal(again(federation, "run-2", seed=1))
    assert "'east'" in said
    assert "code 'exposure'" in said
    assert directions(federation) == 30


@pytest.mark.parametrize("masked", [False, True])
def test_a_first_model_that_was_answered_before_is_refused(tmp_path, masked):
    """Two answers to one model differ by the row that was added in between."""
    federation = made(tmp_path, Experiment("exact", 3, 2, secure_aggregation=masked))
    list(federation.rounds())
    federation.tables["east"] = np.vstack([federation.tables["east"], np.ones((1, 12))])
    said = refusal(again(federation, "run-2"))
    assert "code 'answered'" in said
    assert "another seed" in said
    assert directions(federation) == 6
    assert len(list(again(federation, "run-3", seed=1).rounds())) == 2
    assert directions(federation) == 12


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("change", ["accelerate", "type"])
def test_a_first_model_is_known_again_whatever_is_sent_beside_it(tmp_path, masked, change):
    """The pace of extrapolation and the number type do not change what W is fitted to."""
    federation = made(tmp_path, Experiment("exact", 3, 2, secure_aggregation=masked))
    list(federation.rounds())
    federation.tables["east"] = np.vstack([federation.tables["east"], np.ones((1, 12))])
    second = again(federation, "run-2")
    if change == "accelerate":
        table = {"method": "exact", "rank": 3, "rounds": 2, "secure_aggregation": masked, "accelerate": True}
        second.experiment = Experiment.from_table(table)
    else:
        for name in second.names:
            second.tables[name] = second.tables[name].astype(np.float32)
    assert "code 'answered'" in refusal(second)
    assert directions(federation) == 6


def test_a_model_is_refused_by_its_numbers_where_the_seed_says_nothing(tmp_path):
    federation = made(tmp_path, Experiment("exact", 3, 2))
    site, asked = federation.site("east"), []

    class Recorded(type(federation.transport())):
        __slots__ = ()

        def ask(self, requests, timeout):
            asked.append(Request.from_bytes(requests["east"]))
            return super().ask(requests, timeout)

    list(federation.rounds(Recorded(federation.transport().sites)))
    first = next(request for request in asked if "H" in request.body.arrays)
    books = site.ledger.load()
    other = replace(
        first,
        body=Message({"H": first.body["H"].astype(np.float32), "amount": np.array(0.3), "restart": np.array(0.0)}),
    )
    assert other.model_digest != first.model_digest
    assert books.find_answer(other.model_digest, other.factor_digest, "run-2") == 1
    assert books.find_answer(other.model_digest, other.factor_digest, "run-1") is None
    moved = replace(first, body=Message({**first.body.arrays, "H": first.body["H"] + 1}))
    assert books.find_answer(moved.model_digest, moved.factor_digest, "run-2") is None


def test_sketches_of_one_seed_are_not_sent_twice(tmp_path):
    """Rows are multiplied with the same random numbers, of which one more row takes a few more."""
    table = {"method": "secure-dsanls", "rank": 2, "rounds": 3, "sketch_dimension": 4, "seed": 5}
    policy = Policy(methods=("secure-dsanls",))
    federation = made(tmp_path, Experiment.from_table(table), policy=policy)
    list(federation.rounds())
    federation.tables["east"] = np.vstack([federation.tables["east"], np.ones((1, 12))])
    assert "code 'answered'" in refusal(again(federation, "run-2"))
    assert len(list(again(federation, "run-3", seed=6).rounds())) > 0


TABLES = {
    "exact": {"method": "exact", "rank": 5, "rounds": 60},
    "fnmf": {"method": "fnmf", "rank": 5, "rounds": 60},
    "by sums, then exact": {
        "method": "then-exact",
        "rank": 5,
        "rounds": 60,
        "first": "fnmf-by-sums",
        "first_rounds": 2,
        "sweeps": 3,
    },
    "game": {"method": "game", "rank": 5, "rounds": 60},
    "sketches": {"method": "secure-dsanls", "rank": 3, "rounds": 60, "sketch_dimension": 7},
    "topics": {"method": "fedlda", "rank": 5, "rounds": 60},
}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("name", TABLES)
def test_the_rounds_and_the_rank_of_a_refusal_are_allowed_and_one_more_is_not(tmp_path, name, before):
    policy = Policy(methods=("exact", TABLES[name]["method"]))
    tables = {site: np.ceil(9 * dense(site, 100)) for site in NAMES[:3]}
    federation = made(tmp_path, Experiment("exact", 5, 1), policy=policy, tables=tables)
    if before:
        list(again(federation, "before", rounds=before).rounds())
    said = refusal(again(federation, "asked", **vars_of(Experiment.from_table(TABLES[name]), seed=1)))
    most = {word: int(number) for word, number in re.findall(r"(rank|rounds): (\d+)", said)}
    assert most["rounds"] > 0
    for key, number in most.items():
        table = TABLES[name]
        if number:
            allowed_run = build_plan({**table, key: number, "seed": 2}, 3, None)
            policy_checker = federation.site("east").policy_checker
            assert policy_checker.exposure_limit.require_run(allowed_run, "asked", COLUMNS, 2) == 0
        one_more = build_plan({**table, key: number + 1, "seed": 2}, 3, None)
        with pytest.raises(RequestRefused):
            federation.site("east").policy_checker.exposure_limit.require_run(one_more, "asked", COLUMNS, 2)


def vars_of(experiment, **changes):
    return {field.name: getattr(experiment, field.name) for field in fields(experiment)} | changes


def test_columns_that_hold_most_of_the_data_are_not_set_to_zero(tmp_path):
    tables = {name: dense(name, 100) for name in NAMES[:3]}
    for table in tables.values():
        table[5:, 1:] = 0
        table[:, 0] = 0.01
    policy = Policy(rare_columns="zero")
    federation = made(tmp_path, Experiment("exact", 5, 2), tables=tables, policy=policy)
    assert "code 'exposure', rank: 1, rounds: 0" in refusal(federation)  # as many as 5 rows allow
    assert "Columns with half of the squared norm have a value in 4 rows or more" in log_of(federation)


def test_a_model_with_negative_entries_is_refused(tmp_path):
    federation = made(tmp_path, Experiment("exact", 3, 2))

    class Lying(type(federation.transport())):
        __slots__ = ()

        def ask(self, requests, timeout):
            changed = {}
            for name, data in requests.items():
                request = Request.from_bytes(data)
                if "H" in request.body.arrays:
                    H = np.array(request.body["H"])
                    H[0, 0] = -H[0, 0]
                    request = replace(request, body=Message({**request.body.arrays, "H": H}, request.body.weight))
                changed[name] = request.to_bytes()
            return super().ask(changed, timeout)

    with pytest.raises(SiteRefused, match="'model'"):
        list(federation.rounds(Lying(federation.transport().sites)))
    assert directions(federation) == 0


def test_restarts_and_repeated_attempts_count_once_and_are_charged_before_anything_leaves(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 6))
    rounds = federation.rounds()
    next(rounds)
    rounds.close()
    assert directions(federation) == 5
    assert len(list(federation.rounds())) == 5
    assert directions(federation) == 30


def test_private_runs_are_charged_to_the_budget_alone(tmp_path):
    private = {"unit": "row", "epsilon": 1.0, "row_bound": 4.0}
    policy = Policy(privacy=PrivacyBudget(9.0))
    federation = made(tmp_path, Experiment("exact", 5, 40, privacy=private), 20, policy=policy)
    next(iter(federation.rounds()))
    books = federation.site("east").ledger.load()
    assert (books.directions(), books.uncounted(), books.noiseless) == (0, 0, 0)


def test_uploads_of_h_are_not_counted_and_exact_rounds_after_them_are(tmp_path):
    alone = made(tmp_path / "a", Experiment("fedavg", 5, 30))
    list(alone.rounds())
    assert directions(alone) == 0
    federation = made(tmp_path / "b", Experiment("fnmf", 10, 5))
    list(federation.rounds())
    assert directions(federation) == 40  # 4 exact rounds of rank 10, at 100 rows in which every column has a value


def test_rare_columns_are_set_to_zero_where_the_site_says_so(tmp_path):
    tables = {name: dense(name, 100) for name in NAMES[:3]}
    for table in tables.values():
        table[7:, 3] = 0
    policy = Policy(rare_columns="zero")
    federation = made(tmp_path, Experiment("exact", 5, 6), tables=tables, policy=policy)
    *_, last = federation.rounds()
    H = np.asarray(federation.plan().program.components(last.checkpoint.server))
    assert not H[:, 3].any()
    assert np.delete(H, 3, axis=1).any(axis=0).all()
    assert "1 of 12 columns are zero in this run, because they have values in fewer than 60 rows" in log_of(federation)
    assert RunFolder(tmp_path / "east" / "runs" / "run-1").load_start().least_support == 60
    assert "No round without noise" not in log_of(federation)
    # the rarest column that is left allows 50 in all: after 30 another 30 are too many
    assert "code 'exposure'" in refusal(again(federation, "run-2", seed=1))
    assert len(list(again(federation, "run-3", seed=1, rounds=4).rounds())) == 4


def test_a_policy_that_is_tightened_holds_in_a_run_under_way(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 6))
    rounds = federation.rounds()
    next(rounds)
    next(rounds)
    rounds.close()
    federation.exposure = Exposure.GUESS
    assert "code 'exposure'" in refusal(federation)
    assert directions(federation) == 10


def test_rows_that_are_others_since_a_line_begin_with_nothing_sent(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 10))
    list(federation.rounds())
    assert "exposure" in refusal(again(federation, "run-2", seed=1))
    federation.policy = Policy(other_rows_since=10)
    assert len(list(again(federation, "run-3", seed=1).rounds())) == 10


def test_a_line_beyond_the_ledger_begins_no_new_count(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 2), policy=Policy(other_rows_since=120))
    assert "code 'exposure'" in refusal(federation)
    assert "other_rows_since = 120 in site.toml is beyond the last line of the ledger (0)" in log_of(federation)


def test_releases_that_were_made_up_later_are_not_covered_by_what_was_stated_before(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 2), policy=Policy(directions_before=0))
    list(federation.rounds())
    charge(federation.site("east").ledger, count=40)
    exposure = federation.site("east").policy_checker.exposure_limit
    with pytest.raises(RequestRefused, match="directions_before = 0 is less than one for each"):
        exposure.directions(federation.site("east").ledger.load())
    behind = replace(exposure, policy=Policy(directions_before=30, other_rows_since=3))
    assert behind.directions(federation.site("east").ledger.load()) == 0


def test_combinations_of_rows_that_an_opening_balance_states_count(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 2))
    list(federation.rounds())
    ledger = federation.site("east").ledger
    before = ledger.load().directions()
    ledger.append_opening(OpeningBalance(40, "restored", directions=400))
    books = ledger.load()
    assert (books.directions(), books.uncounted(), books.noiseless) == (before + 400, 0, books.serial)
    assert books.directions(since=books.lines) == 0
    assert "exposure" in refusal(again(federation, "run-2", seed=1, rounds=1))


def test_a_limit_that_is_tightened_within_a_sum_is_asked_about_in_its_next_phase(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 4, secure_aggregation=True))
    site = federation.site("east")

    class Tightened(type(federation.transport())):
        __slots__ = ()

        def ask(self, requests, timeout):
            nonce = Request.from_bytes(requests["east"]).nonce
            if nonce.round == 1 and nonce.kind == Kind.REDUCE:
                federation.exposure = Exposure.GUESS
                changed = replace(site, policy=replace(site.policy, maximum_exposure=Exposure.GUESS))
                self.sites["east"] = changed.answer
            return super().ask(requests, timeout)

    with pytest.raises(PartsongError, match=r"exposure|east"):
        list(federation.rounds(Tightened(dict(federation.transport().sites))))
    assert "[exposure]" in log_of(federation)


def without_directions(place):
    """A ledger as partsong 0.1.0 wrote it."""
    lines = [{key: value for key, value in line.items() if key != "directions"} for line in Chain(place).lines()]
    place.unlink()
    for line in lines:
        Chain(place).append({key: value for key, value in line.items() if key not in ("number", "before", "hash")})


def test_a_ledger_of_an_older_version_asks_for_what_it_does_not_say(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 6))
    list(federation.rounds())
    for name in NAMES[:3]:
        without_directions(tmp_path / name / "ledger.jsonl")
    books = SiteLedger(tmp_path / "east" / "ledger.jsonl").load()
    assert (books.directions(), books.uncounted()) == (0, 6)
    shorter = again(federation, "run-2", seed=1, rounds=3)
    assert "code 'exposure'" in refusal(shorter)
    assert "Set directions_before in site.toml" in log_of(federation)
    shorter.policy = Policy(directions_before=40)
    assert "code 'exposure'" in refusal(shorter)
    shorter.policy = Policy(directions_before=30)
    assert len(list(shorter.rounds())) == 3


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"maximum_exposure": "none"}, "guess, membership, entries, rows"),
        ({"maximum_exposure": 3}, "maximum_exposure"),
        ({"rare_columns": "drop"}, '"refuse" or "zero"'),
        ({"other_rows_since": -1}, "other_rows_since"),
        ({"directions_before": 1.5}, "directions_before"),
    ],
)
def test_settings_of_the_limit_that_mean_nothing_are_errors(table, said):
    with pytest.raises(ParameterError, match=said):
        Policy.from_table(table)


def test_the_usual_limit_is_membership_and_every_column_counts_whatever_the_format():
    assert Policy().maximum_exposure is Policy.from_table({}).maximum_exposure is Exposure.MEMBERSHIP
    X = np.array([[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]])
    stored_zero = sp.csr_array((np.array([1.0, 0.0]), (np.array([0, 1]), np.array([1, 1]))), shape=(2, 3))
    assert column_supports(X).tolist() == [0, 1, 2]
    assert column_supports(stored_zero).tolist() == [0, 1, 0]
    for form in (sp.csc_array, sp.coo_array, sp.csr_matrix):
        assert column_supports(form(X)).tolist() == [0, 1, 2]


def test_the_coordinator_reads_no_name_and_no_number_of_rows_under_masks(tmp_path):
    federation = made(tmp_path, Experiment("exact", 5, 40, secure_aggregation=True), 201)
    said = refusal(federation)
    assert "201" not in said
    assert "gene" not in said
    lines = [json.loads(line) for line in (tmp_path / "east" / "audit.jsonl").read_text().splitlines()]
    assert not any("201" in json.dumps(line.get("counts", {})) for line in lines)


@pytest.mark.parametrize("method", ["exact", "fnmf"])
def test_texts_are_not_summed_by_default_and_words_alone_are_agreed_on(tmp_path, method):
    experiment = Experiment(method, 3, 4, seed=5, words=WORDS)
    federation = TextFederation(tmp_path, experiment, exposure=Exposure.MEMBERSHIP)
    with pytest.raises(SiteRefused, match="code 'exposure'"):
        list(federation.rounds())
    books = federation.site("east").ledger.load()
    assert books.directions() == 0
    assert all(run.endswith(".words") for run in books.runs)
    allowed_run = TextFederation(tmp_path / "rows", experiment)
    assert len(list(allowed_run.rounds())) == 4


def test_a_site_keeps_a_result_of_a_run_without_rare_columns(tmp_path):
    tables = {name: dense(name, 100) for name in NAMES[:3]}
    for table in tables.values():
        table[7:, 3] = 0
    federation = made(tmp_path, Experiment("exact", 5, 6), tables=tables, policy=Policy(rare_columns="zero"))
    list(federation.rounds())
    model = load_model(tmp_path / "east" / "results" / "run-1" / "model.safetensors")
    assert model.components.shape == (5, 12)
    assert not model.components[:, 3].any()
    assert np.isfinite(model.components).all()


def test_a_run_without_rare_columns_goes_on_to_the_same_bits_after_a_restart(tmp_path):
    tables = {name: dense(name, 100) for name in NAMES[:3]}
    for table in tables.values():
        table[7:, 3] = 0
    ends = []
    for place in ("whole", "broken"):
        own = {name: table.copy() for name, table in tables.items()}
        federation = made(tmp_path / place, Experiment("exact", 5, 6), tables=own, policy=Policy(rare_columns="zero"))
        rounds = federation.rounds()
        if place == "broken":
            next(rounds)
            rounds.close()
            own |= {name: table.copy() for name, table in own.items()}
            rounds = federation.rounds()
        *_, last = rounds
        ends.append(np.asarray(last.model["H"]).tobytes())
    assert ends[0] == ends[1]
