"""Where descents compute: by NumPy and compiled loops, or with torch on a device of its own."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from scipy import sparse

from partsong.core import Matrix
from partsong.data.matrix import as_matrix
from partsong.errors import MissingExtra, ParameterError
from partsong.programs.topic_rounds import TopicRounds


def require_device(device: Any, program: Any) -> None:
    """Refuse a device that torch cannot use here, and programs that have nothing to do on one; None is NumPy."""
    if device is None:
        return
    if not isinstance(device, str):
        raise ParameterError(
            f'device must be the name of a device that torch knows, such as "cuda" or "cpu", or None; got {device!r}.'
        )
    if not isinstance(program, TopicRounds):
        raise ParameterError(
            f"device={device!r} is for descents, nmf-sgd, nmf-sgd-mi, fednmf and fednmf-mi: all other methods are "
            "computed by NumPy and compiled loops. Leave it out, or take one of these."
        )
    _require_usable(device)


def rows_on(device: str | None, rows: Any, dtype: Any = None) -> Matrix:
    """Sparse rows behind products, by NumPy, or as a tensor on a device."""
    side = sparse.csr_array(rows)
    if device is None:
        return as_matrix(side, dtype)
    import torch

    if dtype is not None:
        side = side.astype(dtype, copy=False)
    parts = [side.indptr.astype(np.int64), side.indices.astype(np.int64), side.data]
    on_device = (torch.from_numpy(np.ascontiguousarray(part)).to(device) for part in parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse tensors a beta
        return as_matrix(torch.sparse_csr_tensor(*on_device, side.shape))


def _require_usable(device: str) -> None:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            f'device={device!r} needs PyTorch, which is not installed: pip install "partsong[torch]". Without it, '
            "leave device out."
        ) from error
    try:
        is_here = float(torch.ones(2, device=device).sum()) == 2.0
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        raise ParameterError(
            f"device={device!r} cannot be used here: {reason}. Take another one, or none for NumPy."
        ) from None
    if not is_here:
        raise ParameterError(f"device={device!r} does not compute. Take another one, or none for NumPy.")
