"""The picture of a separation: spectrograms of mixture and sources, evidence left after each slot."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from separator.errors import SeparatorError
from separator.results import FloatArray, Overview

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

RANGE_DB = 70.0  # below the mixture's peak; quieter is black
ROW_INCHES = 1.6


def draw_separation(overview: Overview) -> "Figure":
    """Draw the mixture and one row a source; beside them, where the model has any, the evidence."""
    from matplotlib.figure import Figure

    n_rows = 1 + len(overview.slots)
    n_steps = 0 if overview.evidence is None else len(overview.evidence)
    widths = [6.5, 4.5] if n_steps else [6.5]  # inches
    figure = Figure(figsize=(sum(widths), ROW_INCHES * max(n_rows, n_steps) + 0.6), layout="constrained")
    parts = figure.subfigures(1, len(widths), squeeze=False, width_ratios=widths)[0]
    powers = [overview.mixture, *overview.slots]
    names = ["mixture", *(f"source {k + 1}" for k in range(len(overview.slots)))]
    peak = float(overview.mixture.max())
    axes = parts[0].subplots(n_rows, 1, sharex=True, squeeze=False)[:, 0]
    for axis, power, name in zip(axes, powers, names, strict=True):
        _draw_power(axis, power, peak, overview)
        axis.set_title(name, fontsize=9, loc="left")
        axis.set_ylabel("kHz", fontsize=8)
    axes[-1].set_xlabel("time (s)", fontsize=8)
    if overview.evidence is not None:
        _draw_evidence(parts[1], overview.evidence, overview)
    return figure


def save_picture(overview: Overview, path: str | Path) -> None:
    """Save `draw_separation` as PNG.

    Raises:
        SeparatorError: the file cannot be written.
    """
    try:
        draw_separation(overview).savefig(path, dpi=110, format="png")
    except OSError as error:
        raise SeparatorError(f"{path} cannot be written ({error.strerror}); pass another folder") from error


def _draw_power(axis: "Axes", power: FloatArray, peak: float, overview: Overview) -> None:
    """One spectrogram, dB re ``peak``."""
    level_db = 10 * np.log10(np.maximum(power, 1e-30) / max(peak, 1e-30))
    extent = (0.0, overview.seconds, 0.0, overview.sample_rate / 2000)
    axis.imshow(level_db, origin="lower", aspect="auto", extent=extent, vmin=-RANGE_DB, vmax=0, cmap="magma")
    axis.tick_params(labelsize=7)


def _draw_evidence(figure: "SubFigure", evidence: FloatArray, overview: Overview) -> None:
    """One image a step, on the token grid: from 1, nothing explained yet, to 0, all explained."""
    axes = figure.subplots(len(evidence), 1, sharex=True, squeeze=False)[:, 0]
    extent = (0.0, overview.seconds, 0.0, float(evidence.shape[1]))
    for step, (axis, values) in enumerate(zip(axes, evidence, strict=True)):
        image = axis.imshow(
            values, origin="lower", aspect="auto", extent=extent, vmin=0, vmax=1, cmap="viridis"
        )
        name = f"evidence after slot {step}" if step else "evidence before slot 1"
        axis.set_title(f"{name}, mean {values.mean():.2f}", fontsize=9, loc="left")
        axis.set_ylabel("band", fontsize=8)
        axis.tick_params(labelsize=7)
    axes[-1].set_xlabel("time (s)", fontsize=8)
    figure.colorbar(image, ax=list(axes), shrink=0.6).set_label("share left", fontsize=8)
