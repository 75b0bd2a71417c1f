"""Scoring a separator, and what it is compared with, over a set of examples into one JSON-ready report.

The mixture is always the sum of the true sources, as the FUSS protocol has it, so that every metric and every
method refers to one signal. Inputs of one source have no meaningful improvement: their ``known_count`` and
``strict`` numbers are absolute SI-SDR (best output; best called output, or the floor). An input without any
sounding source enters the count confusion alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from separator import baselines
from separator.bsseval import BssEval, bsseval
from separator.errors import SeparatorError
from separator.fuss import Example
from separator.fuss_protocol import FussScore, fuss_score, summarise_fuss
from separator.metrics import (
    FLOOR_DB,
    SI_SDR_LIMIT_DB,
    cosine_overlap,
    count_confusion,
    level_db,
    match_known_count,
    match_strict,
    peak_overlap,
    statistic,
)

Array = Tensor | npt.NDArray[Any]


class SlotOutputs(NamedTuple):
    """What a separator made of one mono mixture: every slot's output and which of them it calls sources."""

    estimates: Array
    """(slot, time), all slots, called or not."""
    existence: Array
    """(slot,), probability that the slot is a source."""
    min_existence: float
    """A slot is called a source when its existence is at least this."""
    residual: Array | None = None
    """(time), what no slot took; slots that are not called are not in it. Estimates + residual = mixture."""
    masks: Array | None = None
    """(slot, frequency, time) for the overlap metrics."""
    attn: Array | None = None
    """(slot, token) for the overlap metrics."""


SeparateFunction = Callable[[npt.NDArray[np.float32], int], SlotOutputs]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExampleScore:
    """The metrics of one example, dB; NaN where one is undefined."""

    name: str
    n_sources: int
    n_called: int
    package_heldout: bool | None
    known_count: float = math.nan
    strict: float = math.nan
    fuss: FussScore | None = None
    fuss_called: FussScore | None = None
    inactive_db: float = math.nan
    residual_db: float = math.nan
    sum_error_db: float = math.nan
    overlap: dict[str, float] = field(default_factory=dict)
    bsseval: BssEval | None = None


def evaluate(
    separate: SeparateFunction,
    examples: Sequence[Example],
    *,
    zero_mean: bool = False,
    bsseval_examples: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run ``separate(mixture, sample_rate)`` on every example and report all metrics.

    Args:
        separate: returns the outputs for a float32 mixture (time).
        examples: from ``read_fuss_examples`` or made in memory.
        zero_mean: the convention of SI-SDR; the report repeats it. The FUSS numbers never remove means.
        bsseval_examples: how many examples, drawn with a fixed seed, also get BSSEval v4 (seconds each).
        progress: called with (done, total) after each example.

    Returns:
        ``settings``, ``all`` and, where examples say so, ``package_heldout`` and ``package_seen``: see
        ``summarise``.
    """

    def run(example: Example) -> SlotOutputs:
        return separate(example.sources.sum(0).numpy(), example.sample_rate)

    return _evaluate(run, examples, zero_mean, bsseval_examples, progress)


def evaluate_baselines(
    examples: Sequence[Example],
    *,
    methods: Sequence[str] = ("mixture", "hpss", "nmf", "irm", "ibm"),
    limits: Mapping[str, int] | None = None,
    zero_mean: bool = False,
    bsseval_examples: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Evaluate the ``methods`` by name, each as ``evaluate`` does; ``limits`` caps the examples of a method.

    ``mixture`` and ``hpss`` call all their outputs (1 and 2) sources; ``nmf``, ``irm`` and ``ibm`` are
    oracles with one output a true source. A limited method is evaluated on a subset drawn with a fixed seed.

    Raises:
        SeparatorError: a method is unknown.
    """
    unknown = sorted({*methods, *(limits or {})} - set(_BASELINES))
    if unknown:
        raise SeparatorError(f"unknown baselines {', '.join(unknown)}; there are {', '.join(_BASELINES)}")
    reports = {}
    for method in methods:
        limit = (limits or {}).get(method, len(examples))
        chosen = [examples[i] for i in _subset(len(examples), limit)] if limit < len(examples) else examples
        report = (lambda done, total, name=method: progress(name, done, total)) if progress else None
        reports[method] = _evaluate(_BASELINES[method], chosen, zero_mean, bsseval_examples, report)
    return reports


def score_example(
    outputs: SlotOutputs, example: Example, *, zero_mean: bool = False, with_bsseval: bool = False
) -> ExampleScore:
    """Score one example's outputs against its sources."""
    estimates, called = _checked(outputs, example)
    sources = example.sources
    mixture = sources.sum(0)
    n_sources, n_called = sources.shape[0], int(called.sum())
    if n_sources == 0:
        return ExampleScore(example.name, 0, n_called, example.package_heldout)
    known = match_known_count(estimates, sources, mixture, zero_mean=zero_mean)
    strict = match_strict(estimates, sources, mixture, called, zero_mean=zero_mean)
    single = n_sources == 1
    total = estimates.sum(0) + (0 if outputs.residual is None else _tensor(outputs.residual))
    aligned = estimates[known.outputs] * (known.outputs >= 0)[:, None] if with_bsseval else None
    return ExampleScore(
        example.name,
        n_sources,
        n_called,
        example.package_heldout,
        known_count=(known.si_sdr if single else known.improvement).mean().item(),
        strict=(strict.si_sdr if single else strict.improvement).mean().item(),
        fuss=fuss_score(estimates, sources),
        fuss_called=fuss_score(estimates * called[:, None], sources),
        inactive_db=_inactive_db(estimates, called, mixture),
        residual_db=_residual_db(outputs, mixture),
        sum_error_db=level_db(total - mixture, mixture).item(),
        overlap=_overlaps(outputs, called, n_sources),
        bsseval=None if aligned is None else bsseval(aligned, sources, example.sample_rate),
    )


def summarise(scores: Sequence[ExampleScore]) -> dict[str, Any]:
    """Report means, population std and counts over examples; a value that is undefined everywhere is None.

    Keys: ``n_examples``; ``by_count`` (true number of sources -> ``known_count``, ``strict`` and
    ``exact_count``, the share counted right); ``fuss`` (all outputs, by power) and ``fuss_called`` (outputs
    not called sources are silenced); ``count`` (``accuracy``, ``confusion`` with true rows and called columns
    from 0); ``inactive_db`` (energy on outputs not called, re mixture), ``residual_db``, ``sum_error_db``
    (estimates + residual - mixture, re mixture); ``overlap`` of masks and attention over inputs of two
    sources and more; ``bsseval``.
    """
    counted = [score for score in scores if score.n_sources]
    by_count = {}
    for n_sources in sorted({score.n_sources for score in counted}):
        group = [score for score in counted if score.n_sources == n_sources]
        by_count[str(n_sources)] = {
            "known_count": statistic([score.known_count for score in group]),
            "strict": statistic([score.strict for score in group]),
            "exact_count": sum(score.n_called == n_sources for score in group) / len(group),
        }
    several = [score for score in counted if score.n_sources >= 2]
    names = sorted({name for score in several for name in score.overlap})
    return {
        "n_examples": len(scores),
        "by_count": by_count,
        "fuss": summarise_fuss(score.fuss for score in scores),
        "fuss_called": summarise_fuss(score.fuss_called for score in scores),
        "count": _summarise_counts(scores),
        "inactive_db": statistic([score.inactive_db for score in counted]),
        "residual_db": statistic([score.residual_db for score in counted]),
        "sum_error_db": statistic([score.sum_error_db for score in counted]),
        "overlap": {
            name: statistic([score.overlap.get(name, math.nan) for score in several]) for name in names
        },
        "bsseval": _summarise_bsseval([score.bsseval for score in counted if score.bsseval is not None]),
    }


def _evaluate(
    run: Callable[[Example], SlotOutputs],
    examples: Sequence[Example],
    zero_mean: bool,
    bsseval_examples: int,
    progress: Progress | None,
) -> dict[str, Any]:
    with_bsseval = set(_subset(len(examples), bsseval_examples))
    scores = []
    for index in range(len(examples)):
        example = examples[index]
        scores.append(
            score_example(run(example), example, zero_mean=zero_mean, with_bsseval=index in with_bsseval)
        )
        if progress:
            progress(index + 1, len(examples))
    report: dict[str, Any] = {
        "settings": {
            "zero_mean": zero_mean,
            "mixture": "sum of the sources",
            "floor_db": FLOOR_DB,
            "si_sdr_limit_db": SI_SDR_LIMIT_DB,
        },
        "all": summarise(scores),
    }
    for key, flag in (("package_heldout", True), ("package_seen", False)):
        part = [score for score in scores if score.package_heldout is flag]
        if part:
            report[key] = summarise(part)
    return report


def _subset(total: int, wanted: int) -> list[int]:
    """``wanted`` of ``total`` indices in order, drawn with a fixed seed: examples may lie sorted by count."""
    generator = np.random.default_rng(0)
    return sorted(generator.permutation(total)[:wanted].tolist())


def _checked(outputs: SlotOutputs, example: Example) -> tuple[Tensor, Tensor]:
    """Estimates (slot, time) and which slots are called, after a look at the shapes."""
    estimates = _tensor(outputs.estimates)
    existence = _tensor(outputs.existence)
    n_samples = example.sources.shape[-1]
    if estimates.ndim != 2 or estimates.shape[-1] != n_samples or existence.shape != estimates.shape[:1]:
        raise SeparatorError(
            f"{example.name}: estimates {tuple(estimates.shape)} and existence {tuple(existence.shape)} "
            f"do not fit; return (slot, {n_samples}) and (slot,), one channel"
        )
    return estimates, existence >= outputs.min_existence


def _tensor(array: Array) -> Tensor:
    return torch.as_tensor(array).detach().cpu()


def _inactive_db(estimates: Tensor, called: Tensor, mixture: Tensor) -> float:
    if called.all():
        return math.nan
    return level_db(estimates[~called].flatten(), mixture).item()


def _residual_db(outputs: SlotOutputs, mixture: Tensor) -> float:
    return math.nan if outputs.residual is None else level_db(_tensor(outputs.residual), mixture).item()


def _overlaps(outputs: SlotOutputs, called: Tensor, n_sources: int) -> dict[str, float]:
    """Overlaps of masks and attention: among the called slots, and among as many most likely ones as sources.

    The second does not depend on how well a model counts, and so compares mechanisms.
    """
    if n_sources < 2:
        return {}
    existence = _tensor(outputs.existence)
    likely = torch.zeros_like(called)
    likely[existence.argsort(descending=True, stable=True)[:n_sources]] = True
    overlaps = {}
    for name, shares in (("mask", outputs.masks), ("attn", outputs.attn)):
        if shares is None:
            continue
        tokens = _tensor(shares).flatten(1)  # (slot, token)
        for suffix, active in (("called", called), ("known_count", likely)):
            overlaps[f"{name}_peak_{suffix}"] = float(peak_overlap(tokens, active))
            overlaps[f"{name}_cosine_{suffix}"] = cosine_overlap(tokens, active).item()
    return overlaps


def _summarise_counts(scores: Sequence[ExampleScore]) -> dict[str, Any]:
    called = torch.tensor([score.n_called for score in scores], dtype=torch.long)
    true = torch.tensor([score.n_sources for score in scores], dtype=torch.long)
    accuracy = (called == true).double().mean().item() if len(scores) else None
    return {"accuracy": accuracy, "confusion": count_confusion(called, true).tolist()}


def _summarise_bsseval(scores: Sequence[BssEval]) -> dict[str, Any] | None:
    """Statistics over sources of their medians over frames, and what was dropped in all."""
    if not scores:
        return None
    report: dict[str, Any] = {
        name: statistic(torch.cat([getattr(score, name) for score in scores]))
        for name in ("sdr", "isr", "sir", "sar")
    }
    for name in ("n_frames", "n_dropped_frames", "n_silent_sources", "n_silent_estimates"):
        report[name] = sum(getattr(score, name) for score in scores)
    return {"n_examples": len(scores), **report}


def _all_called(estimates: Tensor, example: Example) -> SlotOutputs:
    residual = example.sources.sum(0) - estimates.sum(0)
    return SlotOutputs(estimates, torch.ones(estimates.shape[0]), 0.5, residual)


def _blind(method: Callable[[Tensor], Tensor]) -> Callable[[Example], SlotOutputs]:
    return lambda example: _all_called(method(example.sources.sum(0)), example)


def _oracle(method: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Example], SlotOutputs]:
    return lambda example: _all_called(method(example.sources.sum(0), example.sources), example)


_BASELINES: dict[str, Callable[[Example], SlotOutputs]] = {
    "mixture": _blind(baselines.mixture_estimate),
    "hpss": _blind(baselines.hpss_estimates),
    "nmf": _oracle(baselines.nmf_estimates),
    "irm": _oracle(baselines.ideal_ratio_estimates),
    "ibm": _oracle(baselines.ideal_binary_estimates),
}
