"""The folder of a training run: what it was, its log, and states from which it goes on after a kill.

``config.json`` (resolved recipe, commit, environment), ``log.jsonl``, ``state-N.safetensors`` (weights, their
average, optimiser after step N), ``state.json``, which names the newest whole one, and ``best.safetensors``
with ``best.json``: the averaged weights of the best score in validation.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from separator.errors import SeparatorError

MAX_REASON = 120  # characters
CIRCUMSTANCES = ("environment", "commit", "processes", "data_folder", "start")  # that may change on the way


@dataclass
class TrainingState:
    """What changes from step to step."""

    network: nn.Module
    average: nn.Module
    optimizer: torch.optim.AdamW
    step: int = 0
    processor_seconds: float = 0.0
    """What the run has cost so far."""


def save_state(state: TrainingState, directory: Path) -> None:
    """Write the state so that a kill at any moment leaves a whole one."""
    tensors = {f"network.{k}": v.contiguous() for k, v in state.network.state_dict().items()}
    tensors |= {f"average.{k}": v.contiguous() for k, v in state.average.state_dict().items()}
    for name, parameter in state.network.named_parameters():
        values = state.optimizer.state[parameter]
        tensors |= {f"optimizer.{name}.{k}": v.contiguous() for k, v in values.items()}
    file = directory / f"state-{state.step}.safetensors"
    save_file(tensors, file)
    write_json(
        directory / "state.json",
        {"step": state.step, "file": file.name, "processor_seconds": state.processor_seconds},
    )
    for old in directory.glob("state-*.safetensors"):
        if old != file:
            old.unlink()


def has_state(directory: Path) -> bool:
    """Tell whether a run in this folder has got as far as a state."""
    return (directory / "state.json").is_file()


def load_state(state: TrainingState, directory: Path) -> None:
    """Continue from what `save_state` wrote.

    Raises:
        SeparatorError: nothing was written, or not of this network.
    """
    if not has_state(directory):
        raise SeparatorError(f"no state.json in {directory}; train until the first state is saved")
    saved = json.loads((directory / "state.json").read_text())
    tensors = _read(directory / saved["file"])

    def part(prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

    take_weights(state.network, part("network."), directory)
    take_weights(state.average, part("average."), directory)
    for name, parameter in state.network.named_parameters():
        values = part(f"optimizer.{name}.")
        if values:
            moments = {k: v.to(parameter.device) if k != "step" else v for k, v in values.items()}
            state.optimizer.state[parameter] = moments
    state.step = saved["step"]
    state.processor_seconds = saved.get("processor_seconds", 0.0)


def keep_best(state: TrainingState, score: float, directory: Path) -> None:
    """Keep the averaged weights if ``score`` is the highest so far."""
    known = directory / "best.json"
    if known.is_file() and json.loads(known.read_text())["score"] >= score:
        return
    temporary = directory / "best.tmp"
    save_file({k: v.contiguous() for k, v in state.average.state_dict().items()}, temporary)
    os.replace(temporary, directory / "best.safetensors")
    write_json(known, {"step": state.step, "score": score})


def load_best(network: nn.Module, directory: Path) -> dict[str, Any]:
    """Give ``network`` the best weights of a run; return their step and score.

    Raises:
        SeparatorError: the run was never validated, or is not of this network.
    """
    if not (directory / "best.json").is_file():
        raise SeparatorError(f"no best.json in {directory}; train until the first validation")
    take_weights(network, _read(directory / "best.safetensors"), directory)
    found: dict[str, Any] = json.loads((directory / "best.json").read_text())
    return found


def take_weights(network: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Give ``network`` weights.

    Raises:
        SeparatorError: they are not those of this network; the message names their ``source``.
    """
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[1].strip().rstrip(".")
        reason = reason if len(reason) < MAX_REASON else f"{reason[:MAX_REASON]}..."
        raise SeparatorError(
            f"the weights of {source} are not of the recipe's network ({reason}); give the recipe the "
            "network that they were trained with, or name another folder"
        ) from error


def _read(path: Path) -> dict[str, Tensor]:
    """Tensors of a file.

    Raises:
        SeparatorError: it is missing or no safetensors file.
    """
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise SeparatorError(f"{path} cannot be read ({error}); train anew in another run folder") from error


def write_config(directory: Path, values: Mapping[str, Any], step: int) -> None:
    """Write what is run from ``step`` on; what was run before with other settings moves to its `earlier`."""
    path = directory / "config.json"
    written: dict[str, Any] = json.loads(json.dumps(values))
    if step > 0 and path.is_file():
        known = json.loads(path.read_text())
        earlier = known.pop("earlier", [])
        same = {key: known.get(key) for key in written if key not in CIRCUMSTANCES}
        if same == {key: value for key, value in written.items() if key not in CIRCUMSTANCES}:
            return
        written["earlier"] = [*earlier, {**known, "until_step": step}]
    write_json(path, written)


def log(directory: Path, record: dict[str, Any]) -> None:
    """Add a line to the run's log."""
    with (directory / "log.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")


def cut_log(directory: Path, step: int) -> None:
    """Drop what was logged after ``step``: those steps are taken again."""
    path = directory / "log.jsonl"
    if path.is_file():
        kept = [line for line in path.read_text().splitlines() if json.loads(line)["step"] <= step]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        os.replace(temporary, path)


def write_json(path: Path, values: Any) -> None:
    """Write whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(values, indent=1))
    os.replace(temporary, path)


def commit() -> str | None:
    """Commit of the checkout that this package runs from; None outside one."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
