"""Coverage: sequential slot attention whose logits lose what earlier slots have looked at.

    logits_l - beta c_l,  c_l = sum over earlier slots of alpha_l

after Tu et al. (2016), who keep such a vector for translation. Nothing is multiplied and no logarithm taken:
what a token can lose is bounded.
"""

from torch import Tensor

from separator.attention.base import Deplete
from separator.attention.reading import TokenState
from separator.attention.sequential import SequentialSlotAttention


class CoverageSlotAttention(SequentialSlotAttention):
    """Sequential slot attention with a coverage penalty.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations of each slot.
        tau: temperature of the attention.
        beta: weight of the coverage.
    """

    def __init__(
        self, n_slots: int = 5, d_model: int = 64, n_iter: int = 3, tau: float = 0.3, beta: float = 3.0
    ) -> None:
        super().__init__(n_slots, d_model, n_iter, tau)
        self.beta = beta

    def rule(self, h: Tensor) -> tuple[TokenState, Deplete | None]:
        """Return tokens without a bias, and the rule that lowers it by beta alpha."""

        def deplete(state: TokenState, attn: Tensor, slot: Tensor) -> TokenState:
            penalty = -self.beta * attn
            return TokenState(bias=penalty if state.bias is None else state.bias + penalty)

        return TokenState(), deplete
