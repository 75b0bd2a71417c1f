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


def check_given(values: Collection[str], needed: Collection[str], what: str) -> None:
    """Raise SeparatorError unless all ``needed`` settings of ``what`` are there."""
    if missing := sorted(set(needed) - set(values)):
        raise SeparatorError(f"missing {what} setting {missing}; needed are {sorted(needed)}")


def check_settings(
    kind: type[object], values: Mapping[str, Any], what: str, but: Collection[str] = ()
) -> None:
    """Raise SeparatorError unless ``values`` are settings of a dataclass, of the types of their defaults.

    ``but`` are fields that are no setting; the message calls the settings ``what``.
    """
    fields = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in but}  # type: ignore[arg-type]
    check_known(values, fields, what)
    for key, value in values.items():
        if not _is_like(value, fields[key]):
            raise SeparatorError(f"{what} setting {key} = {value!r} is of another type than {fields[key]!r}")


def settings_from(kind: type[Settings], values: Mapping[str, Any], what: str) -> Settings:
    """Build a dataclass of settings; lists become tuples.

    Raises:
        SeparatorError: as `check_settings`.

    >>> from separator.losses import LossConfig
    >>> settings_from(LossConfig, {"zero_weight": 0.2}, "loss").zero_weight
    0.2
    """
    check_settings(kind, values, what)
    return kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


def _is_like(value: object, default: object) -> bool:
    """Whether a plain value can stand for a default; None and no default say nothing of the type."""
    if default is None or default is dataclasses.MISSING:
        return True
    if isinstance(default, tuple):
        return isinstance(value, list | tuple)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default)
