"""Frozen dataclasses of settings, built from plain values such as a TOML table."""

import dataclasses
import math
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

    What the dataclass names in ``AT_LEAST`` and ``AT_MOST`` (each value of a list, too) must be within.
    ``but`` are fields that are no setting; the message calls the settings ``what``.
    """
    if not isinstance(values, Mapping):
        raise SeparatorError(f"{what} is {values!r}, not a table of settings")
    fields = {field.name: field.default for field in dataclasses.fields(kind) if field.name not in but}  # type: ignore[arg-type]
    check_known(values, fields, what)
    for key, value in values.items():
        if not _is_like(value, fields[key]):
            raise SeparatorError(f"{what} setting {key} = {value!r} is of another type than {fields[key]!r}")
    check_range(values, what, getattr(kind, "AT_LEAST", {}), getattr(kind, "AT_MOST", {}))


def check_range(
    values: Mapping[str, Any], what: str, at_least: Mapping[str, float], at_most: Mapping[str, float]
) -> None:
    """Raise SeparatorError where a setting of ``what`` is no number from its least to its greatest value."""
    for key in values.keys() & (at_least.keys() | at_most.keys()):
        least, most = at_least.get(key, -math.inf), at_most.get(key, math.inf)
        for value in values[key] if isinstance(values[key], list | tuple) else [values[key]]:
            if value is not None and not (_is_number(value) and least <= value <= most):
                bounds = f"{least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
                raise SeparatorError(f"{what} setting {key} = {values[key]!r}; pass {bounds}")


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


def plain(value: Any) -> Any:
    """Tuples as lists, in dicts as well, as `settings_from` takes them back from TOML or JSON."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _is_like(value: object, default: object) -> bool:
    """Whether a plain value can stand for a default; None and no default say nothing of the type."""
    if default is None or default is dataclasses.MISSING:
        return True
    if isinstance(default, tuple):
        return isinstance(value, list | tuple)
    if isinstance(default, float):
        return _is_number(value)
    return type(value) is type(default)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
