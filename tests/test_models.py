"""The shipped model on the sample recordings, which it never trained on."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from separator import Separator
from separator.checkpoint import available_models, models_dir
from separator.metrics import match_known_count

SAMPLES = Path(__file__).parents[1] / "data/samples"


@pytest.fixture(scope="module")
def separator() -> Separator:
    return Separator.load()


def sources_of(name: str) -> np.ndarray:
    """(source, channel, time)."""
    paths = sorted((SAMPLES / f"{name}_sources").glob("*.flac"))
    return np.stack([soundfile.read(path, dtype="float32", always_2d=True)[0].T for path in paths])


def test_models_are_small_and_free_of_pickle() -> None:
    assert "soundscapes" in available_models()
    files = [path for path in models_dir().rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".md", ".toml", ".safetensors", ".png"}
    assert all(path.stat().st_size < 25e6 for path in files)


@pytest.mark.parametrize(("name", "least_gain_db"), [("mix3", 3.0), ("mix4", 1.0)])
def test_known_sources_gain(separator: Separator, name: str, least_gain_db: float) -> None:
    sources = sources_of(name)
    out = separator.separate(sources.sum(0), 16_000, min_existence=0.0)
    truth = torch.from_numpy(sources[:, 0])
    match = match_known_count(torch.from_numpy(out.estimates[:, 0]), truth, truth.sum(0), zero_mean=False)
    assert match.improvement.mean() > least_gain_db


def test_a_single_sound_comes_back_whole(separator: Separator) -> None:
    sources = sources_of("single")
    out = separator.separate(sources[0], 16_000)
    error = out.estimates[0] - sources[0]
    assert 10 * np.log10(np.square(sources[0]).sum() / np.square(error).sum()) > 20


@pytest.mark.parametrize("name", ["single", "mix3", "mix4", "stereo"])
def test_estimates_and_residual_sum_to_the_recording(separator: Separator, name: str) -> None:
    waveform, sample_rate = soundfile.read(SAMPLES / f"{name}.wav", dtype="float32", always_2d=True)
    out = separator.separate(np.ascontiguousarray(waveform.T), sample_rate)
    error = out.estimates.sum(0) + out.residual - waveform.T
    assert out.residual.shape == waveform.T.shape
    assert 10 * np.log10(np.square(error).sum() / np.square(waveform).sum() + 1e-30) < -100


def test_eight_slots_work_with_the_weights_of_four(separator: Separator) -> None:
    mixture = sources_of("mix4").sum(0)
    out = separator.separate(mixture, 16_000, n_slots=8, min_existence=0.0)
    assert out.estimates.shape[0] == 8
    assert np.isfinite(out.estimates).all()
