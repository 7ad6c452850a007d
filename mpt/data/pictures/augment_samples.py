"""Random changes to samples of several fields: images, masks and boxes move together, by the same draws.

The changes of a field follow from its kind (`mpt.seams.FieldSpec`): all images of a sample (two cameras, two frames)
get the same change; masks follow geometry and not colour; boxes follow geometry, are clipped to the image, and leave
`box_mask` if less than a pixel of them is left; targets stay. The transforms are torchvision's and the draws those
of `mpt.data.pictures.augment`: they depend on (seed, epoch, index) alone.

Images of different sizes can be flipped together; a transform that draws pixels (a crop, a shift) needs one size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpt.data.pictures.augment import Entry, build_transform, preserved_generator
from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError
from mpt.seams import FieldSpec
from mpt.vision_ops import import_torchvision

BOX_MASK = "box_mask"
SMALLEST_SIDE = 1.0
"""Pixels; a box that keeps less of its width or height is gone."""


class SampleAugmentation:
    """A list of transforms for samples of these fields. Raises ConfigError for one that cannot be applied to them."""

    def __init__(
        self, entries: Sequence[Entry], fields: Mapping[str, FieldSpec], seed: int
    ) -> None:
        images = [name for name, spec in fields.items() if spec.kind == "image"]
        assert images, "an augmentation needs an image"
        self.fields, self.seed = dict(fields), seed
        self.canvas = fields[images[0]].shape[-2:]
        """Height and width of the first image, to which boxes belong."""
        self.transforms = [(entry, build_transform(entry, self.canvas[0])) for entry in entries]
        self.kinds = import_torchvision("tv_tensors")
        self.moved = [
            name for name, spec in fields.items() if spec.kind in ("image", "mask", "boxes")
        ]
        zeros = {name: torch.zeros(fields[name].shape) for name in self.moved}
        with preserved_generator():
            self.apply(zeros, 0, 0)

    def apply(self, sample: Mapping[str, Tensor], epoch: int, index: int) -> dict[str, Tensor]:
        """Return one sample changed as (seed, epoch, index) say. Call inside `preserved_generator()`.

        Images and masks are float32 (c, h, w), boxes float32 (M, 4) as x1 y1 x2 y2 in pixels of the first image.
        """
        torch.default_generator.manual_seed(mix(self.seed, epoch, index))
        moving = {name: self.wrap(name, sample[name]) for name in self.moved}
        for entry, transform in self.transforms:
            try:
                changed: Any = transform(moving)  # type: ignore[arg-type]
            except (TypeError, ValueError, RuntimeError) as error:
                name = entry if isinstance(entry, str) else next(iter(entry))
                sizes = ", ".join(
                    f"{key} {'x'.join(map(str, value.shape))}" for key, value in moving.items()
                )
                raise ConfigError(
                    f"dataset.augment: {name} fails on samples of {sizes}: {error}"
                ) from error
            moving = changed
        return {**sample, **self.finish(sample, moving)}

    def wrap(self, name: str, value: Tensor) -> Any:
        """Mark a field's kind for torchvision."""
        kind = self.fields[name].kind
        if kind == "boxes":
            return self.kinds.BoundingBoxes(value, format="XYXY", canvas_size=self.canvas)
        return self.kinds.Image(value) if kind == "image" else self.kinds.Mask(value)

    def finish(self, sample: Mapping[str, Tensor], moved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return plain tensors of the promised sizes; boxes that are gone are zero and out of the mask."""
        done: dict[str, Tensor] = {}
        for name, value in moved.items():
            spec = self.fields[name]
            if spec.kind == "boxes":
                height, width = value.canvas_size
                boxes = value.as_subclass(Tensor).clone()
                boxes[:, 0::2] = boxes[:, 0::2].clamp(0, width) * (self.canvas[1] / width)
                boxes[:, 1::2] = boxes[:, 1::2].clamp(0, height) * (self.canvas[0] / height)
                kept = (boxes[:, 2:] - boxes[:, :2]).amin(1) >= SMALLEST_SIDE
                if BOX_MASK in sample:
                    kept = kept & sample[BOX_MASK]
                    done[BOX_MASK] = kept
                done[name] = boxes * kept[:, None]
            else:
                done[name] = fit(value.as_subclass(Tensor), spec)
        return done


def fit(value_chw: Tensor, spec: FieldSpec) -> Tensor:
    """Return an image or a mask in the size that its field promises."""
    size = spec.shape[-2:]
    if value_chw.shape[-2:] == size:
        return value_chw
    if spec.kind == "mask":
        return functional.interpolate(value_chw[None], size, mode="nearest")[0]
    return functional.interpolate(
        value_chw[None], size, mode="bilinear", antialias=True, align_corners=False
    )[0]
