"""scikit-learn's own tests of NMF, run with ours in its place: the file is generated from the installed scikit-learn.

Left out are tests of losses other than the squared error, of MiniBatchNMF, and of scikit-learn's private functions. Its
text never becomes part of this project.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sklearn.decomposition

import partsong

THEIRS = Path(sklearn.decomposition.__file__).parent / "tests" / "test_nmf.py"
IMPORT = "from sklearn.decomposition import NMF, MiniBatchNMF, non_negative_factorization\n"
OURS = """from sklearn.decomposition import MiniBatchNMF
from partsong import NMF, non_negative_factorization
"""
OTHER_LOSSES = (
    "test_beta_divergence", "test_nmf_multiplicative_update_sparse", "test_nmf_negative_beta_loss",
    "test_nmf_underflow", "test_nmf_minibatchnmf_equivalence", "test_nmf_true_reconstruction",
)  # fmt: skip
PRIVATE = (
    "test_initialize_nn_output", "test_initialize_close", "test_initialize_variants", "test_special_sparse_dot",
)  # fmt: skip
LEFT_OUT = re.compile(rf"minibatch|mbnmf|{'|'.join((*OTHER_LOSSES, *PRIVATE))}", re.IGNORECASE)
REWRITTEN = {
    "est._n_components": "est.n_components_",  # private there, public here
    "for beta_loss in (-1.2, 0, 0.2, 1.0, 2.0, 2.5):": "for beta_loss in (2.0,):",
}


def generated() -> str:
    """Their file with our NMF; lines on other classes and private functions inside a test are theirs to keep."""
    text = THEIRS.read_text(encoding="utf-8")
    assert IMPORT in text, "scikit-learn imports its NMF otherwise now: adapt IMPORT"
    text = text.replace(IMPORT, OURS)
    for theirs, ours in REWRITTEN.items():
        assert theirs in text, theirs
        text = text.replace(theirs, ours)
    return text


@pytest.mark.skipif(not THEIRS.is_file(), reason="this scikit-learn comes without its tests")
def test_scikit_learns_tests_pass_with_our_nmf(tmp_path):
    path = tmp_path / "test_nmf.py"
    path.write_text(generated(), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--noconftest", "-p", "no:cacheprovider", "--rootdir"]
    listed = subprocess.run(
        [*command, str(tmp_path), "--collect-only", str(path)], capture_output=True, text=True, check=True, cwd=tmp_path
    ).stdout
    names = [line for line in listed.splitlines() if "::" in line]
    wanted = [name for name in names if not LEFT_OUT.search(name)]
    assert len(wanted) > 100, listed
    arguments = tmp_path / "names.txt"
    arguments.write_text("\n".join(wanted), encoding="utf-8")
    done = subprocess.run(
        [*command, str(tmp_path), f"@{arguments}"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout[-8000:]


def test_signatures_are_those_of_scikit_learn():
    ours, theirs = (
        inspect.signature(module.non_negative_factorization).parameters for module in (partsong, sklearn.decomposition)
    )
    assert list(ours) == list(theirs)
    assert set(inspect.signature(sklearn.decomposition.NMF).parameters) <= set(
        inspect.signature(partsong.NMF).parameters
    )
