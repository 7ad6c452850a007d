"""Two frames and one between them: what a frame-interpolating task is fed, whichever files or formulas they come from.

Fields: `first`, `middle`, `last` (3, h, w) and `time` (), where the middle is between 0 and 1; `size` (2,), the
height and width that are real where test pictures of several sizes were padded to one; from formulas also `flow`
(4, h, w), first to last and last to first in pixels, and where it is asked for `order` (2, h, w), the number of the
surface that is seen in the first and the last frame, larger ones nearer.

Training samples are cropped, flipped both ways and swapped in time, alike in all fields. What is drawn for a sample
depends on (seed, epoch, index) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from mpt.data.pictures.seeds import mix
from mpt.errors import ConfigError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec


@dataclass(frozen=True)
class Triplet:
    """One sample: frames (3, h, w) uint8 or float32, the time of the middle one; where known the flows (4, h, w) and
    the surfaces that are seen (2, h, w) uint8."""

    first: Tensor
    middle: Tensor
    last: Tensor
    time: float = 0.5
    flow: Tensor | None = None
    order: Tensor | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        height, width = self.first.shape[-2:]
        return height, width


class TripletSource(Protocol):
    """Where triplets are read from. `draw` picks among several middle frames if there are several."""

    dtype: torch.dtype
    has_flow: bool
    has_order: bool
    names: list[str]

    def __len__(self) -> int: ...

    def largest(self) -> tuple[int, int]: ...

    def read(self, index: int, draw: int) -> Triplet: ...


@dataclass(frozen=True)
class Changes:
    """How training samples are changed. `crop` is (height, width)."""

    crop: tuple[int, int] | None = None
    flip: bool = False
    swap: bool = False


def triplet_layout(
    size: tuple[int, int],
    count: int,
    dtype: torch.dtype,
    has_flow: bool,
    test_names: Sequence[str] = (),
    has_order: bool = False,
) -> DataSpec:
    """Return the layout of triplets (height, width); the names of few test samples are in `extra`, for a table."""
    image = FieldSpec((3, *size), dtype, "image")
    fields = {"first": image, "middle": image, "last": image, "time": FieldSpec((), torch.float32)}
    fields["size"] = FieldSpec((2,), torch.int64)
    if has_flow:
        fields["flow"] = FieldSpec((4, *size), torch.float32)
    if has_order:
        fields["order"] = FieldSpec((2, *size), torch.uint8)
    return DataSpec(fields, count, extra={"test_names": list(test_names)} if test_names else {})


class Triplets(Dataset):
    """A data set of triplets. Without changes, samples smaller than the largest are padded by repeating their edge."""

    def __init__(
        self,
        source: TripletSource,
        changes: Changes,
        seed: int,
        train: bool,
        test_names: Sequence[str] = (),
    ) -> None:
        self.test_names = list(test_names)
        self.source, self.changes, self.seed, self.train = source, changes, seed, train
        self.size = changes.crop or source.largest()
        largest = source.largest()
        if changes.crop and (changes.crop[0] > largest[0] or changes.crop[1] > largest[1]):
            raise ConfigError(
                f"dataset.crop: {list(changes.crop)} (height, width) is larger than the frames, "
                f"{largest[0]} x {largest[1]} (height x width); choose a smaller crop"
            )
        self.spec = triplet_layout(
            self.size, len(source), source.dtype, source.has_flow, self.test_names, source.has_order
        )

    def __len__(self) -> int:
        return len(self.source)

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of these indices as they are in this epoch."""
        samples = [self.sample(index, epoch) for index in indices]
        padded = [
            [pad_to(getattr(s, name), self.size) for s in samples]
            for name in ("first", "middle", "last")
        ]
        batch = {
            name: torch.stack(images) for name, images in zip(("first", "middle", "last"), padded)
        }
        batch["time"] = torch.tensor([sample.time for sample in samples], dtype=torch.float32)
        batch["size"] = torch.tensor([sample.size for sample in samples])
        if self.source.has_flow:
            batch["flow"] = torch.stack(
                [pad_to(s.flow, self.size) for s in samples if s.flow is not None]
            )
        if self.source.has_order:
            batch["order"] = torch.stack(
                [pad_to(s.order, self.size) for s in samples if s.order is not None]
            )
        return batch

    def sample(self, index: int, epoch: int) -> Triplet:
        """Return one sample with its changes."""
        if not self.train:
            return crop(self.source.read(index, 0), self.changes.crop, None)
        numbers = torch.Generator().manual_seed(mix(self.seed, epoch, index))
        draw, swap, across, down = torch.randint(2**31, (4,), generator=numbers).tolist()
        sample = crop(self.source.read(index, draw), self.changes.crop, numbers)
        if self.changes.swap and swap % 2:
            sample = swapped(sample)
        if self.changes.flip:
            sample = flipped(sample, across=across % 2 == 1, down=down % 2 == 1)
        return sample


def crop(sample: Triplet, size: tuple[int, int] | None, numbers: torch.Generator | None) -> Triplet:
    """Cut a window from all fields: at random with a generator, around the centre without."""
    if size is None or sample.size == size:
        return sample
    height, width = min(size[0], sample.size[0]), min(size[1], sample.size[1])
    spare = (sample.size[0] - height, sample.size[1] - width)
    if numbers is None:
        top, left = spare[0] // 2, spare[1] // 2
    else:
        top, left = (int(torch.randint(room + 1, (), generator=numbers)) for room in spare)
    return mapped(sample, lambda image: image[:, top : top + height, left : left + width])


def swapped(sample: Triplet) -> Triplet:
    """Return the sample played backwards."""
    flow = None if sample.flow is None else torch.cat((sample.flow[2:], sample.flow[:2]))
    order = None if sample.order is None else sample.order.flip(0)
    return replace(
        sample, first=sample.last, last=sample.first, time=1 - sample.time, flow=flow, order=order
    )


def flipped(sample: Triplet, across: bool, down: bool) -> Triplet:
    """Return the sample mirrored left to right and top to bottom; flows turn with it."""
    axes = [axis for axis, wanted in ((-1, across), (-2, down)) if wanted]
    if not axes:
        return sample
    turned = mapped(sample, lambda image: image.flip(axes))
    if turned.flow is None:
        return turned
    sign = torch.tensor(
        [-1.0 if across else 1.0, -1.0 if down else 1.0], dtype=torch.float32
    ).repeat(2)[:, None, None]
    return replace(turned, flow=turned.flow * sign)


def mapped(sample: Triplet, function: _Change) -> Triplet:
    """Return the sample with every picture changed alike."""
    flow = None if sample.flow is None else function(sample.flow)
    order = None if sample.order is None else function(sample.order)
    first, middle, last = (function(image) for image in (sample.first, sample.middle, sample.last))
    return replace(sample, first=first, middle=middle, last=last, flow=flow, order=order)


class _Change(Protocol):
    def __call__(self, image: Tensor, /) -> Tensor: ...


def pad_to(image_chw: Tensor, size: tuple[int, int]) -> Tensor:
    """Return a picture with its last rows and columns repeated up to a size."""
    height, width = image_chw.shape[-2:]
    if (height, width) == size:
        return image_chw
    amount = (0, size[1] - width, 0, size[0] - height)
    # replicate padding is for floats; uint8 is exact in them
    return F.pad(image_chw[None].float(), amount, mode="replicate")[0].to(image_chw.dtype)
