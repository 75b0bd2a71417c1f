"""SI-SDR beside the packages that papers use, each with its own convention about means and silence."""

import pytest
import torch
from torch import Tensor

from separator.metrics import match_known_count, pairwise_si_sdr, si_sdr


def noise(*shape: int, seed: int) -> Tensor:
    """Noise with an offset, so that the conventions differ."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.2


def pair(seed: int, snr_db: float) -> tuple[Tensor, Tensor]:
    source, interference = noise(2, 400, seed=seed)
    return source + 10 ** (-snr_db / 20) * interference, source


CASES = [(seed, snr_db) for seed in range(5) for snr_db in (-20.0, 0.0, 13.0, 40.0)]


@pytest.mark.parametrize(("seed", "snr_db"), CASES)
def test_without_means_it_is_torchmetrics_si_snr_and_with_them_its_si_sdr(seed: int, snr_db: float) -> None:
    from torchmetrics.functional.audio import (
        scale_invariant_signal_distortion_ratio,
        scale_invariant_signal_noise_ratio,
    )

    estimate, source = pair(seed, snr_db)
    with_means = si_sdr(estimate, source, zero_mean=False).item()
    without = si_sdr(estimate, source, zero_mean=True).item()
    assert scale_invariant_signal_distortion_ratio(estimate, source).item() == pytest.approx(with_means)
    assert scale_invariant_signal_noise_ratio(estimate, source).item() == pytest.approx(without)
    assert with_means != pytest.approx(without, abs=1e-3)


@pytest.mark.parametrize("zero_mean", [False, True])
@pytest.mark.parametrize(("seed", "snr_db"), CASES)
def test_it_is_fast_bss_evals_si_sdr(seed: int, snr_db: float, zero_mean: bool) -> None:
    import fast_bss_eval

    estimate, source = pair(seed, snr_db)
    theirs = fast_bss_eval.si_sdr(source[None], estimate[None], zero_mean=zero_mean)
    ours = si_sdr(estimate, source, zero_mean=zero_mean)
    assert theirs.item() == pytest.approx(ours.item(), abs=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_assignment_is_fast_bss_evals_where_no_score_is_at_the_floor(seed: int) -> None:
    import fast_bss_eval

    sources = noise(4, 400, seed=seed)
    estimates = sources[torch.randperm(4)] + 0.3 * noise(4, 400, seed=seed + 100)
    theirs, order = fast_bss_eval.si_sdr(sources, estimates, return_perm=True)
    ours = match_known_count(estimates, sources, sources.sum(0), zero_mean=False)
    assert ours.outputs.tolist() == order.tolist()
    assert ours.si_sdr.tolist() == pytest.approx(theirs.tolist(), abs=1e-5)


def test_an_all_zero_estimate_is_0_db_with_torchmetrics_and_the_lower_limit_with_us() -> None:
    from torchmetrics.functional.audio import scale_invariant_signal_distortion_ratio

    source = noise(400, seed=1)
    silence = torch.zeros_like(source)
    assert scale_invariant_signal_distortion_ratio(silence, source).item() == pytest.approx(0, abs=1e-6)
    assert pairwise_si_sdr(silence[None], source[None], zero_mean=False).item() == -100
