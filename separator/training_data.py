"""The batches of a training run: this process's rows of each, drawn ahead in further processes."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from separator.datasets import BankMixtures
from separator.distributed import World, rows_of
from separator.errors import SeparatorError
from separator.fuss_mixing import FussMixtures
from separator.training_recipe import Stage, TrainingConfig


class Mixtures(Protocol):
    """What a network is trained and validated on."""

    def batches(
        self, mixing: Any, *, batch_size: int, n_batches: int, seed: int, rows: slice
    ) -> Dataset[dict[str, Tensor]]:
        """Return ``rows`` of the training batches, by index."""

    def validation(self, mixing: Any, n: int) -> Iterator[Tensor]:
        """Yield the sources [K, time] of n mixtures; every call yields the same."""


MIXTURES: dict[str, Callable[[Path], "Mixtures"]] = {"soundscapes": BankMixtures, "fuss": FussMixtures}


def read_datasets(data: Mixtures, config: TrainingConfig, world: World) -> list[Dataset[dict[str, Tensor]]]:
    """Return this process's rows of the batches of each stage.

    Raises:
        SeparatorError: there are no data, or a batch cannot be shared.
    """
    datasets = []
    for stage in config.stages:
        rows = rows_of(stage.batch_size, world.rank, world.size)
        rows_of(rows.stop - rows.start, 0, config.accumulate)
        sizes = {"batch_size": stage.batch_size, "n_batches": stage.until, "seed": config.seed}
        datasets.append(data.batches(stage.mixing, **sizes, rows=rows))
    return datasets


def batches(
    datasets: Sequence[Dataset[dict[str, Tensor]]], config: TrainingConfig, start: int
) -> Iterator[tuple[Stage, list[dict[str, Tensor]]]]:
    """Yield the parts of the batches from step ``start`` on, drawn ahead in further processes."""
    begin = 0
    for stage, dataset in zip(config.stages, datasets, strict=True):
        steps = range(max(start, begin), stage.until)
        begin = stage.until
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=steps,
            num_workers=config.workers,
            prefetch_factor=8 if config.workers else None,
        )
        try:
            for batch in loader if len(steps) else ():
                size = len(batch["active"])
                parts = [rows_of(size, i, config.accumulate) for i in range(config.accumulate)]
                yield stage, [{name: values[part] for name, values in batch.items()} for part in parts]
        except SeparatorError as error:  # of a further process it comes with that one's traceback
            raise SeparatorError(str(error).rsplit("SeparatorError: ", 1)[-1].strip()) from error
