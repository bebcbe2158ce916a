"""Thread limits, graceful Ctrl-C, cached attributes and the package version.

One setting limits the threads of compiled kernels and of BLAS. Each thread gets one range of rows. The ranges depend
only on sizes and on the number of threads, so the same seed gives the same bytes at a fixed number of threads. While
kernels run, BLAS uses one thread per call. Inside a worker everything is serial: parties that run in parallel do not
multiply threads.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Generic, TypeVar, overload

from partsong.errors import ParameterError


def package_version() -> str:
    """Return the installed version; "unknown" in a source tree that was never installed."""
    from importlib import metadata  # slow to import and rarely needed

    try:
        return metadata.version("partsong")
    except metadata.PackageNotFoundError:
        return "unknown"


STOPPING = "Interrupted: finishing the current iteration or final solve. Press Ctrl-C again to stop immediately."


@dataclass(slots=True)
class InterruptCounter:
    """Number of Ctrl-C presses while a graceful interrupt is active."""

    count: int = 0


_holding: list[Callable[[int, object], None]] = []
_counting: list[InterruptCounter] = []


def trigger() -> bool:
    """Interrupt the active `graceful_interrupt` block where SIGINT is ignored; return False if there is none."""
    if not _holding:
        return False
    _holding[0](signal.SIGINT, None)
    return True


@contextmanager
def graceful_interrupt(note: str = STOPPING) -> Iterator[InterruptCounter]:
    """Within this block the first Ctrl-C is only counted (and `note` is shown); the second raises KeyboardInterrupt.

    Nothing changes in threads other than the main one, which get no signals, or where another signal handler is
    installed. Nested blocks share the counter of the outer one. Where SIGINT is ignored, call `trigger` instead.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and _counting:
        yield _counting[0]
        return
    pressed = InterruptCounter()

    def hold(number: int, frame: object) -> None:
        pressed.count += 1
        if pressed.count > 1:
            raise KeyboardInterrupt
        if note and sys.stderr is not None:
            sys.stderr.write(f"{note}\n")

    if is_main and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        _holding.append(hold)
        _counting.append(pressed)
        try:
            yield pressed
        finally:
            _holding.clear()
            _counting.clear()
        return
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield pressed
        return
    before = signal.signal(signal.SIGINT, hold)
    _counting.append(pressed)
    try:
        yield pressed
    finally:
        _counting.clear()
        signal.signal(signal.SIGINT, before)


T = TypeVar("T")


class cached_property(Generic[T]):
    """Lock-free version of functools.cached_property, which in Python 3.11 takes one lock for all instances.

    With that lock parties would wait for each other, and a process forked at that moment would wait forever. Two
    threads may both compute the value; it is the same.
    """

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T | cached_property[T]:
        if instance is None:
            return self
        value = self.compute(instance)
        instance.__dict__[self.name] = value
        return value


SMALL_WORK = 40_000_000
"""Below this many floating-point operations a second thread costs more than it saves."""

_kernel_threads: ContextVar[int] = ContextVar("partsong_kernel_threads", default=1)
_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()
_blas_users = 0
_blas_limit: Any = None
_controller: Any = None
_outer_threads: float = math.inf
_is_forked = False


def available_threads() -> int:
    """Return the number of threads this process may use: PARTSONG_NUM_THREADS, else the cores it may run on.

    Lower limits set elsewhere apply: OMP_NUM_THREADS and NUMBA_NUM_THREADS (as joblib sets them in its workers), and
    threadpoolctl's limit on BLAS.
    """
    wanted = os.environ.get("PARTSONG_NUM_THREADS", "").strip()
    if wanted:
        if not wanted.isdigit() or int(wanted) < 1:
            raise ParameterError(f"PARTSONG_NUM_THREADS must be a whole number of at least 1; got {wanted!r}.")
        return int(wanted)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    first = (os.environ.get(name, "").split(",")[0].strip() for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"))
    limits = [int(value) for value in first if value.isascii() and value.isdigit() and int(value) > 0]
    return int(min(cores, *limits, _blas_threads()))


def _blas_threads() -> float:
    """The lowest BLAS thread limit set from outside; our own limit does not count while it is active."""
    with _lock:
        return _outer_threads if _blas_users or _is_forked else _least_threads()


def _least_threads() -> float:
    found = (lib.info() for lib in _blas().select(user_api="blas").lib_controllers)
    threaded = [info["num_threads"] for info in found if info.get("threading_layer") != "disabled"]
    return min(threaded, default=math.inf)


def _blas() -> Any:
    """threadpoolctl's controller of the loaded BLAS libraries."""
    global _controller
    if _controller is None:
        from threadpoolctl import ThreadpoolController

        import_module(
            "scipy.linalg.cython_blas"
        )  # used by compiled code; a controller sees only libraries that are loaded
        _controller = ThreadpoolController()
    return _controller


@contextmanager
def limit_kernel_threads(threads: int) -> Iterator[None]:
    """Within this block kernels use `threads` threads, and each BLAS call uses one.

    Overflow gives no warning here: it shows in the objective and becomes the outcome of the run.
    """
    import numpy as np

    token = _kernel_threads.set(threads)
    _hold_blas()
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            yield
    finally:
        _release_blas()
        _kernel_threads.reset(token)


def split_range(total: int, work: float, weights: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """Split 0…total into ranges, one per thread; balance the running total `weights` (as in CSR) if given."""
    parts = 1 if work < SMALL_WORK else max(1, min(_kernel_threads.get(), total))
    if parts == 1:
        return [(0, total)]
    if weights is None:
        cuts = [total * i // parts for i in range(parts + 1)]
    else:
        import numpy as np

        goals = [weights[-1] * i / parts for i in range(1, parts)]
        inner = np.searchsorted(np.asarray(weights), goals).tolist() if goals else []
        cuts = [0, *(min(int(cut), total) for cut in inner), total]
    return [(a, b) for a, b in pairwise(cuts) if b > a] or [(0, total)]


def map_ranges(pieces: Sequence[tuple[int, int]], work: Callable[[int, int], T]) -> list[T]:
    """Call work(start, stop) for each piece, in parallel, and return the results in order."""
    if len(pieces) == 1:
        return [work(*pieces[0])]
    others = [_shared_pool().submit(work, *piece) for piece in pieces[1:]]
    token = _kernel_threads.set(1)
    try:
        first = work(*pieces[0])
    finally:
        _kernel_threads.reset(token)
        for other in others:
            other.exception()
    return [first, *(other.result() for other in others)]


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(os.cpu_count() or 1, 8), thread_name_prefix="partsong-kernel")
        return _pool


def _hold_blas() -> None:
    global _blas_users, _blas_limit, _outer_threads
    with _lock:
        if _blas_users == 0:
            _outer_threads = _outer_threads if _is_forked else _least_threads()
            _take_control()
            _blas_limit = _blas().limit(limits=1, user_api="blas")
        _blas_users += 1


def _take_control() -> None:
    """Work around newer threadpoolctl, in which only the first thread that set an OpenBLAS limit can change it."""
    import threadpoolctl

    clear = getattr(getattr(threadpoolctl, "OpenBLASController", None), "clear_controlling_thread", None)
    if clear is not None:
        clear(force=True)


def _release_blas() -> None:
    global _blas_users, _blas_limit
    with _lock:
        _blas_users -= 1
        if _blas_users == 0:
            _take_control()
            _blas_limit.restore_original_limits()
            _blas_limit = None


def _forget_after_fork() -> None:
    global _pool, _lock, _blas_users, _blas_limit, _is_forked
    _is_forked = _is_forked or _blas_users > 0  # BLAS still has the limit of one thread that a fit in the parent set
    _pool, _lock, _blas_users, _blas_limit = None, threading.Lock(), 0, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_after_fork)


THREADS = "PARTSONG_NUM_THREADS"
"""Environment variable with the number of threads that partsong may use."""


@contextmanager
def limit_threads(count: int) -> Iterator[None]:
    """Within this block partsong uses at most this many threads."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS]
        else:
            os.environ[THREADS] = before


def physical_memory() -> int | None:
    """Return the bytes of memory of this machine, None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None
