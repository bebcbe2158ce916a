"""A disk that is full in the middle of a file: the error is one of files, and what was there before is untouched."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest

from partsong.errors import FileError
from partsong.io.tensor_file import FileKind, read_tensors, write_tensors

resource = pytest.importorskip("resource")
KIND = FileKind("test", 1)


@contextmanager
def files_of_at_most(size):
    """As if there were no more space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_arrays_that_do_not_fit_are_an_error_of_files_and_leave_what_was_there(tmp_path):
    place = tmp_path / "arrays"
    write_tensors(place, KIND, {"x": np.arange(3.0)}, {})
    with files_of_at_most(50_000), pytest.raises(FileError, match=r"cannot be written.*disk is not full"):
        write_tensors(place, KIND, {"x": np.arange(1e5)}, {})
    assert read_tensors(place, KIND)[0]["x"].tolist() == [0.0, 1.0, 2.0]
    assert [one.name for one in tmp_path.iterdir()] == ["arrays"]
