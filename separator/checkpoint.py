"""A model on disk: a folder with ``config.toml`` and ``model.safetensors``.

The config holds the network's settings, facts about it and the sha256 of the weights, so half a download is
never taken for a model. No pickle is read or written. Shipped models lie in ``models/`` of a checkout and in
``separator/_models`` of a wheel. Torch is imported only to build or save a network: checking a model's files
needs none.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from separator.errors import SeparatorError

if TYPE_CHECKING:
    import torch

    from separator.network import SeparationNetwork

CONFIG = "config.toml"
WEIGHTS = "model.safetensors"


def models_dir() -> Path:
    """Folder of the shipped models, in a wheel or in a checkout."""
    package = Path(__file__).parent
    packed = package / "_models"
    return packed if packed.is_dir() else package.parent / "models"


def available_models() -> list[str]:
    """Names of the shipped models."""
    return sorted(path.parent.name for path in models_dir().glob(f"*/{CONFIG}"))


def find_model(name_or_dir: str | Path) -> Path:
    """Folder of a shipped model's name, or ``name_or_dir`` itself where that is the folder of a model.

    Raises:
        SeparatorError: it is neither.
    """
    shipped = models_dir() / name_or_dir
    if str(name_or_dir) in available_models():
        return shipped
    folder = Path(name_or_dir)
    if (folder / CONFIG).is_file():
        return folder
    raise SeparatorError(
        f"no model {str(name_or_dir)!r}; shipped models are {available_models()}, "
        f"and a folder of your own needs {CONFIG} and {WEIGHTS}"
    )


def check_model(name_or_dir: str | Path) -> dict[str, Any]:
    """Find a model, check its weights against their sha256 and return its config.

    Raises:
        SeparatorError: the model is missing, incomplete or corrupt.
    """
    folder = find_model(name_or_dir)
    try:
        config = tomllib.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SeparatorError(f"{folder / CONFIG} is no TOML ({error}); restore the file") from error
    expected = config.get("sha256")
    if not isinstance(expected, str) or not isinstance(config.get("network"), dict):
        raise SeparatorError(
            f"{folder / CONFIG} has keys {sorted(config)}, not sha256 and [network]; restore the file"
        )
    if not (folder / WEIGHTS).is_file():
        raise SeparatorError(f"{folder / WEIGHTS} is missing; restore the file")
    with (folder / WEIGHTS).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise SeparatorError(
            f"{folder / WEIGHTS} has sha256 {found[:12]}..., {CONFIG} says {expected[:12]}...; restore it"
        )
    return config


def load_model(name_or_dir: str | Path, device: "str | torch.device" = "cpu") -> "SeparationNetwork":
    """Load a model for inference.

    Raises:
        SeparatorError: as `check_model`, or the weights are not those of the config's network.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from separator.network import NetworkConfig, SeparationNetwork

    config = check_model(name_or_dir)
    network = SeparationNetwork(NetworkConfig.from_dict(config["network"]))
    weights = find_model(name_or_dir) / WEIGHTS
    try:
        network.load_state_dict(load_file(weights))
    except (RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise SeparatorError(
            f"{weights} does not fit the network of {CONFIG} ({reason}); restore both"
        ) from error
    return network.requires_grad_(False).eval().to(device)


def save_model(
    network: "SeparationNetwork", directory: str | Path, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a model's folder; ``extra`` (plain values, lists, tables) goes into the config too.

    The weights come first and both files appear whole, so a kill between them is noticed by the sha256.
    """
    from safetensors.torch import save

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weights = save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    )
    config = {
        "sha256": hashlib.sha256(weights).hexdigest(),
        "network": network.config.to_dict(),
        **(extra or {}),
    }
    text = "\n".join(_toml_lines(config)) + "\n"
    for name, content in ((WEIGHTS, weights), (CONFIG, text.encode())):
        temporary = directory / f".{name}.part"
        temporary.write_bytes(content)
        os.replace(temporary, directory / name)


def _toml_lines(table: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> list[str]:
    """Lines of a TOML table: its values first, then its tables."""
    values = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    lines = [f"[{'.'.join(map(_toml_key, prefix))}]"] if prefix and (values or not table) else []
    lines += [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, Mapping):
            lines += ["", *_toml_lines(value, (*prefix, key))]
    return lines


def _toml_key(key: str) -> str:
    """Bare where TOML allows it, else quoted."""
    bare = key.isascii() and key.replace("-", "_").replace("_", "a").isalnum()
    return key if bare else _toml_string(key)


def _toml_string(text: str) -> str:
    """A JSON string is a TOML string but for the one control character that JSON leaves bare."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: object) -> str:
    """A TOML value.

    Raises:
        SeparatorError: TOML has none for it.
    """
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, bool | int | str):
        return _toml_string(value) if isinstance(value, str) else json.dumps(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    raise SeparatorError(f"{value!r} has no TOML form; pass strings, numbers, booleans, lists and tables")
