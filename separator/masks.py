"""Masks over a complex spectrogram (..., frequency, time): oracle rules and their application.

Masks are (..., slot, frequency, time) in [0, 1]; where they sum to one over slots, the masked spectrograms
sum to the spectrogram, and by linearity of the STFT the estimates sum to the mixture.
"""

import torch
from torch import Tensor


def apply_masks(masks: Tensor, spectrogram: Tensor) -> Tensor:
    """Mask ``spectrogram`` (..., frequency, time) by ``masks`` (..., slot, frequency, time), once a slot."""
    return masks * spectrogram.unsqueeze(-3)


def ideal_ratio_mask(sources: Tensor) -> Tensor:
    """Share of each source's magnitude in every bin, from spectrograms (..., source, frequency, time).

    Sums to one over sources; a bin in which all are zero is shared equally.
    """
    magnitudes = sources.abs()
    total = magnitudes.sum(-3, keepdim=True)
    equal = torch.full_like(magnitudes, 1 / max(1, magnitudes.shape[-3]))
    return torch.where(total > 0, magnitudes / total.where(total > 0, 1.0), equal)


def ideal_binary_mask(sources: Tensor) -> Tensor:
    """One for the loudest source of every bin, zero for the others; the first of equals takes it."""
    magnitudes = sources.abs()
    loudest = magnitudes.argmax(-3, keepdim=True)
    return torch.zeros_like(magnitudes).scatter(-3, loudest, 1.0)
