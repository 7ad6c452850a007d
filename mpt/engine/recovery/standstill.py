"""Whether updates move weights at all: a mode, a trick and an optimizer that do not go together may leave them all.

Looked at in each phase's first update and then once in `SPACING` steps, or from one line of the log to the next if that
is longer. Weights are compared by the sums of their bits, which take no memory worth planning; the answer stays on the
device until a line is written.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from mpt.engine.step.step import Update
from mpt.parallel.local import local
from mpt.seams import Phase, Run

SPACING = 100
"""Steps between two looks."""

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of a number -> the dtype in which its bits add up, modulo that dtype's range."""

Sums = list[Tensor]
"""A tensor for each device and size of number that weights have: the sum of the bits of each of them."""


class Standstill:
    """Notes updates that were not skipped and moved no weight; each phase is named once."""

    def __init__(self, run: Run, log_every: int) -> None:
        self.run, self.spacing = run, max(SPACING, log_every)
        self.next: dict[str, int] = {}
        """The step from which on a phase's update is to be looked at again."""
        self.named: set[str] = set()
        """Phases that were warned of."""
        self.pending: list[tuple[str, int, list[Tensor]]] = []
        """Phase, step, and for each device whether a weight has moved."""

    def before(self, phase: Phase, step: int) -> Sums | None:
        """Return the weights' sums if this update is one to look at."""
        if step < self.next.get(phase.name, 0):
            return None
        if not any(group["lr"] for group in phase.optimizer.param_groups):
            return None  # at a rate of 0 nothing is to move
        return sums_of(self.run, phase)

    def after(self, phase: Phase, step: int, before: Sums, done: Update) -> None:
        """Compare, on the device, the weights after an update that was not skipped.

        An optimizer with a warm-up of its own notes the rate that it took as `used_lr`.
        """
        rates = [group.get("used_lr", group["lr"]) for group in phase.optimizer.param_groups]
        if done.stats.skipped or not done.finite or not any(rates):
            return
        self.next[phase.name] = step + self.spacing
        moved = [
            (one != other).any()
            for one, other in zip(before, sums_of(self.run, phase), strict=True)
        ]
        self.pending.append((phase.name, step, moved))

    def take(self) -> list[str]:
        """Return a warning for each phase whose weights have stood still, once; this waits for the device."""
        found, self.pending = self.pending, []
        moved = [any(bool(one) for one in of_devices) for _, _, of_devices in found]
        if self.run.world.is_sharded and found:  # each rank has seen its shards
            moved = [any(of_ranks) for of_ranks in zip(*self.run.world.collect(moved), strict=True)]
        said = []
        for (phase, step, _), has_moved in zip(found, moved, strict=True):
            if not has_moved and phase not in self.named:
                self.named.add(phase)
                said.append(self.explain(phase, step))
        return said

    def explain(self, phase: str, step: int) -> str:
        """Return the warning, with causes to examine."""
        found = f"{phase}: the update of step {step} was not skipped and moved no weight"
        if self.run.precision.numerics.rounds_weights:
            kind = str(self.run.precision.numerics.dtype).removeprefix("torch.")
            return (
                f"{found}: updates below half an ulp are lost in {kind} weights; use precision=bf16-sr, or a higher "
                "optimizer.lr"
            )
        return (
            f"{found}: its gradients are zero, as of a saturated loss, or the optimizer does not get them; look at the "
            "loss and at optimizer.lr, and try without the settings under memory"
        )


@torch.no_grad()
def sums_of(run: Run, phase: Phase) -> Sums:
    """Return the sums of the bits of a phase's weights and their masters, by device and size of a number."""
    alike: dict[tuple[torch.device, torch.dtype], Sums] = defaultdict(list)
    for weight in run.weights[phase.name]:
        bits = local(weight)
        if bits.is_complex():
            bits = torch.view_as_real(bits)
        integer = INTEGERS[bits.element_size()]
        alike[bits.device, integer].append(bits.view(integer).sum(dtype=integer))
    return [torch.stack(sums) for sums in alike.values()]
