"""Reading the tokens: products of queries with h and sums of h, whose gradient is one product per call.

The projections are affine, so keys and values are never formed:

    <q, W_k (e_l h_l) + b_k> = e_l <W_k^T q, h_l> + <q, b_k>
    sum_l alpha_l (W_v (e_l h_l) + b_v) = W_v (sum_l alpha_l e_l h_l) + b_v    as alpha sums to one

An attention is two passes over h, O(L D) instead of O(L D^2). Every pass adds an outer product to its
gradient. Formed one by one they would cost more than all else, so a pass hands back only the two factors,
as the gradients of placeholders, and one product at the end sums them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from separator.errors import SeparatorError


class TokenState(NamedTuple):
    """What earlier slots did to the tokens: factors and log-biases [B, L]; None is the neutral value."""

    scale: Tensor | None = None
    bias: Tensor | None = None

    def logits(self, scores: Tensor) -> Tensor:
        """Return scale * scores + bias for scores [B, N, L] of h."""
        logits = self.scaled(scores)
        return logits if self.bias is None else logits + self.bias.unsqueeze(1)

    def scaled(self, values: Tensor) -> Tensor:
        """Return scale * values for values [B, N, L]."""
        return values if self.scale is None else values * self.scale.unsqueeze(1)

    def factors(self) -> Tensor:
        """Return the factors [B, L] of a mechanism that keeps them from its first state on."""
        if self.scale is None:
            raise SeparatorError(f"scale={self.scale} keeps no factors; start the loop from factors of one")
        return self.scale


class Tokens:
    """Tokens h [B, L, D], read by N slots at a time in up to `n_passes` calls of `score` and `pool`.

    Gradients reach h as usual, but only first ones: a second derivative raises a RuntimeError.
    """

    def __init__(self, h: Tensor, n_readers: int, n_passes: int) -> None:
        self.h = h.detach()
        self._factors: Iterator[tuple[Tensor | None, Tensor | None]] | None = None
        if h.requires_grad and torch.is_grad_enabled():
            placeholders = iter(_OuterProducts.apply(h, n_readers, n_passes))
            self._factors = zip(placeholders, placeholders, strict=True)

    def score(self, query: Tensor) -> Tensor:
        """Return <query, h_l>, [B, N, L], for queries [B, N, D]."""
        row, vector = self._next_factors()
        # Row times matrix: on a CPU torch is ten times slower at the same product as matrix times column.
        return cast(Tensor, _Pass.apply(query, self.h.transpose(1, 2), row, vector))

    def pool(self, weights: Tensor) -> Tensor:
        """Return sum_l weights_l h_l, [B, N, D], for weights [B, N, L]."""
        row, vector = self._next_factors()
        return cast(Tensor, _Pass.apply(weights, self.h, vector, row))

    def _next_factors(self) -> tuple[Tensor | None, Tensor | None]:
        return (None, None) if self._factors is None else next(self._factors)


class _OuterProducts(torch.autograd.Function):
    """Placeholders [B, N, L], [B, N, D] of each pass; their gradients are the factors of its product."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, n_readers: int, n_passes: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        n_batch, n_tokens, d_model = h.shape
        zero = h.new_zeros(())  # expanded: a placeholder takes no memory
        sizes = [n_tokens, d_model] * n_passes
        return tuple(zero.expand(n_batch, n_readers, size) for size in sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        rows = [grad for grad in grads[0::2] if grad is not None]
        vectors = [grad for grad in grads[1::2] if grad is not None]
        if not rows:
            return None, None, None
        return torch.bmm(torch.cat(rows, 1).transpose(1, 2), torch.cat(vectors, 1)), None, None  # [B, L, D]


class _Pass(torch.autograd.Function):
    """x @ matrix, whose gradient for the matrix, x^T grad, goes to `_OuterProducts` as two factors."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, matrix: Tensor, grad_factor: Tensor | None, x_factor: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, matrix)
        return torch.bmm(x, matrix)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None]:
        x, matrix = ctx.saved_tensors
        grad_x = torch.bmm(grad, matrix.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        factors = (grad, x) if ctx.needs_input_grad[2] else (None, None)
        return grad_x, None, *factors
