"""The generic core: evidence-depletion slot attention and the mechanisms it is compared with (torch only).

All mechanisms map tokens [B, L, D] to the same named tuple and share the names and the creation order of
their parameters: one seed gives each of them the same start, and state dicts of PyPI `evidence-depletion`
load.
"""

from separator.attention.base import SequentialLoop, SlotAttention, SlotAttentionOutput
from separator.attention.depletion import DEPLETION_FORMS, DEPLETION_SCALES, deplete, explained_share
from separator.attention.evidence import EvidenceDepletionSlotAttention
from separator.attention.parallel import VanillaSlotAttention
from separator.attention.registry import MECHANISMS, build_mechanism
from separator.attention.sequential import SequentialSlotAttention

__all__ = [
    "DEPLETION_FORMS",
    "DEPLETION_SCALES",
    "MECHANISMS",
    "EvidenceDepletionSlotAttention",
    "SequentialLoop",
    "SequentialSlotAttention",
    "SlotAttention",
    "SlotAttentionOutput",
    "VanillaSlotAttention",
    "build_mechanism",
    "deplete",
    "explained_share",
]
