"""The counter: how many sources a mixture has, told from the mixture alone.

    spectrogram -> bands (log power) -> convolutions -> recurrence along time -> how many, now and in all

Slots show what was found, and where separation is hard they show too much or too little; how many sounds
there are can be heard without taking them apart (Stoeter et al., "CountNet", 2019, of speakers). So the
counter is a network of its own, trained on counts, and `existence_of_slots` joins both; of the slots the
loudest are the sources.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from separator.errors import SeparatorError
from separator.layers import Bands, ConvBlock, has_content
from separator.settings import settings_from

N_STEPS = 4  # halvings of bands and time
COUNTER_WEIGHT = 3.0  # of the counter's word against the slots'; of 1 to 6 best on validation


@dataclass(frozen=True)
class CounterConfig:
    """Everything that decides the shape of a `SourceCounter`."""

    AT_LEAST: ClassVar[dict[str, float]] = {
        **dict.fromkeys(("sample_rate", "hop_length", "n_bands", "n_linear_bands", "widths"), 1),
        **dict.fromkeys(("joined", "hidden", "max_sources"), 1),
        "n_fft": 2,
    }

    sample_rate: int = 16_000
    n_fft: int = 512
    hop_length: int = 256
    n_bands: int = 128
    n_linear_bands: int = 64
    widths: tuple[int, ...] = (16, 32, 64, 96)
    """Channels after each halving."""
    joined: int = 160
    """Channels after the bands are joined."""
    hidden: int = 64
    """Of the recurrence, each way, and twice that of the last layer."""
    max_sources: int = 4
    """More are counted as so many."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "CounterConfig":
        """Build from plain values such as a TOML table.

        Raises:
            SeparatorError: a key is unknown, or a value cannot be.
        """
        config = settings_from(cls, values, "counter")
        if len(config.widths) != N_STEPS:
            raise SeparatorError(f"counter setting widths = {list(config.widths)}; pass {N_STEPS} of them")
        if config.n_bands % 2**N_STEPS or config.n_bands > config.n_fft // 2 + 1:
            raise SeparatorError(
                f"counter setting n_bands = {config.n_bands}; pass a multiple of {2**N_STEPS} up to the "
                f"{config.n_fft // 2 + 1} bins of n_fft = {config.n_fft}"
            )
        if config.n_linear_bands > config.n_bands:
            raise SeparatorError(f"counter setting n_linear_bands is above n_bands = {config.n_bands}")
        return config


class Counts(NamedTuple):
    """What a counter says about a batch of spectrograms."""

    logits: Tensor
    """[B, max_sources], of 1, 2, ... sources in all."""
    active: Tensor
    """[B, time of the recurrence, max_sources + 1], of 0, 1, ... sources that sound at a time."""


class SourceCounter(nn.Module):
    """Counts the sources of spectrograms."""

    def __init__(self, config: CounterConfig) -> None:
        super().__init__()
        self.config = config
        self.bands = Bands(config.n_fft // 2 + 1, config.n_bands, config.n_linear_bands)
        w0, w1, w2, w3 = config.widths
        self.body = nn.Sequential(
            *_halved(2, w0, 5),
            *(*_halved(w0, w1), ConvBlock(w1)),
            *(*_halved(w1, w2), ConvBlock(w2)),
            *(*_halved(w2, w3), ConvBlock(w3)),
            nn.Conv2d(w3, config.joined, (config.n_bands // 2**N_STEPS, 1), bias=False),
            nn.BatchNorm2d(config.joined),
            nn.ReLU(inplace=True),
        )
        self.recurrence = nn.GRU(config.joined, config.hidden, bidirectional=True, batch_first=True)
        width = 2 * config.hidden
        self.active = nn.Linear(width, config.max_sources + 1)
        self.count = nn.Sequential(
            nn.Linear(3 * width + 2 * (config.max_sources + 1), width),
            nn.ReLU(inplace=True),
            nn.Linear(width, config.max_sources),
        )

    def forward(self, spectrogram: Tensor) -> Counts:
        """Count in complex spectrograms [B, F, T]."""
        with torch.autocast(spectrogram.device.type, enabled=False):
            bands, _ = self.bands(self.bands.power(spectrogram))
        joined = self.body(bands.contiguous(memory_format=torch.channels_last))  # [B, joined, 1, time]
        x, _ = self.recurrence(joined.squeeze(2).transpose(1, 2))  # [B, time, 2 hidden]
        active = self.active(x)
        spread = (x.float().var(1, unbiased=False) + 1e-5).sqrt()
        now = torch.softmax(active.float(), -1)
        summary = torch.cat([x.mean(1), x.amax(1), spread, now.mean(1), now.amax(1)], -1)
        return Counts(self.count(summary).float(), active.float())


def count_distribution(probability: Tensor) -> Tensor:
    """Probability [N, S + 1] of every count when slots exist independently with ``probability`` [N, S].

    >>> count_distribution(torch.tensor([[0.5, 0.5]]))
    tensor([[0.2500, 0.5000, 0.2500]])
    """
    counts = torch.ones_like(probability[:, :1])
    for one in probability.split(1, 1):
        counts = nn.functional.pad(counts * (1 - one), (0, 1)) + nn.functional.pad(counts * one, (1, 0))
    return counts


def existence_of_slots(probability: Tensor, energy: Tensor, counted: Tensor) -> Tensor:
    """Probability [N, S] that slots are sources, by what they show and by a counter.

    The probability of a count is the product of that which independent slots with ``probability`` [N, S]
    give it and, to the power `COUNTER_WEIGHT`, that of the counter, whose logits ``counted`` are [N, C]. The
    r-th of the slots by falling ``energy`` [N, S] is a source where there are r sources or more: in
    validation as often right as their order by probability, and what is left out is lost least. The counter
    does not know of no source and counts more than C as C; among those counts the slots alone decide.

    >>> slots, energy = torch.tensor([[0.9, 0.5, 0.5]]), torch.tensor([[2.0, 0.1, 1.0]])
    >>> existence_of_slots(slots, energy, torch.tensor([[0.0, 9.0, 0.0]])).round(decimals=2)
    tensor([[1., 0., 1.]])
    """
    said, n_slots = torch.log_softmax(counted, -1), probability.shape[1]
    if n_slots < said.shape[1]:  # as many sources as there are slots, or more
        said = torch.cat([said[:, : n_slots - 1], said[:, n_slots - 1 :].logsumexp(1, keepdim=True)], 1)
    said = COUNTER_WEIGHT * said
    at = (torch.arange(n_slots + 1, device=counted.device) - 1).clamp(0, said.shape[1] - 1)
    shown = count_distribution(probability)
    posterior = torch.softmax(torch.log(shown) + said[:, at], -1)
    at_least = posterior.flip(1).cumsum(1).flip(1)[:, 1:]  # [N, S], of 1, 2, ... or more
    rank = energy.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return at_least.gather(1, rank)


def joined_existence(logits: Tensor, facts: Tensor, energy: Tensor, counted: Tensor) -> Tensor:
    """`existence_of_slots` of a head's logits [N, S]; slots without content by their ``facts`` are none."""
    return existence_of_slots(torch.sigmoid(logits) * has_content(facts), energy, counted)


def _halved(narrow: int, wide: int, kernel: int = 3) -> tuple[nn.Module, ...]:
    """A convolution that halves bands and time."""
    convolution = nn.Conv2d(narrow, wide, kernel, 2, kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(wide), nn.ReLU(inplace=True)
