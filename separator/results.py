"""What is said about a separated file: numbers, names and a picture's data, no tensors.

Nothing here needs torch, so that a process which only collects results of others starts at once.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from separator.writing import Stem

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Overview:
    """Power of the mixture and of every slot in the model's view, thinned out in time for a picture."""

    mixture: FloatArray
    """(frequency, column)."""
    slots: FloatArray
    """(slot, frequency, column)."""
    evidence: FloatArray | None
    """(slot + 1, band, column): share nobody has explained before the first and after every slot."""
    seconds: float
    sample_rate: int
    """Of the model's view, Hz."""


@dataclass(frozen=True)
class FileSeparation:
    """A file taken apart on disk."""

    input: Path
    sample_rate: int
    channels: int
    seconds: float
    gain_db: float
    """Gain of all stems alike: 0, or less where a stem would have clipped."""
    sources: tuple[Stem, ...]
    """Ordered by falling energy."""
    existence: tuple[float, ...]
    """Of each source, the probability that it is one."""
    residual: Stem
    overview: Overview
    """For a picture; its slots are the sources, in the same order."""
