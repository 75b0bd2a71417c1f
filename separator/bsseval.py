"""BSSEval v4 (SDR, ISR, SIR, SAR) by ``museval``, on inputs with silence in them.

``museval`` refuses a silent source or estimate and turns a frame in which any one of them is silent into NaN
for all. Here silent sources are left out; a silent estimate gets no score but its source stays an interferer
of the others; NaN frames are left out of the medians; and the result says how many of each there were.

Reference: Stoeter, Liutkus and Ito, "The 2018 signal separation evaluation campaign", LVA/ICA 2018.
"""

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from separator.errors import SeparatorError
from separator.metrics import is_active


class BssEval(NamedTuple):
    """Median over frames, dB, one entry a source (NaN: no score), and what was dropped on the way."""

    sdr: Tensor
    isr: Tensor
    sir: Tensor
    sar: Tensor
    n_frames: int
    n_dropped_frames: int
    n_silent_sources: int
    n_silent_estimates: int


def bsseval(
    estimates: Tensor,
    sources: Tensor,
    sample_rate: int,
    *,
    window_seconds: float = 1.0,
    filter_length: int = 512,
) -> BssEval:
    """Score ``estimates`` (source, time), already in the order of ``sources`` (source, time), in frames.

    Raises:
        SeparatorError: the shapes differ or ``museval`` is not installed.
    """
    if estimates.shape != sources.shape:
        raise SeparatorError(
            f"{estimates.shape=} is not {sources.shape=}; match the estimates to the sources first"
        )
    heard, answered = is_active(sources), is_active(estimates)
    scored = heard & answered
    window = round(window_seconds * sample_rate)
    n_frames = max(1, sources.shape[-1] // window)
    medians = torch.full((4, sources.shape[0]), torch.nan, dtype=torch.float64)
    dropped = n_frames
    if scored.any():
        # a silent estimate is replaced by its source: no other row depends on it, and its own is not used
        filled = torch.where(answered[:, None], estimates, sources)[heard].double()
        frames = _framewise(filled, sources[heard].double(), window, filter_length)[:, scored[heard]]
        kept = torch.isfinite(frames).all(dim=1).all(dim=0)
        n_frames, dropped = frames.shape[-1], int((~kept).sum())
        if kept.any():
            medians[:, scored] = torch.from_numpy(np.median(frames[..., kept].numpy(), axis=-1))
    sdr, isr, sir, sar = medians
    silent_sources, silent_estimates = int((~heard).sum()), int((heard & ~answered).sum())
    return BssEval(sdr, isr, sir, sar, n_frames, dropped, silent_sources, silent_estimates)


def _framewise(estimates: Tensor, sources: Tensor, window: int, filter_length: int) -> Tensor:
    """SDR, ISR, SIR and SAR (4, source, frame) of ``museval``; NaN where a frame has silence."""
    scores = _museval_metrics().bss_eval(
        sources.numpy()[..., None],
        estimates.numpy()[..., None],
        window=window,
        hop=window,
        compute_permutation=False,
        filters_len=filter_length,
    )
    return torch.from_numpy(np.stack(scores[:4]))


@cache
def _museval_metrics() -> Any:
    """``museval/metrics.py`` alone: importing the package demands the ffmpeg programs, unused here."""
    package = importlib.util.find_spec("museval")
    if package is None or not package.submodule_search_locations:
        raise SeparatorError("BSSEval needs museval, which is not installed; pip install museval")
    path = Path(package.submodule_search_locations[0]) / "metrics.py"
    spec = importlib.util.spec_from_file_location("separator._museval_metrics", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SeparatorError(f"{path} is missing; this museval is not supported, pip install museval==0.4.1")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
