"""Which slot answers for which source: the most certain slots choose, one after another."""

from typing import NamedTuple

import torch
from torch import Tensor

from separator.benchmarks import kernels


class Pairs(NamedTuple):
    """The slot of each source."""

    slots: Tensor  # [..., B, K], of each source; 0 where there is none
    matched: Tensor  # [..., B, K] bool


@torch.no_grad()
def match_sources(
    params: Tensor, true_params: Tensor, exist_logits: Tensor, counts: Tensor, *, barred: int | None = None
) -> Pairs:
    """Let the K slots with the highest logits take, in that order, each the nearest source that is left.

    Near is Euclidean, in the parameters [..., B, S, P] and [..., B, K, P] as float32; `counts` [..., B] is K
    of each. `barred` is a slot that takes no part.
    """
    n_ranks = exist_logits.shape[-1]
    if barred is not None:
        exist_logits = exist_logits.index_fill(-1, torch.tensor([barred], device=counts.device), -torch.inf)
        n_ranks -= 1
    found = params, true_params, exist_logits
    rows = [x.reshape(-1, *x.shape[counts.dim() :]).float().contiguous().cpu().numpy() for x in found]
    shape = true_params.shape[:-1]
    slots, matched = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    out = (x.view(-1, shape[-1]).numpy() for x in (slots, matched))
    kernels.match(*rows, counts.reshape(-1).cpu().numpy(), n_ranks, *out)
    return Pairs(slots.to(counts.device), matched.to(counts.device))
