"""What is measured of overlapping binaries: attention, count, calibration of the posteriors, recovery.

A recovered waveform has frequency, drift and sky of the posterior's medians. Orientation, phase and amplitude
enter linearly (two complex numbers a binary, as in the F-statistic of Jaranowski, Krolak and Schutz, 1998):
they are fitted to the data by least squares, for all binaries of a mixture that the model calls at once.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from separator.benchmarks import metrics
from separator.benchmarks.evaluation import DECIMALS
from separator.benchmarks.gw_data import GalacticMixtures
from separator.benchmarks.gw_model import INFERRED, BinaryModel, BinaryPrediction
from separator.benchmarks.gw_training import Pairs, inferred, match_binaries
from separator.benchmarks.gw_waveforms import PARAMETERS, Band, amplitude_basis

EVALUATION_OFFSET = 40_000
N_SAMPLES = 256  # of a posterior
N_CHUNK = 250  # mixtures or slots at a time
CREDIBLE = (50, 90)  # per cent
PP_LEVELS = tuple(round(0.05 * step, 2) for step in range(1, 20))
BAND_95 = 1.358  # Kolmogorov's, over the square root of the number
RECOVERED = 0.9
LEAST_SINGULAR = 1e-3  # of the fit, relative: two waveforms that are nearly one share an amplitude

Measured = dict[str, Any]


class Recovered(NamedTuple):
    """What is found in one mixture."""

    waveforms: NDArray[np.complex128]  # [n, 2, F]
    overlaps: NDArray[np.float64]  # of each true source with the waveform it is matched with, [K]; 0 of none
    residual: NDArray[np.complex128]  # [2, F]


@torch.no_grad()
def predict(model: BinaryModel, data: Tensor, *, seed: int) -> BinaryPrediction:
    """Decompose data [B, 2, F] in eval() with the noise of `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + EVALUATION_OFFSET)
        parts = [model.eval()(part) for part in data.split(N_CHUNK)]
    slots, attn, logits = (torch.cat([part[index] for part in parts]) for index in range(3))
    steps = None if parts[0].evidence is None else zip(*(part.evidence for part in parts), strict=True)
    return BinaryPrediction(slots, attn, logits, None if steps is None else [torch.cat(s) for s in steps])


@torch.no_grad()
def draw_posterior(model: BinaryModel, slots: Tensor, *, seed: int) -> Tensor:
    """Draw `N_SAMPLES` binaries [N, n, P] of the posterior of each of slots [n, D]."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + EVALUATION_OFFSET)
        drawn = [model.sample(part, N_SAMPLES) for part in slots.split(N_CHUNK)]
    return torch.cat([slots.new_zeros(N_SAMPLES, 0, len(INFERRED)), *drawn], 1)


def measure_binaries(model: BinaryModel, band: Band, test: GalacticMixtures, seed: int) -> Measured:
    """Return all scores of a model on test mixtures, ready for a record."""
    found = predict(model, test.data, seed=seed)
    truth = inferred(test.params)
    pairs = match_binaries(model, found, truth, test.counts)
    scores = attention_scores(found, test.counts) | count_scores(found, test.counts)
    slots = found.slots[pairs.mixture, pairs.slot]
    wanted = truth[pairs.mixture, pairs.source]
    with torch.no_grad():
        scores["nats_a_source"] = -float(model.log_prob(slots, wanted).mean())
    posterior = draw_posterior(model, slots, seed=seed)
    scores |= calibration_scores(posterior, wanted) | precision_scores(posterior, wanted, pairs)
    scores |= recovery_scores(model, band, found, test, seed)
    return {name: _rounded(value) for name, value in scores.items()}


def attention_scores(found: BinaryPrediction, counts: Tensor) -> Measured:
    """Return the overlaps of the K slots that exist most: matching leaves no meaning to a slot's index."""
    ranked = found.exist_logits.argsort(1, descending=True)
    attn = found.attn.take_along_dim(ranked.unsqueeze(2), 1)
    return {
        "peak_overlap": metrics.peak_overlap(attn, counts),
        "cosine_overlap": metrics.cosine_overlap(attn, counts),
        "peak_overlap_by_index": metrics.peak_overlap(found.attn, counts),
        "cosine_overlap_by_index": metrics.cosine_overlap(found.attn, counts),
    }


def count_scores(found: BinaryPrediction, counts: Tensor) -> Measured:
    """Return the share counted right, and how often each true count (row) was called 0, 1, ... (column)."""
    called = (found.exist_logits > 0).sum(1)
    n_slots = found.exist_logits.shape[1]
    confusion = [
        [int(((counts == true) & (called == said)).sum()) for said in range(n_slots + 1)]
        for true in range(1, int(counts.max()) + 1)
    ]
    accuracy = metrics.count_accuracy(found.exist_logits, counts)
    return {"count_accuracy": accuracy, "count_confusion": confusion}


def calibration_scores(posterior: Tensor, truth: Tensor) -> Measured:
    """Return coverages, the P-P curve at `PP_LEVELS` and its largest distance from uniform, by parameter.

    Posteriors [N, n, P], truth [n, P]. The band holds 95 % of the curves of n independent uniform numbers.
    """
    ranks = ranks_of(posterior, truth)  # [n, P]
    scores: Measured = {}
    for level in CREDIBLE:
        inside = ((ranks - 0.5).abs() < level / 200).double().mean(0)  # [P]
        scores[f"coverage_{level}"] = float(inside.mean())
        for name, share in zip(INFERRED, inside.tolist(), strict=True):
            scores[f"coverage_{level}_{name}"] = share
    scores["pp"] = {
        name: [round(float((column <= level).double().mean()), 4) for level in PP_LEVELS]
        for name, column in zip(INFERRED, ranks.unbind(1), strict=True)
    }
    scores |= {
        f"pp_deviation_{name}": distance_from_uniform(column)
        for name, column in zip(INFERRED, ranks.unbind(1), strict=True)
    }
    scores["pp_band"] = BAND_95 / math.sqrt(len(ranks))
    scores["n_pairs"] = len(ranks)
    return scores


def ranks_of(posterior: Tensor, truth: Tensor) -> Tensor:
    """Return the share [n, P] of each posterior [N, n, P] below the truth [n, P], uniform if it is right."""
    # Half of a draw: N draws leave N + 1 places, and the middle of each is its rank.
    return ((posterior < truth).sum(0) + 0.5) / (len(posterior) + 1)


def distance_from_uniform(ranks: Tensor) -> float:
    """Return the largest distance (Kolmogorov's) of the distribution of ranks [n] from the uniform one."""
    ordered = ranks.double().sort().values
    steps = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())


def precision_scores(posterior: Tensor, truth: Tensor, pairs: Pairs) -> Measured:
    """Return medians over the pairs: error and deviation of frequencies in bins, error of the sky."""
    middle = medians(posterior)  # [n, P]
    error = (middle[:, 0] - truth[:, 0]).abs()
    longitude, latitude = INFERRED.index("longitude"), INFERRED.index("sin_latitude")
    apart = (middle[:, longitude] - truth[:, longitude]).cos()
    sines = middle[:, latitude].clamp(-1, 1), truth[:, latitude].clamp(-1, 1)
    cosine = sines[0] * sines[1] + ((1 - sines[0] ** 2) * (1 - sines[1] ** 2)).sqrt() * apart
    return {
        "frequency_error_bins": float(error.median()),
        "frequency_error_bins_dominant": float(error[pairs.source == 0].median()),
        "frequency_deviation_bins": float(posterior[..., 0].std(0).median()),
        "sky_error_degrees": float(cosine.clamp(-1, 1).acos().rad2deg().median()),
    }


def medians(posterior: Tensor) -> Tensor:
    """Return the medians [n, P] of posteriors [N, n, P]; one of two modes of the sky.

    The two are mirrored at the ecliptic: the latitude is the median of the hemisphere that holds most. The
    longitude is taken around its mean direction.
    """
    middle = posterior.median(0).values
    longitude, latitude = INFERRED.index("longitude"), INFERRED.index("sin_latitude")
    angles = posterior[..., longitude]
    mean = torch.atan2(angles.sin().mean(0), angles.cos().mean(0))
    middle[:, longitude] = _wrapped(mean + _wrapped(angles - mean).median(0).values)
    sines = posterior[..., latitude]
    north = (sines > 0).double().mean(0) >= 0.5
    kept = (sines > 0) == north
    middle[:, latitude] = sines.masked_fill(~kept, torch.nan).nanmedian(0).values.clamp(-1, 1)
    return middle


def recovery_scores(
    model: BinaryModel, band: Band, found: BinaryPrediction, test: GalacticMixtures, seed: int
) -> Measured:
    """Return the share of true binaries recovered, and the power over noise before and after subtraction."""
    recovered = recover(model, band, found, test, seed)
    overlaps = np.concatenate([item.overlaps for item in recovered])
    dominant = np.array([item.overlaps[0] for item in recovered])
    power = (test.data.abs() ** 2).mean((1, 2)) / 2  # noise alone: 1
    residual = np.array([(np.abs(item.residual) ** 2).mean() / 2 for item in recovered])
    return {
        "recovered_share": float((overlaps > RECOVERED).mean()),
        "recovered_share_dominant": float((dominant > RECOVERED).mean()),
        "half_recovered_share": float((overlaps > 0.5).mean()),
        "waveform_overlap": float(overlaps.mean()),
        "data_power": float(np.median(power.numpy())),
        "residual_power": float(np.median(residual)),
    }


def recover(
    model: BinaryModel, band: Band, found: BinaryPrediction, test: GalacticMixtures, seed: int
) -> list[Recovered]:
    """Return for each mixture the waveforms of the binaries that the model calls, fitted to its data."""
    mixture, slot = (found.exist_logits > 0).nonzero(as_tuple=True)
    middle = medians(draw_posterior(model, found.slots[mixture, slot], seed=seed))
    params = np.zeros((len(middle), len(PARAMETERS)))
    for column, name in enumerate(INFERRED):
        params[:, PARAMETERS.index(name)] = middle[:, column].double().numpy()
    basis = amplitude_basis(params, band)  # [n, 2, 2, F]
    owner = mixture.numpy()
    return [
        _fit(basis[owner == b], test.data[b].numpy(), test.components[b, : int(test.counts[b])].numpy())
        for b in range(len(test.data))
    ]


def _fit(
    basis: NDArray[np.complex128], data: NDArray[np.complex64], sources: NDArray[np.complex64]
) -> Recovered:
    """Fit the amplitudes of n binaries [n, 2, 2, F] to data [2, F]; compare with sources [K, 2, F]."""
    if not len(basis):
        return Recovered(basis[:, 0], np.zeros(len(sources)), data.astype(np.complex128))
    columns = basis.reshape(2 * len(basis), -1).T
    size = np.linalg.norm(columns, axis=0)
    amplitudes = np.linalg.lstsq(columns / size, data.ravel(), rcond=LEAST_SINGULAR)[0] / size
    fitted: NDArray[np.complex128] = (basis * amplitudes.reshape(-1, 2, 1, 1)).sum(1)  # [n, 2, F]
    flat, true = fitted.reshape(len(fitted), -1), sources.reshape(len(sources), -1)
    products = (true.conj() @ flat.T).real  # [K, n]
    norms = np.linalg.norm(true, axis=1)[:, None] * np.linalg.norm(flat, axis=1)
    matrix = products / np.maximum(norms, 1e-12)
    rows, matched = linear_sum_assignment(-matrix)
    overlaps = np.zeros(len(sources))
    overlaps[rows] = matrix[rows, matched]
    return Recovered(fitted, overlaps, data - fitted.sum(0))


def _wrapped(angle: Tensor) -> Tensor:
    """Return the angle in [-pi, pi)."""
    return (angle + math.pi) % (2 * math.pi) - math.pi


def _rounded(value: Any) -> Any:
    return round(value, DECIMALS) if isinstance(value, float) else value
