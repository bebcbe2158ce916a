"""Attacks do what they say on runs whose rows are known, and say so when they do not."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from partsong import recipes
from partsong.aggregate.linear import Mean, add
from partsong.aggregate.reduction import InTheOpen
from partsong.cli.traffic import Recorder
from partsong.core import Layout, Message, Schedule, Shard
from partsong.data.matrix import as_matrix
from partsong.data.two_sided import two_sided_blocks
from partsong.engines.asynchronous import Asynchronous
from partsong.engines.sequential import Sequential
from partsong.errors import FileError, FormatError, ParameterError
from partsong.evaluate.leakage import attack
from partsong.evaluate.leakage_findings import Finding, Observer, cosine_error, matched_error, span_error
from partsong.evaluate.leakage_history import common_span, last_addend, signed
from partsong.evaluate.leakage_sketches import equations, held_out_error, linear_rows, raw_coordinates, sparse_rows
from partsong.evaluate.leakage_statistics import row_from_statistics, row_span, rows_from_statistics, up_to_rotation
from partsong.evaluate.leakage_transcript import read_traffic, transcript
from partsong.sketch.gaussian import Gaussian
from partsong.sketch.subsampling import Subsampling

K, M, SEED = 4, 30, 3


def parties(*rows, density=0.5, seed=0):
    draw = np.random.default_rng(seed)
    H = draw.gamma(0.5, size=(K, M))
    parts = [draw.gamma(0.5, size=(n, K)) @ H + 0.1 * draw.random((n, M)) for n in rows]
    return {f"p{i}": part * (draw.random(part.shape) < density) for i, part in enumerate(parts)}


def shards_of(rows):
    return [Shard(name, as_matrix(part), 17 + i) for i, (name, part) in enumerate(rows.items())]


def recorded(program, rows, rounds, engine=Sequential(record=True), reduction=InTheOpen()):
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
    findings = found_in(recipes.shared_statistics(K), rows, 4)
    one, two = of(findings, "p0", "statistics of one row"), of(findings, "p1", "statistics of few rows")
    assert one.error < 1e-12
    assert two.error < 1e-5
    assert one.verdict == "exactly"
    assert one.observer is Observer.SERVER


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_are_not_settled_are_found_in_doubt(seed):
    """Without zeros in data or weights the rotation stays open: what is found may be wrong, and is not claimed."""
    rows = parties(3, 20, 20, density=1.0, seed=seed)
    finding = of(found_in(recipes.shared_statistics(K), rows, 3), "p0", "statistics of few rows")
    assert finding.error < 1e-5 or finding.doubt > 0.05


def test_rows_lie_in_the_span_of_what_enough_rounds_show_and_strangers_do_not():
    rows = parties(5, 6, 7)
    findings = found_in(recipes.shared_statistics(K), rows, 6)
    span = of(findings, "p2", "span of the rows").recovered
    assert span_error(span, rows["p2"]) < 1e-8
    assert span_error(span, rows["p1"]) > 0.05
    everybody = of(findings, "p0, p1, p2", "span of all rows")
    assert everybody.observer is Observer.SUMS
    assert everybody.error < 1e-6
    assert row_span([np.ones((K, M))], K + 1) is None


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
    program = recipes.secure_dsanls(2, sketch=Gaussian(4))
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
    program = recipes.syn_ssd(K, steps=3)
    done, layout = recorded(program, rows, 4)
    finding = of(attack([each.traffic for each in done], program, layout), "p1", "raw coordinates")
    whole = next(message for party, _, message in done[3].traffic if party == "p1")["H"]
    last = np.sort(program.columns_sketch.draw(M, K, SEED, "S2", 2).pattern.chosen)
    seen = sorted(set().union(*(program.columns_sketch.draw(M, K, SEED, "S2", t).pattern.chosen for t in range(3))))
    assert finding.recovered.shape == (K, len(seen))
    assert_allclose(finding.recovered[:, np.searchsorted(seen, last)], whole[:, last], rtol=1e-12)


def test_distributed_nodes_show_rows_of_their_weights():
    X = parties(30)["p0"]
    program = recipes.dsanls(K, iterations=2, n_rows=30)
    shards = [Shard(f"p{i}", block) for i, block in enumerate(two_sided_blocks(X, 2))]
    done = list(Sequential(record=True).run(program, shards, Schedule(1, SEED), reduction=InTheOpen()))
    finding = of(attack([done[0].traffic], program, Layout.of(shards, SEED)), "p0", "raw coordinates")
    W = done[0].checkpoint.parties["p0"].W
    assert len(finding.recovered)
    for row in finding.recovered:
        assert np.abs(W - row).max(axis=1).min() < 1e-12


# --- factors, rounds after rounds ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "bound"),
    [(recipes.fedavg(K), 1e-10), (recipes.syn_sd(K), 1e-2), (recipes.fnmf(K), 0.1), (recipes.fedprox(K), 0.1)],
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
    findings = found_in(recipes.fedavg(K), rows, 4)
    assert of(findings, "p0", "history of H_p").error < 0.05
    assert not [finding for finding in findings if finding.party == "p1" and finding.attack == "history of H_p"]
    assert not [f for f in found_in(recipes.fedavg(K), rows, 1) if f.attack == "history of H_p"]
    same = np.random.default_rng(0).random((K, M))
    assert common_span([same, same], 1) is None, "what is sent twice says nothing new"
    assert_allclose(np.linalg.norm(signed(-np.arange(4.0))), 1)


def test_arrivals_are_read_with_the_models_that_they_answer():
    rows, program = parties(1, 2, 3), recipes.asyn_sd(K)
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
    findings = found_in(recipes.game(K), rows, 3)
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
    program = replace(recipes.fedavg(K), aggregation=Mean())
    finding = of(found_in(program, parties(1, 20, 20), 2), "p0", "subtraction")
    assert finding.observer is Observer.OTHERS
    assert finding.error < 1e-10


def test_masked_uploads_give_nothing_away_by_themselves():
    from partsong.privacy.masking import MaskedSum

    rows, program = parties(1, 20, 20), recipes.shared_statistics(K)
    done, layout = recorded(program, rows, 2, reduction=MaskedSum())
    (finding,) = attack([each.traffic for each in done], program, layout, truth=rows)
    assert finding.recovered is None
    assert finding.verdict == "not"
    assert "masked" in finding.told


def test_noise_is_seen_as_an_error_and_as_doubt():
    rows, program = parties(1, 20, 20), recipes.fedavg(K)
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


# --- the record ------------------------------------------------------------------------------------------------------


def test_a_run_folder_is_as_good_as_a_run_in_memory(tmp_path):
    rows, program = parties(1, 2, 20), recipes.shared_statistics(K)
    done, layout = recorded(program, rows, 3)
    recorder = Recorder(tmp_path)
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
    program = recipes.fnmf_by_sums(K)
    done, layout = recorded(program, parties(5, 6, 7), 5)
    exchanges = transcript([each.traffic for each in done], program, layout, asynchronous=False)
    for before, exchange in zip(done, exchanges[1:], strict=False):
        assert_array_equal(exchange.models["p1"]["H"], before.model["H"])


def test_bad_records_are_refused(tmp_path):
    with pytest.raises(FileError, match="--record"):
        read_traffic(tmp_path)
    (tmp_path / "traffic.jsonl").write_text("{}\n")
    with pytest.raises(FormatError, match="not about a message"):
        read_traffic(tmp_path)
    program, rows = recipes.shared_statistics(K), parties(5, 6)
    done, layout = recorded(program, rows, 3)
    with pytest.raises(ParameterError, match="names parties"):
        attack([done[0].traffic], program, replace(layout, parties=("p0", "x")))
    for each in done:
        Recorder(tmp_path).note(each)
    lines = [line for line in (tmp_path / "traffic.jsonl").read_text().splitlines() if line != "{}"]
    (tmp_path / "traffic.jsonl").write_text("\n".join(line for line in lines if json.loads(line)["round"] != 2))
    with pytest.raises(FileError, match="round 2 is missing"):
        read_traffic(tmp_path)


def test_findings_are_sentences():
    finding = Finding("statistics of one row", "clinic", "X_p", np.ones((1, 2)), "its only row", 1e-16)
    assert (
        finding.told
        == "Whoever reads the server's inbox can work out of 'clinic' its only row. Found: exactly (doubt 1.0e-16)."
    )
    assert replace(finding, error=0.9).verdict == "not"
    assert replace(finding, error=0.01).verdict == "nearly"
    assert replace(finding, doubt=None).verdict == "perhaps"
