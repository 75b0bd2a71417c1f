"""What is done to the samples of a clip before it is mixed: cut, looped, faded, sped up, filtered, scaled.

Waveforms are (time,) at `SAMPLE_RATE`; every draw comes from the generator that is passed.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import fft, signal

Samples = npt.NDArray[np.float32]

SAMPLE_RATE = 16_000  # Hz, of all that is trained on


def crop(audio: Samples, length: int, rng: np.random.Generator) -> Samples:
    """A random stretch of at most ``length`` samples."""
    start = int(rng.integers(0, max(1, len(audio) - length + 1)))
    return audio[start : start + length]


def loop(audio: Samples, length: int) -> Samples:
    """Repeat to ``length`` samples with a crossfade at the seams."""
    if len(audio) >= length:
        return audio[:length]
    overlap = min(len(audio) // 4, SAMPLE_RATE // 4)
    ramp = np.sqrt(np.linspace(0, 1, overlap, dtype=np.float32))
    out = audio
    while len(out) < length:
        seam = out[-overlap:] * ramp[::-1] + audio[:overlap] * ramp
        out = np.concatenate([out[:-overlap], seam, audio[overlap:]])
    return out[:length]


def fade(audio: Samples, samples: int = 80) -> Samples:
    """Fade both ends, so that a cut clip does not click."""
    n = min(samples, len(audio) // 2)
    if n == 0:
        return audio
    ramp = np.linspace(0, 1, n, dtype=np.float32)
    return np.concatenate([audio[:n] * ramp, audio[n : len(audio) - n], audio[len(audio) - n :] * ramp[::-1]])


def change_speed(audio: Samples, speed: float) -> Samples:
    """Play ``speed`` times faster (pitch moves along), by linear interpolation."""
    if speed == 1.0 or len(audio) < 2:
        return audio
    positions = np.arange(0, len(audio) - 1, speed)
    faster: Samples = np.interp(positions, np.arange(len(audio)), audio).astype(np.float32)
    return faster


def augment(source: Samples, reverberant: float, rng: np.random.Generator) -> Samples:
    """Filter a source by one FFT: a random smooth equaliser, sometimes a narrower band, sometimes a room.

    ``reverberant`` is the probability of a room.
    """
    length = len(source)
    size = fft.next_fast_len(length + SAMPLE_RATE // 2, real=True)
    frequencies, knots = _equaliser(size)
    response = (10 ** ((rng.normal(0, 3, 9).astype(np.float32) @ knots) / 20)).astype(np.complex64)
    if rng.random() < 0.15:  # steep low-pass, so that no band edge tells sources apart
        response *= 1 / (1 + (frequencies / rng.uniform(0.3, 0.95)) ** 40)
    if rng.random() < 0.15:
        edge = rng.uniform(0.01, 0.05)
        response *= (frequencies / edge) ** 8 / (1 + (frequencies / edge) ** 8)
    if rng.random() < reverberant:
        response *= fft.rfft(room_response(rng), size).astype(np.complex64)
    filtered: Samples = fft.irfft(fft.rfft(source, size) * response, size)[:length].astype(np.float32)
    return filtered


@lru_cache(maxsize=4)
def _equaliser(size: int) -> tuple[Samples, Samples]:
    """Frequencies (bin,) of an FFT in units of the highest, and what nine knots (knot, bin) give them.

    Between the knots, even over the roots of the frequencies, gains in dB are interpolated.
    """
    frequencies = np.arange(size // 2 + 1) / (size // 2)
    at = np.linspace(0, 1, 9)
    knots = [np.interp(np.sqrt(frequencies), at, one) for one in np.eye(9)]
    return frequencies.astype(np.float32), np.array(knots, np.float32)


def room_response(rng: np.random.Generator) -> Samples:
    """Impulse response of an imagined room: the direct sound and a decaying, dark tail."""
    duration = float(rng.uniform(0.1, 0.45))
    n = int(duration * SAMPLE_RATE)
    tail = rng.standard_normal(n) * np.exp(-6.9 * np.arange(n) / n)
    tail = signal.lfilter([1 - 0.5], [1, -0.5], tail)
    delay = int(rng.integers(20, 200))
    tail[:delay] = 0
    direct_db = float(rng.uniform(0, 15))  # direct to reverberant energy
    tail *= 10 ** (-direct_db / 20) / np.sqrt(np.sum(tail**2) + 1e-12)
    tail[0] = 1.0
    return tail.astype(np.float32)


def set_level(source: Samples, level_db: float) -> Samples:
    """Scale to ``level_db`` (re 1) over the stretches where the source is active; silence stays silence."""
    blocks = source[: len(source) // 400 * 400].reshape(-1, 400)
    power = np.square(blocks).mean(1)
    loud = power > 1e-4 * (power.max() + 1e-20)
    level = float(np.sqrt(power[loud].mean())) if loud.any() else 0.0
    return source if level < 1e-7 else source * np.float32(10 ** (level_db / 20) / level)
