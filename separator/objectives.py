"""What a network is trained on and judged by: the loss of a batch, and the scores of a mixture.

The product's network says masks of spectrograms, its peers say waveforms, its counter says how many sources
there are; the trainer asks all alike.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from separator.counting import CounterConfig, SourceCounter
from separator.errors import SeparatorError
from separator.losses import (
    CountTerms,
    LossConfig,
    LossTerms,
    Whole,
    best_assignment,
    count_loss,
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


AnyNetworkConfig = NetworkConfig | ConvTasNetConfig | CounterConfig


class Objective(Protocol):
    """A kind of network, its loss and its scores."""

    best_by: tuple[str, ...]
    """The score, the first of these that there is, by which the best weights of a run are chosen."""

    def build(self) -> nn.Module:
        """Return the network before training."""

    def loss(
        self,
        forward: Forward,
        batch: Mapping[str, Tensor],
        loss: LossConfig,
        whole: Whole,
        n_refine: int | None,
    ) -> LossTerms | CountTerms:
        """Return the loss of mixture [B, time], sources [B, K, time] and active [B, K]."""

    def scores(self, network: nn.Module, sources: Tensor) -> dict[str, list[float]]:
        """Score what the network says about the sum of sources [K, time]; greater is better."""


class SeparationObjective(ABC):
    """What networks that separate are judged by."""

    best_by: tuple[str, ...] = ("snr", "si_sdri_1")

    @abstractmethod
    def quality(self, network: nn.Module, sources: Tensor) -> Quality:
        """Score the separation of the sum of sources [K, time]."""

    def scores(self, network: nn.Module, sources: Tensor) -> dict[str, list[float]]:
        """SI-SDR of a source, alone, or its improvement, known count, dB; if the count is right; the SNR.

        The SNR is that of training, thresholded, of the sources that are not alone: a single one is easy and
        loud.
        """
        found = self.quality(network, sources)
        count = len(sources)
        gains = _of_best_slots(found.si_sdr) - (found.before if count > 1 else 0)
        scores = {f"si_sdri_{count}": gains.tolist(), "count": [float(found.n_called == count)]}
        return scores | ({"snr": _of_best_slots(found.snr).tolist()} if count > 1 else {})


class MaskObjective(SeparationObjective):
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


class WaveformObjective(SeparationObjective):
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


class CountObjective:
    """The product's counter."""

    best_by: tuple[str, ...] = ("likelihood",)

    def __init__(self, config: CounterConfig) -> None:
        self._config = config
        self._stft = STFT(config.n_fft, config.hop_length)

    def build(self) -> nn.Module:
        """Return a `SourceCounter`."""
        return SourceCounter(self._config).to(memory_format=torch.channels_last)

    def loss(
        self,
        forward: Forward,
        batch: Mapping[str, Tensor],
        loss: LossConfig,
        whole: Whole,
        n_refine: int | None,
    ) -> CountTerms:
        """Return the loss of counts; there is nothing to match or to refine."""
        counts = forward(self._stft(batch["mixture"]))
        with torch.autocast(counts.logits.device.type, enabled=False):
            return count_loss(counts, batch["sources"], batch["active"], whole)

    def scores(self, network: nn.Module, sources: Tensor) -> dict[str, list[float]]:
        """Whether the likeliest count is right, and the log likelihood of the right one."""
        logits = network(self._stft(sources.sum(0))[None]).logits[0]
        true = min(len(sources), len(logits)) - 1
        likelihood = float(torch.log_softmax(logits, 0)[true])
        return {"count": [float(logits.argmax() == true)], "likelihood": [likelihood]}


def _of_best_slots(values: Tensor) -> Tensor:
    """Of ``values`` [S, K] those of the slots [K] that make their sum greatest."""
    slots = best_assignment(-values[None], torch.ones(1, values.shape[1], dtype=torch.bool))
    return values.gather(0, slots)[0]


def network_config(values: Mapping[str, Any]) -> AnyNetworkConfig:
    """Read the table ``network`` of a recipe, ``kind`` being "separator", "counter" or "conv_tasnet".

    Raises:
        SeparatorError: a kind or a key is unknown.
    """
    if not isinstance(values, Mapping):
        raise SeparatorError(f"network is {values!r}, not a table of settings")
    settings = dict(values)
    kind = settings.pop("kind", "separator")
    if kind == "separator":
        return NetworkConfig.from_dict(settings)
    if kind == "counter":
        return CounterConfig.from_dict(settings)
    if kind == "conv_tasnet":
        return settings_from(ConvTasNetConfig, settings, "network")
    raise SeparatorError(f"unknown {kind=} of network; choose separator, counter or conv_tasnet")


def objective_of(config: AnyNetworkConfig) -> Objective:
    """Return the objective of a network of these sizes."""
    if isinstance(config, CounterConfig):
        return CountObjective(config)
    return MaskObjective(config) if isinstance(config, NetworkConfig) else WaveformObjective(config)
