"""The evaluation protocol published with the FUSS data set, for numbers that compare with its papers.

It differs from ``metrics.match_strict`` in what it leaves out. The mixture is the sum of the sources, means
stay, all outputs are permuted to the sources by SI-SNR, and an output exists by its power alone: above -20 dB
of the quietest active source. Only pairs of an active source and an active output enter the means, so a
missed source costs nothing there and shows in the under-separation rate only.

SI-SNR here is 10 log10((c + 1e-8) / (1 - c + 1e-8)) of the squared cosine c, as the protocol has it: within
+-80 dB.

Reference: Wisdom et al., "What's all the FUSS about free universal sound separation data?", ICASSP 2021.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from separator.metrics import is_active, squared_cosines, statistic

ACTIVE_POWER_RATIO = 0.01  # -20 dB of the quietest active source
STABILISER = 1e-8


class FussScore(NamedTuple):
    """The protocol's numbers of one input; ``si_snr`` and ``improvement``, dB, have one an active pair."""

    si_snr: Tensor
    improvement: Tensor
    n_sources: int
    n_estimates: int


def fuss_score(estimates: Tensor, sources: Tensor) -> FussScore | None:
    """Score ``estimates`` (slot, time) against ``sources`` (source, time); silent sources count as absent.

    Returns None where every source is silent: the protocol skips such an input.
    """
    sources = sources[is_active(sources)]
    if sources.shape[0] == 0:
        return None
    active = _power(estimates) > ACTIVE_POWER_RATIO * _power(sources).min()
    scores = _si_snr(estimates, sources)  # (slot, source)
    before = _si_snr(sources.sum(0, keepdim=True), sources)[0]
    rows, columns = (torch.as_tensor(i) for i in linear_sum_assignment(scores.cpu().numpy(), maximize=True))
    pairs = active[rows]
    rows, columns = rows[pairs], columns[pairs]
    values = scores[rows, columns]
    return FussScore(values, values - before[columns], sources.shape[0], int(active.sum()))


def summarise_fuss(scores: Iterable[FussScore | None]) -> dict[str, Any]:
    """Gather scores into the protocol's report: 1S, SI-SNRi of 2, 3 and 4 sources, MSi, and three rates.

    ``1S`` is absolute, the others are improvements; means, population std and counts are over pairs.
    ``under``, ``equal`` and ``over`` are the shares of inputs with fewer, as many and more active outputs
    than sources.
    """
    kept = [score for score in scores if score is not None]
    report: dict[str, Any] = {"1S": statistic(_joined([s.si_snr for s in kept if s.n_sources == 1]))}
    for count in (2, 3, 4):
        report[str(count)] = statistic(_joined([s.improvement for s in kept if s.n_sources == count]))
    report["MSi"] = statistic(_joined([s.improvement for s in kept if 2 <= s.n_sources <= 4]))
    excess = [s.n_estimates - s.n_sources for s in kept]
    for name, hits in (
        ("under", sum(e < 0 for e in excess)),
        ("equal", excess.count(0)),
        ("over", sum(e > 0 for e in excess)),
    ):
        report[name] = hits / len(kept) if kept else None
    return report


def _power(waveforms: Tensor) -> Tensor:
    return waveforms.double().square().mean(-1)


def _si_snr(estimates: Tensor, sources: Tensor) -> Tensor:
    cosine = squared_cosines(estimates, sources, zero_mean=False)
    return 10 * torch.log10((cosine + STABILISER) / (1 - cosine + STABILISER))


def _joined(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values else torch.empty(0)
