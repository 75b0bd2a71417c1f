"""FUSS as the paper reads it: the first second of every example, three parameters a source.

    dominant frequency / Nyquist (without DC) and spectral centroid / Nyquist of the first 2,048 samples,
    min(RMS / 0.5, 1) of the whole signal

Examples of one to four sources that sound are kept. The data is fixed: a seed only sets model and batches.

Reference: Houba, NeurIPS 2026, appendix J.
"""

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from separator.benchmarks.tasks import TEST, Mixtures
from separator.errors import SeparatorError
from separator.fuss import read_fuss_examples
from separator.script import counted

SILENT_POWER = 1e-6  # mean square up to which a source is silent
SPECTRUM_SAMPLES = 2048
FULL_RMS = 0.5
SPLITS = {"train": "train", TEST: "eval"}


class FussTask:
    """The examples of a FUSS folder as a task of the benchmarks.

    Attributes:
        folder: holds the splits, as `read_fuss_examples` takes it.
    """

    name = "fuss"
    parameter_names = ("dominant_frequency", "spectral_centroid", "level")
    n_params = len(parameter_names)
    tokenizer_type = "fft"

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def mixtures(
        self, n: int, *, seed: int, split: str, n_samples: int, max_sources: int, amp_ratio: float | None
    ) -> Mixtures:
        """Return the first n mixtures of a split; neither seed nor ratio changes what is recorded.

        Raises:
            SeparatorError: the split has fewer, or an amplitude ratio is given.
        """
        if amp_ratio is not None:
            raise SeparatorError(f"{amp_ratio=} has no meaning for recordings; leave it out")
        return read_mixtures(self.folder, SPLITS[split], n, n_samples, max_sources)


@lru_cache(maxsize=4)
def read_mixtures(folder: Path, split: str, n: int, n_samples: int, max_sources: int) -> Mixtures:
    """Read the first n usable examples of a split, cut to `n_samples`.

    Raises:
        SeparatorError: there are fewer, or they are shorter.
    """
    signals, params, counts, components = [], [], [], []
    for example in read_fuss_examples(folder, split):
        if example.mixture.shape[0] < max(n_samples, SPECTRUM_SAMPLES):
            raise SeparatorError(
                f"{example.name} has {counted(example.mixture.shape[0], 'sample')}; "
                f"the task reads {n_samples=}"
            )
        sources = example.sources[:, :n_samples]
        sources = sources[sources.square().mean(1) > SILENT_POWER]
        if not 1 <= len(sources) <= max_sources:
            continue
        padded = torch.zeros(max_sources, n_samples)
        padded[: len(sources)] = sources
        signals.append(sources.sum(0))
        components.append(padded)
        counts.append(len(sources))
        described = torch.zeros(max_sources, FussTask.n_params)
        described[: len(sources)] = describe(sources)
        params.append(described)
        if len(signals) == n:
            break
    if len(signals) < n:
        raise SeparatorError(
            f"{split=} of {folder} has {len(signals)} mixtures of 1 to {max_sources} sources that sound in "
            f"their first {n_samples} samples, not {n}; pass fewer"
        )
    return Mixtures(torch.stack(signals), torch.stack(params), torch.tensor(counts), torch.stack(components))


def describe(sources: Tensor) -> Tensor:
    """Return the three parameters [..., 3] of sources [..., N]; see the module."""
    magnitude = torch.fft.rfft(sources[..., :SPECTRUM_SAMPLES]).abs()
    magnitude[..., 0] = 0
    nyquist = magnitude.shape[-1] - 1
    bins = torch.arange(nyquist + 1, dtype=magnitude.dtype)
    dominant = magnitude.argmax(-1) / nyquist
    centroid = (magnitude * bins).sum(-1) / magnitude.sum(-1).clamp(min=1e-12) / nyquist
    level = (sources.square().mean(-1).sqrt() / FULL_RMS).clamp(max=1)
    return torch.stack([dominant, centroid, level], -1)
