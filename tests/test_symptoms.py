"""What users of tools of this kind report, one test a symptom, numbered.

Symptoms 14 to 20 and 23 are those of the command (test_symptoms_command.py).
"""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from separator import Separator, SeparatorError
from separator.checkpoint import WEIGHTS
from separator.masks import apply_masks
from separator.metrics import si_sdr
from separator.results import FileSeparation
from separator.segments import SEED, mono_view
from separator.stft import STFT

SAMPLES = Path(__file__).parents[1] / "data/samples"
MEBI = 1 << 20
LONG = """
import sys
from pathlib import Path
import numpy as np, soundfile, torch
torch.set_num_threads(1)
from separator import Separator
from separator.network import NetworkConfig, SeparationNetwork
rate, channels, seconds, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
config = NetworkConfig(widths=(4, 4, 4, 8), n_context=1, embedding=4, min_existence=0.0)
separator = Separator(SeparationNetwork(config).eval())
block = np.random.default_rng(0).normal(0, 0.1, (rate, channels))
with soundfile.SoundFile(folder + "/long.wav", "w", rate, channels, "PCM_16") as file:
    for _ in range(seconds):
        file.write(block)
separator.separate_file(folder + "/long.wav", folder + "/out")
frames = soundfile.info(folder + "/out/long/residual.wav").frames
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(status["VmHWM"].split()[0], frames)  # what getrusage says includes the process that started this one
"""


def write(path: Path, samples: np.ndarray, rate: int = 16_000, **options) -> Path:
    """Write (channel, time)."""
    soundfile.write(path, samples.T, rate, **options)
    return path


def stems(result: FileSeparation) -> np.ndarray:
    """(stem, channel, time), the residual last."""
    return np.stack(
        [soundfile.read(stem.file, always_2d=True)[0].T for stem in (*result.sources, result.residual)]
    )


def noise(length: int, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(length).normal(0, 0.1, (channels, length)).clip(-0.9, 0.9)


@pytest.fixture(scope="module")
def random_separator(random_model: Path) -> Separator:
    return Separator.load(random_model)


@pytest.mark.parametrize(("rate", "channels", "seconds"), [(16_000, 1, 180), (44_100, 2, 45)])
def test_symptom_01_long_files_exhaust_memory(tmp_path, rate, channels, seconds):
    """Twice the length adds under 5 %; the recipe separate_speed measures hours."""
    peaks = []
    for length in (seconds, 2 * seconds):
        command = [sys.executable, "-c", LONG, str(rate), str(channels), str(length), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        peak, frames = map(int, done.stdout.split())
        assert frames == length * rate
        peaks.append(peak * 1024)
        (tmp_path / "long.wav").unlink()
        for stem in (tmp_path / "out/long").iterdir():
            stem.unlink()
    assert peaks[1] < 1200 * MEBI
    assert peaks[1] < 1.05 * peaks[0]


def test_symptom_02_everything_after_ten_minutes_is_missing(tmp_path, band_separator, tones):
    """A sound of the twelfth minute is where it was."""
    mixture = np.zeros((1, 720 * 8000))
    mixture[:, 700 * 8000 : 701 * 8000] = tones((500.0,), 8000, 1.0)
    result = band_separator.separate_file(write(tmp_path / "a.wav", mixture, 8000), tmp_path / "out")
    found = stems(result)
    assert found.shape[1:] == mixture.shape
    np.testing.assert_allclose(found[0], mixture, atol=0.05)
    np.testing.assert_array_equal(found.sum(0), soundfile.read(tmp_path / "a.wav")[0][None])


@pytest.mark.parametrize("length", [1, 2, 100, 48_000])
@pytest.mark.parametrize("rate", [8000, 16_000, 44_100, 192_000])
def test_symptom_03_short_inputs_crash(tmp_path, random_separator, length, rate):
    path = write(tmp_path / "a.wav", noise(length), rate, subtype="PCM_16")
    found = stems(random_separator.separate_file(path, tmp_path / "out"))
    np.testing.assert_array_equal(found.sum(0), soundfile.read(path, always_2d=True)[0].T)


@pytest.mark.parametrize(
    ("length", "rate"), [(159_999, 16_000), (160_001, 16_000), (96_032, 16_000), (1_464_000, 48_000)]
)
def test_symptom_04_stems_are_a_few_samples_short(tmp_path, random_separator, length, rate):
    result = random_separator.separate_file(write(tmp_path / "a.wav", noise(length), rate), tmp_path / "out")
    assert {soundfile.info(stem.file).frames for stem in (*result.sources, result.residual)} == {length}


def test_symptom_05_a_steady_tone_clicks_at_every_segment(band_network, tones):
    """The largest step from sample to sample at seams is at most 1.05 times the largest elsewhere."""

    class Leaky(band_network):  # a network that is not quite sure, otherwise in every segment
        def forward(self, spectrogram, *, n_slots=None):
            out = super().forward(spectrogram, n_slots=n_slots)
            return out._replace(masks=out.masks * (0.9 + 0.05 * (self.n_calls % 2)))

    for network in (band_network(shuffle=True), Leaky()):
        tone = tones((440.0, 1503.0), 16_000, 60.0).sum(0, keepdims=True)
        estimates = Separator(network.eval()).separate(tone, 16_000).estimates[:, 0]
        for estimate in estimates:
            steps = np.abs(np.diff(estimate))[1000:-1000]
            seam = np.zeros(len(steps), bool)
            for k in range(1, 7):
                seam[k * 8 * 16_000 - 1600 : (k * 8 + 2) * 16_000 + 1600] = True
            assert steps[seam].max() <= 1.05 * steps[~seam].max()


def test_symptom_06_alternating_sounds_swap_stems(tmp_path, band_network, tones):
    """Also with pauses longer than a segment between them, and though every segment orders its slots anew."""
    low, high = tones((500.0, 3000.0), 16_000, 90.0)
    time = np.arange(90 * 16_000) / 16_000
    for pause in (0, 13):
        period = 14 + 2 * pause
        first, second = time % period < 7, (time % period >= 7 + pause) & (time % period < 14 + pause)
        mixture = (low * first + high * second)[None]
        result = Separator(band_network(shuffle=True).eval()).separate(mixture, 16_000)
        loud = [estimate[0] for estimate in result.estimates if estimate.std() > 0.01]  # others: its onsets
        assert len(loud) == 2
        inside = [np.convolve(part, np.ones(1600), "same") > 1599 for part in (first, second)]
        owners = [[bool(np.abs(e[part]).max() > 0.1) for e in loud] for part in inside]
        assert sorted(owners) == [[False, True], [True, False]]


@pytest.mark.parametrize("subtype", ["FLOAT", "PCM_16", "PCM_24"])
def test_symptom_07_stems_do_not_add_up_after_clip_protection(tmp_path, band_separator, tones, subtype):
    loud = tones((500.0,), 16_000, 1.0, amplitude=1.8)
    square = 0.9999 * np.sign(np.sin(2 * np.pi * 400 * np.arange(16_000) / 16_000))[None]
    mixture = loud if subtype == "FLOAT" else square
    path = write(tmp_path / "a.wav", mixture, subtype=subtype)
    result = band_separator.separate_file(path, tmp_path / "out")
    found = stems(result)
    expected = 10 ** (result.gain_db / 20) * soundfile.read(path)[0][None]
    if subtype == "FLOAT":
        assert result.gain_db == 0
        assert np.abs(found).max() > 1
        np.testing.assert_allclose(found.sum(0), expected, atol=1e-6)
    else:
        assert -3 < result.gain_db < 0
        assert np.abs(found).max() < 1
        bits = int(subtype.removeprefix("PCM_"))
        np.testing.assert_allclose(found.sum(0), expected, atol=2.0 ** (1 - bits))


def test_symptom_08_quiet_input_is_made_loud(tmp_path, random_separator):
    quiet = 1e-4 * noise(16_000) / np.abs(noise(16_000)).max()
    for subtype in ("FLOAT", "PCM_24"):
        path = write(tmp_path / f"{subtype}.wav", quiet, subtype=subtype)
        result = random_separator.separate_file(path, tmp_path / "out")
        assert result.gain_db == 0
        assert np.abs(stems(result)).max() < 2e-4


def test_symptom_09_alternating_full_scale_samples_wrap_around(tmp_path, random_separator):
    values = np.where(np.arange(16_000) % 2, 32_767, -32_768).astype(np.int16)[None]
    path = write(tmp_path / "a.wav", values, subtype="PCM_16")
    result = random_separator.separate_file(path, tmp_path / "out")
    found = stems(result)
    expected = 10 ** (result.gain_db / 20) * values / 2**15
    np.testing.assert_allclose(found.sum(0), expected, atol=2**-15 * len(found))
    estimates = random_separator.separate((values / 2**15).astype(np.float32), 16_000).estimates
    scaled = 10 ** (result.gain_db / 20) * estimates
    np.testing.assert_allclose(found[:-1], scaled, atol=2**-14)


@pytest.mark.parametrize("sounds", [(), ((12.0, 13.0),), ((0.0, 1.0),)], ids=["silence", "late", "early"])
@pytest.mark.parametrize("channels", [1, 2])
def test_symptom_10_silence_makes_nan(tmp_path, random_separator, tones, sounds, channels):
    mixture = np.zeros((channels, 25 * 16_000))
    for start, stop in sounds:
        mixture[:, int(start * 16_000) : int(stop * 16_000)] = tones((440.0,), 16_000, stop - start)
    for subtype in ("PCM_16", "FLOAT"):
        path = write(tmp_path / f"{subtype}.wav", mixture, subtype=subtype)
        result = random_separator.separate_file(path, tmp_path / "out")
        found = stems(result)
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found.sum(0), soundfile.read(path, always_2d=True)[0].T, atol=1e-7)
        assert np.isfinite(result.existence).all()


def test_symptom_11_mono_and_stereo_in_one_call_do_not_work(tmp_path, random_separator):
    for name, channels in (("one", 1), ("two", 2), ("again", 1)):
        path = write(tmp_path / f"{name}.wav", noise(9000, channels), 44_100)
        assert stems(random_separator.separate_file(path, tmp_path / "out")).shape[1:] == (channels, 9000)


@pytest.mark.parametrize("channels", [3, 6, 8])
def test_symptom_12_more_than_two_channels_are_refused_or_mixed_down(
    tmp_path, band_separator, tones, channels
):
    low = tones((500.0,), 48_000, 1.0)[0]
    mixture = np.linspace(-1, 1, channels)[:, None] * low + 0.01 * noise(48_000, channels)
    result = band_separator.separate_file(write(tmp_path / "a.wav", mixture, 48_000), tmp_path / "out")
    found = stems(result)
    assert found.shape[1:] == mixture.shape
    np.testing.assert_allclose(found[0, :, 4800:-4800], mixture[:, 4800:-4800], atol=0.06)
    np.testing.assert_array_equal(found.sum(0), soundfile.read(tmp_path / "a.wav")[0].T)


def test_symptom_13_depths_are_read_differently(tmp_path, random_separator):
    """24 in 32 bits is the wide form of WAV: samples of four bytes of which three count."""
    samples = np.round(noise(8000) * 2**7) / 2**7  # a value of 8 bits is one of every depth
    kinds = [("WAV", "PCM_U8"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAVEX", "PCM_32"), ("WAV", "PCM_32")]
    kinds += [("WAV", "FLOAT"), ("WAV", "DOUBLE"), ("FLAC", "PCM_24")]
    found = {}
    for container, subtype in kinds:
        path = write(tmp_path / f"{container}{subtype}.wav", samples, format=container, subtype=subtype)
        if container == "WAVEX":  # 24 valid bits, as recorders write them
            content = bytearray(path.read_bytes())
            place = content.find(b"fmt ") + 8 + 18
            assert content[place : place + 2] == (32).to_bytes(2, "little")
            content[place : place + 2] = (24).to_bytes(2, "little")
            path.write_bytes(content)
        result = random_separator.separate_file(path, tmp_path / "out")
        found[container, subtype] = stems(result)
        np.testing.assert_allclose(found[container, subtype].sum(0), samples, atol=1e-7)
    for (_, subtype), values in found.items():
        step = 2**-7 if subtype == "PCM_U8" else 2**-15
        reference = found["WAV", "DOUBLE"]
        np.testing.assert_allclose(values, reference, atol=step * len(reference) / 2)


def test_symptom_21_what_is_no_wav_though_it_says_so(tmp_path, random_separator):
    """A truncated download is read with a warning, a web page refused, an mp3 read for what it is."""
    whole = write(tmp_path / "whole.wav", noise(48_000), subtype="PCM_16").read_bytes()
    (tmp_path / "cut.wav").write_bytes(whole[:50_044])
    said: list[str] = []
    result = random_separator.separate_file(tmp_path / "cut.wav", tmp_path / "out", warn=said.append)
    assert stems(result).shape[-1] == 25_000
    assert len(said) == 1
    assert "states 48000 samples, the file holds 25000" in said[0]
    (tmp_path / "page.wav").write_bytes(b"<!DOCTYPE html><html><body>404 Not found</body></html>" * 100)
    with pytest.raises(SeparatorError, match=r"page\.wav is not audio that can be read") as caught:
        random_separator.separate_file(tmp_path / "page.wav", tmp_path / "out")
    assert "\n" not in str(caught.value)
    write(tmp_path / "song.wav", noise(48_000), 48_000, format="MP3")
    result = random_separator.separate_file(tmp_path / "song.wav", tmp_path / "out")
    assert soundfile.info(result.residual.file).subtype == "FLOAT"
    np.testing.assert_allclose(stems(result).sum(0)[0], soundfile.read(tmp_path / "song.wav")[0], atol=1e-6)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.999])
def test_symptom_22_half_written_weights_are_trusted(tmp_path, random_model, kept):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in random_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(kept * len(content)) if kept < 1 else kept])
    with pytest.raises(SeparatorError, match="sha256") as caught:
        Separator.load(folder)
    assert "restore" in str(caught.value)
    (folder / WEIGHTS).unlink()
    with pytest.raises(SeparatorError, match="missing"):
        Separator.load(folder)


def test_what_the_model_hears_on_a_plain_file_is_one_pass_of_the_network(tmp_path):
    """16 kHz, mono, ten seconds: the stems are the network's masks on the file's own transform, no more."""
    separator = Separator.load(device="cpu")
    mixture, rate = soundfile.read(SAMPLES / "mix3.wav", dtype="float32")
    assert rate == separator.network.config.sample_rate
    stft = STFT(separator.network.config.n_fft, separator.network.config.hop_length)
    spectrogram = stft(torch.from_numpy(mixture)[None])
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(SEED)
        out = separator.network(mono_view(spectrogram)[None], n_slots=4)
    exists = torch.sigmoid(out.existence_logits[0]) >= separator.network.config.min_existence
    masks = out.masks[0][exists].half().float()
    expected = stft.inverse(apply_masks(masks, spectrogram), len(mixture))[0].numpy()
    expected = expected[np.argsort(-np.square(expected).sum(1), kind="stable")]
    result = separator.separate(mixture[None], rate)
    assert len(expected) == len(result.estimates) > 1
    np.testing.assert_allclose(result.estimates[:, 0], expected, atol=1e-6)
    written = separator.separate_file(SAMPLES / "mix3.wav", tmp_path / "out")
    np.testing.assert_allclose(stems(written)[:-1, 0], expected, atol=2**-15)


def test_five_minutes_in_segments_are_within_a_third_of_a_decibel_of_their_parts(band_network):
    """Strict SI-SDR: every source against the stem that is its own in the whole file."""
    rng = np.random.default_rng(0)
    length = 300 * 16_000
    spectra = np.fft.rfft(rng.normal(size=(2, length)))
    frequencies = np.fft.rfftfreq(length, 1 / 16_000)
    level = 1 + 0.5 * np.sin(2 * np.pi * np.arange(length) / 16_000 / 7)
    bands = [
        np.fft.irfft(s * ((frequencies >= a) & (frequencies < b)))
        for s, a, b in zip(spectra, (100, 900), (1100, 2000), strict=True)
    ]
    sources = torch.from_numpy(np.stack([bands[0] * level, bands[1]])[:, :length]).float()
    sources = 0.1 * sources / sources.std()
    mixture = sources.sum(0, keepdim=True)
    whole = Separator(band_network((0, 1000, 2000), shuffle=True).eval()).separate(mixture, 16_000)
    parts = []
    for start in range(0, length, 10 * 16_000):
        part = slice(start, start + 10 * 16_000)
        found = Separator(band_network((0, 1000, 2000)).eval()).separate(mixture[:, part], 16_000)
        parts.append(best_si_sdr(found.estimates[:, 0], sources[:, part]))
    assert best_si_sdr(whole.estimates[:, 0], sources) > np.mean(parts) - 0.3


def best_si_sdr(estimates: torch.Tensor, sources: torch.Tensor) -> float:
    """Mean over sources of the best estimate's."""
    table = torch.stack([torch.stack([si_sdr(e, s, zero_mean=False) for e in estimates]) for s in sources])
    return float(table.max(1).values.mean())
