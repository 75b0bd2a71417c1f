"""How well a mixture was separated: SI-SDR, its matched forms, counting and the overlap of slots.

Metrics take ``(estimates, sources)`` and return dB. SI-SDR is 10 log10 of ||a s||^2 / ||a s - e||^2 with
a = <e, s> / ||s||^2. With c the squared cosine of the angle between e and s this is 10 log10(c / (1 - c)),
and so it is computed, in float64. Conventions that differ between papers are explicit:

- ``zero_mean=True`` removes the mean of estimate and source first (asteroid), ``False`` does not (FUSS).
- Values are limited to +-100 dB. An all-zero estimate has cosine 0 and scores -100 dB, a perfect one +100 dB.
- A silent source has no SI-SDR: it is refused, so choose the active ones first with ``is_active``.

Reference: Le Roux, Wisdom, Erdogan and Hershey, "SDR - half-baked or well done?", ICASSP 2019.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from separator.errors import SeparatorError
from separator.script import counted

SI_SDR_LIMIT_DB = 100.0
FLOOR_DB = -30.0  # the matched score of a source that got no output or a useless one
SILENCE_RMS = 1e-8  # a source at or below it is silent (the FUSS baseline's threshold)
LEVEL_FLOOR_DB = -200.0  # the level of digital silence, so that means stay finite


class Match(NamedTuple):
    """What each source received: one entry a source in every field."""

    si_sdr: Tensor  # (source,) dB
    improvement: Tensor  # (source,) dB over the mixture
    outputs: Tensor  # (source,) index of the estimate, -1 where there was none


def is_active(waveforms: Tensor) -> Tensor:
    """Tell which of ``waveforms`` (..., time) sound at all: RMS above 1e-8."""
    if waveforms.shape[-1] == 0:
        return torch.zeros(waveforms.shape[:-1], dtype=torch.bool, device=waveforms.device)
    return waveforms.double().square().mean(-1).sqrt() > SILENCE_RMS


def si_sdr(estimates: Tensor, sources: Tensor, *, zero_mean: bool) -> Tensor:
    """Scale-invariant SDR in dB of each of ``estimates`` (..., time) against its own of ``sources``.

    Raises:
        SeparatorError: the lengths differ, a source is silent, or a value is not finite.

    >>> source = torch.tensor([1.0, 0.0, 1.0, 0.0])
    >>> noise = torch.tensor([0.0, 0.1, 0.0, 0.1])  # orthogonal to the source, 20 dB below it
    >>> round(si_sdr(7 * (source + noise), source, zero_mean=False).item(), 3)
    20.0
    """
    estimates, sources = _prepare(estimates, sources, zero_mean)
    cosine = (estimates * sources).sum(-1)
    return decibels_of_cosine(cosine.square())


def pairwise_si_sdr(estimates: Tensor, sources: Tensor, *, zero_mean: bool) -> Tensor:
    """SI-SDR in dB of every estimate (..., slot, time) against every source (..., source, time).

    Returns (..., slot, source). Raises as ``si_sdr`` does.
    """
    return decibels_of_cosine(squared_cosines(estimates, sources, zero_mean=zero_mean))


def si_sdr_improvement(estimates: Tensor, sources: Tensor, mixture: Tensor, *, zero_mean: bool) -> Tensor:
    """SI-SDR of ``estimates`` less that of ``mixture`` (..., time) against the same ``sources``, dB."""
    before = si_sdr(mixture.expand_as(sources), sources, zero_mean=zero_mean)
    return si_sdr(estimates, sources, zero_mean=zero_mean) - before


def match_known_count(estimates: Tensor, sources: Tensor, mixture: Tensor, *, zero_mean: bool) -> Match:
    """Give every source its own output of all slots, called or not, so that the mean SI-SDRi is largest.

    ``estimates`` (slot, time), ``sources`` (source, time), ``mixture`` (time). With fewer outputs than
    sources, the sources left over are scored with the mixture itself: 0 dB improvement. Entries are at least
    -30 dB, as in ``match_strict``, which therefore never exceeds this score.
    """
    scores, before = _scores(estimates, sources, mixture, zero_mean)
    outputs = _assign(scores, before)
    values = torch.where(outputs >= 0, _take(scores, outputs), before)
    return Match(values.clamp_min(FLOOR_DB), (values - before).clamp_min(FLOOR_DB), outputs)


def match_strict(
    estimates: Tensor, sources: Tensor, mixture: Tensor, called: Tensor, *, zero_mean: bool
) -> Match:
    """Give every source its own output of the ``called`` (slot,) ones; a source without one scores -30 dB.

    The floor is the entry itself: -30 dB stands in ``si_sdr`` and in ``improvement`` of such a source,
    whatever the mixture's SI-SDR was. It bounds the others too, so that a wrong output is never worse than
    none. Outputs called beyond the number of sources cost nothing here; the count confusion shows them.
    """
    scores, before = _scores(estimates, sources, mixture, zero_mean)
    slots = called.nonzero()[:, 0]
    rows = _assign(scores[slots], before)
    missing = rows < 0
    values = _take(scores[slots], rows).masked_fill(missing, -torch.inf)
    outputs = torch.full_like(rows, -1)
    outputs[~missing] = slots[rows[~missing]]
    return Match(values.clamp_min(FLOOR_DB), (values - before).clamp_min(FLOOR_DB), outputs)


def count_confusion(called_counts: Tensor, true_counts: Tensor) -> Tensor:
    """Count inputs by true (row) and called (column) number of sources, both from 0; a square int64 matrix.

    >>> count_confusion(torch.tensor([1, 2, 2]), torch.tensor([1, 2, 1])).tolist()
    [[0, 0, 0], [0, 1, 1], [0, 0, 1]]
    """
    if called_counts.shape != true_counts.shape:
        raise SeparatorError(
            f"{called_counts.shape=} is not {true_counts.shape=}; pass one count an input in both"
        )
    size = int(torch.cat([called_counts, true_counts]).max()) + 1 if true_counts.numel() else 1
    return torch.bincount(true_counts * size + called_counts, minlength=size * size).reshape(size, size)


def peak_overlap(attn: Tensor, active: Tensor) -> Tensor:
    """Tell whether two ``active`` (..., slot) slots peak at one token of ``attn`` (..., slot, token).

    Its mean over the inputs with two sources or more is Definition 1 of the paper. Masks are flattened to
    tokens.
    """
    peaks = attn.argmax(-1)
    same = peaks[..., :, None] == peaks[..., None, :]  # (..., slot, slot)
    return (same & _active_pairs(active)).flatten(-2).any(-1)


def cosine_overlap(attn: Tensor, active: Tensor) -> Tensor:
    """Largest cosine between ``attn`` (..., slot, token) of two ``active`` slots; NaN with fewer than two."""
    directions = torch.nn.functional.normalize(attn.double(), dim=-1)
    cosines = directions @ directions.transpose(-1, -2)  # (..., slot, slot)
    pairs = _active_pairs(active)
    largest = cosines.masked_fill(~pairs, -torch.inf).flatten(-2).amax(-1)
    return torch.where(pairs.flatten(-2).any(-1), largest, torch.nan)


def level_db(waveform: Tensor, reference: Tensor) -> Tensor:
    """Energy of ``waveform`` (..., time) over that of ``reference`` (..., time), dB, at least -200."""
    energy = waveform.double().square().sum(-1)
    reference_energy = reference.double().square().sum(-1)
    return (10 * torch.log10(energy / reference_energy)).nan_to_num(LEVEL_FLOOR_DB).clamp_min(LEVEL_FLOOR_DB)


def statistic(values: Sequence[float] | Tensor) -> dict[str, Any]:
    """Mean, population standard deviation (four decimals; None without any) and count of finite ``values``.

    >>> statistic([1.0, 3.0, float("nan")])
    {'mean': 2.0, 'std': 1.0, 'count': 2}
    """
    known = torch.as_tensor(values, dtype=torch.float64)
    known = known[torch.isfinite(known)]
    if not known.numel():
        return {"mean": None, "std": None, "count": 0}
    mean, std = known.mean().item(), known.std(correction=0).item()
    return {
        "mean": round(mean, 4) + 0.0,
        "std": round(std, 4),
        "count": known.numel(),
    }  # + 0.0: no minus zero


def squared_cosines(estimates: Tensor, sources: Tensor, *, zero_mean: bool) -> Tensor:
    """Squared cosine between every estimate (..., slot, time) and source (..., source, time).

    Returns float64 (..., slot, source). Raises as ``si_sdr`` does.
    """
    estimates, sources = _prepare(estimates, sources, zero_mean)
    return (estimates @ sources.transpose(-1, -2)).square()


def decibels_of_cosine(squared_cosine: Tensor) -> Tensor:
    """SI-SDR in dB of a squared cosine: 10 log10(c / (1 - c)), limited to +-100 dB."""
    ratio = squared_cosine / (1 - squared_cosine).clamp_min(torch.finfo(squared_cosine.dtype).tiny)
    return (10 * torch.log10(ratio)).clamp(-SI_SDR_LIMIT_DB, SI_SDR_LIMIT_DB)


def _prepare(estimates: Tensor, sources: Tensor, zero_mean: bool) -> tuple[Tensor, Tensor]:
    """Check both and scale them to unit energy in float64; an all-zero estimate stays zero."""
    if estimates.shape[-1] != sources.shape[-1]:
        raise SeparatorError(
            f"estimates have {counted(estimates.shape[-1], 'sample')}, "
            f"sources {sources.shape[-1]}; bring both to one length"
        )
    estimates, sources = estimates.detach().double(), sources.detach().double()
    for name, waveforms in (("estimates", estimates), ("sources", sources)):
        if not torch.isfinite(waveforms).all():
            bad = int((~torch.isfinite(waveforms)).sum())
            raise SeparatorError(
                f"{name} hold {counted(bad, 'value')} of NaN or inf; a score of them would mean nothing"
            )
    if zero_mean:
        estimates = estimates - estimates.mean(-1, keepdim=True)
        sources = sources - sources.mean(-1, keepdim=True)
    silent = ~is_active(sources)
    if silent.any():
        raise SeparatorError(
            f"{int(silent.sum())} silent of {counted(silent.numel(), 'source')} (RMS <= {SILENCE_RMS:g}): "
            "silence has no SI-SDR; leave it out, for example sources[is_active(sources)]"
        )
    return _unit(estimates), _unit(sources)


def _unit(waveforms: Tensor) -> Tensor:
    peak = waveforms.abs().amax(-1, keepdim=True) if waveforms.shape[-1] else waveforms.new_ones(1)
    scaled = waveforms / peak.where(peak > 0, 1.0)  # first to peak 1: squares of tiny values would underflow
    norm = scaled.square().sum(-1, keepdim=True).sqrt()
    return scaled / norm.where(norm > 0, 1.0)


def _scores(estimates: Tensor, sources: Tensor, mixture: Tensor, zero_mean: bool) -> tuple[Tensor, Tensor]:
    """SI-SDR of every output (slot, source) and of the mixture (source,)."""
    everything = torch.cat([estimates, mixture[None]])
    scores = pairwise_si_sdr(everything, sources, zero_mean=zero_mean)
    return scores[:-1], scores[-1]


def _assign(scores: Tensor, before: Tensor) -> Tensor:
    """Row of each column of ``scores`` (row, source) in the best assignment by floored improvement; or -1."""
    gains = (scores - before).clamp_min(FLOOR_DB)
    gains = gains + 1e-6 * scores  # among equals at the floor the better output, as for a single source
    rows, columns = linear_sum_assignment(gains.cpu().numpy(), maximize=True)
    assigned = torch.full((scores.shape[1],), -1, dtype=torch.long)
    assigned[torch.as_tensor(columns)] = torch.as_tensor(rows)
    return assigned


def _take(scores: Tensor, rows: Tensor) -> Tensor:
    """``scores`` (row, column) at one row a column; where the row is -1 the value is of no meaning."""
    if scores.shape[0] == 0:
        return scores.new_zeros(scores.shape[1])
    return scores.gather(0, rows.clamp_min(0)[None])[0]


def _active_pairs(active: Tensor) -> Tensor:
    pairs = active[..., :, None] & active[..., None, :]  # (..., slot, slot)
    return pairs & torch.ones(pairs.shape[-2:], dtype=torch.bool, device=pairs.device).triu(1)
