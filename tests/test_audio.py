import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from separator.audio import inspect_audio, read_audio, read_blocks, resample, windows
from separator.errors import SeparatorError


@pytest.mark.parametrize(
    ("subtype", "step"),
    [("PCM_U8", 2**-7), ("PCM_16", 2**-15), ("PCM_24", 2**-23), ("PCM_32", 2**-23), ("FLOAT", 0)],
)
def test_reading_returns_what_was_written_within_half_a_step(tmp_path, subtype, step):
    samples = np.random.default_rng(0).uniform(-0.9, 0.9, (1000, 2))
    soundfile.write(tmp_path / "a.wav", samples, 22_050, subtype=subtype)
    file = read_audio(tmp_path / "a.wav")
    assert file.waveform.dtype == np.float32
    assert (file.sample_rate, file.info.channels, file.info.subtype) == (22_050, 2, subtype)
    np.testing.assert_allclose(file.waveform, samples.T, atol=step + 1e-7)


def test_reading_in_blocks_is_reading_at_once(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.random.default_rng(0).uniform(-1, 1, 1001), 8000)
    blocks = list(read_blocks(inspect_audio(tmp_path / "a.flac"), 100))
    assert len(blocks) == 11
    np.testing.assert_array_equal(np.concatenate(blocks, 1), read_audio(tmp_path / "a.flac").waveform)


def test_the_content_decides_not_the_name(tmp_path):
    soundfile.write(tmp_path / "a.flac", np.full(100, 0.5), 8000)
    (tmp_path / "a.flac").rename(tmp_path / "a.mp3")
    assert inspect_audio(tmp_path / "a.mp3").format == "FLAC"


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("empty.wav", b"", "empty.wav is empty (0 bytes)"),
        ("text.wav", b"not a sound at all, just words\n" * 9, "text.wav is not audio that can be read"),
        (
            "page.mp3",
            b"<!DOCTYPE html><html><body>404</body></html>",
            "page.mp3 is not audio that can be read",
        ),
        (
            "samples.raw",
            b"\0" * 100,
            "samples.raw is not audio that can be read",
        ),
        ("cut.wav", b"RIFF\x24\0\0\0WAVE", "cut.wav is not audio that can be read"),
    ],
)
def test_what_is_no_audio_is_refused_by_name(tmp_path, name, content, complaint):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SeparatorError) as caught:
        inspect_audio(tmp_path / name)
    assert complaint in str(caught.value)
    assert "; pass a" in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(SeparatorError, match=r"missing\.wav does not exist; check the path"):
        inspect_audio(tmp_path / "missing.wav")
    with pytest.raises(SeparatorError, match=r"is a folder; pass the audio files in it"):
        inspect_audio(tmp_path)


def test_a_file_without_samples_is_refused(tmp_path):
    soundfile.write(tmp_path / "none.wav", np.zeros((0, 2)), 44_100)
    with pytest.raises(SeparatorError, match=r"none\.wav has no samples \(0 of 44100 Hz\)"):
        inspect_audio(tmp_path / "none.wav")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_sample_that_is_no_number_is_refused_with_its_position(tmp_path, value):
    samples = np.zeros((300_000, 2), np.float32)
    samples[290_000, 1] = samples[299_000, 0] = value
    soundfile.write(tmp_path / "bad.wav", samples, 48_000, subtype="FLOAT")
    with pytest.raises(SeparatorError, match=f"has {value} at sample 290000 of channel 2"):
        inspect_audio(tmp_path / "bad.wav")


def test_a_file_that_breaks_off_is_read_as_far_as_it_goes(tmp_path):
    samples = np.random.default_rng(0).uniform(-1, 1, 4000)
    soundfile.write(tmp_path / "a.wav", samples, 8000)
    whole = (tmp_path / "a.wav").read_bytes()
    (tmp_path / "a.wav").write_bytes(whole[:-4000])
    np.testing.assert_allclose(read_audio(tmp_path / "a.wav").waveform[0], samples[:2000], atol=2**-15)


@given(
    sizes=st.lists(st.integers(0, 9), max_size=8),
    hop=st.integers(1, 7),
    extra=st.integers(0, 7),
    channels=st.integers(1, 2),
)
def test_windows_cover_the_stream_and_stop_at_its_end(sizes, hop, extra, channels):
    stream = np.arange(channels * sum(sizes), dtype=float).reshape(channels, -1)
    blocks = np.split(stream, np.cumsum(sizes)[:-1], axis=1) if sizes else []
    found = list(windows(blocks, hop, hop + extra))
    for k, window in enumerate(found):
        np.testing.assert_array_equal(window, stream[:, k * hop : k * hop + hop + extra])
    total = stream.shape[1]
    assert len(found) == (0 if total == 0 else 1 + max(0, -(-(total - hop - extra) // hop)))


@pytest.mark.parametrize(
    ("from_rate", "to_rate"), [(44_100, 16_000), (16_000, 44_100), (8000, 16_000), (48_000, 16_000)]
)
def test_a_resampled_tone_is_the_tone(tones, from_rate, to_rate):
    tone = torch.from_numpy(tones((1234.5,), from_rate, 1.0)).float()
    expected = tones((1234.5,), to_rate, 1.0)
    found = resample(tone, from_rate, to_rate).numpy()
    assert found.shape == expected.shape
    np.testing.assert_allclose(found[:, 200:-200], expected[:, 200:-200], atol=2e-4)


@given(
    length=st.integers(1, 3000), rate=st.sampled_from([8000, 11_025, 22_050, 44_100, 48_000, 44_101, 37_813])
)
def test_resampling_there_and_back_keeps_the_length(length, rate):
    up = max(rate, 16_000)
    low = min(rate, 16_000)
    there = resample(torch.zeros(2, length), low, up)
    assert there.shape == (2, max(1, round(length * up / low)))
    assert resample(there, up, low).shape == (2, length)


def test_a_rate_that_fits_no_short_period_is_resampled_in_little_memory(tones):
    tone = torch.from_numpy(tones((440.0,), 44_101, 0.5)).float()
    expected = tones((440.0,), 16_000, 0.5)[:, : round(tone.shape[1] * 16_000 / 44_101)]
    np.testing.assert_allclose(resample(tone, 44_101, 16_000)[:, 200:-200], expected[:, 200:-200], atol=2e-4)


def test_resampling_to_the_same_rate_changes_nothing():
    waveform = torch.randn(2, 100)
    assert torch.equal(resample(waveform, 16_000, 16_000), waveform)


def test_a_rate_of_zero_is_refused():
    with pytest.raises(SeparatorError, match="from_rate=0 Hz"):
        resample(torch.zeros(1, 10), 0, 16_000)
