"""What the rows of R seeds go through, with gradients: affine maps, LayerNorm, a look, a refinement.

    r, z = sigmoid(the first two thirds of W_i x + b_i + W_h s + b_h)
    n = tanh(the last third of W_i x + b_i + r (W_h s + b_h));  s' = n + z (s - n)
    out = s' + W_2 gelu(W_1 norm(s') + b_1) + b_2

The loops are those of `kernels`. Weights are [R, out, in], biases [R, out]; all is float32 on the CPU.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from separator.attention.base import WEIGHT_FLOOR
from separator.benchmarks import kernels

Array = NDArray[np.float32]
FLOOR = np.float32(WEIGHT_FLOOR)


class Shared:
    """Tensors that many calls of a step read; all add to one gradient, handed on after the last.

    There is one backward pass: a second one raises RuntimeError, whatever `retain_graph` says.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.arrays = [_array(x) for x in tensors]
        self.sums = [np.zeros_like(x) for x in self.arrays]
        self.handle = cast(Tensor, _Collected.apply(self.sums, *tensors))


class Refinement(NamedTuple):
    """Parameters of the GRU and the MLP."""

    input_weight: Tensor  # [R, 3 D, in]
    input_bias: Tensor
    hidden_weight: Tensor  # [R, 3 D, D]
    hidden_bias: Tensor
    first_weight: Tensor  # [R, D, D], scale and shift of the norm included
    first_bias: Tensor
    second_weight: Tensor  # [R, D, D]
    second_bias: Tensor


def refine(update: Tensor, slot: Tensor, refinement: Shared) -> Tensor:
    """Return the slots [R, n, D] after the GRU, which reads updates [R, n, in], and the MLP.

    `refinement` shares the tensors of a `Refinement`.
    """
    return cast(Tensor, _Refine.apply(update, slot, refinement.handle, refinement))


def look(
    slots: Tensor, scale: Tensor, bias: Tensor, tokens: Shared, query_map: Shared
) -> tuple[Tensor, Tensor]:
    """Return the attention [R, n, L] of slots [R, n, D] to tokens, and what it pools [R, n, D].

    Attention is a softmax of scale <query, token> + bias, with scale and bias [R, B, L], and pools tokens
    times scale. `tokens` shares [R, B, L, D]; the slots of a sample follow one another. `query_map` shares
    weight and bias of the map of normalised slots.
    """
    looked = _Look.apply(slots, scale, bias, tokens.handle, query_map.handle, tokens, query_map)
    return cast(tuple[Tensor, Tensor], looked)


def compete(slots: Tensor, tokens: Shared, query_map: Shared) -> tuple[Tensor, Tensor]:
    """Return the attention [R, n, L] of slots [R, n, D] that compete for tokens, and what it pools.

    Attention is a softmax over the slots of a sample of <query, token> + offset. It pools the mean of the
    tokens, and the sum of the weights of that mean: [R, n, D + 1]. `query_map` shares weight and bias of the
    map of normalised slots to D + 1 values, the last of which is the offset; `tokens` are as for `look`.
    """
    looked = _Compete.apply(slots, tokens.handle, query_map.handle, tokens, query_map)
    return cast(tuple[Tensor, Tensor], looked)


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return weight x + bias, [R, n, out], for x [R, n, in]."""
    return cast(Tensor, _Affine.apply(x, weight, bias))


def gelu_affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return gelu(weight x + bias) for x [R, n, in]."""
    return cast(Tensor, _GeluAffine.apply(x, weight, bias))


def normalise(x: Tensor) -> Tensor:
    """Return x [..., D] with mean zero and variance one along D."""
    return cast(Tensor, _Norm.apply(x))


def scaled_norm(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """Return x [R, n, D], normalised along D, times gain [R, D] plus shift [R, D]."""
    return cast(Tensor, _ScaledNorm.apply(x, gain, shift))


class _Collected(torch.autograd.Function):
    """A number whose users have added to `sums` what `tensors` are to get."""

    @staticmethod
    def forward(ctx: Any, sums: list[Array], *tensors: Tensor) -> Tensor:
        ctx.kept = sums
        return torch.zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(torch.from_numpy(x) for x in _taken(ctx))


class _Refine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, update: Tensor, slot: Tensor, handle: Tensor, refinement: Shared) -> Tensor:
        inputs = _array(update), _array(slot)
        n_seeds, n_rows, d = slot.shape
        gates, scale = _empty(n_seeds, n_rows, 2 * d), _empty(n_seeds, n_rows)
        gated, new, normed, active, slope, out = (_empty(n_seeds, n_rows, d) for _ in range(6))
        kept = gates, gated, new, normed, scale, active, slope
        kernels.refine(*inputs, *refinement.arrays, *kept, out)
        ctx.kept, ctx.refinement = (*inputs, *kept), refinement
        return torch.from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        update, slot, *kept = _taken(ctx)
        d_update, d_slot = np.empty_like(update), np.empty_like(slot)
        weights, sums = ctx.refinement.arrays[::2], ctx.refinement.sums
        kernels.refine_backward(_array(d_out), update, slot, *weights, *kept, d_update, d_slot, *sums)
        return torch.from_numpy(d_update), torch.from_numpy(d_slot), torch.zeros(()), None


class _Look(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        slots: Tensor,
        scale: Tensor,
        bias: Tensor,
        tokens_handle: Tensor,
        map_handle: Tensor,
        tokens: Shared,
        query_map: Shared,
    ) -> tuple[Tensor, Tensor]:
        n_seeds, n_rows, d = slots.shape
        scales, n_tokens = _array(scale), scale.shape[2]
        normed, query, pooled = (_empty(n_seeds, n_rows, d) for _ in range(3))
        score, attn = (_empty(n_seeds, n_rows, n_tokens) for _ in range(2))
        kept = normed, _empty(n_seeds, n_rows), query, score, attn
        kernels.look(_array(slots), *tokens.arrays, scales, _array(bias), *query_map.arrays, *kept, pooled)
        ctx.kept, ctx.tokens, ctx.query_map = (scales, *kept), tokens, query_map
        return torch.from_numpy(attn), torch.from_numpy(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_attn: Tensor, d_pooled: Tensor) -> tuple[Tensor | None, ...]:
        tokens, query_map = ctx.tokens, ctx.query_map
        scales, *kept = _taken(ctx)
        given = _array(d_attn), _array(d_pooled)
        d_slots, d_scale, d_bias = np.empty_like(given[1]), np.zeros_like(scales), np.zeros_like(scales)
        read = *tokens.arrays, scales, query_map.arrays[0]
        kernels.look_backward(*given, *read, *kept, d_slots, *tokens.sums, d_scale, d_bias, *query_map.sums)
        of_inputs = (torch.from_numpy(x) for x in (d_slots, d_scale, d_bias))
        return *of_inputs, torch.zeros(()), torch.zeros(()), None, None


class _Compete(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, slots: Tensor, tokens_handle: Tensor, map_handle: Tensor, tokens: Shared, query_map: Shared
    ) -> tuple[Tensor, Tensor]:
        n_seeds, n_rows, d = slots.shape
        normed, attn = _empty(n_seeds, n_rows, d), _empty(n_seeds, n_rows, tokens.arrays[0].shape[2])
        query, pooled = (_empty(n_seeds, n_rows, d + 1) for _ in range(2))
        kept = normed, _empty(n_seeds, n_rows), query, attn, pooled
        kernels.compete(_array(slots), *tokens.arrays, *query_map.arrays, FLOOR, *kept)
        ctx.kept, ctx.tokens, ctx.query_map = kept, tokens, query_map
        return torch.from_numpy(attn), torch.from_numpy(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_attn: Tensor, d_pooled: Tensor) -> tuple[Tensor | None, ...]:
        tokens, query_map = ctx.tokens, ctx.query_map
        kept = _taken(ctx)
        d_slots = np.empty_like(kept[0])
        read = *tokens.arrays, query_map.arrays[0], FLOOR
        sums = *tokens.sums, *query_map.sums
        kernels.compete_backward(_array(d_attn), _array(d_pooled), *read, *kept, d_slots, *sums)
        return torch.from_numpy(d_slots), torch.zeros(()), torch.zeros(()), None, None


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        arrays = _array(x), _array(weight)
        y = _empty(*x.shape[:2], weight.shape[1])
        kernels.affine(*arrays, _array(bias), y)
        ctx.kept = arrays
        return torch.from_numpy(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor | None, ...]:
        arrays = _taken(ctx)
        gradients = _gradients(ctx, *arrays)
        kernels.affine_backward(_array(d_y), *arrays, *gradients)
        return _handed_on(ctx, *gradients)


class _GeluAffine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        arrays = _array(x), _array(weight)
        active, slope = (_empty(*x.shape[:2], weight.shape[1]) for _ in range(2))
        kernels.gelu_affine(*arrays, _array(bias), active, slope)
        ctx.kept = slope, *arrays
        return torch.from_numpy(active)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_active: Tensor) -> tuple[Tensor | None, ...]:
        slope, *arrays = _taken(ctx)
        gradients = _gradients(ctx, *arrays)
        kernels.gelu_affine_backward(_array(d_active), slope, *arrays, *gradients)
        return _handed_on(ctx, *gradients)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = _array(x).reshape(-1, x.shape[-1])
        normed, scale = np.empty_like(rows), _empty(len(rows))
        kernels.norm(rows, normed, scale)
        ctx.kept = normed, scale
        return torch.from_numpy(normed).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_normed: Tensor) -> Tensor:
        normed, scale = _taken(ctx)
        d_x = np.empty_like(normed)
        kernels.norm_backward(_array(d_normed).reshape(normed.shape), normed, scale, d_x)
        return torch.from_numpy(d_x).view(d_normed.shape)


class _ScaledNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        values, gains = _array(x), _array(gain)
        normed, scale, y = np.empty_like(values), _empty(*x.shape[:2]), np.empty_like(values)
        kernels.scaled_norm(values, gains, _array(shift), normed, scale, y)
        ctx.kept = gains, normed, scale
        return torch.from_numpy(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, ...]:
        gain, normed, scale = _taken(ctx)
        d_x, d_gain, d_shift = np.empty_like(normed), np.zeros_like(gain), np.zeros_like(gain)
        kernels.scaled_norm_backward(_array(d_y), gain, normed, scale, d_x, d_gain, d_shift)
        return tuple(torch.from_numpy(x) for x in (d_x, d_gain, d_shift))


def _gradients(ctx: Any, x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Where the gradients of an affine map go; that of x is empty where nobody asks for it."""
    d_x = np.empty_like(x) if ctx.needs_input_grad[0] else _empty(0, 0, 0)
    return d_x, np.zeros_like(weight), np.zeros(weight.shape[:2], np.float32)


def _handed_on(ctx: Any, d_x: Array, d_weight: Array, d_bias: Array) -> tuple[Tensor | None, ...]:
    of_x = torch.from_numpy(d_x) if ctx.needs_input_grad[0] else None
    return of_x, torch.from_numpy(d_weight), torch.from_numpy(d_bias)


def _array(x: Tensor) -> Array:
    """The values of x in one piece."""
    return cast(Array, x.detach().contiguous().numpy())


def _taken(ctx: Any) -> Any:
    """What the forward pass kept; it is given away once, as sums that are added to twice would be wrong."""
    kept, ctx.kept = ctx.kept, None
    if kept is None:
        raise RuntimeError("a second backward pass through the same step; compute the step again")
    return kept


def _empty(*shape: int) -> Array:
    return np.empty(shape, np.float32)
