"""One trainer for every method: the seeds of a table cell are trained as one, or one after another.

Adam with cosine annealing over the epochs and gradients clipped at norm 1, as the paper has it. The data is
drawn once, read into features once, and kept in memory.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from separator.benchmarks.blas import one_blas_thread
from separator.benchmarks.evaluation import DECIMALS, EVALUATIONS, check_evaluations, measure, score
from separator.benchmarks.losses import LossWeights, training_loss
from separator.benchmarks.methods import method_of
from separator.benchmarks.model import BenchmarkModel, Prediction, build_model
from separator.benchmarks.pursuit import pursue
from separator.benchmarks.stacked import StackedRun, is_stackable
from separator.benchmarks.tasks import TEST, TRAIN, Mixtures, Source, Task, task_of
from separator.errors import SeparatorError
from separator.training import environment

GRADIENT_NORM = 1.0
# A seed gives the training data and the start of the model; the other draws are kept apart from these.
NOISE_OFFSET = 20_000
BATCH_OFFSET = 30_000

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Setting:
    """The budget and the sizes of a run; the defaults are the paper's.

    Attributes:
        amp_ratio: dominant over quiet amplitudes, see `draw_mixtures`.
        options: the mechanism's own options, such as gamma and tau.
        dynamics_every: epochs between measurements on the test mixtures; None measures at the end only.
    """

    epochs: int = 200
    n_train: int = 5000
    n_test: int = 1000
    batch_size: int = 128
    learning_rate: float = 3e-4
    n_samples: int = 256
    n_tokens: int = 16
    n_slots: int = 5
    d_model: int = 64
    max_sources: int = 4
    amp_ratio: float | None = None
    options: dict[str, Any] = field(default_factory=dict)
    dynamics_every: int | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "n_train", "n_test", "batch_size", "dynamics_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SeparatorError(f"{name}={value} is not positive; pass at least 1")
        if self.n_train < self.batch_size:
            raise SeparatorError(
                f"n_train={self.n_train} is less than batch_size={self.batch_size}: there is no whole batch; "
                "pass more mixtures"
            )

    def mixtures(self, task: Source, n: int, seed: int, split: str) -> Mixtures:
        """Return n mixtures of this setting, of the split `TRAIN` or `TEST`."""
        return task.mixtures(
            n,
            seed=seed,
            split=split,
            n_samples=self.n_samples,
            max_sources=self.max_sources,
            amp_ratio=self.amp_ratio,
        )

    def model(self, task: Source, method: str, seed: int) -> BenchmarkModel:
        """Build a model of this setting; the seed gives its start."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_model(
                method,
                task.n_params,
                self.n_samples,
                self.d_model,
                self.n_tokens,
                self.n_slots,
                task.tokenizer_type,
                **self.options,
            )


@dataclass(frozen=True)
class TrainedModel:
    """A trained model and how its training went."""

    model: BenchmarkModel
    seed: int
    final_loss: float  # mean over the last epoch
    train_seconds: float  # of this seed: those trained as one share their time, and its compiling, equally
    dynamics: list[dict[str, Any]]  # the metrics by epoch


class Run(Protocol):
    """Models of some seeds in training."""

    leaves: list[nn.Parameter]

    def predict(self, features: Tensor) -> Prediction:
        """Decompose features [R, B, L, F]; every output begins with [R, B]."""

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradient of each seed to a norm of at most `max_norm`."""

    def models(self) -> list[BenchmarkModel]:
        """Return the models as they are now."""


class SingleRun:
    """One model of any mechanism."""

    def __init__(self, model: BenchmarkModel) -> None:
        self._model = model
        self.leaves = list(model.parameters())

    def predict(self, features: Tensor) -> Prediction:
        """Decompose features [1, B, L, F]; every output begins with [1, B]."""
        slots, attn, exist_logits, params, _ = self._model.train().decompose(features.squeeze(0))
        return Prediction(slots[None], attn[None], exist_logits[None], params[None], None)

    def clip_gradients(self, max_norm: float) -> None:
        """Scale the gradient to a norm of at most `max_norm`."""
        nn.utils.clip_grad_norm_(self.leaves, max_norm)

    def models(self) -> list[BenchmarkModel]:
        """Return the model."""
        return [self._model]


def train_synthetic(
    task: str,
    method: str,
    *,
    seeds: Sequence[int],
    evaluations: Sequence[str] = (),
    progress: Progress | None = None,
    **setting: Any,
) -> list[dict[str, Any]]:
    """Train and measure one model for every seed, and return one record each, ready for JSON.

    Args:
        task: a name of `TASKS`.
        method: a name of `METHODS`.
        seeds: data (test: seed + 10,000), start and noise of each model.
        evaluations: names of `EVALUATIONS` to be measured as well.
        progress: is told the share of the work that is done.
        setting: fields of `Setting`, such as epochs=200.

    Raises:
        SeparatorError: unknown task, method, option, setting or evaluation, or sizes that do not fit.
    """
    known = [f.name for f in fields(Setting)]
    unknown = sorted(set(setting) - set(known))
    if unknown:
        raise SeparatorError(f"unknown setting {', '.join(unknown)}; choose of {', '.join(known)}")
    chosen, kind = Setting(**setting), task_of(task)
    if method_of(method).mechanism is None:
        return [_pursuit_record(kind, method, seed, chosen, evaluations) for seed in _checked(seeds)]
    check_evaluations(evaluations, chosen.model(kind, method, seed=0))
    records = []
    for trained in train_models(task, method, seeds=seeds, setting=chosen, progress=progress):
        seed, model = trained.seed, trained.model
        test = chosen.mixtures(kind, chosen.n_test, seed, TEST)
        found = measure(model, kind, test, seed)
        for name in evaluations:
            found |= EVALUATIONS[name].measure(model, kind, test, seed)
        outcome = {"final_loss": round(trained.final_loss, DECIMALS), "dynamics": trained.dynamics}
        records.append(_record(kind, method, seed, chosen, {**found, **outcome}, trained.train_seconds))
    return records


def _pursuit_record(
    task: Task, method: str, seed: int, setting: Setting, evaluations: Sequence[str]
) -> dict[str, Any]:
    if evaluations or setting.options:
        received = f"evaluations={list(evaluations)} and options={setting.options}"
        raise SeparatorError(f"{received} do not apply to {method!r}, which has no model; leave them out")
    test = setting.mixtures(task, setting.n_test, seed, TEST)
    found = score(pursue(task, test, setting.n_slots, setting.n_tokens), task, test)
    return _record(task, method, seed, setting, {**found, "count_accuracy": None}, 0.0)


def _record(
    task: Task, method: str, seed: int, setting: Setting, found: dict[str, Any], train_seconds: float
) -> dict[str, Any]:
    identity = {"task": task.name, "method": method, "seed": seed, **asdict(setting)}
    where = {name: environment()[name] for name in ("torch", "processor")}
    return {**identity, **found, "train_seconds": round(train_seconds, 3), **where}


def train_models(
    task: str | Source,
    method: str,
    *,
    seeds: Sequence[int],
    setting: Setting | None = None,
    progress: Progress | None = None,
    together: bool = True,
) -> list[TrainedModel]:
    """Train one model of `method` on `task` for every seed, which sets data, start and noise.

    With `together` the seeds are trained as one where the mechanism allows it, else one after another; the
    statistics are the same. `progress` is told the share of the work that is done.

    Raises:
        SeparatorError: unknown task, method or option, or sizes that do not fit.
    """
    setting = Setting() if setting is None else setting
    chosen = task_of(task) if isinstance(task, str) else task
    weights = method_of(method).weights
    models = [setting.model(chosen, method, seed) for seed in _checked(seeds)]
    if together and is_stackable(models[0]):
        generators = [torch.Generator().manual_seed(seed + NOISE_OFFSET) for seed in seeds]
        groups: list[tuple[Run, Sequence[int]]] = [(StackedRun(models, generators), seeds)]
    else:
        groups = [(SingleRun(model), [seed]) for model, seed in zip(models, seeds, strict=True)]
    trained: list[TrainedModel] = []
    for index, (run, group) in enumerate(groups):
        share = _part_of(progress, index, len(groups))
        with torch.random.fork_rng(devices=[]), one_blas_thread:
            torch.manual_seed(group[0] + NOISE_OFFSET)
            trained += _fit(run, group, chosen, setting, weights, share)
    return trained


def _fit(
    run: Run, seeds: Sequence[int], task: Source, setting: Setting, weights: LossWeights, progress: Progress
) -> list[TrainedModel]:
    features, params, counts = _training_data(run.models(), seeds, task, setting)
    shuffles = [torch.Generator().manual_seed(seed + BATCH_OFFSET) for seed in seeds]
    rows = torch.arange(len(seeds)).unsqueeze(1)
    optimizer = torch.optim.Adam(run.leaves, lr=setting.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setting.epochs)
    n_steps = setting.n_train // setting.batch_size
    dynamics: list[list[dict[str, Any]]] = [[] for _ in seeds]
    seconds = 0.0
    for epoch in range(1, setting.epochs + 1):
        started = time.perf_counter()
        order = torch.stack([torch.randperm(setting.n_train, generator=g) for g in shuffles])
        total = torch.zeros(len(seeds))
        for batch in order.split(setting.batch_size, 1)[:n_steps]:
            slots, attn, exist_logits, predicted, _ = run.predict(features[rows, batch])
            truth = params[rows, batch], counts[rows, batch]
            loss = training_loss(slots, attn, exist_logits, predicted, *truth, weights)
            optimizer.zero_grad()
            loss.sum().backward()
            run.clip_gradients(GRADIENT_NORM)
            optimizer.step()
            total += loss.detach()
        schedule.step()
        seconds += time.perf_counter() - started
        if setting.dynamics_every is not None and epoch % setting.dynamics_every == 0:
            for log, model, seed in zip(dynamics, run.models(), seeds, strict=True):
                test = setting.mixtures(task, setting.n_test, seed, TEST)
                log.append({"epoch": epoch, **measure(model, task, test, seed)})
        progress(epoch / setting.epochs)
    losses = (total / n_steps).tolist()
    results = zip(run.models(), seeds, losses, dynamics, strict=True)
    return [TrainedModel(m.eval(), s, loss, seconds / len(seeds), log) for m, s, loss, log in results]


def _training_data(
    models: Sequence[BenchmarkModel], seeds: Sequence[int], task: Source, setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features [R, n, L, F], parameters [R, n, K, P] and counts [R, n] of each seed."""
    drawn = [setting.mixtures(task, setting.n_train, seed, TRAIN) for seed in seeds]
    read = models[0].tokenizer.features
    return (
        torch.stack([read(mixtures.signals) for mixtures in drawn]),
        torch.stack([mixtures.params for mixtures in drawn]),
        torch.stack([mixtures.counts for mixtures in drawn]),
    )


def _checked(seeds: Sequence[int]) -> Sequence[int]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise SeparatorError(f"{seeds=} are not different seeds; pass at least one, none of them twice")
    return seeds


def _part_of(progress: Progress | None, index: int, n_parts: int) -> Progress:
    """Return what tells `progress` the share of the whole from the share of one of its equal parts."""
    return lambda share: None if progress is None else progress((index + share) / n_parts)
