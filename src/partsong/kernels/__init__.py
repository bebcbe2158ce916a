"""Compute kernels for NumPy and torch arrays, chosen by the type of the array.

    from partsong import kernels
    kernels.of(factor).sweep(factor, gram, cross, sweeps=3)

NumPy arrays run numba kernels over row ranges on all allowed threads; torch tensors run the same formulas as torch
operations on their own device. Update rules and programs use only this module, so they depend on neither library.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

from partsong.errors import DataTypeError


def of(array: Any) -> ModuleType:
    """Return the kernel module for this type of array."""
    if isinstance(array, (np.ndarray, np.generic)):  # a union type would be rebuilt at every call
        return _on_numpy()
    if type(array).__module__.partition(".")[0] == "torch":
        from partsong.kernels import torch_backend as on_torch

        return on_torch
    raise DataTypeError(
        f"No kernels for arrays of type {type(array).__name__}. "
        "Pass a NumPy array, a SciPy sparse matrix or a torch tensor."
    )


def capabilities(array: Any) -> frozenset[str]:
    """Return further capabilities for this type of array: "compiled" loops, "cuda", "triton"."""
    found: frozenset[str] = of(array).capabilities(array)
    return found


def add(sums: tuple[Any, ...], more: tuple[Any, ...]) -> tuple[Any, ...]:
    """`sums` + `more`, array by array, in the memory of `sums`."""
    return tuple(_added(total, addend) for total, addend in zip(sums, more, strict=True))


def _added(total: Any, addend: Any) -> Any:
    total += addend
    return total


@cache
def _on_numpy() -> ModuleType:
    from partsong.kernels import numpy_backend as on_numpy

    return on_numpy
