"""A folder of DeepFaceLab's models: which files are one model's, and those that a run keeps to give back.

All of a model's files begin with its name (`foo_SAEHD_encoder.npy`).
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mpt.errors import CheckpointError, ConfigError
from mpt.run.process.files import failures_explained, open_new, write_atomically
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_arrays, write_plain
from mpt.systems.deepfacelab.data.leras.model_data import read_model_data, read_options
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_arrays
from mpt.systems.deepfacelab.nn.facelib.xseg import SIDE
from mpt.systems.deepfacelab.nn.weights.leras_weights import Arrays

KEPT = "deepfacelab"
"""Folder of a run for files that came with its model and have no place elsewhere."""
OTHER_CLASSES = ("_AMP_",)
"""How names of models end whose files are called like SAEHD's and hold others."""
QUICK = "_Quick96_"
"""How the name of a Quick96 ends."""
XSEG_NAME = "XSeg"
XSEG = f"{XSEG_NAME}_"
"""Prefix of the files of an XSeg, of which a folder holds one."""
DEFAULTS = "SAEHD_default_options.dat"
"""The name that DeepFaceLab offers for the next new model in a folder."""


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
        """Return the content of `_data.dat`, None if there is none."""
        return read_model_data(self.data_path) if os.path.lexists(self.data_path) else None

    @property
    def is_quick(self) -> bool:
        """Is it a Quick96, whose options are all fixed but a few?"""
        return self.prefix.endswith(QUICK)

    @property
    def is_xseg(self) -> bool:
        """Is it the network of masks?"""
        return self.prefix == XSEG

    def read(self, part: str) -> Arrays | None:
        """Return a file's arrays, None if there is no such file. CheckpointError for numbers that are not finite."""
        if not self.file(part).is_file():
            return None
        arrays = read_arrays(self.file(part))
        for key, array in arrays.items():
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"{self.file(part)}: {key} holds numbers that are not finite (NaN): the training collapsed; take "
                    f"the files of an earlier time, as from {self.prefix.rstrip('_')}_autobackups"
                )
        return arrays


def find_model(model_dir: Path, name: str | None = None) -> Folder:
    """Return the one SAEHD or Quick96 in a folder, or the one of that name ("foo", or "foo_SAEHD").

    An XSeg is returned if it is named ("XSeg"), or if it is all that there is. CheckpointError when there is no model,
    or several, or when the folder is another program's part.
    """
    if not model_dir.is_dir():
        raise CheckpointError(
            f"{model_dir}: there is no such folder; name the folder of DeepFaceLab's model files"
        )
    found = sorted(path.name.removesuffix("encoder.npy") for path in model_dir.glob("*encoder.npy"))
    convertible = [prefix for prefix in found if not prefix.endswith(OTHER_CLASSES)]
    if (model_dir / f"{XSEG}{SIDE}.npy").is_file() and (
        name == XSEG_NAME or (name is None and not convertible)
    ):
        return Folder(model_dir, XSEG)
    chosen = convertible
    if name is not None:
        chosen = [
            prefix
            for prefix in convertible
            if name in (prefix.rstrip("_"), prefix.partition("_")[0])
        ]
    if len(chosen) == 1:
        return Folder(model_dir, chosen[0])
    raise CheckpointError(f"{model_dir} {explain_choice(model_dir, found, convertible, name)}")


def explain_choice(
    model_dir: Path, found: list[str], convertible: list[str], name: str | None
) -> str:
    """Return the reason if a folder's files do not determine one model."""
    named = ", ".join(prefix.rstrip("_") for prefix in convertible)
    if name is not None and convertible:
        return f"holds no single model {name}, but {named}"
    if convertible:
        return f"holds several models ({named}); choose one with --name"
    if found:
        return f"holds {found[0].rstrip('_')}: an AMP is no SAEHD; SAEHD, Quick96 and XSeg are converted"
    return "holds no MODEL_encoder.npy"


def model_files(folder: Folder) -> list[Path]:
    """Return the files that make up a model, which are replaced together: networks, optimizers, options, summary."""
    networks = rf"{SIDE}(_opt)?\.npy" if folder.is_xseg else r".+\.npy"
    names = re.compile(re.escape(folder.prefix) + rf"({networks}|data\.dat|summary\.txt)")
    if not folder.path.is_dir():
        return []
    return sorted(
        path for path in folder.path.iterdir() if names.fullmatch(path.name) and path.is_file()
    )


def refuse_later(model: str, iterations: int, step: int, otherwise: str) -> None:
    """Raise CheckpointError for a model, named in words, that is further trained than the run that would replace it."""
    if iterations > max(step, 1):  # at 0 DeepFaceLab takes a model for a new one
        raise CheckpointError(
            f"{model} at iteration {iterations}, which is later than this run's {step}; {otherwise}"
        )


def keep_others(folder: Folder, kept: Path, used: set[Path]) -> None:
    """Copy files of a model without a place in a run, such as its `_data.dat`, for the way back."""
    others = [path for path in folder.path.glob(f"{glob.escape(folder.prefix)}*") if path.is_file()]
    others += [path for path in [folder.path / DEFAULTS] if path.is_file() and not folder.is_xseg]
    with failures_explained(kept):
        kept.mkdir()
        for path in others:
            if path not in used and is_harmless(path):
                shutil.copyfile(path, kept / path.name)


def is_harmless(path: Path) -> bool:
    """Read a file that is kept unused, as it would be read if it were used; say so if it is left out."""
    try:
        if path.suffix == ".npy":
            read_arrays(path)
        elif path.suffix == ".dat":
            read_options(path) if path.name.endswith("_default_options.dat") else read_model_data(
                path
            )
    except CheckpointError as error:
        print(f"left out: {error}")
        return False
    return True


def restore_others(kept: Folder, folder: Folder, written: set[str]) -> None:
    """Copy files that came with the model and are not written anew, under its name, into a staged folder."""
    written = {f"{part}.npy" for part in written} | {"data.dat", "summary.txt"}
    for path in sorted(kept.path.iterdir()):
        part = path.name.removeprefix(kept.prefix)
        target = folder.path / (part if path.name == DEFAULTS else f"{folder.prefix}{part}")
        if part in written or os.path.lexists(target):
            continue
        with failures_explained(folder.path), path.open("rb") as source, new_file(target) as file:
            shutil.copyfileobj(source, file)


def keep_for_next(kept: Folder, target: Path) -> None:
    """Copy what came with a model for the run that begins again from its weights, without its loss history."""
    data = kept.read_data() or {}
    with failures_explained(target):
        shutil.copytree(kept.path, target)
        write_atomically(
            Folder(target, kept.prefix).data_path, write_plain({**data, "loss_history": []})
        )


def kept_folder(path: Path) -> Folder | None:
    """Return the folder of files that came with a converted run."""
    found = sorted(file.name.removesuffix("data.dat") for file in path.glob("*_data.dat"))
    return Folder(path, found[0]) if found else None


def model_prefix(name: str) -> str:
    """Return the prefix of a model's files. ConfigError for names that DeepFaceLab could not find again."""
    kind = QUICK if name.endswith(QUICK.rstrip("_")) else "_SAEHD_"
    name = name.removesuffix(kind.rstrip("_"))
    if not re.fullmatch(r"[^_/\\\0]{1,100}", name) or name.startswith("."):
        raise ConfigError(
            f"--name: {name!r} is no model's name; DeepFaceLab ends it at the first '_'"
        )
    return f"{name}{kind}"


def write_file(path: Path, arrays: Arrays) -> None:
    """Write one new file of arrays and sync it. Raises CheckpointError for numbers that are not finite."""
    wrong = next((key for key, array in arrays.items() if not np.isfinite(array).all()), None)
    if wrong is not None:
        raise CheckpointError(
            f"{path.name}: {wrong} is not finite (NaN) in this run; name an earlier checkpoint"
        )
    with (
        failures_explained(path, sum(array.nbytes for array in arrays.values())),
        new_file(path) as file,
    ):
        # DeepFaceLab's own counts are scalars.
        write_arrays(
            file, {key: array if array.ndim else array[()] for key, array in arrays.items()}
        )


def write_options(folder: Folder, content: Mapping[str, Any]) -> None:
    """Write `_data.dat` and the summary."""
    lines = [f"== {key}: {value} ==" for key, value in content["options"].items()]
    heading = [
        f"== Model name: {folder.prefix.rstrip('_')} ==",
        f"== Current iteration: {content['iter']} ==",
    ]
    summary = "\n".join([*heading, *lines]) + "\n"
    files = {folder.data_path: write_plain(content)}
    files[folder.path / f"{folder.prefix}summary.txt"] = summary.encode(errors="backslashreplace")
    for path, data in files.items():
        with failures_explained(path, len(data)), new_file(path) as file:
            file.write(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Create a file, which must not be there, and sync it at the end."""
    with os.fdopen(open_new(path), "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
