"""Evidence-depletion slot attention (Houba, NeurIPS 2026, Algorithm 1), with more rules for dense tokens.

Every token keeps evidence e in [epsilon, 1], the share of it that no slot has explained yet. Slots are
taken one after another; gamma log e sends a slot to what is left, and the finished slot takes its share:

    alpha = softmax over l of <q, W_k (e_l h_l) + b_k> / (tau sqrt(D)) + gamma log e_l
    e_l <- max(e_l (1 - f(alpha_l)), epsilon)
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from separator.attention.base import SequentialLoop, SlotAttentionOutput
from separator.attention.depletion import (
    DEPLETION_FORMS,
    check_depletion,
    check_epsilon,
    deplete,
    explained_share,
)
from separator.attention.order import GreedyOrder, SlotOrder
from separator.attention.reading import TokenState
from separator.errors import SeparatorError

CLAIM = "claim"
EVIDENCE_GREEDY = "evidence_greedy"
LOG_FLOOR = 1e-6

Claim = Callable[[Tensor], Tensor]
"""Maps a finished slot [B, D] to the share in [0, 1] of every token that it takes, [B, L]."""
Seed = Callable[[Tensor], Tensor]
"""Maps the evidence [B, L] that is left to what is added to the start [B, D] of the next slot."""


class EvidenceDepletionSlotAttention(SequentialLoop):
    """Slot attention whose slots explain the evidence of the tokens away, one slot after another.

    The first seven arguments are those of `evidence-depletion` 1.0.0, whose state dicts load.

    Args:
        n_slots: slots computed unless a call asks for another number.
        d_model: width of tokens and slots.
        n_iter: refinement iterations of each slot.
        gamma: weight of the log-evidence bias.
        tau: temperature of the attention.
        depletion: f of Eq. 6, "linear", "quadratic", "cubic" or "binary"; or "claim", with which the caller's
            `claim` says what share m a slot takes, and e becomes max(e (1 - m), epsilon).
        epsilon: the least evidence of a token.
        depletion_scale: "sum" is the paper's f(alpha); "peak", for many tokens, is f(alpha / max alpha).
    """

    def __init__(
        self,
        n_slots: int = 5,
        d_model: int = 64,
        n_iter: int = 3,
        gamma: float = 3.0,
        tau: float = 0.3,
        depletion: str = "quadratic",
        epsilon: float = 1e-4,
        *,
        depletion_scale: str = "sum",
    ) -> None:
        super().__init__(n_slots, d_model, n_iter, tau)
        if depletion not in (*DEPLETION_FORMS, CLAIM):
            choices = ", ".join((*DEPLETION_FORMS, CLAIM))
            raise SeparatorError(f"unknown depletion {depletion!r}; choose one of {choices}")
        if depletion == CLAIM and depletion_scale != "sum":
            raise SeparatorError(f"{depletion_scale=} has no meaning with {depletion=}; leave it out")
        if depletion != CLAIM:
            check_depletion(depletion, depletion_scale)
        check_epsilon(epsilon)
        self.gamma = gamma
        self.depletion = depletion
        self.epsilon = epsilon
        self.depletion_scale = depletion_scale

    @property
    def needs_claim(self) -> bool:
        """Whether a call must pass `claim`."""
        return self.depletion == CLAIM

    def forward(
        self,
        tokens: Tensor,
        *,
        n_slots: int | None = None,
        slot_order: Sequence[int] | Tensor | None = None,
        forced_attn_first: Tensor | None = None,
        order_policy: str | None = None,
        claim: Claim | None = None,
        seed: Seed | None = None,
        stop_below: float | None = None,
        token_weights: Tensor | None = None,
    ) -> SlotAttentionOutput:
        """Decompose `tokens` [B, L, D] into slots; the output's `evidence` is by processing step.

        Args:
            tokens: the tokens of the mixtures.
            n_slots: any number: all slots share one prior, whatever the module was built or trained with.
            slot_order: a permutation of the slots; by default random in train() and 0..S-1 in eval().
            forced_attn_first: replaces the attention [B, L] of the first processed slot in all iterations.
            order_policy: with "evidence_greedy" each sample takes next the slot that captures most evidence.
            claim: with depletion="claim", the share [B, L] of every token that a finished slot [B, D] takes.
            seed: what to add to the start [B, D] of a slot, given the evidence [B, L] that is left.
            stop_below: in eval(), slots are computed only until the mean evidence of every sample is below
                this; the output then has fewer slots, at least one.
            token_weights: weights [B, L] of the tokens in that mean.

        Raises:
            SeparatorError: arguments that do not fit the tokens, the module or each other.
        """
        self._check_call(slot_order, order_policy, claim, stop_below)
        claim = _in_callers_precision(claim, tokens.device.type)
        with self.full_precision(tokens):
            h, starts = self.start(tokens, n_slots)
            order: SlotOrder
            if order_policy == EVIDENCE_GREEDY:
                order = GreedyOrder(starts, self.greedy_scores(h, starts))
            else:
                order = self.fixed_order(starts, slot_order)
            slots, attn, states = self.process(
                h,
                order,
                starts.shape[1],
                state=self._state_of(h.new_ones(h.shape[:2])),
                deplete=partial(self._deplete, claim=claim),
                spent=self._stopping_rule(stop_below, token_weights, h),
                forced_attn_first=forced_attn_first,
                seed=None if seed is None else lambda state: seed(state.factors()),
            )
        return SlotAttentionOutput(slots, attn, [state.factors() for state in states])

    def _state_of(self, evidence: Tensor) -> TokenState:
        return TokenState(scale=evidence, bias=self.gamma * torch.log(evidence.clamp(min=LOG_FLOOR)))

    def _deplete(self, state: TokenState, attn: Tensor, slot: Tensor, claim: Claim | None) -> TokenState:
        evidence = state.factors()
        if claim is None:
            share = explained_share(attn, self.depletion, self.depletion_scale)
        else:
            share = claim(slot).to(evidence)
            if share.shape != evidence.shape:
                received, expected = tuple(share.shape), tuple(evidence.shape)
                raise SeparatorError(f"claim returned shape {received}; return [batch, tokens] {expected}")
        return self._state_of(deplete(evidence, share, self.epsilon))

    def _stopping_rule(
        self, stop_below: float | None, token_weights: Tensor | None, h: Tensor
    ) -> Callable[[TokenState], bool] | None:
        if stop_below is None or self.training:
            return None
        weights = h.new_ones(h.shape[:2]) if token_weights is None else token_weights.to(h)
        if weights.shape != h.shape[:2]:
            received, expected = tuple(weights.shape), tuple(h.shape[:2])
            raise SeparatorError(
                f"token_weights of shape {received} do not fit; pass [batch, tokens] {expected}"
            )
        weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(h.dtype).tiny)

        def spent(state: TokenState) -> bool:
            return bool(((weights * state.factors()).sum(1) < stop_below).all())

        return spent

    def _check_call(
        self,
        slot_order: Sequence[int] | Tensor | None,
        order_policy: str | None,
        claim: Claim | None,
        stop_below: float | None,
    ) -> None:
        if self.needs_claim and claim is None:
            raise SeparatorError(f"{claim=} with depletion='claim'; pass a function of the slot")
        if claim is not None and not self.needs_claim:
            raise SeparatorError(f"depletion={self.depletion!r} takes no claim; build with depletion='claim'")
        if order_policy is None:
            return
        if order_policy != EVIDENCE_GREEDY:
            raise SeparatorError(f"unknown {order_policy=}; pass {EVIDENCE_GREEDY!r} or None")
        for name, value in (("slot_order", slot_order), ("stop_below", stop_below)):
            if value is not None:
                raise SeparatorError(f"{name}={value} contradicts {order_policy=}; pass one of them")


def _in_callers_precision(claim: Claim | None, device: str) -> Claim | None:
    """Let `claim` keep the autocast that the attention switches off for itself."""
    if claim is None or not torch.is_autocast_enabled(device):
        return claim
    dtype = torch.get_autocast_dtype(device)

    def with_autocast(slot: Tensor) -> Tensor:
        with torch.autocast(device, dtype):
            return claim(slot)

    return with_autocast
