"""A data set whose images lie in one tensor: a batch is one indexed gather.

Size and channels are converted once, at the start, as long as the result stays below `LARGEST_PREPARED_BYTES`; beyond
that each batch is converted when it is fetched, with the same result. Float images stay float32. Byte images stay
bytes, a quarter of the memory, and if they are not to be changed they are delivered as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mpt.data.pictures.augment import Augmentation, Entry
from mpt.data.pictures.fitting import fit_images
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.seams.samples import class_counts

LARGEST_PREPARED_BYTES = 2**30
CHUNK = 4096  # images converted at a time, to bound the float copies


class InMemory(Dataset):
    """Images (n, c, h, w), float32 in [0, 1] or uint8, with labels (n,)."""

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        classes: tuple[str, ...],
        *,
        image_size: int | None = None,
        channels: int | None = None,
        augment: Sequence[Entry] = (),
        seed: int = 0,
    ) -> None:
        if images.dim() != 4 or images.dtype not in (torch.float32, torch.uint8):
            raise DataError(
                f"images: found {str(images.dtype).removeprefix('torch.')} of shape {tuple(images.shape)}; expected "
                "(images, channels, height, width) in float32 from 0 to 1 or in uint8"
            )
        if len(labels) != len(images):
            raise DataError(
                f"labels: found {len(labels)} for {len(images)} images; expected one for each"
            )
        self.image_size = image_size or images.shape[-1]
        self.channels = channels or images.shape[1]
        self.labels = labels.long()
        wanted_bytes = len(images) * self.channels * self.image_size**2 * images.element_size()
        shape = (self.channels, self.image_size, self.image_size)
        if images.shape[1:] != shape and wanted_bytes <= LARGEST_PREPARED_BYTES:
            images = self.prepare(images)
        self.images = images
        self.fits = images.shape[1:] == shape
        self.augmentation = (
            Augmentation(augment, self.image_size, self.channels, seed) if augment else None
        )
        self.delivers_bytes = images.dtype == torch.uint8 and self.fits and not augment
        image = FieldSpec(shape, torch.uint8 if self.delivers_bytes else torch.float32, "image")
        numbers = self.class_labels()
        counts = class_counts(numbers, classes)
        is_finite = bool(images.dtype is torch.uint8 or images.isfinite().all())
        has_classes = min(numbers, default=0) >= 0 and max(numbers, default=0) < len(classes)
        # a set that derives from this one may deliver something else
        self.is_sound = type(self) is InMemory and is_finite and (has_classes or not classes)
        self.spec = DataSpec(
            {"image": image, "label": FieldSpec((), torch.int64)}, len(images), classes, counts
        )

    def __len__(self) -> int:
        return len(self.images)

    def class_labels(self) -> list[int]:
        """Return the class of every image."""
        numbers: list[int] = self.labels.tolist()
        return numbers

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of `indices`, in their order."""
        where = torch.tensor(indices, dtype=torch.int64)
        image = self.images.index_select(0, where)
        if image.dtype is torch.uint8 and not self.delivers_bytes:
            image = image / 255  # one pass; the same numbers as by way of float()
        if not self.fits:
            image = fit_images(image, self.image_size, self.channels)
        if self.augmentation is not None:
            image = self.augmentation.apply_all(image, epoch, indices)
        return {"image": image, "label": self.labels.index_select(0, where)}

    def prepare(self, images: Tensor) -> Tensor:
        """Return all images at the wanted size, in their own dtype."""
        if images.dtype is torch.float32:
            return fit_images(images, self.image_size, self.channels)
        prepared = torch.empty(
            len(images), self.channels, self.image_size, self.image_size, dtype=torch.uint8
        )
        for start in range(0, len(images), CHUNK):
            part = fit_images(
                images[start : start + CHUNK].float().div_(255), self.image_size, self.channels
            )
            prepared[start : start + CHUNK] = part.mul_(255).round_()
        return prepared
