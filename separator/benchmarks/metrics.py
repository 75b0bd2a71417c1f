"""What the benchmarks measure: whether slots collapse, and what they recover. Batched over mixtures.

The slots that are compared are the first min(K, S) by index, K the true count, of the mixtures with K >= 2.
What a model that diverged says is not finite, and has no peaks, counts or matches: its metrics are NaN.

Reference: Houba, NeurIPS 2026, Definition 1 and appendices F and I.
"""

import math

import torch
from torch import Tensor

from separator.benchmarks.matching import match_sources

NORM_FLOOR = 1e-8
FREQUENCY_TOLERANCE_HZ = 0.5


def peak_overlap(attn: Tensor, counts: Tensor) -> float:
    """Return the share of mixtures two slots of which peak at one token: attn [B, S, L], counts [B].

    >>> attn = torch.eye(3)[None, [0, 0, 1]]
    >>> peak_overlap(attn, torch.tensor([2])), peak_overlap(attn[:, 1:], torch.tensor([2]))
    (1.0, 0.0)
    """
    if not attn.isfinite().all():
        return math.nan
    peaks = attn.argmax(-1)  # [B, S]
    same = peaks.unsqueeze(1) == peaks.unsqueeze(2)
    collapsed = (same & _compared(counts, attn.shape[1])).flatten(1).any(1)
    return _mean(collapsed[counts > 1].double(), empty=0.0)


def cosine_overlap(attn: Tensor, counts: Tensor) -> float:
    """Return the mean over mixtures of the largest cosine between the attention of two slots."""
    return _mean(_cosines(attn, counts, -torch.inf).amax((1, 2)).clamp(min=0)[counts > 1], empty=0.0)


def slot_cosine(slots: Tensor, counts: Tensor) -> float:
    """Return the mean over mixtures of the mean cosine between two slots [B, S, D]."""
    n_compared = counts.clamp(max=slots.shape[1])
    n_pairs = (n_compared * (n_compared - 1)).clamp(min=1)
    return _mean((_cosines(slots, counts, 0.0).sum((1, 2)) / n_pairs)[counts > 1], empty=0.0)


def count_accuracy(exist_logits: Tensor, counts: Tensor) -> float:
    """Return the share of mixtures for which as many logits [B, S] are positive as there are sources."""
    if not exist_logits.isfinite().all():
        return math.nan
    return _mean(((exist_logits > 0).sum(-1) == counts).double())


def parameter_errors(
    params: Tensor, true_params: Tensor, exist_logits: Tensor, counts: Tensor, *, barred: int | None = None
) -> Tensor:
    """Return the mean absolute error of each parameter over the matched pairs, [P]; NaN if there are none.

    `barred` is a slot that takes no part.
    """
    pairs = match_sources(params, true_params, exist_logits, counts, barred=barred)
    chosen = params.take_along_dim(pairs.slots.unsqueeze(-1), -2)
    return (chosen - true_params).abs()[pairs.matched].mean(0)


def source_recovery(
    params: Tensor, true_params: Tensor, exist_logits: Tensor, counts: Tensor, *, barred: int | None = None
) -> float:
    """Return the share of sources whose slot has their frequency, the first parameter, within 0.5 Hz.

    `barred` is a slot that takes no part.
    """
    if not params.isfinite().all():
        return math.nan
    pairs = match_sources(params, true_params, exist_logits, counts, barred=barred)
    frequencies = params[..., 0].take_along_dim(pairs.slots, -1)
    near = (frequencies - true_params[..., 0]).abs() < FREQUENCY_TOLERANCE_HZ
    return float((near & pairs.matched).sum() / counts.sum().clamp(min=1))


def depleted_mass(evidence: list[Tensor], exist_logits: Tensor, counts: Tensor) -> tuple[float, float]:
    """Return the mean evidence that a slot took, of the K slots with the highest logits and of the others.

    `evidence` holds S + 1 tensors [B, L] of slots taken by index; NaN if there is no such slot.
    """
    states = torch.stack(evidence, 1)  # [B, S + 1, L]
    taken = (states[:, :-1] - states[:, 1:]).sum(-1)  # [B, S]
    rank = exist_logits.argsort(-1, descending=True).argsort(-1)
    matched = rank < counts.unsqueeze(-1)
    return _mean(taken[matched]), _mean(taken[~matched])


def _compared(counts: Tensor, n_slots: int) -> Tensor:
    """Tell which pairs of two different slots are compared, [B, S, S]."""
    used = torch.arange(n_slots, device=counts.device) < counts.unsqueeze(1)
    different = ~torch.eye(n_slots, dtype=torch.bool, device=counts.device)
    return used.unsqueeze(1) & used.unsqueeze(2) & different


def _cosines(vectors: Tensor, counts: Tensor, elsewhere: float) -> Tensor:
    unit: Tensor = vectors / (vectors.norm(dim=-1, keepdim=True) + NORM_FLOOR)
    return (unit @ unit.mT).masked_fill(~_compared(counts, vectors.shape[1]), elsewhere)


def _mean(values: Tensor, empty: float = math.nan) -> float:
    return float(values.double().mean()) if values.numel() else empty
