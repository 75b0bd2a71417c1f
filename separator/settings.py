"""Frozen dataclasses of settings, built from plain values such as a TOML table."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from separator.errors import SeparatorError

Settings = TypeVar("Settings")


def check_known(values: Collection[str], known: Collection[str], what: str) -> None:
    """Raise SeparatorError unless all keys are known settings of ``what``."""
    if unknown := sorted(set(values) - set(known)):
        raise SeparatorError(f"unknown {what} setting {unknown}; known are {sorted(known)}")


def settings_from(kind: type[Settings], values: Mapping[str, Any], what: str) -> Settings:
    """Build a dataclass of settings; lists become tuples.

    Raises:
        SeparatorError: a key is unknown; the message calls the settings ``what``.

    >>> from separator.losses import LossConfig
    >>> settings_from(LossConfig, {"zero_weight": 0.2}, "loss").zero_weight
    0.2
    """
    check_known(values, [field.name for field in dataclasses.fields(kind)], what)  # type: ignore[arg-type]
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
