"""Practical-RIFE's networks from 4.0 on: four or five blocks that see the warped frames, any time, and a blend.

Source: as in `networks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.systems.dain.nn.operators.interpolation import Between
from mpt.systems.dain.nn.rife_published.blocks import (
    FlowBlock,
    Head,
    PlainBlock,
    Refined,
    ResidualBlock,
    leaky,
)
from mpt.systems.dain.nn.rife_published.networks import (
    Estimate,
    Frames,
    PublishedRife,
    joined,
    swapped_flow,
    time_plane,
)

LARGE_MOTION = 32
"""Pixels; 4.0 and 4.1 look again at twice the scales when their second block adds more to both flows."""


@dataclass(frozen=True)
class Plan4:
    """How a network from 4.0 on is built."""

    widths: tuple[int, ...]
    scales: tuple[float, ...] = (8.0, 4.0, 2.0, 1.0)
    residual_blocks: bool = True
    is_first: bool = False
    """4.0 and 4.1: blocks with a shortcut and PReLU, and large motion is looked for again at twice the scales."""
    groups: int = 1
    """Of the convolutions in a block's body."""
    outputs: int = 6
    """Channels of a block's result: flow, mask and features."""
    passes_features: bool = False
    """Whether blocks hand their features on."""
    replaces_mask: bool = False
    """Whether a block's mask takes the place of the one before, instead of being added."""
    encoded: int = 0
    """Channels of the encoder's features of a frame."""
    encoder: Callable[[int, int], nn.Module] = Head
    encoder_width: int = 16
    multiple: int = 32


class PracticalRife(PublishedRife):
    """4.0 and later: blocks see the warped frames only, and the blend is the result."""

    def __init__(self, plan: Plan4) -> None:
        self.least_multiple = plan.multiple
        super().__init__(plan.scales)
        self.plan = plan
        later = 8 + 4 + (plan.outputs - 5 if plan.passes_features else 0)
        for number, width in enumerate(plan.widths):
            inputs = (later if number else 7) + 2 * plan.encoded
            setattr(self, f"block{number}", block_of(plan, inputs, width))
        if plan.encoded:
            self.encode = plan.encoder(plan.encoder_width, plan.encoded)
        self.ensemble = False
        """Whether every block runs in both directions, with 1 - t backwards, and the mean counts."""

    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> Frames | None:
        """Return the encoder's features of both frames, if there is one."""
        return (self.encode(first_bchw), self.encode(last_bchw)) if self.plan.encoded else None

    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: Frames | None, time_b: Tensor
    ) -> Between:
        """Return the frame between."""
        pair = (first_bchw, last_bchw)
        between, large_b = self.at_scales(self.scales, pair, prepared, time_b)
        if large_b is None or not bool(large_b.any()):
            return between
        samples = []
        # each for itself: a frame must not depend on its batch
        for number in range(len(first_bchw)):
            one = slice(number, number + 1)
            samples.append(
                self.at_doubled_scales((first_bchw[one], last_bchw[one]), time_b[one])
                if large_b[number]
                else sample_of(between, one)
            )
        return batch_of(samples)

    def at_scales(
        self, scales: Sequence[float], pair: Frames, prepared: Frames | None, time_b: Tensor
    ) -> tuple[Between, Tensor | None]:
        """Return the frame with blocks at these scales, and which samples' motion is large, if that is looked at."""
        time = time_plane(time_b, pair[0])
        estimate: Estimate | None = None
        large_b: Tensor | None = None
        for number, scale in enumerate(scales):
            before, estimate = estimate, self.refined(number, scale, pair, prepared, time, estimate)
            if number == 1 and before is not None and self.looks_for_large_motion(pair[0]):
                large_b = is_large(estimate.flow - before.flow)
        assert estimate is not None
        return Between(self.blend(estimate), None, estimate.flow, {"mask": estimate.mask}), large_b

    def looks_for_large_motion(self, like: Tensor) -> bool:
        """Return whether the data decide about scales: in evaluation, and not while a pass is planned or exported."""
        depends = self.plan.is_first and not self.training
        return depends and not isinstance(like, FakeTensor) and not torch.compiler.is_compiling()

    def refined(
        self,
        number: int,
        scale: float,
        pair: Frames,
        encoded: Frames | None,
        time: Tensor,
        before: Estimate | None,
    ) -> Estimate:
        """Return the estimate after one more block."""
        made = self.one_way(number, scale, pair, encoded, time, before)
        if self.ensemble:
            turned = (
                None
                if before is None
                else replace(
                    before,
                    flow=swapped_flow(before.flow),
                    mask=-before.mask,
                    warped=before.warped[::-1],
                )
            )
            back = self.one_way(
                number, scale, pair[::-1], encoded and encoded[::-1], 1 - time, turned
            )
            flow = (made.flow_b4hw + swapped_flow(back.flow_b4hw)) / 2
            made = made._replace(flow_b4hw=flow, mask_b1hw=(made.mask_b1hw - back.mask_b1hw) / 2)
        if before is None:
            return self.after(pair, made.flow_b4hw, made)
        if not self.plan.replaces_mask:
            made = made._replace(mask_b1hw=before.mask + made.mask_b1hw)
        return self.after(pair, before.flow + made.flow_b4hw, made)

    def one_way(
        self,
        number: int,
        scale: float,
        pair: Frames,
        encoded: Frames | None,
        time: Tensor,
        before: Estimate | None,
    ) -> Refined:
        """Return a block's increment, in one direction."""
        block = getattr(self, f"block{number}")
        made: Refined
        if before is None:
            made = block(joined([*pair, *(encoded or ()), time]), None, scale)
            return made
        seen = [
            *before.warped,
            *(self.both_warped(encoded, before.flow) if encoded else ()),
            time,
            before.mask,
        ]
        if self.plan.passes_features:
            assert before.features is not None
            seen.append(before.features)
        made = block(joined(seen), before.flow, scale)
        return made

    def at_doubled_scales(self, pair: Frames, time_b: Tensor) -> Between:
        """Return the frame of one sample whose motion is large. The original fails where its sides do not fit."""
        height, width = pair[0].shape[-2:]
        rows, columns = (-side % (2 * self.multiple) for side in (height, width))
        padded = tuple(F.pad(frame, (0, columns, 0, rows)) for frame in pair)
        scales = tuple(2 * scale for scale in self.scales)
        between, _ = self.at_scales(scales, (padded[0], padded[1]), None, time_b)
        assert between.flow is not None
        inside = (..., slice(height), slice(width))
        mask = between.extra["mask"][inside]
        return Between(between.image[inside], None, between.flow[inside], {"mask": mask})


def block_of(plan: Plan4, inputs: int, width: int) -> FlowBlock:
    """Return one of a network's blocks."""
    if plan.residual_blocks:
        return ResidualBlock(inputs, width, plan.outputs, plan.groups)
    return (
        PlainBlock(inputs, width)
        if plan.is_first
        else PlainBlock(inputs, width, leaky, shortcut=False)
    )


def is_large(increment_b4hw: Tensor) -> Tensor:
    """Return which samples' flows into both frames changed by more than `LARGE_MOTION` pixels somewhere (b,)."""
    into_0, into_1 = (
        half.abs().amax((1, 2, 3)) for half in (increment_b4hw[:, :2], increment_b4hw[:, 2:])
    )
    return (into_0 > LARGE_MOTION) & (into_1 > LARGE_MOTION)


def sample_of(between: Between, one: slice) -> Between:
    """Return one sample of a batch."""
    assert between.flow is not None
    return Between(
        between.image[one], None, between.flow[one], {"mask": between.extra["mask"][one]}
    )


def batch_of(samples: Sequence[Between]) -> Between:
    """Return samples as one batch."""
    flows = [one.flow for one in samples if one.flow is not None]
    masks = torch.cat([one.extra["mask"] for one in samples])
    return Between(
        torch.cat([one.image for one in samples]), None, torch.cat(flows), {"mask": masks}
    )
