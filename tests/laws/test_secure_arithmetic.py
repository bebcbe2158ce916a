"""Laws of the arithmetic of masked sums: the encoding is exact to the printed error, and t − 1 shares say nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from partsong.core.interfaces import Message
from partsong.errors import DivergenceError, ParameterError, UploadError
from partsong.privacy.randomness import system_source
from partsong.secure_aggregation.crypto import PRIME, combine, random_below, split, weights_at_zero
from partsong.secure_aggregation.fixed_point import Encoding, Grid
from partsong.secure_aggregation.messages import (
    contents_from_json,
    contents_to_json,
    describe_contents,
    have_same_shapes,
)


def encoding(parties, bound=1e9, weight=1e9):
    return Encoding(lambda name: Grid(bound, parties), Grid(weight, parties))


def summed(messages, code):
    vectors = [code.encode(f"p{i}", message) for i, message in enumerate(messages)]
    total = np.sum(vectors, axis=0, dtype=np.uint64)
    return code.decode(total, [describe_contents(message) for message in messages])


def exactly(values):
    return sum((Fraction(float(value)) for value in values), Fraction(0))


@given(st.data())
def test_a_sum_is_off_by_no_more_than_the_printed_error_and_the_rounding_of_its_type(data):
    bound = data.draw(st.sampled_from([1e-3, 1.0, 1e3, 1e9, 1e15]))
    parties = data.draw(st.integers(1, 100))
    values = data.draw(st.lists(st.floats(-bound, bound), min_size=parties, max_size=parties))
    grid = Grid(bound, parties)
    total = np.sum([grid.encode(np.array([value])) for value in values], axis=0, dtype=np.uint64)
    exact = exactly(values)
    off = abs(Fraction(float(grid.decode(total)[0])) - exact)
    assert off <= Fraction(grid.error) + (abs(exact) + Fraction(grid.error)) * Fraction(2) ** -53


@pytest.mark.parametrize("parties", [3, 4, 7, 16, 33, 64, 100])
def test_whole_numbers_from_0_to_1e9_and_weights_are_exact(parties):
    rng = np.random.default_rng(parties)
    arrays = [np.concatenate([[0, 10**9], rng.integers(0, 10**9, 50)]).astype(float) for _ in range(parties)]
    weights = rng.integers(0, 10**9, parties)
    messages = [Message({"H": array}, float(weight)) for array, weight in zip(arrays, weights, strict=True)]
    total = summed(messages, encoding(parties))
    assert_array_equal(total["H"], np.sum([array.astype(int) for array in arrays], axis=0))
    assert total.weight == weights.sum()
    assert Grid(1e9, parties).error < 2e-6


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("bound", [1e-100, 0.1, 1.0, 1e9, 2.0**31, 1e100])
@pytest.mark.parametrize("parties", [1, 3, 1000])
def test_sums_at_the_bound_never_wrap(parties, bound, sign):
    grid = Grid(bound, parties)
    total = grid.encode(np.array([sign * bound])) * np.uint64(parties)
    assert float(grid.decode(total)[0]) == pytest.approx(sign * parties * bound, rel=1e-12)
    assert parties * bound * 2.0**grid.exponent > 2.0**60, "no bit is given away"


@pytest.mark.parametrize("where", ["array", "weight"])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_beyond_the_bound_is_refused_and_not_clipped(where, sign):
    code, beyond = encoding(3, bound=10.0, weight=10.0), sign * np.nextafter(10.0, 11.0)

    def message(value):
        return Message({"H": np.array([0.0, value])}) if where == "array" else Message({"H": np.zeros(2)}, value)

    code.encode("clinic", message(sign * 10.0))
    with pytest.raises(UploadError, match=r"'clinic'.*bound, ±10.*nothing is clipped"):
        code.encode("clinic", message(beyond))
    with pytest.raises(UploadError) as caught:
        code.encode("clinic", message(sign * 1234567.0))
    assert "1234567" not in str(caught.value), "values stay at the party"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(DivergenceError, match=r"'clinic'.*'H'"):
        encoding(3).encode("clinic", Message({"H": np.array([[1.0, bad]])}))
    with pytest.raises(DivergenceError, match=r"'clinic'.*weight"):
        encoding(3).encode("clinic", Message({"H": np.ones(1)}, bad))
    for array in (np.array([1j]), np.array(["a"]), np.array([None])):
        with pytest.raises(UploadError, match="'H'"):
            encoding(3).encode("clinic", Message({"H": array}))


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_a_sum_has_the_number_type_of_its_addends(kind):
    rng = np.random.default_rng(0)
    messages = [Message({"b": rng.integers(0, 9, (2, 3)).astype(kind), "a": np.ones(())}, 1.0) for _ in range(3)]
    total = summed(messages, encoding(3))
    assert total["b"].dtype == np.dtype(kind)
    assert_array_equal(total["b"], sum(message["b"] for message in messages))
    assert total["a"].shape == ()
    wider = [*messages, Message({"b": np.ones((2, 3)), "a": np.ones(())}, 1.0)]
    assert summed(wider, encoding(4))["b"].dtype == np.float64


@given(st.data())
def test_integers_are_summed_to_the_last_digit_if_steps_are_no_larger_than_one(data):
    """They never become floating-point numbers, which cannot tell 2⁵³ + 1 from 2⁵³."""
    parties, bits = data.draw(st.integers(1, 100)), data.draw(st.integers(40, 61))
    near = st.integers(2**bits - 9, 2**bits)
    values = data.draw(st.lists(near | near.map(lambda x: -x), min_size=parties, max_size=parties))
    grid = Grid(2.0**bits, parties)
    messages = [Message({"n": np.array([value])}) for value in values]
    total = summed(messages, Encoding(lambda name: grid, Grid(1.0, parties)))["n"].astype(object)[0]
    if grid.exponent >= 0:
        assert total == sum(values)
    elif abs(sum(values)) < 2**62:
        assert abs(total - sum(values)) <= grid.error


@pytest.mark.parametrize("bound", [2.0**62, 1e19, 1e30, 1e99])
def test_integers_in_larger_steps_are_off_by_no_more_than_the_printed_error(bound):
    values = np.array([2**62 + 1, -(2**62) - 3, 2**63 - 1, -(2**63), 5, 0])[: 2 if bound < 1e19 else 6]
    for array in (values, values[values > 0].astype(np.uint64)):
        grid = Grid(2 * bound, 1)
        off = [abs(a - b * Fraction(grid.step)) for a, b in zip(array.tolist(), steps(grid, array), strict=True)]
        assert all(one <= Fraction(grid.error) for one in off)


def steps(grid, array):
    return grid.encode(array).view(np.int64).tolist()


def test_integers_of_tensors_and_of_any_byte_order_are_the_same_numbers():
    torch = pytest.importorskip("torch")
    values = [2**53 + 1, -(2**53) - 1]
    for array in (np.array(values), np.array(values, ">i8"), torch.tensor(values)):
        total = summed([Message({"n": array})] * 3, encoding(3, bound=2.0**54))["n"]
        assert total.tolist() == [3 * value for value in values]
    assert summed([Message({"x": np.arange(3.0).astype(">f4")})] * 3, encoding(3))["x"].tolist() == [0, 3, 6]
    mixed = [Message({"x": np.ones(2)}), Message({"x": torch.ones(2, dtype=torch.bfloat16)})]
    assert summed(mixed, encoding(2))["x"].tolist() == [2, 2]


def test_a_sum_of_tensors_is_a_tensor():
    torch = pytest.importorskip("torch")
    messages = [Message({"H": torch.full((2, 2), float(i), dtype=torch.float32)}) for i in range(3)]
    total = summed(messages, encoding(3))["H"]
    assert isinstance(total, torch.Tensor)
    assert total.dtype == torch.float32
    assert_array_equal(total.numpy(), np.full((2, 2), 3.0))


def test_contents_can_be_told_and_compared():
    message = Message({"H": np.ones((2, 3), np.float32), "counts": np.ones(2)})
    contents = describe_contents(message)
    assert contents_from_json(contents_to_json(contents)) == contents
    assert have_same_shapes(contents, describe_contents(Message({"H": np.ones((2, 3)), "counts": np.ones(2)})))
    assert not have_same_shapes(contents, describe_contents(Message({"H": np.ones((3, 2)), "counts": np.ones(2)})))
    bad = [b"", b"3", b"{}x", b'[["H", [-1], "float64", "numpy"]]', b'[["H", [1], "object", "numpy"]]', b"[[1]]"]
    bad += [b"[" * 100_000, b'[["H", [Infinity], "float64", "numpy"]]', b'[["H", [1], "float64", "torch nowhere"]]']
    for text in bad:
        with pytest.raises(ValueError):  # noqa: PT011
            contents_from_json(text)


@pytest.mark.parametrize("bound", [0.0, -1.0, np.nan, np.inf, "1", None])
def test_bounds_are_positive_numbers(bound):
    with pytest.raises(ParameterError, match="bound"):
        Grid(bound, 3)


@dataclass
class Scripted:
    """A source that says what it is told."""

    script: list[bytes] = field(default_factory=list)

    def __call__(self, count):
        assert count == len(self.script[0])
        return self.script.pop(0)


def every_split(secret, holders, threshold, prime):
    """The shares for all coefficients that can be drawn, each as likely as any other."""
    bits = (prime - 1).bit_length()
    for coefficients in product(range(prime), repeat=threshold - 1):
        script = [bytes([coefficient << (8 - bits)]) for coefficient in coefficients]
        yield split(secret, holders, threshold, Scripted(script), prime)


@pytest.mark.parametrize(("prime", "holders", "threshold"), [(5, 3, 2), (5, 4, 3), (7, 4, 2), (7, 5, 3), (11, 4, 4)])
def test_less_than_t_shares_are_equally_likely_for_all_secrets(prime, holders, threshold):
    for group in combinations(range(holders), threshold - 1):
        seen = [
            Counter(tuple(shares[i] for i in group) for shares in every_split(secret, holders, threshold, prime))
            for secret in range(prime)
        ]
        assert all(one == seen[0] for one in seen)
        assert set(seen[0].values()) == {1}, "every combination of values, once"


@pytest.mark.parametrize(("prime", "holders", "threshold"), [(5, 3, 2), (7, 5, 3)])
def test_any_t_shares_give_the_secret_back_in_all_cases_of_a_small_field(prime, holders, threshold):
    for secret in range(prime):
        for shares in every_split(secret, holders, threshold, prime):
            for group in combinations(range(1, holders + 1), threshold):
                held = {x: shares[x - 1] for x in group}
                assert combine(held, weights_at_zero(group, prime), prime) == secret


@given(st.data())
def test_any_t_shares_give_back_a_secret_of_32_bytes(data):
    holders = data.draw(st.integers(1, 40))
    threshold = data.draw(st.integers(1, holders))
    secret = int.from_bytes(data.draw(st.binary(min_size=32, max_size=32)), "big")
    shares = split(secret, holders, threshold, system_source)
    group = data.draw(st.permutations(range(1, holders + 1)))[:threshold]
    held = {x: shares[x - 1] for x in group}
    assert combine(held, weights_at_zero(group)) == secret
    changed = {**held, group[0]: (held[group[0]] + 1) % PRIME}
    assert combine(changed, weights_at_zero(group)) != secret
    if threshold > 1:
        assert split(secret, holders, threshold, system_source) != shares, "coefficients are drawn anew"


def test_the_field_holds_every_secret_of_32_bytes():
    assert PRIME > 2**256 - 1
    odd, twos = PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, odd, PRIME)
        assert x in (1, PRIME - 1) or any((x := x * x % PRIME) == PRIME - 1 for _ in range(twos - 1))


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 100, 129, 255, 256])
def test_numbers_below_a_limit_are_equally_likely(limit):
    kept = Counter()
    for byte in range(256):
        source = Scripted([bytes([byte]), b""])
        try:
            kept[random_below(limit, source)] += 1
        except AssertionError:
            continue  # thrown away, and drawn again
    assert set(kept) == set(range(limit))
    assert len(set(kept.values())) == 1


def test_shares_that_cannot_be():
    source = system_source
    for holders, threshold in [(3, 4), (3, 0), (0, 0)]:
        with pytest.raises(ParameterError, match="threshold"):
            split(1, holders, threshold, source)
    with pytest.raises(ParameterError, match="holders < prime"):
        split(1, 7, 3, source, prime=7)
    for secret in (-1, PRIME):
        with pytest.raises(ParameterError, match="secret"):
            split(secret, 3, 2, source)
    for points in ([1, 2, 2], [0, 1], [1, 8], []):
        with pytest.raises(ParameterError, match="different holders"):
            weights_at_zero(points, prime=7)
