"""The generic core: evidence-depletion slot attention and the mechanisms it is compared with (torch only).

All mechanisms map tokens [B, L, D] to the same named tuple. All but `dspn` share the names and the creation
order of their parameters: one seed gives each of them the same start. State dicts of
`evidence-depletion` 1.0.0 load.
"""

from separator.attention.base import Mechanism, SequentialLoop, SlotAttention, SlotAttentionOutput
from separator.attention.coverage import CoverageSlotAttention
from separator.attention.dataspace import DataSpaceSlotAttention
from separator.attention.depletion import DEPLETION_FORMS, DEPLETION_SCALES, deplete, explained_share
from separator.attention.dspn import QuerySetPredictor
from separator.attention.evidence import EvidenceDepletionSlotAttention
from separator.attention.parallel import VanillaSlotAttention
from separator.attention.registry import MECHANISMS, build_mechanism, mechanism_options
from separator.attention.sequential import SequentialSlotAttention
from separator.attention.sparse import SparseSlotAttention
from separator.attention.stickbreaking import StickBreakingSlotAttention
from separator.attention.transport import MeshSlotAttention, SinkhornSlotAttention

__all__ = [
    "DEPLETION_FORMS",
    "DEPLETION_SCALES",
    "MECHANISMS",
    "CoverageSlotAttention",
    "DataSpaceSlotAttention",
    "EvidenceDepletionSlotAttention",
    "Mechanism",
    "MeshSlotAttention",
    "QuerySetPredictor",
    "SequentialLoop",
    "SequentialSlotAttention",
    "SinkhornSlotAttention",
    "SlotAttention",
    "SlotAttentionOutput",
    "SparseSlotAttention",
    "StickBreakingSlotAttention",
    "VanillaSlotAttention",
    "build_mechanism",
    "deplete",
    "explained_share",
    "mechanism_options",
]
