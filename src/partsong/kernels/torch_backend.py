"""Kernels for torch tensors: the same formulas as torch operations, on the tensor's own device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Tensor = Any


def sweep(F: Tensor, gram: Tensor, cross: Tensor, sweeps: int, place: Tensor | None = None) -> Tensor:
    """Coordinate descent over columns, always in memory of its own; see on_numpy.sweep."""
    out = F.T.contiguous()  # components as contiguous rows
    target = cross.T.contiguous()
    diagonal = torch.diagonal(gram).tolist()
    floor = torch.finfo(F.dtype).tiny * 4
    for _ in range(sweeps):
        for j, size in enumerate(diagonal):
            if size > floor:
                out[j] = torch.clamp(out[j] + (target[j] - gram[j] @ out) / size, min=0)
    return out.T.contiguous()


def multiply(F: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """F ∘ cross / (F gram)."""
    return F * torch.clamp(cross, min=0) / torch.clamp(F @ gram, min=torch.finfo(F.dtype).tiny)


def descend(F: Tensor, gram: Tensor, cross: Tensor, step: float) -> Tensor:
    """max(0, F − step (F gram − cross))."""
    return torch.clamp(F - step * (F @ gram - cross), min=0)


def extrapolate(new: Tensor, old: Tensor, amount: float) -> Tensor:
    """max(0, new + amount (new − old))."""
    return torch.clamp(new + amount * (new - old), min=0)


def solve_exactly(F: Tensor, gram: Tensor, cross: Tensor) -> Tensor:
    """See on_numpy.solve_exactly; the small systems are solved on the host, so tensors on a device travel there."""
    from partsong.kernels import numpy_backend as on_numpy

    return like(on_numpy.solve_exactly(to_numpy(F), to_numpy(gram), to_numpy(cross)), F)


def gram(F: Tensor, exactly: bool = True) -> Tensor:
    """Fᵀ F in float64; without `exactly` products are in the type of F."""
    if not exactly:
        return (F.T @ F).double()
    total = torch.zeros((F.shape[1], F.shape[1]), dtype=torch.float64, device=F.device)
    for rows in F.split(1 << 16):
        exact = rows.double()
        total.addmm_(exact.T, exact)
    return total


def inner(A: Tensor, B: Tensor) -> float:
    """⟨A, B⟩ in float64."""
    return float(torch.sum(A.double() * B.double()))


def largest_eigenvalue(gram: Tensor) -> float:
    """‖gram‖₂ of a symmetric positive semi-definite matrix; infinite where an entry is not finite."""
    return float(torch.linalg.eigvalsh(gram.double())[-1]) if bool(torch.isfinite(gram).all()) else float("inf")


def plus_diagonal(gram: Tensor, amount: float) -> Tensor:
    """gram + amount·I."""
    return gram + amount * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)


def empty_like(F: Tensor) -> Tensor:
    """Uninitialised memory of the same shape, type and device."""
    return torch.empty_like(F)


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised memory of a given shape and the type and device of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def tile(F: Tensor, columns: int) -> Tensor:
    """The vector F repeated as `columns` equal columns."""
    return F[:, None].repeat(1, columns)


def rows_of(H: Tensor) -> Tensor:
    """Hᵀ as contiguous rows."""
    return H.T.contiguous()


def like(values: np.ndarray, example: Tensor) -> Tensor:
    """A NumPy array as a tensor in the type and place of `example`."""
    return torch.as_tensor(np.ascontiguousarray(values)).to(device=example.device, dtype=example.dtype)


def to_numpy(F: Tensor) -> np.ndarray:
    """As a NumPy array on the host."""
    return F.detach().cpu().numpy()
