"""Cached latents with their conditions: one safetensors file for each split, read a sample at a time.

`train.safetensors` and `test.safetensors` in `root` hold tensors whose dimension 0 is the samples: `latent`
(n, c, h, w), scaled as the network sees them; and, as its conditions need, `label` (n,), `text` (n, tokens, features),
`pooled` (n, features), `sizes` (n, 6). The metadata may have `classes`, a JSON list of names, and `made_by`, the hash
of what made them. Half tensors stay half on disk and in memory and are delivered as float32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.seams.samples import class_counts

FIELDS = {"latent": 4, "label": 1, "text": 3, "pooled": 2, "sizes": 2}
"""Tensor -> its dimensions."""
ASSUMED_COUNT = 1000


class Settings(DatasetOptions):
    root: str = "data/latents"
    """Folder with train.safetensors and test.safetensors."""
    assumed: dict[str, list[int]] = Field(default_factory=dict)
    """Shapes of one sample's fields, for a plan without the files: {latent: [4, 64, 64], text: [77, 768]}."""


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
            raise DataError(f"dataset.root: {path} is not a whole safetensors file: {error}") from error
        count = check_shapes(path, shapes)
        fields = {name: field_spec(name, shapes[name][1:]) for name in FIELDS if name in shapes}
        self.spec = DataSpec(fields, count, ())
        classes = read_classes(path, metadata)
        counts = class_counts(labels, classes) if (labels := self.class_labels()) and classes else {}
        self.spec = DataSpec(fields, count, classes, {**counts, "made_by": metadata.get("made_by", "")})

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

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of `indices`, in their order."""
        batch = {}
        for name, spec in self.spec.fields.items():
            stored = self.file.get_slice(name)
            batch[name] = torch.cat([stored[index : index + 1] for index in indices]).to(spec.dtype)
        return batch


def field_spec(name: str, shape: tuple[int, ...]) -> FieldSpec:
    """Return the layout of one field."""
    return FieldSpec(shape, torch.int64 if name == "label" else torch.float32)


def check_shapes(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Return the number of samples. Raises DataError for a file without latents, or of fields that do not fit."""
    if "latent" not in shapes:
        raise DataError(f"dataset.root: {path} holds {', '.join(shapes) or 'nothing'}; expected is a tensor 'latent'")
    for name, shape in shapes.items():
        if name in FIELDS and len(shape) != FIELDS[name]:
            raise DataError(f"dataset.root: {name} in {path} has the shape {shape}; expected are {FIELDS[name]} sides")
        if name in FIELDS and shape[0] != shapes["latent"][0]:
            raise DataError(f"dataset.root: {path} has {shapes['latent'][0]} latents, and {shape[0]} of {name}")
    return shapes["latent"][0]


def read_classes(path: Path, metadata: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the classes."""
    try:
        return tuple(str(name) for name in json.loads(metadata.get("classes", "[]")))
    except (ValueError, TypeError) as error:
        raise DataError(f"dataset.root: the classes in {path} are not a JSON list") from error


def write_latents(path: Path, tensors: Mapping[str, Tensor], classes: Sequence[str], made_by: str) -> None:
    """Write one split's file."""
    metadata = {"classes": json.dumps(list(classes)), "made_by": made_by}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata=metadata)


def build(settings: Settings, split: str, seed: int) -> Latents:
    """Return one split."""
    return Latents(Path(settings.root).expanduser() / f"{split}.safetensors")


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of files that are not on this machine, so that a plan needs none; None if it is not given."""
    if "latent" not in settings.assumed:
        return None
    fields = {name: field_spec(name, tuple(settings.assumed[name])) for name in FIELDS if name in settings.assumed}
    return DataSpec(fields, ASSUMED_COUNT)
