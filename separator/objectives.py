"""What a network is trained on and judged by: the loss of a batch, and how well it separates a mixture.

The product's network says masks of spectrograms, its peers say waveforms; the trainer asks either alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from separator.errors import SeparatorError
from separator.losses import (
    LossConfig,
    LossTerms,
    Whole,
    energy,
    pairwise_error,
    pairwise_si_sdr,
    pairwise_waveform_error,
    separation_loss,
    snr_cost,
    waveform_loss,
)
from separator.metrics import pairwise_si_sdr as pairwise_waveform_si_sdr
from separator.network import NetworkConfig, SeparationNetwork
from separator.peers import ConvTasNet, ConvTasNetConfig, called_by_level
from separator.settings import settings_from
from separator.stft import STFT

CALLED_FLOOR_DB = -30.0  # an estimate of a peer, which has no say on existence, is a source from here on
SNR_LIMIT_DB = LossConfig.snr_limit_db

Forward = Callable[..., Any]
"""The network, or what wraps it so that its gradients are shared."""


class Quality(NamedTuple):
    """How well one mixture of K sources was separated by S slots."""

    si_sdr: Tensor
    """[S, K], dB."""
    before: Tensor
    """[K], of the mixture as it is, dB."""
    snr: Tensor
    """[S, K], thresholded as in training, dB."""
    n_called: int
    """How many slots the network calls sources."""


class Objective(Protocol):
    """A kind of network, its loss and its scores."""

    def build(self) -> nn.Module:
        """Return the network before training."""

    def loss(
        self,
        forward: Forward,
        batch: Mapping[str, Tensor],
        loss: LossConfig,
        whole: Whole,
        n_refine: int | None,
    ) -> LossTerms:
        """Return the loss of mixture [B, time], sources [B, K, time] and active [B, K]."""

    def quality(self, network: nn.Module, sources: Tensor) -> Quality:
        """Score the separation of the sum of sources [K, time]."""


class MaskObjective:
    """The product's network."""

    def __init__(self, config: NetworkConfig) -> None:
        self._config = config
        self._stft = STFT(config.n_fft, config.hop_length)

    def build(self) -> nn.Module:
        """Return a `SeparationNetwork`."""
        return SeparationNetwork(self._config).to(memory_format=torch.channels_last)

    def loss(
        self,
        forward: Forward,
        batch: Mapping[str, Tensor],
        loss: LossConfig,
        whole: Whole,
        n_refine: int | None,
    ) -> LossTerms:
        """Return the loss of masks, which the true sources guide."""
        mixture, sources = self._stft(batch["mixture"]), self._stft(batch["sources"])
        decomposition = forward(mixture, n_refine=n_refine, sources=sources)
        with torch.autocast(mixture.device.type, enabled=False):
            return separation_loss(decomposition, mixture, sources, batch["active"], loss, whole)

    def quality(self, network: nn.Module, sources: Tensor) -> Quality:
        """Score the masks on the spectrogram."""
        spectrogram, mixture = self._stft(sources)[None], self._stft(sources.sum(0))[None]
        out = network(mixture)
        whole = torch.ones_like(out.masks[:, :1])
        error = pairwise_error(out.masks, mixture, spectrogram)
        return Quality(
            pairwise_si_sdr(out.masks, mixture, spectrogram)[0],
            pairwise_si_sdr(whole, mixture, spectrogram)[0, 0],
            -snr_cost(error, energy(spectrogram), SNR_LIMIT_DB)[0],
            int((out.existence_logits > 0).sum()),
        )


class WaveformObjective:
    """A peer."""

    def __init__(self, config: ConvTasNetConfig) -> None:
        self._config = config

    def build(self) -> nn.Module:
        """Return a `ConvTasNet`."""
        return ConvTasNet(self._config)

    def loss(
        self,
        forward: Forward,
        batch: Mapping[str, Tensor],
        loss: LossConfig,
        whole: Whole,
        n_refine: int | None,
    ) -> LossTerms:
        """Return the loss of waveforms; there is nothing to refine."""
        estimates = forward(batch["mixture"])
        with torch.autocast(estimates.device.type, enabled=False):
            return waveform_loss(
                estimates.float(), batch["mixture"], batch["sources"], batch["active"], loss, whole
            )

    def quality(self, network: nn.Module, sources: Tensor) -> Quality:
        """Score the waveforms."""
        mixture = sources.sum(0)
        estimates = network(mixture[None])[0]
        scores = pairwise_waveform_si_sdr(torch.cat([estimates, mixture[None]]), sources, zero_mean=False)
        error = pairwise_waveform_error(estimates[None], sources[None])
        snr = -snr_cost(error, sources.square().sum(1)[None], SNR_LIMIT_DB)[0]
        called = called_by_level(estimates, mixture, CALLED_FLOOR_DB)
        return Quality(scores[:-1], scores[-1], snr, int(called.sum()))


def network_config(values: Mapping[str, Any]) -> NetworkConfig | ConvTasNetConfig:
    """Read the table ``network`` of a recipe: ``kind`` is "separator", the default, or "conv_tasnet".

    Raises:
        SeparatorError: a kind or a key is unknown.
    """
    if not isinstance(values, Mapping):
        raise SeparatorError(f"network is {values!r}, not a table of settings")
    settings = dict(values)
    kind = settings.pop("kind", "separator")
    if kind == "separator":
        return NetworkConfig.from_dict(settings)
    if kind == "conv_tasnet":
        return settings_from(ConvTasNetConfig, settings, "network")
    raise SeparatorError(f"unknown {kind=} of network; choose separator or conv_tasnet")


def objective_of(config: NetworkConfig | ConvTasNetConfig) -> Objective:
    """Return the objective of a network of these sizes."""
    return MaskObjective(config) if isinstance(config, NetworkConfig) else WaveformObjective(config)
