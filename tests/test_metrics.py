import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from separator.errors import SeparatorError
from separator.metrics import (
    cosine_overlap,
    count_confusion,
    is_active,
    level_db,
    match_known_count,
    match_strict,
    pairwise_si_sdr,
    peak_overlap,
    si_sdr,
    si_sdr_improvement,
    statistic,
)


def orthonormal(count: int, length: int = 64) -> Tensor:
    """Zero-mean waveforms of unit energy that are orthogonal to each other: the rows of a DCT."""
    time = torch.arange(length, dtype=torch.float64) + 0.5
    waves = torch.stack([torch.cos(math.pi * (k + 1) * time / length) for k in range(count)])
    return waves / waves.norm(dim=-1, keepdim=True)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slow_si_sdr(estimate: Tensor, source: Tensor, zero_mean: bool) -> float:
    """The published formula, word for word."""
    e, s = estimate.numpy(), source.numpy()
    if zero_mean:
        e, s = e - e.mean(), s - s.mean()
    target = (e @ s) / (s @ s) * s
    return float(10 * np.log10(np.sum(target**2) / np.sum((target - e) ** 2)))


@settings(deadline=None)
@given(st.floats(-60, 60), st.floats(1e-3, 1e3), st.sampled_from([-1, 1]))
def test_orthogonal_noise_gives_its_level_at_any_gain(snr_db: float, gain: float, sign: int) -> None:
    source, interference = orthonormal(2)
    estimate = gain * sign * (source + 10 ** (-snr_db / 20) * interference)
    assert si_sdr(estimate, source, zero_mean=False).item() == pytest.approx(snr_db, abs=1e-6)


@settings(deadline=None)
@given(st.integers(0, 1000), st.booleans())
def test_si_sdr_agrees_with_the_published_formula(seed: int, zero_mean: bool) -> None:
    estimate, source = noise(2, 50, seed=seed) + 0.3
    expected = slow_si_sdr(estimate, source, zero_mean)
    assert si_sdr(estimate, source, zero_mean=zero_mean).item() == pytest.approx(expected, abs=1e-6)


def test_an_all_zero_estimate_scores_the_lower_limit_not_0_db() -> None:
    assert si_sdr(torch.zeros(8), torch.ones(8), zero_mean=False).item() == -100


def test_an_estimate_orthogonal_to_the_source_scores_the_lower_limit() -> None:
    assert si_sdr(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), zero_mean=False).item() == -100


def test_a_perfect_estimate_scores_the_upper_limit() -> None:
    source = noise(16000).float()
    assert si_sdr(0.3 * source, source, zero_mean=False).item() == 100


def test_a_constant_offset_counts_only_without_mean_removal() -> None:
    source = orthonormal(1)[0]
    offset = torch.full((64,), 0.1 / 8, dtype=torch.float64)  # energy 0.01: 20 dB below the source
    assert si_sdr(source + offset, source, zero_mean=False).item() == pytest.approx(20)
    assert si_sdr(source + offset, source, zero_mean=True).item() == 100


def test_level_does_not_matter_down_to_the_smallest_float32_values() -> None:
    source, interference = orthonormal(2)
    estimate = (source + 0.1 * interference).float()
    for gain in (1e-36, 1e30):
        assert si_sdr(gain * estimate, source, zero_mean=False).item() == pytest.approx(20, abs=1e-3)


def test_pairwise_holds_every_estimate_against_every_source_in_batches() -> None:
    estimates, sources = noise(2, 3, 40), noise(2, 4, 40, seed=1)
    scores = pairwise_si_sdr(estimates, sources, zero_mean=True)
    assert scores.shape == (2, 3, 4)
    for b, s, k in itertools.product(range(2), range(3), range(4)):
        expected = slow_si_sdr(estimates[b, s], sources[b, k], True)
        assert scores[b, s, k].item() == pytest.approx(expected, abs=1e-6)


def test_improvement_is_measured_from_the_mixture() -> None:
    sources = orthonormal(2)
    mixture = sources.sum(0)  # 0 dB for both
    estimates = sources + 0.1 * sources.flip(0)  # 20 dB for both
    improvement = si_sdr_improvement(estimates, sources, mixture, zero_mean=False)
    assert improvement.tolist() == pytest.approx([20, 20])
    of_itself = si_sdr_improvement(mixture.expand(2, -1), sources, mixture, zero_mean=False)
    assert of_itself.tolist() == [0, 0]


def test_a_silent_source_is_refused() -> None:
    with pytest.raises(SeparatorError, match="1 silent of 2 sources"):
        si_sdr(torch.ones(2, 8), torch.stack([torch.ones(8), torch.zeros(8)]), zero_mean=False)
    with pytest.raises(SeparatorError, match="silent"):
        si_sdr(torch.ones(8), torch.ones(8), zero_mean=True)  # nothing but a mean


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(SeparatorError, match="estimates hold 1 value of NaN or inf"):
        si_sdr(torch.tensor([1.0, value]), torch.ones(2), zero_mean=False)


def test_different_lengths_are_refused() -> None:
    with pytest.raises(SeparatorError, match=r"estimates have 7 samples, sources 8"):
        pairwise_si_sdr(torch.ones(2, 7), torch.ones(2, 8), zero_mean=False)


def test_a_source_sounds_from_an_rms_above_1e_8() -> None:
    waveforms = torch.stack([torch.zeros(10), torch.full((10,), 0.9e-8), torch.full((10,), 1.1e-8)])
    assert is_active(waveforms).tolist() == [False, False, True]


# matched scores: three orthogonal sources of equal energy, so the mixture is at 10 log10(1/2) for each


def three_sources() -> tuple[Tensor, Tensor, float]:
    sources = orthonormal(3)
    return sources, sources.sum(0), 10 * math.log10(1 / 2)


def leaky(sources: Tensor, leak_db: float = -20) -> Tensor:
    """Each source with a little of the next one in it: SI-SDR is -leak_db."""
    return sources + 10 ** (leak_db / 20) * sources.roll(-1, 0)


def test_known_count_finds_permuted_outputs_among_all_slots() -> None:
    sources, mixture, before = three_sources()
    slots = torch.stack([torch.zeros(64), *leaky(sources)[[2, 0, 1]], 0.1 * mixture])
    match = match_known_count(slots, sources, mixture, zero_mean=False)
    assert match.outputs.tolist() == [2, 3, 1]
    assert match.si_sdr.tolist() == pytest.approx([20] * 3)
    assert match.improvement.tolist() == pytest.approx([20 - before] * 3)


def test_known_count_scores_sources_beyond_the_outputs_with_the_mixture() -> None:
    sources, mixture, before = three_sources()
    match = match_known_count(leaky(sources)[1:2], sources, mixture, zero_mean=False)
    assert match.outputs.tolist() == [-1, 0, -1]
    assert match.improvement.tolist() == pytest.approx([0, 20 - before, 0])
    assert match.si_sdr.tolist() == pytest.approx([before, 20, before])


@given(st.integers(0, 10_000), st.integers(3, 4), st.integers(2, 3))
@settings(max_examples=50, deadline=None)
def test_known_count_is_the_best_of_all_assignments(seed: int, n_slots: int, n_sources: int) -> None:
    sources = noise(n_sources, 20, seed=seed)
    slots = noise(n_slots, n_sources, seed=seed + 1) @ sources
    mixture = sources.sum(0)
    match = match_known_count(slots, sources, mixture, zero_mean=False)
    before = si_sdr(mixture.expand_as(sources), sources, zero_mean=False)
    gains = (pairwise_si_sdr(slots, sources, zero_mean=False) - before).clamp_min(-30)
    best = max(
        sum(gains[slot, k].item() for k, slot in enumerate(chosen))
        for chosen in itertools.permutations(range(n_slots), n_sources)
    )
    assert match.improvement.sum().item() == pytest.approx(best, abs=1e-3)
    assert len(set(match.outputs.tolist())) == n_sources


def test_a_useless_output_scores_the_floor_with_known_count_too() -> None:
    sources, mixture, before = three_sources()
    slots = leaky(sources)
    slots[1] = 0  # as of a factorisation that leaves nothing for a source
    match = match_known_count(slots, sources, mixture, zero_mean=False)
    assert match.improvement.tolist() == pytest.approx([20 - before, -30, 20 - before])


def test_a_single_source_takes_its_best_output_though_no_output_improves_on_the_mixture() -> None:
    source, other = orthonormal(2)
    slots = torch.stack([source + other, source + 0.01 * other, source + 0.1 * other])
    called = torch.ones(3, dtype=torch.bool)
    for match in (
        match_known_count(slots, source[None], source, zero_mean=False),
        match_strict(slots, source[None], source, called, zero_mean=False),
    ):
        assert match.outputs.tolist() == [1]
        assert match.si_sdr.item() == pytest.approx(40)


def test_strict_counts_permuted_called_outputs_like_known_count() -> None:
    sources, mixture, before = three_sources()
    slots = torch.stack([*leaky(sources)[[2, 0, 1]], 0.01 * mixture])
    called = torch.tensor([True, True, True, False])
    match = match_strict(slots, sources, mixture, called, zero_mean=False)
    assert match.outputs.tolist() == [1, 2, 0]
    assert match.improvement.tolist() == pytest.approx([20 - before] * 3)


def test_strict_gives_the_floor_to_a_source_whose_output_was_not_called() -> None:
    sources, mixture, before = three_sources()
    called = torch.tensor([True, False, True])
    match = match_strict(leaky(sources), sources, mixture, called, zero_mean=False)
    assert match.outputs.tolist() == [0, -1, 2]
    assert match.improvement.tolist() == pytest.approx([20 - before, -30, 20 - before])
    assert match.si_sdr.tolist() == pytest.approx([20, -30, 20])


def test_strict_gives_every_source_the_floor_when_nothing_is_called() -> None:
    sources, mixture, _ = three_sources()
    match = match_strict(sources, sources, mixture, torch.zeros(3, dtype=torch.bool), zero_mean=False)
    assert match.improvement.tolist() == [-30] * 3
    assert match.outputs.tolist() == [-1] * 3


def test_strict_does_not_charge_for_extra_outputs() -> None:
    sources, mixture, before = three_sources()
    slots = torch.stack([*leaky(sources), noise(64), torch.zeros(64)])
    match = match_strict(slots, sources, mixture, torch.ones(5, dtype=torch.bool), zero_mean=False)
    assert match.improvement.tolist() == pytest.approx([20 - before] * 3)


def test_strict_is_never_below_the_floor_however_wrong_an_output_is() -> None:
    sources, mixture, _ = three_sources()
    called = torch.ones(3, dtype=torch.bool)
    match = match_strict(torch.zeros(3, 64), sources, mixture, called, zero_mean=False)
    assert match.improvement.tolist() == [-30] * 3
    assert match.si_sdr.tolist() == [-30] * 3


@given(st.permutations(range(4)), st.permutations(range(3)), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_matched_scores_ignore_the_order_and_gain_of_slots_and_follow_the_sources(
    slot_order: list[int], source_order: list[int], seed: int
) -> None:
    sources = noise(3, 30, seed=seed)
    mixture = sources.sum(0)
    slots = noise(4, 3, seed=seed + 1) @ sources
    called = torch.tensor([True, True, False, True])
    gains = noise(4, 1, seed=seed + 2).exp()
    known = match_known_count(slots, sources, mixture, zero_mean=True)
    strict = match_strict(slots, sources, mixture, called, zero_mean=True)
    moved = (gains * slots)[slot_order], sources[source_order], mixture
    known_moved = match_known_count(*moved, zero_mean=True)
    strict_moved = match_strict(*moved, called[slot_order], zero_mean=True)
    torch.testing.assert_close(known_moved.improvement, known.improvement[source_order])
    torch.testing.assert_close(strict_moved.improvement, strict.improvement[source_order])


@given(st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_strict_never_beats_known_count(seed: int) -> None:
    sources = noise(3, 30, seed=seed)
    slots = noise(4, 3, seed=seed + 1) @ sources
    called = noise(4, seed=seed + 2) > 0
    known = match_known_count(slots, sources, sources.sum(0), zero_mean=False)
    strict = match_strict(slots, sources, sources.sum(0), called, zero_mean=False)
    assert strict.improvement.mean() <= known.improvement.mean() + 1e-9


def test_count_confusion_has_true_rows_and_called_columns() -> None:
    confusion = count_confusion(torch.tensor([1, 1, 3, 0]), torch.tensor([1, 2, 2, 1]))
    assert confusion.tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 0]]
    empty = torch.zeros(0, dtype=torch.long)
    assert count_confusion(empty, empty).tolist() == [[0]]


def test_count_confusion_refuses_counts_of_different_inputs() -> None:
    with pytest.raises(SeparatorError, match="one count an input"):
        count_confusion(torch.tensor([1]), torch.tensor([1, 2]))


def test_peak_overlap_sees_two_active_slots_on_one_token() -> None:
    attn = torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.5, 0.3], [0.7, 0.2, 0.1]])
    assert peak_overlap(attn, torch.tensor([True, True, True])).item() is True
    assert peak_overlap(attn, torch.tensor([True, False, True])).item() is False
    assert peak_overlap(attn, torch.tensor([True, False, False])).item() is False


def test_peak_overlap_takes_batches() -> None:
    apart, together = torch.eye(2), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    active = torch.ones(2, 2, dtype=torch.bool)
    assert peak_overlap(torch.stack([apart, together]), active).tolist() == [False, True]


def test_cosine_overlap_is_the_largest_cosine_of_active_pairs() -> None:
    attn = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    assert cosine_overlap(attn, torch.tensor([True, True, True])).item() == pytest.approx(math.sqrt(0.5))
    assert cosine_overlap(attn, torch.tensor([True, False, True])).item() == pytest.approx(0)
    assert cosine_overlap(attn, torch.tensor([False, False, True])).isnan()


def test_level_is_an_energy_ratio_with_a_floor_for_silence() -> None:
    reference = torch.ones(100)
    assert level_db(0.1 * reference, reference).item() == pytest.approx(-20)
    assert level_db(torch.zeros(100), reference).item() == -200
    assert level_db(torch.zeros(100), torch.zeros(100)).item() == -200


def test_statistic_leaves_out_what_is_undefined_and_says_how_much_is_left() -> None:
    assert statistic([2.0, math.nan, 4.0]) == {"mean": 3.0, "std": 1.0, "count": 2}
    assert statistic([math.nan]) == {"mean": None, "std": None, "count": 0}
