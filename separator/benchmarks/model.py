"""The model of every benchmark: tokeniser, one mechanism, and two heads a slot; only the mechanism varies.

Names and creation order of the parameters are those of `evidence-depletion` 1.0.0: its state dicts load, and
one seed gives the same start.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from separator.attention import SlotAttentionOutput, build_mechanism
from separator.attention.base import Mechanism
from separator.benchmarks.methods import mechanism_of
from separator.errors import SeparatorError
from separator.script import counted

TOKENIZER_TYPES = ("fft", "direct")
EXISTENCE_WIDTH = 32
PARAMETER_WIDTH = 64


class Prediction(NamedTuple):
    """What the model says of a batch of signals."""

    slots: Tensor  # [B, S, D]
    attn: Tensor  # [B, S, L]
    exist_logits: Tensor  # [B, S]
    params: Tensor  # [B, S, P]
    evidence: list[Tensor] | None  # S + 1 tensors [B, L]


class ChunkTokenizer(nn.Module):
    """One token for each of `n_tokens` equal chunks: the chunk, or its rFFT as [Re, Im], then Linear, GELU.

    Args:
        n_samples: length N of the signals, a multiple of `n_tokens`.
        d_model: width of the tokens.
        n_tokens: number of chunks.
        tokenizer_type: "fft" or "direct" (the chunk itself).
    """

    def __init__(self, n_samples: int, d_model: int, n_tokens: int, tokenizer_type: str) -> None:
        super().__init__()
        if tokenizer_type not in TOKENIZER_TYPES:
            choices = " or ".join(TOKENIZER_TYPES)
            raise SeparatorError(f"unknown {tokenizer_type=}; choose {choices}")
        if n_tokens < 1 or n_samples % n_tokens:
            raise SeparatorError(
                f"{n_tokens=} does not divide the {counted(n_samples, 'sample')} of a signal; pass a divisor"
            )
        self.n_samples = n_samples
        self.n_tokens = n_tokens
        self.tokenizer_type = tokenizer_type
        chunk = n_samples // n_tokens
        n_features = 2 * (chunk // 2 + 1) if tokenizer_type == "fft" else chunk
        self.proj = nn.Sequential(nn.Linear(n_features, d_model), nn.GELU())

    def features(self, signals: Tensor) -> Tensor:
        """Return what the projection reads of signals [..., N], a fixed map: [..., L, F]."""
        if signals.shape[-1] != self.n_samples:
            raise SeparatorError(
                f"signals of {counted(signals.shape[-1], 'sample')} do not fit; "
                f"the model reads {self.n_samples}"
            )
        chunks: Tensor = signals.unflatten(-1, (self.n_tokens, -1))
        if self.tokenizer_type == "direct":
            return chunks
        spectrum = torch.fft.rfft(chunks)
        return torch.cat([spectrum.real, spectrum.imag], -1)

    def forward(self, signals: Tensor) -> Tensor:
        """Return the tokens [B, L, D] of signals [B, N]."""
        tokens: Tensor = self.proj(self.features(signals))
        return tokens


class BenchmarkModel(nn.Module):
    """Tokeniser, mechanism, and the heads that say of each slot whether it is a source, and which one."""

    def __init__(self, tokenizer: ChunkTokenizer, slot_attn: Mechanism, d_model: int, n_params: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.slot_attn = slot_attn
        self.exist_head = nn.Sequential(
            nn.Linear(d_model, EXISTENCE_WIDTH), nn.GELU(), nn.Linear(EXISTENCE_WIDTH, 1)
        )
        self.param_head = nn.Sequential(
            nn.Linear(d_model, PARAMETER_WIDTH), nn.GELU(), nn.Linear(PARAMETER_WIDTH, n_params)
        )

    @property
    def n_slots(self) -> int:
        """Slots of a decomposition."""
        return self.slot_attn.n_slots

    def forward(self, signals: Tensor, **options: Any) -> Prediction:
        """Decompose signals [B, N]; the options are the mechanism's."""
        return self.decompose(self.tokenizer.features(signals), **options)

    def decompose(self, features: Tensor, **options: Any) -> Prediction:
        """Decompose what `ChunkTokenizer.features` returned, [B, L, F]: data that stays is read once."""
        out: SlotAttentionOutput = self.slot_attn(self.tokenizer.proj(features), **options)
        exist_logits = self.exist_head(out.slots).squeeze(-1)
        return Prediction(out.slots, out.attn, exist_logits, self.param_head(out.slots), out.evidence)


def build_model(
    method: str,
    n_params: int = 3,
    N: int = 256,
    d_model: int = 64,
    n_tokens: int = 16,
    n_slots: int = 5,
    tokenizer_type: str = "fft",
    **options: Any,
) -> BenchmarkModel:
    """Build the model of `method` (a name of `METHODS`) for signals of N samples and sources of n_params.

    Args:
        method: a name of `METHODS` that learns.
        n_params: parameters of a source.
        N: samples of a signal, a multiple of `n_tokens`.
        d_model: width of tokens and slots.
        n_tokens: chunks of a signal, L.
        n_slots: slots, S.
        tokenizer_type: "fft" or "direct".
        options: the mechanism's own, such as `gamma`, `tau` or `n_iter`.

    Raises:
        SeparatorError: unknown method, tokeniser or option, or tokens that do not divide the signal.

    >>> build_model("evidence_linear")(torch.zeros(2, 256)).params.shape
    torch.Size([2, 5, 3])
    """
    mechanism = mechanism_of(method)
    tokenizer = ChunkTokenizer(N, d_model, n_tokens, tokenizer_type)
    slot_attn = build_mechanism(mechanism, n_slots=n_slots, d_model=d_model, **options)
    return BenchmarkModel(tokenizer, slot_attn, d_model, n_params)
