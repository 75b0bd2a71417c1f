"""Peers trained on the same ground as the product's network: waveforms in, waveforms out.

Reference: Luo and Mesgarani, "Conv-TasNet", IEEE/ACM TASLP 2019, in torchaudio's implementation.
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

LEVEL_FLOOR = 1e-8  # of a mixture's RMS


@dataclass(frozen=True)
class ConvTasNetConfig:
    """Sizes of a `ConvTasNet`; the names are torchaudio's."""

    AT_LEAST: ClassVar[dict[str, float]] = dict.fromkeys(
        (
            *("sample_rate", "num_sources", "enc_kernel_size", "enc_num_feats", "msk_kernel_size"),
            *("msk_num_feats", "msk_num_hidden_feats", "msk_num_layers", "msk_num_stacks"),
        ),
        1,
    )

    sample_rate: int = 16_000
    num_sources: int = 4
    enc_kernel_size: int = 32
    enc_num_feats: int = 256
    msk_kernel_size: int = 3
    msk_num_feats: int = 128
    msk_num_hidden_feats: int = 256
    msk_num_layers: int = 8
    msk_num_stacks: int = 2

    @property
    def n_slots(self) -> int:
        """How many estimates there are."""
        return self.num_sources


class ConvTasNet(nn.Module):
    """torchaudio's Conv-TasNet at any level, with estimates that add up to the mixture."""

    def __init__(self, config: ConvTasNetConfig) -> None:
        super().__init__()
        from torchaudio.models import ConvTasNet as Model

        sizes = dataclasses.asdict(config)
        del sizes["sample_rate"]
        self.config = config
        self.model = Model(**sizes, msk_activate="relu")

    def forward(self, mixture: Tensor) -> Tensor:
        """Separate mixtures [B, time] into estimates [B, S, time]; what is missing is shared equally."""
        level = mixture.square().mean(1).sqrt().clamp(min=LEVEL_FLOOR)[:, None, None]
        estimates: Tensor = self.model(mixture[:, None] / level) * level
        missing = mixture[:, None] - estimates.sum(1, keepdim=True)
        return estimates + missing / estimates.shape[1]


def called_by_level(estimates: Tensor, mixture: Tensor, floor_db: float) -> Tensor:
    """Tell which estimates [S, time] are sources: those within ``floor_db`` of the mixture's energy."""
    energy = estimates.square().sum(-1)
    return energy > 10 ** (floor_db / 10) * mixture.square().sum(-1)


def n_parameters(module: nn.Module) -> int:
    """Count what training fits, whether or not it is frozen now."""
    return sum(p.numel() for p in module.parameters())
