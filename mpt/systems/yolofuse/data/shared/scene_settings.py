"""The settings that the data sets of scenes share: the cameras, and how samples are changed by chance in training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mpt.config.options import DatasetOptions


class SceneOptions(DatasetOptions):
    """The defaults are those of photographs; zeros change nothing."""

    cameras: Literal["pair", "rgb", "ir"] = "pair"
    """Both cameras, or one."""
    ir_range: Literal["full", "picture", "percentile"] | list[float] | None = None
    """Numbers of an infrared file that become 0 and 255: two numbers are one range for all pictures; `percentile` and
    `picture` (least to largest) are each picture's own; `full` is 0 to 65535. null refuses more than 8 bits."""
    ir_percentiles: list[float] = Field(
        default_factory=lambda: [1.0, 99.0], min_length=2, max_length=2
    )
    """The two percentiles of `ir_range: percentile`."""
    canvas: int | None = Field(None, ge=64)
    """Side in pixels up to which test pictures and given files keep their own size; the network looks at them in tiles
    of `image_size` that overlap (`task.tile_overlap`). null resizes each picture to `image_size`."""
    mosaic: float = Field(1.0, ge=0, le=1)
    """Probability that four pictures are put together."""
    mosaic_epochs: int | None = Field(None, ge=0)
    """Epoch from which there is no mosaic and no mixup any more; null is never."""
    mixup: float = Field(0.0, ge=0, le=1)
    """Probability that two samples are blended."""
    flip_across: float = Field(0.5, ge=0, le=1)
    """Probability that a sample is mirrored left to right."""
    brightness: float = Field(0.4, ge=0, le=1)
    """Largest relative change of brightness, the same for both cameras."""
    translate: float = Field(0.1, ge=0, lt=1)
    """Largest shift, as a share of the sides."""
    scale: float = Field(0.5, ge=0, lt=1)
    """Largest relative change of size."""

    @model_validator(mode="after")
    def _keep_cameras_together(self) -> SceneOptions:
        if self.channels is not None:
            raise ValueError(
                "dataset.channels: the cameras have 3 channels (rgb) and 1 (ir); leave it out"
            )
        if self.augment:
            raise ValueError(
                "dataset.augment: pictures are changed together with their boxes, by mosaic, mixup, flip_across, "
                "flip_down, hue, saturation, brightness, translate and scale; leave augment out"
            )
        if isinstance(self.ir_range, list) and (
            len(self.ir_range) != 2 or not self.ir_range[0] < self.ir_range[1]
        ):
            raise ValueError(
                f"dataset.ir_range is {self.ir_range}; write two numbers, the lower first"
            )
        low, high = self.ir_percentiles
        if not 0 <= low < high <= 100:
            raise ValueError(
                f"dataset.ir_percentiles are {low:g} and {high:g}; write two from 0 to 100, the lower first"
            )
        return self
