"""The training bank and the mixtures made from it on the fly.

Dataset classes live here; the folders under ``data/`` hold their preparation. A bank is a folder with
``audio.i16`` (16 kHz mono clips, one behind the other) and ``clips.csv`` (one row a clip). A source is made
of one or more clips of one recording family, as steps or words follow each other; a mixture is a sum of
sources of different families. Every draw of a row of batch n comes from ``(seed, n, row)`` alone, so a
resumed run sees what it would have seen.
"""

import csv
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from separator.augmentation import (
    SAMPLE_RATE,
    Samples,
    augment,
    change_speed,
    crop,
    fade,
    loop,
    set_level,
)
from separator.errors import SeparatorError

CLASS_POWER = 0.4  # of the seconds of a class, family or clip: its share of the draws
BAND_LIMIT_HZ = 7000  # clips with less bandwidth would teach separation by bandwidth
BACKGROUND_SECONDS = 4.0  # clips from here on can be backgrounds
SCATTER_SECONDS = 2.0  # shorter events are repeated
MEAN_GAP_SECONDS = 0.8  # between repeats
MIXTURE_SECONDS = 10.0  # of what is validated and calibrated on
AMBIENCE = "ambience_background"  # the class of what sounds all the time and everywhere


class Clip(NamedTuple):
    """Where a clip of the bank lies and what it is."""

    start: int
    length: int
    family: str
    rough_class: str


@dataclass(frozen=True)
class MixingConfig:
    """How training mixtures are drawn."""

    AT_LEAST: ClassVar[dict[str, float]] = {
        "seconds": 0.1,
        **dict.fromkeys(("counts", "scene_share", "layered_backgrounds", "same_class", "reverberant"), 0),
        "event_share": 0,
        **dict.fromkeys(("layer_level_db", "equal_level_db", "shortest_seconds"), 0),
    }
    AT_MOST: ClassVar[dict[str, float]] = dict.fromkeys(
        ("counts", "scene_share", "layered_backgrounds", "event_share", "same_class", "reverberant"), 1
    )

    seconds: float = 3.0
    shortest_seconds: float = 0.0
    """Batches are of mixtures from here to `seconds` long, each of one length; 0: all are as long."""
    counts: tuple[float, ...] = (0.1, 0.3, 0.3, 0.3)
    """Probability of 1, 2, ... sources."""
    scene_share: float = 0.6
    """Share of mixtures of one background and foregrounds; the others are of equals."""
    scene_snr_db: tuple[float, float] = (-5.0, 25.0)
    scene_backgrounds: tuple[str, ...] = ()
    """Rough classes that backgrounds of scenes are of, their foregrounds then being no ambience; none: any
    class but speech."""
    layered_backgrounds: float = 0.0
    """Share of scenes whose background, one source, is laid of two recordings: what sounds in a place is
    rarely of one kind, and a bank has few places."""
    layer_level_db: float = 10.0
    """The second recording of a background is at most so much stronger or weaker than the first."""
    event_share: float = 0.0
    """Share of the sources but backgrounds that are one clip somewhere, or up to six of a short one, as the
    evaluation mixtures place them; the others are clips of a family that follow each other."""
    equal_level_db: float = 8.0
    same_class: float = 0.15
    """Share of mixtures of equals drawn from one class."""
    reverberant: float = 0.3
    noise_db: tuple[float, float] = (-60.0, -30.0)
    """Level of the noise floor re the mixture; it belongs to no source."""

    @property
    def max_sources(self) -> int:
        """How many sources a mixture may have."""
        return len(self.counts)


class Bank:
    """The clips of one split, drawn by class, family and clip.

    Raises:
        SeparatorError: the folder is not a bank, or no clip of the split is in it.
    """

    def __init__(self, directory: Path, split: str) -> None:
        index = directory / "clips.csv"
        if not index.is_file():
            raise SeparatorError(
                f"no bank at {directory}: clips.csv is missing; run data/soundscapes/prepare.py"
            )
        with index.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["split"] == split]
        rows = [row for row in rows if float(row["bandwidth_hz"] or 0) >= BAND_LIMIT_HZ]
        if not rows:
            raise SeparatorError(f"the bank at {directory} has no clips of {split=}; prepare it again")
        self.audio = np.memmap(directory / "audio.i16", dtype="<i2", mode="r")
        self.clips: dict[str, dict[str, list[Clip]]] = {}
        for row in rows:
            clip = Clip(int(row["start"]), int(row["length"]), row["family"], row["rough_class"])
            self.clips.setdefault(clip.rough_class, {}).setdefault(clip.family, []).append(clip)
        self.classes = list(self.clips)
        self._class_share = _shares([[c for f in self.clips[k].values() for c in f] for k in self.classes])
        self._families = {k: list(self.clips[k]) for k in self.classes}
        self._family_share = {k: _shares([self.clips[k][f] for f in self._families[k]]) for k in self.classes}
        long = int(BACKGROUND_SECONDS * SAMPLE_RATE)
        every = [clip for families in self.clips.values() for clips in families.values() for clip in clips]
        self._long_clips = [clip for clip in every if clip.length >= long]
        self._backgrounds: dict[tuple[str, ...], tuple[list[Clip], npt.NDArray[np.float64]]] = {}

    def draw_class(self, rng: np.random.Generator, exclude: str | None = None) -> str:
        """Draw a rough class other than ``exclude``."""
        share = self._class_share * [name != exclude for name in self.classes]
        return str(rng.choice(self.classes, p=share / share.sum()))

    def draw_family(self, rng: np.random.Generator, rough_class: str) -> list[Clip]:
        """Draw a recording family of a class: its clips."""
        families = self._families[rough_class]
        return self.clips[rough_class][families[rng.choice(len(families), p=self._family_share[rough_class])]]

    def draw_background(self, rng: np.random.Generator, classes: tuple[str, ...] = ()) -> Clip:
        """Draw a clip long enough for a background, of one of ``classes`` (none: of any but speech).

        Raises:
            SeparatorError: the bank has none.
        """
        if classes not in self._backgrounds:
            chosen = [
                clip
                for clip in self._long_clips
                if (clip.rough_class in classes if classes else clip.rough_class != "speech")
            ]
            self._backgrounds[classes] = chosen, _shares([[clip] for clip in chosen])
        clips, share = self._backgrounds[classes]
        if not clips:
            raise SeparatorError(
                f"no clip of {BACKGROUND_SECONDS} s or more for a background of {classes or 'any class'}; "
                "pass scene_share=0 or other classes"
            )
        return clips[rng.choice(len(clips), p=share)]

    def read(self, clip: Clip) -> Samples:
        """Samples of a clip in [-1, 1]."""
        return self.audio[clip.start : clip.start + clip.length].astype(np.float32) / np.float32(32768)


class MixtureDataset(Dataset[dict[str, Tensor]]):
    """Training batches by index: ``sources`` [B, K, time], ``mixture`` [B, time] and ``active`` [B, K].

    Row r of batch n is drawn from ``(seed, n, r)``; of ``rows`` only those are drawn.
    """

    def __init__(
        self,
        bank: Bank,
        config: MixingConfig,
        *,
        batch_size: int,
        n_batches: int,
        seed: int,
        rows: slice = slice(None),
    ) -> None:
        self.bank = bank
        self.config = config
        self.n_batches = n_batches
        self.seed = seed
        self.rows = range(batch_size)[rows]

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        config = self.config
        if config.shortest_seconds:
            rng = np.random.default_rng([self.seed, index, 0, 1])  # a stream of no row: zeros pad seeds
            config = dataclasses.replace(
                config, seconds=float(rng.uniform(config.shortest_seconds, config.seconds))
            )
        draws = [np.random.default_rng([self.seed, index, row]) for row in self.rows]
        mixtures = [draw_mixture(self.bank, config, rng) for rng in draws]
        sources = torch.from_numpy(np.stack([sources for sources, _ in mixtures]))
        noise = torch.from_numpy(np.stack([noise for _, noise in mixtures]))
        return {
            "sources": sources,
            "mixture": sources.sum(1) + noise,
            "active": sources.square().sum(-1) > 0,
        }


class BankMixtures:
    """The mixtures of a bank, for the trainer."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def batches(
        self, mixing: MixingConfig, *, batch_size: int, n_batches: int, seed: int, rows: slice
    ) -> MixtureDataset:
        """Return ``rows`` of the training batches, by index."""
        bank = Bank(self._directory, "train")
        return MixtureDataset(bank, mixing, batch_size=batch_size, n_batches=n_batches, seed=seed, rows=rows)

    def validation(self, mixing: MixingConfig, n: int) -> Iterator[Tensor]:
        """Yield the sources [K, time] of n mixtures of clips that training never hears."""
        return fixed_mixtures(Bank(self._directory, "validation"), mixing, n)


def fixed_mixtures(bank: Bank, mixing: MixingConfig, n: int) -> Iterator[Tensor]:
    """Yield the sources [K, time] of n mixtures of 10 s, of 1, 2, ... in turn; every call draws the same."""
    n_counts = len(mixing.counts)
    for index in range(n):
        counts = tuple(float(k == index % n_counts) for k in range(n_counts))
        drawn = dataclasses.replace(mixing, counts=counts, seconds=MIXTURE_SECONDS)
        sources, _ = draw_mixture(bank, drawn, np.random.default_rng([index, 1]))
        yield torch.from_numpy(sources[: index % n_counts + 1])


def draw_mixture(bank: Bank, config: MixingConfig, rng: np.random.Generator) -> tuple[Samples, Samples]:
    """Draw a mixture: sources [len(counts), time], silent where there is none, and its noise floor [time]."""
    length = round(config.seconds * SAMPLE_RATE)
    sources = np.zeros((len(config.counts), length), np.float32)
    count = 1 + int(rng.choice(len(config.counts), p=config.counts))
    scene = rng.random() < config.scene_share
    one_class = bank.draw_class(rng) if not scene and rng.random() < config.same_class else None
    used: set[str] = set()
    for k in range(count):
        for _ in range(10):  # a small bank may have no further family
            if scene and k == 0:
                source, family = draw_background(bank, config, length, rng)
            else:
                exclude = AMBIENCE if scene and config.scene_backgrounds else None
                clips = bank.draw_family(rng, one_class or bank.draw_class(rng, exclude))
                event = config.event_share > 0 and rng.random() < config.event_share
                source = (place_event if event else place_clips)(bank, clips, length, rng)
                family = clips[0].family
            if family not in used:
                break
        used.add(family)
        source = augment(source, config.reverberant, rng)
        if scene:
            level_db = 0.0 if k == 0 else float(rng.uniform(*config.scene_snr_db))
        else:
            level_db = float(rng.uniform(-config.equal_level_db, config.equal_level_db))
        sources[k] = set_level(source, level_db) * rng.choice([-1, 1])
    level = float(np.sqrt(np.mean(np.square(sources.sum(0))))) + 1e-8
    noise_level = level * 10 ** (float(rng.uniform(*config.noise_db)) / 20)
    noise = rng.standard_normal(length, np.float32) * np.float32(noise_level)
    scale = np.float32(0.1 / level)
    return sources * scale, noise * scale


def draw_background(
    bank: Bank, config: MixingConfig, length: int, rng: np.random.Generator
) -> tuple[Samples, str]:
    """Draw a background of ``length`` samples and its family, or that of its first layer."""

    def draw() -> tuple[Samples, str]:
        clip = bank.draw_background(rng, config.scene_backgrounds)
        return loop(crop(bank.read(clip), length, rng), length), clip.family

    source, family = draw()
    if config.layered_backgrounds > 0 and rng.random() < config.layered_backgrounds:
        level_db = float(rng.uniform(-config.layer_level_db, config.layer_level_db))
        source = set_level(source, 0.0) + set_level(draw()[0], level_db)
    return source, family


def place_clips(bank: Bank, clips: list[Clip], length: int, rng: np.random.Generator) -> Samples:
    """Lay clips of one family behind each other, with gaps, somewhere in ``length`` samples."""
    source = np.zeros(length, np.float32)
    share = _shares([[clip] for clip in clips])
    wanted = length * float(rng.uniform(0.3, 1.0))
    position = int(rng.integers(0, max(1, int(length - 0.7 * wanted)))) if rng.random() < 0.7 else 0
    first = clips[rng.choice(len(clips), p=share)]
    gap_scale = float(rng.choice([0.1, 0.5, 1.0])) * min(first.length, SAMPLE_RATE)
    speed = float(np.exp(rng.uniform(-0.3, 0.3))) if rng.random() < 0.5 else 1.0
    same = rng.random() < 0.3
    filled, clip = 0, first
    while position < length:
        audio = crop(change_speed(bank.read(clip), speed), length, rng)
        end = min(length, position + len(audio))
        source[position:end] += fade(audio[: end - position])
        filled += end - position
        if filled >= wanted:
            break
        position = end + int(rng.exponential(gap_scale))
        clip = first if same else clips[rng.choice(len(clips), p=share)]
    return source


def place_event(bank: Bank, clips: list[Clip], length: int, rng: np.random.Generator) -> Samples:
    """Lay a clip of a family somewhere in ``length`` samples, under `SCATTER_SECONDS` up to six times."""
    clip = clips[rng.choice(len(clips), p=_shares([[clip] for clip in clips]))]
    speed = float(np.exp(rng.uniform(-0.3, 0.3))) if rng.random() < 0.5 else 1.0
    audio = fade(crop(change_speed(bank.read(clip), speed), length, rng))
    source = np.zeros(length, np.float32)
    repeats = int(rng.integers(2, 7)) if len(audio) < SCATTER_SECONDS * SAMPLE_RATE else 1
    position = int(rng.integers(0, max(1, length - (2 * repeats - 1) * len(audio))))
    for _ in range(repeats):
        if position + len(audio) > length:
            break
        source[position : position + len(audio)] = audio
        position += len(audio) + int(rng.exponential(MEAN_GAP_SECONDS) * SAMPLE_RATE)
    return source


def _shares(groups: list[list[Clip]]) -> npt.NDArray[np.float64]:
    """Probability of each group: its samples to the power `CLASS_POWER`."""
    lengths = [sum(clip.length for clip in group) for group in groups]
    sizes: npt.NDArray[np.float64] = np.array(lengths, dtype=np.float64) ** CLASS_POWER
    return np.asarray(sizes / sizes.sum())
