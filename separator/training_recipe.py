"""What a training recipe says: network, stages of the curriculum, optimiser, budget and bookkeeping."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from separator.augmentation import SAMPLE_RATE
from separator.counting import CounterConfig
from separator.datasets import MixingConfig
from separator.errors import SeparatorError
from separator.fuss_mixing import RemixConfig
from separator.losses import LossConfig
from separator.network import NetworkConfig
from separator.objectives import AnyNetworkConfig, network_config
from separator.script import counted
from separator.settings import check_given, check_known, check_settings, settings_from

MIXING: dict[str, type[MixingConfig] | type[RemixConfig]] = {"soundscapes": MixingConfig, "fuss": RemixConfig}

TABLES = ("data", "network", "training", "stages", "calibration")


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum: until which step, on what mixtures, with what loss."""

    AT_LEAST: ClassVar[dict[str, float]] = {"until": 1, "batch_size": 1, "n_refine": 0}

    until: int
    batch_size: int
    mixing: MixingConfig | RemixConfig
    loss: LossConfig
    n_refine: int | None = None
    """Refinements of the slots (None: the network's own number)."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], data: str = "soundscapes") -> "Stage":
        """Build from a table ``{until, batch_size, n_refine, mixing = {...}, loss = {...}}``.

        ``data`` names what ``mixing`` is about.

        Raises:
            SeparatorError: a key is unknown or missing.
        """
        check_settings(cls, values, "stage")
        check_given(values, ["until", "batch_size"], "stage")
        for key in {"until", "batch_size", "n_refine"} & set(values):
            if type(values[key]) is not int:
                raise SeparatorError(f"stage setting {key} = {values[key]!r} is no whole number")
        return cls(
            values["until"],
            values["batch_size"],
            mixing_config(values.get("mixing", {}), data),
            settings_from(LossConfig, values.get("loss", {}), "loss"),
            values.get("n_refine"),
        )


@dataclass(frozen=True)
class TrainingConfig:
    """Optimiser, budget and bookkeeping of a run; the last stage's ``until`` is the number of steps."""

    AT_LEAST: ClassVar[dict[str, float]] = {
        **dict.fromkeys(("seed", "learning_rate", "weight_decay", "averaging", "workers"), 0),
        **dict.fromkeys(("warmup_steps", "decay_steps", "accumulate", "n_validation"), 1),
        **dict.fromkeys(("log_every", "save_every", "validate_every"), 1),
        **dict.fromkeys(("gradient_clip", "minutes", "decay_minutes"), 1e-6),
    }
    AT_MOST: ClassVar[dict[str, float]] = {"averaging": 1}

    stages: tuple[Stage, ...]
    network: AnyNetworkConfig
    data: str = "soundscapes"
    """Kind of the mixtures, a key of `MIXING`."""
    seed: int = 0
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    warmup_steps: int = 300
    decay_steps: int = 2000
    gradient_clip: float = 5.0
    averaging: float = 0.998
    """Decay of the exponential average of the weights, the model that is evaluated and shipped."""
    bfloat16: bool = True
    accumulate: int = 1
    """Passes of a process that a batch is spread over, to save memory."""
    minutes: float | None = None
    """Processor minutes after which training ends, whatever the stages say; None: no limit."""
    decay_minutes: float = 15.0
    """Before that end the learning rate falls for so long, instead of for `decay_steps`."""
    workers: int = 1
    log_every: int = 50
    save_every: int = 300
    validate_every: int = 1000
    n_validation: int = 48

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainingConfig":
        """Build from a recipe's ``data`` and its tables ``network``, ``stages`` and ``training``.

        Raises:
            SeparatorError: there is no stage, a name or key is unknown, or a value cannot be.
        """
        check_known(values, TABLES, "recipe")
        data = values.get("data", "soundscapes")
        if data not in list(MIXING):
            raise SeparatorError(f"unknown {data=}; choose {' or '.join(MIXING)}")
        stages = values.get("stages")
        if not isinstance(stages, list) or not stages:
            raise SeparatorError(f"the recipe has no list of [[stages]]; its tables are {sorted(values)}")
        network = network_config(values.get("network", {}))
        read = tuple(Stage.from_dict(stage, data) for stage in stages)
        ends = [stage.until for stage in read]
        if sorted(set(ends)) != ends:
            raise SeparatorError(f"the stages end at steps {ends}; each must end after the one before")
        if network.sample_rate != SAMPLE_RATE:
            raise SeparatorError(
                f"network setting sample_rate = {network.sample_rate}; the mixtures have {SAMPLE_RATE}"
            )
        if isinstance(network, NetworkConfig) and network.counter is not None:
            raise SeparatorError(
                "network setting counter: a counter is trained by a recipe of its own, kind = 'counter'"
            )
        if isinstance(network, CounterConfig) and any({"loss", "n_refine"} & set(stage) for stage in stages):
            raise SeparatorError("stage settings loss and n_refine do nothing for a counter; leave them out")
        most = max(stage.mixing.max_sources for stage in read)
        if not isinstance(network, CounterConfig) and most > (n_slots := network.n_slots):
            raise SeparatorError(
                f"mixtures of up to {counted(most, 'source')}, but {n_slots=}; give the network more"
            )
        check_settings(cls, values.get("training", {}), "training", but=["stages", "network", "data"])
        return cls(read, network, data, **values.get("training", {}))

    @property
    def steps(self) -> int:
        """Length of the run."""
        return self.stages[-1].until


def mixing_config(values: Mapping[str, Any], data: str = "soundscapes") -> MixingConfig | RemixConfig:
    """Build from plain values such as a TOML table.

    Raises:
        SeparatorError: a key is unknown, or a value cannot be.
    """
    config = settings_from(MIXING[data], values, "mixing")
    if isinstance(config, MixingConfig) and abs(sum(config.counts) - 1) > 1e-6:
        raise SeparatorError(f"mixing setting counts = {list(config.counts)} do not sum to one")
    if isinstance(config, MixingConfig) and config.shortest_seconds > config.seconds:
        raise SeparatorError(
            f"mixing setting shortest_seconds = {config.shortest_seconds}; pass at most {config.seconds=}"
        )
    return config


def read_recipe(path: Path, mechanism: str | None = None) -> tuple[str, dict[str, Any]]:
    """Name and tables of a recipe's TOML file; ``mechanism`` replaces the recipe's and joins the name.

    Raises:
        SeparatorError: there is no such file, or it is no TOML.
    """
    try:
        recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SeparatorError(f"{path} cannot be read as a recipe ({error}); pass a TOML file") from error
    if mechanism is None:
        return path.stem, recipe
    network = {**recipe.get("network", {}), "mechanism": mechanism}
    return f"{path.stem}_{mechanism}", {**recipe, "network": network}


def learning_rate_factor(step: int, config: TrainingConfig, minutes: float = 0.0) -> float:
    """Warm-up, plateau, linear decay to zero at the end of the steps, or of `TrainingConfig.minutes`.

    ``minutes`` is the processor time that the run has cost so far.
    """
    left = (config.steps - step) / config.decay_steps
    if config.minutes is not None:
        left = max(0.0, config.minutes - minutes) / config.decay_minutes
    return min(1.0, (step + 1) / config.warmup_steps, left)
