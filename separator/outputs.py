"""Where the outputs that are scored come from: a model, files that anybody wrote, or a baseline.

Each kind is a picklable function of an `Example`, so that `evaluation.score_examples` can run it in other
processes. The mixture that models and baselines receive is the sum of the true sources.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from separator import baselines
from separator.audio import read_audio
from separator.errors import SeparatorError
from separator.fuss import AUDIO_SUFFIXES, RESIDUAL, Example
from separator.metrics import LEVEL_FLOOR_DB, is_active, level_db
from separator.script import counted

if TYPE_CHECKING:
    from separator.separate import Separator

Array = Tensor | npt.NDArray[Any]


class SlotOutputs(NamedTuple):
    """What a separator made of one mono mixture: every slot's output and which of them it calls sources."""

    estimates: Array
    """(slot, time), all slots, called or not."""
    existence: Array
    """(slot,), probability that the slot is a source."""
    min_existence: float
    """A slot is called a source when its existence is at least this."""
    residual: Array | None = None
    """(time), what no slot took; slots that are not called are not in it. Estimates + residual = mixture."""
    masks: Array | None = None
    """(slot, frequency, time) for the overlap metrics."""
    attn: Array | None = None
    """(slot, token) for the overlap metrics."""


OutputsFunction = Callable[[Example], SlotOutputs]


@dataclass(frozen=True)
class ModelOutputs:
    """A model's outputs: every slot's, and the model's own threshold of existence."""

    separator: "Separator"

    def __call__(self, example: Example) -> SlotOutputs:
        """Separate the sum of the sources."""
        mixture = example.sources.sum(0).numpy()
        out = self.separator.separate(mixture[None], example.sample_rate, min_existence=0.0)
        return SlotOutputs(
            out.estimates[:, 0],
            out.existence,
            self.separator.network.config.min_existence,
            residual=out.residual[0],
            masks=out.masks,
        )


@dataclass(frozen=True)
class FolderOutputs:
    """Outputs that lie in files: ``DIRECTORY/NAME/*.wav`` (or .flac) for the example ``NAME``.

    The names of the files do not matter, but for ``residual``, which is no source. An output is called a
    source when it sounds and its level is at least ``min_level_db`` re the mixture; all are scored.
    """

    directory: Path
    min_level_db: float = LEVEL_FLOOR_DB

    def __call__(self, example: Example) -> SlotOutputs:
        """Read the files of an example.

        Raises:
            SeparatorError: its folder is missing, or a file has another rate or length or is not mono.
        """
        folder = self.directory / example.name
        if not folder.is_dir():
            raise SeparatorError(f"{example.name} has no folder in {self.directory}; expected {folder}/*.wav")
        paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in AUDIO_SUFFIXES)
        sources = [path for path in paths if path.stem != RESIDUAL]
        residual = [_read_output(path, example) for path in paths if path.stem == RESIDUAL]
        estimates = np.zeros((len(sources), example.sources.shape[-1]), np.float32)
        for row, path in zip(estimates, sources, strict=True):
            row[:] = _read_output(path, example)
        waveforms = torch.from_numpy(estimates)
        loud = level_db(waveforms, example.sources.sum(0)) >= self.min_level_db
        called = (is_active(waveforms) & loud).float()
        return SlotOutputs(waveforms, called, 0.5, residual[0] if residual else None)


@dataclass(frozen=True)
class BaselineOutputs:
    """A method that ours is compared with, by its name in ``BASELINES``.

    ``mixture`` and ``hpss`` call all their outputs (1 and 2) sources; ``nmf``, ``irm`` and ``ibm`` are
    oracles with one output a true source.

    Raises:
        SeparatorError: the name is unknown.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in BASELINES:
            raise SeparatorError(f"unknown baselines {self.name}; there are {', '.join(BASELINES)}")

    def __call__(self, example: Example) -> SlotOutputs:
        """Run the method on the sum of the sources."""
        mixture = example.sources.sum(0)
        estimates = BASELINES[self.name](mixture, example.sources)
        return SlotOutputs(estimates, torch.ones(estimates.shape[0]), 0.5, mixture - estimates.sum(0))


BASELINES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mixture": lambda mixture, _: baselines.mixture_estimate(mixture),
    "hpss": lambda mixture, _: baselines.hpss_estimates(mixture),
    "nmf": baselines.nmf_estimates,
    "irm": baselines.ideal_ratio_estimates,
    "ibm": baselines.ideal_binary_estimates,
}


def _read_output(path: Path, example: Example) -> npt.NDArray[np.float32]:
    audio = read_audio(path)
    found = (audio.info.channels, audio.waveform.shape[-1], audio.sample_rate)
    wanted = (1, example.sources.shape[-1], example.sample_rate)
    if found != wanted:
        raise SeparatorError(
            f"{path} has {counted(found[0], 'channel')}, {counted(found[1], 'sample')} at {found[2]} Hz; "
            f"the example has {wanted[0]}, {wanted[1]} at {wanted[2]} Hz"
        )
    return np.asarray(audio.waveform[0], np.float32)
