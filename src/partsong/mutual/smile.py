"""Lower bounds of mutual information from scores s_ij = T(x_i, w_j) of all pairs in a batch (b × b), and their slopes.

Pairs on the diagonal belong together, all others are drawn from the product of the marginals (Song & Ermon, 2020).
"""

from __future__ import annotations

from dataclasses import dataclass

from partsong.core import Array
from partsong.errors import ParameterError
from partsong.mutual.documents import operations

FAR = 60.0
"""Scores beyond this have a sigmoid of 0 or 1 to every digit."""


@dataclass(frozen=True, slots=True)
class ClippedBound:
    """SMILE, and its own slopes: "dv", as printed in the FedNMF+MI paper (Eq. 2) but for the clip.

        Î = (1/b) Σ_i s_ii − log[ (1/(b(b−1))) Σ_{i≠j} exp(min(max(s_ij, −τ), τ)) ]
        ∂Î/∂s_ii = 1/b,   ∂Î/∂s_ij = −exp(s_ij) [|s_ij| < τ] / Σ_{i≠j} exp(clipped s_ij)

    τ is `clip`. The paper prints max(min(v, l), u), which is u for every v; the first term is not clipped.
    """

    clip: float = 5.0

    def __post_init__(self) -> None:
        _require_clip(self.clip)

    def value(self, scores: Array) -> Array:
        """Î, a single number; needs two documents."""
        return smile(scores, self.clip)

    def slopes(self, scores: Array) -> Array:
        """∂Î/∂s (b × b)."""
        on, b = operations(scores), len(scores)
        unit = on.unit(b, scores)
        shares = on.exp(scores.clip(-self.clip, self.clip)) * (1.0 - unit)
        is_free = (scores < self.clip) & (scores > -self.clip)
        return unit / b - shares * is_free / shares.sum()


@dataclass(frozen=True, slots=True)
class JensenShannon:
    """SMILE's value, and the slopes of the Jensen–Shannon bound: "js", as in the code of SMILE's authors; steadier.

    J = −(1/b) Σ_i softplus(−s_ii) − (1/(b(b−1))) Σ_{i≠j} softplus(s_ij)
    ∂J/∂s_ii = σ(−s_ii)/b,   ∂J/∂s_ij = −σ(s_ij) / (b(b−1))
    """

    clip: float = 5.0

    def __post_init__(self) -> None:
        _require_clip(self.clip)

    def value(self, scores: Array) -> Array:
        """Î as of `ClippedBound`."""
        return smile(scores, self.clip)

    def slopes(self, scores: Array) -> Array:
        """∂J/∂s (b × b)."""
        on, b = operations(scores), len(scores)
        unit = on.unit(b, scores)
        rising = 1.0 / (1.0 + on.exp(-scores.clip(-FAR, FAR)))
        return unit * (1.0 - rising) / b - (1.0 - unit) * rising / (b * (b - 1))


Bound = ClippedBound | JensenShannon


def smile(scores: Array, clip: float) -> Array:
    """(1/b) Σ_i s_ii − log of the mean of e^s over i ≠ j, with these s clipped to ±clip."""
    on, b = operations(scores), len(scores)
    apart = 1.0 - on.unit(b, scores)
    mean = (on.exp(scores.clip(-clip, clip)) * apart).sum() / (b * (b - 1))
    return scores.diagonal().sum() / b - on.log(mean)


def _require_clip(clip: float) -> None:
    if not 0 < clip <= FAR:
        raise ParameterError(f"Scores are clipped to ±clip, with 0 < clip ≤ {FAR:g}; got {clip!r}.")
