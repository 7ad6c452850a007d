"""Samples looked at in their first epoch: values that are not finite, labels that no class has.

They are named here; later they are a loss of NaN, or an index error within a kernel. Augmentation draws anew in every
epoch, but a file's contents are the same. If classes come equally often, an epoch does not have all samples, and all
epochs are looked at.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mpt.errors import DataError
from mpt.seams import IGNORED, Batch, Dataset
from mpt.seams.members import article
from mpt.seams.samples import Adopted


def fetch(dataset: Dataset, indices: Sequence[int], epoch: int, looks: bool) -> Batch:
    """Return samples of a data set. Raises DataError for one that cannot be trained on, if it `looks` at them."""
    batch = dataset.fetch(indices, epoch)
    if looks:
        look_at(dataset, indices, batch)
    return batch


def look_at(dataset: Dataset, indices: Sequence[int], batch: Batch) -> None:
    """Raise DataError for the first sample with values that are not finite, or a label of no class."""
    check_layout(dataset, len(indices), batch)
    for name, spec in dataset.spec.fields.items():
        value = batch[name]
        if not value.numel():
            continue
        is_picture = spec.kind == "image" or name == "image"
        if is_picture and value.is_floating_point() and not is_finite(value):
            bad = next(number for number, one in enumerate(value) if not is_finite(one))
            raise DataError(
                f"{dataset.name_of(indices[bad])}: its '{name}' holds NaN or infinite values; mend it or take it out "
                "(`mpt doctor CONFIG` lists all such samples)"
            )
    label, classes = batch.get("label"), len(dataset.spec.classes)
    if label is None or not classes or label.dim() != 1 or label.is_floating_point():
        return
    numbers = label.tolist()
    if min(numbers, default=0) >= 0 and max(numbers, default=0) < classes:
        return
    wrong = ((label < 0) | (label >= classes)) & (label != IGNORED)
    if bool(wrong.any()):
        bad = int(wrong.nonzero()[0])
        raise DataError(
            f"{dataset.name_of(indices[bad])}: its label is {int(label[bad])}, and there are {classes} classes, "
            f"numbered from 0 to {classes - 1}; mend the labels, or give {IGNORED} to samples that are to be left out"
        )


def check_layout(dataset: Dataset, count: int, batch: Any) -> None:
    """Raise DataError for a batch of another layout than the data set's `spec` says."""
    kind = type(dataset.inner if isinstance(dataset, Adopted) else dataset)
    what, fields = f"data set {kind.__name__}: its fetch", dataset.spec.fields
    if not isinstance(batch, Mapping):
        names = ", ".join(fields)
        raise DataError(
            f"{what} returned {article(batch)}; expected a dict of tensors by the names of its spec: {names}"
        )
    for name, spec in fields.items():
        value = batch.get(name)
        if name not in batch:
            found = ", ".join(map(str, batch)) or "nothing"
            raise DataError(f"{what} returned {found}; {name!r}, which its spec has, is missing")
        if not isinstance(value, Tensor):
            raise DataError(f"{what} returned {article(value)} as {name!r}; expected a tensor")
        # an image may be delivered in a quarter of the bytes
        fits = value.dtype == spec.dtype or (spec.kind == "image" and value.dtype == torch.uint8)
        shape = tuple(value.shape[1:])
        within = len(shape) == len(spec.shape) and all(map(operator.le, shape, spec.shape))
        if not fits or not within or len(value) != count:
            of = str(spec.dtype).removeprefix("torch.")
            raise DataError(
                f"{what} returned {name!r} in {str(value.dtype).removeprefix('torch.')} of shape "
                f"{tuple(value.shape)} for {count} samples; its spec says {of} of shape {(count, *spec.shape)}"
            )


def is_finite(value: Tensor) -> bool:
    """Return whether all values are finite: by their sum, and one by one only if it is not.

    Large finite values may have a sum beyond the range.
    """
    return math.isfinite(value.sum().item()) or bool(value.isfinite().all())
