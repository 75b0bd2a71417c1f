"""Losses in the spectrogram against what waveforms say."""

import math

import pytest
import torch

from separator.losses import (
    ATTENTION_MARGIN,
    LossConfig,
    Whole,
    best_assignment,
    claim_loss,
    energy,
    pairwise_error,
    pairwise_si_sdr,
    separation_loss,
)
from separator.metrics import pairwise_si_sdr as pairwise_si_sdr_of_waveforms
from separator.network import Decomposition, Guidance
from separator.stft import STFT

STFT_ = STFT()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decomposition(masks: torch.Tensor, existence: torch.Tensor | None = None) -> Decomposition:
    logits = torch.zeros(masks.shape[:2]) if existence is None else existence
    return Decomposition(masks, 1 - masks.sum(1), logits, torch.zeros(0), None, (1, 1))


def test_energy_is_that_of_the_waveform() -> None:
    waveform = noise(3, 5000)
    torch.testing.assert_close(energy(STFT_(waveform)), waveform.square().sum(-1), rtol=1e-5, atol=0)


def test_pairwise_error_is_the_energy_of_the_difference() -> None:
    sources = STFT_(noise(2, 3, 4000))
    mixture = sources.sum(1)
    masks = torch.rand(2, 4, *mixture.shape[1:])
    slow = torch.stack([energy(m * mixture - s) for m in masks.unbind(1) for s in sources.unbind(1)], 1)
    fast = pairwise_error(masks, mixture, sources)
    torch.testing.assert_close(fast.flatten(1), slow, rtol=1e-4, atol=1e-3)


def test_pairwise_si_sdr_is_that_of_consistent_waveforms() -> None:
    sources = noise(2, 4000)
    mixture = sources.sum(0)
    masks = torch.tensor([0.2, 0.9])[:, None, None].expand(-1, 257, STFT_.n_frames(4000))  # plain gains
    spectral = pairwise_si_sdr(masks[None], STFT_(mixture)[None], STFT_(sources)[None])[0]
    waveforms = torch.tensor([0.2, 0.9])[:, None] * mixture
    torch.testing.assert_close(
        spectral.double(),
        pairwise_si_sdr_of_waveforms(waveforms, sources, zero_mean=False),
        atol=1e-3,
        rtol=0,
    )


def test_assignment_finds_the_planted_permutation_and_skips_absent_sources() -> None:
    cost = torch.ones(1, 4, 3)
    cost[0, 2, 0] = cost[0, 1, 1] = 0.0
    cost[0, 0, 2] = -9.0
    assert best_assignment(cost, torch.tensor([[True, True, False]])).tolist() == [[2, 1, -1]]


def test_loss_of_ideal_masks_is_the_threshold_and_does_not_see_the_order() -> None:
    sources = torch.zeros(1, 2, 4000)
    sources[0, 0, :1500], sources[0, 1, 2500:] = noise(1500), noise(1500, seed=1)
    spectra = STFT_(sources)
    ideal = (spectra.abs() / spectra.abs().sum(1, keepdim=True).clamp(min=1e-9)).round()
    masks = torch.stack([ideal[:, 1], torch.zeros_like(ideal[:, 0]), ideal[:, 0]], 1)
    config = LossConfig(zero_weight=0.5, existence_weight=0.0)
    active = torch.ones(1, 2, dtype=torch.bool)
    terms = separation_loss(decomposition(masks), spectra.sum(1), spectra, active, config)
    assert terms.snr == pytest.approx(-config.snr_limit_db, abs=0.1)
    assert terms.zero == pytest.approx(-config.silence_limit_db, abs=0.1)
    assert terms.total == pytest.approx(float(terms.snr + 0.5 * terms.zero / 2), abs=1e-3)


def test_one_slot_that_takes_all_scores_what_the_mixture_scores() -> None:
    spectra = STFT_(torch.stack([noise(4000), 0.1 * noise(4000, seed=1)])[None])
    masks = torch.zeros(1, 2, *spectra.shape[2:])
    masks[:, 0] = 1.0
    active = torch.ones(1, 2, dtype=torch.bool)
    terms = separation_loss(decomposition(masks), spectra.sum(1), spectra, active, LossConfig())
    loud = 10 * math.log10(float(energy(spectra[:, 1]) / energy(spectra[:, 0])) + 1e-3)
    assert terms.snr == pytest.approx((loud + 10 * math.log10(1 + 1e-3)) / 2, abs=0.1)


def test_existence_targets_are_the_assigned_slots() -> None:
    spectra = STFT_(noise(1, 1, 4000))
    masks = torch.zeros(1, 3, *spectra.shape[2:])
    masks[:, 2] = 1.0
    active = torch.ones(1, 1, dtype=torch.bool)
    right = decomposition(masks, torch.tensor([[-20.0, -20.0, 20.0]]))
    wrong = decomposition(masks, torch.tensor([[20.0, -20.0, -20.0]]))
    losses = [
        separation_loss(d, spectra[:, 0], spectra, active, LossConfig()).existence for d in (right, wrong)
    ]
    assert losses[0] < 1e-6 < 10 < losses[1]


def test_claims_of_the_true_shares_cost_least_wherever_their_slot_is() -> None:
    shares = torch.rand(1, 2, 5, 3, generator=torch.Generator().manual_seed(0))
    weights = torch.full((1, 5, 3), 1 / 15)
    logits = torch.logit(shares)
    nothing = torch.full((1, 1, 5, 3), -20.0)
    assigned, active = torch.tensor([[2, 0]]), torch.ones(1, 2, dtype=torch.bool)

    def loss(claims: torch.Tensor) -> float:
        given = Guidance(torch.zeros(0), logits, claims, shares, weights, torch.zeros(0))
        return float(claim_loss(given, assigned, active, Whole.of(active)))

    right = torch.cat([logits[:, 1:], nothing, logits[:, :1]], 1)
    entropy = -(shares * shares.log() + (1 - shares) * (1 - shares).log()).mean()
    assert loss(right) == pytest.approx(float(entropy) * (2 / 3 + 1), abs=1e-4)
    assert loss(right) < loss(right + 0.3) < loss(right.flip(1))


def test_guidance_enters_the_total_by_its_weights() -> None:
    spectra = STFT_(noise(1, 2, 4000))
    masks = torch.full((1, 2, *spectra.shape[2:]), 0.5)
    active = torch.ones(1, 2, dtype=torch.bool)
    flat = torch.zeros(1, 2, 5, 3)
    attended = torch.full((1, 2, 2), 0.5)
    given = Guidance(masks, flat, flat, flat + 0.5, torch.full((1, 5, 3), 1 / 15), attended)
    config = LossConfig(guided_weight=2.0, claim_weight=3.0, attention_weight=4.0)
    plain = separation_loss(decomposition(masks), spectra.sum(1), spectra, active, config)
    full = separation_loss(
        decomposition(masks)._replace(guidance=given), spectra.sum(1), spectra, active, config
    )
    assert full.guided == pytest.approx(float(plain.snr), abs=1e-5)
    assert full.claim == pytest.approx(2 * math.log(2), abs=1e-5)
    assert full.attention == pytest.approx(-math.log(0.5 + ATTENTION_MARGIN), abs=1e-5)
    weighted = 2 * full.guided + 3 * full.claim + 4 * full.attention
    assert full.total == pytest.approx(float(plain.total + weighted), abs=1e-4)


def test_gradient_reaches_the_masks_and_is_finite_for_silent_sources() -> None:
    sources = torch.zeros(1, 2, 4000)
    sources[0, 0] = noise(4000)
    spectra = STFT_(sources)
    masks = torch.full((1, 2, *spectra.shape[2:]), 0.4, requires_grad=True)
    active = torch.tensor([[True, False]])
    separation_loss(decomposition(masks), spectra.sum(1), spectra, active, LossConfig()).total.backward()
    assert masks.grad is not None
    assert masks.grad.isfinite().all()
    assert masks.grad.abs().sum() > 0
