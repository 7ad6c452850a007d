"""Which picture files belong together, where their boxes are, and how a pair is read.

Everything that can be known without decoding a picture is checked when the data set is built: partners, label files and
what is in them. Sizes are compared when a pair is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mpt.data.decoding import EXTENSIONS, decode_bytes
from mpt.errors import ConfigError, DataError
from mpt.systems.yolofuse.data.detection_labels import NO_ROWS, BadLabel, Rows, read_coco, read_voc, read_yolo
from mpt.systems.yolofuse.data.scene_augmentation import Scene
from mpt.systems.yolofuse.data.scene_dataset import CHANNELS, Layout

SPLITS = {"train": ("train", "train2017"), "test": ("val", "test", "valid", "validation", "val2017")}
LAYOUTS = (
    ("images/{split}", "imagesIR/{split}", "labels/{split}"),
    ("visible/{split}", "infrared/{split}", "Annotations"),
    ("{split}/images", "{split}/imagesIR", "{split}/labels"),
    ("{split}/visible", "{split}/infrared", "{split}/labels"),
)
"""Visible pictures, infrared pictures and labels below the root."""


@dataclass(frozen=True)
class Folders:
    """Where one split lies. `infrared` is None for the visible camera alone, `images` the only one for one camera."""

    images: Path
    infrared: Path | None
    labels: Path


@dataclass(frozen=True)
class Pair:
    """The files of one sample, one per camera, and its boxes."""

    name: str
    paths: tuple[Path, ...]
    rows: Rows


@dataclass
class Listed:
    """The usable pairs of a split, the others with the reason, and the classes."""

    pairs: list[Pair] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Search:
    """What is looked for, and what becomes of a bad pair: the settings of `detection_files` with these names."""

    root: str
    cameras: str
    classes: Sequence[str]
    images: str | None
    infrared: str | None
    labels: str | None
    on_bad: str
    missing_label: str


def find_folders(search: Search, split: str) -> Folders:
    """Return where a split lies. Raises DataError where nothing is found."""
    root = Path(search.root).expanduser()
    if not root.is_dir():
        raise DataError(
            f"no folder {root}. Set dataset.root to a folder with images/train, imagesIR/train and labels/train (and "
            "val), or to LLVIP as published"
        )
    tried = []
    for images, infrared, labels in LAYOUTS:
        visible = search.images or (infrared if search.cameras == "ir" and search.infrared is None else images)
        if search.cameras == "ir":
            visible = search.infrared or infrared
        for name in SPLITS[split]:
            folder = root / _named(visible, name)
            tried.append(folder)
            if folder.is_dir():
                partner = root / _named(search.infrared or infrared, name) if search.cameras == "pair" else None
                return Folders(folder, partner, root / _named(search.labels or labels, name))
    raise DataError(
        f"{root}: no {split} pictures; looked for {', '.join(str(path.relative_to(root)) for path in tried[:6])}, ... "
        "Name the folders with dataset.images, dataset.infrared and dataset.labels"
    )


def _named(template: str, split: str) -> str:
    return template.replace("{split}", split)


def list_pairs(folders: Folders, search: Search) -> Listed:
    """Return the pairs of a split in the order of their names. Raises DataError for a bad one that is not skipped."""
    if folders.infrared is not None and not folders.infrared.is_dir():
        raise DataError(
            f"no folder {folders.infrared} beside {folders.images}; set dataset.infrared, or dataset.cameras=rgb to "
            "train on one camera"
        )
    rows_of, classes = _label_reader(folders, search)
    listed = Listed(classes=classes)
    partners = _by_name(folders.infrared) if folders.infrared is not None else None
    for name, path in _by_name(folders.images).items():
        try:
            paths: tuple[Path, ...] = (path,)
            if partners is not None:
                if name not in partners:
                    raise BadLabel(f"no infrared partner {name}.* in {folders.infrared}")
                paths = (path, partners[name])
            rows = rows_of(name, path)
        except BadLabel as error:
            if search.on_bad == "stop":
                raise DataError(
                    f"{path}: {error}. Mend it, or set dataset.on_bad=skip to leave such samples out"
                ) from error
            listed.bad[str(path)] = str(error)
            continue
        listed.pairs.append(Pair(str(path), paths, rows))
    return listed


def _by_name(folder: Path) -> dict[str, Path]:
    """Return the picture files below a folder by their path in it, without the suffix, sorted."""
    found: dict[str, Path] = {}
    for directory, _, files in sorted(os.walk(folder, followlinks=True)):
        for file in sorted(files):
            path = Path(directory, file)
            if path.suffix.lower() in EXTENSIONS:
                found[path.relative_to(folder).with_suffix("").as_posix()] = path
    return found


def _label_reader(folders: Folders, search: Search) -> tuple[Callable[[str, Path], Rows], tuple[str, ...]]:
    """Return what gives a picture's boxes by its name and path, and the classes."""
    classes, folder = tuple(search.classes), folders.labels
    if folder.suffix == ".json":
        coco = read_coco(folder)

        def from_coco(name: str, path: Path) -> Rows:
            file = next(
                (key for key in (path.name, f"{name}{path.suffix}") if key in coco.rows or key in coco.bad), None
            )
            if file in coco.bad:
                raise BadLabel(f"{folder}: {coco.bad[file]}")
            if file is None and search.missing_label == "bad":
                raise BadLabel(f"{folder} does not list it")
            return coco.rows[file] if file is not None else NO_ROWS

        return from_coco, coco.classes
    if not classes:
        raise ConfigError("dataset.classes is empty; name the classes in the order of their numbers")
    if not folder.is_dir():
        raise DataError(f"no folder {folder} with the labels of {folders.images}; set dataset.labels")
    is_voc = any(entry.suffix == ".xml" for entry in folder.iterdir())

    def from_file(name: str, path: Path) -> Rows:
        file = folder / f"{name}{'.xml' if is_voc else '.txt'}"
        if not file.exists() and search.missing_label == "empty":
            return NO_ROWS
        try:
            return read_voc(file, classes) if is_voc else read_yolo(file, len(classes))
        except BadLabel as error:
            raise BadLabel(f"{file}: {error}") from error

    return from_file, classes


def read_scene(pair: Pair, layout: Layout, max_pixels: int) -> Scene:
    """Read a pair at no more than the size at which it is needed. Raises DataError, BadImageError among them."""
    pictures = []
    for path, camera in zip(pair.paths, layout.cameras, strict=True):
        tensor = decode_bytes(path, CHANNELS[camera], None, max_pixels)
        array = tensor[0].numpy() if len(tensor) == 1 else tensor.permute(1, 2, 0).numpy()
        pictures.append(Image.fromarray(array))
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        found = " and ".join(f"{width}x{height}" for width, height in (picture.size for picture in pictures))
        raise DataError(
            f"{pair.paths[0]}: the cameras' pictures are {found} pixels; they must be registered to one size. Resize "
            "one, or set dataset.on_bad=skip"
        )
    width, height = pictures[0].size
    factor = min(layout.width / width, layout.height / height)
    if factor < 1:  # kept at the canvas's size: a mosaic is drawn from it, smaller or half as large again
        shape = (round(width * factor), round(height * factor))
        pictures = [picture.resize(shape, Image.Resampling.BILINEAR, reducing_gap=2.0) for picture in pictures]
    return Scene(pictures, pair.rows)
