"""The training loss of the benchmarks, batched: existence, matched parameters, and what keeps slots apart.

Tensors have any leading dimensions before the batch, one entry each in the result: seeds go together.

Reference: Houba, NeurIPS 2026, section 3.1 and appendix H.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from separator.benchmarks.matching import match_sources

PARAMETER_WEIGHT = 5.0
NORM_FLOOR = 1e-12  # of a vector whose direction counts
SUM_FLOOR = 1e-8  # of attention that is normalised over tokens


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms that differ between methods."""

    diversity: float = 0.5
    orthogonality: float = 0.0
    coverage: float = 0.0


def training_loss(
    slots: Tensor,
    attn: Tensor,
    exist_logits: Tensor,
    params: Tensor,
    true_params: Tensor,
    counts: Tensor,
    weights: LossWeights,
) -> Tensor:
    """Return the loss [...] of slots [..., B, S, D], attn [..., B, S, L], logits and params [..., B, S(, P)].

    `true_params` [..., B, K, P] and `counts` [..., B] say what the mixtures are made of.
    """
    loss = existence_loss(exist_logits, counts)
    loss = loss + PARAMETER_WEIGHT * parameter_loss(params, true_params, exist_logits, counts)
    if weights.diversity:
        loss = loss + weights.diversity * similarity_loss(slots)
    if weights.orthogonality:
        loss = loss + weights.orthogonality * similarity_loss(attn)
    if weights.coverage:
        loss = loss + weights.coverage * coverage_loss(attn)
    return loss


def existence_loss(exist_logits: Tensor, counts: Tensor) -> Tensor:
    """Return the cross-entropy [...] of logits [..., B, S], the first `counts` [..., B] of which exist."""
    n_slots = exist_logits.shape[-1]
    target = (torch.arange(n_slots, device=counts.device) < counts.unsqueeze(-1)).to(exist_logits)
    entropy = F.binary_cross_entropy_with_logits(exist_logits, target, reduction="none")
    return entropy.mean((-2, -1))


def parameter_loss(params: Tensor, true_params: Tensor, exist_logits: Tensor, counts: Tensor) -> Tensor:
    """Return the mean squared error [...] of the parameters over the matched pairs of a batch."""
    pairs = match_sources(params.detach(), true_params, exist_logits.detach(), counts)
    chosen = params.take_along_dim(pairs.slots.unsqueeze(-1), -2)  # [..., B, K, P]
    error = (chosen - true_params).square().mean(-1) * pairs.matched
    return error.sum((-2, -1)) / pairs.matched.sum((-2, -1)).clamp(min=1)


def similarity_loss(vectors: Tensor) -> Tensor:
    """Return the mean [...] over S x S of the squared cosines of two of S vectors [..., B, S, D].

    It has first derivatives only.
    """
    return cast(Tensor, _Similarity.apply(vectors))


def coverage_loss(attn: Tensor) -> Tensor:
    """Return mean_b sum_l (sum_s a_sl - 1)^2 [...] of attn [..., B, S, L], renormalised over tokens."""
    shares = attn / attn.sum(-1, keepdim=True).clamp(min=SUM_FLOOR)
    return (shares.sum(-2) - 1).square().sum(-1).mean(-1)


class _Similarity(torch.autograd.Function):
    """With unit vectors u and c = <u_i, u_j>, the gradient of c^2 along v_i is 2 c (u_j - c u_i) / |v_i|."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> Tensor:
        cosines = vectors @ vectors.mT  # [..., B, S, S]
        squares = cosines.diagonal(dim1=-2, dim2=-1).clone()
        inverse = squares.clamp(min=NORM_FLOOR**2).rsqrt()  # of the lengths
        cosines *= inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
        cosines.diagonal(dim1=-2, dim2=-1).zero_()
        ctx.save_for_backward(vectors, squares, inverse, cosines)
        return cosines.square().mean((-3, -2, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Tensor:
        vectors, squares, inverse, cosines = ctx.saved_tensors
        along = (
            cosines.square().sum(-1) * inverse * (squares > NORM_FLOOR**2)
        )  # below, the length is constant
        to_others = cosines * inverse.unsqueeze(-2) - torch.diag_embed(along)
        n_pairs = cosines.shape[-3:].numel()
        factor = 4 / n_pairs * d_loss[..., None, None] * inverse
        return cast(Tensor, (to_others * factor.unsqueeze(-1)) @ vectors)
