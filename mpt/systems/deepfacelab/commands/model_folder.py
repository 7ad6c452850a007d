"""A folder of DeepFaceLab's models: which files are one model's, and what of them a run keeps to give back.

All of a model's files begin with its name (`foo_SAEHD_encoder.npy`).
"""

from __future__ import annotations

import glob
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpt.errors import CheckpointError, ConfigError
from mpt.run.files import failures_explained
from mpt.systems.deepfacelab.data.leras_pickle import write_arrays
from mpt.systems.deepfacelab.data.model_data import read_model_data
from mpt.systems.deepfacelab.data.restricted_pickle import read_arrays
from mpt.systems.deepfacelab.nn.leras_weights import Arrays

KEPT = "deepfacelab"
"""Folder of a run for what came with its model and has no place elsewhere."""
DEFAULTS = "SAEHD_default_options.dat"
"""What DeepFaceLab offers for the next new model in a folder."""


@dataclass(frozen=True)
class Folder:
    """A DeepFaceLab model folder and the name its files begin with."""

    path: Path
    prefix: str

    def file(self, part: str) -> Path:
        """Return the path of a network's or an optimizer's file."""
        return self.path / f"{self.prefix}{part}.npy"

    @property
    def data_path(self) -> Path:
        """The file of the model's options."""
        return self.path / f"{self.prefix}data.dat"

    def read_data(self) -> dict[str, Any] | None:
        """Return the content of `_data.dat`, None where there is none."""
        return read_model_data(self.data_path) if self.data_path.is_file() else None

    def read(self, part: str) -> Arrays | None:
        """Return a file's arrays, None where there is no such file."""
        return read_arrays(self.file(part)) if self.file(part).is_file() else None


def find_model(model_dir: Path) -> Folder:
    """Return the one model in a folder; CheckpointError when there is none, or several."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: there is no such folder; name the folder of DeepFaceLab's model files")
    found = sorted(path.name.removesuffix("encoder.npy") for path in model_dir.glob("*encoder.npy"))
    if len(found) != 1:
        what = f"holds several models ({', '.join(found)})" if found else "holds no MODEL_encoder.npy"
        raise CheckpointError(f"{model_dir} {what}; put one SAEHD model's files into a folder of its own")
    return Folder(model_dir, found[0])


def keep_others(folder: Folder, kept: Path, used: set[Path]) -> None:
    """Copy what of a model has no place in a run, such as its `_data.dat`, so that nothing is lost on the way back."""
    others = [path for path in folder.path.glob(f"{glob.escape(folder.prefix)}*") if path.is_file()]
    others += [path for path in [folder.path / DEFAULTS] if path.is_file()]
    with failures_explained(kept):
        kept.mkdir()
        for path in others:
            if path not in used:
                shutil.copyfile(path, kept / path.name)


def restore_others(kept: Folder, folder: Folder, written: set[str]) -> None:
    """Copy what came with the model and is not written anew, under the model's name."""
    written = {f"{part}.npy" for part in written} | {"data.dat", "summary.txt"}
    for path in sorted(kept.path.iterdir()):
        part = path.name.removeprefix(kept.prefix)
        if part in written or (path.name == DEFAULTS and (folder.path / DEFAULTS).exists()):
            continue
        with failures_explained(folder.path):
            shutil.copyfile(path, folder.path / (part if path.name == DEFAULTS else f"{folder.prefix}{part}"))


def kept_folder(path: Path) -> Folder | None:
    """Return the folder of what came with a converted run."""
    found = sorted(file.name.removesuffix("data.dat") for file in path.glob("*_data.dat"))
    return Folder(path, found[0]) if found else None


def model_prefix(name: str) -> str:
    """Return what a model's files begin with. ConfigError for names that DeepFaceLab could not find again."""
    name = name.removesuffix("_SAEHD")
    if not re.fullmatch(r"[^_/\\\0]{1,100}", name) or name.startswith("."):
        raise ConfigError(f"--name: {name!r} is no model's name; DeepFaceLab ends it at the first '_'")
    return f"{name}_SAEHD_"


def write_file(path: Path, arrays: Arrays) -> None:
    """Write one file under a temporary name, then give it its own."""
    temporary = path.with_name(path.name + ".tmp")
    with failures_explained(path, sum(array.nbytes for array in arrays.values())):
        try:
            with temporary.open("wb") as file:
                # DeepFaceLab's own counts are scalars.
                write_arrays(file, {key: array if array.ndim else array[()] for key, array in arrays.items()})
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
