"""What RIFE's teacher tells the blocks: the distance of their flows to the teacher's, where its frame is the better.

Source: Huang et al., 2022, equation 5, as in hzwer/ECCV2022-RIFE: per block the root of the mean square over the four
channels, counted where the block's blend is farther from the truth than the teacher's by more than `BETTER`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mpt.precision.shared.float32_modules import full_precision
from mpt.systems.dain.nn.operators.regions import raised

BETTER = 0.01


class DistillationRegion(nn.Module):
    """The distillation loss, computed in float32 in every mode; the teacher and the choice of pixels pass no gradient.

    At pixels if both flows are equal the root's gradient is 0 here; in the original it is infinite, and NaN if
    the pixel does not count.
    """

    def forward(
        self,
        students: Sequence[tuple[Tensor, Tensor]],
        teacher_image_bchw: Tensor,
        teacher_flow_b4hw: Tensor,
        truth_bchw: Tensor,
    ) -> Tensor:
        """Return the sum over the students (blend, flow) of the mean over pixels."""
        with full_precision(truth_bchw.device.type):
            truth, teacher_flow = raised(truth_bchw), raised(teacher_flow_b4hw).detach()
            teacher_error = mean_error(teacher_image_bchw, truth)
            total = truth.new_zeros(())
            for blend, flow in students:
                counts = mean_error(blend, truth) > teacher_error + BETTER
                squared = (teacher_flow - raised(flow)).square().mean(1, keepdim=True)
                distance = torch.where(squared > 0, squared, 1).sqrt()
                total = total + torch.where(counts & (squared > 0), distance, 0).mean()
            return total


def mean_error(image_bchw: Tensor, truth_bchw: Tensor) -> Tensor:
    """Return the mean absolute error over channels (b, 1, h, w), without a gradient."""
    return (raised(image_bchw).detach() - truth_bchw).abs().mean(1, keepdim=True)
