"""The STFT: exact round trips, kept energy, frames where they are said to be."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from separator.errors import SeparatorError
from separator.stft import STFT


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 3000), hop=st.sampled_from([32, 64, 128]), overlaps=st.sampled_from([2, 3, 4]))
def test_inverse_returns_every_sample(length: int, hop: int, overlaps: int) -> None:
    stft = STFT(hop * overlaps, hop)
    waveform = torch.randn(2, length, generator=torch.Generator().manual_seed(length))
    spectrogram = stft(waveform)
    assert spectrogram.shape == (2, stft.n_frequencies, stft.n_frames(length))
    torch.testing.assert_close(stft.inverse(spectrogram, length), waveform, atol=2e-6, rtol=0)


@pytest.mark.parametrize("overlaps", [2, 4])
def test_spectrogram_has_the_energy_of_the_waveform(overlaps: int) -> None:
    stft = STFT(128 * overlaps, 128)
    waveform = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    power = stft(waveform).abs().square()
    two_sided = power[0].sum() + power[-1].sum() + 2 * power[1:-1].sum()
    torch.testing.assert_close(two_sided, waveform.square().sum(), rtol=1e-5, atol=0)


def test_a_frame_is_centred_where_the_module_says() -> None:
    stft = STFT(512, 256)
    t = 7
    click = torch.zeros(8000)
    click[t * 256 - 256 + 256] = 1.0
    assert stft(click).abs().square().sum(0).argmax() == t


def test_a_tone_peaks_in_its_own_bin() -> None:
    stft = STFT(512, 256)
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    assert (stft(tone)[:, 5:-5].abs().argmax(0) == 32).all()


def test_frames_of_another_length_are_refused() -> None:
    stft = STFT(512, 256)
    with pytest.raises(SeparatorError, match=r"frames? cannot make 9000 samples; pass a spectrogram of"):
        stft.inverse(stft(torch.zeros(4000)), 9000)


@pytest.mark.parametrize("hop", [0, 200, 512])
def test_a_hop_that_does_not_divide_the_window_is_refused(hop: int) -> None:
    with pytest.raises(SeparatorError, match=f"hop_length={hop}"):
        STFT(512, hop)
