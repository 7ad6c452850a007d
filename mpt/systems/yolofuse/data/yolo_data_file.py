"""YOLO's data file (`data.yaml`): where the pictures of a data set lie, and how its classes are called.

Of its keys `path`, `train`, `val` (or `test`) and `names` are read. A relative `path` is taken from the file's own
folder; a split that begins with `../` and is not there is looked for without it, as files exported by Roboflow need.
Labels and infrared pictures lie as YOLO has them: `images` in the split's path replaced by `labels` and `imagesIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mpt.config.yaml_text import read_file
from mpt.errors import DataError

SUFFIXES = (".yaml", ".yml")
TEST_KEYS = ("val", "valid", "test")


@dataclass(frozen=True)
class DataFile:
    """What a data file says: the folder of the pictures of each split that it names, below `root`."""

    path: Path
    root: Path
    splits: Mapping[str, str]
    classes: tuple[str, ...]

    def images(self, split: str) -> str:
        """Return the folder of a split's visible pictures. Raises DataError where the file names none."""
        for key in ("train",) if split == "train" else TEST_KEYS:
            if key in self.splits:
                return self.found(self.splits[key])
        raise DataError(f"{self.path}: it has no {'train' if split == 'train' else 'val'}, which names a folder")

    def found(self, folder: str) -> str:
        """Return a split's folder, without `../` where it is there only so."""
        shorter = folder.removeprefix("../")
        return shorter if not (self.root / folder).is_dir() and (self.root / shorter).is_dir() else folder


def beside(images: str, folder: str) -> str:
    """Return the path with its last part `images` replaced. Raises DataError where there is none."""
    parts = list(PurePosixPath(images).parts)
    if "images" not in parts:
        raise DataError(
            f"{images}: no part of it is called images, so its {folder} cannot be told; set dataset.labels and, for a "
            "pair, dataset.infrared"
        )
    place = len(parts) - 1 - parts[::-1].index("images")
    return str(PurePosixPath(*parts[:place], folder, *parts[place + 1 :]))


def read_data_file(path: Path) -> DataFile:
    """Read a data file. Raises DataError for one that names no folders or classes, ConfigError for one unreadable."""
    node, problems = read_file(path)
    content: Any = node.plain()
    if problems or not isinstance(content, dict):
        raise DataError(f"{path}: {problems[0] if problems else 'it is no mapping of path, train, val and names'}")
    splits = {key: content[key] for key in ("train", *TEST_KEYS) if content.get(key) is not None}
    for key, folder in splits.items():
        if not isinstance(folder, str) or PurePosixPath(folder).suffix == ".txt":
            raise DataError(f"{path}: {key} is {folder!r}; one folder is understood, no list and no list file")
    root = Path(str(content.get("path") or ".")).expanduser()
    return DataFile(path, root if root.is_absolute() else path.parent / root, splits, read_names(path, content))


def read_names(path: Path, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the classes' names in the order of their numbers. Raises DataError for numbers that leave gaps."""
    names = content.get("names")
    if isinstance(names, dict):
        if sorted(names) != sorted(map(str, range(len(names)))):
            raise DataError(
                f"{path}: names are numbered {', '.join(map(str, names))}; 0 to {len(names) - 1} are needed"
            )
        names = [names[str(number)] for number in range(len(names))]
    if not isinstance(names, list) or not names:
        raise DataError(f"{path}: it has no names, a list of the classes")
    count = content.get("nc")
    if count is not None and count != len(names):
        raise DataError(f"{path}: nc is {count}, and there are {len(names)} names")
    return tuple(map(str, names))
