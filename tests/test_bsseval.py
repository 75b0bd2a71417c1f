import pytest
import torch
from torch import Tensor

from separator.bsseval import bsseval
from separator.errors import SeparatorError

RATE = 1000


def noise(count: int, seconds: int = 3) -> Tensor:
    return torch.randn(count, seconds * RATE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def scores(estimates: Tensor, sources: Tensor) -> Tensor:
    """SDR, ISR, SIR, SAR with short filters, so that little of independent noise is explained by them."""
    return torch.stack(bsseval(estimates, sources, RATE, filter_length=4)[:4])


def test_interference_20_db_down_gives_20_db_sdr_and_sir_and_no_artefacts() -> None:
    sources = noise(2)
    sdr, _, sir, sar = scores(sources + 0.1 * sources.flip(0), sources)
    assert sdr.tolist() == pytest.approx([20, 20], abs=1)
    assert sir.tolist() == pytest.approx([20, 20], abs=1)
    assert (sar > 60).all()


def test_foreign_noise_20_db_down_is_an_artefact_not_interference() -> None:
    first, second, foreign = noise(3)
    sources = torch.stack([first, second])
    _, _, sir, sar = scores(sources + 0.1 * foreign, sources)
    assert sar.tolist() == pytest.approx([20, 20], abs=1)
    assert (sir > 30).all()


def test_frames_with_a_silent_source_are_dropped_and_counted() -> None:
    sources = noise(2)
    sources[1, RATE : 2 * RATE] = 0
    result = bsseval(sources + 0.1 * sources.flip(0), sources, RATE, filter_length=4)
    assert (result.n_frames, result.n_dropped_frames) == (3, 1)
    assert torch.isfinite(result.sdr).all()


def test_a_silent_source_is_left_out_and_counted() -> None:
    sources = torch.cat([noise(2), torch.zeros(1, 3 * RATE)])
    result = bsseval(sources + 0.1, sources, RATE, filter_length=4)
    assert result.n_silent_sources == 1
    assert torch.isfinite(result.sdr).tolist() == [True, True, False]


def test_a_silent_estimate_gets_no_score_but_its_source_still_interferes() -> None:
    sources = noise(2)
    estimates = torch.stack([sources[0] + 0.1 * sources[1], torch.zeros(3 * RATE)])
    result = bsseval(estimates, sources, RATE, filter_length=4)
    assert result.n_silent_estimates == 1
    assert result.sir[0].item() == pytest.approx(20, abs=1)
    assert torch.isnan(result.sdr[1])


def test_nothing_to_score_drops_every_frame() -> None:
    result = bsseval(torch.zeros(1, 3 * RATE), noise(1), RATE)
    assert (result.n_frames, result.n_dropped_frames, result.n_silent_estimates) == (3, 3, 1)
    assert torch.isnan(result.sdr).all()


def test_estimates_that_are_not_matched_are_refused() -> None:
    with pytest.raises(SeparatorError, match="match the estimates to the sources first"):
        bsseval(noise(2), noise(3), RATE)
