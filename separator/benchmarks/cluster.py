"""joblib's jobs on the workers of a Dask scheduler; importing this needs the extra `cluster`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distributed import KilledWorker
from joblib._dask import DaskDistributedBackend

from separator.cluster import connected
from separator.errors import SeparatorError


@dataclass(frozen=True)
class _GivenUp:
    """What takes the place of a result that Dask gave up."""

    error: BaseException


class ClusterBackend(DaskDistributedBackend):  # type: ignore[misc]
    """joblib's own, without its two traps: one worker, and a job that Dask gives up."""

    def effective_n_jobs(self, n_jobs: int) -> int:
        """Return how many workers there are, but never one: joblib would run the jobs itself."""
        n_workers: int = super().effective_n_jobs(n_jobs)
        return max(2, n_workers)  # all jobs are sent at once, however many there are

    def submit(self, func: Any, callback: Callable[[Any], Any]) -> Any:
        """Submit a job, whose callback hears of its failure too."""

        def tell_failure(future: Any) -> None:
            if (error := future.exception()) is not None:
                callback(_GivenUp(error))

        future = super().submit(func, callback)
        future.add_done_callback(tell_failure)
        return future

    def retrieve_result_callback(self, out: Any) -> Any:
        """Return the result of a job, or raise its error."""
        if isinstance(out, _GivenUp):
            raise out.error
        return super().retrieve_result_callback(out)


@contextmanager
def cluster_backend(scheduler: str) -> Iterator[ClusterBackend]:
    """Connect joblib to a scheduler for as long as the context lasts.

    Raises:
        SeparatorError: nobody answers there, or the workers died.
    """
    with connected(scheduler) as client:
        try:
            yield ClusterBackend(client=client)
        except (KilledWorker, TimeoutError) as error:
            raise SeparatorError(f"the workers of {scheduler} died, or there are none: {error}") from error
