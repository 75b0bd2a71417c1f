"""The mechanisms by name: one entry each."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

from separator.attention.base import Mechanism
from separator.attention.coverage import CoverageSlotAttention
from separator.attention.dataspace import DataSpaceSlotAttention
from separator.attention.depletion import DEPLETION_FORMS
from separator.attention.dspn import QuerySetPredictor
from separator.attention.evidence import CLAIM, EvidenceDepletionSlotAttention
from separator.attention.parallel import VanillaSlotAttention
from separator.attention.sequential import SequentialSlotAttention
from separator.attention.sparse import NORM_FNS, SparseSlotAttention
from separator.attention.stickbreaking import StickBreakingSlotAttention
from separator.attention.transport import MeshSlotAttention, SinkhornSlotAttention
from separator.errors import SeparatorError

MECHANISMS: dict[str, Callable[..., Mechanism]] = {
    "vanilla": VanillaSlotAttention,
    "sequential": SequentialSlotAttention,
    **{
        f"evidence_{form}": partial(EvidenceDepletionSlotAttention, depletion=form)
        for form in (*DEPLETION_FORMS, CLAIM)
    },
    **{f"dataspace_{form}": partial(DataSpaceSlotAttention, depletion=form) for form in DEPLETION_FORMS},
    **{
        f"dataspace_{form}_bias": partial(DataSpaceSlotAttention, depletion=form, use_bias=True)
        for form in DEPLETION_FORMS
    },
    **{norm_fn: partial(SparseSlotAttention, norm_fn=norm_fn) for norm_fn in NORM_FNS},
    "sa_sh": SinkhornSlotAttention,
    "mesh": MeshSlotAttention,
    "coverage": CoverageSlotAttention,
    "coverage_loss": VanillaSlotAttention,  # differs in its loss
    "stickbreaking": StickBreakingSlotAttention,
    "dspn": QuerySetPredictor,
}


def mechanism_options(name: str) -> Mapping[str, Any]:
    """Return the options that the mechanism `name` can be built with, and their defaults.

    Raises:
        SeparatorError: no mechanism has that name.

    >>> dict(mechanism_options("coverage"))
    {'n_slots': 5, 'd_model': 64, 'n_iter': 3, 'tau': 0.3, 'beta': 3.0}
    """
    if name not in MECHANISMS:
        raise SeparatorError(f"unknown mechanism {name!r}; choose one of {', '.join(MECHANISMS)}")
    build = MECHANISMS[name]
    bound = build.keywords if isinstance(build, partial) else {}
    return {p.name: p.default for p in inspect.signature(build).parameters.values() if p.name not in bound}


def build_mechanism(name: str, **options: Any) -> Mechanism:
    """Build the mechanism `name` of `MECHANISMS` with its constructor's options.

    Raises:
        SeparatorError: no mechanism has that name, or it does not take one of the options or its value.

    >>> build_mechanism("evidence_linear", n_slots=3, d_model=16).depletion
    'linear'
    """
    known = mechanism_options(name)
    if unknown := sorted(options.keys() - known.keys()):
        raise SeparatorError(f"mechanism {name!r} does not take {unknown}; it takes {sorted(known)}")
    for key, value in options.items():
        wanted = _unmet_kind(value, known[key])
        if wanted is not None:
            raise SeparatorError(
                f"{key}={value!r} of mechanism {name!r} is not {wanted}, as {known[key]!r} is"
            )
    return MECHANISMS[name](**options)


def _unmet_kind(value: Any, default: Any) -> str | None:
    """Return what a value is not but its default is: a text, a whole number, a finite number."""
    if isinstance(default, str):
        return None if isinstance(value, str) else "a text"
    if isinstance(default, int):
        return None if isinstance(value, Integral) and not isinstance(value, bool) else "a whole number"
    fits = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    return None if fits else "a finite number"
