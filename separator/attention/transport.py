"""Parallel slot attention by optimal transport: every slot gets about as much of the tokens, L / S.

Sinkhorn's rounds normalise a plan over tokens and over slots in turn and end on slots, as softmax does in
`parallel`. `sa_sh` breaks the symmetry of the slots by noise; `mesh` (Zhang et al., ICML 2023, Section 4)
lowers the entropy of the plan, so that a token goes to one slot.
"""

import torch
from torch import Tensor

from separator.attention.base import check_positive
from separator.attention.parallel import VanillaSlotAttention

SLOTS, TOKENS = -2, -1
NORM_FLOOR = 1e-12


def sinkhorn_stages(logits: Tensor, n_rounds: int) -> list[Tensor]:
    """Return the logarithms of the plan of logits [..., S, L] after each of its 2 n_rounds steps."""
    stages = [logits]
    for _ in range(n_rounds):
        stages.append(torch.log_softmax(stages[-1], TOKENS))
        stages.append(torch.log_softmax(stages[-1], SLOTS))
    return stages[1:]


def sinkhorn(logits: Tensor, n_rounds: int) -> Tensor:
    """Return the plan [..., S, L] of the logits; every token sums to one over slots."""
    return sinkhorn_stages(logits, n_rounds)[-1].exp()


@torch.no_grad()
def entropy_gradient(cost: Tensor, n_rounds: int) -> Tensor:
    """Return the gradient of the entropy -sum p log p, p = sinkhorn(cost), for every sample of [..., S, L].

    Written out rather than left to autograd, so that it works where gradients are off. A step y =
    log_softmax(x) hands g back as g - exp(y) sum(g), and the entropy starts with -p (log p + 1).
    """
    stages = sinkhorn_stages(cost, n_rounds)
    grad = -stages[-1].exp() * (stages[-1] + 1)
    for index in reversed(range(len(stages))):
        over = SLOTS if index % 2 else TOKENS
        grad = torch.addcmul(grad, stages[index].exp(), grad.sum(over, keepdim=True), value=-1)
    return grad


@torch.no_grad()
def sharpen(cost: Tensor, n_rounds: int, n_steps: int, step_size: float) -> Tensor:
    """Return what to add to the cost [..., S, L] after steps down its entropy, each of norm `step_size`."""
    offset = torch.zeros_like(cost)
    for _ in range(n_steps):
        grad = entropy_gradient(cost + offset, n_rounds)
        norm = torch.linalg.vector_norm(grad, dim=(SLOTS, TOKENS), keepdim=True)
        offset = offset - step_size * grad / norm.clamp(min=NORM_FLOOR)
    return offset


class SinkhornSlotAttention(VanillaSlotAttention):
    """SA-SH: Sinkhorn slot attention whose noise breaks the symmetry of the slots.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations.
        sinkhorn_iters: rounds of normalisation.
        noise_std: standard deviation of the noise on the logits, in train() and in eval(); an attribute.
    """

    def __init__(
        self,
        n_slots: int = 5,
        d_model: int = 64,
        n_iter: int = 3,
        sinkhorn_iters: int = 5,
        noise_std: float = 0.05,
    ) -> None:
        super().__init__(n_slots, d_model, n_iter)
        check_positive(sinkhorn_iters=sinkhorn_iters)
        self.sinkhorn_iters = sinkhorn_iters
        self.noise_std = noise_std

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the transport plan of the noisy logits [..., S, L]."""
        return sinkhorn(logits + self.noise_std * self.noise_like(logits), self.sinkhorn_iters)


class MeshSlotAttention(VanillaSlotAttention):
    """MESH: Sinkhorn slot attention whose cost is first moved to a plan of lower entropy.

    The steps are constants to autograd: the gradient is that of the last plan.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations.
        sinkhorn_iters: rounds of normalisation of every plan.
        mesh_steps: steps down the entropy.
        mesh_lr: norm of each step.
        init_noise: standard deviation of the noise on the cost before the first step; an attribute.
    """

    def __init__(
        self,
        n_slots: int = 5,
        d_model: int = 64,
        n_iter: int = 3,
        sinkhorn_iters: int = 5,
        mesh_steps: int = 5,
        mesh_lr: float = 0.1,
        init_noise: float = 1e-6,
    ) -> None:
        super().__init__(n_slots, d_model, n_iter)
        check_positive(sinkhorn_iters=sinkhorn_iters, mesh_steps=mesh_steps)
        self.sinkhorn_iters = sinkhorn_iters
        self.mesh_steps = mesh_steps
        self.mesh_lr = mesh_lr
        self.init_noise = init_noise

    def normalise(self, logits: Tensor) -> Tensor:
        """Return the transport plan of the sharpened logits [..., S, L]."""
        cost = logits + self.init_noise * self.noise_like(logits)
        offset = sharpen(cost, self.sinkhorn_iters, self.mesh_steps, self.mesh_lr)
        return sinkhorn(cost + offset, self.sinkhorn_iters)
