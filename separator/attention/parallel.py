"""Slot attention that updates all slots at once: slots compete for each token (Locatello et al., 2020)."""

import math

import torch
from torch import Tensor

from separator.attention.base import AffineMap, SlotAttention, SlotAttentionOutput, checked_attn
from separator.attention.reading import Tokens

WEIGHT_FLOOR = 1e-8


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
            for _ in range(self.n_iter):
                attn = self.normalise(self._logits(readers, slots))  # [B, S, L]
                if forced is not None:
                    attn = torch.cat([forced, attn[:, 1:]], dim=1)
                slots = self._update(readers, attn, slots)
        return SlotAttentionOutput(slots, attn, None)

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the attention of logits [B, S, L]: a softmax over slots."""
        return torch.softmax(logits, dim=1)

    def _logits(self, readers: Tokens, slots: Tensor) -> Tensor:
        # <q, W_k h + b_k> = <W_k^T q, h> + <q, b_k>; over slots the last term differs, so it stays.
        q: Tensor = self.proj_q(self.norm_s(slots)) / math.sqrt(self.d_model)  # [B, S, D]
        return readers.score(q @ self.proj_k.weight) + (q @ self.proj_k.bias).unsqueeze(2)

    def _update(self, readers: Tokens, attn: Tensor, slots: Tensor) -> Tensor:
        weights = attn / attn.sum(2, keepdim=True).clamp(min=WEIGHT_FLOOR)
        # b_v is pooled too: the weights of a slot that lost every token sum to less than one.
        offset = weights.sum(2, keepdim=True) * self.proj_v.bias
        values = readers.pool(weights) @ self.proj_v.weight.t() + offset  # [B, S, D]
        gates = AffineMap(self.gru.weight_ih, self.gru.bias_ih)
        return self.refine(values.flatten(0, 1), slots.flatten(0, 1), gates).view_as(slots)
