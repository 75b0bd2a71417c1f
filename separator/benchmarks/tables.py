"""Tables of records: mean and population standard deviation over the seeds, beside what was published."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from separator.benchmarks.experiments import Cell, Experiment, Kind
from separator.benchmarks.latency import AXES, scaling_exponents
from separator.benchmarks.records import Record, identity
from separator.report import format_table
from separator.script import counted

OUTSIDE = " †"
N_DEVIATIONS = 2.0
NONE = "-"
SUMMARY = (
    "peak_overlap",
    "cosine_overlap",
    "count_accuracy",
    "final_loss",
    "forward_ms",
    "training_ms",
)

Published = Mapping[str, Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Results:
    """The records of an experiment of one budget: the one with most cells, of these the largest."""

    records: list[Record]
    n_runs: int
    """How many runs the experiment has with the seeds that were run."""

    def of(self, **wanted: Any) -> list[Record]:
        """Those with such a task, method and settings."""
        return [record for record in self.records if all(_has(record, k, v) for k, v in wanted.items())]

    def caption(self) -> str:
        """Budget, seeds, hardware and minutes in a sentence."""
        if not self.records:
            return "Not run yet."
        first = self.records[0]
        seeds = len({record["seed"] for record in self.records})
        budget = ", ".join(f"{name} {value}" for name, value in first["budget"].items())
        clock, cpu = (sum(r[key] for r in self.records) / 60 for key in ("seconds", "cpu_seconds"))
        machines = {_machine(record) for record in self.records}
        dates = sorted({record["date"] for record in self.records})
        done = len(self.records)
        partly = "" if done == self.n_runs else f"**{done} of {counted(self.n_runs, 'run')}**; "
        took = f"{cpu:.1f} CPU minutes ({clock:.1f} by the clock) of {' and '.join(sorted(machines))}"
        when = " to ".join(dict.fromkeys((dates[0], dates[-1])))
        return f"{partly}{counted(seeds, 'seed')}; {budget}; {took}, {when}."


def select(experiment: Experiment, kind: Kind, records: Sequence[Record]) -> Results:
    """Pick the records that an experiment's tables are made of, those of its seeds alone.

    Another experiment of the same records may have more seeds; here all rows are of the same ones.
    """
    cells = experiment.cells(kind)
    wanted = {identity(run, without=["budget", "seed"]) for cell in cells for run in cell.runs()}
    budgets: dict[str, list[Record]] = {}
    for record in records:
        known = record["seed"] in experiment.seeds
        if known and identity(record, without=["budget", "seed"]) in wanted:
            budgets.setdefault(repr(sorted(record["budget"].items())), []).append(record)
    if not budgets:
        return Results([], 0)

    def coverage(found: Sequence[Record]) -> tuple[int, int, int]:
        cells = {identity(record, without=["budget", "seed"]) for record in found}
        return len(cells), found[0]["budget"].get("epochs", 0), len(found)

    best = max(budgets.values(), key=coverage)
    return Results(best, len(wanted) * len({record["seed"] for record in best}))


def summary_table(records: Sequence[Record]) -> str:
    """One row a cell: what there is of the usual measures."""
    cells: dict[str, list[Record]] = {}
    for record in records:
        cells.setdefault(identity(record, without=["seed"]), []).append(record)
    columns = [name for name in SUMMARY if any(name in record for record in records)]
    rows = []
    for found in cells.values():
        first = found[0]
        settings = " ".join(f"{key}={value}" for key, value in first["settings"].items())
        label = " ".join(filter(None, [first["task"], first["method"], settings]))
        minutes = sum(record["cpu_seconds"] for record in found) / 60
        values = [mean_and_deviation(found, name) for name in columns]
        rows.append([label, str(len(found)), *values, f"{minutes:.1f}"])
    return format_table(["cell", "seeds", *columns, "CPU minutes"], rows)


def comparison_table(
    results: Results,
    methods: Iterable[str],
    tasks: Iterable[str],
    *,
    metric: str = "peak_overlap",
    published: Published | None = None,
) -> str:
    """One row a method, one column a task; a published figure follows ours, a dagger marks a disagreement."""
    tasks = list(tasks)
    rows = []
    for method in methods:
        row = [method]
        for task in tasks:
            found = results.of(task=task, method=method)
            figure = (published or {}).get(method, {}).get(task)
            row.append(mean_and_deviation(found, metric, figure))
            if published is not None:
                row.append(_figure(figure))
        rows.append(row)
    heads = [name for task in tasks for name in ([task, "published"] if published is not None else [task])]
    return format_table([metric.replace("_", " "), *heads], rows)


def sweep_table(
    results: Results,
    rows: Sequence[tuple[str, Mapping[str, Any]]],
    columns: Mapping[str, str | Mapping[str, Any]],
) -> str:
    """One row a selection of records; a column is a metric, or a further selection of the peak overlap."""
    lines = []
    for label, wanted in rows:
        cells = []
        for column in columns.values():
            metric, more = (column, {}) if isinstance(column, str) else ("peak_overlap", column)
            cells.append(mean_and_deviation(results.of(**wanted, **more), metric))
        lines.append([label, *cells])
    return format_table(["", *columns], lines)


def latency_table(results: Results, cells: Sequence[Cell], defaults: Mapping[str, Any]) -> str:
    """One row a method: time at the smallest common point, and the exponents of its growth."""
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        found = results.of(method=method)
        points = [{axis: record["settings"].get(axis, defaults[axis]) for axis in AXES} for record in found]
        usual = [record for record in found if not record["settings"]]
        times = [mean_and_deviation(usual, name, digits=1) for name in ("forward_ms", "training_ms")]
        if len(found) < len([cell for cell in cells if cell.method == method]):
            rows.append([method, *times, *[NONE] * len(AXES)])
            continue
        exponents = scaling_exponents(points, [record["forward_ms"] for record in found])
        rows.append([method, *times, *(f"{exponents[axis]:.2f}" for axis in AXES)])
    heads = ["method", "forward, ms", "with gradients, ms", *(f"exponent of {axis}" for axis in AXES)]
    return format_table(heads, rows)


def geometry_table(results: Results) -> str:
    """One row a statement and method: the worst value of all runs, and the bound."""
    worst: dict[tuple[str, str], Mapping[str, Any]] = {}
    for record in results.records:
        for name, check in record["checks"].items():
            key = (name, record["method"])
            pick: Callable[..., Any] = min if "at_least" in check else max
            worst[key] = pick(worst.get(key, check), check, key=lambda item: item["worst"])
    rows = []
    for (name, method), check in sorted(worst.items()):
        bound = f"≥ {check['at_least']:.6g}" if "at_least" in check else f"≤ {check['at_most']:.6g}"
        rows.append([name, method, f"{check['worst']:.3g}", bound, "yes" if check["holds"] else "**no**"])
    return format_table(["statement", "method", "worst", "bound", "holds"], rows)


def mean_and_deviation(
    records: Sequence[Record], metric: str, published: Sequence[float] | None = None, *, digits: int = 2
) -> str:
    """Return "0.31 ± 0.02", of one seed "0.31"; marked where two published deviations do not reach it.

    Where only some records have a value, it says so: "0.31 ± 0.02 (2 of 3)".

    >>> mean_and_deviation([{"x": 0.1}, {"x": 0.3}], "x", [0.5, 0.1])
    '0.20 ± 0.10 †'
    """
    values = [record[metric] for record in records if record.get(metric) is not None]
    if not values:
        return NONE
    mean = float(np.mean(values))
    spread = f" ± {np.std(values):.{digits}f}" if len(values) > 1 else ""
    outside = published is not None and len(published) > 1
    outside = outside and abs(mean - published[0]) > N_DEVIATIONS * published[1]  # type: ignore[index]
    partly = f" ({len(values)} of {len(records)})" if len(values) < len(records) else ""
    return f"{mean:.{digits}f}{spread}{OUTSIDE * outside}{partly}"


def _figure(published: Sequence[float] | None) -> str:
    if published is None:
        return NONE
    return " ± ".join(f"{value:.2f}" for value in published) if len(published) > 1 else f"{published[0]:g}"


def _has(record: Record, key: str, value: Any) -> bool:
    """Whether a record has a value as its task or method, or among its settings; None: does not set it."""
    found = record[key] if key in ("task", "method", "seed") else record["settings"].get(key)
    return bool(found == value)


def _machine(record: Record) -> str:
    where = record["environment"]
    cores, threads = counted(where["cores"], "core"), counted(where["threads"], "thread")
    return f"{where['processor']} ({cores}, {threads} a run, torch {where['torch']})"
