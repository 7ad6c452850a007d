"""Dynamic loss scaling for one phase.

Same arithmetic as `torch.amp.GradScaler` (start at 2^16, halve on overflow, double after 2000 clean steps), which a
test compares step by step, but has a floor and a ceiling (without a floor 166 overflows in a
row take the scale to 0 and the next finite step makes the parameters NaN, pytorch#99640), a static scale, float16
gradients, and a state that lives in Python, so that logging the scale costs no synchronisation and the step runs on
fake tensors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpt.parallel.local import full, group_of, local
from mpt.seams.questions import ask

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
        self.first_scale = self.scale
        self.growth_interval, self.min_scale, self.max_scale, self.dynamic = (
            growth_interval,
            min_scale,
            max_scale,
            dynamic,
        )
        self.clean_steps = 0
        self.overflows_at_floor = 0
        self.has_overflowed = False
        """Whether any gradient was not finite in this process."""
        self.kept: tuple[Tensor, Tensor] | None = None
        """Scale and inverse on the device, of `keep_on`."""
        self.kept_scale = 0.0

    def multiply(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale, in float32: 2^16 itself is beyond float16."""
        return loss.float() * (self.scale if self.kept is None else self.kept[0])

    def keep_on(self, device: torch.device) -> None:
        """Multiply by numbers in the device's memory from now on, so that a recorded update reads them.

        Called before each update: the scale of that moment is written there.
        """
        if self.kept is None:
            self.kept = torch.zeros((), device=device), torch.zeros((), device=device)
        if self.kept_scale != self.scale:
            self.kept[0].fill_(self.scale)
            self.kept[1].fill_(1.0 / self.scale)
            self.kept_scale = self.scale

    def unscale(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Divide gradients by the scale in place and return whether any was not finite.

        One host synchronisation per device. Fake tensors have no values: they count as finite.
        """
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for gradient in stored_gradients(parameters):
            if gradient.is_complex():  # GradScaler's kernel takes real numbers
                gradient = torch.view_as_real(gradient)
            groups[gradient.device, gradient.dtype].append(gradient)
        found: dict[torch.device, Tensor] = {}
        for (device, dtype), gradients in groups.items():
            if device not in found:
                found[device] = torch.zeros((), device=device)
            if dtype == torch.bfloat16:  # GradScaler's kernel does not exist for it on CUDA
                found[device] += ~torch.stack(
                    [gradient.isfinite().all() for gradient in gradients]
                ).all()
                torch._foreach_mul_(
                    gradients, 1.0 / self.scale if self.kept is None else self.kept[1]
                )
                continue
            inverse = (
                torch.full((), 1.0 / self.scale, device=device)
                if self.kept is None
                else self.kept[1]
            )
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found[device], inverse)
        agree_on_shards(parameters, found)
        overflowed = any(ask(flag, usual=False) for flag in found.values())
        self.has_overflowed |= overflowed
        return overflowed

    def update(self, overflowed: bool) -> None:
        """Halve after an overflow, double after `growth_interval` clean steps, within floor and ceiling."""
        if not self.dynamic:
            return
        if overflowed:
            self.overflows_at_floor = (
                self.overflows_at_floor + 1 if self.scale <= self.min_scale else 0
            )
            self.scale = max(self.scale * BACKOFF, self.min_scale)
            self.clean_steps = 0
            return
        self.overflows_at_floor = 0
        self.clean_steps += 1
        if self.clean_steps >= self.growth_interval:  # a resume may have made the interval shorter
            self.scale = min(self.scale * GROWTH, self.max_scale)
            self.clean_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the counters and the settings that the scale came from."""
        return {
            "scale": self.scale,
            "clean_steps": self.clean_steps,
            "overflows_at_floor": self.overflows_at_floor,
            "dynamic": self.dynamic,
            "first_scale": self.first_scale,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, as far as the present settings allow: those win.

        A scale that is constant now or was so then, or that starts elsewhere now, starts afresh; a dynamic one
        continues within the present floor and ceiling.
        """
        then = state.get("dynamic", True), state.get("first_scale", self.first_scale)
        if not self.dynamic or then != (self.dynamic, self.first_scale):
            return
        self.scale = min(max(float(state["scale"]), self.min_scale), self.max_scale)
        self.clean_steps = int(state["clean_steps"])
        self.overflows_at_floor = int(state["overflows_at_floor"])


def stored_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients as tensors that can be changed in place: of a sparse one, its values.

    A sparse gradient is coalesced first: its values may repeat a row, and then neither their size nor that of their sum
    is the gradient's.
    """
    stored = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = local(gradient)  # ranks agree on their shards' findings after
        if gradient.is_sparse:
            if not gradient.is_coalesced():
                gradient = parameter.grad = gradient.coalesce()
            # not values(), whose changes would not reach the gradient
            gradient = gradient._values()
        stored.append(gradient)
    return stored


def agree_on_shards(
    parameters: Sequence[nn.Parameter], found: Mapping[torch.device, Tensor]
) -> None:
    """Share one rank's finding in its shards of the gradients with all ranks."""
    group = group_of(parameters)
    if group is not None:
        for flag in found.values():
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the total norm of all gradients, on their device; shards of several ranks are added up."""
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return nn.utils.get_total_norm(stored_gradients(parameters))
    return full(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients so that their total norm is at most `limit`; return the norm before.

    An infinite limit changes nothing.

    Torch's own function, which refuses sparse gradients, does it wherever there are none.
    """
    if math.isinf(limit):
        return gradient_norm(parameters)
    if not any(p.grad is not None and p.grad.is_sparse for p in parameters):
        return full(nn.utils.clip_grad_norm_(parameters, limit))
    gradients = stored_gradients(parameters)
    norm = nn.utils.get_total_norm(gradients)
    coefficient = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device))
    return norm
