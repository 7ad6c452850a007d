"""The last good states of a training in host memory, to roll back to without losing all steps since a checkpoint.

A ring of a few copies, each as much host memory as a checkpoint is on disk. A state is copied only if it is finite. One
that was returned to is forgotten: if the same happens again, the next return is to an older one.

Of several processes each keeps its own states, of the same steps: its random numbers and BatchNorm's statistics are its
own. Whether a state is finite is agreed, and to which one they return the first process says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mpt.parallel.world import ALONE, World
from mpt.run.checkpoints.state_checks import first_non_finite


class RecentStates:
    """Up to `count` states, a new one every `every` steps; none if `count` is 0."""

    def __init__(self, count: int, every: int, world: World = ALONE) -> None:
        self.every, self.world = every if count else 0, world
        self.states: deque[tuple[int, dict[str, Any]]] = deque(maxlen=count)
        self.sound: tuple[int, dict[str, Any]] | None = None
        """The state of the last evaluation that showed no collapse, if it is kept: one copy alongside the ring."""

    def keep(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy a state to host memory, unless something in its modules is not finite in any process."""
        if self.is_finite(state):
            self.states.append((step, copied(state)))

    def keep_sound(self, step: int, state: Mapping[str, Any]) -> None:
        """Copy a finite state that an evaluation found no fault with, in place of the one before."""
        if self.states.maxlen and self.is_finite(state):
            self.sound = (step, copied(state))

    def is_finite(self, state: Mapping[str, Any]) -> bool:
        """Return whether everything in the modules of all processes is finite."""
        return all(self.world.collect(first_non_finite({"modules": state["modules"]}) is None))

    def take(self, since: int) -> tuple[int, dict[str, Any]] | None:
        """Return and forget the newest state of a step after the first process's `since`; None if there is none."""
        if self.states and self.states[-1][0] > self.world.tell(since):
            return self.states.pop()
        return None

    def forget_after(self, step: int) -> None:
        while self.states and self.states[-1][0] > step:
            self.states.pop()


def copied(value: Any) -> Any:
    """Return a state with every tensor copied to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(copied(item) for item in value)
    return value
