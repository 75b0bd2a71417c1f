"""Looks for one recording on both sides of the split: `prepare.py audit`.

Names cannot tell that two games use one sound, or that one river was filtered into another. So the
waveforms of scored clips (validation and evaluation) are correlated with those of training clips: every
clip with those whose log-mel spectrogram begins alike, and two stretches of every scored background with
all of the backgrounds. Families that this finds are listed in `splits.SIBLINGS_OF_TRAINING` and are not
scored. A correlation near 1 is one recording; 0.5 to 0.8 between drums or notes is mostly an equal pitch,
to be judged by ear or by name.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torchaudio
from scipy import fft, signal
from torch import Tensor

SAMPLE_RATE = 16000
FRAMES = (12, 30, 90)  # of 16 ms: the clip's beginning that is compared
LAGS = (0, 1, 2)  # frames the trimmed beginnings may differ by
MIN_SIMILARITY = 0.8  # of spectrograms, to correlate the waveforms
MIN_CORRELATION = {"clip": 0.55, "stretch": 0.5}
MAX_SECONDS = 10  # of a clip that is correlated
BACKGROUND_CLASSES = ("ambience_background", "vehicles_mechanical")
STRETCH_SECONDS = 1.0  # of a background
BLOCK_SAMPLES = 80_000  # of a training background, correlated at a time
SILENCE = 1e-3  # of a piece's energy: what is quieter must not look alike
STRETCH_PLACES = (0.2, 0.6)  # where the stretches lie in the clip

Clip = dict[str, str]
Samples = np.ndarray


class Pair(NamedTuple):
    """A scored clip and the training clip that it shares a recording with, perhaps."""

    correlation: float
    scored: Clip
    trained: Clip


def find_siblings(bank: Path) -> list[Pair]:
    """The closest training clip of each scored clip, if their waveforms correlate; closest pairs first."""
    with (bank / "clips.csv").open(encoding="utf-8", newline="") as file:
        clips = list(csv.DictReader(file))
    audio = np.memmap(bank / "audio.i16", dtype="<i2", mode="r")
    closest: dict[str, Pair] = {}
    for pair in [*_clip_pairs(clips, audio), *_stretch_pairs(clips, audio)]:
        known = closest.get(pair.scored["clip"], pair)
        closest[pair.scored["clip"]] = max(known, pair, key=lambda p: p.correlation)
    return sorted(closest.values(), key=lambda pair: -pair.correlation)


def correlate(pieces: Samples, waveform: Samples) -> Samples:
    """The largest normalised correlation of each piece (piece, time) with `waveform`, over all shifts.

    A shift counts if it leaves half of the piece.
    """
    length = pieces.shape[-1]
    half = length // 2
    padded = np.pad(waveform, (half, length)).astype(np.float32)
    n_shifts = half + max(1, len(waveform) - half)
    size = fft.next_fast_len(len(padded) + length, real=True)
    product = fft.rfft(padded, size) * np.conj(fft.rfft(pieces, size))
    correlation = np.abs(fft.irfft(product, size))[:, :n_shifts]
    energy = np.concatenate([[0.0], np.cumsum(np.square(padded, dtype=np.float64))])
    there = energy[length : length + n_shifts] - energy[:n_shifts]
    own = np.sum(np.square(pieces, dtype=np.float64), axis=1, keepdims=True) + 1e-12
    ratio = correlation / np.sqrt(own * (there + SILENCE * own))
    return np.asarray(ratio.max(axis=1))


def _clip_pairs(clips: Sequence[Clip], audio: Samples) -> Iterator[Pair]:
    for i, j in sorted(set(_candidates(clips, audio))):
        waveforms = [_read(audio, clips[k])[: MAX_SECONDS * SAMPLE_RATE] for k in (i, j)]
        short, long = sorted(waveforms, key=len)
        correlation = float(correlate(short[None], long)[0])
        if correlation >= MIN_CORRELATION["clip"]:
            yield Pair(correlation, clips[i], clips[j])


def _stretch_pairs(clips: Sequence[Clip], audio: Samples) -> Iterator[Pair]:
    """Backgrounds at half their rate, sharpened by a difference: their low frequencies are all alike."""
    length = round(STRETCH_SECONDS * SAMPLE_RATE / 2)
    backgrounds = [clip for clip in clips if clip["rough_class"] in BACKGROUND_CLASSES]
    waveforms = [np.diff(signal.resample_poly(_read(audio, clip), 1, 2)) for clip in backgrounds]
    long = [(clip, w) for clip, w in zip(backgrounds, waveforms, strict=True) if len(w) > length]
    scored = [(clip, w) for clip, w in long if clip["split"] != "train"]
    owners = [clip for clip, _ in scored for _ in STRETCH_PLACES]
    starts = [(w, round(place * (len(w) - length))) for _, w in scored for place in STRETCH_PLACES]
    if not starts:
        return
    pieces = np.stack([w[start : start + length] for w, start in starts])
    for clip, waveform in long:
        if clip["split"] != "train":
            continue
        for start in range(0, len(waveform) - length, BLOCK_SAMPLES):
            block = waveform[start : start + BLOCK_SAMPLES + length]
            for owner, correlation in zip(owners, correlate(pieces, block), strict=True):
                if correlation >= MIN_CORRELATION["stretch"]:
                    yield Pair(float(correlation), owner, clip)


def _candidates(clips: Sequence[Clip], audio: Samples) -> Iterator[tuple[int, int]]:
    """Scored and training clips whose spectrograms begin alike, for each length the closest only."""
    mel = torchaudio.transforms.MelSpectrogram(SAMPLE_RATE, 512, 512, 256, n_mels=32)
    spectrograms = [torch.log(mel(torch.from_numpy(_read(audio, clip))) + 1e-6) for clip in clips]
    for frames in FRAMES:
        long = [i for i, spectrogram in enumerate(spectrograms) if spectrogram.shape[-1] >= frames]
        trained = [i for i in long if clips[i]["split"] == "train"]
        scored = [i for i in long if clips[i]["split"] != "train"]
        if not trained or not scored:
            continue
        beginnings = torch.stack([_unit(spectrograms[i][:, :frames]) for i in trained])
        for lag in LAGS:
            late = [i for i in scored if spectrograms[i].shape[-1] >= frames + lag]
            for i in late:
                similarity = beginnings @ _unit(spectrograms[i][:, lag : lag + frames])
                best = int(similarity.argmax())
                if similarity[best] > MIN_SIMILARITY:
                    yield i, trained[best]


def _unit(spectrogram: Tensor) -> Tensor:
    centred: Tensor = (spectrogram - spectrogram.mean()).flatten()
    return centred.div(float(centred.norm()) + 1e-9)


def _read(audio: Samples, clip: Clip) -> Samples:
    start, length = int(clip["start"]), int(clip["length"])
    return audio[start : start + length].astype(np.float32) / 32768
