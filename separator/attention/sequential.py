"""Sequential slot attention: slots one after another, each blind to what the earlier ones explained."""

from collections.abc import Sequence

from torch import Tensor

from separator.attention.base import UNTOUCHED, Deplete, SequentialLoop, SlotAttentionOutput
from separator.attention.reading import TokenState


class SequentialSlotAttention(SequentialLoop):
    """The control of the paper: evidence depletion without evidence. Subclasses change `rule`.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations of each slot.
        tau: temperature of the attention.
    """

    def __init__(self, n_slots: int = 5, d_model: int = 64, n_iter: int = 3, tau: float = 0.3) -> None:
        super().__init__(n_slots, d_model, n_iter, tau)

    def forward(
        self,
        tokens: Tensor,
        *,
        n_slots: int | None = None,
        slot_order: Sequence[int] | Tensor | None = None,
        forced_attn_first: Tensor | None = None,
    ) -> SlotAttentionOutput:
        """Decompose `tokens` [B, L, D]; the options are as in `EvidenceDepletionSlotAttention.forward`."""
        with self.full_precision(tokens):
            h, starts = self.start(tokens, n_slots)
            order = self.fixed_order(starts, slot_order)
            state, deplete = self.rule(h)
            if deplete is None and forced_attn_first is None:
                return SlotAttentionOutput(*self.process_together(h, starts), None)
            slots, attn, _ = self.process(
                h,
                order,
                starts.shape[1],
                state=state,
                deplete=deplete,
                forced_attn_first=forced_attn_first,
            )
        return SlotAttentionOutput(slots, attn, None)

    def rule(self, h: Tensor) -> tuple[TokenState, Deplete | None]:
        """Return the state of the untouched tokens h [B, L, D], and what a finished slot makes of a state."""
        return UNTOUCHED, None
