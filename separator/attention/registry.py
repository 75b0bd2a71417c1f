"""The mechanisms by name: one entry each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from separator.attention.base import SlotAttention
from separator.attention.depletion import DEPLETION_FORMS
from separator.attention.evidence import CLAIM, EvidenceDepletionSlotAttention
from separator.attention.parallel import VanillaSlotAttention
from separator.attention.sequential import SequentialSlotAttention
from separator.errors import SeparatorError

MECHANISMS: dict[str, Callable[..., SlotAttention]] = {
    "vanilla": VanillaSlotAttention,
    "sequential": SequentialSlotAttention,
    **{
        f"evidence_{form}": partial(EvidenceDepletionSlotAttention, depletion=form)
        for form in (*DEPLETION_FORMS, CLAIM)
    },
}


def build_mechanism(name: str, **options: Any) -> SlotAttention:
    """Build the mechanism `name` of `MECHANISMS` with its constructor's options.

    Raises:
        SeparatorError: no mechanism has that name, or it does not take one of the options.

    >>> build_mechanism("evidence_linear", n_slots=3, d_model=16).depletion
    'linear'
    """
    if name not in MECHANISMS:
        raise SeparatorError(f"unknown mechanism {name!r}; choose one of {', '.join(MECHANISMS)}")
    try:
        return MECHANISMS[name](**options)
    except TypeError as error:
        raise SeparatorError(f"mechanism {name!r} does not take these options: {error}") from error
