"""The trainer: from a recipe's table to weights, resumable to the bit.

A run folder holds ``config.json`` (resolved recipe, seed, environment), ``log.jsonl`` (one line every
`TrainingConfig.log_every` steps), ``state-N.safetensors`` (weights, their average, optimiser after step N)
and ``state.json``, which names the newest whole one. The draws of step n depend on ``(seed, n)`` alone, so
a run that was killed and resumed ends with the same weights as one that was not.
"""

import dataclasses
import json
import os
import platform
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader

from separator.datasets import SAMPLE_RATE, Bank, MixingConfig, MixtureDataset, draw_mixture
from separator.errors import SeparatorError
from separator.losses import LossConfig, LossTerms, best_assignment, pairwise_si_sdr, separation_loss
from separator.network import NetworkConfig, SeparationNetwork
from separator.stft import STFT

MIXTURE_SECONDS = 10.0  # of what is validated and calibrated on


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum: until which step, on what mixtures, with what loss."""

    until: int
    batch_size: int
    mixing: MixingConfig
    loss: LossConfig
    n_refine: int | None = None
    """Refinements of the slots (None: the network's own number)."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Stage":
        """Build from a table ``{until, batch_size, n_refine, mixing = {...}, loss = {...}}``.

        Raises:
            SeparatorError: a key is unknown.
        """
        for kind, part in ((cls, values), (LossConfig, values.get("loss", {}))):
            known = {field.name for field in dataclasses.fields(kind)}
            if unknown := sorted(set(part) - known):
                raise SeparatorError(f"unknown setting {unknown} of a stage; known are {sorted(known)}")
        return cls(
            values["until"],
            values["batch_size"],
            mixing_config(values.get("mixing", {})),
            LossConfig(**values.get("loss", {})),
            values.get("n_refine"),
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Optimiser, budget and bookkeeping of a run; the last stage's ``until`` is the number of steps."""

    stages: tuple[Stage, ...]
    network: NetworkConfig
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 300
    decay_steps: int = 2000
    gradient_clip: float = 5.0
    averaging: float = 0.998
    """Decay of the exponential average of the weights, the model that is evaluated and shipped."""
    bfloat16: bool = True
    workers: int = 1
    log_every: int = 50
    save_every: int = 300
    validate_every: int = 1000
    n_validation: int = 48

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingConfig":
        """Build from a recipe's tables ``network``, ``stages`` and ``training``.

        Raises:
            SeparatorError: there is no stage, or a key is unknown.
        """
        if not values.get("stages"):
            raise SeparatorError(f"the recipe has no [[stages]]; its tables are {sorted(values)}")
        network = NetworkConfig.from_dict(values.get("network", {}))
        stages = tuple(Stage.from_dict(stage) for stage in values["stages"])
        known = {field.name for field in dataclasses.fields(cls)} - {"stages", "network"}
        unknown = sorted(set(values.get("training", {})) - known)
        if unknown:
            raise SeparatorError(f"unknown training setting {unknown}; known are {sorted(known)}")
        return cls(stages, network, **values.get("training", {}))

    @property
    def steps(self) -> int:
        """Length of the run."""
        return self.stages[-1].until


@dataclass
class TrainingState:
    """What changes from step to step."""

    network: SeparationNetwork
    average: SeparationNetwork
    optimizer: torch.optim.AdamW
    step: int = 0


def mixing_config(values: Mapping[str, Any]) -> MixingConfig:
    """Build from plain values such as a TOML table.

    Raises:
        SeparatorError: a key is unknown.
    """
    known = {field.name for field in dataclasses.fields(MixingConfig)}
    if unknown := sorted(set(values) - known):
        raise SeparatorError(f"unknown setting {unknown} of a stage's mixing; known are {sorted(known)}")
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    return MixingConfig(**plain)


def read_recipe(path: Path, mechanism: str | None = None) -> tuple[str, dict[str, Any]]:
    """Name and tables of a recipe's TOML file; ``mechanism`` replaces the recipe's and joins the name."""
    recipe = tomllib.loads(path.read_text())
    if mechanism is None:
        return path.stem, recipe
    network = {**recipe.get("network", {}), "mechanism": mechanism}
    return f"{path.stem}_{mechanism}", {**recipe, "network": network}


def train(config: TrainingConfig, bank_directory: Path, run_directory: Path) -> SeparationNetwork:
    """Train to the end of the last stage, from the run folder's state if any; return the averaged network."""
    run_directory.mkdir(parents=True, exist_ok=True)
    state = new_state(config)
    if (run_directory / "state.json").is_file():
        load_state(state, run_directory)
        _cut_log(run_directory, state.step)
    else:
        resolved = {**dataclasses.asdict(config), "environment": environment()}
        _write_json(run_directory / "config.json", resolved)
    stft = STFT(config.network.n_fft, config.network.hop_length)
    bank = Bank(bank_directory, "train")
    unheard = Bank(bank_directory, "validation")
    validation = list(fixed_mixtures(unheard, config.stages[-1].mixing, config.n_validation))
    window: list[LossTerms] = []
    started, first = time.monotonic(), state.step
    for stage, batch in batches(bank, config, state.step):
        window.append(train_step(state, config, stage, stft, batch))
        if state.step % config.log_every == 0 or state.step == config.steps:
            means = torch.tensor([list(map(float, terms)) for terms in window]).mean(0).tolist()
            record = dict(zip(LossTerms._fields, means, strict=True))
            seconds = (time.monotonic() - started) / (state.step - first)
            _log(run_directory, {"step": state.step, "seconds_per_step": round(seconds, 4), **record})
            window = []
        if state.step % config.validate_every == 0 or state.step == config.steps:
            _log(run_directory, {"step": state.step, "validation": validate(state.average, stft, validation)})
        if state.step % config.save_every == 0 or state.step == config.steps:
            save_state(state, run_directory)
    return state.average.eval()


def new_state(config: TrainingConfig) -> TrainingState:
    """Networks and optimiser before the first step, a function of the seed."""
    torch.manual_seed(config.seed)
    network = SeparationNetwork(config.network).to(memory_format=torch.channels_last)
    average = SeparationNetwork(config.network)
    average.load_state_dict(network.state_dict())
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.98)
    )
    return TrainingState(network, average.eval(), optimizer)


def batches(bank: Bank, config: TrainingConfig, start: int) -> Iterator[tuple[Stage, dict[str, Tensor]]]:
    """Batches of the steps from ``start`` on, drawn ahead in a second process."""
    begin = 0
    for stage in config.stages:
        steps = range(max(start, begin), stage.until)
        begin = stage.until
        dataset = MixtureDataset(
            bank, stage.mixing, batch_size=stage.batch_size, n_batches=stage.until, seed=config.seed
        )
        loader = DataLoader(
            dataset,
            batch_size=None,
            sampler=steps,
            num_workers=config.workers,
            prefetch_factor=8 if config.workers else None,
        )
        for batch in loader if len(steps) else ():
            yield stage, batch


def train_step(
    state: TrainingState, config: TrainingConfig, stage: Stage, stft: STFT, batch: Mapping[str, Tensor]
) -> LossTerms:
    """One update of the network and of its average."""
    torch.manual_seed(config.seed * 1_000_003 + state.step)
    for group in state.optimizer.param_groups:
        group["lr"] = config.learning_rate * learning_rate_factor(state.step, config)
    network = state.network.train()
    mixture, sources = stft(batch["mixture"]), stft(batch["sources"])
    with torch.autocast("cpu", torch.bfloat16, enabled=config.bfloat16):
        decomposition = network(mixture, n_refine=stage.n_refine, sources=sources)
    terms = separation_loss(decomposition, mixture, sources, batch["active"], stage.loss)
    state.optimizer.zero_grad(set_to_none=True)
    terms.total.backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), config.gradient_clip)
    if torch.isfinite(norm):
        state.optimizer.step()
    state.step += 1
    decay = min(config.averaging, state.step / (state.step + 10))
    with torch.no_grad():
        values = network.state_dict().values()
        for mean, value in zip(state.average.state_dict().values(), values, strict=True):
            if mean.dtype.is_floating_point:
                mean.lerp_(value, 1 - decay)
            else:
                mean.copy_(value)
    return LossTerms(*(term.detach() for term in terms))


def learning_rate_factor(step: int, config: TrainingConfig) -> float:
    """Warm-up, plateau, linear decay to zero over the last `TrainingConfig.decay_steps`."""
    return min(1.0, (step + 1) / config.warmup_steps, (config.steps - step) / config.decay_steps)


def fixed_mixtures(bank: Bank, mixing: MixingConfig, n: int) -> Iterator[Tensor]:
    """Yield the sources [K, time] of n mixtures of 10 s, of 1, 2, ... in turn; every call draws the same."""
    n_counts = len(mixing.counts)
    for index in range(n):
        counts = tuple(float(k == index % n_counts) for k in range(n_counts))
        drawn = dataclasses.replace(mixing, counts=counts, seconds=MIXTURE_SECONDS)
        sources, _ = draw_mixture(bank, drawn, np.random.default_rng([index, 1]))
        yield torch.from_numpy(sources[: index % n_counts + 1])


def validate(network: SeparationNetwork, stft: STFT, mixtures: Iterable[Tensor]) -> dict[str, float]:
    """Mean SI-SDR (1 source) or its improvement (more), known count, dB, and the share of right counts.

    ``mixtures`` are given as their sources [K, time].
    """
    scores: dict[int, list[float]] = {}
    right = []
    network.eval()
    with torch.no_grad():
        for sources in mixtures:
            count = len(sources)
            torch.manual_seed(0)
            spectrogram, mixture = stft(sources)[None], stft(sources.sum(0))[None]
            out = network(mixture)
            quality = pairwise_si_sdr(out.masks, mixture, spectrogram)
            slots = best_assignment(-quality, torch.ones(1, count, dtype=torch.bool))
            whole = pairwise_si_sdr(torch.ones_like(out.masks[:, :1]), mixture, spectrogram)[0, 0]
            gain = quality.gather(1, slots[:, None])[0, 0] - (whole if count > 1 else 0)
            scores.setdefault(count, []).extend(gain.tolist())
            right.append(float((out.existence_logits > 0).sum() == count))
    means = {f"si_sdri_{k}": round(float(np.mean(v)), 2) for k, v in sorted(scores.items())}
    return {**means, "count": round(float(np.mean(right)), 3)}


def save_state(state: TrainingState, directory: Path) -> None:
    """Write the state so that a kill at any moment leaves a whole one."""
    tensors = {f"network.{k}": v.contiguous() for k, v in state.network.state_dict().items()}
    tensors |= {f"average.{k}": v.contiguous() for k, v in state.average.state_dict().items()}
    names = {p: name for name, p in state.network.named_parameters()}
    for parameter, name in names.items():
        values = state.optimizer.state[parameter]
        tensors |= {f"optimizer.{name}.{k}": v.contiguous() for k, v in values.items()}
    temporary = directory / f"state-{state.step}.safetensors"
    save_file(tensors, temporary)
    _write_json(directory / "state.json", {"step": state.step, "file": temporary.name})
    for old in directory.glob("state-*.safetensors"):
        if old != temporary:
            old.unlink()


def load_state(state: TrainingState, directory: Path) -> None:
    """Continue from what `save_state` wrote."""
    saved = json.loads((directory / "state.json").read_text())
    tensors = load_file(directory / saved["file"])

    def part(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    state.network.load_state_dict(part("network."))
    state.average.load_state_dict(part("average."))
    for name, parameter in state.network.named_parameters():
        values = part(f"optimizer.{name}.")
        if values:
            state.optimizer.state[parameter] = values
    state.step = saved["step"]


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


def _log(directory: Path, record: dict[str, Any]) -> None:
    with (directory / "log.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def _cut_log(directory: Path, step: int) -> None:
    """Drop what was logged after ``step``: those steps are taken again."""
    log = directory / "log.jsonl"
    if log.is_file():
        kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= step]
        temporary = log.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, log)


def _write_json(path: Path, values: Any) -> None:
    """Write whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1))
    os.replace(temporary, path)
