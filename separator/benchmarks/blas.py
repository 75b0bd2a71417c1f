"""The OpenBLAS that SciPy brings, which multiplies matrices in the loops of `kernels`."""

from collections.abc import Iterator
from contextlib import contextmanager

import scipy.linalg  # noqa: F401  loads it
from threadpoolctl import ThreadpoolController


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep OpenBLAS to one thread: of products this small, more only wait for one another."""
    with ThreadpoolController().select(internal_api="openblas").limit(limits=1):
        yield


def blas_kernels() -> str:
    """Return the processors OpenBLAS has chosen its kernels for, such as "SkylakeX"."""
    found = ThreadpoolController().select(internal_api="openblas").info()
    return ", ".join(sorted({str(library["architecture"]) for library in found})) or "none"
