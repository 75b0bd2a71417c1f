"""Mixtures of galactic binaries: a bank of waveforms, made once and cached, of which mixtures are drawn.

The bank holds binaries of signal-to-noise ratio 1 and phase 0. A mixture takes 1 to `max_sources` of them
from a window of `spread_bins`, gives each its ratio and phase, adds them and adds noise. One is dominant: its
ratio is log-uniform over the upper third of a decade and a half, the others' over the lower two thirds.
"""

import dataclasses
import hashlib
import json
import math
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from separator.benchmarks.gw_waveforms import (
    OVERSIZE,
    PARAMETERS,
    Band,
    Floats,
    draw_binaries,
    require_package,
    snr,
    waveforms,
)
from separator.errors import SeparatorError
from separator.script import counted

QUIETEST, LOUDEST = 7.0, 7.0 * 10**1.5
DOMINANT_FROM = 7.0 * 10.0
N_PART = 2048  # binaries of a file of the cache
CHANNELS = 2
CACHE_VARIABLE = "SEPARATOR_CACHE"
AMPLITUDE = PARAMETERS.index("log_amplitude")
PHASE = PARAMETERS.index("phase")


@dataclass(frozen=True)
class Population:
    """Which binaries are mixed.

    Attributes:
        spread_bins: width of the window that holds the frequencies of a mixture.

    Raises:
        SeparatorError: the band is too narrow for the window and what the orbit spreads beyond it, or the
            window for the sources.
    """

    band: Band = field(default_factory=Band)
    max_sources: int = 5
    spread_bins: int = 64

    def __post_init__(self) -> None:
        if self.max_sources < 1:
            raise SeparatorError(f"max_sources={self.max_sources} is not positive; pass at least 1")
        if self.spread_bins < self.max_sources:
            raise SeparatorError(
                f"spread_bins={self.spread_bins} is too narrow for {counted(self.max_sources, 'source')}; "
                f"pass at least one bin a source"
            )
        needed = self.spread_bins + 2 * self.band.half_width
        if self.band.n_bins < needed:
            raise SeparatorError(
                f"n_bins={self.band.n_bins} is too narrow for {counted(self.max_sources, 'source')} over "
                f"{counted(self.spread_bins, 'bin')}, each {counted(self.band.half_width, 'bin')} wide "
                f"to each side; pass at least {needed + needed % 2}"
            )


class Bank(NamedTuple):
    """Binaries in the order of their frequency, of signal-to-noise ratio 1 and phase 0."""

    waveforms: Tensor  # [n, 2, F] complex64, whitened
    params: Tensor  # [n, 8], as `PARAMETERS`


class GalacticMixtures(NamedTuple):
    """Mixtures and what they are made of, zero beyond each mixture's count."""

    data: Tensor  # [B, 2, F] complex64, whitened
    params: Tensor  # [B, K, 8], as `PARAMETERS`
    counts: Tensor  # [B], 1 to K
    components: Tensor  # [B, K, 2, F] complex64


def draw_mixtures(bank: Bank, population: Population, n: int, generator: torch.Generator) -> GalacticMixtures:
    """Draw n mixtures; the first source of each is the dominant one."""
    n_sources = population.max_sources
    counts = torch.randint(1, n_sources + 1, (n,), generator=generator)
    index = _neighbours(bank, population, torch.rand(n, n_sources + 1, generator=generator))
    ratio = _ratios(torch.rand(n, n_sources, generator=generator))
    phase = 2 * math.pi * torch.rand(n, n_sources, generator=generator)
    exists = torch.arange(n_sources) < counts.unsqueeze(1)  # [B, K]
    gain = torch.polar(ratio * exists, phase)
    components = bank.waveforms[index] * gain[..., None, None]  # [B, K, 2, F]
    params = bank.params[index].clone()
    params[..., AMPLITUDE] += ratio.log()
    params[..., PHASE] = phase
    noise = torch.randn(n, CHANNELS, population.band.n_bins, 2, generator=generator)
    data = components.sum(1) + torch.view_as_complex(noise)
    return GalacticMixtures(data, params * exists.unsqueeze(2), counts, components)


def _neighbours(bank: Bank, population: Population, unit: Tensor) -> Tensor:
    """Return the binaries [B, K] of windows of the bank, all given by numbers [B, K + 1] in [0, 1)."""
    frequency = bank.params[:, PARAMETERS.index("frequency")].contiguous()
    room = population.band.n_bins - 2 * population.band.half_width - population.spread_bins
    start = population.band.half_width + room * unit[:, :1]
    edges = torch.cat([start, start + population.spread_bins], 1)
    first, after = torch.searchsorted(frequency, edges).unbind(1)  # [B]
    if not bool((after > first).all()):
        raise SeparatorError(f"too small a bank ({len(frequency)}) leaves windows empty; pass more binaries")
    return first[:, None] + (unit[:, 1:] * (after - first)[:, None]).long()


def _ratios(unit: Tensor) -> Tensor:
    """Return signal-to-noise ratios [B, K], the first the dominant ones, of numbers [B, K] in [0, 1)."""
    quiet = QUIETEST * (DOMINANT_FROM / QUIETEST) ** unit
    loud = DOMINANT_FROM * (LOUDEST / DOMINANT_FROM) ** unit
    return torch.cat([loud[:, :1], quiet[:, 1:]], 1)


def load_bank(
    population: Population,
    n: int,
    *,
    seed: int,
    directory: Path | None = None,
    progress: Callable[[float], None] | None = None,
) -> Bank:
    """Return the bank of n binaries of a seed; what is not in the cache yet is made, and stays there.

    It is kept in files of `N_PART` binaries, each of its own seed: a run that was stopped goes on from there.

    Raises:
        SeparatorError: the extra is not installed, or the cache cannot be read or written.
    """
    require_package()
    folder = (cache_dir() if directory is None else directory) / _name(population.band)
    n_parts = math.ceil(n / N_PART)
    parts = []
    for part in range(n_parts):
        path = folder / f"seed{seed}-part{part:04d}.npz"
        if not path.exists():
            write_part(path, *make_part(population.band, N_PART, (seed, part)))
        parts.append(read_part(path))
        if progress is not None:
            progress((part + 1) / n_parts)
    whole = Bank(*(torch.cat(tensors)[:n] for tensors in zip(*parts, strict=True)))
    return in_order(whole)


def make_part(band: Band, n: int, seed: tuple[int, ...]) -> tuple[NDArray[np.complex64], Floats]:
    """Return waveforms [n, 2, F] and parameters [n, 8] of binaries of signal-to-noise ratio 1."""
    params = draw_binaries(band, n, band.half_width, np.random.default_rng(seed))
    whitened = waveforms(params, band)
    ratio = snr(whitened)
    params[:, AMPLITUDE] -= np.log(ratio)
    return (whitened / ratio[:, None, None]).astype(np.complex64), params


def write_part(path: Path, whitened: NDArray[np.complex64], params: Floats) -> None:
    """Write a file of a bank: a kill at any moment leaves all of it or nothing.

    Raises:
        SeparatorError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez(file, waveforms=whitened, params=params)
        temporary.replace(path)
    except OSError as error:
        raise SeparatorError(
            f"{path} cannot be written ({error.strerror}); set {CACHE_VARIABLE} to a folder that can be"
        ) from error


def read_part(path: Path) -> Bank:
    """Read a file of a bank.

    Raises:
        SeparatorError: it is not one.
    """
    try:
        with np.load(path) as arrays:
            whitened, params = arrays["waveforms"], arrays["params"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())
        raise SeparatorError(f"{path} cannot be read as binaries ({reason}); delete it") from error
    return Bank(torch.from_numpy(whitened), torch.from_numpy(params).float())


def in_order(bank: Bank) -> Bank:
    """Return the bank in the order of frequency."""
    order = bank.params[:, PARAMETERS.index("frequency")].argsort()
    return Bank(bank.waveforms[order], bank.params[order])


def cache_dir() -> Path:
    """The folder of what is made once: $SEPARATOR_CACHE, or the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "separator"


def _name(band: Band) -> str:
    """The folder of a band's binaries: another for whatever would make them others."""
    facts = {"band": dataclasses.asdict(band), "oversize": OVERSIZE, "margin": band.half_width}
    facts["package"] = version("binary-galactica")
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"binaries-{1e3 * band.frequency:g}mHz-{band.n_bins}bins-{digest[:12]}"
