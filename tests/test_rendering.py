from itertools import pairwise

import numpy as np
import pytest
import torch

from separator.rendering import MaskSpool, Renderer
from separator.stft import STFT


def band_spool(n_frames: int, edges_hz: tuple[float, ...]) -> MaskSpool:
    """Masks at 16 kHz that are one between neighbouring edges."""
    frequencies = torch.arange(257) * 31.25
    masks = [((frequencies >= a) & (frequencies < b)).float() for a, b in pairwise(edges_hz)]
    spool = MaskSpool(len(masks), 257)
    spool.append(torch.stack(masks)[..., None].expand(-1, -1, n_frames))
    return spool


def render(spool: MaskSpool, waveform: np.ndarray, sample_rate: int, cuts: list[int] | None = None) -> tuple:
    renderer = Renderer(spool, STFT(), 16_000, sample_rate)
    blocks = np.split(waveform, cuts or [], axis=1)
    stretches = list(renderer.render(blocks, range(spool._shape[0])))
    return tuple(np.concatenate(parts, -1) for parts in zip(*stretches, strict=True))


def test_spooled_masks_read_back_to_half_precision_and_the_ends_repeat():
    masks = torch.rand(3, 5, 20)
    spool = MaskSpool(3, 5)
    spool.append(masks[..., :7])
    spool.append(masks[..., 7:])
    assert spool.n_frames == 20
    torch.testing.assert_close(spool.read(0, 20), masks, atol=2**-12, rtol=0)
    torch.testing.assert_close(spool.read(5, 9), masks[..., 5:9], atol=2**-12, rtol=0)
    torch.testing.assert_close(spool.read(-2, 1), masks[..., [0, 0, 0]], atol=2**-12, rtol=0)
    torch.testing.assert_close(spool.read(18, 22), masks[..., [18, 19, 19, 19]], atol=2**-12, rtol=0)


def test_many_masks_go_to_a_file_and_read_back(monkeypatch):
    monkeypatch.setattr("separator.rendering.SPOOL_BYTES", 100)
    spool = MaskSpool(2, 8)
    masks = torch.rand(2, 8, 50)
    spool.append(masks)
    assert spool._file._rolled
    torch.testing.assert_close(spool.read(0, 50), masks, atol=2**-12, rtol=0)


def test_at_the_models_rate_the_masks_are_applied_as_they_are():
    stft = STFT()
    waveform = np.random.default_rng(0).normal(0, 0.1, (2, 10_000)).astype(np.float32)
    spectrogram = stft(torch.from_numpy(waveform))
    masks = torch.rand(3, 257, spectrogram.shape[-1]).half()
    spool = MaskSpool(3, 257)
    spool.append(masks)
    expected = stft.inverse(masks.float()[:, None] * spectrogram, 10_000)
    mixture, estimates = render(spool, waveform, 16_000)
    np.testing.assert_array_equal(mixture, waveform)
    np.testing.assert_allclose(estimates, expected, atol=1e-6)


@pytest.mark.parametrize("sample_rate", [8000, 16_000, 44_100, 48_000])
def test_rendering_in_windows_is_rendering_at_once(sample_rate, monkeypatch):
    rng = np.random.default_rng(0)
    waveform = rng.normal(0, 0.1, (2, sample_rate + 77)).astype(np.float32)
    spool = MaskSpool(2, 257)
    spool.append(torch.rand(2, 257, 64))
    _, at_once = render(spool, waveform, sample_rate)
    monkeypatch.setattr("separator.rendering.WINDOW_VALUES", 1)
    _, in_windows = render(spool, waveform, sample_rate, cuts=[3, 1000, 7000])
    assert at_once.shape == (2, *waveform.shape)
    np.testing.assert_allclose(in_windows, at_once, atol=1e-5)


@pytest.mark.parametrize(
    "sample_rate", [8000, 11_025, 16_000, 22_050, 32_000, 44_100, 48_000, 96_000, 192_000]
)
def test_masks_that_sum_to_one_give_back_the_input_at_every_rate(sample_rate):
    waveform = np.random.default_rng(0).normal(0, 0.1, (1, sample_rate // 4)).astype(np.float32)
    spool = MaskSpool(2, 257)
    share = torch.rand(257, 17).half().float()
    spool.append(torch.stack([share, 1 - share]))
    _, estimates = render(spool, waveform, sample_rate)
    np.testing.assert_allclose(estimates.sum(0), waveform, atol=2e-4)  # the masks are float16


@pytest.mark.parametrize("sample_rate", [8000, 16_000, 22_050, 44_100, 48_000])
def test_tones_in_different_bands_come_apart_at_every_rate(tones, sample_rate):
    low, high = tones((500.0, 3000.0), sample_rate, 1.0)
    _, estimates = render(band_spool(64, (0, 1500, 8001)), (low + high)[None], sample_rate)
    middle = slice(sample_rate // 10, -sample_rate // 10)
    np.testing.assert_allclose(estimates[0, 0, middle], low[middle], atol=1e-3)
    np.testing.assert_allclose(estimates[1, 0, middle], high[middle], atol=1e-3)


@pytest.mark.parametrize("sample_rate", [44_100, 48_000, 96_000])
def test_what_lies_above_the_models_band_follows_its_top_band(tones, sample_rate):
    low, above = tones((500.0, 15_000.0), sample_rate, 0.5)
    _, estimates = render(band_spool(32, (0, 5000, 8001)), (low + above)[None], sample_rate)
    middle = slice(sample_rate // 10, -sample_rate // 10)
    np.testing.assert_allclose(estimates[1, 0, middle], above[middle], atol=1e-3)


def test_a_mask_that_changes_in_time_changes_at_the_same_second_at_every_rate():
    spool = MaskSpool(1, 257)
    spool.append((torch.arange(626) >= 400).float().expand(1, 257, 626))  # on from 6.4 s
    for sample_rate in (8000, 16_000, 44_100, 48_000):
        _, estimates = render(spool, np.ones((1, 10 * sample_rate), np.float32), sample_rate)
        rise = np.argmax(estimates[0, 0] > 0.5) / sample_rate
        assert rise == pytest.approx(6.4 - 0.008, abs=0.003)
