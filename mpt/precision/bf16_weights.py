"""Half weights without float32 masters that learn: `bf16-sr`, `bf16-kahan`, `bf16-24bit` and `fp16-24bit`.

Nothing is kept in float32, but the gradients of `fp16-24bit`. The optimizer is any: a piece of the weights and its
state is lifted to float32, the optimizer takes its step there, and the results are written back to half. `bf16-sr`
rounds them at random, so that updates below half an ulp are not lost on average; `bf16-kahan` keeps the weights'
rounding errors as a second bfloat16 number and adds it the next time. The modes of 24 bits keep them as a byte, in
parts of the weight's spacing: as good for bfloat16, and float16 learns so on cards without bfloat16. The state of the
optimizer is bfloat16, rounded at random, in all: with a decay of 0.999, averages that are rounded to the nearest would
never fall.

Per weight with Adam: 8 bytes, 10 with the compensation, 9 with a byte of it, and 11 in float16, whose scaled gradients
need float32; against 16 of float32 and 8 of `bf16-pure`, which loses the small updates. Alongside them is one piece
in float32 while the optimizer steps (`mpt.precision.shared.weight_pieces`).

The random numbers are a function of the seed, the phase, its count of updates, the parameter and the element: a resume
continues them, and neither the size of the pieces nor the device changes them. Sources: see
`mpt.precision.shared.rounding`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.precision.master import HalfWeights
from mpt.precision.shared.choice import choose_dtype
from mpt.precision.shared.policy import Policy
from mpt.precision.shared.rounding import BLOCK, make_table
from mpt.precision.shared.saved_dtypes import hold_state_in_bfloat16
from mpt.precision.shared.weight_pieces import (
    COMPENSATION,
    Bucket,
    Piece,
    Rounding,
    buckets,
    is_float32,
)
from mpt.seams import Phase, StepStats, Task

NAMES: dict[str, dict[str, object]] = {
    "bf16-sr": {"loss_scale": 1.0},
    "bf16-kahan": {"loss_scale": 1.0},
    "bf16-24bit": {"loss_scale": 1.0},
    "fp16-24bit": {"dtype": "float16", "accumulate": "float32"},
}
ABOUT = {
    "bf16-sr": "Weights in bfloat16 that learn, by rounding at random; 8 bytes per weight with Adam.",
    "bf16-kahan": "Weights in bfloat16 with a second number for their remainder; 10 bytes per weight with Adam.",
    "bf16-24bit": "Weights in bfloat16 with a byte for their remainder; 9 bytes per weight with Adam.",
    "fp16-24bit": "Weights in float16 with a byte for their remainder; 11 bytes per weight with Adam.",
}
REMAINDERS = {"bf16-kahan": torch.bfloat16, "bf16-24bit": torch.int8, "fp16-24bit": torch.int8}
PROPOSALS = ("bf16-sr", "fp16-24bit")
NEEDS_BFLOAT16 = ("bf16-sr",)
SCALED = ("fp16-24bit",)
LOSSY = True
"""There are no float32 weights: of the modes with so few bytes per weight, these also learn at small rates. The second
is the one of cards without bfloat16, where none of fewer bytes learns."""


class Settings(PrecisionOptions):
    dtype: Literal["auto", "bfloat16", "float16"] = "bfloat16"
    """The mode's own."""
    accumulate: Literal["bfloat16", "float32"] = "bfloat16"
    """The dtype in which gradients are summed over micro-batches and losses; float32 costs 2 more bytes per weight.
    Float16's are always summed in float32."""


class LearningHalf(HalfWeights):
    """Half throughout, with the optimizer's steps taken in float32 piece by piece."""

    settings: Settings

    def __init__(
        self, name: str, settings: Settings, device: torch.device, dtype: torch.dtype, reason: str
    ) -> None:
        super().__init__(name, settings, device, dtype, reason)
        self.remainder = REMAINDERS.get(name)
        self.numerics = replace(self.numerics, rounds_weights=False, lifts_state=True)
        self.seed = torch.initial_seed()  # the run's: everything is seeded before a mode is built
        self.updates: dict[str, int] = {}
        self.places: dict[nn.Parameter, int] = {}
        self.table: Tensor | None = None

    def prepare(self, task: Task, *, is_sharded: bool = False) -> None:
        """Convert the weights; let gradients add up in float32 if that is asked."""
        super().prepare(task, is_sharded=is_sharded)
        if self.settings.accumulate == "float32":
            for module in task.trainable.values():
                for parameter in module.parameters():
                    if parameter.dtype == self.numerics.dtype:
                        parameter.grad_dtype = torch.float32

    def bind(self, phases: Sequence[Phase]) -> None:
        """Number the elements of all parameters, by which their random numbers differ, and load state as it is held."""
        super().bind(phases)
        for optimizer in {id(phase.optimizer): phase.optimizer for phase in phases}.values():
            hold_state_in_bfloat16(optimizer)
        count = sum(parameter.numel() for parameter in self.places)
        for phase in phases:
            for group in phase.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in self.places:
                        self.places[parameter] = count
                        count += parameter.numel()
        if count:
            self.table = make_table(min(count, BLOCK), self.device)

    def step(self, phase: Phase, clip_norm: float | None) -> StepStats:
        """Clip and step, and count the update."""
        stats = super().step(phase, clip_norm)
        if not stats.skipped:
            self.updates[phase.name] = self.updates.get(phase.name, 0) + 1
        return stats

    @torch.no_grad()
    def optimize(self, phase: Phase) -> None:
        """Let the optimizer step, a few pieces at a time, on the parameters of its groups that have a gradient."""
        optimizer = phase.optimizer
        members = [list(group["params"]) for group in optimizer.param_groups]
        settings = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        try:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = [parameter for parameter in parameters if is_float32(parameter)]
            optimizer.step()  # also on none at all: it may count its steps
            for bucket in buckets(optimizer, members):
                # A count in an optimizer's groups advances once per update.
                for group, before in zip(optimizer.param_groups, settings, strict=True):
                    group.update(before)
                self._step_on(phase, bucket, members)
            # of a run in another of these modes before: in the weights by now
            if self.remainder is None:
                for parameter in (
                    one for parameters in members for one in parameters if one.grad is not None
                ):
                    optimizer.state[parameter].pop(COMPENSATION, None)
        finally:
            for group, parameters in zip(optimizer.param_groups, members, strict=True):
                group["params"] = parameters

    def _step_on(
        self, phase: Phase, pieces: list[Piece], members: list[list[nn.Parameter]]
    ) -> None:
        """Step on some pieces, with the optimizer's groups and state narrowed to them."""
        optimizer, number = phase.optimizer, self.updates.get(phase.name, 0)
        stored = {piece.parameter: optimizer.state.pop(piece.parameter, {}) for piece in pieces}
        bucket = Bucket(pieces, stored)
        bucket.lift()
        lifted = {piece.parameter: own for piece, own in zip(pieces, bucket.lifted, strict=True)}
        for own, wide in zip(bucket.lifted, bucket.wide, strict=True):
            if wide:
                optimizer.state[own] = wide
        for group, parameters in zip(optimizer.param_groups, members, strict=True):
            group["params"] = [lifted[parameter] for parameter in parameters if parameter in lifted]
        try:
            optimizer.step()
        finally:
            bucket.wide = [optimizer.state.pop(own, {}) for own in bucket.lifted]
            key = (self.seed, phase.name, number)
            assert self.table is not None, "made in bind"
            bucket.put_back(Rounding(self.remainder, key, self.places, self.table))
            for parameter, state in stored.items():
                optimizer.state[parameter] = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state of any mode, and the counts on which the random numbers depend."""
        return {**super().state_dict(), "updates": dict(self.updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; one of another mode's run has no counts."""
        super().load_state_dict(state)
        self.updates = {name: int(count) for name, count in state.get("updates", {}).items()}


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode. Raises ConfigError for a dtype or sums that are not the mode's."""
    own = "float16" if name == "fp16-24bit" else "bfloat16"
    if settings.dtype not in ("auto", own):
        raise ConfigError(f"precision.dtype: {name} is {own}; leave it out, or use another mode")
    if own == "float16" and settings.accumulate != "float32":
        raise ConfigError(
            f"precision.accumulate: {name} sums scaled gradients in float32; leave it out"
        )
    fixed = settings.model_copy(update={"dtype": own})
    dtype, reason = choose_dtype(fixed, device, own)
    how = {
        "bf16-sr": "rounded at random after each step",
        "bf16-kahan": "with a bfloat16 compensation of the rounding",
    }
    kept = how.get(name, "with 8 bits of the rounding's remainder")
    return LearningHalf(name, settings, device, dtype, f"{reason}; weights in {own}, {kept}")
