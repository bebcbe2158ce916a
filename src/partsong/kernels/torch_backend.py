"""Kernels for torch tensors: the same formulas as torch operations, on the tensor's own device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from partsong.kernels import numpy_backend

Tensor = Any


def capabilities(F: Tensor) -> frozenset[str]:
    """CUDA kernels, and Triton if installed, for tensors on a GPU."""
    if F.device.type != "cuda":
        return frozenset()
    return frozenset({"cuda", *(["triton"] if find_spec("triton") else [])})


def sweep(F: Tensor, gram: Tensor, cross: Tensor, sweeps: int, out: Tensor | None = None) -> Tensor:
    """Coordinate descent over columns, always in new memory; see numpy_backend.sweep."""
    rows = F.T.clone(memory_format=torch.contiguous_format)  # components as contiguous rows
    target = cross.T.contiguous()
    sizes = torch.diagonal(gram)
    # Selected by `where` and not by a branch, which would wait for the device.
    is_there = sizes > torch.finfo(F.dtype).tiny * 4
    sizes = torch.where(is_there, sizes, 1)
    for _ in range(sweeps):
        for j in range(len(rows)):
            moved = torch.clamp(rows[j] + (target[j] - gram[j] @ rows) / sizes[j], min=0)
            rows[j] = torch.where(is_there[j], moved, rows[j])
    return rows.T.contiguous()


def multiply(F: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """F ∘ cross / (F gram)."""
    return F * torch.clamp(cross, min=0) / torch.clamp(F @ gram, min=torch.finfo(F.dtype).tiny)


def descend(F: Tensor, gram: Tensor, cross: Tensor, step: Any) -> Tensor:
    """max(0, F − step (F gram − cross))."""
    return torch.clamp(F - step * (F @ gram - cross), min=0)


def extrapolate(new: Tensor, old: Tensor, amount: Any) -> Tensor:
    """max(0, new + amount (new − old))."""
    return torch.clamp(new + amount * (new - old), min=0)


def solve_exactly(F: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """See numpy_backend.solve_exactly; tensors are copied to the host, where the small systems are solved."""
    return cast(numpy_backend.solve_exactly(to_numpy(F), to_numpy(gram), to_numpy(cross)), F)


def gram(F: Tensor, exactly: bool = True) -> Tensor:
    """Fᵀ F in float64; without `exactly`, products are in the type of F."""
    if not exactly:
        return (F.T @ F).double()
    total = torch.zeros((F.shape[1], F.shape[1]), dtype=torch.float64, device=F.device)
    # In pieces, so that the copy in float64 stays small.
    for rows in F.split(1 << 16):
        exact = rows.double()
        total.addmm_(exact.T, exact)
    return total


def inner(A: Tensor, B: Tensor) -> Tensor:
    """⟨A, B⟩ in float64, as a 0-d tensor."""
    return torch.sum(A.double() * B.double())


def total(F: Tensor) -> Tensor:
    """ΣF in float64, as a 0-d tensor."""
    return F.sum(dtype=torch.float64)


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """‖gram‖₂ of a symmetric positive semi-definite matrix, as a 0-d tensor; infinite if an entry is not finite."""
    values, is_finite = gram.double(), torch.isfinite(gram).all()
    # eigvalsh fails for values that are not finite, and a branch on them would wait for the device.
    largest = torch.linalg.eigvalsh(torch.where(is_finite, values, 0.0))[-1]
    return torch.where(is_finite, largest, float("inf"))


def plus_diagonal(gram: Tensor, amount: Any) -> Tensor:
    """gram + amount·I, for a number or a 0-d tensor."""
    return gram + amount * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def scalar(value: Any, like: Tensor) -> Tensor:
    """A number, or a 0-d array of any kind, as a 0-d tensor in float64 on the device of `like`."""
    return torch.as_tensor(value, dtype=torch.float64, device=like.device)


def where(condition: Tensor, one: Any, other: Any) -> Tensor:
    """Select one of two values by a 0-d condition, without synchronizing with the device."""
    return torch.where(condition, one, other)


def choose(condition: Tensor, one: Callable[[], Tensor], other: Callable[[], Tensor]) -> Tensor:
    """The same for values that are computed here."""
    return torch.where(condition, one(), other())


def is_known_false(condition: Tensor) -> bool:
    """Always False: reading a condition would wait for the device."""
    return False


def cast(values: Any, example: Tensor) -> Tensor:
    """Convert an array or tensor to the type and device of `example`; tensors are not copied through the host."""
    if isinstance(values, torch.Tensor):
        return values.to(device=example.device, dtype=example.dtype)
    return torch.as_tensor(np.ascontiguousarray(values)).to(device=example.device, dtype=example.dtype)


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialized memory of a given shape, with the type and device of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def tile(F: Tensor, columns: int) -> Tensor:
    """The vector F repeated as `columns` equal columns."""
    return F[:, None].repeat(1, columns)


def rows_of(H: Tensor) -> Tensor:
    """Hᵀ as contiguous rows."""
    return H.T.contiguous()


def to_numpy(F: Tensor) -> np.ndarray:
    """As a NumPy array on the host."""
    return F.detach().cpu().numpy()
