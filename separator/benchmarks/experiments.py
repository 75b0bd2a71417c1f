"""Experiments as TOML files: what is run on what, checked whole before anything runs.

    kind = "training"                     # one of KINDS; this is the default
    records = "table1"                    # whose records it shares; by default its own name
    tasks = ["sinusoids"]
    methods = ["vanilla", "evidence_linear"]
    seeds = [0, 1, 2]
    budget = { epochs = 200, n_train = 5000, n_test = 1000 }
    settings = { n_slots = 5 }            # the same for all cells
    [[grid]]                              # all combinations of these; of several grids, the union
    gamma = [1.0, 3.0]
    tau = [0.1, 0.3]

The keys of `budget`, `settings` and `grid` are the keyword arguments of the kind's function; a training's
other settings are options of the mechanism.
"""

import inspect
import itertools
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from separator.benchmarks.records import Record
from separator.errors import SeparatorError

BUDGET = ("epochs", "n_train", "n_test", "batch_size", "learning_rate", "repeats", "n_inputs")
_KEYS = ("kind", "records", "tasks", "methods", "seeds", "budget", "settings", "grid")
_CALL = ("task", "method", "seeds", "progress", "options")

Check = Callable[[str, str, Mapping[str, Any]], None]


class Argument(NamedTuple):
    """A keyword argument that an experiment may set."""

    default: Any
    hint: Any


@dataclass(frozen=True)
class Kind:
    """A way to make records: a function of (task, method, *, seeds, progress, ...), and what it accepts."""

    run: Callable[..., list[Record]]
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    arguments: Mapping[str, Argument]
    """What `run` names; other settings go to its `options`, the mechanism's."""
    check: Check | None = None
    """Raises SeparatorError for a task, method and keyword arguments that would fail."""
    alone: bool = False
    """Whether nothing else may run beside it, because it measures time."""


def arguments_of_function(function: Callable[..., Any]) -> dict[str, Argument]:
    """The arguments of a function that an experiment may set."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    return {
        name: Argument(parameter.default, hints[name])
        for name, parameter in parameters.items()
        if name not in _CALL
    }


@dataclass(frozen=True)
class Cell:
    """One cell of a table: all its seeds run together."""

    kind: str
    task: str
    method: str
    seeds: tuple[int, ...]
    budget: Mapping[str, Any]
    settings: Mapping[str, Any]

    def runs(self) -> list[Record]:
        """The identity of the record of each seed."""
        shared = {name: getattr(self, name) for name in ("kind", "task", "method", "settings", "budget")}
        return [{**shared, "seed": seed} for seed in self.seeds]

    def __str__(self) -> str:
        """The cell as it is named in messages."""
        return f"{self.task} {self.method}"


@dataclass(frozen=True)
class Experiment:
    """A checked experiment."""

    name: str
    kind: str
    records: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    budget: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    grid: tuple[Mapping[str, Sequence[Any]], ...] = ({},)

    def cells(self, kind: Kind) -> list[Cell]:
        """All cells, each once: their budget is whole, their settings are those that are not the default."""
        defaults = {key: argument.default for key, argument in kind.arguments.items()}
        budget = {key: value for key, value in {**defaults, **self.budget}.items() if key in BUDGET}
        cells = {}
        for task, method, point in itertools.product(self.tasks, self.methods, self._points()):
            values = {**self.settings, **point}
            settings = {k: v for k, v in values.items() if k not in defaults or v != defaults[k]}
            cell = Cell(self.kind, task, method, self.seeds, budget, settings)
            cells[repr(cell)] = cell
        return list(cells.values())

    def _points(self) -> Iterator[dict[str, Any]]:
        for grid in self.grid:
            for values in itertools.product(*grid.values()):
                yield dict(zip(grid, values, strict=True))


def read_experiment(path: str | Path, kinds: Mapping[str, Kind], **overrides: Any) -> Experiment:
    """Read and check an experiment, cell by cell.

    `overrides` replace what the file says: tasks, methods, seeds, or a key of the budget.

    Raises:
        SeparatorError: the file cannot be read, or names something that does not exist or would fail.
    """
    path = Path(path)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SeparatorError(f"{path} cannot be read as an experiment: {error}") from error
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return _checked(path.stem, values, kinds, given)
    except SeparatorError as error:
        raise SeparatorError(f"{path}: {error}") from error


def _checked(
    name: str, values: dict[str, Any], kinds: Mapping[str, Kind], overrides: Mapping[str, Any]
) -> Experiment:
    _check_names("key", values, _KEYS)
    kind_name = values.get("kind", "training")
    _check_names("kind", [kind_name], kinds)
    kind = kinds[kind_name]
    values = {**values, **{key: value for key, value in overrides.items() if key not in BUDGET}}
    budget = {**_table(values, "budget"), **{k: v for k, v in overrides.items() if k in BUDGET}}
    experiment = Experiment(
        name,
        kind_name,
        _word(values.get("records", name)),
        _names(values, "tasks", kind.tasks),
        _names(values, "methods", kind.methods),
        _seeds(values),
        budget,
        _table(values, "settings"),
        _grids(values),
    )
    _check_names("budget key", budget, [key for key in BUDGET if key in kind.arguments])
    for cell in experiment.cells(kind):
        check_cell(cell, kind)
    return experiment


def check_cell(cell: Cell, kind: Kind) -> None:
    """Raise SeparatorError unless the kind's function accepts the cell's values."""
    for key, value in {**cell.budget, **cell.settings}.items():
        if key in kind.arguments and value != kind.arguments[key].default:
            _check_value(key, value, kind.arguments[key].hint)
    if kind.check is not None:
        kind.check(cell.task, cell.method, call_of(cell, kind))


def call_of(cell: Cell, kind: Kind) -> dict[str, Any]:
    """Return the keyword arguments of `kind.run` for a cell, without seeds and progress."""
    named = {key: value for key, value in cell.settings.items() if key in kind.arguments}
    options = {key: value for key, value in cell.settings.items() if key not in kind.arguments}
    return {**cell.budget, **named, "options": options}


def _check_names(what: str, names: Any, accepted: Any) -> None:
    for name in names:
        if name not in accepted:
            raise SeparatorError(f"unknown {what} {name!r}; accepted are {', '.join(accepted)}")


def _table(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    table = values.get(key, {})
    if not isinstance(table, dict):
        raise SeparatorError(f"{key}={table!r} is not a table; write a [{key}] section")
    return table


def _grids(values: Mapping[str, Any]) -> tuple[Mapping[str, Sequence[Any]], ...]:
    grids = values.get("grid", [{}])
    if not isinstance(grids, list) or not grids or not all(isinstance(grid, dict) for grid in grids):
        raise SeparatorError(f"grid={grids!r} is not a list of tables; write [[grid]] sections")
    for grid in grids:
        for key, choices in grid.items():
            if not isinstance(choices, list) or not choices:
                raise SeparatorError(f"grid {key}={choices!r} is not a list of values; write [{choices!r}]")
            if key in BUDGET:
                raise SeparatorError(f"grid {key}={choices!r} varies the budget, which all cells share")
    return tuple(grids)


def _names(values: Mapping[str, Any], key: str, accepted: Sequence[str]) -> tuple[str, ...]:
    names = values.get(key)
    if not isinstance(names, list | tuple) or not names:
        raise SeparatorError(f"{key}={names!r} is not a list of names; choose of {', '.join(accepted)}")
    _check_names(key.removesuffix("s"), names, accepted)
    return tuple(dict.fromkeys(names))


def _seeds(values: Mapping[str, Any]) -> tuple[int, ...]:
    seeds = values.get("seeds")
    whole = isinstance(seeds, list | tuple) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds:
        raise SeparatorError(f"{seeds=} are not whole numbers from 0 up; write [0, 1, 2, 3, 4]")
    return tuple(dict.fromkeys(seeds))


def _word(value: Any) -> str:
    if not isinstance(value, str) or not value.replace("_", "").isalnum():
        raise SeparatorError(f"records={value!r} is not the name of an experiment, as table1 is")
    return value


def _check_value(key: str, value: Any, hint: Any) -> None:
    """Check a value against the annotation of an argument; numbers must be positive."""
    union = isinstance(hint, types.UnionType)
    kinds = [kind for kind in (typing.get_args(hint) if union else [hint]) if kind is not type(None)]
    if value is None and len(kinds) < len(typing.get_args(hint)):
        return
    for kind, wanted in ((int, "a whole number above 0"), (float, "a number above 0")):
        if kind in kinds:
            number = isinstance(value, int | kind) and not isinstance(value, bool)
            if not number or not 0 < value < float("inf"):
                raise SeparatorError(f"{key}={value!r} is not {wanted}")
            return
    if str in kinds:
        if not isinstance(value, str):
            raise SeparatorError(f"{key}={value!r} is not a text")
        return
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise SeparatorError(f"{key}={value!r} is not a list of names")
