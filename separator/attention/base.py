"""What the mechanisms share: the output, the parameters, and the loop that takes slots one after another."""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from separator.attention.order import FixedOrder, SlotOrder, processing_order
from separator.attention.reading import Tokens, TokenState
from separator.errors import SeparatorError

SLOT_INIT_STD = 0.1
WEIGHT_FLOOR = 1e-8
UNTOUCHED = TokenState()

Deplete = Callable[[TokenState, Tensor, Tensor], TokenState]


class SlotAttentionOutput(NamedTuple):
    """What a mechanism returns; only evidence depletion keeps `evidence`."""

    slots: Tensor  # [B, S, D], by slot index
    attn: Tensor  # [B, S, L], by slot index
    evidence: list[Tensor] | None  # S + 1 tensors [B, L], by processing step


class AffineMap(NamedTuple):
    """The map x -> weight x + bias."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Return weight x + bias for rows x [..., n]."""
        return F.linear(x, *self)


class Maps(NamedTuple):
    """What a call makes of the projections: keys and values are never formed."""

    query: AffineMap  # from a slot to W_k^T q, over the temperature
    offset: AffineMap | None  # from a slot to <q, b_k>, over the temperature; None where it cancels
    gates: AffineMap  # from pooled tokens (and the sum of their weights) to the input gates of the GRU


class Mechanism(nn.Module):
    """What maps tokens [B, L, D] to slots: sizes, checks and precision."""

    def __init__(self, n_slots: int, d_model: int) -> None:
        super().__init__()
        check_positive(n_slots=n_slots, d_model=d_model)
        self.n_slots = n_slots
        self.d_model = d_model

    @property
    def needs_claim(self) -> bool:
        """Whether a call must pass `claim`, the share of each token that a finished slot takes."""
        return False

    def full_precision(self, tokens: Tensor) -> AbstractContextManager[object]:
        """Switch autocast off: softmax and log-evidence need float32, and memory sets the pace anyway."""
        device = tokens.device.type
        return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise SeparatorError unless `tokens` are [batch, tokens >= 1, d_model]."""
        if tokens.dim() != 3 or tokens.shape[1] < 1 or tokens.shape[2] != self.d_model:
            raise SeparatorError(
                f"tokens of shape {tuple(tokens.shape)} do not fit; "
                f"pass [batch, tokens >= 1, d_model={self.d_model}]"
            )


class SlotAttention(Mechanism):
    """The parameters of every GRU-based mechanism, created in one order: one seed gives all the same start.

    Attributes:
        start_noise: scale of the noise that makes the slots of a call differ, drawn in train() and in eval().
            With 0 results need no seed, but only what earlier slots leave of the tokens tells slots apart.
    """

    def __init__(self, n_slots: int, d_model: int, n_iter: int) -> None:
        super().__init__(n_slots, d_model)
        check_positive(n_iter=n_iter)
        self.n_iter = n_iter
        self.start_noise = 1.0
        self.slot_mu = nn.Parameter(SLOT_INIT_STD * torch.randn(1, 1, d_model))
        self.slot_sigma = nn.Parameter(torch.full((1, 1, d_model), SLOT_INIT_STD))
        self.norm_in = nn.LayerNorm(d_model)
        self.norm_s = nn.LayerNorm(d_model)
        self.norm_mlp = nn.LayerNorm(d_model)
        self.proj_q = nn.Linear(d_model, d_model)
        self.proj_k = nn.Linear(d_model, d_model)
        self.proj_v = nn.Linear(d_model, d_model)
        self.gru = nn.GRUCell(d_model, d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, d_model), nn.GELU(), nn.Linear(d_model, d_model))

    def start(self, tokens: Tensor, n_slots: int | None) -> tuple[Tensor, Tensor]:
        """Check and normalise the tokens and draw the first slots: h [B, L, D], slots [B, S, D]."""
        self.check_tokens(tokens)
        n_slots = self.n_slots if n_slots is None else n_slots
        check_positive(n_slots=n_slots)
        h = self.norm_in(tokens.to(self.slot_mu.dtype))
        noise = torch.randn(len(tokens), n_slots, self.d_model, device=h.device, dtype=h.dtype)
        return h, self.slot_mu + self.slot_sigma * (self.start_noise * noise)

    def noise_like(self, x: Tensor) -> Tensor:
        """Draw normal noise of the shape of x [B, ...], for a mechanism that needs more than its starts."""
        return torch.randn_like(x)

    def read(self, h: Tensor, n_readers: int, n_passes: int) -> Tokens:
        """Return tokens h [B, L, D] for N = `n_readers` slots at a time to read."""
        return Tokens(h, n_readers, n_passes)

    def query_map(self, temperature: float) -> AffineMap:
        """Return x -> W_k^T (W_q x + b_q) / temperature: its products with h lack only <q, b_k>."""
        key = self.proj_k.weight.t() / temperature
        return AffineMap(key @ self.proj_q.weight, key @ self.proj_q.bias)

    def offset_map(self, temperature: float) -> AffineMap:
        """Return x -> <W_q x + b_q, b_k> / temperature, [1]; a softmax over tokens drops it."""
        bias = self.proj_k.bias.unsqueeze(0) / temperature  # [1, D]
        return AffineMap(bias @ self.proj_q.weight, bias @ self.proj_q.bias)

    def gates_map(self) -> AffineMap:
        """Return x -> W_ih (W_v x + b_v) + b_ih, for tokens pooled by weights of sum 1."""
        gates = self.gru.weight_ih
        return AffineMap(gates @ self.proj_v.weight, gates @ self.proj_v.bias + self.gru.bias_ih)

    def weighed_gates_map(self) -> AffineMap:
        """Return (x, w) -> W_ih (W_v x + w b_v) + b_ih, for tokens pooled by weights of sum w, [D + 1]."""
        value_map = torch.cat([self.proj_v.weight, self.proj_v.bias.unsqueeze(1)], 1)  # [D, D + 1]
        return AffineMap(self.gru.weight_ih @ value_map, self.gru.bias_ih)

    def weighed_maps(self, temperature: float) -> Maps:
        """Return the maps of a mechanism for which <q, b_k> and the sum of a slot's weights count."""
        return Maps(self.query_map(temperature), self.offset_map(temperature), self.weighed_gates_map())

    def refine(self, update: Tensor, slot: Tensor, gates: AffineMap) -> Tensor:
        """Return the slots [N, D] after the GRU, whose input gates are `gates` of `update`, and the MLP."""
        gru = self.gru
        slot = torch.gru_cell(update, slot, gates.weight, gru.weight_hh, gates.bias, gru.bias_hh)
        residual: Tensor = self.mlp(self.norm_mlp(slot))
        return slot + residual


class SequentialLoop(SlotAttention):
    """Slots one after another, each a softmax over tokens; a hook says what a finished slot does to them."""

    def __init__(self, n_slots: int, d_model: int, n_iter: int, tau: float) -> None:
        super().__init__(n_slots, d_model, n_iter)
        if not tau > 0:
            raise SeparatorError(f"{tau=} is not positive; the paper's is 0.3")
        self.tau = tau

    def fixed_order(self, starts: Tensor, slot_order: Sequence[int] | Tensor | None) -> FixedOrder:
        """Return one order for all samples: as given, else random in train() and 0..S-1 in eval()."""
        return FixedOrder(starts, processing_order(starts.shape[1], slot_order, shuffle=self.training))

    @torch.no_grad()
    def greedy_scores(self, h: Tensor, starts: Tensor) -> Tensor:
        """Return the scores [B, S, L] of the first iteration of all slots, for `GreedyOrder`."""
        return self._query_map()(self.norm_s(starts)) @ h.transpose(1, 2)

    def process(
        self,
        h: Tensor,
        order: SlotOrder,
        n_slots: int,
        *,
        state: TokenState = UNTOUCHED,
        deplete: Deplete | None = None,
        spent: Callable[[TokenState], bool] | None = None,
        forced_attn_first: Tensor | None = None,
        seed: Callable[[TokenState], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, list[TokenState]]:
        """Return slots [B, S, D], attn [B, S, L] and the S + 1 states of the tokens around the steps.

        `seed(state)` [B, D] is added to where a slot starts from.
        `deplete(state, attn, slot)` is the state a finished slot leaves; `spent(state)` ends the loop early.
        """
        forced = None if forced_attn_first is None else checked_attn(forced_attn_first, h)
        tokens = self.read(h, n_readers=1, n_passes=2 * n_slots * self.n_iter)
        maps = self.maps()
        slots: list[Tensor] = []
        attns: list[Tensor] = []
        states = [state]
        while len(slots) < n_slots and not (slots and spent is not None and spent(state)):
            slot = order.take(state)
            slot = slot if seed is None else slot + seed(state)
            slot, attn = self.iterate(tokens, slot.unsqueeze(1), state, maps, forced)
            slots.append(slot.squeeze(1))
            attns.append(attn.squeeze(1))
            forced = None
            state = state if deplete is None else deplete(state, attns[-1], slots[-1])
            states.append(state)
        return order.by_slot(slots), order.by_slot(attns), states

    def process_together(self, h: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return slots [B, S, D] and attn [B, S, L] of slots that leave the tokens as they are.

        Their order does not matter then, and each pass over the tokens serves all of them.
        """
        tokens = self.read(h, n_readers=starts.shape[1], n_passes=2 * self.n_iter)
        return self.iterate(tokens, starts, UNTOUCHED, self.maps(), None)

    def look(self, tokens: Tokens, slots: Tensor, state: TokenState, maps: Maps) -> tuple[Tensor, Tensor]:
        """Return the attention [B, N, L] of slots [B, N, D], and what it pools."""
        x = self.norm_s(slots)
        logits = state.logits(tokens.score(maps.query(x)))
        attn = self.normalise(logits if maps.offset is None else logits + maps.offset(x), state)
        return attn, self.pool(tokens, attn, state)

    def maps(self) -> Maps:
        """Return the maps of a mechanism whose weights sum to one over the tokens."""
        return Maps(self._query_map(), None, self.gates_map())

    def normalise(self, logits: Tensor, state: TokenState) -> Tensor:
        """Return the attention of logits [B, N, L]: a softmax over tokens."""
        return torch.softmax(logits, dim=2)

    def pool(self, tokens: Tokens, attn: Tensor, state: TokenState) -> Tensor:
        """Return what `maps().gates` takes, [B, N, D]: the tokens as they are left, summed by attention."""
        return tokens.pool(state.scaled(attn))

    def iterate(
        self, tokens: Tokens, slots: Tensor, state: TokenState, maps: Maps, forced: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return N slots [B, N, D] after all iterations and their attention [B, N, L], `forced` if given."""
        for _ in range(self.n_iter):
            if forced is None:
                attn, pooled = self.look(tokens, slots, state, maps)
            else:
                attn, pooled = forced, self.pool(tokens, forced, state)
            slots = self.refine(pooled.flatten(0, 1), slots.flatten(0, 1), maps.gates).view_as(slots)
        return slots, attn

    def _query_map(self) -> AffineMap:
        weight, bias = self.query_map(self.tau * math.sqrt(self.d_model))
        # <q, b_k> shifts all logits of a slot alike, and the softmax drops it: b_k has a gradient, zero.
        return AffineMap(weight, bias + 0 * self.proj_k.bias)


def check_positive(**sizes: int) -> None:
    """Raise SeparatorError unless all sizes are at least 1."""
    for name, value in sizes.items():
        if value < 1:
            raise SeparatorError(f"{name}={value} is not positive; pass at least 1")


def weighed_mean(pooled: Tensor, attn: Tensor) -> Tensor:
    """Return the mean [B, N, D] whose sums are `pooled`, and the sum of its weights: [B, N, D + 1].

    `attn` [B, N, L] is divided by its sum, or by a floor under that: the weights of a slot that lost all
    tokens have a sum below one.
    """
    total = attn.sum(2, keepdim=True)
    return torch.cat([pooled, total], 2) / total.clamp(min=WEIGHT_FLOOR)


def checked_attn(attn: Tensor, h: Tensor) -> Tensor:
    """Return the forced attention of one slot, [B, L], as [B, 1, L] in the dtype and on the device of h."""
    if attn.shape != h.shape[:2]:
        raise SeparatorError(
            f"forced_attn_first of shape {tuple(attn.shape)} does not fit; "
            f"pass [batch, tokens] {tuple(h.shape[:2])}"
        )
    return attn.to(h).unsqueeze(1)
