"""Scoring a separator, and what it is compared with, over a set of examples into one JSON-ready report.

The mixture is always the sum of the true sources, as the FUSS protocol has it, so that every metric and every
method refers to one signal. Inputs of one source have no meaningful improvement: their ``known_count`` and
``strict`` numbers are absolute SI-SDR (best output; best called output, or the floor). An input without any
sounding source enters the count confusion alone.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import joblib
import numpy as np
import torch
from torch import Tensor

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
    si_sdr,
    statistic,
)
from separator.outputs import Array, BaselineOutputs, OutputsFunction, SlotOutputs

Progress = Callable[[int, int], None]
CHUNK = 4  # examples a process takes at a time


@dataclass(frozen=True)
class ExampleScore:
    """The metrics of one example, dB; NaN where one is undefined."""

    name: str
    n_sources: int
    n_called: int
    package_heldout: bool | None
    known_count: float = math.nan
    strict: float = math.nan
    before: tuple[float, ...] = ()
    """SI-SDR of the mixture against each source; +100 dB for a single one."""
    improvements: tuple[float, ...] = ()
    """SI-SDRi of each source with known count."""
    fuss: FussScore | None = None
    fuss_called: FussScore | None = None
    inactive_db: float = math.nan
    residual_db: float = math.nan
    sum_error_db: float = math.nan
    overlap: dict[str, float] = field(default_factory=dict)
    bsseval: BssEval | None = None


def evaluate(
    run: OutputsFunction,
    examples: Sequence[Example],
    *,
    zero_mean: bool = False,
    bsseval_examples: int = 0,
    n_jobs: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score what ``run`` makes of every example (``score_examples``) and report it (``make_report``)."""
    scores = score_examples(
        run,
        examples,
        zero_mean=zero_mean,
        bsseval_examples=bsseval_examples,
        n_jobs=n_jobs,
        progress=progress,
    )
    return make_report(scores, zero_mean=zero_mean)


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

    A limited method is evaluated on a subset drawn with a fixed seed.

    Raises:
        SeparatorError: a method is unknown.
    """
    runs = {name: BaselineOutputs(name) for name in (*methods, *(limits or {}))}
    reports = {}
    for method in methods:
        limit = (limits or {}).get(method, len(examples))
        chosen = [examples[i] for i in _subset(len(examples), limit)] if limit < len(examples) else examples
        report = (lambda done, total, name=method: progress(name, done, total)) if progress else None
        reports[method] = evaluate(
            runs[method], chosen, zero_mean=zero_mean, bsseval_examples=bsseval_examples, progress=report
        )
    return reports


def score_examples(
    run: OutputsFunction,
    examples: Sequence[Example],
    *,
    zero_mean: bool = False,
    bsseval_examples: int = 0,
    n_jobs: int = 1,
    progress: Progress | None = None,
) -> list[ExampleScore]:
    """Score what ``run`` makes of every example, in their order.

    Args:
        run: gives the outputs for an example, such as those of `separator.outputs`.
        examples: from ``read_fuss_examples`` or made in memory.
        zero_mean: the convention of SI-SDR. The FUSS numbers never remove means.
        bsseval_examples: how many examples, drawn with a fixed seed, also get BSSEval v4 (seconds each).
        n_jobs: processes of one thread each; from 2 on ``run`` must be picklable.
        progress: called with (done, total) now and then.
    """
    chosen = set(_subset(len(examples), bsseval_examples))
    if n_jobs == 1:
        scores = []
        for index in range(len(examples)):
            scores += _score_some(run, [examples[index]], zero_mean, [index in chosen])
            if progress:
                progress(len(scores), len(examples))
        return scores
    parts = [range(start, min(start + CHUNK, len(examples))) for start in range(0, len(examples), CHUNK)]
    work = joblib.delayed(_score_in_process)
    tasks = (
        work(run, examples[part.start : part.stop], zero_mean, [index in chosen for index in part])
        for part in parts
    )
    scores = []
    for some in joblib.Parallel(n_jobs=n_jobs, return_as="generator")(tasks):
        scores += some
        if progress:
            progress(len(scores), len(examples))
    return scores


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
    padded = torch.cat([estimates, torch.zeros_like(sources[:1])])  # silence for -1, a source without output
    aligned = padded[known.outputs] if with_bsseval else None
    return ExampleScore(
        example.name,
        n_sources,
        n_called,
        example.package_heldout,
        known_count=(known.si_sdr if single else known.improvement).mean().item(),
        strict=(strict.si_sdr if single else strict.improvement).mean().item(),
        before=tuple(si_sdr(mixture.expand_as(sources), sources, zero_mean=zero_mean).tolist()),
        improvements=tuple(known.improvement.tolist()),
        fuss=fuss_score(estimates, sources),
        fuss_called=fuss_score(estimates * called[:, None], sources),
        inactive_db=_inactive_db(estimates, called, mixture),
        residual_db=_residual_db(outputs, mixture),
        sum_error_db=level_db(total - mixture, mixture).item(),
        overlap=_overlaps(outputs, called, n_sources),
        bsseval=None if aligned is None else bsseval(aligned, sources, example.sample_rate),
    )


def make_report(scores: Sequence[ExampleScore], *, zero_mean: bool = False) -> dict[str, Any]:
    """``settings``, ``all`` and, where examples say so, ``package_heldout`` and ``package_seen``.

    The settings repeat ``zero_mean``; the others are as in ``summarise``.
    """
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


def _score_some(
    run: OutputsFunction, examples: Iterable[Example], zero_mean: bool, with_bsseval: Sequence[bool]
) -> list[ExampleScore]:
    return [
        score_example(run(example), example, zero_mean=zero_mean, with_bsseval=flag)
        for example, flag in zip(examples, with_bsseval, strict=True)
    ]


def _score_in_process(*arguments: Any) -> list[ExampleScore]:
    torch.set_num_threads(1)
    return _score_some(*arguments)


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
