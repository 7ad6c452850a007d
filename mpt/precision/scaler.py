"""Dynamic loss scaling for one phase.

Same arithmetic as `torch.amp.GradScaler` (start at 2^16, halve on overflow, double after 2000 clean steps), which a
test compares step by step, but with what that class lacks: a floor and a ceiling (without a floor 166 overflows in a
row take the scale to 0 and the next finite step makes the parameters NaN, pytorch#99640), a static scale, float16
gradients, and a state that lives in Python, so that logging the scale costs no synchronisation and the step runs on
fake tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """The scale of one phase's losses. `dynamic=False` keeps it constant and never skips, as Apex's static scale
    does.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 2.0**24,
        dynamic: bool = True,
    ) -> None:
        self.scale = min(max(scale, min_scale), max_scale) if dynamic else scale
        self.growth_interval, self.min_scale, self.max_scale, self.dynamic = (
            growth_interval,
            min_scale,
            max_scale,
            dynamic,
        )
        self.clean_steps = 0
        self.overflows_at_floor = 0

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in float32: 2^16 itself is beyond float16."""
        return loss.float() * self.scale

    def unscale(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Divide gradients by the scale in place and return whether any was not finite.

        One host synchronisation per device. Fake tensors have no values: they count as finite.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = parameter.grad
                groups[gradient.device, gradient.dtype].append(
                    gradient.coalesce().values() if gradient.is_sparse else gradient
                )
        found: dict[torch.device, Tensor] = {}
        for (device, dtype), gradients in groups.items():
            if device not in found:
                found[device] = torch.zeros((), device=device)
            if dtype == torch.bfloat16:  # GradScaler's kernel does not exist for it on CUDA
                found[device] += ~torch.stack([gradient.isfinite().all() for gradient in gradients]).all()
                torch._foreach_mul_(gradients, 1.0 / self.scale)
                continue
            inverse = torch.full((), 1.0 / self.scale, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inverse)
        return any(not isinstance(flag, FakeTensor) and bool(flag) for flag in found.values())

    def update(self, overflowed: bool) -> None:
        """Halve after an overflow, double after `growth_interval` clean steps, within floor and ceiling."""
        if not self.dynamic:
            return
        if overflowed:
            self.overflows_at_floor = self.overflows_at_floor + 1 if self.scale <= self.min_scale else 0
            self.scale = max(self.scale * BACKOFF, self.min_scale)
            self.clean_steps = 0
            return
        self.overflows_at_floor = 0
        self.clean_steps += 1
        if self.clean_steps == self.growth_interval:
            self.scale = min(self.scale * GROWTH, self.max_scale)
            self.clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counters."""
        return {
            "scale": self.scale,
            "clean_steps": self.clean_steps,
            "overflows_at_floor": self.overflows_at_floor,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.scale = float(state["scale"])
        self.clean_steps = int(state["clean_steps"])
        self.overflows_at_floor = int(state["overflows_at_floor"])
