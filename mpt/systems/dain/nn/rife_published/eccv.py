"""RIFE as the paper has it: three blocks, a context network and a U-Net, and the teacher of their training.

The teacher, `block_tea`, also sees the true frame. Source: as in `networks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from mpt.systems.dain.nn.operators.interpolation import Between
from mpt.systems.dain.nn.rife_published.blocks import FlowBlock, PlainBlock
from mpt.systems.dain.nn.rife_published.distillation import DistillationRegion
from mpt.systems.dain.nn.rife_published.networks import (
    Estimate,
    Frames,
    PublishedRife,
    joined,
    time_plane,
)
from mpt.systems.dain.nn.rife_published.refinement import ContextNet, Unet


class Taught(NamedTuple):
    """What a training step of the ECCV networks looks at: our frame, the teacher's, and the distance to its flow."""

    image: Tensor
    teacher_image: Tensor
    distillation: Tensor


class EccvRife(PublishedRife):
    """IFNet and, with `any_time`, IFNet_m: three blocks, and a residual from context network and U-Net."""

    def __init__(self, any_time: bool) -> None:
        super().__init__((4, 2, 1))
        self.any_time = any_time
        extra = int(any_time)
        self.block0 = PlainBlock(6 + extra, 240)
        self.block1 = PlainBlock(17 + extra, 150)
        self.block2 = PlainBlock(17 + extra, 90)
        self.block_tea = PlainBlock(20 + extra, 90)
        self.contextnet, self.unet = ContextNet(), Unet()
        self.distillation = DistillationRegion()

    def estimates(self, pair: Frames, time_b: Tensor) -> list[Estimate]:
        """Return the estimates after each block."""
        known = [*pair, time_plane(time_b, pair[0])] if self.any_time else [*pair]
        found: list[Estimate] = []
        for block, scale in zip((self.block0, self.block1, self.block2), self.scales, strict=True):
            found.append(self.refined(block, known, pair, found[-1] if found else None, (), scale))
        return found

    def refined(
        self,
        block: FlowBlock,
        known: Sequence[Tensor],
        pair: Frames,
        before: Estimate | None,
        extra: Sequence[Tensor],
        scale: float,
    ) -> Estimate:
        """Return the estimate after one more block."""
        if before is None:
            made = block(joined(known), None, scale)
            return self.after(pair, made.flow_b4hw, made)
        made = block(joined([*known, *before.warped, before.mask, *extra]), before.flow, scale)
        made = made._replace(mask_b1hw=before.mask + made.mask_b1hw)
        return self.after(pair, before.flow + made.flow_b4hw, made)

    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: None, time_b: Tensor
    ) -> Between:
        """Return the frame between. Without `any_time` it is the middle one, whatever the time."""
        pair = (first_bchw, last_bchw)
        return self.finished(pair, self.estimates(pair, time_b)[-1])

    def finished(self, pair: Frames, last: Estimate) -> Between:
        """Return the blend with its residual."""
        context = [
            self.contextnet(frame, last.flow[:, 2 * side : 2 * side + 2])
            for side, frame in enumerate(pair)
        ]
        residual = 2 * self.unet(joined([*pair, *last.warped, last.mask, last.flow]), *context) - 1
        blended = self.blend(last)
        image = (blended + residual.to(blended.dtype)).clamp(0, 1)
        return Between(image, blended, last.flow, {"mask": last.mask, "residual": residual})

    def forward(self, *inputs: Any, taught_by: Tensor | None = None, **options: Any) -> Any:
        """Return the frame as every interpolator does; with the true frame, what a training step looks at."""
        if taught_by is None:
            return super().forward(*inputs, **options)
        first, last, time = inputs
        return self.taught((first, last), time, taught_by)

    def taught(self, pair: Frames, time_b: Tensor, truth_bchw: Tensor) -> Taught:
        """Return our frame, the teacher's, and the mean distance of the blocks' flows to the teacher's."""
        known = [*pair, time_plane(time_b, pair[0])] if self.any_time else [*pair]
        found = self.estimates(pair, time_b)
        teacher = self.refined(self.block_tea, known, pair, found[-1], (truth_bchw,), 1)
        teacher_image = self.blend(teacher)
        students = [(self.blend(one), one.flow) for one in found]
        distance = self.distillation(students, teacher_image, teacher.flow, truth_bchw)
        return Taught(self.finished(pair, found[-1]).image, teacher_image, distance)
