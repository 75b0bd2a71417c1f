"""The OpenBLAS that SciPy brings, which multiplies matrices in the loops of `kernels`."""

from threading import Lock
from typing import Any

import scipy.linalg  # noqa: F401  loads it
from threadpoolctl import ThreadpoolController


class OneThread:
    """Keeps OpenBLAS to one thread while somebody is in it: for small products, more are slower.

    The limit is the process's; where threads use it at a time, it ends with the last of them.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._n_users = 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._n_users:
                self._limit = _openblas().limit(limits=1)
            self._n_users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._n_users -= 1
            if not self._n_users:
                self._limit.restore_original_limits()


one_blas_thread = OneThread()


def blas_kernels() -> str:
    """Return the processors OpenBLAS has chosen its kernels for, such as "SkylakeX"."""
    return ", ".join(sorted({str(library["architecture"]) for library in _openblas().info()})) or "none"


def _openblas() -> Any:
    return ThreadpoolController().select(internal_api="openblas")
