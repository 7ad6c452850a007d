"""The settings that the data sets of scenes share: the cameras, and how samples are changed by chance in training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mpt.config.options import DatasetOptions


class SceneOptions(DatasetOptions):
    """The defaults are those of photographs; zeros change nothing."""

    cameras: Literal["pair", "rgb", "ir"] = "pair"
    """Both cameras, or one."""
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
