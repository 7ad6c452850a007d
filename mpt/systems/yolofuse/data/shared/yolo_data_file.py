"""YOLO's data file (`data.yaml`): the places of a data set's pictures, and the names of its classes.

Of its keys `path`, `train`, `val` (or `test`) and `names` are read. A split is a folder, a text file with a picture's
path per line, or a list of these. A relative `path` is looked for below the file's own folder, then below the working
directory; one that is nowhere falls back to the file's folder if its splits are there. A split that begins with `../`
and is not there is looked for without it, as files exported by Roboflow need. In a list, `./` is the list's own folder;
other relative paths are looked for below `path`, the list's folder and the working directory.

Labels and infrared pictures lie as YOLO has them: the last `images` in a picture's path replaced by `labels` and
`imagesIR`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from mpt.config.text.yaml_text import read_file
from mpt.data.pictures.decoding import EXTENSIONS
from mpt.errors import DataError
from mpt.foreign.files import read_text

SUFFIXES = (".yaml", ".yml")
TEST_KEYS = ("val", "valid", "test")
MOST_LIST_BYTES = 1 << 30


@dataclass(frozen=True)
class DataFile:
    """The content of a data file: the folders and lists of the pictures of each split that it names, below `root`."""

    path: Path
    root: Path
    splits: Mapping[str, tuple[str, ...]]
    classes: tuple[str, ...]

    def entries(self, split: str) -> tuple[str, ...]:
        """Return the folders and lists of a split's visible pictures. Raises DataError if the file names none."""
        for key in ("train",) if split == "train" else TEST_KEYS:
            if key in self.splits:
                return tuple(self.found(entry) for entry in self.splits[key])
        raise DataError(
            f"{self.path}: it has no {'train' if split == 'train' else 'val'}, which names a folder"
        )

    def found(self, entry: str) -> str:
        """Return a folder or list, without a `../` that is not meant."""
        shorter = entry.removeprefix("../")
        return (
            shorter
            if not (self.root / entry).exists() and (self.root / shorter).exists()
            else entry
        )

    def pictures(self, split: str) -> list[Path]:
        """Return the picture files of a split, in the order of their paths. Raises DataError for anything that is not
        there."""
        found: dict[Path, None] = {}
        for entry in self.entries(split):
            place = self.root / entry
            if place.is_dir():
                found |= dict.fromkeys(pictures_below(place))
            elif place.is_file():
                found |= dict.fromkeys(self.listed(place))
            else:
                raise DataError(
                    f"{self.path}: there is no {place}, which it names for {split}; check its path"
                )
        if not found:
            raise DataError(f"{self.path}: no {split} pictures in {', '.join(self.entries(split))}")
        return sorted(found)

    def listed(self, file: Path) -> list[Path]:
        """Return the pictures that a text file lists. Raises DataError for one that is not there."""
        found = []
        try:
            lines = read_text(file, MOST_LIST_BYTES).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: it cannot be read ({error})") from error
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text:
                continue
            if text.startswith("./"):
                places = [file.parent / text]
            else:
                places = [folder / text for folder in (self.root, file.parent, Path.cwd())]
            path = next((place for place in places if place.is_file()), None)
            if path is None:
                raise DataError(
                    f"{file}: line {number}: there is no picture {text}; looked for {places[0]}"
                )
            found.append(path)
        return found


def pictures_below(folder: Path) -> list[Path]:
    """Return the picture files in a folder and its sub-folders, links followed, in the order of their paths."""
    found = []
    for directory, _, files in sorted(os.walk(folder, followlinks=True)):
        found += [
            Path(directory, file)
            for file in sorted(files)
            if Path(file).suffix.lower() in EXTENSIONS
        ]
    return found


def beside(images: str, folder: str) -> str:
    """Return the path with its last part `images` replaced. Raises DataError if there is none."""
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
        raise DataError(
            f"{path}: {problems[0] if problems else 'it is no mapping of path, train, val and names'}"
        )
    splits = {key: content[key] for key in ("train", *TEST_KEYS) if content.get(key) is not None}
    entries: dict[str, tuple[str, ...]] = {}
    for key, value in splits.items():
        named = value if isinstance(value, list) else [value]
        if not named or not all(isinstance(entry, str) for entry in named):
            raise DataError(
                f"{path}: {key} is {value!r}; write a folder, a text file of pictures, or a list of these"
            )
        entries[key] = tuple(named)
    return DataFile(
        path, find_root(path, content.get("path"), entries), entries, read_names(path, content)
    )


def find_root(path: Path, wanted: Any, splits: Mapping[str, tuple[str, ...]]) -> Path:
    """Return the folder that a data file's `path` names. Raises DataError if there is none."""
    root = Path(str(wanted or ".")).expanduser()
    tried = [root] if root.is_absolute() else [path.parent / root, Path.cwd() / root]
    for place in tried:
        if place.is_dir():
            return place
    if any((path.parent / entry).exists() for named in splits.values() for entry in named):
        return path.parent
    looked = ", ".join(map(str, tried))
    raise DataError(
        f"{path}: its path is {wanted}, and there is no such folder; looked for {looked}"
    )


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
