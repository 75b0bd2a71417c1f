"""What the rows of R seeds go through, with gradients: affine maps, LayerNorm, looks and refinements.

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


def iterate(
    slots: Tensor, reader: "Look | Competition", refinement: Shared, n_iter: int
) -> tuple[Tensor, Tensor]:
    """Let slots [R, n, D] look at the tokens and be refined by what they pool, `n_iter` times.

    Returns the slots and their last attention [R, n, L]; the slots of a sample follow one another.
    `refinement` shares the tensors of a `Refinement`.
    """
    handles = reader.tokens.handle, reader.query_map.handle, refinement.handle
    looked = _Iterate.apply(slots, *reader.state, *handles, reader, refinement, n_iter)
    return cast(tuple[Tensor, Tensor], looked)


class Look:
    """Slots see tokens: a softmax over tokens of scale <query, token> + bias, which pools tokens times scale.

    Args:
        tokens: shares the tokens [R, B, L, D].
        query_map: shares weight and bias of the map of normalised slots.
        scale: factors [R, B, L] of the tokens; None are ones.
        bias: [R, B, L]; None are zeros.
    """

    def __init__(
        self, tokens: Shared, query_map: Shared, scale: Tensor | None = None, bias: Tensor | None = None
    ) -> None:
        shape = tokens.arrays[0].shape[:3]
        self.tokens = tokens
        self.query_map = query_map
        self.state = scale, bias
        self._scale = np.ones(shape, np.float32) if scale is None else _array(scale)
        self._bias = np.zeros(shape, np.float32) if bias is None else _array(bias)
        self._d_scale, self._d_bias = np.zeros(shape, np.float32), np.zeros(shape, np.float32)

    def look(self, slots: Array) -> tuple[Array, Array, tuple[Array, ...]]:
        """Return the attention [R, n, L] of slots [R, n, D], what it pools [R, n, D], and what to keep."""
        n_seeds, n_rows, d = slots.shape
        normed, query, pooled = (_empty(n_seeds, n_rows, d) for _ in range(3))
        score, attn = (_empty(n_seeds, n_rows, self._scale.shape[2]) for _ in range(2))
        kept = normed, _empty(n_seeds, n_rows), query, score, attn
        kernels.look(
            slots, *self.tokens.arrays, self._scale, self._bias, *self.query_map.arrays, *kept, pooled
        )
        return attn, pooled, kept

    def look_backward(self, d_attn: Array, d_pooled: Array, kept: tuple[Array, ...]) -> Array:
        """Return the gradient of the slots of a look; the others are added to."""
        d_slots = np.empty_like(d_pooled)
        read = *self.tokens.arrays, self._scale, self.query_map.arrays[0]
        sums = *self.tokens.sums, self._d_scale, self._d_bias, *self.query_map.sums
        kernels.look_backward(d_attn, d_pooled, *read, *kept, d_slots, *sums)
        return d_slots

    def d_state(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of `state`, summed over looks."""
        sums = zip(self.state, (self._d_scale, self._d_bias), strict=True)
        return tuple(None if given is None else torch.from_numpy(x) for given, x in sums)


class Competition:
    """Slots compete for tokens: a softmax over the slots of a sample of <query, token> + offset.

    It pools the mean of the tokens, and the sum of the weights of that mean: [R, n, D + 1].

    Args:
        tokens: shares the tokens [R, B, L, D].
        query_map: shares weight and bias of the map of normalised slots to D + 1 values, the last of which is
            the offset.
    """

    state = None, None

    def __init__(self, tokens: Shared, query_map: Shared) -> None:
        self.tokens = tokens
        self.query_map = query_map

    def look(self, slots: Array) -> tuple[Array, Array, tuple[Array, ...]]:
        """Return the attention [R, n, L] of slots [R, n, D], what it pools, and what to keep."""
        n_seeds, n_rows, d = slots.shape
        normed, attn = _empty(n_seeds, n_rows, d), _empty(n_seeds, n_rows, self.tokens.arrays[0].shape[2])
        query, pooled = (_empty(n_seeds, n_rows, d + 1) for _ in range(2))
        kept = normed, _empty(n_seeds, n_rows), query, attn, pooled
        kernels.compete(slots, *self.tokens.arrays, *self.query_map.arrays, FLOOR, *kept)
        return attn, pooled, kept

    def look_backward(self, d_attn: Array, d_pooled: Array, kept: tuple[Array, ...]) -> Array:
        """Return the gradient of the slots of a look; the others are added to."""
        d_slots = np.empty_like(kept[0])
        read = *self.tokens.arrays, self.query_map.arrays[0], FLOOR
        sums = *self.tokens.sums, *self.query_map.sums
        kernels.compete_backward(d_attn, d_pooled, *read, *kept, d_slots, *sums)
        return d_slots

    def d_state(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of `state`, of which there are none."""
        return None, None


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
        out, ctx.kept = _refine(_array(update), _array(slot), refinement)
        ctx.refinement = refinement
        return torch.from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        d_update, d_slot = _refine_backward(_array(d_out), _taken(ctx), ctx.refinement)
        return torch.from_numpy(d_update), torch.from_numpy(d_slot), torch.zeros(()), None


class _Iterate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        slots: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        tokens_handle: Tensor,
        map_handle: Tensor,
        refinement_handle: Tensor,
        reader: Look | Competition,
        refinement: Shared,
        n_iter: int,
    ) -> tuple[Tensor, Tensor]:
        rows, ctx.kept = _array(slots), []
        ctx.reader, ctx.refinement = reader, refinement
        for _ in range(n_iter):
            attn, pooled, looked = reader.look(rows)
            rows, refined = _refine(pooled, rows, refinement)
            ctx.kept.append((looked, refined))
        return torch.from_numpy(rows), torch.from_numpy(attn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_slots: Tensor, d_attn: Tensor) -> tuple[Tensor | None, ...]:
        given, seen = _array(d_slots), _array(d_attn)
        for looked, refined in reversed(_taken(ctx)):
            d_pooled, d_rows = _refine_backward(given, refined, ctx.refinement)
            given = ctx.reader.look_backward(seen, d_pooled, looked)
            given += d_rows
            seen = np.zeros_like(seen)  # only the last attention is handed out
        handles = (torch.zeros(()) for _ in range(3))
        return torch.from_numpy(given), *ctx.reader.d_state(), *handles, None, None, None


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


def _refine(update: Array, slot: Array, refinement: Shared) -> tuple[Array, tuple[Array, ...]]:
    """Return the refined slots, and what the gradients need."""
    n_seeds, n_rows, d = slot.shape
    gates, scale = _empty(n_seeds, n_rows, 2 * d), _empty(n_seeds, n_rows)
    gated, new, normed, active, slope, out = (_empty(n_seeds, n_rows, d) for _ in range(6))
    kept = gates, gated, new, normed, scale, active, slope
    kernels.refine(update, slot, *refinement.arrays, *kept, out)
    return out, (update, slot, *kept)


def _refine_backward(d_out: Array, kept: tuple[Array, ...], refinement: Shared) -> tuple[Array, Array]:
    """Return the gradients of update and slot; those of the parameters are added to."""
    update, slot, *rest = kept
    d_update, d_slot = np.empty_like(update), np.empty_like(slot)
    weights = refinement.arrays[::2]
    kernels.refine_backward(d_out, update, slot, *weights, *rest, d_update, d_slot, *refinement.sums)
    return d_update, d_slot


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
