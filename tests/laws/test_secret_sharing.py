"""Laws of shares: t give the secret back, t − 1 are as likely for any other secret, in all cases of a small field."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from partsong.errors import ParameterError
from partsong.privacy.randomness import system_source
from partsong.secure_aggregation.crypto import PRIME, combine, random_below, split, weights_at_zero


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
