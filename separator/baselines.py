"""What a trained model is compared with: doing nothing, two classical methods, and oracle masks.

Each function takes the mixture (time), the oracles also the true sources (source, time), and returns
estimates (slot, time). Oracles show what masks of this resolution can reach at best: the mask or the grouping
is computed from the sources, the estimates from the mixture.

References: Fitzgerald, "Harmonic/percussive separation using median filtering", 2010 (HPSS); Lee and Seung,
"Learning the parts of objects by non-negative matrix factorization", 1999 (NMF).
"""

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from separator.masks import apply_masks, ideal_binary_mask, ideal_ratio_mask
from separator.stft import STFT

MASK_STFT = (512, 256)  # of the product, so that the oracle masks bound it
CLASSICAL_STFT = (1024, 256)


def mixture_estimate(mixture: Tensor) -> Tensor:
    """Do nothing: the mixture as the only estimate."""
    return mixture[None]


def hpss_estimates(mixture: Tensor) -> Tensor:
    """Two estimates by median filtering along time (harmonic) and along frequency (percussive)."""
    from librosa.decompose import hpss

    stft = STFT(*CLASSICAL_STFT)
    parts = hpss(stft(mixture).numpy())
    return stft.inverse(torch.from_numpy(np.stack(parts)), mixture.shape[-1])


def nmf_estimates(
    mixture: Tensor, sources: Tensor, *, n_components: int = 32, max_iter: int = 100, seed: int = 0
) -> Tensor:
    """One estimate a source by non-negative matrix factorisation with oracle grouping.

    The magnitude spectrogram is factorised (Kullback-Leibler divergence); every component takes its share of
    the mixture's spectrogram and goes to the source with which that share has the largest inner product, that
    is, to the one most of it comes from. The estimates sum to the mixture.
    """
    if not sources.any():
        return torch.zeros_like(sources)
    stft = STFT(*CLASSICAL_STFT)
    spectrogram, truth = stft(mixture), stft(sources)
    templates, gains = _factorise(spectrogram.abs(), n_components, max_iter, seed)
    total = templates @ gains
    shared = spectrogram / total.clamp_min(torch.finfo(total.dtype).tiny)
    # <W_r H_r X / sum, S_k> for all components r and sources k, without forming a spectrogram a component
    products = (shared * truth.conj()).real  # (source, frequency, time)
    affinity = torch.einsum("fr,rt,kft->rk", templates, gains, products)
    groups = torch.nn.functional.one_hot(affinity.argmax(1), sources.shape[0]).to(
        templates.dtype
    )  # (component, source)
    magnitudes = torch.einsum("fr,rt,rk->kft", templates, gains, groups)
    return stft.inverse(magnitudes * shared, mixture.shape[-1])


def ideal_ratio_estimates(mixture: Tensor, sources: Tensor) -> Tensor:
    """Oracle: the mixture under each source's ideal ratio mask."""
    return _oracle(mixture, sources, ideal_ratio_mask)


def ideal_binary_estimates(mixture: Tensor, sources: Tensor) -> Tensor:
    """Oracle: the mixture under each source's ideal binary mask."""
    return _oracle(mixture, sources, ideal_binary_mask)


def _oracle(mixture: Tensor, sources: Tensor, rule: Callable[[Tensor], Tensor]) -> Tensor:
    if not sources.any():
        return torch.zeros_like(sources)
    stft = STFT(*MASK_STFT)
    return stft.inverse(apply_masks(rule(stft(sources)), stft(mixture)), mixture.shape[-1])


def _factorise(magnitude: Tensor, n_components: int, max_iter: int, seed: int) -> tuple[Tensor, Tensor]:
    """Templates (frequency, component) and gains (component, time): their product is near ``magnitude``."""
    from librosa.decompose import decompose

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Maximum number of iterations")  # they are the budget
        templates, gains = decompose(
            magnitude.numpy(),
            n_components=n_components,
            beta_loss="kullback-leibler",
            solver="mu",
            init="random",
            max_iter=max_iter,
            random_state=seed,
        )
    return torch.as_tensor(np.asarray(templates)).float(), torch.as_tensor(np.asarray(gains)).float()
