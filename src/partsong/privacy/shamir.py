"""A secret in shares, of which t give it back and t − 1 say nothing (Shamir, 1979).

The secret is f(0) of a polynomial of degree t − 1 over the numbers modulo a prime, its other coefficients drawn
uniformly; share x is f(x) for x = 1 … n. For any t − 1 shares and any secret there is exactly one such polynomial, so
that all secrets are equally likely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from partsong.errors import ParameterError
from partsong.privacy.randomness import Source

PRIME = 2**256 + 297
"""The smallest prime above 2²⁵⁶: every secret of 32 bytes is a number below it."""

SHARE_BYTES = 33
"""Of a number below PRIME."""


def split(secret: int, holders: int, threshold: int, source: Source, prime: int = PRIME) -> list[int]:
    """The shares f(1) … f(n) of a secret."""
    if not 1 <= threshold <= holders < prime:
        raise ParameterError(
            f"Shares need 1 ≤ threshold ≤ holders < prime; got threshold={threshold}, holders={holders}."
        )
    if not 0 <= secret < prime:
        raise ParameterError("A secret must be a number from zero to below the prime of its field.")
    coefficients = [secret, *(below(prime, source) for _ in range(threshold - 1))]
    return [_value(coefficients, x, prime) for x in range(1, holders + 1)]


def below(limit: int, source: Source) -> int:
    """A number from 0 to limit − 1, all equally likely: draws that are too large are thrown away."""
    bits = (limit - 1).bit_length()
    size = max(1, -(-bits // 8))
    while True:
        number = int.from_bytes(source(size), "big") >> (8 * size - bits)
        if number < limit:
            return number


def weights_at_zero(points: Sequence[int], prime: int = PRIME) -> dict[int, int]:
    """λ_x = Π_{y≠x} y / (y − x), with f(0) = Σ_x λ_x f(x) for every polynomial of lower degree than there are points.

    Worked out once where many secrets were shared with the same holders.
    """
    if not points or len({point % prime for point in points} - {0}) != len(points):
        raise ParameterError(
            f"Shares must come from different holders, at least one and numbered from 1; got {sorted(points)[:10]}."
        )
    weights = {}
    for x in points:
        above = below_it = 1
        for y in points:
            if y != x:
                above, below_it = above * y % prime, below_it * (y - x) % prime
        weights[x] = above * pow(below_it, -1, prime) % prime
    return weights


def combine(shares: Mapping[int, int], weights: Mapping[int, int], prime: int = PRIME) -> int:
    """f(0) = Σ_x λ_x f(x) from the shares by holder; holders without a weight are not asked."""
    return sum(weight * shares[x] for x, weight in weights.items()) % prime


def _value(coefficients: Sequence[int], x: int, prime: int) -> int:
    """By Horner's rule; one division in the end is cheaper than one for each coefficient, as x is small."""
    value = 0
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value % prime
