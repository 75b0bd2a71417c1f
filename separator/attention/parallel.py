"""Slot attention that updates all slots at once: slots compete for each token (Locatello et al., 2020)."""

import math

import torch
from torch import Tensor

from separator.attention.base import (
    WEIGHT_FLOOR,
    AffineMap,
    SlotAttention,
    SlotAttentionOutput,
    checked_attn,
)
from separator.attention.reading import Tokens


class VanillaSlotAttention(SlotAttention):
    """Parallel slot attention, the collapsing baseline of the paper; subclasses change `normalise`.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations.
    """

    def __init__(self, n_slots: int = 5, d_model: int = 64, n_iter: int = 3) -> None:
        super().__init__(n_slots, d_model, n_iter)

    def forward(
        self, tokens: Tensor, *, n_slots: int | None = None, forced_attn_first: Tensor | None = None
    ) -> SlotAttentionOutput:
        """Decompose `tokens` [B, L, D]; `attn` is what `normalise` returns, not renormalised over tokens.

        `n_slots` may be any number; `forced_attn_first` [B, L] is the attention of slot 0 in all iterations.
        """
        with self.full_precision(tokens):
            h, slots = self.start(tokens, n_slots)
            forced = None if forced_attn_first is None else checked_attn(forced_attn_first, h)
            readers = Tokens(h, n_readers=slots.shape[1], n_passes=2 * self.n_iter)
            # Slots compete, so <q, b_k> counts; and a slot that lost all tokens has weights of sum < 1.
            temperature = math.sqrt(self.d_model)
            query_map, offset_map = self.query_map(temperature), self.offset_map(temperature)
            gates = self.weighed_gates_map()
            for _ in range(self.n_iter):
                x = self.norm_s(slots)  # [B, S, D]
                logits = readers.score(query_map(x)) + offset_map(x)
                attn = self.normalise(logits)  # [B, S, L]
                if forced is not None:
                    attn = torch.cat([forced, attn[:, 1:]], dim=1)
                slots = self._update(readers, attn, slots, gates)
        return SlotAttentionOutput(slots, attn, None)

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the attention of logits [..., S, L]: a softmax over slots."""
        return torch.softmax(logits, dim=-2)

    def _update(self, readers: Tokens, attn: Tensor, slots: Tensor, gates: AffineMap) -> Tensor:
        total = attn.sum(2, keepdim=True)
        pooled = torch.cat([readers.pool(attn), total], 2) / total.clamp(min=WEIGHT_FLOOR)  # [B, S, D + 1]
        return self.refine(pooled.flatten(0, 1), slots.flatten(0, 1), gates).view_as(slots)
