"""Training mixtures of a FUSS split: its examples in turn, their sources remixed on the fly.

An epoch takes every example once, in an order drawn from ``(seed, epoch)``. Row r of batch n is the example
at place ``n * batch_size + r`` of all epochs, however many processes share the rows, so that none is seen
twice or left out. What is drawn for a row comes from ``(seed, n, r)``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from scipy import signal
from torch import Tensor
from torch.utils.data import Dataset

from separator.augmentation import SAMPLE_RATE, Samples, room_response
from separator.errors import SeparatorError
from separator.fuss import FussExamples, read_fuss_examples

TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class RemixConfig:
    """How mixtures are made of the examples of a split."""

    AT_LEAST: ClassVar[dict[str, float]] = {
        "seconds": 0.1,
        "max_sources": 1,
        "exchange": 0,
        "gain_db": 0,
        "reverberant": 0,
    }
    AT_MOST: ClassVar[dict[str, float]] = {"exchange": 1, "reverberant": 1}

    seconds: float = 10.0
    """Of the stretch that is cut out, at a random place."""
    max_sources: int = 4
    exchange: float = 0.5
    """Probability of a source to be exchanged for one of another example: the first, which is the background,
    for a first one, the others for one of the others."""
    gain_db: float = 5.0
    """Greatest change of a source's level, up or down."""
    reverberant: float = 0.0
    """Share of the sources that an imagined room is added to."""


class FussMixtures:
    """The mixtures of a FUSS folder, for the trainer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def batches(
        self, mixing: RemixConfig, *, batch_size: int, n_batches: int, seed: int, rows: slice
    ) -> "RemixedExamples":
        """Return ``rows`` of the training batches, by index."""
        examples = read_fuss_examples(self._directory, TRAIN)
        return RemixedExamples(
            examples, mixing, batch_size=batch_size, n_batches=n_batches, seed=seed, rows=rows
        )

    def validation(self, mixing: RemixConfig, n: int) -> Iterator[Tensor]:
        """Yield the sources [K, time] of at most n validation mixtures, spread over the split, uncut."""
        examples = read_fuss_examples(self._directory, VALIDATION)
        for index in np.linspace(0, len(examples) - 1, min(n, len(examples))).round().astype(int):
            sources = examples[int(index)].sources
            if len(sources):
                yield sources


class RemixedExamples(Dataset[dict[str, Tensor]]):
    """Training batches by index: ``sources`` [B, K, time], their sum ``mixture``, and ``active`` [B, K]."""

    def __init__(
        self,
        examples: FussExamples,
        config: RemixConfig,
        *,
        batch_size: int,
        n_batches: int,
        seed: int,
        rows: slice,
    ) -> None:
        self.examples = examples
        self.config = config
        self.batch_size = batch_size
        self.n_batches = n_batches
        self.seed = seed
        self.rows = range(batch_size)[rows]

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        drawn = [self._draw(index, row) for row in self.rows]
        sources = torch.from_numpy(np.stack(drawn))
        return {"sources": sources, "mixture": sources.sum(1), "active": sources.square().sum(-1) > 0}

    def example_of(self, index: int, row: int) -> int:
        """Return which example a row of a batch is."""
        epoch, place = divmod(index * self.batch_size + row, len(self.examples))
        return int(_order(self.seed, epoch, len(self.examples))[place])

    def _draw(self, index: int, row: int) -> Samples:
        """Return the sources [max_sources, time] of a row, zero where there is none."""
        config, rng = self.config, np.random.default_rng([self.seed, index, row])
        length = round(config.seconds * SAMPLE_RATE)
        sources = np.zeros((config.max_sources, length), np.float32)
        chosen = self._read(self.example_of(index, row))
        for k, source in enumerate(chosen[: config.max_sources]):
            if rng.random() < config.exchange:
                other = self._read(int(rng.integers(len(self.examples))))
                same_role = other[:1] if k == 0 else other[1:]
                source = same_role[rng.integers(len(same_role))] if len(same_role) else source
            start = int(rng.integers(0, max(1, len(source) - length + 1)))
            cut = source[start : start + length]
            if rng.random() < config.reverberant:
                cut = signal.fftconvolve(cut, room_response(rng))[: len(cut)].astype(np.float32)
            gain = 10 ** (float(rng.uniform(-config.gain_db, config.gain_db)) / 20)
            sources[k, : len(cut)] = cut * np.float32(gain)
        if not sources.any():  # the stretch may lie where nothing sounds
            sources[0] = chosen[0][:length] if len(chosen) else 0
        return sources

    def _read(self, index: int) -> npt.NDArray[np.float32]:
        example = self.examples[index]
        if example.sample_rate != SAMPLE_RATE:
            raise SeparatorError(
                f"{example.name} has {example.sample_rate} Hz; the network is trained at {SAMPLE_RATE} Hz"
            )
        return np.asarray(example.sources.numpy(), dtype=np.float32)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, n_examples: int) -> npt.NDArray[np.int64]:
    """Return the examples of an epoch in turn."""
    return np.random.default_rng([seed, epoch]).permutation(n_examples)
