"""The network: what holds for any weights. What the shipped weights do is in test_models.py."""

from itertools import pairwise

import pytest
import torch

from separator.errors import SeparatorError
from separator.layers import ExistenceHead, band_matrix, search_facts, slot_facts
from separator.network import NetworkConfig, SeparationNetwork
from separator.stft import STFT

MECHANISMS = [
    "vanilla",
    "sequential",
    "evidence_quadratic",
    "evidence_claim",
    "dataspace_linear_bias",
    "mesh",
]


def small(mechanism: str = "evidence_claim", **options: object) -> SeparationNetwork:
    torch.manual_seed(0)
    config = NetworkConfig(mechanism=mechanism, widths=(4, 6, 8, 12), n_context=1, **options)  # type: ignore[arg-type]
    return SeparationNetwork(config).eval()


def spectrogram(batch: int = 2, length: int = 9000) -> torch.Tensor:
    return STFT()(torch.randn(batch, length, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_masks_and_residual_mask_sum_to_one(mechanism: str) -> None:
    out = small(mechanism)(spectrogram())
    total = out.masks.sum(1) + out.residual_mask
    torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)
    assert out.masks.min() >= 0


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("n_slots", [1, 4, 8])
def test_any_number_of_slots_works_with_the_same_weights(mechanism: str, n_slots: int) -> None:
    out = small(mechanism, stop_below=0.0)(spectrogram(), n_slots=n_slots)
    assert out.masks.shape[:2] == (2, n_slots)
    assert out.existence_logits.shape == (2, n_slots)
    assert out.attn.shape[2] == out.token_grid[0] * out.token_grid[1]
    torch.testing.assert_close(out.attn.sum((1, 2)).isfinite(), torch.ones(2, dtype=torch.bool))


def test_a_mechanism_with_a_fixed_number_of_slots_is_refused() -> None:
    with pytest.raises(SeparatorError, match=r"mechanism='dspn' finds one number of slots only; choose"):
        small("dspn")


def test_level_of_the_mixture_changes_nothing() -> None:
    network, mixture = small(), spectrogram()
    torch.manual_seed(3)
    quiet = network(0.001 * mixture)
    torch.manual_seed(3)
    loud = network(100.0 * mixture)
    torch.testing.assert_close(quiet.masks, loud.masks, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [1, 255, 256, 4097, 16_000])
def test_masks_have_the_frames_of_the_input(length: int) -> None:
    mixture = spectrogram(1, length)
    assert small()(mixture).masks.shape[-2:] == mixture.shape[-2:]


def test_silence_gives_finite_masks() -> None:
    out = small()(torch.zeros(1, 257, 20, dtype=torch.complex64))
    assert out.masks.isfinite().all()
    assert out.existence_logits.isfinite().all()


def test_decoding_stops_when_the_evidence_is_spent() -> None:
    network = small(stop_below=1.1)  # spent as soon as anything is gone
    out = network(spectrogram(), n_slots=4)
    assert out.masks[:, 0].sum() > 0
    assert out.masks[:, 1:].abs().max() == 0
    assert (torch.sigmoid(out.existence_logits[:, 1:]) < 1e-9).all()
    assert out.evidence is not None
    assert len(out.evidence) == 5


def test_evidence_never_grows() -> None:
    evidence = small(stop_below=0.0)(spectrogram()).evidence
    assert evidence is not None
    for before, after in pairwise(evidence):
        assert (after <= before + 1e-6).all()
    assert evidence[-1].mean() < evidence[0].mean()


def test_results_follow_the_seed_alone() -> None:
    network, mixture = small(), spectrogram()
    torch.manual_seed(5)
    first = network(mixture).masks
    torch.manual_seed(5)
    assert torch.equal(first, network(mixture).masks)


def test_guided_masks_come_with_the_true_sources_and_leave_the_others_alone() -> None:
    network, mixture = small(), spectrogram()
    sources = torch.stack([0.3 * mixture, 0.7 * mixture], 1)
    torch.manual_seed(5)
    plain = network(mixture)
    torch.manual_seed(5)
    guided = network(mixture, sources=sources)
    assert plain.guidance is None
    assert guided.guidance.masks.shape == sources.shape
    assert torch.equal(plain.masks, guided.masks)


def test_guidance_states_the_true_shares_of_every_cell() -> None:
    mixture = spectrogram()
    given = small()(mixture, sources=torch.stack([0.5 * mixture, 1.5 * mixture], 1)).guidance
    sounding = given.shares.sum(1) > 0  # frames that pad the last token are silent
    torch.testing.assert_close(given.shares[:, 0][sounding], torch.full((int(sounding.sum()),), 0.1))
    torch.testing.assert_close(given.weights.sum((1, 2)), torch.ones(2))


def test_guided_slots_depend_on_which_source_they_are_of() -> None:
    network, mixture = small(), spectrogram()
    low = mixture.clone()
    low[:, 40:] = 0
    out = network(mixture, sources=torch.stack([low, mixture - low], 1)).guidance.masks
    assert (out[:, 0] - out[:, 1]).abs().max() > 1e-3


def test_band_matrix_turns_band_masks_into_bin_masks() -> None:
    matrix = band_matrix(257, 128, 64)
    torch.testing.assert_close(matrix.sum(1), torch.ones(257))
    assert torch.equal(matrix[:64, :64], torch.eye(64))
    centres = (matrix * torch.arange(257.0)[:, None]).sum(0) / matrix.sum(0)
    widths = centres.diff()
    assert (widths[64:-2] > 0).all()
    assert widths[:60].max() <= 1.01 < widths[-3]


def test_slot_facts_tell_level_and_likeness() -> None:
    weights = torch.ones(1, 2, 5, 4)
    shares = torch.zeros(1, 3, 2, 5, 4)
    shares[:, 0, 0] = 1.0  # the lower half
    shares[:, 1, 1, :2] = 1.0  # and of the upper half the beginning
    facts = slot_facts(shares, weights)[0]
    torch.testing.assert_close(facts[:2, 0], torch.log10(torch.tensor([0.5, 0.2])), atol=1e-4, rtol=0)
    assert facts[2, 0] == pytest.approx(-6)  # an empty slot
    torch.testing.assert_close(facts[:2, 2], torch.ones(2))
    time_cosine = 2 / (10**0.5)  # of (1,1,1,1,1) and (1,1,0,0,0)
    assert facts[0, 4] == pytest.approx(time_cosine, abs=1e-5)
    assert facts[0, 5] == pytest.approx(0)


def test_search_facts_tell_spread_claim_and_stability() -> None:
    attn = torch.zeros(1, 2, 10)
    attn[0, 0, 3], attn[0, 1] = 1.0, 0.1
    weights = torch.ones(1, 2, 5, 4)
    shares = torch.rand(1, 2, 2, 5, 4)
    other = shares.clone()
    other[0, 1] = 0
    other[0, 1, 0, 0, 0] = 1
    claims = torch.zeros(1, 2, 2, 5, 4)  # a half of everything
    facts = search_facts(attn, claims, shares, other, weights)[0]
    torch.testing.assert_close(facts[:, 0], torch.tensor([-1.0, 0.0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(facts[:, 1], torch.full((2,), -0.30103), atol=1e-4, rtol=0)
    assert facts[0, 2] == pytest.approx(1)
    assert facts[1, 2] < 0.5


def test_existence_does_not_depend_on_empty_slots_beside() -> None:
    torch.manual_seed(0)
    head, facts = ExistenceHead().eval(), -torch.rand(1, 2, 9)
    empty = torch.tensor([-6.0, -6.0] + [0.0] * 7).expand(1, 3, 9)
    more = head(torch.cat([facts, empty], 1))
    torch.testing.assert_close(more[:, :2], head(facts))


def test_existence_depends_on_which_slots_are_stronger() -> None:
    torch.manual_seed(0)
    head, facts = ExistenceHead().eval(), -torch.rand(1, 3, 9)
    alike = facts.clone()
    alike[..., 0] = torch.tensor([-0.1, -0.2, -0.3])
    order = alike.clone()
    order[0, 1, 0], order[0, 2, 0] = -0.3, -0.2
    assert (head(alike) - head(order))[0, 0].abs() < (head(alike) - head(order))[0, 1].abs()


def test_config_survives_plain_values() -> None:
    config = NetworkConfig(widths=(1, 2, 3, 4), min_existence=0.4)
    assert NetworkConfig.from_dict(config.to_dict()) == config


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(SeparatorError, match=r"unknown network setting \['n_slot'\]"):
        NetworkConfig.from_dict({"n_slot": 3})


def test_refinement_fades_a_slot_that_took_nothing() -> None:
    network = small(stop_below=0.0)
    nothing, half = torch.tensor([[-4.0] * 2 + [0.0] * 4]), torch.tensor([[-0.3] * 2 + [0.0] * 4])
    assert torch.sigmoid(network.presence(nothing)) < 0.01
    assert torch.sigmoid(network.presence(half)) > 0.99


def test_number_of_refinements_can_be_chosen_at_the_call() -> None:
    network, mixture = small(stop_below=0.0), spectrogram()
    masks = []
    for n_refine in (0, 1, 2, None):
        torch.manual_seed(5)
        masks.append(network(mixture, n_refine=n_refine).masks)
    assert torch.equal(masks[1], masks[3])
    assert (masks[0] - masks[1]).abs().max() > 1e-4
    assert (masks[1] - masks[2]).abs().max() > 1e-5
