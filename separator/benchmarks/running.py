"""Runs an experiment: cells as jobs of joblib, in processes here or on a Dask cluster, resumable.

Only the calling process writes records, each job's as soon as it is done. A worker that dies takes no
finished record with it; its cell is run again.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import joblib
import torch
from joblib.externals.loky import BrokenProcessPool

from separator.benchmarks.experiments import Cell, Experiment, Kind, call_of
from separator.benchmarks.records import Record, add_records, identity, read_records
from separator.cluster import require_dask
from separator.errors import SeparatorError
from separator.script import counted
from separator.training import environment

MAX_DEATHS = 3
LINE_SECONDS = 15.0
ENVIRONMENT = ("torch", "python", "processor", "threads")

Share = Callable[[float], None]


def run_experiment(
    experiment: Experiment,
    kind: Kind,
    directory: str | Path,
    *,
    jobs: int = 1,
    scheduler: str | None = None,
    threads: int = 1,
    stream: TextIO | None = None,
) -> list[Record]:
    """Run what `directory` has no record of, and return the experiment's records, cell by cell.

    Args:
        experiment: what to run; its records go to `directory`/`experiment.records`.jsonl.
        kind: how.
        directory: where records are kept.
        jobs: how many cells at a time on this machine, each in a process of its own; 1 runs them here.
        scheduler: address of a Dask scheduler whose workers run the cells instead.
        threads: of torch, for each cell.
        stream: where progress is written to; none by default.

    Raises:
        SeparatorError: the records file is not one, the cluster is not there, or workers died `MAX_DEATHS`
            times in a row without finishing a cell.
    """
    path = Path(directory) / f"{experiment.records}.jsonl"
    cells = experiment.cells(kind)
    known = read_records(path)
    todo = missing(cells, known)
    progress = Progress(cells, todo, stream)
    progress.say(*other_budgets(cells, known, path.name))
    if kind.alone and (jobs > 1 or scheduler is not None):
        progress.say(f"{experiment.kind} is timed: its cells run here, one at a time")
        jobs, scheduler = 1, None
    deaths = 0
    while todo:
        try:
            for records in _finished(todo, kind, jobs, scheduler, threads, progress):
                add_records(path, records)
                progress.add(len(records))
                deaths = 0
        except BrokenProcessPool as error:
            deaths += 1
            if deaths == MAX_DEATHS:
                raise SeparatorError(
                    f"worker processes died {deaths} times in a row ({error}); pass fewer than {jobs=}"
                ) from error
            progress.say("a worker process died; its cells start again")
        todo = missing(cells, read_records(path))
    done = {identity(record): record for record in read_records(path)}
    return [done[identity(run)] for cell in cells for run in cell.runs()]


def missing(cells: Sequence[Cell], records: Sequence[Record]) -> list[Cell]:
    """The cells, cut down to the seeds that have no record."""
    done = {identity(record) for record in records}
    rest = []
    for cell in cells:
        runs = zip(cell.seeds, cell.runs(), strict=True)
        if seeds := tuple(seed for seed, run in runs if identity(run) not in done):
            rest.append(replace(cell, seeds=seeds))
    return rest


def other_budgets(cells: Sequence[Cell], records: Sequence[Record], name: str) -> list[str]:
    """Say which records of the same runs were made with another budget, and are not used."""
    wanted = {identity(run, without=["budget"]): run["budget"] for cell in cells for run in cell.runs()}
    counts: dict[str, int] = {}
    for record in records:
        budget = wanted.get(identity(record, without=["budget"]))
        if budget is not None and identity(record) != identity({**record, "budget": budget}):
            keys = [key for key in record["budget"] if record["budget"][key] != budget.get(key)]
            words = ", ".join(f"{key} {record['budget'][key]}, not {budget.get(key)}" for key in keys)
            counts[words] = counts.get(words, 0) + 1
    return [
        f"{counted(count, 'record')} of {name} with another budget ({words}): kept, not used"
        for words, count in counts.items()
    ]


def run_cell(cell: Cell, kind: Kind, threads: int, progress: Share | None = None) -> list[Record]:
    """Run a cell; its records say what ran where, and for how long: a seed's equal share of the whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        start, cpu_start = time.perf_counter(), time.process_time()
        results = kind.run(cell.task, cell.method, seeds=cell.seeds, progress=progress, **call_of(cell, kind))
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        where = environment()
        facts = {
            "seconds": round(seconds / len(cell.seeds), 3),
            "cpu_seconds": round(cpu_seconds / len(cell.seeds), 3),
            "seeds_together": len(cell.seeds),
            "date": time.strftime("%Y-%m-%d"),
            "environment": {"cores": os.cpu_count(), **{name: where[name] for name in ENVIRONMENT}},
        }
    finally:
        torch.set_num_threads(before)
    said = {*cell.budget, *cell.settings, "options", *ENVIRONMENT}
    return [
        {**run, **_finite({k: v for k, v in result.items() if k not in said}), **facts}
        for run, result in zip(cell.runs(), results, strict=True)
    ]


class Progress:
    """Lines on how much is done and how long the rest takes, by the time the done part took.

    A terminal sees one line that changes; elsewhere a line is written every `LINE_SECONDS`.
    """

    def __init__(self, cells: Sequence[Cell], todo: Sequence[Cell], stream: TextIO | None) -> None:
        self.stream = stream
        self.n_runs = sum(len(cell.seeds) for cell in cells)
        self.n_before = self.n_runs - sum(len(cell.seeds) for cell in todo)
        self.n_done = self.n_before
        self.start = self.last = time.monotonic()
        if self.n_before:
            self.say(f"records of {self.n_before} of {counted(self.n_runs, 'run')} are there already")

    def add(self, n_runs: int) -> None:
        """Count finished runs."""
        self.n_done += n_runs
        self._write(self.n_done, "")

    def of(self, cell: Cell) -> Share:
        """Return what a cell that runs in this process tells its share to."""

        def tell(share: float) -> None:
            if time.monotonic() - self.last >= (0.2 if self._terminal() else LINE_SECONDS):
                self._write(self.n_done + share * len(cell.seeds), f", now {cell}")

        return tell

    def say(self, *lines: str) -> None:
        """Write lines that stay."""
        if self.stream is not None:
            self.stream.writelines(f"{line}\n" for line in lines)
            self.stream.flush()

    def _terminal(self) -> bool:
        return self.stream is not None and self.stream.isatty()

    def _write(self, n_done: float, doing: str) -> None:
        if self.stream is None:
            return
        self.last = time.monotonic()
        share = n_done / self.n_runs
        left = (self.last - self.start) / max(n_done - self.n_before, 1e-9) * (self.n_runs - n_done)
        line = (
            f"{self.n_done} of {counted(self.n_runs, 'run')}, {100 * share:.0f} %, {_clock(left)} left{doing}"
        )
        open_end = self._terminal() and self.n_done < self.n_runs
        self.stream.write(f"\r\x1b[K{line}" if self._terminal() else line)
        self.stream.write("" if open_end else "\n")
        self.stream.flush()


def _finished(
    cells: Sequence[Cell],
    kind: Kind,
    jobs: int,
    scheduler: str | None,
    threads: int,
    progress: Progress,
) -> Iterator[list[Record]]:
    """The records of each cell as it is done, in any order."""
    if scheduler is None and jobs == 1:
        for cell in cells:
            yield run_cell(cell, kind, threads, progress.of(cell))
        return
    with ExitStack() as stack:
        if scheduler is None:
            stack.enter_context(joblib.parallel_config("loky", inner_max_num_threads=threads))
        else:
            stack.enter_context(joblib.parallel_config(stack.enter_context(_cluster(scheduler))))
        n_jobs = jobs if scheduler is None else -1
        parallel = joblib.Parallel(n_jobs, return_as="generator_unordered", pre_dispatch="all", batch_size=1)
        yield from parallel(joblib.delayed(run_cell)(cell, kind, threads) for cell in cells)


def _cluster(scheduler: str) -> AbstractContextManager[Any]:
    """A backend of joblib on the workers of a Dask scheduler."""
    require_dask()
    from separator.benchmarks.cluster import cluster_backend

    return cluster_backend(scheduler)


def _finite(value: Any) -> Any:
    """NaN and infinity, which JSON has no word for, become None."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _clock(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
