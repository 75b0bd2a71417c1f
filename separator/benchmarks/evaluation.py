"""Measuring a trained model on test mixtures: what every record holds, and extra measurements by name."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from separator.benchmarks import metrics
from separator.benchmarks.model import BenchmarkModel, Prediction
from separator.benchmarks.tasks import Mixtures, Source, Task
from separator.errors import SeparatorError

EVALUATION_OFFSET = 40_000  # keeps the noise of an evaluation apart from the seed's other draws
N_ORDERS = 10
DECIMALS = 6
FREQUENCY = "frequency"

Measurements = dict[str, float | None]


class Evaluation(NamedTuple):
    """An extra measurement, and the option of a mechanism's call without which it has no meaning."""

    measure: Callable[[BenchmarkModel, Task, Mixtures, int], Measurements]
    requires: str


@torch.no_grad()
def predict(model: BenchmarkModel, signals: Tensor, *, seed: int, **options: Any) -> Prediction:
    """Decompose signals [B, N] in eval() with the noise of `seed`; the options are the mechanism's."""
    training = model.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + EVALUATION_OFFSET)
        try:
            prediction: Prediction = model.eval()(signals, **options)
        finally:
            model.train(training)
    return prediction


def measure(model: BenchmarkModel, task: Source, test: Mixtures, seed: int) -> Measurements:
    """Return the metrics of every record; None where a metric has no value."""
    return score(predict(model, test.signals, seed=seed), task, test)


def score(prediction: Prediction, task: Source, test: Mixtures, *, barred: int | None = None) -> Measurements:
    """Return the metrics of a prediction; slot `barred` is not matched with sources."""
    _, attn, exist_logits, params, _ = prediction
    truth = test.params, exist_logits, test.counts
    errors = metrics.parameter_errors(params, *truth, barred=barred).tolist()
    scores: dict[str, float] = {
        "peak_overlap": metrics.peak_overlap(attn, test.counts),
        "cosine_overlap": metrics.cosine_overlap(attn, test.counts),
        "slot_cosine": metrics.slot_cosine(prediction.slots, test.counts),
        "count_accuracy": metrics.count_accuracy(exist_logits, test.counts),
        **{f"mae_{name}": error for name, error in zip(task.parameter_names, errors, strict=True)},
    }
    if task.parameter_names[0] == FREQUENCY:
        scores["source_recovery"] = metrics.source_recovery(params, *truth, barred=barred)
    return plain(scores)


def slot_order(model: BenchmarkModel, task: Task, test: Mixtures, seed: int) -> Measurements:
    """Return mean, least and most of the peak overlap over ten random orders of the slots."""
    generator = torch.Generator().manual_seed(seed + EVALUATION_OFFSET)
    n_slots = model.n_slots
    overlaps = []
    for _ in range(N_ORDERS):
        order = torch.randperm(n_slots, generator=generator)
        attn = predict(model, test.signals, seed=seed, slot_order=order).attn
        overlaps.append(metrics.peak_overlap(attn, test.counts))
    spread = {"min": min(overlaps), "max": max(overlaps), "mean": sum(overlaps) / N_ORDERS}
    return plain({f"random_order_peak_overlap_{name}": value for name, value in spread.items()})


def greedy_order(model: BenchmarkModel, task: Task, test: Mixtures, seed: int) -> Measurements:
    """Return the metrics when each mixture's slots are taken greedily by evidence."""
    prediction = predict(model, test.signals, seed=seed, order_policy="evidence_greedy")
    return _prefixed("greedy_order", score(prediction, task, test))


def forced_first(model: BenchmarkModel, task: Task, test: Mixtures, seed: int) -> Measurements:
    """Return the metrics of the other slots when slot 0 must attend wrongly: uniformly, or to one token.

    That token is the one that the slot attends to least by itself.
    """
    free = predict(model, test.signals, seed=seed).attn[:, 0]  # [B, L]
    wrong = torch.nn.functional.one_hot(free.argmin(1), free.shape[1]).to(free)
    forced = {"uniform": torch.full_like(free, 1 / free.shape[1]), "wrong_peak": wrong}
    found = _prefixed("free", score(predict(model, test.signals, seed=seed), task, test, barred=0))
    for name, attn in forced.items():
        prediction = predict(model, test.signals, seed=seed, forced_attn_first=attn)
        found |= _prefixed(name, score(prediction, task, test, barred=0))
    return found


def depleted_mass(model: BenchmarkModel, task: Task, test: Mixtures, seed: int) -> Measurements:
    """Return the mean evidence that a matched and an unmatched slot takes."""
    prediction = predict(model, test.signals, seed=seed)
    evidence = prediction.evidence or []
    matched, unmatched = metrics.depleted_mass(evidence, prediction.exist_logits, test.counts)
    return plain({"depleted_mass_matched": matched, "depleted_mass_unmatched": unmatched})


EVALUATIONS: dict[str, Evaluation] = {
    "slot_order": Evaluation(slot_order, "slot_order"),
    "greedy_order": Evaluation(greedy_order, "order_policy"),
    "forced_first": Evaluation(forced_first, "forced_attn_first"),
    "depleted_mass": Evaluation(depleted_mass, "order_policy"),  # which only evidence makes sense of
}


def check_evaluations(names: Sequence[str], model: BenchmarkModel) -> None:
    """Raise SeparatorError unless all these evaluations exist and apply to the model."""
    accepted = inspect.signature(model.slot_attn.forward).parameters
    for name in names:
        if name not in EVALUATIONS:
            raise SeparatorError(f"unknown evaluation {name!r}; choose of {', '.join(EVALUATIONS)}")
        if EVALUATIONS[name].requires not in accepted:
            kind, option = type(model.slot_attn).__name__, EVALUATIONS[name].requires
            raise SeparatorError(f"{kind} takes no {option}, which {name!r} needs; leave it out")


def _prefixed(prefix: str, values: Measurements) -> Measurements:
    return {f"{prefix}_{name}": value for name, value in values.items()}


def plain(values: dict[str, float]) -> Measurements:
    """Round, and put None for what has no value: JSON has no NaN."""
    return {k: None if math.isnan(v) else round(v, DECIMALS) for k, v in values.items()}
