"""A test set of the user's own for a finished run: a folder in place of the data that the run was trained with.

A data set's file that has a function `evaluation_set(settings, folder, classes, seed)` makes one from a folder. One
without it that has a `test_root` or a `root` is built with the folder there. Images, with or without labels, are read
as an image folder whatever the run was trained with.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from mpt.config.load import load_config
from mpt.config.options import setting_of
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets
from mpt.errors import ConfigError, DataError
from mpt.seams import Dataset, DataSpec

IMAGES = frozenset({"image", "label"})
"""The fields that an image folder can deliver."""


def open_folder(config: Config, spec: DataSpec, folder: Path) -> Dataset:
    """Return a folder as a test set in the layout of a run's data. Raises DataError for one that does not suit it."""
    if not folder.is_dir():
        raise DataError(f"--data: no folder {folder}")
    plugin = config.dataset.plugin
    if plugin.optional("evaluation_set") is None and set(spec.fields) <= IMAGES:
        config = as_image_folder(config, spec)
        plugin = config.dataset.plugin
    make: Any = plugin.optional("evaluation_set")
    if make is not None:
        settings = plugin.native_settings(config.sized_dataset.settings)
        found: Dataset = make(settings, folder, spec.classes, config.seed)
    else:
        found = build_datasets(with_folder(config, folder))[1]
    refuse_other_layout(found.spec, spec, folder)
    return found


def as_image_folder(config: Config, spec: DataSpec) -> Config:
    """Return the configuration with an image folder of the data's size and channels."""
    channels, height, width = spec.fields["image"].shape
    if height != width:
        raise DataError(
            f"--data: images of {height} x {width} are not read from a folder; they are square there"
        )
    data = config.to_data()
    data["dataset"] = {"name": "image_folder", "image_size": height, "channels": channels}
    return load_config(data, allow=config.granted)


def with_folder(config: Config, folder: Path) -> Config:
    """Return the configuration with another place for its test data. Raises ConfigError if it has none."""
    settings = config.dataset.settings
    key = next((one for one in ("test_root", "root") if one in type(settings).model_fields), None)
    if key is None:
        raise ConfigError(
            f"--data: the data set {config.dataset.name} reads no folder; leave it out"
        )
    changed = (
        {key: str(folder)} if setting_of(settings, "root") is not None else {"root": str(folder)}
    )
    return replace(
        config, dataset=replace(config.dataset, settings=settings.model_copy(update=changed))
    )


def refuse_other_layout(found: DataSpec, wanted: DataSpec, folder: Path) -> None:
    """Raise DataError for samples of other fields, shapes or classes than the run was built for."""
    for name, field in wanted.fields.items():
        if name not in found.fields:
            raise DataError(f"--data: {folder} delivers no {name!r}, which the evaluation needs")
        if found.fields[name].shape != field.shape:
            raise DataError(
                f"--data: {folder} delivers {name!r} of shape {list(found.fields[name].shape)}; the run has "
                f"{list(field.shape)}"
            )
    if found.classes != wanted.classes:
        raise DataError(
            f"--data: {folder} has the classes {', '.join(found.classes)}; the run {', '.join(wanted.classes)}"
        )
