"""Stick-breaking: every slot breaks its part off what is left of a token, in the manner of Genesis-v2.

    pi_l = stick_l * sigmoid(<q, W_k (stick_l h_l) + b_k> / (tau sqrt(D)))
    stick_l <- max(stick_l (1 - pi_l), epsilon)

after Engelcke et al. (2021), without their noise. No softmax: tokens do not compete for a slot.
"""

import math

import torch
from torch import Tensor

from separator.attention.base import Deplete, Maps, weighed_mean
from separator.attention.depletion import check_epsilon, deplete
from separator.attention.reading import Tokens, TokenState
from separator.attention.sequential import SequentialSlotAttention


class StickBreakingSlotAttention(SequentialSlotAttention):
    """Sequential slot attention with sigmoid scopes; `attn` is pi, which sums to one over nothing.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations of each slot.
        tau: temperature of the attention.
        epsilon: the least stick of a token.
    """

    def __init__(
        self, n_slots: int = 5, d_model: int = 64, n_iter: int = 3, tau: float = 0.3, epsilon: float = 1e-4
    ) -> None:
        super().__init__(n_slots, d_model, n_iter, tau)
        check_epsilon(epsilon)
        self.epsilon = epsilon

    def rule(self, h: Tensor) -> tuple[TokenState, Deplete | None]:
        """Return whole sticks, and the rule that breaks pi off."""

        def break_off(state: TokenState, attn: Tensor, slot: Tensor) -> TokenState:
            return TokenState(scale=deplete(state.factors(), attn, self.epsilon))

        return TokenState(scale=h.new_ones(h.shape[:2])), break_off

    def maps(self) -> Maps:
        """Return the maps with <q, b_k>, which moves a sigmoid, and with the sum of the weights."""
        return self.weighed_maps(self.tau * math.sqrt(self.d_model))

    def normalise(self, logits: Tensor, state: TokenState) -> Tensor:
        """Return pi [B, 1, L]."""
        return state.scaled(torch.sigmoid(logits))

    def pool(self, tokens: Tokens, attn: Tensor, state: TokenState) -> Tensor:
        """Return the mean of the tokens as they are left, and the sum of its weights: [B, 1, D + 1]."""
        return weighed_mean(super().pool(tokens, attn, state), attn)
