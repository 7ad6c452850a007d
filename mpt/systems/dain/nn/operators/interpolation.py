"""What every frame-interpolating network is to the task: two frames and a time in, the frame between out.

`prepare` does what depends on the two frames alone and `render` what depends on the time, so that x4 and x8 do the
first once. `forward` is both, which is what training runs and memory tricks wrap.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Between:
    """A frame between two others. Images (b, 3, h, w) near [0, 1]; flows (b, 2, h, w) in pixels."""

    image: Tensor
    blended: Tensor | None = None
    """The frame before its rectification, where the network has one; the loss looks at both."""
    flow: Tensor | None = None
    """Flow from the first frame to the last, where the network has one."""
    extra: dict[str, Tensor] = field(default_factory=dict)


class Interpolator(nn.Module):
    """Base class. Heights and widths given to it are multiples of `multiple`."""

    multiple: int = 1
    has_flow: bool = False
    """Whether it has `flow_both_ways`, which can be trained alone."""
    margin: int = 32
    """Pixels at a tile's edge whose values the tile's neighbour knows better."""
    pads_with_zeros: bool = False
    """Whether frames are padded to the multiple by zeros at the right and below, as published RIFE is."""
    any_time: bool = True
    """Whether it makes a frame at any time; else the middle one, whatever the time."""

    def padded(self, image_bchw: Tensor) -> Tensor:
        """Return an image whose sides are multiples, with rows and columns added at the right and below."""
        height, width = image_bchw.shape[-2:]
        amount = (0, -width % self.multiple, 0, -height % self.multiple)
        return (
            F.pad(image_bchw, amount)
            if self.pads_with_zeros
            else F.pad(image_bchw, amount, mode="replicate")
        )

    @abstractmethod
    def prepare(self, first_bchw: Tensor, last_bchw: Tensor) -> Any:
        """Return the part that does not depend on the time."""

    @abstractmethod
    def render(
        self, first_bchw: Tensor, last_bchw: Tensor, prepared: Any, time_b: Tensor
    ) -> Between:
        """Return the frame at a time (b,) between 0 and 1."""

    def between(self, first_bchw: Tensor, last_bchw: Tensor, time_b: Tensor) -> Between:
        """Return the frame at a time with all that was computed on the way."""
        return self.render(first_bchw, last_bchw, self.prepare(first_bchw, last_bchw), time_b)

    def forward(
        self, first_bchw: Tensor, last_bchw: Tensor, time: Tensor, flow_only: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return the frame and, where the network has one, the frame before its rectification, at times (b,).

        For times (b, n) the frames are (b, n, 3, h, w). With `flow_only` the flows between the frames (b, 4, h, w).
        Everything that runs on a built task comes through here, where precision modes and memory tricks have their
        wrappers.
        """
        if flow_only:
            return self.flow_both_ways(first_bchw, last_bchw), None
        prepared = self.prepare(first_bchw, last_bchw)
        if time.dim() == 1:
            result = self.render(first_bchw, last_bchw, prepared, time)
            return result.image, result.blended
        images = [self.render(first_bchw, last_bchw, prepared, one).image for one in time.unbind(1)]
        return torch.stack(images, dim=1), None

    def flow_both_ways(self, first_bchw: Tensor, last_bchw: Tensor) -> Tensor:
        """Return the flows between the frames (b, 4, h, w), in pixels, first to last then last to first."""
        raise NotImplementedError(f"{type(self).__name__} estimates no flow")
