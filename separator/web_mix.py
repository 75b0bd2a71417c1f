"""Mix your own: sample sounds of known truth at chosen levels, and how well the stems match them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from separator.audio import read_audio, resample
from separator.errors import SeparatorError
from separator.metrics import match_strict
from separator.script import counted
from separator.writing import Stem, write_audio

SAMPLE_RATE = 16_000  # of the mixture, Hz
PEAK = 0.9  # of the mixture, or of a sound that exceeds it
MAX_SOUNDS = 4

Part = tuple[str, float]  # a sound's name and its level in dB

# title, sounds with their levels, what to expect
PRESETS: dict[str, tuple[tuple[Part, ...], str]] = {
    "Different sounds": (
        (("birds", 0.0), ("guitar", -6.0)),
        "What the method is made for: sounds of different kinds, one louder than the other.",
    ),
    "Equal levels": (
        (("river", 0.0), ("birds", 0.0), ("clock", 0.0)),
        "A known limit: when no sound leads, the slots may share one, or miss one.",
    ),
    "Same kind": (
        (("river", 0.0), ("waterfall", 0.0)),
        "A known limit: two sounds of one kind, here running water, are mostly taken for one.",
    ),
    "Four at once": (
        (("birds", 0.0), ("river", -6.0), ("guitar", -6.0), ("clock", -12.0)),
        "The quietest of four is the hardest to find.",
    ),
}


def samples_dir() -> Path:
    """Folder of the sample recordings, in a wheel or in a checkout."""
    package = Path(__file__).parent
    packed = package / "_samples"
    return packed if packed.is_dir() else package.parent / "data" / "samples"


def sample_sounds() -> dict[str, Path]:
    """Files of the single sounds by name."""
    paths = samples_dir().glob("*_sources/*.flac")
    return {path.stem.replace("_", " "): path for path in sorted(paths, key=lambda path: path.stem)}


def mix_sounds(parts: Sequence[Part]) -> Tensor:
    """Sources (source, time) at 16 kHz, mono, of the given levels; their sum is the mixture.

    A level is the RMS over a sound's own length, in dB relative to the other sounds.

    Raises:
        SeparatorError: the number of sounds is not 2 to 4, one is unknown or is there twice.
    """
    names = [name for name, _ in parts]
    if not 2 <= len(parts) <= MAX_SOUNDS:
        raise SeparatorError(f"{counted(len(parts), 'sound')} picked; pick 2 to {MAX_SOUNDS}")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise SeparatorError(f"{twice} is picked more than once; pick different sounds")
    sounds = [_read_sound(name) for name in names]
    sources = torch.zeros(len(sounds), max(len(sound) for sound in sounds))
    for row, sound, (_, level_db) in zip(sources, sounds, parts, strict=True):
        row[: len(sound)] = sound * 10 ** (level_db / 20)
    peak = max(float(sources.sum(0).abs().max()), float(sources.abs().max()))
    return sources * (PEAK / peak)


def write_mixture(sources: Tensor, path: Path) -> None:
    """Write the sum of ``sources`` as 16-bit wav."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mixture: np.ndarray = sources.sum(0, keepdim=True).numpy()
    write_audio(path, mixture, SAMPLE_RATE, subtype="PCM_16")


def score_stems(parts: Sequence[Part], sources: Tensor, stems: Sequence[Stem]) -> list[list[str]]:
    """One row a sound: its name, level, the stem that is most like it, and SI-SDR before and after.

    Every sound gets a stem of its own where there are enough; no mean is removed, scores are at least -30 dB.
    """
    mixture = sources.sum(0)
    written = [torch.from_numpy(read_audio(stem.file).waveform[0]) for stem in stems]
    estimates = torch.stack(written) if written else torch.zeros(0, len(mixture))
    called = torch.ones(len(estimates), dtype=torch.bool)
    match = match_strict(estimates, sources, mixture, called, zero_mean=False)
    rows = []
    for (name, level_db), output, after, gained in zip(
        parts, match.outputs.tolist(), match.si_sdr.tolist(), match.improvement.tolist(), strict=True
    ):
        level = f"{level_db:g} dB"
        if output < 0:
            rows.append([name, level, "not found", "-", "-"])
        else:
            rows.append([name, level, f"source {output + 1}", f"{after:.1f} dB", f"{gained:+.1f} dB"])
    return rows


@cache
def _read_sound(name: str) -> Tensor:
    """A sound at the mixture's rate, mono, with RMS 1."""
    known = sample_sounds()
    if name not in known:
        raise SeparatorError(f"no sound {name!r}; pick from {', '.join(known)}")
    file = read_audio(known[name])
    sound = resample(torch.from_numpy(file.waveform).mean(0), file.sample_rate, SAMPLE_RATE)
    return sound / sound.square().mean().sqrt()
