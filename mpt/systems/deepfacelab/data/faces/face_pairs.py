"""Two identities side by side: the input of a face-swapping task, whichever files or formulas the faces come from.

Sample i pairs a source face with a destination face that changes with the epoch; the identities need not have equally
many. Training samples are moved and bent (`face_warp`); test samples are as they are, so their input is their
target.

Fields: `src_warped` and `src_target` (3 h w), `src_mask` and `src_eyes_mouth` (1 h w), the same for `dst`, and, if
the true swap is known, `swap_target` and `swap_mask`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from mpt.errors import ConfigError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.systems.deepfacelab.data.faces.colour_transfer import transfer
from mpt.systems.deepfacelab.data.faces.face_warp import (
    FACE,
    draw_numbers,
    draw_warps,
    shift_hues,
    warp,
)


class Faces(NamedTuple):
    """Images (b 3 h w), face masks and eyes-and-mouth masks (b 1 h w), float32 in [0, 1].

    Images that were resampled cubically overshoot a little, until they have been changed.
    """

    image: Tensor
    mask: Tensor
    eyes_mouth: Tensor


class Identity(Protocol):
    """The faces of one person."""

    def __len__(self) -> int: ...

    def faces(self, indices: Sequence[int]) -> Faces: ...

    def picture(self, index: int) -> Tensor: ...


@dataclass(frozen=True)
class Augmentation:
    """How training faces are changed. Flip chances are zero or DeepFaceLab's .4."""

    warp: bool
    transform: bool
    src_flip: float
    dst_flip: float
    hsv_power: float = 0.0
    """Of the source's input alone."""
    colours: str = "none"
    """How the source takes colours from random destination faces, see `colour_transfer`."""
    scale: float = 0.15
    """How far faces are enlarged, and by the inverse made smaller: SAEHD's 0.15."""


NONE = Augmentation(False, False, 0.0, 0.0)
YAW_BINS = 128
DRAWING = ("idt", "sot")
"""Ways of colour transfer that draw random numbers."""
COLOUR_STREAM, YAW_STREAM = 3, 4
"""Streams of random numbers alongside the sides' (0 and 1) and the rotation of partners (2)."""


class FacePairs(Dataset):
    """A data set of pairs. `swaps`, when given, holds the destination's faces as the source person.

    `yaws` holds, for each side, how far each face is turned, -1 to 1; with it all turns are drawn equally often.
    """

    def __init__(
        self,
        src: Identity,
        dst: Identity,
        size: int,
        seed: int,
        augmentation: Augmentation,
        swaps: Identity | None,
        yaws: Mapping[str, Sequence[float]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.identities = {"src": src, "dst": dst}
        self.bins = {side: bin_yaws(values) for side, values in (yaws or {}).items()}
        self.extra = dict(extra or {})
        self.size, self.seed, self.augmentation, self.swaps = size, seed, augmentation, swaps
        self.flips = {"src": augmentation.src_flip, "dst": augmentation.dst_flip}
        self.spec = describe_pairs(size, len(self), swaps is not None, self.extra)

    def __len__(self) -> int:
        return max(len(identity) for identity in self.identities.values())

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of these indices as they are in this epoch."""
        batch: Batch = {}
        for stream, (side, identity) in enumerate(self.identities.items()):
            chosen = [self.partner(index, epoch, side) for index in indices]
            faces = identity.faces(chosen)
            inputs = None
            if side == "src":
                inputs, target = self.colour(faces.image, indices, epoch)
                faces = faces._replace(image=target)
            if self.augmentation == NONE:
                image = faces.image.clamp(0, 1)
                warped, target, masks = (
                    image,
                    image,
                    torch.cat((faces.mask, faces.eyes_mouth), dim=1),
                )
            else:
                numbers = draw_numbers(self.seed, stream, epoch, indices)
                ways = self.augmentation
                reach = replace(FACE, scale=1 + ways.scale)
                warps = draw_warps(numbers, self.size, ways.transform, self.flips[side], reach)
                masks = torch.cat((faces.mask, faces.eyes_mouth), dim=1)
                warped, target, masks = warp(
                    faces.image, masks, warps, self.augmentation.warp, inputs
                )
            batch[f"{side}_warped"], batch[f"{side}_target"] = warped, target
            batch[f"{side}_mask"], batch[f"{side}_eyes_mouth"] = (
                masks[:, :1],
                normalize(masks[:, 1:]),
            )
            if side == "dst" and self.swaps is not None:
                swap = self.swaps.faces(chosen)
                batch["swap_target"], batch["swap_mask"] = swap.image, swap.mask
        return batch

    def colour(
        self, images: Tensor, indices: Sequence[int], epoch: int
    ) -> tuple[Tensor | None, Tensor]:
        """Return the source's images as the network gets them, None for the same, and as it is to draw them."""
        inputs, ways = None, self.augmentation
        if ways.colours != "none":
            # DeepFaceLab transfers colours to input and target by two calls, so that random ways draw twice.
            if ways.colours in DRAWING:
                inputs = self.recolour(images, indices, epoch, call=1)
            images = self.recolour(images, indices, epoch, call=0)
        if ways.hsv_power:
            shifts = draw_numbers(self.seed, COLOUR_STREAM, epoch, indices)[:, :3]
            inputs = shift_hues(
                (images if inputs is None else inputs).clamp(0, 1), shifts, ways.hsv_power
            )
        return inputs, images

    def recolour(self, images: Tensor, indices: Sequence[int], epoch: int, call: int) -> Tensor:
        """Return source images with the colours of destination faces drawn at random, the same in every call."""
        results = []
        for image, index in zip(images, indices):
            key = [self.seed % 2**64, epoch % 2**64]
            numbers = np.random.Generator(
                np.random.Philox(key=key, counter=[0, 0, index % 2**64, COLOUR_STREAM + 64])
            )
            other = int(numbers.integers(len(self.identities["dst"])))
            # All of the picture, whatever type of face the model draws, as in DeepFaceLab.
            reference = self.identities["dst"].picture(other)
            if call:
                other_stream = [0, 0, index % 2**64, COLOUR_STREAM + 64 + call]
                numbers = np.random.Generator(np.random.Philox(key=key, counter=other_stream))
            one, two = (picture.flip(0).permute(1, 2, 0).numpy() for picture in (image, reference))
            recoloured = transfer(self.augmentation.colours, one, two, numbers)
            results.append(torch.from_numpy(recoloured).permute(2, 0, 1).flip(0))
        return torch.stack(results)

    def partner(self, index: int, epoch: int, side: str) -> int:
        """Return which face of one side belongs to a sample; destinations rotate against sources every epoch."""
        count = len(self.identities[side])
        if side in self.bins:
            stream = YAW_STREAM + (side == "dst")
            one, other = draw_numbers(self.seed, stream, epoch, [index])[0, :2].tolist()
            bins = self.bins[side]
            faces = bins[int(one * len(bins))]
            return faces[int(other * len(faces))]
        if side == "src" or self.augmentation == NONE:
            return index % count
        generator = np.random.Philox(key=[self.seed % 2**64, epoch % 2**64], counter=[0, 0, 0, 2])
        return (index + int(np.random.Generator(generator).integers(count))) % count


def normalize(regions: Tensor) -> Tensor:
    """Scale each sample's region to a maximum of 1; an empty one stays."""
    highest = regions.amax(dim=(1, 2, 3), keepdim=True)
    return regions / torch.where(highest > 0, highest, 1.0)


def bin_yaws(yaws: Sequence[float]) -> list[list[int]]:
    """Return the faces of each turn that there is, of `YAW_BINS` between -1 and 1."""
    bins: dict[int, list[int]] = {}
    for index, yaw in enumerate(yaws):
        bins.setdefault(min(int((yaw + 1) / 2 * YAW_BINS), YAW_BINS - 1), []).append(index)
    return [bins[key] for key in sorted(bins)]


def describe_pairs(
    size: int, count: int, with_swaps: bool = False, extra: Mapping[str, Any] | None = None
) -> DataSpec:
    """Return the layout of pairs of faces with sides of `size` pixels."""
    image = FieldSpec((3, size, size), torch.float32, "image")
    mask = FieldSpec((1, size, size), torch.float32, "mask")
    fields: dict[str, FieldSpec] = {}
    for side in ("src", "dst"):
        fields |= {f"{side}_warped": image, f"{side}_target": image}
        fields |= {f"{side}_mask": mask, f"{side}_eyes_mouth": mask}
    if with_swaps:
        fields |= {"swap_target": image, "swap_mask": mask}
    return DataSpec(fields, count, extra=dict(extra or {}))


def check_settings(channels: int | None, augment: Sequence[object]) -> None:
    """Refuse anything but colour, and changes that would move a face away from its mask."""
    if channels not in (None, 3):
        raise ConfigError(
            f"dataset.channels is {channels}; faces are colour images: leave it out or write 3"
        )
    if augment:
        raise ConfigError(
            "dataset.augment: faces are changed together with their masks, by random_warp, random_transform, "
            "random_src_flip and random_dst_flip; leave augment out"
        )
