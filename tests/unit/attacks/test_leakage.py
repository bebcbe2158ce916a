"""Attacks do what they say on runs whose rows are known, and say so when they do not."""

from __future__ import annotations

import html
import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong.aggregation.linear import Mean, add
from partsong.aggregation.plaintext import PlainReduction
from partsong.attacks.exact_sums import row_from_statistics, rows_from_statistics, up_to_rotation
from partsong.attacks.findings import (
    NO_GUARANTEE,
    Finding,
    Observer,
    cosine_error,
    matched_error,
    rows_within,
    span_error,
    verdict_of,
)
from partsong.attacks.moment import row_span
from partsong.attacks.reconstruction import (
    common_span,
    equations,
    held_out_error,
    last_addend,
    linear_rows,
    raw_coordinates,
    signed,
    sparse_rows,
)
from partsong.attacks.runner import NOT_SUMMED, UNKNOWN_ADDENDS, Attacker, RecordedRun, attack, findings
from partsong.attacks.sums import plaintext_uploads, recompute_uploads, subtract_other_parties
from partsong.attacks.transcript import transcript
from partsong.core.interfaces import Layout, Message, Schedule, Shard
from partsong.data.blocks import two_sided_blocks
from partsong.data.conversion import as_matrix
from partsong.engines.local import Sequential
from partsong.engines.virtual_clock import Asynchronous
from partsong.errors import FileError, FormatError, ParameterError
from partsong.methods import build
from partsong.methods.dsanls import SketchExchange
from partsong.methods.private import PrivateSums
from partsong.methods.secure_sketched import SketchedSums
from partsong.reporting.attack_report import attacks, render_page
from partsong.sketch.kinds import Gaussian, Subsampling
from partsong.training.traffic import TrafficRecorder, read_traffic

K, M, SEED = 4, 30, 3


def parties(*rows, density=0.5, seed=0):
    draw = np.random.default_rng(seed)
    H = draw.gamma(0.5, size=(K, M))
    parts = [draw.gamma(0.5, size=(n, K)) @ H + 0.1 * draw.random((n, M)) for n in rows]
    return {f"p{i}": part * (draw.random(part.shape) < density) for i, part in enumerate(parts)}


def shards_of(rows):
    return [Shard(name, as_matrix(part), 17 + i) for i, (name, part) in enumerate(rows.items())]


def recorded(program, rows, rounds, engine=Sequential(record=True), reduction=PlainReduction()):
    shards = shards_of(rows)
    done = list(engine.run(program, shards, Schedule(rounds, SEED), reduction=reduction))
    return done, Layout.of(shards, SEED)


def found_in(program, rows, rounds, **more):
    done, layout = recorded(program, rows, rounds)
    return attack([each.traffic for each in done], program, layout, truth=rows, **more)


def of(findings, party, name):
    return next(finding for finding in findings if (finding.party, finding.attack) == (party, name))


# --- statistics ------------------------------------------------------------------------------------------------------


def test_one_row_is_its_gram_and_cross():
    draw = np.random.default_rng(1)
    w, x = draw.random(K), draw.random(M)
    found_w, found_x = row_from_statistics(np.outer(w, w), np.outer(w, x))
    assert_allclose(found_w, w, rtol=1e-12)
    assert_allclose(found_x, x, rtol=1e-12)


def test_few_rows_are_known_up_to_one_rotation_of_weights_and_rows():
    draw = np.random.default_rng(2)
    W, X = draw.random((3, K)), draw.random((3, M))
    R, Z = up_to_rotation(W.T @ W, W.T @ X, 3)
    turn = W @ np.linalg.pinv(R)
    assert_allclose(turn @ turn.T, np.eye(3), atol=1e-10)
    assert_allclose(turn @ Z, X, atol=1e-10)
    assert up_to_rotation(W.T @ W, W.T @ X, K) is None, "three rows are not four"
    assert up_to_rotation(W.T @ W, W.T @ X, K + 1) is None


def test_signs_alone_settle_the_rotation_of_rows_with_zeros():
    draw = np.random.default_rng(3)
    W, X = draw.random((2, K)), draw.random((2, M)) * (draw.random((2, M)) < 0.5)
    rows, doubt = rows_from_statistics([(W.T @ W, W.T @ X)], 2)
    assert matched_error(rows, X) < 1e-6
    assert doubt < 1e-6


@pytest.mark.parametrize("density", [0.5, 1.0])
def test_exact_statistics_of_small_parties_are_their_rows(density):
    rows = parties(1, 2, 20, density=density)
    findings = found_in(build("exact", K, local_steps=5), rows, 4)
    one, two = of(findings, "p0", "statistics of one row"), of(findings, "p1", "statistics of few rows")
    assert one.error < 1e-12
    assert two.error < 1e-5
    assert one.verdict == "exactly"
    assert one.observer is Observer.SERVER


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_not_settled_are_found_in_doubt(seed):
    """Without zeros in data or weights the rotation stays open: what is found may be wrong, and is not claimed."""
    rows = parties(3, 20, 20, density=1.0, seed=seed)
    finding = of(found_in(build("exact", K, local_steps=5), rows, 3), "p0", "statistics of few rows")
    assert finding.error < 1e-5 or finding.doubt > 0.05


def test_rows_lie_in_the_span_of_what_enough_rounds_show_and_strangers_do_not():
    rows = parties(5, 6, 7)
    findings = found_in(build("exact", K, local_steps=5), rows, 6)
    span = of(findings, "p2", "span of the rows").recovered
    assert span_error(span, rows["p2"]) < 1e-8
    assert span_error(span, rows["p1"]) > 0.05
    everybody = of(findings, "p0, p1, p2", "span of all rows")
    assert everybody.observer is Observer.SUMS
    assert everybody.error < 1e-6
    assert row_span([np.random.default_rng(0).random((K, M))], K + 1, 2.0**-53) is None


# --- sketches --------------------------------------------------------------------------------------------------------


def sketches_of(X, count, dimension=5, seed=0):
    operators = [Gaussian(dimension).draw(len(X), seed, "S", turn) for turn in range(count)]
    return [operator.sketch_transposed(X) for operator in operators], operators


def test_linear_recovery_begins_at_n_numbers_and_sparse_recovery_long_before():
    draw = np.random.default_rng(4)
    X = draw.random((60, 6)) * (draw.random((60, 6)) < 0.08)
    for count, is_linear, is_sparse in ((12, True, True), (7, False, True), (1, False, False)):
        sketches, operators = sketches_of(X, count)
        S, seen = equations(sketches, operators, len(X))
        assert (matched_error(linear_rows(sketches, operators, len(X)), X) < 1e-8) == is_linear
        assert (matched_error(sparse_rows(S, seen), X) < 1e-6) == is_sparse
        assert (held_out_error(S, seen) < 1e-6) == is_sparse, "without the truth"


def test_low_rank_alone_determines_nothing_before_n():
    """(W + N) H has the sketches and the rank of W H wherever SᵀN = 0."""
    draw = np.random.default_rng(5)
    W, H = 1 + draw.random((60, 2)), 1 + draw.random((2, 6))
    _, operators = sketches_of(W, 11)
    S = np.hstack([operator.rows(0, 60) for operator in operators])
    away = np.linalg.svd(S.T)[2][-2:].T
    other = W + 0.5 * away
    assert_allclose(S.T @ other @ H, S.T @ W @ H, atol=1e-10)
    assert (other @ H).min() > 0
    assert np.linalg.norm(other @ H - W @ H) > 0.1


def test_the_guard_of_sketched_statistics_lets_sparse_rows_through():
    """T·d < n is necessary, and no guarantee."""
    rows = parties(60, 60, density=0.1)
    program = SketchedSums(2, Gaussian(4))
    findings = found_in(program, rows, 14)
    finding = of(findings, "p0", "sketches, non-negative and sparse")
    assert "T·d/n = 0.87" in finding.what
    assert finding.error < 1e-6
    beyond = found_in(replace(program, is_guarded=False), rows, 16)
    assert of(beyond, "p0", "sketches, linear").error < 1e-8


def test_a_subsampling_is_columns_as_they_are():
    A = np.random.default_rng(6).random((K, M))
    S = Subsampling(7).draw(M, 1, "S2", 0)
    columns, values = raw_coordinates(S.sketch(A), S)
    assert_allclose(values, A[:, columns])
    assert raw_coordinates(A[:, :7], Gaussian(7).draw(M, 1)) is None


def test_sketched_consensus_shows_columns_of_every_party_as_they_are():
    rows = parties(9, 11)
    program = build("syn-ssd-uv", K, local_steps=3)
    done, layout = recorded(program, rows, 4)
    finding = of(attack([each.traffic for each in done], program, layout), "p1", "raw coordinates")
    whole = next(message for party, _, message in done[3].traffic if party == "p1")["H"]
    last = np.sort(program.columns_sketch.draw(M, K, SEED, "S2", 2).pattern.chosen)
    seen = sorted(set().union(*(program.columns_sketch.draw(M, K, SEED, "S2", t).pattern.chosen for t in range(3))))
    assert finding.recovered.shape == (K, len(seen))
    assert_allclose(finding.recovered[:, np.searchsorted(seen, last)], whole[:, last], rtol=1e-12)


def test_distributed_nodes_show_rows_of_their_weights():
    X = parties(30)["p0"]
    program = SketchExchange(K, iterations=2, n_rows=30)
    shards = [Shard(f"p{i}", block) for i, block in enumerate(two_sided_blocks(X, 2))]
    done = list(Sequential(record=True).run(program, shards, Schedule(1, SEED), reduction=PlainReduction()))
    finding = of(attack([done[0].traffic], program, Layout.of(shards, SEED)), "p0", "raw coordinates")
    W = done[0].checkpoint.parties["p0"].W
    assert len(finding.recovered)
    for row in finding.recovered:
        assert np.abs(W - row).max(axis=1).min() < 1e-12


# --- factors, rounds after rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "bound"),
    [
        (build("fedavg", K, local_steps=10), 1e-10),
        (build("syn-sd", K), 1e-2),
        (build("fnmf-local", K, align="assignment"), 0.1),
        (build("fedprox", K), 0.1),
    ],
    ids=["fedavg", "syn-sd", "fnmf", "fedprox"],
)
def test_two_rounds_of_factors_are_a_single_row_up_to_its_scale(program, bound):
    rows = parties(1, 20, 20)
    finding = of(found_in(program, rows, 3), "p0", "history of H_p")
    assert finding.array == "X_p up to a factor"
    assert finding.error < bound
    assert cosine_error(rows["p1"][:1], rows["p0"]) > 0.3, "another row is not as near"


def test_spans_of_few_rows_and_nothing_from_one_round_or_many_rows():
    rows = parties(2, 20, 20)
    findings = found_in(build("fedavg", K, local_steps=10), rows, 4)
    assert of(findings, "p0", "history of H_p").error < 0.05
    assert not [finding for finding in findings if finding.party == "p1" and finding.attack == "history of H_p"]
    assert not [f for f in found_in(build("fedavg", K, local_steps=10), rows, 1) if f.attack == "history of H_p"]
    same = np.random.default_rng(0).random((K, M))
    assert common_span([same, same], 1) is None, "what is sent twice says nothing new"
    assert_allclose(np.linalg.norm(signed(-np.arange(4.0))), 1)


def test_arrivals_are_read_with_the_models_that_they_answer():
    rows, program = parties(1, 2, 3), build("asyn-sd", K)
    done, layout = recorded(program, rows, 9, Asynchronous(record=True))
    exchanges = transcript([each.traffic for each in done], program, layout, asynchronous=True)
    after: dict = {}
    for each, exchange in zip(done, exchanges, strict=True):
        (party,) = exchange.uploads
        if party in after:
            assert_array_equal(exchange.models[party]["H"], after[party])
        after[party] = each.model["H"]
    assert attack([each.traffic for each in done], program, layout, asynchronous=True)


def test_a_game_of_one_row_shows_it_in_the_first_sweep():
    rows = parties(1, 20, 20)
    findings = found_in(build("game", K), rows, 3)
    finding = of(findings, "p0", "columns before and after")
    assert finding.error < 1e-9
    assert not [each for each in findings if each.attack == "columns before and after" and each.party != "p0"]


# --- sums ------------------------------------------------------------------------------------------------------------


def test_the_last_addend_is_the_sum_less_all_others():
    draw = np.random.default_rng(7)
    messages = [Message({"H": draw.random((K, M))}, float(n)) for n in (3, 4, 5)]
    last = last_addend(add(add(*messages[:2]), messages[2]), messages[:2])
    assert_allclose(last["H"], messages[2]["H"], rtol=1e-12)
    assert last.weight == 5


def test_what_all_others_know_is_found_from_the_sum_of_any_program_with_one():
    program = replace(build("fedavg", K, local_steps=10), aggregation=Mean())
    done, layout = recorded(program, parties(1, 20, 20), 2)
    exchanges = transcript([each.traffic for each in done], program, layout, asynchronous=False)
    subtracted = subtract_other_parties(exchanges, program, "p0", plaintext_uploads(exchanges))
    for known, exchange in zip(subtracted, exchanges, strict=True):
        assert_allclose(known.uploads["p0"]["H"], exchange.uploads["p0"]["H"], rtol=1e-10, atol=1e-12)


def test_masked_uploads_give_nothing_away_by_themselves():
    from partsong.secure_aggregation.protocol import SecureSum

    rows, program = parties(1, 20, 20), build("exact", K, local_steps=5)
    done, layout = recorded(program, rows, 2, reduction=SecureSum())
    (finding,) = attack([each.traffic for each in done], program, layout, truth=rows)
    assert finding.recovered is None
    assert finding.verdict == "not"
    assert "masked" in finding.what


def test_noise_is_seen_as_an_error_and_as_doubt():
    rows, program = parties(1, 20, 20), build("fedavg", K, local_steps=10)
    done, layout = recorded(program, rows, 3)

    def under(deviation):
        draw = np.random.default_rng(8)
        traffic = [
            [(party, phase, noisy(message, deviation * draw.standard_normal((K, M)))) for party, phase, message in sent]
            for sent in (each.traffic for each in done)
        ]
        return of(attack(traffic, program, layout, truth=rows), "p0", "history of H_p")

    def noisy(message, noise):
        return Message({"H": np.maximum(0, message["H"] + noise)}, message.weight)

    findings = [under(deviation) for deviation in (0.0, 0.01, 0.1, 1.0, 10.0)]
    errors, doubts = [each.error for each in findings], [each.doubt for each in findings]
    assert errors[0] < 1e-10
    assert errors == sorted(errors)
    assert doubts == sorted(doubts)
    assert findings[0].verdict == "exactly"
    assert findings[-1].verdict == "not"


# --- party by party --------------------------------------------------------------------------------------------------


def run_of(program, rows, rounds, reduction=PlainReduction(), **more):
    done, layout = recorded(program, rows, rounds, reduction=reduction)
    return RecordedRun([each.traffic for each in done], program, layout, reduction, **more)


def on(found, party):
    return next(each for each in found if each.party == party)


REDUCIBLE = {
    "exact": build("exact", K, local_steps=5),
    "fedavg": build("fedavg", K, local_steps=10),
    "syn-sd": build("syn-sd", K),
    "fnmf by sums": build("fnmf-by-sums", K),
    "game": build("game", K),
}


@pytest.mark.parametrize("program", REDUCIBLE.values(), ids=REDUCIBLE.keys())
def test_all_others_work_out_what_the_last_party_has_sent(program):
    rows = parties(1, 20, 20)
    run = run_of(program, rows, 3)
    exchanges = run.exchanges()
    left = subtract_other_parties(exchanges, program, "p0", plaintext_uploads(exchanges))
    assert len(left) == len(exchanges)
    for exchange, original in zip(left, exchanges, strict=True):
        found, sent = exchange.uploads["p0"], original.uploads["p0"]
        for name in ("gram", "cross", "H", "place"):
            if name in sent.arrays:
                width = np.shape(found[name])[-1]
                assert_allclose(found[name], np.asarray(sent[name])[..., :width], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("program", [build("fedprox", K), build("local-only", K)], ids=["fedprox", "local-only"])
def test_all_others_find_what_the_server_does_where_the_sum_tells_the_number_of_rows(program):
    rows = parties(1, 20, 20)
    run = run_of(program, rows, 1 if program == build("local-only", K) else 3)
    of_server, of_others = (on(findings(run, truth=rows, attacker=each), "p0").recovered for each in Attacker)
    assert [each.array for each in of_server] == [each.array for each in of_others]
    assert_allclose([each.error for each in of_others], [each.error for each in of_server], rtol=1e-6, atol=1e-9)


def test_no_sum_is_no_way_in_for_colluders():
    found = findings(
        run_of(build("fnmf-local", K, align="assignment"), parties(1, 20, 20), 2), attacker=Attacker.COLLUDERS
    )
    for each in found:
        assert not each.tried
        assert each.notes == (NOT_SUMMED,)
        assert each.bytes_sent > 0


def test_masks_hide_uploads_from_the_server_and_not_from_all_others():
    from partsong.secure_aggregation.protocol import SecureSum

    rows, program = parties(1, 20, 20), build("exact", K, local_steps=5)
    run = run_of(program, rows, 3, SecureSum(), shards={shard.name: shard for shard in shards_of(rows)})
    seen = findings(run, truth=rows)
    assert [each.recovered for each in seen[:3]] == [(), (), ()]
    assert on(findings(run, truth=rows, attacker=Attacker.COLLUDERS), "p0").recovered[0].error < 1e-5
    unknown = on(findings(replace(run, shards={}), attacker=Attacker.COLLUDERS), "p0")
    assert unknown.notes[0] == UNKNOWN_ADDENDS


def test_sums_over_few_rows_are_these_rows():
    """To whoever knows the sum, two parties with one row each are one party with two rows."""
    rows = parties(1, 1)
    together = findings(run_of(build("exact", K, local_steps=5), rows, 3), truth=rows)[-1]
    assert max(each.rows_recovered for each in together.recovered if each.array == "X") == 2


@pytest.mark.slow
def test_sums_over_few_rows_are_these_rows_in_spite_of_masks():
    from partsong.secure_aggregation.protocol import SecureSum

    rows, program = parties(1, 1, 1), build("exact", K, local_steps=5)
    run = run_of(program, rows, 4, SecureSum())
    together = findings(run, truth=rows)[-1]
    assert together.is_sum
    of_rows = [each for each in together.recovered if each.array == "X"]
    assert max(each.rows_recovered for each in of_rows) == 3
    assert all(each.who == Observer.SUMS for each in of_rows)
    assert [each.party for each in findings(run, parties={"p1"})] == ["p1"], "one party is meant, and not the sum"


def test_masked_sums_made_again_are_those_of_open_uploads():
    from partsong.secure_aggregation.protocol import SecureSum

    rows, program = parties(4, 5, 6), build("fedavg", K, local_steps=10)
    hidden, shown = run_of(program, rows, 3, SecureSum()).exchanges(), run_of(program, rows, 3).exchanges()
    for masked, open_ in zip(hidden, shown, strict=True):
        total = sum(np.asarray(program.aggregation.lift(upload)["H"]) for upload in open_.uploads.values())
        assert_allclose(masked.total["H"], total, atol=1e-6)
        assert_allclose(masked.models["p1"]["H"], open_.models["p1"]["H"], atol=1e-6)
    with pytest.raises(ParameterError, match="do not match this program"):
        replace(run_of(program, rows, 2, SecureSum()), layout=Layout(("p0", "p1", "p2"), M, SEED + 1)).exchanges()


@pytest.mark.parametrize(
    ("silent", "absent"),
    [({1: {"p3": 2}}, {}), ({0: {"p3": 0}}, {}), ({1: {"p3": 2}}, {1: frozenset({"p4"})}), ({1: {"p3": 3}}, {})],
    ids=["upload in a batch", "keys", "with one who was not asked", "unmasking"],
)
def test_who_fell_silent_in_a_masked_sum_is_found_by_what_the_others_have_signed(silent, absent):
    from partsong.secure_aggregation.protocol import SecureSum

    rows, program, phases = parties(1, 8, 8, 8, 8), build("exact", K, local_steps=5), SecureSum().phases
    shards, heard = shards_of(rows), {}
    for index, names in silent.items():
        heard[index] = {name: 0 for name, phase in names.items() if phase < phases - 1}
    masked, shown = (
        Sequential(record=True).run(program, shards, Schedule(3, SEED, absent, who), reduction=reduction)
        for who, reduction in ((silent, SecureSum()), (heard, PlainReduction()))
    )
    layout = Layout.of(shards, SEED)
    again = RecordedRun([each.traffic for each in masked], program, layout, SecureSum()).exchanges()
    known = recompute_uploads(again, program, layout, shards)
    for index, (found, done) in enumerate(zip(again, shown, strict=True)):
        assert tuple(found.models) == done.participants
        assert found.dropouts == tuple(heard.get(index, ()))
        sent = {name: np.asarray(upload["cross"]) for name, _, upload in done.traffic}
        assert_allclose(found.total["cross"], sum(sent.values()), rtol=1e-6, atol=1e-6)
        for name, upload in sent.items():
            assert_allclose(known[name][index]["cross"], upload, rtol=1e-6, atol=1e-6)


def test_noise_has_public_units_and_without_much_of_it_a_row_is_found():
    rows = parties(1, 20, 20)
    bound = float(np.linalg.norm(rows["p0"])) * 1.01
    loud, quiet = (PrivateSums(K, multiplier, bound) for multiplier in (3.0, 1e-4))
    found = {each: on(findings(run_of(each, rows, 2), truth=rows), "p0") for each in (loud, quiet)}
    assert found[quiet].recovered[0].error < 0.01
    assert not found[loud].found
    assert "privacy of each row" in found[loud].notes[0]


def test_uploads_of_another_program_are_refused():
    run = run_of(build("fedavg", K, local_steps=10), parties(5, 6, 7), 2)
    with pytest.raises(ParameterError, match="their arrays differ"):
        findings(replace(run, program=build("exact", K, local_steps=5)))


@pytest.mark.parametrize("array", ["X_p", "X_p up to a factor"])
def test_rows_count_as_recovered_one_by_one(array):
    rows = np.random.default_rng(9).random((6, M)) + 0.1
    order = [3, 1, 0, 5]
    factors = 1.0 if array == "X_p" else np.array([[2.0], [0.5], [1.0], [7.0]])
    found = rows[order] * factors
    assert rows_within(array, found, rows) == 4
    off = found.copy()
    off[0, 0] *= 1.5
    assert rows_within(array, off, rows) == 3
    assert rows_within("X_p", found[:, :7], rows) == (4 if array == "X_p" else 1), "some columns"
    assert rows_within("span of X_p", found, rows) is None


def test_a_single_factor_gives_its_row_space_away():
    rows = parties(2, 20, 20)
    (of_two,) = on(findings(run_of(build("local-only", K), rows, 1), truth=rows), "p0").recovered
    assert of_two.array == "row space of H_p"
    assert of_two.error < 0.05
    assert of_two.rows_recovered is None, "a span is no row"
    assert not on(findings(run_of(build("local-only", K), rows, 1)), "p1").recovered


def test_the_section_has_all_that_was_found_and_no_markup_of_others():
    rows = {"<b>p0</b>" if name == "p0" else name: part for name, part in parties(1, 20, 20).items()}
    found = findings(run_of(build("exact", K, local_steps=5), rows, 2), truth=rows)
    page = render_page("Attack", found)
    assert "<b>p0" not in page
    assert "&lt;b&gt;p0" in page
    assert html.escape(verdict_of(found)) in page
    for each in found:
        for one in each.recovered:
            assert html.escape(one.what) in page
    assert "the exposure is unknown" in attacks([])[0]


def test_the_verdict_counts_and_promises_nothing():
    rows = parties(1, 20, 20)
    found = findings(run_of(build("exact", K, local_steps=5), rows, 2), truth=rows)
    assert verdict_of(found).startswith("Rows of 1 of 3 parties (p0 exactly) were found.")
    assert verdict_of(found[1:]).startswith("No rows of a party were found.")
    assert all(verdict_of(some).endswith(NO_GUARANTEE) for some in (found, found[1:]))


# --- the record ------------------------------------------------------------------------------------------------------


def test_a_run_folder_is_as_good_as_a_run_in_memory(tmp_path):
    rows, program = parties(1, 2, 20), build("exact", K, local_steps=5)
    done, layout = recorded(program, rows, 3)
    recorder = TrafficRecorder(tmp_path)
    for each in done:
        recorder.note(each)
    read, kept = read_traffic(tmp_path), [each.traffic for each in done]
    for back, sent in zip(read, kept, strict=True):
        for (party, phase, message), (same_party, same_phase, original) in zip(back, sent, strict=True):
            assert (party, phase, message.weight) == (same_party, same_phase, original.weight)
            assert message.signature == original.signature
    pairs = zip(attack(read, program, layout), attack(kept, program, layout), strict=True)
    for from_disk, from_memory in pairs:
        assert (from_disk.attack, from_disk.party, from_disk.what) == (
            from_memory.attack,
            from_memory.party,
            from_memory.what,
        )
        assert_allclose(from_disk.recovered, from_memory.recovered, rtol=1e-6, atol=1e-6)


def test_models_are_made_again_from_uploads_alone():
    program = build("fnmf-by-sums", K)
    done, layout = recorded(program, parties(5, 6, 7), 5)
    exchanges = transcript([each.traffic for each in done], program, layout, asynchronous=False)
    for before, exchange in zip(done, exchanges[1:], strict=False):
        assert_array_equal(exchange.models["p1"]["H"], before.model["H"])


def test_bad_records_are_refused(tmp_path):
    with pytest.raises(FileError, match="--record"):
        read_traffic(tmp_path)
    (tmp_path / "traffic.jsonl").write_text("{}\n")
    with pytest.raises(FormatError, match="does not describe a message"):
        read_traffic(tmp_path)
    program, rows = build("exact", K, local_steps=5), parties(5, 6)
    done, layout = recorded(program, rows, 3)
    with pytest.raises(ParameterError, match="that the layout lacks"):
        attack([done[0].traffic], program, replace(layout, parties=("p0", "x")))
    for each in done:
        TrafficRecorder(tmp_path).note(each)
    lines = [line for line in (tmp_path / "traffic.jsonl").read_text().splitlines() if line != "{}"]
    (tmp_path / "traffic.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["round"] != 2))
    with pytest.raises(FileError, match="round 2 is missing"):
        read_traffic(tmp_path)


def test_verdicts_go_by_the_error_where_it_is_known():
    finding = Finding("statistics of one row", "clinic", "X_p", np.ones((1, 2)), "its only row", 1e-16)
    assert finding.verdict == "exactly"
    assert replace(finding, error=0.9).verdict == "not"
    assert replace(finding, error=0.01).verdict == "nearly"
    assert replace(finding, doubt=None).verdict == "perhaps"
