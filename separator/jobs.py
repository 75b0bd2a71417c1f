"""Many files: one after another, over processes of this machine, or over a Dask cluster.

All three make the same calls of `Separator.separate_file`. Outcomes come in the order of the inputs, each as
soon as it and all before it are ready. A file that fails, or that takes its process down with it, does not
stop the others. An interrupt stops the processes at their next block of samples, so that they take their
unfinished files away.
"""

import atexit
import functools
import gc
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    as_completed,
    wait,
)
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from separator.cluster import connected
from separator.errors import SeparatorError
from separator.inputs import Input
from separator.naming import StemNames

if TYPE_CHECKING:
    from separator.results import FileSeparation
    from separator.separate import Separator

STOP_SECONDS = 10  # for processes to clean up after an interrupt
IDLE_SECONDS = 60  # after which a process ends, so that none outlives a command that was killed
# one thread a process, and threads that wait for work do not spin: that makes a run ten times slower on a
# busy machine
WORKER_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class Task:
    """What to do with every input."""

    name_or_dir: str
    device: str
    options: Mapping[str, Any]
    """Further arguments of `Separator.separate_file`, by name."""
    plot: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of one input: a result, or an error."""

    input: Input
    seconds: float = 0.0
    """That it took."""
    warnings: tuple[str, ...] = ()
    result: "FileSeparation | None" = None
    """Without its overview: thousands may wait for an earlier one."""
    picture: Path | None = None
    error: str = ""
    trace: str = ""
    """Of an error that nobody foresaw."""


class _Flag(Protocol):
    """Shared between processes."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...


_stop: _Flag | None = None  # of the process that this module is in, if it is one of a pool


def separate_files(
    inputs: Sequence[Input],
    task: Task,
    *,
    n_jobs: int = 1,
    scheduler: str | None = None,
    progress: Callable[[int, float], None] = lambda index, share: None,
) -> Generator[Outcome, None, None]:
    """Separate ``inputs`` and yield their outcomes in order.

    With ``n_jobs`` above 1 that many processes work on files of their own, one thread each; with
    ``scheduler``, an address such as ``tcp://host:8786``, the workers of a Dask cluster, which must see the
    same files. ``progress`` is told the share that is done of the input at an index.

    Raises:
        SeparatorError: the model, the device or the cluster cannot be used.
    """
    if scheduler is not None:
        with connected(scheduler) as client:
            yield from _in_order(_over(client.get_executor(pure=False), inputs, task, progress))
    elif n_jobs > 1 and len(inputs) > 1:
        yield from _in_order(_over_processes(inputs, task, min(n_jobs, len(inputs)), progress))
    else:
        separator = _load(task.name_or_dir, task.device)
        for index, item in enumerate(inputs):
            progress(index, 0.0)
            yield _separate(separator, item, task, functools.partial(progress, index))


def _separate(separator: "Separator", item: Input, task: Task, progress: Callable[[float], None]) -> Outcome:
    """Separate one file, whatever happens to it."""
    warnings: list[str] = []
    started = time.perf_counter()
    result: FileSeparation | None = None
    picture: Path | None = None
    error = trace = ""
    try:
        result = separator.separate_file(
            item.path,
            folder=item.folder,
            overwrite=item.overwrite,
            progress=progress,
            warn=warnings.append,
            **task.options,
        )
        if task.plot:
            picture = _save_picture(result, item, task)
        result = _without_overview(result)
    except SeparatorError as caught:
        result, error = None, str(caught)
    except Exception as caught:
        result, error, trace = None, f"{item.path}: {unforeseen(caught)}", traceback.format_exc()
    seconds = time.perf_counter() - started
    return Outcome(item, seconds, tuple(warnings), result, picture, error, trace)


def unforeseen(error: Exception) -> str:
    """One line for an error that no check has caught."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename or type(error).__name__}); check the file and the disk"
    return f"{type(error).__name__}: {error}; call again with --verbose to see where, and report it"


def _save_picture(result: "FileSeparation", item: Input, task: Task) -> Path:
    """Save the picture beside the stems."""
    from separator.plot import save_picture

    options = {name: task.options[name] for name in ("output_dir", "filename") if name in task.options}
    path = StemNames(item.path, **options, folder=item.folder).picture
    save_picture(result.overview, path)
    return path


def _without_overview(result: "FileSeparation") -> "FileSeparation":
    """The result without what only a picture needs."""
    empty = result.overview.mixture[:0, :0]
    overview = replace(result.overview, mixture=empty, slots=empty[None], evidence=None)
    return replace(result, overview=overview)


def _work(item: Input, task: Task) -> Outcome:
    """What a process of a pool does with an input."""

    def stop_if_told(share: float) -> None:
        if _stop is not None and _stop.is_set():
            raise KeyboardInterrupt

    stop_if_told(0.0)
    return _separate(_loaded(task.name_or_dir, task.device), item, task, stop_if_told)


@functools.lru_cache(maxsize=1)
def _loaded(name_or_dir: str, device: str) -> "Separator":
    """The model, once a process."""
    return _load(name_or_dir, device)


def _load(name_or_dir: str, device: str) -> "Separator":
    """The model, and torch with it."""
    os.environ.setdefault("OMP_WAIT_POLICY", WORKER_ENVIRONMENT["OMP_WAIT_POLICY"])
    atexit.register(gc.freeze)  # or Python looks for garbage in all of torch once more before it ends
    from separator.separate import Separator

    return Separator.load(name_or_dir, device)


def _start_process(stop: _Flag) -> None:
    """Set up a process of a pool: it stops when told, by nothing else, and reads no input."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _in_order(completed: Generator[tuple[int, Outcome], None, None]) -> Generator[Outcome, None, None]:
    """Outcomes by their index, each as soon as those before it are there."""
    ready: dict[int, Outcome] = {}
    shown = 0
    with closing(completed):
        for index, outcome in completed:
            ready[index] = outcome
            while shown in ready:
                yield ready.pop(shown)
                shown += 1


def _over_processes(
    inputs: Sequence[Input], task: Task, n_jobs: int, progress: Callable[[int, float], None]
) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes as they become ready.

    When a process dies, all that were at work or next are lost. Each of their files then gets a process of
    its own, which tells whose fault it was.
    """
    todo = deque(enumerate(inputs))
    while todo:
        suspects: list[tuple[int, Input]] = []
        with _processes(n_jobs) as submit:
            running: dict[Future[Outcome], tuple[int, Input]] = {}
            while running or (todo and not suspects):
                while todo and not suspects and len(running) < 2 * n_jobs:  # none waits for its next file
                    try:
                        running[submit(_work, todo[0][1], task)] = todo[0]
                        todo.popleft()
                    except BrokenExecutor:
                        suspects.append(todo.popleft())
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    index, item = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenExecutor:
                        suspects.append((index, item))
                    else:
                        progress(index, 1.0)
                        yield index, outcome
        for index, item in suspects:
            outcome = _alone(item, task)
            progress(index, 1.0)
            yield index, outcome


def _alone(item: Input, task: Task) -> Outcome:
    """Separate a file in a process that may die of it."""
    with _processes(1) as submit:
        try:
            return submit(_work, item, task).result()
        except BrokenExecutor as error:
            how = " ".join(str(error).split("exit codes of the workers are")[-1].split())
            return Outcome(
                item,
                error=f"{item.path} took its process down ({how}); free memory, or separate it with --jobs 1",
            )


@contextmanager
def _processes(n_jobs: int) -> Iterator[Callable[..., Future[Outcome]]]:
    """A pool; leaving it by an exception stops what is at work and lets it clean up."""
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.backend import get_context

    stop = get_context("loky").Event()
    executor = ProcessPoolExecutor(
        n_jobs,
        initializer=_start_process,
        initargs=(stop,),
        env=WORKER_ENVIRONMENT,
        timeout=IDLE_SECONDS,
    )
    at_work: set[Future[Outcome]] = set()

    def submit(*call: Any) -> Future[Outcome]:
        future: Future[Outcome] = executor.submit(*call)
        at_work.add(future)
        future.add_done_callback(at_work.discard)
        return future

    try:
        yield submit
    except BaseException:
        stop.set()
        wait(set(at_work), timeout=STOP_SECONDS)
        raise
    finally:
        executor.shutdown(wait=True, kill_workers=bool(at_work))


def _over(
    cluster: Executor, inputs: Sequence[Input], task: Task, progress: Callable[[int, float], None]
) -> Generator[tuple[int, Outcome], None, None]:
    """Outcomes from a cluster as they become ready.

    Raises:
        SeparatorError: its workers cannot load the model, lack this package, or the cluster is lost.
    """
    running = {cluster.submit(_work, item, task): (index, item) for index, item in enumerate(inputs)}
    for future in as_completed(running):
        index, item = running[future]
        try:
            outcome = future.result()
        except SeparatorError:
            raise
        except CancelledError as error:
            raise SeparatorError("the connection to the scheduler was lost; call again") from error
        except ImportError as error:
            raise SeparatorError(f"a worker of the cluster cannot import what it needs ({error})") from error
        except Exception as error:  # such as a worker that died of this file more than once
            outcome = Outcome(item, error=f"{item.path}: {unforeseen(error)}", trace=traceback.format_exc())
        progress(index, 1.0)
        yield index, outcome
