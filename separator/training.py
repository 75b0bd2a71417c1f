"""The trainer: from a recipe's tables to weights, resumable to the bit, on one process or many.

The draws of step n depend on ``(seed, n)`` alone, so a run that was killed and resumed ends with the same
weights as one that was not, and processes that share its batches (see `distributed`) train the same network
as one. A batch is made of parts: of each process, and of each of `TrainingConfig.accumulate` passes. Only
batch norms tell passes apart; all else is normalised and drawn for the whole batch.
"""

import dataclasses
import math
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from separator.augmentation import SAMPLE_RATE
from separator.checkpoint import check_model, load_model
from separator.counting import SourceCounter
from separator.distributed import SharedDraws, World, rows_of, share_batch_norms
from separator.losses import Whole
from separator.objectives import Objective, objective_of
from separator.run_folder import (
    TrainingState,
    commit,
    cut_log,
    has_state,
    keep_best,
    load_state,
    log,
    save_state,
    take_weights,
    write_config,
)
from separator.script import duration
from separator.training_data import MIXTURES, batches, read_datasets
from separator.training_recipe import Stage, TrainingConfig, learning_rate_factor

Item = TypeVar("Item")


def train(
    config: TrainingConfig,
    data_directory: Path,
    run_directory: Path,
    world: World | None = None,
    start_from: str | Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> nn.Module:
    """Train to the end of the last stage, from the run folder's state if any; return the averaged network.

    A new run starts from the weights of the model ``start_from`` (name or folder), or from none. All
    processes of ``world`` call this alike; one of them writes, and says a line with each one of the log.

    Raises:
        SeparatorError: ``start_from`` or the run folder is not of this network, or the data are not there.
    """
    world = world or World()
    state = new_state(config, world)
    if start_from is not None:
        weights = _weights_for(state.network, start_from)
        take_weights(state.network, weights, start_from)
        take_weights(state.average, weights, start_from)
    data = MIXTURES[config.data](data_directory)
    datasets = read_datasets(data, config, world)
    mixtures = list(data.validation(config.stages[-1].mixing, config.n_validation))[world.rank :: world.size]
    _open(run_directory, state, config, _circumstances(data_directory, start_from, world), world)
    say = say if world.is_writer else lambda _: None
    say(f"{run_directory}: from step {state.step}")
    if not _is_done(state, config):
        _run(run_directory, state, config, datasets, mixtures, world, say)
    return state.average.eval()


def _open(
    run_directory: Path,
    state: TrainingState,
    config: TrainingConfig,
    circumstances: Mapping[str, Any],
    world: World,
) -> None:
    """Make the run folder, or go on from its state."""
    if world.is_writer:
        run_directory.mkdir(parents=True, exist_ok=True)
    world.wait()
    if has_state(run_directory):
        load_state(state, run_directory)
    world.wait()  # nobody writes while another reads
    if world.is_writer:
        cut_log(run_directory, state.step)
        write_config(run_directory, {**dataclasses.asdict(config), **circumstances}, state.step)


def _run(
    run_directory: Path,
    state: TrainingState,
    config: TrainingConfig,
    datasets: Sequence[Dataset[dict[str, Tensor]]],
    mixtures: Sequence[Tensor],
    world: World,
    say: Callable[[str], None],
) -> None:
    """Take the steps that are left, and log, validate and save at their times."""
    objective = objective_of(config.network)
    trainee = Trainee(state, config, objective, world)
    clock = Clock(state.processor_seconds)
    for stage, parts in clock.waited(batches(datasets, config, state.step)):
        trainee.step(stage, parts)
        if config.minutes is not None:
            state.processor_seconds = clock.processor_seconds(world)
        done = _is_done(state, config)
        if state.step % config.log_every == 0 or done:
            figures = {"step": state.step, "examples": trainee.n_examples}
            record = {**figures, **clock.read(world), **trainee.means()}
            if world.is_writer:
                log(run_directory, record)
            say(_progress(state, config, record))
        if state.step % config.validate_every == 0 or done:
            found = validate(objective, state.average, mixtures, world)
            if world.is_writer:
                log(run_directory, {"step": state.step, "validation": found})
                keep_best(state, next(found[n] for n in objective.best_by if n in found), run_directory)
            say(f"validation {found}")
        if state.step % config.save_every == 0 or done:
            state.processor_seconds = clock.processor_seconds(world)
            if world.is_writer:
                save_state(state, run_directory)
            world.wait()
        if done:
            return


def _circumstances(data_directory: Path, start_from: str | Path | None, world: World) -> dict[str, Any]:
    """What a run depends on beside its settings, see `run_folder.CIRCUMSTANCES`."""
    return {
        "environment": environment(),
        "commit": commit(),
        "processes": world.size,
        "data_folder": str(data_directory),
        "start": None if start_from is None else check_model(start_from)["sha256"],
    }


def _weights_for(network: nn.Module, model: str | Path) -> dict[str, Tensor]:
    """Weights of a model, of its counter or of all but its counter, for a network to start from."""
    weights = load_model(model).state_dict()
    counter = {name: value for name, value in weights.items() if name.startswith("counter.")}
    if isinstance(network, SourceCounter):
        return {name.removeprefix("counter."): value for name, value in counter.items()}
    return {name: value for name, value in weights.items() if name not in counter}


def _is_done(state: TrainingState, config: TrainingConfig) -> bool:
    """Whether a run has come to the end of its steps or minutes."""
    return state.step >= config.steps or state.processor_seconds >= 60 * (config.minutes or math.inf)


def new_state(config: TrainingConfig, world: World | None = None) -> TrainingState:
    """Networks and optimiser before the first step, a function of the seed."""
    world = world or World()
    objective = objective_of(config.network)
    torch.manual_seed(config.seed)
    network, average = objective.build(), objective.build()
    average.load_state_dict(network.state_dict())
    if world.size > 1:
        share_batch_norms(network)
    network, average = network.to(world.device), average.to(world.device)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.98)
    )
    return TrainingState(network, average.eval(), optimizer)


def _progress(state: TrainingState, config: TrainingConfig, record: Mapping[str, Any]) -> str:
    """How far a run is, in a line."""
    left = (config.steps - state.step) * record["seconds_per_step"]
    of = f" of {config.steps}"
    if config.minutes is not None:
        left, of = 60 * config.minutes - state.processor_seconds, ""
    return (
        f"step {state.step}{of}, loss {record['total']:.2f}, {record['seconds_per_step']:.2f} s a step, "
        f"{duration(max(0.0, left))} left"
    )


class Trainee:
    """A network in training: its steps, and the sums that its log tells."""

    def __init__(
        self, state: TrainingState, config: TrainingConfig, objective: Objective, world: World
    ) -> None:
        self._state = state
        self._config = config
        self._objective = objective
        self._world = world
        self._forward: nn.Module = state.network
        if world.size > 1:
            self._forward = DistributedDataParallel(
                state.network, forward_sync_buffers=False, find_unused_parameters=True
            )
        self._terms: list[Tensor] = []
        self._names: tuple[str, ...] = ()
        begin = [0, *(stage.until for stage in config.stages)]
        self.n_examples = sum(
            stage.batch_size * max(0, min(state.step, stage.until) - first)
            for stage, first in zip(config.stages, begin, strict=False)
        )
        """Examples that the network has seen, of all processes."""

    def step(self, stage: Stage, parts: Sequence[Mapping[str, Tensor]]) -> None:
        """Make one update of the network and of its average from this process's parts of a batch."""
        state, config, world = self._state, self._config, self._world
        for group in state.optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate_factor(
                state.step, config, state.processor_seconds / 60
            )
        _train_mode(state.network)
        state.optimizer.zero_grad(set_to_none=True)
        sources = sum(int(part["active"].sum()) for part in parts)
        whole = Whole(stage.batch_size, max(1, round(world.total([sources])[0])))
        n_parts = world.size * len(parts)
        terms = []
        for index, part in enumerate(parts):
            place = world.rank * len(parts) + index
            torch.manual_seed(config.seed * 1_000_003 + state.step)
            with self._unshared(index + 1 < len(parts)), _draws(stage.batch_size, place, n_parts):
                terms.append(self._backward(stage, part, whole))
        norm = torch.nn.utils.clip_grad_norm_(state.network.parameters(), config.gradient_clip)
        if torch.isfinite(norm):
            state.optimizer.step()
        state.step += 1
        self.n_examples += stage.batch_size
        self._terms.append(torch.stack(terms).sum(0))
        _average(state.average, state.network, min(config.averaging, state.step / (state.step + 10)))

    def means(self) -> dict[str, float]:
        """Return the means of the loss terms since the last call; all processes call it."""
        means = torch.stack(self._terms).mean(0).tolist()
        self._terms = []
        return dict(zip(self._names, self._world.total(means), strict=True))

    def _backward(self, stage: Stage, part: Mapping[str, Tensor], whole: Whole) -> Tensor:
        """Add the gradients of a part; return its loss terms."""
        device = self._world.device
        batch = {name: values.to(device, non_blocking=True) for name, values in part.items()}
        with torch.autocast(device.type, torch.bfloat16, enabled=self._config.bfloat16):
            terms = self._objective.loss(self._forward, batch, stage.loss, whole, stage.n_refine)
        (terms.total * self._world.size).backward()  # the processes' gradients are averaged
        self._names = terms._fields
        return torch.stack([term.detach() for term in terms])

    def _unshared(self, more: bool) -> AbstractContextManager[Any]:
        """Leave gradients unshared while more of the batch is to come."""
        if more and isinstance(self._forward, DistributedDataParallel):
            return self._forward.no_sync()
        return nullcontext()


def _draws(batch_size: int, place: int, n_parts: int) -> AbstractContextManager[Any]:
    """Draw for one of the parts of a batch what the whole would draw."""
    return nullcontext() if n_parts == 1 else SharedDraws(rows_of(batch_size, place, n_parts), batch_size)


def _train_mode(network: nn.Module) -> None:
    """Switch to training, but drop nothing out: the only part that does is fitted afresh by `calibration`."""
    for part in network.train().modules():
        if isinstance(part, nn.Dropout):
            part.eval()


@torch.no_grad()
def _average(average: nn.Module, network: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the network's; what is counted is copied."""
    values = network.state_dict().values()
    for mean, value in zip(average.state_dict().values(), values, strict=True):
        if mean.dtype.is_floating_point:
            mean.lerp_(value, 1 - decay)
        else:
            mean.copy_(value)


class Clock:
    """Times of a run: seconds a step, the share spent waiting for data, and processor minutes."""

    def __init__(self, before: float) -> None:
        """Take the processor seconds that the run has cost before it was resumed."""
        self._before = before
        self._at_start = _processor_seconds()
        self._marked = time.monotonic()
        self._waiting = 0.0
        self._steps = 0

    def waited(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield ``items`` and count what waiting for them takes."""
        source = iter(items)
        while True:
            started = time.monotonic()
            try:
                item = next(source)
            except StopIteration:
                return
            self._waiting += time.monotonic() - started
            self._steps += 1
            yield item

    def read(self, world: World) -> dict[str, float]:
        """Return the figures since the last call; all processes call it."""
        now = time.monotonic()
        passed = now - self._marked
        figures = {
            "seconds_per_step": round(passed / max(1, self._steps), 4),
            "waiting_share": round(self._waiting / max(passed, 1e-9), 4),
            "processor_minutes": round(self.processor_seconds(world) / 60, 3),
        }
        self._marked, self._waiting, self._steps = now, 0.0, 0
        return figures

    def processor_seconds(self, world: World) -> float:
        """Return what the run has cost, of all processes; those that only draw data are left out."""
        return self._before + world.total([_processor_seconds() - self._at_start])[0]


def _processor_seconds() -> float:
    """Processor time of this process."""
    return time.process_time()


@torch.no_grad()
def validate(
    objective: Objective, network: nn.Module, mixtures: Iterable[Tensor], world: World | None = None
) -> dict[str, float]:
    """Return the mean of every score of ``mixtures``, this process's, given as their sources [K, time]."""
    world = world or World()
    rows: list[dict[str, list[float]]] = []
    network.eval()
    for sources in mixtures:
        torch.manual_seed(0)
        rows.append(objective.scores(network, sources.to(world.device)))
    scores: dict[str, list[float]] = {}
    for row in world.gather(rows):
        for name, values in row.items():
            scores.setdefault(name, []).extend(values)
    return {name: round(float(np.mean(values)), 3) for name, values in sorted(scores.items())}


def mean_weights(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Mean of networks' state dicts; what is counted, not weighed, is the last one's.

    Checkpoints of one run lie in one basin, and their mean is often better than each (Wortsman et al., "Model
    soups", 2022).
    """
    return {
        name: torch.stack([state[name] for state in states]).mean(0)
        if last.dtype.is_floating_point
        else last.clone()
        for name, last in states[-1].items()
    }


def environment() -> dict[str, Any]:
    """What the numbers of a run depend on besides its settings."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "sample_rate": SAMPLE_RATE,
    }


def _processor() -> str:
    """Model name of the processor, as Linux gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
