"""The model of overlapping binaries: tokens of the band, one mechanism, of each slot existence and posterior.

A token is a chunk of neighbouring bins of A and E, and how loud they are through the year. Convolutions over
tokens let each see as far as a binary is wide. A slot is the context of a normalising flow over the
parameters of one binary. Only the mechanism differs between methods.

Reference: Houba, NeurIPS 2026; the flow: Durkan et al., NeurIPS 2019, after a conditional affine map.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from separator.attention import SlotAttentionOutput, build_mechanism
from separator.attention.base import Mechanism
from separator.benchmarks.gw_data import CHANNELS
from separator.benchmarks.gw_waveforms import PARAMETERS
from separator.errors import SeparatorError
from separator.script import counted

INFERRED = ("frequency", "drift", "log_amplitude", "longitude", "sin_latitude")
"""What the posterior is over; orientation and phase are marginalised."""
INFERRED_COLUMNS = tuple(PARAMETERS.index(name) for name in INFERRED)
PARTS = 5  # of a bin and channel: real part, imaginary part, size, and two sizes over the year
KERNEL = 5
N_BLOCKS = 2
WAVES = 8  # of the positions, from the band to four tokens
HEAD_WIDTH = 64
SPLINE_BINS = 8
N_SPLINES = 1


class BinaryPrediction(NamedTuple):
    """What the model says of a batch of mixtures."""

    slots: Tensor  # [B, S, D]
    attn: Tensor  # [B, S, L]
    exist_logits: Tensor  # [B, S]
    evidence: list[Tensor] | None  # S + 1 tensors [B, L]


class BandTokenizer(nn.Module):
    """Tokens of a band: chunks of bins, convolved with their neighbours, and where they are.

    Args:
        n_bins: bins F of the band, a multiple of `n_tokens`.
        d_model: width of the tokens.
        n_tokens: chunks, L.
    """

    position: Tensor
    window: Tensor

    def __init__(self, n_bins: int, d_model: int, n_tokens: int) -> None:
        super().__init__()
        if n_tokens < 1 or n_bins % n_tokens:
            raise SeparatorError(f"{n_tokens=} does not divide the {n_bins} bins of the band; pass a divisor")
        if n_bins // n_tokens % 2:
            raise SeparatorError(
                f"{n_tokens=} makes chunks of {counted(n_bins // n_tokens, 'bin')}; pass an even size"
            )
        self.n_tokens = n_tokens
        self.register_buffer("window", torch.hann_window(2 * n_bins // n_tokens))
        n_features = CHANNELS * PARTS * (n_bins // n_tokens)
        self.proj = nn.Sequential(nn.Linear(n_features, d_model), nn.GELU(), nn.Linear(d_model, d_model))
        self.blocks = nn.Sequential(*(ConvolutionBlock(d_model) for _ in range(N_BLOCKS)))
        place = (torch.arange(n_tokens) + 0.5) / n_tokens - 0.5
        waves = math.pi * place.unsqueeze(1) * torch.arange(1, WAVES + 1)
        self.register_buffer("position", torch.cat([2 * place.unsqueeze(1), waves.sin(), waves.cos()], 1))
        self.place = nn.Linear(1 + 2 * WAVES, d_model)

    def features(self, data: Tensor) -> Tensor:
        """Return what the projection reads of complex data [B, 2, F], a fixed map: [B, L, N].

        Of a chunk's bins real part, imaginary part and size; and the sizes over the year of what passes a
        Hann window twice as wide: the orbit moves a binary from chunk to chunk. Sizes are compressed to
        their asinh, so that the loudest binaries do not drown the quietest.
        """
        size = data.abs()
        compressed = size.asinh()
        values = torch.view_as_real(data * (compressed / size.clamp(min=1e-6)))
        values = torch.cat([values, compressed.unsqueeze(-1)], -1)  # [B, 2, F, 3]
        chunks = values.unflatten(2, (self.n_tokens, -1)).transpose(1, 2).flatten(2)  # [B, L, 6 F / L]
        n_half = data.shape[2] // self.n_tokens // 2
        windows = F.pad(data, (n_half, n_half)).unfold(2, 4 * n_half, 2 * n_half)  # [B, 2, L, 2 F / L]
        year = torch.fft.ifft(windows * self.window, norm="ortho").abs().asinh()
        return torch.cat([chunks, year.transpose(1, 2).flatten(2)], 2)

    def forward(self, data: Tensor) -> Tensor:
        """Return the tokens [B, L, D] of whitened data [B, 2, F]."""
        tokens: Tensor = self.blocks(self.proj(self.features(data))) + self.place(self.position)
        return tokens


class ConvolutionBlock(nn.Module):
    """A residual block: each token with its neighbours, then an MLP."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.neighbours = nn.Conv1d(d_model, d_model, KERNEL, padding=KERNEL // 2)
        self.norm = nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.GELU(), nn.Linear(2 * d_model, d_model))

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [B, L, D] to [B, L, D]."""
        near = self.neighbours(tokens.transpose(1, 2)).transpose(1, 2)
        refined: Tensor = tokens + self.mlp(self.norm(near))
        return refined


class BinaryModel(nn.Module):
    """Tokeniser, mechanism, existence head, and the flow whose context is a slot."""

    centre: Tensor
    scale: Tensor

    def __init__(self, tokenizer: BandTokenizer, slot_attn: Mechanism, d_model: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.slot_attn = slot_attn
        self.exist_head = nn.Sequential(nn.Linear(d_model, HEAD_WIDTH), nn.GELU(), nn.Linear(HEAD_WIDTH, 1))
        self.flow = build_flow(len(INFERRED), d_model)
        self.register_buffer("centre", torch.zeros(len(INFERRED)))
        self.register_buffer("scale", torch.ones(len(INFERRED)))

    @property
    def n_slots(self) -> int:
        """Slots of a decomposition."""
        return self.slot_attn.n_slots

    def standardise(self, params: Tensor) -> None:
        """Take centre and scale of the flow's variables from binaries [n, P]."""
        self.centre.copy_(params.mean(0))
        self.scale.copy_(params.std(0))

    def forward(self, data: Tensor, **options: Any) -> BinaryPrediction:
        """Decompose whitened data [B, 2, F]; the options are the mechanism's."""
        out: SlotAttentionOutput = self.slot_attn(self.tokenizer(data), **options)
        return BinaryPrediction(out.slots, out.attn, self.exist_head(out.slots).squeeze(-1), out.evidence)

    def log_prob(self, slots: Tensor, params: Tensor) -> Tensor:
        """Return the log density [...] of inferred parameters [..., P] given slots [..., D]."""
        shape = torch.broadcast_shapes(slots.shape[:-1], params.shape[:-1])
        standard = ((params - self.centre) / self.scale).expand(*shape, -1)
        density: Tensor = self.flow(slots.expand(*shape, -1)).log_prob(standard)
        return density - self.scale.log().sum()

    def sample(self, slots: Tensor, n: int) -> Tensor:
        """Draw n binaries [n, ..., P] of the posterior of slots [..., D]."""
        drawn: Tensor = self.flow(slots).sample((n,))
        return drawn * self.scale + self.centre


def build_flow(n_params: int, n_context: int) -> nn.Module:
    """Return an autoregressive flow: a conditional affine map, then splines within five of its deviations."""
    import zuko

    spline = partial(zuko.transforms.MonotonicRQSTransform, slope=1e-3)
    shapes = [(SPLINE_BINS,), (SPLINE_BINS,), (SPLINE_BINS - 1,)]
    order = torch.arange(n_params)
    wide = {"context": n_context, "hidden_features": (HEAD_WIDTH, HEAD_WIDTH), "activation": nn.GELU}
    transforms = [zuko.flows.MaskedAutoregressiveTransform(n_params, order=order, **wide)]
    for index in range(N_SPLINES):
        transforms.append(
            zuko.flows.MaskedAutoregressiveTransform(
                n_params,
                order=order if index % 2 else order.flip(0),
                univariate=spline,
                shapes=shapes,
                **wide,
            )
        )
    base = zuko.lazy.UnconditionalDistribution(
        zuko.distributions.DiagNormal, torch.zeros(n_params), torch.ones(n_params), buffer=True
    )
    flow: nn.Module = zuko.lazy.Flow(transforms, base)
    return flow


def build_binary_model(
    mechanism: str,
    *,
    n_bins: int = 256,
    d_model: int = 64,
    n_tokens: int = 32,
    n_slots: int = 6,
    **options: Any,
) -> BinaryModel:
    """Build the model with a mechanism of the registry for a band of `n_bins`.

    Raises:
        SeparatorError: unknown mechanism or option, or tokens that do not divide the band.
    """
    tokenizer = BandTokenizer(n_bins, d_model, n_tokens)
    slot_attn = build_mechanism(mechanism, n_slots=n_slots, d_model=d_model, **options)
    return BinaryModel(tokenizer, slot_attn, d_model)
