"""Alignment plans: P with P·source ≈ target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from partsong import kernels
from partsong.core import Array, Plan

ALONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Matching:
    """A partial permutation: row a of the target belongs to row partners[a] of the source, or to none (−1)."""

    partners: np.ndarray

    @staticmethod
    def identity(k: int) -> Matching:
        """Every row to itself."""
        return Matching(np.arange(k))

    @property
    def matrix(self) -> np.ndarray:
        """P (k × k) of zeros and ones."""
        P = np.zeros((len(self.partners), len(self.partners)))
        rows = np.flatnonzero(self.partners != ALONE)
        P[rows, self.partners[rows]] = 1.0
        return P

    @property
    def weights(self) -> np.ndarray:
        """P·1: one for rows with a partner, zero for the others."""
        return (self.partners != ALONE).astype(np.float64)

    @property
    def is_permutation(self) -> bool:
        """Whether nobody is alone."""
        return bool((self.partners != ALONE).all())

    def apply(self, source: Array) -> Array:
        """P·source (k × m), by copying rows: no number is changed."""
        moved = source[_index(source, np.maximum(self.partners, 0))]
        alone = self.partners == ALONE
        if alone.any():
            moved[_index(source, np.flatnonzero(alone))] = 0
        return moved

    def transposed(self) -> Matching:
        """The plan in the other direction: Pᵀ."""
        back = np.full(len(self.partners), ALONE)
        rows = np.flatnonzero(self.partners != ALONE)
        back[self.partners[rows]] = rows
        return Matching(back)

    def after(self, first: Plan) -> Plan:
        """P·Q, where Q = `first` is applied before."""
        if not isinstance(first, Matching):
            return Blend(self.matrix @ first.matrix)
        partners = np.where(self.partners == ALONE, ALONE, first.partners[np.maximum(self.partners, 0)])
        return Matching(partners)


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """A soft plan: row a of the target is a mixture of rows of the source, with weights that add up to at most 1."""

    matrix: np.ndarray

    @property
    def weights(self) -> np.ndarray:
        """P·1."""
        return np.asarray(self.matrix.sum(axis=1))

    @property
    def is_permutation(self) -> bool:
        """Whether every row and column is a single one."""
        P = self.matrix
        return bool(np.isin(P, (0.0, 1.0)).all() and (P.sum(axis=0) == 1).all() and (P.sum(axis=1) == 1).all())

    def apply(self, source: Array) -> Array:
        """P·source (k × m)."""
        return kernels.of(source).like(self.matrix, source) @ source

    def transposed(self) -> Blend:
        """Pᵀ: mass sent back the way it came; its rows need not add up to 1."""
        return Blend(self.matrix.T)

    def after(self, first: Plan) -> Plan:
        """P·Q, where Q = `first` is applied before."""
        return Blend(self.matrix @ first.matrix)


def are_same(one: Plan, other: Plan) -> bool:
    """Whether two plans are equal, entry by entry."""
    if isinstance(one, Matching) and isinstance(other, Matching):
        return np.array_equal(one.partners, other.partners)
    return np.array_equal(one.matrix, other.matrix)


def is_soft(plan: Plan) -> bool:
    """Whether some row is a mixture."""
    return not isinstance(plan, Matching) and bool(((plan.matrix > 0) & (plan.matrix < 1)).any())


def orthogonality_gap(plan: Plan) -> float:
    """‖PᵀP − I‖: zero for permutations alone."""
    P = plan.matrix
    return float(np.linalg.norm(P.T @ P - np.eye(len(P))))


def _index(source: Array, rows: np.ndarray) -> Any:
    """Row numbers in the kind that `source` is indexed by."""
    if isinstance(source, np.ndarray):
        return rows
    import torch

    return torch.as_tensor(rows, device=source.device)
