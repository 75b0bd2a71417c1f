"""In which order a sequential mechanism takes its slots: one order for all samples, or greedily for each."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from separator.attention.reading import TokenState
from separator.errors import SeparatorError

# Untouched tokens give every slot the same score, 1 up to rounding: equals within this margin go by index.
TIE_MARGIN = 1e-5


class SlotOrder(Protocol):
    """Gives the loop its next slot, and puts what the steps produced back into the order of the slots."""

    def take(self, state: TokenState) -> Tensor:
        """Return the start [B, D] of the next slot, given what earlier slots left of the tokens."""

    def by_slot(self, steps: list[Tensor]) -> Tensor:
        """Stack one tensor [B, ...] a step into [B, S, ...] by slot index."""


class FixedOrder:
    """Every sample takes the slots in the same order."""

    def __init__(self, starts: Tensor, order: Sequence[int]) -> None:
        """Take the starts [B, S, D] and the slot indices by step."""
        self._order = order
        by_index = starts.unbind(1)
        self._pending = iter([by_index[index] for index in order])

    def take(self, state: TokenState) -> Tensor:
        """Return the start [B, D] of the next slot."""
        return next(self._pending)

    def by_slot(self, steps: list[Tensor]) -> Tensor:
        """Stack the steps by slot index; slots that no step reached are left out."""
        by_index = sorted(range(len(steps)), key=lambda step: self._order[step])
        return torch.stack([steps[step] for step in by_index], 1)


class GreedyOrder:
    """Each sample takes next the pending slot whose first attention captures most: sum_l alpha_l e_l.

    Of scores within 1e-5 of the best the lowest slot index wins. So every sample starts with slot 0: on
    untouched tokens all scores are 1.
    """

    def __init__(self, starts: Tensor, scores: Tensor) -> None:
        """Take the starts [B, S, D] and their scores of h [B, S, L]."""
        self._starts = starts
        self._scores = scores
        self._taken = torch.zeros(starts.shape[:2], dtype=torch.bool, device=starts.device)
        self._picks: list[Tensor] = []

    def take(self, state: TokenState) -> Tensor:
        """Return the start [B, D] of each sample's best pending slot."""
        captured = self._captured(state).masked_fill(self._taken, -torch.inf)
        near_best = captured >= captured.amax(1, keepdim=True) - TIE_MARGIN
        pick = near_best.to(torch.uint8).argmax(1)  # the first of equals, [B]
        self._picks.append(pick)
        self._taken = self._taken.scatter(1, pick.unsqueeze(1), True)
        return self._starts.take_along_dim(pick[:, None, None], dim=1).squeeze(1)

    @torch.no_grad()
    def _captured(self, state: TokenState) -> Tensor:
        return state.scaled(torch.softmax(state.logits(self._scores), dim=2)).sum(2)  # [B, S]

    def by_slot(self, steps: list[Tensor]) -> Tensor:
        """Stack the steps by each sample's slot index."""
        step_of_slot = torch.stack(self._picks, 1).argsort(1)  # [B, S]
        return torch.stack(steps, 1).take_along_dim(step_of_slot.unsqueeze(2), dim=1)


def processing_order(n_slots: int, slot_order: Sequence[int] | Tensor | None, *, shuffle: bool) -> list[int]:
    """Return the slot indices by step: as given, else random if `shuffle`, else 0..n_slots-1.

    Raises:
        SeparatorError: `slot_order` is not a permutation of the slots.
    """
    if slot_order is None:
        order: list[int] = torch.randperm(n_slots).tolist() if shuffle else list(range(n_slots))
        return order
    order = slot_order.tolist() if isinstance(slot_order, Tensor) else list(slot_order)
    if sorted(order) != list(range(n_slots)):
        raise SeparatorError(f"slot_order={order} is not a permutation; pass each of 0..{n_slots - 1} once")
    return order
