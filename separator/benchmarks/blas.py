"""The OpenBLAS that SciPy brings, which multiplies matrices in the loops of `kernels`."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import scipy.linalg  # noqa: F401  loads it
from threadpoolctl import ThreadpoolController

_lock = Lock()
_limits: list[Any] = []  # one for all that run at a time
_n_users = 0


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep OpenBLAS to one thread: of products this small, more only wait for one another.

    The limit is the process's; where threads use it at a time, it ends with the last of them.
    """
    global _n_users
    with _lock:
        if not _n_users:
            _limits.append(ThreadpoolController().select(internal_api="openblas").limit(limits=1))
        _n_users += 1
    try:
        yield
    finally:
        with _lock:
            _n_users -= 1
            if not _n_users:
                _limits.pop().restore_original_limits()


def blas_kernels() -> str:
    """Return the processors OpenBLAS has chosen its kernels for, such as "SkylakeX"."""
    found = ThreadpoolController().select(internal_api="openblas").info()
    return ", ".join(sorted({str(library["architecture"]) for library in found})) or "none"
