"""Attention over chunks read out as masks, without a parameter, and what such masks can reach at best.

The attention of a slot, interpolated from the chunks to the frames of a spectrogram, is its envelope a(t);
the mean power spectrum weighted by a(t) is its colour p(f).

    W = a(t) p(f) ("rank1") or a(t) ("time");  mask = W / the sum of W over the slots

Slots that are no source are left out; the most certain one never is.

Reference: Houba, NeurIPS 2026, appendix J.
"""

from collections.abc import Callable

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from separator.baselines import ideal_binary_estimates, ideal_ratio_estimates
from separator.benchmarks.fuss_task import SILENT_POWER
from separator.metrics import pairwise_si_sdr
from separator.stft import STFT

N_FFT, HOP_LENGTH = 1024, 256
MASK_FLOOR = 1e-12


def rank1_weights(envelopes: Tensor, power: Tensor) -> Tensor:
    """Return a(t) p(f), [S, F, T], of envelopes [S, T] and the power [F, T] of the mixture."""
    colours = envelopes @ power.mT  # [S, F]
    colours = colours / colours.sum(1, keepdim=True).clamp(min=MASK_FLOOR)
    return colours[:, :, None] * envelopes[:, None]


def time_weights(envelopes: Tensor, power: Tensor) -> Tensor:
    """Return a(t), [S, F, T]."""
    return envelopes[:, None].expand(-1, power.shape[0], -1)


READOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"rank1": rank1_weights, "time": time_weights}


def active_slots(exist_logits: Tensor) -> Tensor:
    """Tell which slots [S] are sources: positive logits, and the highest in any case."""
    active = exist_logits > 0
    active[exist_logits.argmax()] = True
    return active


def read_out(mixture: Tensor, attn: Tensor, readout: str) -> Tensor:
    """Return estimates [S, N] of slots with attention [S, L] over the chunks of a mixture [N]."""
    stft = STFT(N_FFT, HOP_LENGTH)
    spectrogram = stft(mixture)
    weights = READOUTS[readout](_envelopes(attn, spectrogram.shape[1]), _power(spectrogram))
    return _masked(stft, spectrogram, weights, mixture.shape[0])


def chunk_oracle(mixture: Tensor, sources: Tensor, n_chunks: int, readout: str) -> Tensor:
    """Return estimates [K, N] by the true envelopes of the chunks and, for "rank1", the true colours."""
    stft = STFT(N_FFT, HOP_LENGTH)
    spectrogram = stft(mixture)
    energy = sources.unflatten(1, (n_chunks, -1)).square().sum(2)  # [K, L]
    envelopes = _envelopes(energy, spectrogram.shape[1])
    if readout == "rank1":
        colours = _power(stft(sources)).sum(2)  # [K, F]
        colours = colours / colours.sum(1, keepdim=True).clamp(min=MASK_FLOOR)
        weights = colours[:, :, None] * envelopes[:, None]
    else:
        weights = time_weights(envelopes, _power(spectrogram))
    return _masked(stft, spectrogram, weights, mixture.shape[0])


def oracles(mixture: Tensor, sources: Tensor, n_chunks: int) -> dict[str, Tensor]:
    """Return the estimates [K, N] of every oracle by name."""
    return {
        "oracle_rank1": chunk_oracle(mixture, sources, n_chunks, "rank1"),
        "oracle_time": chunk_oracle(mixture, sources, n_chunks, "time"),
        "oracle_irm": ideal_ratio_estimates(mixture, sources),
        "oracle_ibm": ideal_binary_estimates(mixture, sources),
    }


def paper_si_sdr(estimates: Tensor, sources: Tensor, mixture: Tensor) -> tuple[float, float] | None:
    """Return SI-SDR and its improvement, dB, of estimates [A, N] as the paper counts; None for one source.

    Zero mean; silent sources are left out; the best pairs of min(K, A), their mean.
    """
    sources = sources[sources.square().mean(1) > SILENT_POWER]
    if len(sources) < 2:
        return None
    scores = pairwise_si_sdr(torch.cat([estimates, mixture[None]]), sources, zero_mean=True)
    slots, chosen = linear_sum_assignment(scores[:-1].numpy(), maximize=True)
    reached, before = scores[:-1][slots, chosen], scores[-1][chosen]
    return float(reached.mean()), float((reached - before).mean())


def _envelopes(values: Tensor, n_frames: int) -> Tensor:
    """Interpolate values [S, L] of chunks to frames [S, T]."""
    return torch.nn.functional.interpolate(
        values[:, None].float(), n_frames, mode="linear", align_corners=False
    ).squeeze(1)


def _power(spectrogram: Tensor) -> Tensor:
    return torch.view_as_real(spectrogram).square().sum(-1)


def _masked(stft: STFT, spectrogram: Tensor, weights: Tensor, length: int) -> Tensor:
    masks = weights / weights.sum(0, keepdim=True).clamp(min=MASK_FLOOR)
    return stft.inverse(masks * spectrogram, length)
