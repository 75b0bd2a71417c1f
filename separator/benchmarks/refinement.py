"""The GRU and the MLP of a slot for R seeds at once, with a backward pass of their own.

    r, z = sigmoid(the first two thirds of W_i x + b_i + W_h s + b_h)
    n = tanh(the last third of W_i x + b_i + r (W_h s + b_h));  s' = n + z (s - n)
    out = s' + W_2 gelu(W_1 norm(s') + b_1) + b_2

The GRU of torch has no fused backward pass on a CPU, where autograd would take some thirty kernels for it.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

NORM_EPS = 1e-5
aten = torch.ops.aten


class Refinement(NamedTuple):
    """Parameters of the GRU and the MLP: weights [R, out, in] and biases [R, 1, out]."""

    input_weight: Tensor  # [R, 3 D, in]
    input_bias: Tensor
    hidden_weight: Tensor  # [R, 3 D, D]
    hidden_bias: Tensor
    first_weight: Tensor  # [R, D, D], scale and shift of the norm included
    first_bias: Tensor
    second_weight: Tensor  # [R, D, D]
    second_bias: Tensor


def refine(update: Tensor, slot: Tensor, refinement: Refinement) -> Tensor:
    """Return the slots [R, n, D] after the GRU, which reads updates [R, n, in], and the MLP."""
    return cast(Tensor, _Refine.apply(update, slot, *refinement))


class _Refine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, update: Tensor, slot: Tensor, *parameters: Tensor) -> Tensor:
        p = Refinement(*parameters)
        d_model = slot.shape[2]
        from_input = torch.baddbmm(p.input_bias, update, p.input_weight.mT)
        from_hidden = torch.baddbmm(p.hidden_bias, slot, p.hidden_weight.mT)
        gates = (from_input[..., : 2 * d_model] + from_hidden[..., : 2 * d_model]).sigmoid_()
        reset, keep = gates.split(d_model, 2)
        gated = from_hidden[..., 2 * d_model :]
        new = _tanh_(torch.addcmul(from_input[..., 2 * d_model :], reset, gated))
        state = torch.lerp(new, slot, keep)
        normed, mean, scale = torch.native_layer_norm(state, [d_model], None, None, NORM_EPS)
        inner = torch.baddbmm(p.first_bias, normed, p.first_weight.mT)
        active = F.gelu(inner)
        ctx.save_for_backward(
            update, slot, gates, gated, new, state, normed, mean, scale, inner, active, *parameters
        )
        return torch.baddbmm(state, active, p.second_weight.mT).add_(p.second_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:
        update, slot, gates, gated, new, state, normed, mean, scale, inner, active, *parameters = (
            ctx.saved_tensors
        )
        p = Refinement(*parameters)
        d_model = slot.shape[2]
        reset, keep = gates.split(d_model, 2)
        d_inner = aten.gelu_backward(torch.bmm(d_out, p.second_weight), inner)
        d_state, _, _ = aten.native_layer_norm_backward(
            torch.bmm(d_inner, p.first_weight),
            state,
            [d_model],
            mean,
            scale,
            None,
            None,
            [True, False, False],
        )
        d_state += d_out
        d_slot = d_state * keep
        d_input = slot.new_empty(*slot.shape[:2], 3 * d_model)
        d_reset, d_keep, d_new = d_input.split(d_model, 2)
        aten.tanh_backward.grad_input(d_state - d_slot, new, grad_input=d_new)
        torch.mul(d_new, gated, out=d_reset)
        torch.mul(d_state, slot - new, out=d_keep)
        d_gates = d_input[..., : 2 * d_model]
        aten.sigmoid_backward.grad_input(d_gates, gates, grad_input=d_gates)
        d_hidden = d_input.clone()
        d_hidden[..., 2 * d_model :].mul_(reset)
        return (
            torch.bmm(d_input, p.input_weight),
            d_slot.baddbmm_(d_hidden, p.hidden_weight),
            torch.bmm(d_input.mT, update),
            d_input.sum(1, keepdim=True),
            torch.bmm(d_hidden.mT, slot),
            d_hidden.sum(1, keepdim=True),
            torch.bmm(d_inner.mT, normed),
            d_inner.sum(1, keepdim=True),
            torch.bmm(d_out.mT, active),
            d_out.sum(1, keepdim=True),
        )


def _tanh_(x: Tensor) -> Tensor:
    """Return tanh(x) in place as 2 sigmoid(2 x) - 1: torch's own tanh takes four times as long on a CPU."""
    return x.mul_(2).sigmoid_().mul_(2).sub_(1)
