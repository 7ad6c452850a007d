"""RIFE's HD networks 3.x: three equal blocks, each run in both directions, without a time.

Their files hold the teacher of a training that is not published: it is kept, not trained. Source: as in `networks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpt.systems.dain.nn.operators.interpolation import Between
from mpt.systems.dain.nn.rife_published.blocks import PairedBlock
from mpt.systems.dain.nn.rife_published.networks import (
    Estimate,
    PublishedRife,
    joined,
    swapped_flow,
)


class HdRife(PublishedRife):
    """HD 3.x: three blocks, each run in both directions; the middle frame only."""

    any_time = False

    def __init__(self, older: bool) -> None:
        super().__init__((4, 2, 1))
        self.block0, self.block1, self.block2 = (PairedBlock(11, 90, older) for _ in range(3))
        self.block_tea = PairedBlock(14, 90, older).requires_grad_(False)

    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: None, time_b: Tensor
    ) -> Between:
        """Return the middle frame."""
        pair = (first_bchw, last_bchw)
        flow = torch.zeros_like(
            torch.cat(pair, dim=1)[:, :4], dtype=torch.promote_types(first_bchw.dtype, torch.float)
        )
        levels = []
        estimate = Estimate(flow, flow[:, :1], pair)
        for block, scale in zip((self.block0, self.block1, self.block2), self.scales, strict=True):
            before = estimate
            there = block(joined([*before.warped, before.mask]), before.flow, scale)
            back = block(
                joined([*before.warped[::-1], -before.mask]), swapped_flow(before.flow), scale
            )
            flow = before.flow + (there.flow_b4hw + swapped_flow(back.flow_b4hw)) / 2
            mask = before.mask + (there.mask_b1hw - back.mask_b1hw) / 2
            estimate = Estimate(flow, mask, self.both_warped(pair, flow))
            levels.append(flow)
        return Between(
            self.blend(estimate), None, flow, {"mask": mask, "levels": torch.stack(levels)}
        )
