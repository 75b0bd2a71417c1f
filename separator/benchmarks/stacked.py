"""Several seeds of one model trained as one: every parameter gets a first dimension, the seeds'.

The mechanisms of `separator.attention` keep their own loops over slots and iterations. They see the batches
of all seeds as one batch, seed after seed. What multiplies by a parameter is replaced, a product over rows by
one over [seed, row], and where a mechanism looks at tokens as most do, all iterations of a slot are. Noise
and orders come from a generator a seed, so that a seed's run is the same in any company.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from separator.attention import SlotAttention
from separator.attention.base import Maps, SequentialLoop
from separator.attention.order import SlotOrder
from separator.attention.parallel import VanillaSlotAttention
from separator.attention.reading import TokenState
from separator.benchmarks.model import BenchmarkModel, Prediction
from separator.benchmarks.refinement import (
    Competition,
    Look,
    Refinement,
    Shared,
    affine,
    gelu_affine,
    iterate,
    normalise,
    refine,
    scaled_norm,
)


class StackedMap(NamedTuple):
    """The maps x -> weight x + bias of R seeds, for rows that come seed after seed."""

    weight: Tensor  # [R, out, in]
    bias: Tensor  # [R, out]

    def __call__(self, x: Tensor) -> Tensor:
        """Map rows [R * n, ..., in] to [R * n, ..., out]."""
        n_seeds, n_out, n_in = self.weight.shape
        return affine(x.reshape(n_seeds, -1, n_in), *self).view(*x.shape[:-1], n_out)

    def gelu(self, x: Tensor) -> Tensor:
        """Return the GELU of the mapped rows."""
        n_seeds, n_out, n_in = self.weight.shape
        return gelu_affine(x.reshape(n_seeds, -1, n_in), *self).view(*x.shape[:-1], n_out)

    def after(self, norm: nn.LayerNorm) -> "StackedMap":
        """Return this map of a LayerNorm's output as a map of what the LayerNorm scales and shifts."""
        return StackedMap(self.weight * norm.weight.unsqueeze(1), self.shifted(norm.bias))

    def shifted(self, x: Tensor) -> Tensor:
        """Return weight x + bias for one x [R, in] a seed."""
        return torch.baddbmm(self.bias.unsqueeze(1), x.unsqueeze(1), self.weight.mT).squeeze(1)


class BareNorm(nn.LayerNorm):
    """A LayerNorm that leaves scale and shift, of many seeds, to the map that comes after it."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension."""
        return normalise(x)


class StackedMechanism(SlotAttention):
    """What a mechanism does with parameters of R seeds; goes before its class in `stacked_mechanism`."""

    generators: Sequence[torch.Generator]  # one a seed
    tau: float

    def start(self, tokens: Tensor, n_slots: int | None) -> tuple[Tensor, Tensor]:
        """Normalise the tokens [R * B, L, D] and draw the first slots [R * B, S, D] of each seed."""
        n_seeds = len(self.generators)
        h = scaled_norm(tokens.view(n_seeds, -1, self.d_model), self.norm_in.weight, self.norm_in.bias)
        shape = (len(tokens) // n_seeds, self.n_slots if n_slots is None else n_slots, self.d_model)
        noise = self._noise(shape).unflatten(0, (n_seeds, -1))
        starts = self.slot_mu + self.slot_sigma * (self.start_noise * noise)  # [R, B, S, D]
        return h.view_as(tokens), starts.flatten(0, 1)

    def noise_like(self, x: Tensor) -> Tensor:
        """Return standard normal noise like x [R * B, ...]."""
        return self._noise((len(x) // len(self.generators), *x.shape[1:]))

    def _noise(self, shape: tuple[int, ...]) -> Tensor:
        """Return noise [R * B, ...], each seed's [B, ...] from its own generator."""
        noise = torch.empty(len(self.generators), *shape)
        for seed, generator in zip(noise, self.generators, strict=True):
            torch.randn(shape, generator=generator, out=seed)
        return noise.flatten(0, 1)

    def fixed_order(self, starts: Tensor, slot_order: Sequence[int] | Tensor | None) -> SlotOrder:
        """Return a random order for each seed."""
        orders = [torch.randperm(starts.shape[1], generator=generator) for generator in self.generators]
        return OrderOfEachSeed(starts, torch.stack(orders))

    def query_map(self, temperature: float) -> StackedMap:  # type: ignore[override]
        """Return the map of a bare normalised slot to W_k^T q."""
        key = self.proj_k.weight.mT / temperature
        plain = StackedMap(key @ self.proj_q.weight, (self.proj_q.bias.unsqueeze(1) @ key.mT).squeeze(1))
        return plain.after(self.norm_s)

    def _query_map(self) -> StackedMap:
        return self.query_map(self.tau * math.sqrt(self.d_model))

    def offset_map(self, temperature: float) -> StackedMap:  # type: ignore[override]
        """Return the map of a bare normalised slot to <q, b_k>."""
        key = self.proj_k.bias.unsqueeze(1) / temperature  # [R, 1, D]
        bias = (key @ self.proj_q.bias.unsqueeze(2)).squeeze(2)
        plain = StackedMap(key @ self.proj_q.weight, bias)
        return plain.after(self.norm_s)

    def gates_map(self) -> Shared:  # type: ignore[override]
        """Return what `refine` takes, for pooled tokens."""
        gates = StackedMap(self.gru.weight_ih, self.gru.bias_ih)
        return self._refinement(
            StackedMap(gates.weight @ self.proj_v.weight, gates.shifted(self.proj_v.bias))
        )

    def weighed_gates_map(self) -> Shared:  # type: ignore[override]
        """Return what `refine` takes, for pooled tokens and the sum of their weights."""
        value_map = torch.cat([self.proj_v.weight, self.proj_v.bias.unsqueeze(2)], 2)  # [R, D, D + 1]
        return self._refinement(StackedMap(self.gru.weight_ih @ value_map, self.gru.bias_ih))

    def _refinement(self, gates: StackedMap) -> Shared:
        first, second = linear_maps(self.mlp)
        hidden = StackedMap(self.gru.weight_hh, self.gru.bias_hh)
        return Shared(*Refinement(*gates, *hidden, *first.after(self.norm_mlp), *second))

    def refine(self, update: Tensor, slot: Tensor, gates: Shared) -> Tensor:  # type: ignore[override]
        """Return the slots [R * n, D] after the GRU and the MLP."""
        n_seeds = len(self.generators)
        rows = update.reshape(n_seeds, -1, update.shape[-1]), slot.reshape(n_seeds, -1, self.d_model)
        return refine(*rows, gates).view_as(slot)


class StackedReader(StackedMechanism):
    """A `StackedMechanism` with loops for all iterations of slots."""

    def read(self, h: Tensor, n_readers: int, n_passes: int) -> Shared:  # type: ignore[override]
        """Return the tokens by seed."""
        return Shared(h.unflatten(0, (len(self.generators), -1)))

    def _iterate(self, slots: Tensor, reader: Look | Competition, maps: Maps) -> tuple[Tensor, Tensor]:
        """Return slots [R * B, N, D] after all iterations and their attention [R * B, N, L]."""
        rows = slots.reshape(len(self.generators), -1, self.d_model)
        found, attn = iterate(rows, reader, maps.gates, self.n_iter)  # type: ignore[arg-type]
        return found.view(slots.shape), attn.view(*slots.shape[:2], -1)


class StackedLoop(StackedReader):
    """What goes before a `SequentialLoop`, whose slots take a softmax over tokens."""

    REPLACED = "iterate", "look", "maps", "normalise", "pool"

    def maps(self) -> Maps:
        """Return the maps as `Look` and `refine` take them."""
        return Maps(Shared(*self._query_map()), None, self.gates_map())  # type: ignore[arg-type]

    def iterate(
        self, tokens: Shared, slots: Tensor, state: TokenState, maps: Maps, forced: None
    ) -> tuple[Tensor, Tensor]:
        """Return slots [R * B, N, D] after all iterations and their attention [R * B, N, L]."""
        shape = tokens.arrays[0].shape[:3]
        scale, bias = (None if x is None else x.view(shape) for x in state)
        return self._iterate(slots, Look(tokens, maps.query, scale, bias), maps)  # type: ignore[arg-type]


class StackedCompetition(StackedReader, VanillaSlotAttention):
    """What goes before a mechanism whose slots take a softmax over slots."""

    REPLACED = "iterate", "maps", "attend", "normalise", "pool"

    def maps(self) -> Maps:
        """Return the maps as `Competition` and `refine` take them."""
        maps = super().maps()
        pairs = zip(cast(StackedMap, maps.query), cast(StackedMap, maps.offset), strict=True)
        (weight, offset_weight), (bias, offset_bias) = pairs
        query = Shared(torch.cat([weight, offset_weight], 1), torch.cat([bias, offset_bias], 1))
        return maps._replace(query=query)  # type: ignore[arg-type]

    def iterate(self, tokens: Shared, slots: Tensor, maps: Maps, forced: None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return slots [R * B, S, D] after all iterations and their attention [R * B, S, L]."""
        return self._iterate(slots, Competition(tokens, maps.query), maps)  # type: ignore[arg-type]


class OrderOfEachSeed:
    """A random order for each seed, in place of `FixedOrder`."""

    def __init__(self, starts: Tensor, orders: Tensor) -> None:
        """Take the starts [R * B, S, D] and each seed's slot indices by step [R, S]."""
        self._seeds = torch.arange(len(orders))
        self._step_of_slot = orders.argsort(1)
        by_slot = starts.unflatten(0, (len(orders), -1)).transpose(1, 2)  # [R, S, B, D]
        by_step = by_slot[self._seeds, orders.t()]  # [S, R, B, D]
        self._pending: Iterator[Tensor] = iter(by_step.flatten(1, 2).unbind(0))

    def take(self, state: TokenState) -> Tensor:
        """Return the start [R * B, D] of each seed's next slot."""
        return next(self._pending)

    def by_slot(self, steps: list[Tensor]) -> Tensor:
        """Stack one tensor [R * B, ...] a step by each seed's slot index."""
        by_step: Tensor = torch.stack(steps).unflatten(1, (len(self._seeds), -1))  # [S, R, B, ...]
        by_slot = by_step[self._step_of_slot, self._seeds.unsqueeze(1)].transpose(1, 2)  # [R, B, S, ...]
        return by_slot.flatten(0, 1)


def is_stackable(model: BenchmarkModel) -> bool:
    """Tell whether `StackedModel` can take the model's place; its loops are for float32 on the CPU."""
    known = isinstance(model.slot_attn, SlotAttention)
    return known and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())


def linear_maps(layers: nn.Sequential) -> list[StackedMap]:
    """Return the maps of the Linears among `layers`, whose parameters have the seeds' dimension."""
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    return [StackedMap(linear.weight, linear.bias) for linear in linears]


def stacked_mechanism(mechanism: SlotAttention, generators: Sequence[torch.Generator]) -> StackedMechanism:
    """Return a mechanism with the options of `mechanism`, for parameters of one seed a generator."""
    kind = type(mechanism)
    mixed: type[StackedMechanism] = type(f"Stacked{kind.__name__}", (_base_for(kind), kind), {})
    stacked = mixed.__new__(mixed)
    stacked.__dict__.update(copy.deepcopy(mechanism.__dict__))
    stacked.norm_s = BareNorm(mechanism.d_model)
    stacked.__dict__["generators"] = generators
    return stacked


def _base_for(kind: type[SlotAttention]) -> type[StackedMechanism]:
    """Return the class with a loop for all of a look, where a mechanism looks as that loop does."""
    if _is_still(kind, SequentialLoop, StackedLoop.REPLACED):
        return StackedLoop
    if _is_still(kind, VanillaSlotAttention, StackedCompetition.REPLACED):
        return StackedCompetition
    return StackedMechanism


def _is_still(kind: type, base: type, methods: Sequence[str]) -> bool:
    """Tell whether `kind` is a `base` with these methods as they were."""
    return issubclass(kind, base) and all(getattr(kind, name) is getattr(base, name) for name in methods)


class StackedModel(nn.Module):
    """`BenchmarkModel` for parameters with the seeds' dimension."""

    def __init__(self, model: BenchmarkModel, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.tokenizer = copy.deepcopy(model.tokenizer)
        self.slot_attn = stacked_mechanism(cast(SlotAttention, model.slot_attn), generators)
        self.exist_head = copy.deepcopy(model.exist_head)
        self.param_head = copy.deepcopy(model.param_head)

    def forward(self, features: Tensor) -> Prediction:
        """Decompose features [R, B, L, F]; every output begins with [R, B]."""
        n_seeds = len(features)
        (projection,) = linear_maps(self.tokenizer.proj)
        out = self.slot_attn(projection.gelu(features.flatten(0, 1)))
        exist_logits, params = (self._head(head, out.slots) for head in (self.exist_head, self.param_head))
        seeds = [x.unflatten(0, (n_seeds, -1)) for x in (out.slots, out.attn, exist_logits, params)]
        return Prediction(seeds[0], seeds[1], seeds[2].squeeze(-1), seeds[3], None)

    def _head(self, head: nn.Sequential, slots: Tensor) -> Tensor:
        first, second = linear_maps(head)
        return second(first.gelu(slots))


class StackedRun:
    """Models of R seeds as one tensor of parameters [R, P], the leaf that is trained."""

    def __init__(self, models: Sequence[BenchmarkModel], generators: Sequence[torch.Generator]) -> None:
        flat = [torch.cat([p.detach().flatten() for p in model.parameters()]) for model in models]
        self._models = models
        self._stacked = StackedModel(models[0], generators)
        self._shapes = {name: p.shape for name, p in models[0].named_parameters()}
        self.leaves = [nn.Parameter(torch.stack(flat))]

    def predict(self, features: Tensor) -> Prediction:
        """Decompose features [R, B, L, F]; every output begins with [R, B]."""
        by_name = self._by_name(self.leaves[0])
        return cast(Prediction, functional_call(self._stacked, by_name, (features,)))

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradient of each seed to a norm of at most `max_norm`."""
        gradient = self.leaves[0].grad
        if gradient is None:
            return
        norm = gradient.norm(dim=1, keepdim=True)
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1))

    def models(self) -> list[BenchmarkModel]:
        """Return the models, each with its parameters as they are now."""
        for model, values in zip(self._models, self.leaves[0].detach(), strict=True):
            model.load_state_dict({n: v[0] for n, v in self._by_name(values.unsqueeze(0)).items()})
        return list(self._models)

    def _by_name(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split([shape.numel() for shape in self._shapes.values()], dim=1)
        items = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(-1, *shape) for (name, shape), part in items}
