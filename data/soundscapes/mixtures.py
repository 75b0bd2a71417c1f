"""Evaluation and validation mixtures of 1 to 4 sources from the bank, in the folder layout of FUSS.

This is `prepare.py mixtures`. A mixture is 10 s: one background (a long clip; looped with a crossfade if it
is too short) and 0 to 3 foregrounds at -5 to 25 dB to it, as in FUSS (Wisdom et al. 2021). Sources of a
mixture come from different families, and never from the same class of the same package. Every draw comes
from a fixed seed.
"""

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import soundfile

from separator.errors import SeparatorError

Clip = dict[str, str]
Samples = np.ndarray

SAMPLE_RATE = 16000
LENGTH = 10 * SAMPLE_RATE
MIXTURES_PER_COUNT = {"evaluation": 200, "validation": 200}
SEEDS = {"evaluation": 20_240_601, "validation": 20_240_602}
MAX_SOURCES = 4
HELD_OUT_SHARE = 1 / 3  # of the evaluation mixtures: every source from a package that training never saw
LEVEL_RANGE_DB = (-5.0, 25.0)  # a foreground to the background, as in FUSS
MIXTURE_RMS_DB = (-30.0, -18.0)
MAX_PEAK = 0.9
CLASS_POWER = 0.4  # of the seconds of a class: its share of the draws
BACKGROUND_SECONDS = 9.5  # a 10 s recording loses a little when its silence is trimmed
SHORT_BACKGROUND_SECONDS = 4.0  # looped, when a package has nothing longer
SCATTER_SECONDS = 2.0  # shorter foregrounds are repeated
CROSSFADE_SECONDS = 0.25
FADE_SECONDS = 0.005
BACKGROUND_CLASSES = ("ambience_background", "vehicles_mechanical")
FILE_NAMES = ("background0_sound", "foreground0_sound", "foreground1_sound", "foreground2_sound")


@dataclass(frozen=True)
class Pool:
    """Clips that a mixture may draw from: foregrounds by class and family, and backgrounds by family."""

    foregrounds: dict[str, dict[str, list[Clip]]]
    backgrounds: dict[str, list[Clip]]
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """One source of a mixture: its clip, waveform (time,) float64 at its place, and level."""

    clip: Clip
    waveform: Samples
    level_db: float  # over its active time, re the background


def write_mixtures(bank: Path, output: Path, *, progress: Callable[[str], None]) -> None:
    """Write all splits: mixtures, their sources, `{split}_example_list.txt` and `{split}_examples.csv`.

    Raises:
        SeparatorError: the bank is missing or has too few families for a mixture of four.
    """
    index = bank / "clips.csv"
    if not index.is_file():
        raise SeparatorError(f"{bank} has no clips.csv; run `prepare.py bank` first")
    with index.open(encoding="utf-8", newline="") as file:
        clips = list(csv.DictReader(file))
    audio = np.memmap(bank / "audio.i16", dtype="<i2", mode="r")
    for split, count in MIXTURES_PER_COUNT.items():
        chosen = [clip for clip in clips if clip["split"] == split]
        _write_split(split, chosen, audio, output, count)
        progress(f"{split}: {MAX_SOURCES * count} mixtures in {output / split}")


def make_pool(clips: Iterable[Clip]) -> Pool:
    """Sort clips into foregrounds and backgrounds."""
    foregrounds: dict[str, dict[str, list[Clip]]] = defaultdict(lambda: defaultdict(list))
    long: dict[str, list[Clip]] = defaultdict(list)
    shorter: dict[str, list[Clip]] = defaultdict(list)
    for clip in clips:
        seconds = int(clip["length"]) / SAMPLE_RATE
        if clip["rough_class"] in BACKGROUND_CLASSES:
            if seconds >= BACKGROUND_SECONDS:
                long[clip["family"]].append(clip)
            elif seconds >= SHORT_BACKGROUND_SECONDS and clip["rough_class"] == "ambience_background":
                shorter[clip["family"]].append(clip)
        if clip["rough_class"] != "ambience_background":
            foregrounds[clip["rough_class"]][clip["family"]].append(clip)
    backgrounds = dict(long)
    for family, members in shorter.items():
        backgrounds.setdefault(family, members)
    sizes = {
        name: sum(int(clip["length"]) for members in families.values() for clip in members) ** CLASS_POWER
        for name, families in foregrounds.items()
    }
    total = sum(sizes.values())
    return Pool(
        {k: dict(v) for k, v in foregrounds.items()}, backgrounds, {k: v / total for k, v in sizes.items()}
    )


def draw_sources(pool: Pool, n_sources: int, audio: Samples, generator: np.random.Generator) -> list[Source]:
    """One background and `n_sources` - 1 foregrounds, at their levels; a single source is of either kind."""
    if n_sources == 1 and generator.random() < 0.5:
        clip = _draw_foreground(pool, [], generator)
        return [Source(clip, _place(_read(audio, clip), generator), 0.0)]
    clip = _draw_background(pool, generator)
    background = _fill(_read(audio, clip), generator)
    sources = [Source(clip, background / active_rms(background), 0.0)]
    while len(sources) < n_sources:
        clip = _draw_foreground(pool, [source.clip for source in sources], generator)
        waveform = _place(_read(audio, clip), generator)
        level_db = float(generator.uniform(*LEVEL_RANGE_DB))
        sources.append(Source(clip, waveform * 10 ** (level_db / 20) / active_rms(waveform), level_db))
    return sources


def mix(sources: Sequence[Samples], generator: np.random.Generator) -> tuple[Samples, list[Samples]]:
    """Scale sources to a drawn level of their sum and round to int16; the mixture is their exact sum."""
    total = np.sum(sources, axis=0)
    rms = float(np.sqrt(np.mean(total**2)))
    gain = 10 ** (generator.uniform(*MIXTURE_RMS_DB) / 20) / rms
    peak = max(float(np.abs(waveform).max()) for waveform in (total, *sources))
    gain = min(gain, (MAX_PEAK - 0.001) / peak)
    rounded = [np.round(waveform * gain * 32768).astype(np.int16) for waveform in sources]
    return np.asarray(np.sum(rounded, axis=0), dtype=np.int16), rounded


def active_rms(waveform: Samples) -> float:
    """RMS over the 25 ms blocks within 40 dB of the loudest, so that pauses do not count."""
    blocks = waveform[: len(waveform) // 400 * 400].reshape(-1, 400)
    power = np.mean(np.square(blocks), axis=1)
    return float(np.sqrt(power[power > 1e-4 * power.max()].mean()))


def _write_split(split: str, clips: Sequence[Clip], audio: Samples, output: Path, count: int) -> None:
    pool = make_pool(clips)
    unseen = make_pool(clip for clip in clips if clip["package_heldout"] == "yes")
    seen = make_pool(clip for clip in clips if clip["package_heldout"] != "yes")
    if not pool.backgrounds or len(pool.foregrounds) < MAX_SOURCES - 1:
        raise SeparatorError(
            f"{split} has {len(pool.backgrounds)} backgrounds and {len(pool.foregrounds)} classes of "
            f"foregrounds, too few for {MAX_SOURCES} sources; prepare the bank from all packages"
        )
    generator = np.random.default_rng(SEEDS[split])
    rows: list[dict[str, object]] = []
    lines: list[str] = []
    n_unseen = round(HELD_OUT_SHARE * count) if unseen.backgrounds else 0
    for n_sources in range(1, MAX_SOURCES + 1):
        for repeat in range(count):
            sources = draw_sources(unseen if repeat < n_unseen else seen, n_sources, audio, generator)
            name = f"example{len(rows):04d}"
            lines.append(_write_example(output, split, name, sources, generator))
            rows.append(_example_row(f"{split}/{name}.wav", sources))
    (output / f"{split}_example_list.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = io.StringIO()
    writer = csv.DictWriter(
        text, list(_example_row("", [], columns_only=True)), restval="", lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    (output / f"{split}_examples.csv").write_text(text.getvalue(), encoding="utf-8")


def _write_example(
    output: Path, split: str, name: str, sources: Sequence[Source], generator: np.random.Generator
) -> str:
    """Write one mixture and its sources; return its line of the example list."""
    mixture, stems = mix([source.waveform for source in sources], generator)
    folder = output / split / f"{name}_sources"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.wav"):
        old.unlink()
    soundfile.write(output / split / f"{name}.wav", mixture, SAMPLE_RATE, subtype="PCM_16")
    paths = [f"{split}/{name}.wav"]
    for stem, file_name in zip(stems, FILE_NAMES, strict=False):
        soundfile.write(folder / f"{file_name}.wav", stem, SAMPLE_RATE, subtype="PCM_16")
        paths.append(f"{split}/{name}_sources/{file_name}.wav")
    return "\t".join(paths)


def _example_row(mixture: str, sources: Sequence[Source], *, columns_only: bool = False) -> dict[str, object]:
    heldout = all(source.clip["package_heldout"] == "yes" for source in sources)
    row: dict[str, object] = {
        "mixture": mixture,
        "n_sources": len(sources),
        "package_heldout": "yes" if heldout else "no",
    }
    for k in range(MAX_SOURCES):
        for column in ("family", "package", "rough_class", "path", "licence"):
            if columns_only or k < len(sources):
                row[f"{column}{k}"] = "" if columns_only else sources[k].clip[column]
        if columns_only or k < len(sources):
            row[f"level_db{k}"] = "" if columns_only else f"{sources[k].level_db:.2f}"
    return row


def _draw_background(pool: Pool, generator: np.random.Generator) -> Clip:
    members = pool.backgrounds[str(generator.choice(sorted(pool.backgrounds)))]
    return members[int(generator.integers(len(members)))]


def _draw_foreground(pool: Pool, others: Sequence[Clip], generator: np.random.Generator) -> Clip:
    """Draw class, family and clip, until its family and its pair of class and package are new."""
    names = sorted(pool.foregrounds)
    shares = [pool.shares[name] for name in names]
    used_families = {clip["family"] for clip in others}
    used_kinds = {(clip["rough_class"], clip["package"]) for clip in others}
    for _ in range(1000):
        families = pool.foregrounds[str(generator.choice(names, p=shares))]
        members = families[str(generator.choice(sorted(families)))]
        clip = members[int(generator.integers(len(members)))]
        if clip["family"] not in used_families and (clip["rough_class"], clip["package"]) not in used_kinds:
            return clip
    raise SeparatorError(
        f"no foreground differs from {sorted(used_families)}; prepare the bank from all packages"
    )


def _read(audio: Samples, clip: Clip) -> Samples:
    start, length = int(clip["start"]), int(clip["length"])
    return audio[start : start + length].astype(np.float64) / 32768


def _fill(waveform: Samples, generator: np.random.Generator) -> Samples:
    """Ten seconds of a background: a stretch of it, or a loop with equal-power crossfades."""
    overlap = min(int(CROSSFADE_SECONDS * SAMPLE_RATE), len(waveform) // 4)
    rise = np.sqrt(np.linspace(0, 1, overlap))
    result = waveform
    while len(result) < LENGTH:
        seam = result[-overlap:] * rise[::-1] + waveform[:overlap] * rise
        result = np.concatenate([result[:-overlap], seam, waveform[overlap:]])
    start = int(generator.integers(len(result) - LENGTH + 1))
    return result[start : start + LENGTH]


def _place(waveform: Samples, generator: np.random.Generator) -> Samples:
    """A foreground at a random time of ten seconds; one under 2 s comes several times with random gaps."""
    result = np.zeros(LENGTH)
    if len(waveform) >= LENGTH:
        start = int(generator.integers(len(waveform) - LENGTH + 1))
        return _faded(waveform[start : start + LENGTH])
    waveform = _faded(waveform)
    if len(waveform) >= SCATTER_SECONDS * SAMPLE_RATE:
        start = int(generator.integers(LENGTH - len(waveform) + 1))
        result[start : start + len(waveform)] = waveform
        return result
    repeats = int(generator.integers(2, 7))
    start = int(generator.integers(max(1, LENGTH - repeats * 2 * len(waveform))))
    for _ in range(repeats):
        if start + len(waveform) > LENGTH:
            break
        result[start : start + len(waveform)] = waveform
        start += len(waveform) + int(generator.exponential(0.8) * SAMPLE_RATE)
    return result


def _faded(waveform: Samples) -> Samples:
    count = min(int(FADE_SECONDS * SAMPLE_RATE), len(waveform) // 2)
    envelope = np.ones(len(waveform))
    envelope[:count] = np.linspace(0, 1, count, endpoint=False)
    envelope[len(waveform) - count :] = envelope[:count][::-1]
    return waveform * envelope
