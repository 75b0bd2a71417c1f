"""How much of a token's evidence a slot explains: the function f of Eq. 6 and its scale.

The weights alpha of a slot sum to one over the tokens. With the paper's scale, "sum", thousands of tokens
have small alpha everywhere, and f(alpha) removes almost nothing. "peak" divides by the largest weight
first: the token that fits best is explained entirely, however many tokens there are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from separator.errors import SeparatorError

BINARY_THRESHOLD = 0.5


def _linear(share: Tensor) -> Tensor:
    return share


def _quadratic(share: Tensor) -> Tensor:
    return share * share


def _cubic(share: Tensor) -> Tensor:
    return share * share * share


def _binary(share: Tensor) -> Tensor:
    return (share >= BINARY_THRESHOLD).to(share.dtype)


DEPLETION_FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": _linear,
    "quadratic": _quadratic,
    "cubic": _cubic,
    "binary": _binary,
}
DEPLETION_SCALES = ("sum", "peak")


def check_depletion(form: str, scale: str) -> None:
    """Raise SeparatorError unless `form` and `scale` exist."""
    if form not in DEPLETION_FORMS:
        raise SeparatorError(f"unknown depletion {form!r}; choose one of {', '.join(DEPLETION_FORMS)}")
    if scale not in DEPLETION_SCALES:
        raise SeparatorError(f"unknown depletion_scale {scale!r}; choose {' or '.join(DEPLETION_SCALES)}")


def check_epsilon(epsilon: float) -> None:
    """Raise SeparatorError unless `epsilon`, the least that is left of a token, is between 0 and 1."""
    if not 0 < epsilon < 1:
        raise SeparatorError(f"{epsilon=} is not between 0 and 1; the paper's is 1e-4")


def explained_share(attn: Tensor, form: str, scale: str = "sum") -> Tensor:
    """Return f(attn), the share in [0, 1] of each token that a slot with attention [..., L] explains.

    Raises:
        SeparatorError: unknown `form` or `scale`.

    >>> explained_share(torch.tensor([0.5, 0.25, 0.25]), "quadratic").tolist()
    [0.25, 0.0625, 0.0625]
    >>> explained_share(torch.tensor([0.5, 0.25, 0.25]), "quadratic", "peak").tolist()
    [1.0, 0.25, 0.25]
    """
    check_depletion(form, scale)
    if scale == "peak":
        attn = attn / attn.amax(dim=-1, keepdim=True)
    return DEPLETION_FORMS[form](attn)


def deplete(evidence: Tensor, share: Tensor, epsilon: float) -> Tensor:
    """Return the evidence left, max(e (1 - share), epsilon), which lies in [epsilon, e] (Proposition 2)."""
    return torch.clamp(evidence * (1 - share), min=epsilon)
