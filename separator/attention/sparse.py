"""Parallel slot attention with a sparse competition of the slots for each token.

Sparsemax is the projection onto the simplex (Martins & Astudillo, 2016), entmax-1.5 lies between it and
softmax (Peters et al., 2019); both come from the package `entmax`.
"""

from typing import cast

from torch import Tensor

from separator.attention.parallel import VanillaSlotAttention
from separator.errors import SeparatorError

NORM_FNS = ("sparsemax", "entmax15")


class SparseSlotAttention(VanillaSlotAttention):
    """Vanilla slot attention with another normaliser over slots.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations.
        norm_fn: "sparsemax" or "entmax15".
    """

    def __init__(
        self, n_slots: int = 5, d_model: int = 64, n_iter: int = 3, norm_fn: str = "sparsemax"
    ) -> None:
        super().__init__(n_slots, d_model, n_iter)
        if norm_fn not in NORM_FNS:
            raise SeparatorError(f"unknown {norm_fn=}; choose {' or '.join(NORM_FNS)}")
        self.norm_fn = norm_fn

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the attention of logits [..., S, L]: many slots get nothing of a token."""
        import entmax  # not with the package: only these two mechanisms need it

        over_slots = logits.dim() - 2  # entmax misreads a negative dimension other than -1
        return cast(Tensor, getattr(entmax, self.norm_fn)(logits, dim=over_slots))
