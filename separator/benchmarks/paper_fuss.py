"""The paper's FUSS experiment: the benchmark model on recordings, its overlaps, parameters and separation.

Reference: Houba, NeurIPS 2026, appendix J.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from separator.benchmarks import metrics
from separator.benchmarks.evaluation import DECIMALS, plain, predict
from separator.benchmarks.fuss_task import FussTask
from separator.benchmarks.model import Prediction
from separator.benchmarks.readout import READOUTS, active_slots, oracles, paper_si_sdr, read_out
from separator.benchmarks.tasks import TEST, TRAIN, Mixtures
from separator.benchmarks.trainer import Progress, Setting, train_models
from separator.metrics import statistic
from separator.training import environment

FOLDER = "data/fuss/ssdata"


def train_paper_fuss(
    task: str,
    method: str,
    *,
    seeds: Sequence[int],
    folder: str = FOLDER,
    epochs: int = 100,
    n_train: int = 20_000,
    n_test: int = 1000,
    batch_size: int = 128,
    learning_rate: float = 3e-4,
    n_samples: int = 16_000,
    n_tokens: int = 16,
    n_slots: int = 5,
    d_model: int = 64,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Train and measure one model for every seed; return one record each.

    Args:
        task: "fuss".
        method: a name of `METHODS` that learns.
        seeds: start, batches and noise of each model.
        folder: of the data, in FUSS layout with the splits train and eval.
        epochs: of the training.
        n_train: mixtures, the first of the split train.
        n_test: mixtures, the first of the split eval.
        batch_size: mixtures.
        learning_rate: of Adam.
        n_samples: of every file, from its beginning.
        n_tokens: chunks.
        n_slots: slots.
        d_model: width.
        options: the mechanism's own.
        progress: is told the share of the work that is done.

    Raises:
        SeparatorError: unknown method or option, or the data does not fit.
    """
    setting = Setting(
        epochs=epochs,
        n_train=n_train,
        n_test=n_test,
        batch_size=batch_size,
        learning_rate=learning_rate,
        n_samples=n_samples,
        n_tokens=n_tokens,
        n_slots=n_slots,
        d_model=d_model,
        options=dict(options or {}),
    )
    kind = FussTask(folder)
    heard, test = (setting.mixtures(kind, n, 0, split) for n, split in ((n_train, TRAIN), (n_test, TEST)))
    shared = {**floor_scores(kind, heard, test), **oracle_scores(test, n_tokens)}
    records = []
    for trained in train_models(kind, method, seeds=seeds, setting=setting, progress=progress):
        prediction = predict(trained.model, test.signals, seed=trained.seed)
        records.append(
            {
                "task": task,
                "method": method,
                "seed": trained.seed,
                **asdict(setting),
                **score(kind, prediction, test),
                **shared,
                "final_loss": round(trained.final_loss, DECIMALS),
                "train_seconds": round(trained.train_seconds, 3),
                **{name: environment()[name] for name in ("torch", "processor")},
            }
        )
    return records


def score(task: FussTask, prediction: Prediction, test: Mixtures) -> dict[str, float | None]:
    """Return overlaps, count accuracy, errors of the parameters and SI-SDR of both readouts."""
    _, attn, exist_logits, params, _ = prediction
    errors = hungarian_errors(params, exist_logits, test)
    found: dict[str, float] = {
        "peak_overlap": metrics.peak_overlap(attn, test.counts),
        "cosine_overlap": metrics.cosine_overlap(attn, test.counts),
        "count_accuracy": metrics.count_accuracy(exist_logits, test.counts),
        **{f"mae_{name}": e for name, e in zip(task.parameter_names, errors.tolist(), strict=True)},
    }
    for readout in READOUTS:
        pairs = [
            paper_si_sdr(read_out(mixture, a[active_slots(logits)], readout), sources, mixture)
            for mixture, a, logits, sources in zip(
                test.signals, attn, exist_logits, test.components, strict=True
            )
        ]
        found |= _means(readout, pairs)
    return plain(found)


def hungarian_errors(params: Tensor, exist_logits: Tensor, test: Mixtures) -> Tensor:
    """Return the mean absolute error [P] of the top-K slots' parameters [B, S, P], matched at least cost."""
    errors, counts = [], test.counts.tolist()
    for given, logits, true, count in zip(params, exist_logits, test.params, counts, strict=True):
        chosen = given[logits.argsort(descending=True)[:count]]
        distances = torch.cdist(chosen, true[:count])
        slots, sources = linear_sum_assignment(distances.numpy())
        errors.append((chosen[slots] - true[:count][sources]).abs())
    return torch.cat(errors).mean(0)


def floor_scores(task: FussTask, heard: Mixtures, test: Mixtures) -> dict[str, float | None]:
    """Return the errors of saying the training sources' mean parameters of every source."""
    exists = torch.arange(heard.params.shape[1]) < heard.counts[:, None]
    mean = heard.params[exists].mean(0)
    known = torch.arange(test.params.shape[1]) < test.counts[:, None]
    errors = (test.params[known] - mean).abs().mean(0)
    return plain(
        {f"floor_mae_{name}": e for name, e in zip(task.parameter_names, errors.tolist(), strict=True)}
    )


def oracle_scores(test: Mixtures, n_tokens: int) -> dict[str, float | None]:
    """Return the SI-SDR of oracle masks on the same mixtures."""
    pairs: dict[str, list[tuple[float, float] | None]] = {}
    for mixture, components, count in zip(test.signals, test.components, test.counts.tolist(), strict=True):
        if count < 2:
            continue
        sources = components[:count]
        for name, estimates in oracles(mixture, sources, n_tokens).items():
            pairs.setdefault(name, []).append(paper_si_sdr(estimates, sources, mixture))
    return plain({k: v for name, found in pairs.items() for k, v in _means(name, found).items()})


def _means(name: str, pairs: Sequence[tuple[float, float] | None]) -> dict[str, float]:
    """Return the mean SI-SDR and improvement of the mixtures that have any."""
    known = [pair for pair in pairs if pair is not None]
    columns = zip(*known, strict=True) if known else ((), ())
    means = [statistic(list(column))["mean"] for column in columns]
    return {
        f"{name}_{part}": float("nan") if mean is None else mean
        for part, mean in zip(("si_sdr", "si_sdri"), means, strict=True)
    }
