"""Slot attention that updates all slots at once: slots compete for each token (Locatello et al., 2020)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

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
            query_map, bias_map, gates = self._maps()
            for _ in range(self.n_iter):
                x = self.norm_s(slots)  # [B, S, D]
                logits = readers.score(F.linear(x, *query_map)) + F.linear(x, *bias_map)
                attn = self.normalise(logits)  # [B, S, L]
                if forced is not None:
                    attn = torch.cat([forced, attn[:, 1:]], dim=1)
                slots = self._update(readers, attn, slots, gates)
        return SlotAttentionOutput(slots, attn, None)

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the attention of logits [B, S, L]: a softmax over slots."""
        return torch.softmax(logits, dim=1)

    def _update(self, readers: Tokens, attn: Tensor, slots: Tensor, gates: AffineMap) -> Tensor:
        total = attn.sum(2, keepdim=True)
        pooled = torch.cat([readers.pool(attn), total], 2) / total.clamp(min=WEIGHT_FLOOR)  # [B, S, D + 1]
        return self.refine(pooled.flatten(0, 1), slots.flatten(0, 1), gates).view_as(slots)

    def _maps(self) -> tuple[AffineMap, AffineMap, AffineMap]:
        """Return the maps from a slot to W_k^T q and to <q, b_k>, and from pooled tokens to the GRU's gates.

        Both biases need a term here. <q, b_k> differs between the slots, which compete; and the weights of a
        slot that lost all tokens sum to less than one, so b_v multiplies their sum, the last of `pooled`.
        """
        temperature = math.sqrt(self.d_model)
        key_bias = self.proj_k.bias.unsqueeze(0) / temperature  # [1, D]
        bias_map = AffineMap(key_bias @ self.proj_q.weight, key_bias @ self.proj_q.bias)
        value_map = torch.cat([self.proj_v.weight, self.proj_v.bias.unsqueeze(1)], 1)  # [D, D + 1]
        gates = AffineMap(self.gru.weight_ih @ value_map, self.gru.bias_ih)
        return self.query_map(temperature), bias_map, gates
