"""Galactic binaries as LISA sees them in a narrow band: whitened TDI channels A and E of `binary-galactica`.

A binary is quasi-monochromatic, with phase 2 pi (f t + fdot t^2 / 2) + phase. A year of orbit spreads it over
some 2 (2 pi f 1 au / c + 4) frequency bins, by Doppler shift and antenna pattern. Channels are continuous
Fourier coefficients, divided so that noise has unit variance in real and in imaginary part:

    w = 2 h / sqrt(S T),    SNR^2 = sum |w|^2 over bins and channels

Frequencies are in bins of 1 / T from the first of the band, drifts in bins a duration T (fdot T^2), angles in
radians. The package's response is of the first generation, with the constellation frozen at each reception.

Reference: Cornish and Littenberg, arXiv 2506.08093 (response); Babak, Hewitson and Petiteau, arXiv 2108.01167
(noise).
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from separator.errors import SeparatorError

YEAR = 3.15581497632e7  # s, sidereal: the orbit closes
SPEED_OF_LIGHT = 299792458.0  # m / s
ARM = 2.5e9  # m
ASTRONOMICAL_UNIT = 1.495978707e11  # m
LOWEST, HIGHEST = 1e-4, 3e-2  # Hz; above, the response's first null is near
ANTENNA_BINS = 4  # sidebands of the antenna pattern of a year
TAIL_BINS = 4  # of the leakage of a year's rectangular window
OVERSIZE = 4  # of the package's transform over the band: what leaks further is left out
BATCH = 512  # waveforms of one compiled call
EXTRA = ("binary_galactica", "jax", "zuko")

PARAMETERS = (
    "frequency",
    "drift",
    "log_amplitude",
    "longitude",
    "sin_latitude",
    "cos_inclination",
    "polarisation",
    "phase",
)
"""Of a binary: the natural log of the strain amplitude; ecliptic coordinates."""

Floats = NDArray[np.float64]
Waveforms = NDArray[np.complex128]


@dataclass(frozen=True)
class Band:
    """A band of `n_bins` frequency bins of a year's data, the first nearest to `frequency` in Hz.

    Raises:
        SeparatorError: it is not within 0.1 to 30 mHz.
    """

    frequency: float = 3e-3
    n_bins: int = 256

    def __post_init__(self) -> None:
        if not LOWEST <= self.frequency <= HIGHEST:
            raise SeparatorError(
                f"frequency={self.frequency} Hz is not between {LOWEST:g} and {HIGHEST:g} Hz; pass 3e-3"
            )
        if self.n_bins < 1 or self.n_bins % 2:
            raise SeparatorError(f"n_bins={self.n_bins} is not an even number above 0; pass 256")

    @property
    def first_bin(self) -> int:
        """Its lowest bin, counted from frequency 0."""
        return round(self.frequency * YEAR)

    @property
    def half_width(self) -> int:
        """Bins to each side of a binary's frequency that hold nearly all of its power."""
        top = (self.first_bin + self.n_bins) / YEAR
        doppler = 2 * math.pi * top * ASTRONOMICAL_UNIT / SPEED_OF_LIGHT
        return math.ceil(doppler) + ANTENNA_BINS + TAIL_BINS

    def noise(self) -> Floats:
        """Return the one-sided power spectral density of A or E in each bin, 1 / Hz."""
        return noise_psd((self.first_bin + np.arange(self.n_bins)) / YEAR)


def noise_psd(frequency: Floats) -> Floats:
    """Return the one-sided noise of TDI-1 A and E, fractional frequency, in 1 / Hz, of frequencies in Hz.

    The levels are those of the Science Requirements: 15 pm / sqrt(Hz) of a link, 3 fm / s^2 / sqrt(Hz) of a
    test mass. No confusion noise of unresolved binaries is in it.
    """
    omega = 2 * np.pi * frequency
    x = omega * ARM / SPEED_OF_LIGHT
    link = (omega * 15e-12 / SPEED_OF_LIGHT) ** 2 * (1 + (2e-3 / frequency) ** 4)
    mass = (3e-15 / (omega * SPEED_OF_LIGHT)) ** 2
    mass = mass * (1 + (0.4e-3 / frequency) ** 2) * (1 + (frequency / 8e-3) ** 4)
    response = (2 + np.cos(x)) * link + (6 + 4 * np.cos(x) + 2 * np.cos(2 * x)) * mass
    psd: Floats = 8 * np.sin(x) ** 2 * response
    return psd


def whiten(channels: NDArray[np.complexfloating], noise: Floats, duration: float) -> Waveforms:
    """Return Fourier coefficients [..., F] so that each part of noise has variance 1.

    `channels` are continuous, the transform of a duration in seconds; `noise` [F] is one-sided, 1 / Hz.
    """
    whitened: Waveforms = 2 * channels / np.sqrt(noise * duration)
    return whitened


def require_package() -> None:
    """Raise SeparatorError unless the packages of the extra `gw` are installed."""
    missing = [name for name in EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise SeparatorError(f"gravitational waves need {', '.join(missing)}; install separator[gw]")


def draw_binaries(band: Band, n: int, margin: int, generator: np.random.Generator) -> Floats:
    """Draw n binaries [n, 8] of amplitude 1 and phase 0, at least `margin` bins from the band's edges.

    Frequencies are uniform, drifts too, over the range of the package's prior; sky, orientation and
    polarisation are isotropic.
    """
    package = _package()
    with _double_precision():
        edges = band.first_bin / YEAR, (band.first_bin + band.n_bins) / YEAR
        prior = package.ucb_prior(T=YEAR, fmin=edges[0], fmax=edges[1])
    low, high = float(prior.lo[7]), float(prior.hi[7])
    columns = {
        "frequency": generator.uniform(margin, band.n_bins - margin, n),
        "drift": generator.uniform(low, high, n),
        "longitude": generator.uniform(-np.pi, np.pi, n),
        "sin_latitude": generator.uniform(-1, 1, n),
        "cos_inclination": generator.uniform(-1, 1, n),
        "polarisation": generator.uniform(0, np.pi, n),
    }
    return np.stack([columns.get(name, np.zeros(n)) for name in PARAMETERS], 1)


def waveforms(params: Floats, band: Band) -> Waveforms:
    """Return the whitened channels A and E [n, 2, F] of binaries with parameters [n, 8]."""
    compute = _compiled(band)
    native = _native(params, band)
    found = np.empty((len(params), 2, band.n_bins), np.complex128)
    with _double_precision():
        for start in range(0, len(params), BATCH):
            part = native[start : start + BATCH]
            # Always whole batches: another size would be compiled anew.
            whole = np.concatenate([part, np.repeat(part[:1], BATCH - len(part), 0)])
            found[start : start + BATCH] = np.asarray(compute(whole))[: len(part)]
    return whiten(found, band.noise(), YEAR)


def amplitude_basis(params: Floats, band: Band) -> Waveforms:
    """Return the two waveforms [n, 2, 2, F] whose complex combinations are all orientations of binaries.

    For fixed frequency, drift and sky the four of amplitude, inclination, polarisation and phase enter
    linearly: two complex numbers, of the two polarisations.
    """
    seen_from_the_side = params.copy()
    for name in ("log_amplitude", "cos_inclination", "polarisation", "phase"):
        seen_from_the_side[:, PARAMETERS.index(name)] = 0
    turned = seen_from_the_side.copy()
    turned[:, PARAMETERS.index("polarisation")] = np.pi / 4
    both = waveforms(np.concatenate([seen_from_the_side, turned]), band)
    return both.reshape(2, len(params), 2, band.n_bins).swapaxes(0, 1)


def snr(whitened: NDArray[np.complexfloating]) -> Floats:
    """Return the optimal signal-to-noise ratio [...] of whitened channels [..., 2, F]."""
    ratio: Floats = np.sqrt((np.abs(whitened) ** 2).sum((-2, -1)))
    return ratio


def _native(params: Floats, band: Band) -> Floats:
    """Return the package's own vector of each binary: its phase has the other sign."""
    by_name = dict(zip(PARAMETERS, params.T, strict=True))
    return np.stack(
        [
            band.first_bin + by_name["frequency"],
            by_name["sin_latitude"],
            by_name["longitude"],
            by_name["log_amplitude"],
            by_name["cos_inclination"],
            by_name["polarisation"],
            -by_name["phase"],
            by_name["drift"],
        ],
        1,
    )


@cache
def _compiled(band: Band) -> Callable[[Floats], Any]:
    """Return what maps native vectors [BATCH, 8] to continuous channels [BATCH, 2, F]."""
    package = _package()
    import jax

    def channels(native: Any) -> Any:
        return package.template_on_window(
            native, T=YEAR, BW=OVERSIZE * band.n_bins, bin_lo=band.first_bin, n_bins=band.n_bins
        )

    compiled: Callable[[Floats], Any] = jax.jit(jax.vmap(channels))
    return compiled


def _package() -> Any:
    require_package()
    import binary_galactica

    return binary_galactica


def _double_precision() -> Any:
    """Let JAX compute in float64 here, and leave the caller's setting as it is."""
    import jax

    return jax.enable_x64(True)
