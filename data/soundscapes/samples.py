"""The recordings in `data/samples/`: four mixtures of CC0 and public domain sounds, and the sounds in them.

This is `prepare.py samples`. Every sound comes from a package that training never saw. A mixture is the
exact sum of its sources as they are stored (16-bit).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
import torchaudio
from families import Clip
from unpack import Recording, read_package

from separator.errors import SeparatorError

Samples = np.ndarray
FREE_LICENCES = ("CC0", "CC0-1.0", "public-domain")
MIXTURE_PEAK = 0.5
FADE_SECONDS = 0.01


@dataclass(frozen=True)
class Part:
    """One sound of a sample: when it starts (it may repeat), how loud it is, where it is heard."""

    path: str
    onsets: tuple[float, ...] = (0.0,)  # seconds
    level_db: float = 0.0  # RMS of the sound, re the first part's
    pan: float = 0.0  # -1 left, 1 right; stereo samples only


@dataclass(frozen=True)
class Sample:
    """One mixture in `data/samples/`."""

    seconds: float
    parts: Mapping[str, Part]
    sample_rate: int = 16000
    channels: int = 1


SONIC_PI = "usr/share/sonic-pi/samples"
KART = "usr/share/games/supertuxkart/data/sfx"
SAMPLES = {
    "single": Sample(5, {"bell": Part(f"{SONIC_PI}/perc_bell.flac")}),
    "mix3": Sample(
        10,
        {
            "river": Part(f"{KART}/river_loop.ogg"),
            "clock": Part(f"{KART}/clock.ogg", (2.0,), 2.0),
            "guitar": Part(f"{SONIC_PI}/guit_e_fifths.flac", (3.5,), 6.0),
        },
    ),
    "mix4": Sample(
        10,
        {
            "birds": Part(f"{KART}/exotic-birds.ogg"),
            "voice synthesizer": Part(f"{SONIC_PI}/bass_voxy_c.flac", (2.0,), 3.0),
            "explosion": Part(f"{KART}/explosion.ogg", (1.0, 6.0), 6.0),
            "cymbal": Part(f"{SONIC_PI}/drum_splash_hard.flac", (4.5, 8.0), 4.0),
        },
    ),
    "stereo": Sample(
        4,
        {
            "waterfall": Part(f"{KART}/waterfall_loop_2.ogg", pan=-0.6),
            "boing": Part(f"{KART}/boing.ogg", (0.3, 2.2), 8.0, pan=0.6),
        },
        sample_rate=44100,
        channels=2,
    ),
}


def sample_paths() -> set[str]:
    """The clips that the samples are made of."""
    return {part.path for sample in SAMPLES.values() for part in sample.parts.values()}


def write_samples(packages: Sequence[Path], manifest: Sequence[Clip], output: Path) -> None:
    """Write every sample as `NAME.wav` and its sounds as `NAME_sources/SOUND.flac`.

    Raises:
        SeparatorError: a sound is not free to pass on, was trained on, or is not in the packages.
    """
    clips = {clip["path"]: clip for clip in manifest}
    needed = sample_paths()
    for path in sorted(needed):
        clip = clips.get(path, {})
        if clip.get("licence") not in FREE_LICENCES or clip.get("split") != "evaluation":
            raise SeparatorError(
                f"{path} is {clip.get('split')} under {clip.get('licence')}; samples are evaluation clips "
                f"under {' or '.join(FREE_LICENCES)}"
            )
    recordings: dict[str, Recording] = {}
    for package in packages:
        recordings |= {recording.path: recording for recording in read_package(package, sorted(needed))}
    if missing := sorted(needed - recordings.keys()):
        raise SeparatorError(
            f"{missing} are not in {[package.name for package in packages]}; get the versions of packages.tsv"
        )
    for name, sample in SAMPLES.items():
        mixture, sources = mix_sample(sample, recordings)
        folder = output / f"{name}_sources"
        folder.mkdir(parents=True, exist_ok=True)
        soundfile.write(output / f"{name}.wav", mixture.T, sample.sample_rate, subtype="PCM_16")
        for sound, source in sources.items():
            target = folder / f"{sound.replace(' ', '_')}.flac"
            soundfile.write(target, source.T, sample.sample_rate, subtype="PCM_16")


def mix_sample(sample: Sample, recordings: Mapping[str, Recording]) -> tuple[Samples, dict[str, Samples]]:
    """Mixture and sources, int16 (channel, time)."""
    placed = {name: _place(part, sample, recordings[part.path]) for name, part in sample.parts.items()}
    gain = MIXTURE_PEAK * 32767 / float(np.abs(sum(placed.values())).max())
    sources = {name: np.round(waveform * gain).astype(np.int16) for name, waveform in placed.items()}
    return np.asarray(sum(sources.values()), dtype=np.int16), sources


def _place(part: Part, sample: Sample, recording: Recording) -> Samples:
    """The sound at its onsets, level and place: (channel, time)."""
    if recording.waveform is None:
        raise SeparatorError(f"{part.path} cannot be decoded: {recording.error}")
    sound = torch.from_numpy(recording.waveform.mean(axis=0))
    sound = torchaudio.functional.resample(sound, recording.sample_rate, sample.sample_rate)
    length = round(sample.seconds * sample.sample_rate)
    waveform = sound.numpy().astype(np.float64)[:length]
    waveform = waveform * 10 ** (part.level_db / 20) / np.sqrt(np.mean(waveform**2))
    fade = round(FADE_SECONDS * sample.sample_rate)
    result = np.zeros(length)
    for onset in part.onsets:
        start = round(onset * sample.sample_rate)
        piece = waveform[: length - start].copy()
        piece[len(piece) - fade :] *= np.linspace(1, 0, fade)
        result[start : start + len(piece)] += piece
    if sample.channels == 1:
        return result[None]
    angle = np.pi / 4 * (1 + part.pan)  # constant power
    return np.stack([np.cos(angle) * result, np.sin(angle) * result])
