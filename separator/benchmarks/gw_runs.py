"""The runs of the benchmark of gravitational waves: train, keep the weights, measure; one record a seed."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from separator.benchmarks.evaluation import DECIMALS
from separator.benchmarks.gw_scores import measure_binaries
from separator.benchmarks.gw_training import BinarySetting, Progress, fit, save_weights, weights_path
from separator.benchmarks.records import Record
from separator.errors import SeparatorError

GALACTIC_BINARIES = "galactic_binaries"


def setting_of(*, options: Mapping[str, Any] | None = None, **values: Any) -> BinarySetting:
    """Return the setting of an experiment's values.

    Raises:
        SeparatorError: a name or a value that it does not take.
    """
    known = [f.name for f in fields(BinarySetting)]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise SeparatorError(f"unknown setting {', '.join(unknown)}; choose of {', '.join(known)}")
    return BinarySetting(**values, options=dict(options or {}))


def train_binaries(
    task: str,
    method: str,
    *,
    seeds: Sequence[int],
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **values: Any,
) -> list[Record]:
    """Train and measure one model for every seed, and return one record each, ready for JSON.

    Args:
        task: "galactic_binaries".
        method: a name of `METHODS` that learns.
        seeds: start, mixtures (test: seed + 10,000) and noise of each model; the banks of waveforms are one.
        options: of the mechanism.
        progress: is told the share of the work that is done.
        values: fields of `BinarySetting`, such as epochs=60.

    Raises:
        SeparatorError: unknown task, method, option or setting, sizes that do not fit, or no extra `gw`.
    """
    if task != GALACTIC_BINARIES:
        raise SeparatorError(f"unknown task {task!r}; the only one is {GALACTIC_BINARIES}")
    setting = setting_of(options=options, **values)
    train, test = setting.banks()
    records = []
    for number, seed in enumerate(seeds):

        def tell(share: float, number: int = number) -> None:
            if progress is not None:
                progress((number + share) / len(seeds))

        trained = fit(method, setting, train, seed=seed, progress=tell)
        save_weights(trained.model, weights_path(method, setting, seed))
        mixtures = setting.test_mixtures(test, seed)
        found = measure_binaries(trained.model, setting.population.band, mixtures, seed)
        outcome = {
            "final_loss": round(trained.final_loss, DECIMALS),
            "train_seconds": round(trained.seconds, 3),
        }
        records.append({"task": task, "method": method, "seed": seed, **found, **outcome})
    return records
