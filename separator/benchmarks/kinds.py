"""The kinds of experiments: training, latency, geometry, binaries."""

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from separator.attention import MECHANISMS
from separator.attention.registry import mechanism_options
from separator.benchmarks.evaluation import check_evaluations
from separator.benchmarks.experiments import Argument, Kind, arguments_of_function
from separator.benchmarks.fuss_task import FussTask
from separator.benchmarks.geometry import CHECKED, check_geometry
from separator.benchmarks.gw_runs import GALACTIC_BINARIES, setting_of, train_binaries
from separator.benchmarks.gw_training import BinarySetting
from separator.benchmarks.gw_waveforms import require_package
from separator.benchmarks.latency import RANDOM_TOKENS, measure_latency
from separator.benchmarks.methods import METHODS, NEEDS_CLAIM, mechanism_of, method_of
from separator.benchmarks.paper_fuss import FOLDER, train_paper_fuss
from separator.benchmarks.tasks import TASKS, TRAIN
from separator.benchmarks.trainer import Setting, train_synthetic
from separator.errors import SeparatorError


def check_training(task: str, method: str, arguments: Mapping[str, Any]) -> None:
    """Build what a cell trains and measures: what would fail later fails here."""
    mechanism = method_of(method).mechanism
    _check_options(method, mechanism, arguments["options"], _TRAINING_ARGUMENTS)
    evaluations = tuple(arguments.get("evaluations", ()))
    setting = Setting(**{key: value for key, value in arguments.items() if key != "evaluations"})
    setting.mixtures(TASKS[task], 1, 0, TRAIN)
    if mechanism is not None:
        check_evaluations(evaluations, setting.model(TASKS[task], method, 0))
    elif evaluations:
        raise SeparatorError(f"{method} has no slots to measure by {', '.join(evaluations)}; leave them out")


def check_binaries(task: str, method: str, arguments: Mapping[str, Any]) -> None:
    """Build what a cell trains: what would fail later fails here, before any waveform is made."""
    _check_options(method, mechanism_of(method), arguments["options"], _BINARY_ARGUMENTS)
    setting = setting_of(**arguments)
    require_package()
    setting.model(method, 0)


def _check_mechanism(task: str, method: str, arguments: Mapping[str, Any]) -> None:
    _check_options(method, method, arguments["options"], _TRAINING_ARGUMENTS)


def _check_options(
    method: str, mechanism: str | None, options: Mapping[str, Any], trainer: Mapping[str, Argument]
) -> None:
    named = {"n_slots", "d_model"}
    accepted = sorted(mechanism_options(mechanism).keys() - named) if mechanism is not None else []
    for name in options:
        if name not in accepted:
            raise SeparatorError(
                f"unknown setting {name!r}; the trainer's are {', '.join(trainer)}, "
                f"those of {method} {', '.join(accepted) or 'none'}"
            )


def _arguments_of(setting: type[Setting] | type[BinarySetting]) -> dict[str, Argument]:
    hints = typing.get_type_hints(setting)
    own = {f.name: Argument(f.default, hints[f.name]) for f in dataclasses.fields(setting)}
    del own["options"]
    return own


def _check_paper_fuss(task: str, method: str, arguments: Mapping[str, Any]) -> None:
    """Read one mixture of the data and build the model."""
    _check_options(method, mechanism_of(method), arguments["options"], _PAPER_FUSS_ARGUMENTS)
    values = {"folder": FOLDER, **arguments}
    kind = FussTask(values.pop("folder"))
    setting = Setting(**values)
    setting.mixtures(kind, 1, 0, TRAIN)
    setting.model(kind, method, 0)


_TRAINING_ARGUMENTS = {**_arguments_of(Setting), "evaluations": Argument((), Sequence[str])}
_BINARY_ARGUMENTS = _arguments_of(BinarySetting)
_PAPER_FUSS_ARGUMENTS = arguments_of_function(train_paper_fuss)
_TIMED = tuple(name for name in MECHANISMS if name not in NEEDS_CLAIM)
KINDS = {
    "training": Kind(train_synthetic, tuple(TASKS), tuple(METHODS), _TRAINING_ARGUMENTS, check_training),
    "latency": Kind(
        measure_latency,
        (RANDOM_TOKENS,),
        _TIMED,
        arguments_of_function(measure_latency),
        _check_mechanism,
        alone=True,
    ),
    "paper_fuss": Kind(
        train_paper_fuss,
        (FussTask.name,),
        tuple(name for name, method in METHODS.items() if method.mechanism is not None),
        _PAPER_FUSS_ARGUMENTS,
        _check_paper_fuss,
    ),
    "geometry": Kind(
        check_geometry,
        (RANDOM_TOKENS,),
        CHECKED,
        arguments_of_function(check_geometry),
        _check_mechanism,
    ),
    "binaries": Kind(
        train_binaries,
        (GALACTIC_BINARIES,),
        tuple(name for name in METHODS if METHODS[name].mechanism is not None),
        _BINARY_ARGUMENTS,
        check_binaries,
    ),
}
