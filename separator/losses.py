"""Training losses on masks and spectrograms; no waveform is synthesised.

The STFT is a tight frame, so the energy of a masked spectrogram minus a source's bounds that of their
waveforms' difference, and for real masks M on a mixture X the error against a source S is
``sum M^2 |X|^2 - 2 M Re(X conj S) + |S|^2``: one matrix product gives every (slot, source) pair.

Loss of a matched pair: thresholded negative SNR (Wisdom et al., "What's all the FUSS about free universal
sound separation data?", 2021). Loss of a slot without a source: its level over the mixture's, likewise
thresholded. Guided masks (see `network`) have the first loss, each against its own source. Claims are held
to the true shares, or evidence would be spent before every source is found, and attention to the source.
The counter has a loss of its own, `count_loss`.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from separator.counting import Counts
from separator.network import Decomposition, Guidance

ACTIVE_SHARE = 1e-4  # of a source's greatest power; where it has less it is silent
ACTIVE_WEIGHT = 0.3  # of the counts at every time against the count of all
ATTENTION_MARGIN = 0.05  # bounds the gradient of a slot that looks elsewhere altogether


@dataclass(frozen=True)
class LossConfig:
    """Thresholds and weights of `separation_loss`."""

    AT_LEAST: ClassVar[dict[str, float]] = dict.fromkeys(
        ("zero_weight", "existence_weight", "guided_weight", "claim_weight", "attention_weight"), 0
    )

    snr_limit_db: float = 30.0
    silence_limit_db: float = 20.0
    zero_weight: float = 0.1
    existence_weight: float = 0.1
    guided_weight: float = 0.5
    claim_weight: float = 4.0
    attention_weight: float = 1.0


class LossTerms(NamedTuple):
    """Scalars of one batch; `total` is what is minimised."""

    total: Tensor
    snr: Tensor
    """Mean thresholded SNR of the matched sources, dB, negated."""
    zero: Tensor
    """Mean level of the slots without a source, dB re the mixture."""
    guided: Tensor
    """Mean thresholded SNR of the guided masks, dB, negated; zero where there are none."""
    claim: Tensor
    """Mean cross-entropy of claims and true shares, of guided slots and of those found; zero likewise."""
    attention: Tensor
    """Mean negative log of the share of a slot's attention that lies on its source; zero likewise."""
    existence: Tensor
    """Mean binary cross-entropy of the existence logits."""


def pairwise_error(masks: Tensor, mixture: Tensor, sources: Tensor) -> Tensor:
    """Energy [B, S, K] of masked mixture minus source: masks [B, S, F, T], complex sources [B, K, F, T]."""
    kept, cross = _products(masks, mixture, sources)
    return (kept[:, :, None] - 2 * cross + energy(sources)[:, None]).clamp(min=0)


def pairwise_si_sdr(masks: Tensor, mixture: Tensor, sources: Tensor) -> Tensor:
    """SI-SDR in dB [B, S, K], without mean removal, of every masked mixture against every source."""
    kept, cross = _products(masks, mixture, sources)
    target = cross.square() / energy(sources).clamp(min=1e-12)[:, None]
    distortion = (kept[:, :, None] - target).clamp(min=1e-12)
    return 10 * torch.log10(target.clamp(min=1e-12) / distortion)


def _products(masks: Tensor, mixture: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Energy of every masked mixture [B, S] and its inner product with every source [B, S, K]."""
    weights = _bin_weights(mixture)  # one-sided spectrum: inner bins stand for two
    common = (weights * (mixture.conj()[:, None] * sources).real).flatten(2)  # [B, K, FT]
    flat = masks.flatten(2)
    kept = torch.einsum("bsn,bn->bs", flat.square(), (weights * _power(mixture)).flatten(1))
    return kept, torch.einsum("bsn,bkn->bsk", flat, common)


def energy(spectrogram: Tensor) -> Tensor:
    """Energy (...) of one-sided complex spectrograms (..., F, T)."""
    return (_bin_weights(spectrogram) * _power(spectrogram)).sum((-2, -1))


def best_assignment(cost: Tensor, active: Tensor) -> Tensor:
    """Slot of each source [B, K], -1 where ``active`` [B, K] is false, of least total ``cost`` [B, S, K]."""
    slots = torch.full(active.shape, -1, dtype=torch.long)
    for b, matrix in enumerate(cost.detach().cpu().numpy()):
        present = active[b].nonzero().squeeze(-1).cpu()
        rows, columns = linear_sum_assignment(matrix[:, present.numpy()])
        slots[b, present[columns]] = torch.from_numpy(rows)
    return slots.to(cost.device)


class Whole(NamedTuple):
    """Examples and sources of the whole batch, of which a loss may see a part; the parts' losses add up."""

    n_examples: int
    n_sources: int

    @classmethod
    def of(cls, active: Tensor) -> "Whole":
        """Count ``active`` [B, K] of a whole batch."""
        return cls(len(active), max(1, int(active.sum())))


class Matching(NamedTuple):
    """Slots and sources of least cost, and what either costs."""

    slots: Tensor
    """[B, K], as `best_assignment` gives them."""
    cost: Tensor
    """[B, K], thresholded SNR of each source's slot, dB, negated."""
    exists: Tensor
    """[B, S], one where a slot has a source."""
    silence: Tensor
    """[B, S], thresholded level of every slot re the mixture, dB."""


def snr_cost(error: Tensor, source_energy: Tensor, limit_db: float) -> Tensor:
    """Thresholded SNR in dB, negated, [B, S, K], of errors [B, S, K] against sources of energy [B, K]."""
    source_energy = source_energy.clamp(min=1e-12)
    floor = 10 ** (-limit_db / 10) * source_energy
    return 10 * torch.log10((error + floor[:, None]) / source_energy[:, None])


def match(
    error: Tensor,
    kept: Tensor,
    source_energy: Tensor,
    mixture_energy: Tensor,
    active: Tensor,
    config: LossConfig,
) -> Matching:
    """Match slots and sources by the thresholded SNR of all pairs.

    Args:
        error: energy [B, S, K] of slot minus source.
        kept: energy [B, S] of the slots.
        source_energy: [B, K].
        mixture_energy: [B].
        active: [B, K], which sources exist.
        config: thresholds.
    """
    mixture_energy = mixture_energy[:, None].clamp(min=1e-12)
    cost = snr_cost(error, source_energy, config.snr_limit_db)
    slots = best_assignment(cost, active)
    matched = cost.gather(1, slots.clamp(min=0)[:, None])[:, 0]  # [B, K]
    exists = torch.zeros(kept.shape, device=kept.device)
    exists = exists.scatter_add(1, slots.clamp(min=0), active.to(exists.dtype))  # [B, S]
    zero_floor = 10 ** (-config.silence_limit_db / 10) * mixture_energy
    return Matching(slots, matched, exists, 10 * torch.log10((kept + zero_floor) / mixture_energy))


def separation_loss(
    decomposition: Decomposition,
    mixture: Tensor,
    sources: Tensor,
    active: Tensor,
    config: LossConfig,
    whole: Whole | None = None,
) -> LossTerms:
    """Permutation-invariant loss of a batch.

    Args:
        decomposition: of ``mixture``.
        mixture: complex [B, F, T].
        sources: complex [B, K, F, T], zero where ``active`` is false; K is at most the number of slots.
        active: [B, K], which sources exist.
        config: thresholds and weights.
        whole: of the batch that these examples are a part of; by default they are all of it.
    """
    masks = decomposition.masks
    whole = whole or Whole.of(active)
    source_energy = energy(sources)
    error = pairwise_error(masks, mixture, sources)
    kept = torch.einsum("bsft,bft->bs", masks.square(), _bin_weights(mixture) * _power(mixture))
    matching = match(error, kept, source_energy, energy(mixture), active, config)
    total, snr, zero = _matched_loss(matching, active, config, whole)
    existence = nn.functional.binary_cross_entropy_with_logits(
        decomposition.existence_logits, matching.exists, reduction="sum"
    ) / (whole.n_examples * masks.shape[1])
    guided = claim = attention = torch.zeros_like(snr)
    if decomposition.guidance is not None:
        given = decomposition.guidance
        cost = snr_cost(pairwise_error(given.masks, mixture, sources), source_energy, config.snr_limit_db)
        guided = torch.diagonal(cost, dim1=1, dim2=2)[active].sum() / whole.n_sources
        claim = claim_loss(given, matching.slots, active, whole)
        hits = given.attended.gather(1, matching.slots.clamp(min=0)[:, None])[:, 0]  # [B, K]
        attention = -torch.log(hits[active] + ATTENTION_MARGIN).sum() / whole.n_sources
    total = total + config.guided_weight * guided + config.claim_weight * claim
    total = total + config.attention_weight * attention + config.existence_weight * existence
    return LossTerms(total, snr, zero, guided, claim, attention, existence)


class CountTerms(NamedTuple):
    """Scalars of one batch of a counter; `total` is what is minimised."""

    total: Tensor
    counted: Tensor
    """Mean cross-entropy of the count."""
    active: Tensor
    """Mean cross-entropy of how many sources sound at a time."""


def count_loss(counts: Counts, sources: Tensor, active: Tensor, whole: Whole | None = None) -> CountTerms:
    """Cross-entropy of the counter's counts, in all and at every time.

    Args:
        counts: of the sum of ``sources``.
        sources: [B, K, time].
        active: [B, K], which sources exist; an example without one has no count to learn.
        whole: as in `separation_loss`.
    """
    n_examples = (whole or Whole.of(active)).n_examples
    classes, n_steps = counts.logits.shape[1], counts.active.shape[1]
    true = active.sum(1).clamp(max=classes) - 1
    count = nn.functional.cross_entropy(counts.logits, true, ignore_index=-1, reduction="sum")
    count = count / n_examples
    power = nn.functional.adaptive_avg_pool1d(sources.square(), n_steps)  # [B, K, n_steps]
    sounds = (power > ACTIVE_SHARE * power.amax(2, keepdim=True)) & active[..., None]
    now = sounds.sum(1).clamp(max=classes)
    at_times = nn.functional.cross_entropy(counts.active.flatten(0, 1), now.flatten(), reduction="sum")
    at_times = at_times / (n_examples * n_steps)
    return CountTerms(count + ACTIVE_WEIGHT * at_times, count, at_times)


def pairwise_waveform_error(estimates: Tensor, sources: Tensor) -> Tensor:
    """Energy [B, S, K] of estimate minus source: waveforms [B, S, time] and [B, K, time]."""
    kept, source_energy = estimates.square().sum(2), sources.square().sum(2)
    return (kept[:, :, None] - 2 * estimates @ sources.mT + source_energy[:, None]).clamp(min=0)


def waveform_loss(
    estimates: Tensor,
    mixture: Tensor,
    sources: Tensor,
    active: Tensor,
    config: LossConfig,
    whole: Whole | None = None,
) -> LossTerms:
    """Permutation-invariant loss, as `separation_loss`, of waveforms [B, S, time] that nothing guides.

    Args:
        estimates: of ``mixture`` [B, time].
        mixture: what was separated.
        sources: [B, K, time], zero where ``active`` is false; K is at most the number of estimates.
        active: [B, K], which sources exist.
        config: thresholds and the weight of what has no source.
        whole: as in `separation_loss`.
    """
    kept, source_energy = estimates.square().sum(2), sources.square().sum(2)
    error = pairwise_waveform_error(estimates, sources)
    matching = match(error, kept, source_energy, mixture.square().sum(1), active, config)
    total, snr, zero = _matched_loss(matching, active, config, whole or Whole.of(active))
    none = torch.zeros_like(snr)
    return LossTerms(total, snr, zero, none, none, none, none)


def _matched_loss(
    matching: Matching, active: Tensor, config: LossConfig, whole: Whole
) -> tuple[Tensor, Tensor, Tensor]:
    """What is minimised of the matching, its part for sources and its part for slots without one."""
    matched = matching.cost[active].sum()
    silence = (matching.silence * (matching.exists == 0)).sum()
    n_empty = whole.n_examples * matching.exists.shape[1] - whole.n_sources
    # a slot without a source weighs zero_weight of a source
    total = (matched + config.zero_weight * silence) / whole.n_sources
    return total, matched / whole.n_sources, silence / max(1, n_empty)


def claim_loss(given: Guidance, assigned: Tensor, active: Tensor, whole: Whole) -> Tensor:
    """Cross-entropy of claims and true shares, by power; a slot without a source should claim nothing.

    ``assigned`` [B, K] is the slot of each source, as `best_assignment` gives it.
    """
    n_slots = given.claims.shape[1]
    one_hot = nn.functional.one_hot(assigned.clamp(min=0), n_slots) * active[..., None]  # [B, K, S]
    targets = torch.einsum("bks,bklc->bslc", one_hot.to(given.shares), given.shares)
    own = nn.functional.binary_cross_entropy_with_logits(given.claims.float(), targets, reduction="none")
    guided = nn.functional.binary_cross_entropy_with_logits(
        given.guided_claims.float(), given.shares, reduction="none"
    )
    weights = given.weights[:, None]
    own_part = (weights * own).sum() / (whole.n_examples * n_slots)
    return own_part + (weights * guided).sum((2, 3))[active].sum() / whole.n_sources


def _power(spectrogram: Tensor) -> Tensor:
    """Squared magnitude; several times faster than by way of abs."""
    return torch.view_as_real(spectrogram).square().sum(-1)


def _bin_weights(spectrogram: Tensor) -> Tensor:
    """How many bins of the two-sided spectrum each one-sided bin stands for, [F, 1]."""
    weights = torch.full((spectrogram.shape[-2], 1), 2.0, device=spectrogram.device)
    weights[0] = weights[-1] = 1.0
    return weights
