"""Slot attention that updates all slots at once: slots compete for each token (Locatello et al., 2020)."""

import math

import torch
from torch import Tensor

from separator.attention.base import (
    Maps,
    SlotAttention,
    SlotAttentionOutput,
    checked_attn,
    weighed_mean,
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
            readers = self.read(h, n_readers=slots.shape[1], n_passes=2 * self.n_iter)
            slots, attn = self.iterate(readers, slots, self.maps(), forced)
        return SlotAttentionOutput(slots, attn, None)

    def iterate(
        self, tokens: Tokens, slots: Tensor, maps: Maps, forced: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return slots [B, S, D] after all iterations and their attention [B, S, L], slot 0's as `forced`."""
        for _ in range(self.n_iter):
            attn = self.attend(tokens, slots, maps)
            if forced is not None:
                attn = torch.cat([forced, attn[:, 1:]], dim=1)
            pooled = self.pool(tokens, attn).flatten(0, 1)
            slots = self.refine(pooled, slots.flatten(0, 1), maps.gates).view_as(slots)
        return slots, attn

    def maps(self) -> Maps:
        """Return the maps of slots that compete, so that <q, b_k> counts."""
        return self.weighed_maps(math.sqrt(self.d_model))

    def attend(self, tokens: Tokens, slots: Tensor, maps: Maps) -> Tensor:
        """Return the attention [B, S, L] of slots [B, S, D]."""
        x = self.norm_s(slots)
        logits = tokens.score(maps.query(x))
        return self.normalise(logits if maps.offset is None else logits + maps.offset(x))

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the attention of logits [..., S, L]: a softmax over slots."""
        return torch.softmax(logits, dim=-2)

    def pool(self, tokens: Tokens, attn: Tensor) -> Tensor:
        """Return the mean of the tokens by attention, and the sum of its weights: [B, S, D + 1]."""
        return weighed_mean(tokens.pool(attn), attn)
