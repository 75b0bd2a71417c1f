"""Mixtures on the fly, from a small bank with planted families."""

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from separator.augmentation import SAMPLE_RATE, change_speed, loop, set_level
from separator.datasets import (
    SCATTER_SECONDS,
    Bank,
    MixingConfig,
    MixtureDataset,
    draw_mixture,
    place_event,
)
from separator.errors import SeparatorError

COLUMNS = ["clip", "start", "length", "package", "path", "family", "rough_class"]
COLUMNS += ["licence", "tier", "isolated", "bandwidth_hz", "split", "package_heldout"]


def write_bank(directory: Path, *, bandwidth_hz: int = 8000) -> Path:
    """Twelve families in three classes, each one tone; five clips are long enough for backgrounds."""
    rows, start = [], 0
    with (directory / "audio.i16").open("wb") as file:
        for index in range(24):
            n = 80_000 if index % 5 == 0 else 12_000 + 500 * index
            frequency = 200 + 150 * (index // 2)
            audio = 0.5 * np.sin(2 * np.pi * frequency * np.arange(n) / SAMPLE_RATE)
            file.write((audio * 32767).astype("<i2").tobytes())
            row = [index, start, n, "tones", f"{index}.wav", f"family{index // 2}", f"class{index // 2 % 3}"]
            rows.append(
                [*row, "CC0-1.0", 1, "yes", bandwidth_hz, "train" if index < 20 else "validation", "no"]
            )
            start += n
    with (directory / "clips.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    return directory


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank(write_bank(tmp_path), "train")


def test_bank_holds_only_the_families_of_its_split(tmp_path: Path) -> None:
    write_bank(tmp_path)
    families = [
        {clip.family for f in Bank(tmp_path, split).clips.values() for clips in f.values() for clip in clips}
        for split in ("train", "validation")
    ]
    assert families[0] == {f"family{k}" for k in range(10)}
    assert families[1] == {"family10", "family11"}


def test_missing_bank_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match=r"clips.csv is missing; run data/soundscapes/prepare.py"):
        Bank(tmp_path, "train")


def test_band_limited_clips_are_left_out(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match="no clips of split='train'"):
        Bank(write_bank(tmp_path, bandwidth_hz=3000), "train")


def test_batches_are_as_long_as_drawn_for_each(bank: Bank) -> None:
    config = MixingConfig(seconds=1.0, shortest_seconds=0.4)
    dataset = MixtureDataset(bank, config, batch_size=2, n_batches=9, seed=4)
    lengths = [dataset[k]["mixture"].shape[1] for k in range(6)]
    assert len(set(lengths)) == 6
    assert 0.4 * SAMPLE_RATE <= min(lengths) < max(lengths) <= SAMPLE_RATE
    firsts = [np.random.default_rng([4, 3, row]).uniform(0.4, 1.0) for row in range(2)]
    assert all(
        abs(lengths[3] / SAMPLE_RATE - first) > 1e-3 for first in firsts
    )  # length tells no row's draws
    part = MixtureDataset(bank, config, batch_size=2, n_batches=9, seed=4, rows=slice(1, 2))
    assert torch.equal(part[3]["mixture"], dataset[3]["mixture"][1:])


def test_an_event_is_one_clip_or_repeats_of_a_short_one(bank: Bank) -> None:
    clips = [clip for clips in bank.clips["class0"].values() for clip in clips]
    short = [clip for clip in clips if clip.length < SCATTER_SECONDS * SAMPLE_RATE / 2]
    long = [clip for clip in clips if clip.length > 2 * SCATTER_SECONDS * SAMPLE_RATE]
    assert short
    assert long
    for of_kind, least, most in ((short[:1], 1, 6), (long[:1], 1, 1)):
        counts = set()
        for seed in range(20):
            source = place_event(bank, of_kind, 10 * SAMPLE_RATE, np.random.default_rng(seed))
            sounds = np.abs(source.reshape(-1, 400)).max(1) > 0.1
            counts.add(int((np.diff(sounds.astype(int), prepend=0) == 1).sum()))
            assert abs(source[0]) < 1e-6  # faded in
        assert least <= min(counts) <= max(counts) <= most
        assert (max(counts) > 1) == (most > 1)


def test_mixture_of_an_index_is_always_the_same(bank: Bank) -> None:
    dataset = MixtureDataset(bank, MixingConfig(seconds=1.0), batch_size=3, n_batches=9, seed=4)
    first, again, other = dataset[5], dataset[5], dataset[6]
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["mixture"], other["mixture"])


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_mixture_has_as_many_sources_as_drawn_and_adds_up_but_for_its_noise(bank: Bank, count: int) -> None:
    counts = tuple(float(k + 1 == count) for k in range(4))
    config = MixingConfig(seconds=1.5, counts=counts, noise_db=(-60.0, -30.0))
    batch = MixtureDataset(bank, config, batch_size=6, n_batches=1, seed=0)[0]
    assert (batch["active"].sum(1) == count).all()
    noise = batch["mixture"] - batch["sources"].sum(1)
    level_db = 10 * torch.log10(noise.square().mean(1) / batch["sources"].sum(1).square().mean(1))
    assert (level_db < -29).all()
    assert (level_db > -61).all()


def test_scene_levels_lie_in_the_stated_range(bank: Bank) -> None:
    config = MixingConfig(seconds=2.0, counts=(0.0, 1.0), scene_share=1.0, scene_snr_db=(10.0, 11.0))
    for seed in range(20):
        background, foreground = draw_mixture(bank, config, np.random.default_rng(seed))[0]
        loud = foreground.reshape(-1, 400)
        power = np.square(loud).mean(1)
        active = power[power > 1e-4 * power.max()].mean()
        ratio_db = 10 * np.log10(active / np.square(background).mean())
        assert 9.0 < ratio_db < 12.5, seed  # silence inside the background shifts its own measure a little


@pytest.mark.parametrize(("share", "most"), [(0.0, 1), (1.0, 2)])
def test_a_background_has_as_many_layers_as_drawn_and_is_one_source(
    bank: Bank, share: float, most: int
) -> None:
    config = MixingConfig(
        seconds=1.0, counts=(1.0,), scene_share=1.0, reverberant=0.0, layered_backgrounds=share
    )
    tones = []
    for seed in range(20):
        (background,) = draw_mixture(bank, config, np.random.default_rng(seed))[0]
        spectrum = np.abs(np.fft.rfft(background * np.hanning(len(background))))
        inner = spectrum[1:-1]
        peaks = (inner > spectrum[:-2]) & (inner >= spectrum[2:]) & (inner > 0.02 * spectrum.max())
        tones.append(int(peaks.sum()))
    assert max(tones) == most
    assert tones.count(most) > 10  # the two layers may be of one family


def test_sources_of_a_mixture_are_of_different_families(bank: Bank) -> None:
    config = MixingConfig(
        seconds=1.0, counts=(0.0, 0.0, 0.0, 1.0), scene_share=0.0, same_class=0.0, reverberant=0.0
    )
    for seed in range(10):
        sources = draw_mixture(bank, config, np.random.default_rng(seed))[0]
        spectra = np.abs(np.fft.rfft(sources, axis=1))
        unit = spectra / np.linalg.norm(spectra, axis=1, keepdims=True)
        assert (unit @ unit.T - np.eye(4)).max() < 0.9  # one tone a family, moved by the change of speed


def test_loop_fills_any_length_without_a_gap() -> None:
    audio = np.ones(4000, np.float32)
    out = loop(audio, 15_000)
    assert len(out) == 15_000
    assert out.min() > 0.9


def test_change_of_speed_moves_the_pitch() -> None:
    tone = np.sin(2 * np.pi * 500 * np.arange(SAMPLE_RATE) / SAMPLE_RATE).astype(np.float32)
    fast = change_speed(tone, 1.25)
    assert len(fast) == pytest.approx(SAMPLE_RATE / 1.25, abs=2)
    peak = np.abs(np.fft.rfft(fast)).argmax() * SAMPLE_RATE / len(fast)
    assert peak == pytest.approx(625, abs=2)


def test_level_counts_only_where_the_source_sounds() -> None:
    source = np.zeros(16_000, np.float32)
    source[4000:8000] = 0.3
    assert np.abs(set_level(source, -20.0)).max() == pytest.approx(0.1, rel=1e-5)
    assert not set_level(np.zeros(800, np.float32), 0.0).any()


def test_config_is_left_as_it_was(bank: Bank) -> None:
    config = MixingConfig(seconds=1.0)
    draw_mixture(bank, config, np.random.default_rng(0))
    assert config == dataclasses.replace(config)
