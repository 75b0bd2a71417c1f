"""A set predictor without slot competition: learned queries that look at the tokens once.

After the deep set prediction networks (Zhang et al., 2019) and DETR (Carion et al., 2020), cut down to one
cross-attention. The number of slots is that of the queries; nothing is random.
"""

import torch
from torch import Tensor, nn

from separator.attention.base import SLOT_INIT_STD, Mechanism, SlotAttentionOutput
from separator.errors import SeparatorError


class QuerySetPredictor(Mechanism):
    """S learned queries, one multi-head cross-attention and an MLP, each with a residual.

    Args:
        n_slots: number of queries.
        d_model: width of tokens and slots; a multiple of `n_heads`.
        n_heads: heads of the attention; `attn` is their mean.
    """

    def __init__(self, n_slots: int = 5, d_model: int = 64, n_heads: int = 4) -> None:
        super().__init__(n_slots, d_model)
        if n_heads < 1 or d_model % n_heads:
            raise SeparatorError(f"{n_heads=} does not divide {d_model=}; pass a divisor of it")
        self.queries = nn.Parameter(SLOT_INIT_STD * torch.randn(1, n_slots, d_model))
        self.norm_in = nn.LayerNorm(d_model)
        self.norm_q = nn.LayerNorm(d_model)
        self.norm_mlp = nn.LayerNorm(d_model)
        self.mha = nn.MultiheadAttention(d_model, n_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.Linear(d_model, d_model))

    def forward(self, tokens: Tensor, *, n_slots: int | None = None) -> SlotAttentionOutput:
        """Decompose `tokens` [B, L, D]; `n_slots` may only be the number of queries."""
        self.check_tokens(tokens)
        if n_slots not in (None, self.n_slots):
            raise SeparatorError(f"{n_slots=} with {self.n_slots} learned queries; build with that number")
        with self.full_precision(tokens):
            h = self.norm_in(tokens.to(self.queries.dtype))
            query = self.norm_q(self.queries).expand(len(h), -1, -1)  # [B, S, D]
            found, attn = self.mha(query, h, h)  # the mean of the heads, [B, S, L]
            slots = query + found
            slots = slots + self.mlp(self.norm_mlp(slots))
        return SlotAttentionOutput(slots, attn, None)
