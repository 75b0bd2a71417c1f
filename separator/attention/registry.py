"""The mechanisms by name: one entry each."""

import inspect
from collections.abc import Callable
from functools import partial
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


def mechanism_options(name: str) -> frozenset[str]:
    """Return the names of the options that the mechanism `name` can be built with.

    Raises:
        SeparatorError: no mechanism has that name.

    >>> sorted(mechanism_options("coverage"))
    ['beta', 'd_model', 'n_iter', 'n_slots', 'tau']
    """
    if name not in MECHANISMS:
        raise SeparatorError(f"unknown mechanism {name!r}; choose one of {', '.join(MECHANISMS)}")
    build = MECHANISMS[name]
    fixed = build.keywords if isinstance(build, partial) else {}
    return frozenset(inspect.signature(build).parameters) - fixed.keys()


def build_mechanism(name: str, **options: Any) -> Mechanism:
    """Build the mechanism `name` of `MECHANISMS` with its constructor's options.

    Raises:
        SeparatorError: no mechanism has that name, or it does not take one of the options.

    >>> build_mechanism("evidence_linear", n_slots=3, d_model=16).depletion
    'linear'
    """
    known = mechanism_options(name)
    if unknown := sorted(options.keys() - known):
        raise SeparatorError(f"mechanism {name!r} does not take {unknown}; it takes {sorted(known)}")
    return MECHANISMS[name](**options)
