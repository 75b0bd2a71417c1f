"""Which slot answers for which source: the most certain slots choose, one after another."""

from typing import NamedTuple

import torch
from torch import Tensor


class Pairs(NamedTuple):
    """The slot of each source."""

    slots: Tensor  # [..., B, K], of each source; 0 where there is none
    matched: Tensor  # [..., B, K] bool


@torch.no_grad()
def match_sources(
    params: Tensor, true_params: Tensor, exist_logits: Tensor, counts: Tensor, *, barred: int | None = None
) -> Pairs:
    """Let the K slots with the highest logits take, in that order, each the nearest source that is left.

    Near is Euclidean, in the parameters [..., B, S, P] and [..., B, K, P]; `counts` [..., B] is K. The only
    loop is over the ranks of the slots. `barred` is a slot that takes no part.
    """
    n_sources = true_params.shape[-2]
    if barred is not None:
        exist_logits = exist_logits.index_fill(-1, torch.tensor([barred], device=counts.device), -torch.inf)
    n_free = exist_logits.shape[-1] - (barred is not None)
    n_ranks = min(n_free, n_sources)
    ranked = exist_logits.argsort(-1, descending=True)[..., :n_ranks]  # [..., B, ranks]
    candidates = params.take_along_dim(ranked.unsqueeze(-1), -2)
    distances = (candidates.unsqueeze(-2) - true_params.unsqueeze(-3)).square().sum(-1)  # [..., B, ranks, K]
    sources = torch.arange(n_sources, device=counts.device)
    taken = (sources >= counts.unsqueeze(-1)).expand((*distances.shape[:-2], n_sources))
    slots = torch.zeros(taken.shape, dtype=torch.int64, device=counts.device)
    matched = torch.zeros_like(taken)
    for rank in range(n_ranks):
        nearest = distances[..., rank, :].masked_fill(taken, torch.inf).argmin(-1, keepdim=True)
        choice = (sources == nearest) & (rank < counts).unsqueeze(-1)  # [..., B, K]
        slots = torch.where(choice, ranked[..., rank, None], slots)
        matched = matched | choice
        taken = taken | choice
    return Pairs(slots, matched)
