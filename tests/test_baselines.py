import pytest
import torch
from torch import Tensor

from separator.baselines import (
    hpss_estimates,
    ideal_binary_estimates,
    ideal_ratio_estimates,
    mixture_estimate,
    nmf_estimates,
)
from separator.metrics import match_known_count, pairwise_si_sdr, si_sdr

RATE = 16_000
ORACLES = [nmf_estimates, ideal_ratio_estimates, ideal_binary_estimates]


def tones(*frequencies: float, seconds: float = 1.0) -> Tensor:
    """Tones that start and stop at their own times."""
    time = torch.arange(int(seconds * RATE)) / RATE
    waves = []
    for k, frequency in enumerate(frequencies):
        gate = ((time * (k + 2)).floor() % 2 == 0).float()
        waves.append(gate * torch.sin(2 * torch.pi * frequency * time) / (k + 1))
    return torch.stack(waves)


def clicks(seconds: float = 1.0) -> Tensor:
    wave = torch.zeros(int(seconds * RATE))
    wave[1000::4000] = 8.0
    return wave


def test_the_mixture_is_its_own_only_estimate() -> None:
    mixture = tones(500).sum(0)
    assert torch.equal(mixture_estimate(mixture), mixture[None])


def test_hpss_parts_a_tone_from_clicks() -> None:
    time = torch.arange(2 * RATE) / RATE
    sources = torch.stack([0.5 * torch.sin(2 * torch.pi * 440 * time), clicks(2)])
    scores = pairwise_si_sdr(hpss_estimates(sources.sum(0)), sources, zero_mean=False)
    assert scores.argmax(0).tolist() == [0, 1]
    assert scores.diagonal().min() > 10


def test_hpss_estimates_sum_to_the_mixture() -> None:
    mixture = tones(440, 900).sum(0) + clicks()
    torch.testing.assert_close(hpss_estimates(mixture).sum(0), mixture, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ORACLES)
def test_oracles_recover_tones_of_different_frequency_in_the_order_of_the_sources(method) -> None:
    sources = tones(400, 1500, 4000)
    estimates = method(sources.sum(0), sources)
    assert si_sdr(estimates, sources, zero_mean=False).min() > 15


@pytest.mark.parametrize("method", ORACLES)
def test_oracle_estimates_sum_to_the_mixture(method) -> None:
    sources = tones(400, 1500)
    mixture = sources.sum(0)
    torch.testing.assert_close(method(mixture, sources).sum(0), mixture, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ORACLES)
def test_the_oracle_of_one_source_is_the_mixture(method) -> None:
    source = tones(700)
    torch.testing.assert_close(method(source[0], source), source, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", ORACLES)
def test_silence_gives_silent_estimates(method) -> None:
    silent = torch.zeros(2, 4000)
    estimates = method(silent[0], silent)
    assert torch.equal(estimates, silent)
    assert method(silent[0], silent[:0]).shape == (0, 4000)


def test_nmf_is_the_same_in_every_run() -> None:
    sources = tones(400, 1500)
    first, second = (nmf_estimates(sources.sum(0), sources, max_iter=5) for _ in range(2))
    assert torch.equal(first, second)


def test_the_binary_oracle_beats_the_mixture_on_overlapping_noise() -> None:
    sources = torch.randn(2, RATE, generator=torch.Generator().manual_seed(0))
    mixture = sources.sum(0)
    match = match_known_count(ideal_binary_estimates(mixture, sources), sources, mixture, zero_mean=False)
    assert match.improvement.min() > 3
