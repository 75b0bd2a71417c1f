"""The connection to a Dask cluster, for all who send it work; needs the extra `cluster`."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from separator.errors import SeparatorError

if TYPE_CHECKING:
    from distributed import Client

CONNECT_SECONDS = 10  # within which a scheduler must answer


def require_dask() -> None:
    """Import Dask.

    Raises:
        SeparatorError: it is not installed.
    """
    try:
        import distributed  # noqa: F401
    except ImportError as error:
        raise SeparatorError(
            f"a scheduler needs Dask, which is not installed ({error}); pip install 'separator[cluster]'"
        ) from error


@contextmanager
def connected(scheduler: str) -> Iterator["Client"]:
    """Connect to a scheduler, by its address, for as long as the context lasts.

    Raises:
        SeparatorError: Dask is not installed, or no scheduler answers.
    """
    require_dask()
    from distributed import Client

    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    try:
        client = Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError, RuntimeError) as error:  # a time-out is an OSError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SeparatorError(
            f"no Dask scheduler answers at {scheduler} ({reason}); pass its address, as tcp://host:8786"
        ) from error
    with client:
        yield client
