"""What holds for every length, rate, number of channels and depth; and for a device without memory."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from separator import Separator, SeparatorError
from separator.separate import SMALL_SEGMENT_SECONDS

RATES = (8000, 11_025, 16_000, 22_050, 37_800, 44_100, 48_000, 96_000, 176_400, 192_000)
BITS = {"PCM_U8": 8, "PCM_S8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
KINDS = [
    *(("WAV", s) for s in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE")),
    *(("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("AIFF", "PCM_S8"), ("W64", "FLOAT")),
]
CLASSES = [HealthCheck.function_scoped_fixture]  # the fixtures are a class and a function without state
files = st.fixed_dictionaries(
    {
        "rate": st.sampled_from(RATES),
        "channels": st.integers(1, 8),
        "kind": st.sampled_from(KINDS),
        "length": st.one_of(st.integers(1, 3000), st.sampled_from((9999, 40_001))),
        "peak": st.sampled_from((1e-4, 0.3, 0.999)),
        "seed": st.integers(0, 9),
    }
)


@pytest.fixture(scope="module")
def random_separator(random_model: Path) -> Separator:
    return Separator.load(random_model)


def write(folder: Path, rate: int, channels: int, kind: tuple[str, str], length: int, peak: float, seed: int):
    """A file of noise; its path and its samples as they read back."""
    samples = np.random.default_rng(seed).uniform(-peak, peak, (length, channels))
    path = folder / "a.bin"
    soundfile.write(path, samples, rate, format=kind[0], subtype=kind[1])
    return path, soundfile.read(path, always_2d=True)[0]


@settings(max_examples=40)
@given(file=files, form=st.sampled_from(("wav", "flac")))
def test_stems_have_the_rate_channels_length_and_depth_of_the_file_and_add_up(random_separator, file, form):
    with tempfile.TemporaryDirectory() as folder:
        path, mixture = write(Path(folder), **file)
        result = random_separator.separate_file(path, Path(folder) / "out", format=form)
        total = np.zeros_like(mixture)
        for stem in (*result.sources, result.residual):
            samples, rate = soundfile.read(stem.file, always_2d=True)
            assert (rate, samples.shape) == (file["rate"], mixture.shape)
            total += samples
        subtype = soundfile.info(result.residual.file).subtype
    own = file["kind"][1]
    if form == "wav":
        assert subtype == {"PCM_S8": "PCM_U8"}.get(own, own)
    error = np.abs(total - 10 ** (result.gain_db / 20) * mixture).max()
    if subtype in BITS:
        step = 2.0 ** (1 - BITS[subtype])
        exact = result.gain_db == 0 and BITS[subtype] >= BITS.get(own, 99)
        assert error <= (0 if exact else step)
    else:
        assert result.gain_db == 0
        assert error <= 1e-5 * np.abs(mixture).max()


@settings(max_examples=25, suppress_health_check=CLASSES)
@given(
    rate=st.sampled_from(RATES),
    channels=st.integers(1, 4),
    frequencies=st.tuples(st.integers(200, 800), st.integers(1200, 1800), st.integers(2200, 3600)),
    signs=st.lists(st.sampled_from((1, -1)), min_size=4, max_size=4),
)
def test_every_sound_is_one_stem_in_every_channel_at_every_rate(
    band_network, tones, rate, channels, frequencies, signs
):
    separator = Separator(band_network(shuffle=True).eval())
    sounds = np.array([[0.3], [0.2], [0.1]]) * tones(frequencies, rate, 0.6, amplitude=1.0)
    mixture = np.array(signs[:channels])[:, None] * sounds.sum(0)
    result = separator.separate(mixture, rate)
    assert len(result.estimates) == 3
    middle = slice(rate // 5, -rate // 5)
    for estimate, sound in zip(result.estimates, sounds, strict=True):
        for channel, sign in zip(estimate, signs, strict=False):
            np.testing.assert_allclose(channel[middle], sign * sound[middle], atol=0.01)


@settings(max_examples=10, suppress_health_check=CLASSES)
@given(seconds=st.floats(10.1, 40), shuffle_rate=st.sampled_from((8000, 16_000)), pause=st.floats(0, 15))
def test_a_stem_keeps_its_sound_over_any_number_of_segments_and_pauses(
    band_network, tones, seconds, shuffle_rate, pause
):
    separator = Separator(band_network(shuffle=True).eval())
    low, high = tones((500.0, 3000.0), shuffle_rate, seconds)
    time = np.arange(len(low)) / shuffle_rate
    high = high * 0.5 * ((time < 2) | (time > 2 + pause))
    result = separator.separate((low + high)[None], shuffle_rate)
    middle = slice(shuffle_rate // 5, -shuffle_rate // 5)
    np.testing.assert_allclose(result.estimates[0, 0, middle], low[middle], atol=0.05)
    np.testing.assert_allclose(result.estimates[1, 0, middle], high[middle], atol=0.05)


class Crowded(torch.nn.Module):
    """A device that has no memory for segments longer than ``seconds``, the first ``n_failures`` times."""

    def __init__(self, network: torch.nn.Module, seconds: float, n_failures: int = 99) -> None:
        super().__init__()
        self.network = network
        self.config = network.config
        self.seconds = seconds
        self.n_failures = n_failures

    def forward(self, spectrogram: torch.Tensor, *, n_slots: int | None = None):
        if spectrogram.shape[-1] > self.seconds * 62.5 + 2 and self.n_failures > 0:
            self.n_failures -= 1
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.network(spectrogram, n_slots=n_slots)


@pytest.fixture
def long_tone(tones) -> np.ndarray:
    return tones((500.0, 1500.0, 3000.0), 16_000, 25.0).sum(0, keepdims=True)


def test_a_device_without_memory_gets_smaller_segments(band_network, band_separator, long_tone):
    said: list[str] = []
    separator = Separator(Crowded(band_network(), SMALL_SEGMENT_SECONDS).eval(), fall_back=True)
    result = separator.separate(long_tone, 16_000, warn=said.append)
    expected = band_separator.separate(long_tone, 16_000)
    np.testing.assert_allclose(result.estimates, expected.estimates, atol=1e-5)
    assert said == ["cpu has no memory for segments of 10 s; trying 6 s"]


def test_a_device_without_any_memory_is_left_for_the_cpu(tmp_path, band_network, long_tone):
    said: list[str] = []
    separator = Separator(Crowded(band_network(), 0, n_failures=2).eval(), fall_back=True)
    soundfile.write(tmp_path / "a.wav", long_tone[0], 16_000)
    result = separator.separate_file(tmp_path / "a.wav", tmp_path / "out", warn=said.append)
    assert len(result.sources) == 3
    assert "going on with the CPU" in said[1]
    assert next(separator.network.parameters()).device.type == "cpu"


def test_a_device_that_was_asked_for_is_not_left(band_network, long_tone):
    separator = Separator(Crowded(band_network(), 0).eval())
    with pytest.raises(
        SeparatorError, match=r"device=cpu has no memory left; free it, or pass device='auto'"
    ):
        separator.separate(long_tone, 16_000)


def test_only_auto_falls_back(random_model):
    assert Separator.load(random_model).fall_back
    assert not Separator.load(random_model, device="cpu").fall_back


def test_a_warning_that_nobody_takes_is_one_of_python(tmp_path, random_separator):
    soundfile.write(tmp_path / "a.wav", np.zeros(8000), 8000)
    content = bytearray((tmp_path / "a.wav").read_bytes())
    (tmp_path / "a.wav").write_bytes(content[:-100])
    with pytest.warns(UserWarning, match="the file holds 7950"):
        random_separator.separate_file(tmp_path / "a.wav", tmp_path / "out")
