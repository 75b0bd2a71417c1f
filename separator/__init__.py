"""Separates a recording into its sounds with evidence-depletion slot attention.

    from separator import Separator
    result = Separator.load().separate(waveform, sample_rate)  # waveform (channel, time)
    result.estimates, result.residual  # (source, channel, time), (channel, time)

Names are imported when they are first used, so that the command line starts at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from separator.errors import SeparatorError

if TYPE_CHECKING:
    from separator.results import FileSeparation
    from separator.separate import Separation, Separator

__all__ = ["FileSeparation", "Separation", "Separator", "SeparatorError", "__version__"]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in ("FileSeparation", "Separation", "Separator"):
        return getattr(import_module("separator.separate"), name)
    raise AttributeError(f"module 'separator' has no attribute {name!r}; it has {__all__}")
