"""Samples of a data set: named tensors, the kind of each, and how samples are fetched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import getattr_static
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from mpt.errors import DataError, PartError
from mpt.seams.members import article, check_members, refused_call, wrong_call

Batch = dict[str, Tensor]
"""Named tensors that share dimension 0, the sample dimension.

A task sees images as float32 in [0, 1], NCHW. A data set of one image per sample calls it "image"; one of several has
a field for each, with any names, sizes and channels, and they need not be square. A data set may deliver an image as
uint8, a quarter of the bytes: the engine divides it by 255 on the device (`DataSpec.as_floats`).

Rows of which a sample has a varying number are padded to a fixed length M, so that shapes do not depend on the data,
and have a mask that says which rows are real. Boxes of objects are, by convention, `boxes` (M, 4) float32 as x1 y1 x2
y2 in pixels of the image, `classes` (M,) int64, and `box_mask` (M,) bool; padding rows are zero.
`mpt.data.pictures.padding` makes them.
"""

IGNORED = -100
"""The label of samples that cross-entropy and evaluations leave out, as in torch."""
FieldKind = Literal["image", "mask", "boxes", "target"]


@dataclass(frozen=True)
class FieldSpec:
    """Shape (without the batch dimension), dtype and kind of one field of a batch.

    The kind determines the changes that a field may undergo: an "image" in uint8 is converted on the device; an image,
    a "mask" (c, h, w) and "boxes" (M, 4) follow a geometric augmentation (`mpt.data.pictures.augment_samples`); a
    "target" is left alone. The shape is the largest: the rows of a target that are padding may be left out of a batch
    that needs fewer, the same number in all fields that are padded alike.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: FieldKind = "target"


@dataclass(frozen=True)
class DataSpec:
    """The layout of a data set, known without reading it all: enough to build a model and to plan its memory."""

    fields: Mapping[str, FieldSpec]
    size: int
    classes: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def require(self, name: str, reader: str) -> FieldSpec:
        """Return a field that `reader` ("model dcgan") reads. Raises DataError if the data set does not deliver it.

        Call while building: in a step a missing field would be a KeyError.
        """
        if name not in self.fields:
            raise DataError(
                f"{reader}: it needs '{name}' of each sample, but this data set delivers {', '.join(self.fields)}. "
                "Use another data set; `mpt list datasets` says what each holds"
            )
        return self.fields[name]

    def to_record(self) -> dict[str, Any]:
        """Return the layout as JSON can hold it."""
        fields = {
            name: {
                "shape": list(spec.shape),
                "dtype": str(spec.dtype).removeprefix("torch."),
                "kind": spec.kind,
            }
            for name, spec in self.fields.items()
        }
        return {
            "fields": fields,
            "size": self.size,
            "classes": list(self.classes),
            "extra": dict(self.extra),
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> DataSpec:
        """Read what `to_record` wrote. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        fields = {}
        for name, entry in record["fields"].items():
            dtype = getattr(torch, entry["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{entry['dtype']!r} is not a dtype")
            # not in records of earlier versions
            kind = entry.get("kind", "image" if name == "image" else "target")
            if kind not in get_args(FieldKind):
                raise ValueError(f"{kind!r} is no kind of field")
            fields[str(name)] = FieldSpec(tuple(int(side) for side in entry["shape"]), dtype, kind)
        return cls(
            fields, int(record["size"]), tuple(map(str, record["classes"])), dict(record["extra"])
        )

    def zeros(self, batch_size: int, device: torch.device | str, stored: bool = False) -> Batch:
        """Return a batch of zeros as a task sees it, for dry runs; `stored`: as the data set delivers it."""
        batch = {
            name: torch.zeros((batch_size, *spec.shape), dtype=spec.dtype, device=device)
            for name, spec in self.fields.items()
        }
        return batch if stored else self.as_floats(batch)

    def filled(self, batch: Batch) -> Batch:
        """Return a batch in the layout's shapes, zeros behind shorter fields (see `FieldSpec`).

        Raises DataError for a field that is larger than the layout says.
        """
        full = {}
        for name, value in batch.items():
            shape = self.fields[name].shape if name in self.fields else tuple(value.shape[1:])
            missing = [wanted - found for wanted, found in zip(shape, value.shape[1:], strict=True)]
            if min(missing, default=0) < 0:
                raise DataError(
                    f"'{name}': samples of {tuple(value.shape[1:])}, and {shape} is the largest that the data set named"
                )
            if any(missing):
                behind = [size for side in reversed(missing) for size in (0, side)]
                full[name] = torch.nn.functional.pad(value, behind)
        return {**batch, **full} if full else batch

    def as_floats(self, batch: Batch) -> Batch:
        """Return a batch with its uint8 images as float32 in [0, 1], the same numbers on every device."""
        converted = {}
        for name, value in batch.items():
            if (
                value.dtype == torch.uint8
                and name in self.fields
                and self.fields[name].kind == "image"
            ):
                # By a tensor: CUDA multiplies by the reciprocal of a number, which rounds differently.
                converted[name] = value / torch.full((), 255.0, device=value.device)
        return {**batch, **converted} if converted else batch


class Dataset:
    """Random access to samples. `fetch` depends on (seed, epoch, index) alone, so the number of workers changes
    nothing.
    """

    spec: DataSpec
    bad_files: Mapping[str, str] = MappingProxyType({})
    """File -> why it was passed over, of those met so far: for a data set that may leave bad files out."""
    is_sound: bool = False
    """Whether all values are known to be finite and all labels to be of a class: no batch is looked at then."""

    def __len__(self) -> int:
        return self.spec.size

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of `indices`: without a `fetch` of its own, those of `__getitem__`, one by one.

        Raises DataError for anything that cannot be read.
        """
        return stacked(self, self.spec, indices)

    def class_labels(self) -> Sequence[int] | None:
        """Return the class of every sample, if it is known without reading them."""
        return None

    def groups(self) -> Sequence[int] | None:
        """Return the group of every sample, if a batch may hold samples of one group only: those of one size.

        The samples of a group follow each other. The layout names the largest size.
        """
        return None

    def name_of(self, index: int) -> str:
        """Return a sample's name for people: its file, if it has one."""
        return f"sample {index}"

    def is_left_out(self, index: int) -> bool:
        """Return whether a sample was found to be bad, so that `fetch` gives another in its place, which an evaluation
        must not count twice.
        """
        return False

    def pass_over(self, files: Mapping[str, str]) -> None:
        """Take note of bad files that were met elsewhere, in a worker process."""
        self.bad_files = {**self.bad_files, **files}


def class_counts(labels: Sequence[int], classes: Sequence[str]) -> dict[str, Any]:
    """Return how many samples each class has, as `DataSpec.extra` holds it; nothing if there are no classes."""
    counts = Counter(labels)
    return {"class_counts": [counts[number] for number in range(len(classes))]} if classes else {}


def stacked(data: Any, spec: DataSpec, indices: Sequence[int]) -> Batch:
    """Return the samples that a data set's `__getitem__` gives as a batch: mappings by field, or values in the order of
    the layout's fields. Raises DataError for samples that are neither.
    """
    kind = type(data).__name__
    if not hasattr(data, "__getitem__"):
        raise DataError(
            f"data set {kind}: it has neither fetch(indices, epoch) nor __getitem__(index); give it one"
        )
    samples = []
    for index in indices:
        sample = data[index]
        if isinstance(sample, Sequence) and len(sample) == len(spec.fields):
            sample = dict(zip(spec.fields, sample, strict=True))
        if not isinstance(sample, Mapping) or set(sample) != set(spec.fields):
            found = (
                f"a mapping of {', '.join(map(str, sample))}"
                if isinstance(sample, Mapping)
                else type(sample).__name__
            )
            raise DataError(
                f"data set {kind}: its __getitem__({index}) gave {found}; expected are the fields of its spec, "
                f"{', '.join(spec.fields)}, by name or in this order"
            )
        samples.append(sample)
    try:
        return {
            name: torch.stack(
                [torch.as_tensor(sample[name], dtype=field.dtype) for sample in samples]
            )
            for name, field in spec.fields.items()
        }
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"data set {kind}: its samples do not make a batch: {error}") from error


def adopt(made: Any) -> Dataset:
    """Return the result of a data set's build, wrapped if its class does not derive from `Dataset`.

    Raises PartError for one without a layout or a length.
    """
    what = f"data set {type(made).__name__}"
    if made is None:
        raise PartError(
            "the data set's build returned nothing; expected an object of mpt.seams.Dataset"
        )
    for name in ("spec", "__len__"):
        if not hasattr(made, name):
            raise PartError(
                f"{what}: it has no {name}, which a data set's build must return with it"
            )
    spec: Any = made.spec
    if not isinstance(spec, DataSpec):
        raise PartError(f"{what}: its spec is {article(spec)}; expected a mpt.seams.DataSpec")
    if not isinstance(spec.size, int):
        raise PartError(
            f"{what}: its spec's size is {article(spec.size)}; expected a number of samples"
        )
    if isinstance(made, Dataset):
        check_members("the data set's build", made, Dataset)
        return made
    refused = refused_call("fetch", getattr_static(made, "fetch", None), Dataset.fetch)
    if refused is not None:
        raise wrong_call("the data set's build", made, refused)
    return Adopted(made)


class Adopted(Dataset):
    """A data set of a part from outside that has `spec`, `__len__` and `fetch` or `__getitem__`, and does not derive
    from `Dataset`.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.spec = inner, inner.spec

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the inner data set's samples."""
        if not hasattr(self.inner, "fetch"):
            return stacked(self.inner, self.spec, indices)
        batch: Batch = self.inner.fetch(indices, epoch)
        return batch
