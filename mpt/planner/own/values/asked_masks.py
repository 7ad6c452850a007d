"""Questions whether a mask has any places: `if (experts == 3).any(): ...`.

A value that is read is 0, so the answer is no, and what would be done is left out: an expert, the objects of a class.
Yes is no better in general: a loop may end by it, or never. So both are traced (`mpt.planner.own.values.attempts`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpt.planner.own.values.by_memory import ByMemory

MOST = 256
"""Times in a row that yes is answered while nothing is computed that has a gradient: numbers that are drawn until none
is out of bounds would be so for ever."""


class AskedMasks:
    """The results of `torch.any`, until they are read."""

    def __init__(self, finds: bool) -> None:
        self.finds = finds
        self.missed = 0
        """Times that no was answered."""
        self.found = 0
        """Times that yes was answered."""
        self._results: ByMemory[bool] = ByMemory()
        self._node = self._since = 0
        """The last autograd node at the last answer, and the answers since there was another."""

    def about(self, result: Tensor) -> None:
        """Note that a tensor says whether a mask has places."""
        self._results.keep(result, True)

    def is_answered_yes(self, tensor: Tensor) -> bool:
        """Return the answer for a tensor that is read; no for all that are no such answers."""
        if tensor.dtype != torch.bool or not self._results.of(tensor):
            return False
        node = torch._C._autograd._get_sequence_nr()
        self._since = self._since + 1 if node == self._node else 0
        self._node = node
        if self.finds and self._since < MOST:
            self.found += 1
            return True
        self.missed += 1
        return False

    def notes(self) -> list[str]:
        """Return the plan's assumptions."""
        words = (
            f"masks were said to have places {self.found} times when the step asked (`mask.any()`)"
        )
        return [f"{words}, which needs more than if they had none"] if self.found else []
