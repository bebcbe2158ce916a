"""Other libraries, if installed; each is observed in its own loop, after every iteration."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np

from benchmarks.speed.clock import Recorder
from benchmarks.speed.contestants import MOST_ITERATIONS, Contestant
from benchmarks.speed.evaluation import Problem


def _nmf_torch(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    import torch
    from nmf.nmf_models import NMFBatchHALS

    class Watched(NMFBatchHALS):
        def _update_W(self) -> None:
            super()._update_W()
            recorder(self.H.numpy(), self.W.numpy())

    torch.set_num_threads(threads)
    none = {"alpha_W": 0.0, "l1_ratio_W": 0.0, "alpha_H": 0.0, "l1_ratio_H": 0.0}
    model = Watched(
        problem.rank,
        init="nndsvdar",
        beta_loss=2.0,
        tol=0.0,
        random_state=seed,
        fp_precision="float",
        device_type="cpu",
        n_jobs=threads,
        max_iter=MOST_ITERATIONS,
        hals_max_iter=1,
        **none,
    )
    X = torch.from_numpy(_dense(problem))
    with contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        recorder.start()
        model.fit(X)


def _torchnmf(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    import torch
    from torchnmf.nmf import NMF

    class Watched(NMF):
        """Each iteration computes W H twice with gradients, so that one is complete before the third, fifth, … call."""

        asked = 0

        def _count(self) -> None:
            if not torch.is_grad_enabled():
                return
            if self.asked and self.asked % 2 == 0:
                recorder(self.H.detach().numpy(), self.W.detach().numpy().T)
            self.asked += 1

        def reconstruct(self, H: Any, W: Any) -> Any:
            self._count()
            return NMF.reconstruct(H, W)

        def _sp_recon_beta_pos_neg(self, *given: Any) -> Any:
            self._count()
            return super()._sp_recon_beta_pos_neg(*given)

    torch.set_num_threads(threads)
    W, H = problem.random_start(seed)
    V = _torch_sparse(problem.X) if problem.is_sparse else torch.from_numpy(problem.X)
    recorder.start()
    model = Watched(W=torch.from_numpy(H.T.copy()), H=torch.from_numpy(W))
    model.fit(V, beta=2, tol=-np.inf, max_iter=MOST_ITERATIONS)


def _torch_sparse(X: Any) -> Any:
    import torch

    entries = X.tocoo()
    places = torch.from_numpy(np.stack([entries.row, entries.col]).astype(np.int64))
    return torch.sparse_coo_tensor(places, torch.from_numpy(entries.data), entries.shape).coalesce()


def _tensorly(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    from tensorly.decomposition import non_negative_parafac_hals

    X = problem.X
    recorder.start()
    init: Any = "random"
    done = 0
    while done < MOST_ITERATIONS:
        steps = max(1, done // 20)  # few calls, so that the work of each call before its loop counts little
        init = non_negative_parafac_hals(
            X, problem.rank, n_iter_max=steps, init=init, tol=0, random_state=np.random.RandomState(seed)
        )
        done += steps
        recorder(init.factors[0], init.factors[1].T)


def _nimfa(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        import nimfa

    class Watched(nimfa.Lsnmf):
        def update(self) -> None:
            super().update()
            recorder(np.asarray(self.W), np.asarray(self.H))

    if not hasattr(np, "mat"):
        setattr(np, "mat", np.asmatrix)  # noqa: B010  # removed in NumPy 2, still called by nimfa
    W, H = problem.random_start(seed)
    V = np.asmatrix(_dense(problem), dtype="d")
    recorder.start()
    Watched(V, seed=None, W=W, H=H, rank=problem.rank, max_iter=MOST_ITERATIONS, min_residuals=1e-12).factorize()


def _gensim(problem: Problem, seed: int, threads: int, recorder: Recorder) -> None:
    from gensim.models.nmf import Nmf
    from scipy.sparse import csc_matrix

    class Watched(Nmf):
        def _solve_w(self) -> None:
            super()._solve_w()
            recorder(None, self._W.T)

    words = {column: str(column) for column in range(problem.X.shape[1])}
    corpus = csc_matrix(problem.X.T)
    recorder.start()
    Watched(corpus, problem.rank, words, passes=MOST_ITERATIONS, eval_every=0, random_state=seed)


def _dense(problem: Problem) -> np.ndarray:
    return np.ascontiguousarray(problem.X.toarray()) if problem.is_sparse else problem.X


PEERS = (
    Contestant(
        "nmf-torch",
        _nmf_torch,
        "HALS, its default start nndsvdar; a subclass that looks after each update of W; sparse data are made dense",
        "nmf",
        "nmf-torch",
    ),
    Contestant(
        "torchnmf",
        _torchnmf,
        "multiplicative updates, the common random start; a subclass that looks at every second reconstruction",
        "torchnmf",
        "torchnmf",
    ),
    Contestant(
        "tensorly",
        _tensorly,
        "non_negative_parafac_hals, random start; called again and again from where it stood; no sparse data",
        "tensorly",
        "tensorly",
        takes_sparse=False,
    ),
    Contestant(
        "nimfa",
        _nimfa,
        "LSNMF in float64, common random start; a subclass that looks after each update; sparse data are made dense; "
        "np.mat given back to NumPy for it",
        "nimfa",
        "nimfa",
    ),
    Contestant(
        "gensim",
        _gensim,
        "streaming, chunks of 2000; a subclass that looks after each chunk, W is fitted outside the clock; sparse data",
        "gensim",
        "gensim",
        takes_dense=False,
    ),
)
