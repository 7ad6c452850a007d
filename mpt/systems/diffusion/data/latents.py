"""Cached latents with their conditions: one safetensors file for each split, read a sample at a time.

`train.safetensors` and `test.safetensors` in `root` hold tensors whose dimension 0 is the samples: `latent`
(n, c, h, w), scaled as the network sees them; as its conditions need, `label` (n,), `text` (n, tokens, features),
`pooled` (n, features), `sizes` (n, 6), or, for networks that encode captions themselves, `tokens` and `tokens_2`
(n, tokens) instead of embeddings; and for the loss `mask` (n, 1, h, w) and `weight` (n,). Pictures of several
sizes are in a tensor for each, `latent_64x48` (h x w), and masks likewise; the samples are numbered through these by
height and width, as in the other fields. A batch holds one size, and samples of several that are fetched at once (a
preview, a check) are cut or padded to the first's. The metadata may have `classes`, a JSON list of names, and
`made_by`, the hash of their sources. Half tensors stay half on disk and in memory and are delivered as float32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.seams.samples import class_counts

FIELDS = {
    "latent": 4,
    "label": 1,
    "text": 3,
    "pooled": 2,
    "sizes": 2,
    "tokens": 2,
    "tokens_2": 2,
    "mask": 4,
    "weight": 1,
}
"""Tensor -> its dimensions."""
WHOLE_NUMBERS = ("label", "tokens", "tokens_2")
SIZED = re.compile(r"(latent|mask)_(\d+)x(\d+)")
ASSUMED_COUNT = 1000


class Settings(DatasetOptions):
    root: str = "data/latents"
    """Folder with train.safetensors and test.safetensors."""
    assumed: dict[str, list[int]] = Field(default_factory=dict)
    """Shapes of one sample's fields, for a plan without the files: {latent: [4, 64, 64], text: [77, 768]}."""


@dataclass(frozen=True)
class Bucket:
    """The samples of one size."""

    end: str
    """Of the tensors' names: `_64x48`, or nothing if all samples have one size."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """Of a latent."""


class Latents(Dataset):
    """One file of cached latents, opened when it is first read: workers open it for themselves."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        try:
            with safe_open(path, framework="pt") as file:
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
                metadata = file.metadata() or {}
        except FileNotFoundError as error:
            raise DataError(f"dataset.root: there is no {path}") from error
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"dataset.root: {path} is not a whole safetensors file: {error}"
            ) from error
        self.buckets = find_buckets(path, shapes)
        largest = max(self.buckets, key=lambda one: one.shape[-1] * one.shape[-2])
        count = self.buckets[-1].stop
        common = {
            name: shapes.get(f"{name}{largest.end}" if is_sized(name) else name) for name in FIELDS
        }
        held = {name: shape for name, shape in common.items() if shape is not None}
        check_shapes(path, held, count)
        fields = {name: field_spec(name, shape[1:]) for name, shape in held.items()}
        self.spec = DataSpec(fields, count, ())
        classes = read_classes(path, metadata)
        counts = (
            class_counts(labels, classes) if (labels := self.class_labels()) and classes else {}
        )
        self.spec = DataSpec(
            fields, count, classes, {**counts, "made_by": metadata.get("made_by", "")}
        )

    @property
    def file(self) -> Any:
        """Return the open file."""
        if self._file is None:
            self._file = safe_open(self.path, framework="pt")
        return self._file

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}

    def class_labels(self) -> Sequence[int] | None:
        """Return the class of every sample."""
        if "label" not in self.spec.fields:
            return None
        numbers: list[int] = self.file.get_tensor("label").tolist()
        return numbers

    def groups(self) -> Sequence[int] | None:
        """Return the number of every sample's size."""
        if len(self.buckets) == 1:
            return None
        return [
            number for number, one in enumerate(self.buckets) for _ in range(one.start, one.stop)
        ]

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of `indices`, in their order."""
        places = [next(one for one in self.buckets if index < one.stop) for index in indices]
        batch = {}
        for name, spec in self.spec.fields.items():
            read = []
            for index, place in zip(indices, places, strict=True):
                first, end = (index - place.start, place.end) if is_sized(name) else (index, "")
                one = self.file.get_slice(f"{name}{end}")[first : first + 1]
                read.append(fitted(one, places[0].shape[-2:]) if is_sized(name) else one)
            batch[name] = torch.cat(read).to(spec.dtype)
        return batch


def is_sized(name: str) -> bool:
    """Return whether a field is as large as the picture."""
    return name in ("latent", "mask")


def fitted(value_bchw: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return a tensor cut or padded with zeros to a size (h, w)."""
    height, width = size
    if tuple(value_bchw.shape[-2:]) == (height, width):
        return value_bchw
    cut = value_bchw[..., :height, :width]
    return torch.nn.functional.pad(cut, (0, width - cut.shape[-1], 0, height - cut.shape[-2]))


def find_buckets(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> list[Bucket]:
    """Return the sizes of a file's samples. Raises DataError for a file without latents, or masks that do not fit."""
    ends = [
        "" if name == "latent" else name.removeprefix("latent")
        for name in shapes
        if is_latent(name)
    ]
    if not ends or ("" in ends and len(ends) > 1):
        raise DataError(
            f"dataset.root: {path} holds {', '.join(shapes) or 'nothing'}; expected is a tensor 'latent'"
        )
    found: list[Bucket] = []
    has_masks = any(name.startswith("mask") for name in shapes)
    for end in sorted(ends, key=lambda one: shapes[f"latent{one}"][2:]):
        shape, mask = shapes[f"latent{end}"], shapes.get(f"mask{end}")
        if len(shape) != FIELDS["latent"]:
            raise DataError(
                f"dataset.root: latent{end} in {path} has the shape {shape}; expected are 4 sides"
            )
        if has_masks and mask != (shape[0], 1, *shape[2:]):
            raise DataError(
                f"dataset.root: {path} has latent{end} of {shape}, and {f'mask{end} of {mask}' if mask else 'no mask'}"
            )
        start = found[-1].stop if found else 0
        found.append(Bucket(end, start, start + shape[0], shape[1:]))
    return found


def is_latent(name: str) -> bool:
    """Return whether a tensor holds latents."""
    match = SIZED.fullmatch(name)
    return name == "latent" or (match is not None and match[1] == "latent")


def field_spec(name: str, shape: tuple[int, ...]) -> FieldSpec:
    """Return the layout of one field."""
    return FieldSpec(shape, torch.int64 if name in WHOLE_NUMBERS else torch.float32)


def check_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]], count: int) -> None:
    """Raise DataError for fields that do not fit `count` latents."""
    for name, shape in shapes.items():
        if len(shape) != FIELDS[name]:
            raise DataError(
                f"dataset.root: {name} in {path} has the shape {shape}; expected are {FIELDS[name]} sides"
            )
        if not is_sized(name) and shape[0] != count:
            raise DataError(f"dataset.root: {path} has {count} latents, and {shape[0]} of {name}")


def read_classes(path: Path, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the classes."""
    try:
        return tuple(str(name) for name in json.loads(metadata.get("classes", "[]")))
    except (ValueError, TypeError) as error:
        raise DataError(f"dataset.root: the classes in {path} are not a JSON list") from error


def build(settings: Settings, split: str, seed: int) -> Latents:
    """Return one split."""
    return Latents(Path(settings.root).expanduser() / f"{split}.safetensors")


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of files that are not on this machine, so that a plan needs none; None if it is not given."""
    if "latent" not in settings.assumed:
        return None
    fields = {
        name: field_spec(name, tuple(settings.assumed[name]))
        for name in FIELDS
        if name in settings.assumed
    }
    return DataSpec(fields, ASSUMED_COUNT)
