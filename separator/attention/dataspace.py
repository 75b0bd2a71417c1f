"""Data-space depletion: sequential slot attention that scales the tokens themselves (the paper's control).

    h_l <- h_l * max(1 - f(alpha_l), epsilon)

No evidence is kept. With `use_bias` the logits get gamma log(|h_l| / max over l of |h_l|), the log-evidence
bias read off the tokens, which tells the effect of the bias from that of the space that is depleted.
"""

import torch
from torch import Tensor

from separator.attention.base import Deplete
from separator.attention.depletion import check_depletion, check_epsilon, explained_share
from separator.attention.reading import TokenState
from separator.attention.sequential import SequentialSlotAttention

NORM_FLOOR = 1e-6


class DataSpaceSlotAttention(SequentialSlotAttention):
    """Sequential slot attention whose slots scale down the tokens that they explain.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations of each slot.
        tau: temperature of the attention.
        depletion: f of Eq. 6, "linear", "quadratic", "cubic" or "binary".
        epsilon: the least factor of a token in one step.
        gamma: weight of the bias.
        use_bias: whether the norms of the tokens bias the logits.
    """

    def __init__(
        self,
        n_slots: int = 5,
        d_model: int = 64,
        n_iter: int = 3,
        tau: float = 0.3,
        depletion: str = "quadratic",
        epsilon: float = 1e-4,
        gamma: float = 3.0,
        use_bias: bool = False,
    ) -> None:
        super().__init__(n_slots, d_model, n_iter, tau)
        check_depletion(depletion, "sum")
        check_epsilon(epsilon)
        self.depletion = depletion
        self.epsilon = epsilon
        self.gamma = gamma
        self.use_bias = use_bias

    def rule(self, h: Tensor) -> tuple[TokenState, Deplete | None]:
        """Return tokens of factor one, and the rule that multiplies the factors [B, L]."""
        norm = torch.linalg.vector_norm(h, dim=2) if self.use_bias else None  # [B, L]

        def state_of(scale: Tensor) -> TokenState:
            if norm is None:
                return TokenState(scale=scale)
            left = (norm * scale).clamp(min=NORM_FLOOR)
            return TokenState(scale, self.gamma * torch.log(left / left.amax(1, keepdim=True)))

        def deplete(state: TokenState, attn: Tensor, slot: Tensor) -> TokenState:
            factor = (1 - explained_share(attn, self.depletion)).clamp(min=self.epsilon)
            return state_of(state.factors() * factor)

        return state_of(h.new_ones(h.shape[:2])), deplete
