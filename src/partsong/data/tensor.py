"""Rows as a torch tensor, dense or sparse CSR, on any device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from partsong import kernels
from partsong.core.interfaces import RowBlock, Sums
from partsong.core.runtime import cached_property

FEWEST_SUMMED, MOST_SUMMED = 64, 1024
"""Minimum and maximum number of rows whose products are summed in the type of the data."""
SUMS = 1 << 22
"""Maximum number of partial sums."""
EXACT_NUMBERS = 1 << 24
"""Entries converted to float64 together."""


@dataclass(frozen=True, eq=False)
class TensorMatrix:
    """A two-dimensional torch tensor, strided or sparse CSR, on any device; products stay on that device."""

    X: Any

    @cached_property
    def X_transposed(self) -> Any:
        """Xᵀ: a view of strided data; a second copy for CSR, since torch cannot multiply a transposed view."""
        if self.X.layout is _strided():
            return self.X.T
        return self.X.to_sparse_coo().t().coalesce().to_sparse_csr()

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.X.shape[0]), int(self.X.shape[1])

    @property
    def dtype(self) -> Any:
        return self.X.dtype

    @property
    def stored(self) -> int:
        return int(self._values.numel())

    @cached_property
    def squared_norm(self) -> float:
        return float((self._values.double() ** 2).sum())

    @cached_property
    def mean(self) -> float:
        return float(self._values.double().sum()) / max(1, self.shape[0] * self.shape[1])

    @property
    def _values(self) -> Any:
        return self.X.values() if self.X.layout is not _strided() else self.X

    @property
    def row_weights(self) -> None:
        """All rows have weight 1."""

    @property
    def total_weight(self) -> float:
        return float(self.shape[0])

    def row_energies(self) -> Any:
        import torch

        squares = self._values.double() ** 2
        if self.X.layout is _strided():
            return squares.sum(1)
        lengths = self.X.crow_indices().diff()
        rows = torch.repeat_interleave(torch.arange(self.shape[0], device=self.X.device), lengths)
        return torch.zeros(self.shape[0], dtype=torch.float64, device=self.X.device).index_add_(0, rows, squares)

    def gram_is_cheap(self, k: int) -> bool:
        return True

    def visit(self, Ht: Any, A: Any, step: Callable[[slice, Any], Sums]) -> tuple[Any, Sums]:
        sums = self.walk(Ht, step)
        return self.transposed_times(A), sums

    def walk(self, Ht: Any, step: Callable[[slice, Any], Sums]) -> Sums:
        return step(slice(0, self.shape[0]), self.X @ Ht)

    def blocks(self, work: Callable[[RowBlock], Sums], per_cell: float = 1.0) -> Sums:
        rows, width = slice(0, self.shape[0]), self.shape[1]
        if self.X.layout is _strided():
            return work(RowBlock(rows, width, self.X))
        return work(RowBlock(rows, width, None, self.X.crow_indices(), self.X.col_indices(), self.X.values()))

    def transposed(self) -> TensorMatrix | None:
        return TensorMatrix(self.X.T) if self.X.layout is _strided() else None

    def times(self, B: Any) -> Any:
        return self.X @ B

    def transposed_times(self, A: Any) -> Any:
        """Xᵀ A; for strided data summed in blocks of rows, because long float32 sums lose digits."""
        import torch

        if self.X.layout is not _strided():
            return self.X_transposed @ A
        size = self.shape[1] * A.shape[1]
        kind = torch.float64 if size <= SUMS else self.dtype
        total = torch.zeros((self.shape[1], A.shape[1]), dtype=kind, device=self.X.device)
        height = min(max(FEWEST_SUMMED, size // 32), MOST_SUMMED)  # rounding errors in few sums do not average out
        group = height * max(1, SUMS // max(1, size))
        for X, F in zip(self.X.split(group), A.split(group), strict=True):
            count = len(X) // height
            whole = count * height
            left, right = (part[:whole].unflatten(0, (count, height)) for part in (X, F))
            total += (left.transpose(1, 2) @ right).sum(0, dtype=kind)
            total += X[whole:].T @ F[whole:]
        return total.to(self.dtype)

    def rows(self, indices: Any) -> TensorMatrix:
        import torch

        return TensorMatrix(torch.index_select(self.X, 0, torch.as_tensor(indices, device=self.X.device)))

    def columns(self, indices: Any) -> Any:
        import torch

        chosen = torch.zeros((self.shape[1], len(indices)), dtype=self.X.dtype, device=self.X.device)
        chosen[torch.as_tensor(indices, device=self.X.device), torch.arange(len(indices), device=self.X.device)] = 1
        return self.X @ chosen

    def column_energies(self) -> Any:
        import torch

        if self.X.layout is _strided():
            return (self.X.double() ** 2).sum(0).cpu().numpy()
        squares = torch.zeros(self.shape[1], dtype=torch.float64, device=self.X.device)
        return squares.index_add_(0, self.X.col_indices().long(), self._values.double() ** 2).cpu().numpy()

    def gram_column(self, j: int) -> Any:
        return (self.X_transposed @ self.columns([j]))[:, 0].double().cpu().numpy()

    def native(self, values: Any) -> Any:
        return kernels.of(self.X).cast(values, self.X)

    def squared_distance(self, W: Any, Ht: Any) -> float:
        """‖X − W H‖² in float64: row by row for strided data, else by the trace formula."""
        if self.X.layout is _strided():
            height, H = max(1, EXACT_NUMBERS // max(1, self.shape[1])), Ht.double().T
            pairs = zip(self.X.split(height), W.split(height), strict=True)
            return float(sum((rows.double() - part.double() @ H).square().sum() for rows, part in pairs))
        crossed = float((self._exact_times(Ht) * W).sum())
        gram = kernels.of(W).gram
        return self.squared_norm - 2 * crossed + float((gram(W) * gram(Ht)).sum())

    def _exact_times(self, B: Any) -> Any:
        """X B in float64."""
        import torch

        if self.X.layout is _strided():
            height = max(1, EXACT_NUMBERS // max(1, self.shape[1]))
            exact = B.double()
            return torch.cat([rows.double() @ exact for rows in self.X.split(height)])
        return self.X.double() @ B.double()


def _strided() -> Any:
    import torch

    return torch.strided
