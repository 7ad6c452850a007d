"""Which picture files belong together, their label files, and how a pair is read.

Everything that can be known without decoding a picture is checked when the data set is built: partners, label files and
their contents. Sizes are compared when a pair is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from mpt.data.pictures.counts import Levels, read_grey
from mpt.data.pictures.decoding import EXTENSIONS, BadImageError, decode_bytes
from mpt.errors import DataError
from mpt.systems.yolofuse.data.shared.detection_labels import (
    NO_ROWS,
    BadLabel,
    CocoLabels,
    Rows,
    Size,
    read_voc,
    read_yolo,
)
from mpt.systems.yolofuse.data.shared.scene_augmentation import Scene
from mpt.systems.yolofuse.data.shared.scene_dataset import CHANNELS, Layout
from mpt.systems.yolofuse.data.shared.yolo_data_file import beside, pictures_below

SPLITS = {
    "train": ("train", "train2017"),
    "test": ("val", "test", "valid", "validation", "val2017"),
}
LAYOUTS = (
    ("images/{split}", "imagesIR/{split}", "labels/{split}"),
    ("visible/{split}", "infrared/{split}", "Annotations"),
    ("{split}/images", "{split}/imagesIR", "{split}/labels"),
    ("{split}/visible", "{split}/infrared", "{split}/labels"),
)
"""Visible pictures, infrared pictures and labels below the root."""


@dataclass(frozen=True)
class Folders:
    """The folders of a split. `infrared` is None for the visible camera alone, `images` the only one for one camera."""

    images: Path
    infrared: Path | None
    labels: Path


@dataclass(frozen=True)
class Pair:
    """The files of one sample, one per camera, and its boxes."""

    name: str
    paths: tuple[Path, ...]
    rows: Rows
    labelled_size: Size | None = None
    """Width and height of the labels' picture, if they record it."""


@dataclass
class Listed:
    """The usable pairs of a split, and the others with the reason."""

    pairs: list[Pair] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Search:
    """The search: the settings of `detection_files` with these names."""

    root: str
    cameras: str
    images: str | None
    infrared: str | None
    labels: str | None


def find_folders(search: Search, split: str) -> Folders:
    """Return the folders of a split. Raises DataError if nothing is found."""
    root = Path(search.root).expanduser()
    if not root.is_dir():
        raise DataError(
            f"no folder {root}. Set dataset.root to a folder with images/train, imagesIR/train and labels/train (and "
            "val), or to LLVIP as published"
        )
    tried = []
    for images, infrared, labels in LAYOUTS:
        visible = search.images or (
            infrared if search.cameras == "ir" and search.infrared is None else images
        )
        if search.cameras == "ir":
            visible = search.infrared or infrared
        for name in SPLITS[split]:
            folder = root / _named(visible, name)
            tried.append(folder)
            if folder.is_dir():
                partner = (
                    root / _named(search.infrared or infrared, name)
                    if search.cameras == "pair"
                    else None
                )
                return Folders(folder, partner, root / _named(search.labels or labels, name))
    raise DataError(
        f"{root}: no {split} pictures; looked for {', '.join(str(path.relative_to(root)) for path in tried[:6])}, ... "
        "Name the folders with dataset.images, dataset.infrared and dataset.labels"
    )


def has_folders(search: Search, split: str) -> bool:
    """Return whether a split's pictures lie in folders, or are named to."""
    if search.images or search.infrared:
        return True
    root = Path(search.root).expanduser()
    return any(
        (root / _named(place, name)).is_dir()
        for images, infrared, _ in LAYOUTS
        for place in (images, infrared)
        for name in SPLITS[split]
    )


def holds_voc(folders: Folders) -> bool:
    """Return whether the labels are VOC's. Raises DataError for a folder that is not there."""
    if not folders.labels.is_dir():
        raise DataError(
            f"no folder {folders.labels} with the labels of {folders.images}; set dataset.labels"
        )
    return any(entry.suffix == ".xml" for entry in folders.labels.iterdir())


def _named(template: str, split: str) -> str:
    return template.replace("{split}", split)


@dataclass(frozen=True)
class Found:
    """A visible picture of a split (the infrared one of `cameras=ir`), the path of its partner and its labels."""

    name: str
    path: Path
    partner: Path | None
    """The partner's path, whose suffix may be another; None for one camera."""
    label: Path
    """The label file's path; its suffix is that of the layout."""


def coco_file(search: Search, split: str) -> Path | None:
    """Return the COCO file of a split, None if labels are not COCO's. Raises DataError for one that is not there."""
    if search.labels is None or not search.labels.endswith(".json"):
        return None
    root = Path(search.root).expanduser()
    tried = [root / _named(search.labels, name) for name in SPLITS[split]]
    found = next((path for path in tried if path.is_file()), None)
    if found is None:
        raise DataError(
            f"{tried[0]}: it cannot be read (there is no such file); check dataset.labels"
        )
    return found


def find_pictures(folders: Folders) -> list[Found]:
    """Return the pictures of a split that lies in folders. Raises DataError for a folder that is not there."""
    if folders.infrared is not None and not folders.infrared.is_dir():
        raise DataError(
            f"no folder {folders.infrared} beside {folders.images}; set dataset.infrared, or dataset.cameras=rgb to "
            "train on one camera"
        )
    found = []
    for path in pictures_below(folders.images):
        name = path.relative_to(folders.images).with_suffix("").as_posix()
        partner = None if folders.infrared is None else folders.infrared / f"{name}{path.suffix}"
        found.append(Found(name, path, partner, folders.labels / f"{name}.txt"))
    return list({one.name: one for one in found}.values())  # of two suffixes the later


def by_convention(path: Path, cameras: str, has_labels: bool) -> Found:
    """Return a visible picture with its partner and label file at YOLO's places: alongside its last folder
    `images`."""
    partner = None if cameras == "rgb" else Path(beside(path.as_posix(), "imagesIR"))
    label = path if not has_labels else Path(beside(path.as_posix(), "labels")).with_suffix(".txt")
    if cameras == "ir":
        assert partner is not None
        return Found(str(partner), partner, None, label)
    return Found(str(path), path, partner, label)


def pictures_of_coco(coco: CocoLabels, folders: Sequence[Path], cameras: str) -> list[Found]:
    """Return the pictures that a COCO file lists, below the first folder that has each. Raises DataError for none."""
    found = []
    for name in coco.sizes:
        path = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if path is None:
            raise DataError(
                f"{folders[0] / name}: the COCO file lists it, and it is not there; set dataset.images"
            )
        found.append(by_convention(path, cameras, has_labels=False))
    return found


def list_pairs(pictures: Sequence[Found], labels_of: LabelReader, on_bad: str) -> Listed:
    """Return the pairs of a split in the order given. Raises DataError for a bad one that is not skipped."""
    listed = Listed()
    nearby = Nearby()
    for one in pictures:
        try:
            paths: tuple[Path, ...] = (one.path,)
            if one.partner is not None:
                paths = (one.path, nearby.picture(one.partner))
            rows, labelled_size = labels_of(one)
        except BadLabel as error:
            if on_bad == "stop":
                raise DataError(
                    f"{one.path}: {error}. Mend it, or set dataset.on_bad=skip to leave such samples out"
                ) from error
            listed.bad[str(one.path)] = str(error)
            continue
        listed.pairs.append(Pair(str(one.path), paths, rows, labelled_size))
    return listed


class Nearby:
    """Finds pictures whose suffix may differ; each folder is listed once."""

    def __init__(self) -> None:
        self.folders: dict[Path, dict[str, Path]] = {}

    def picture(self, path: Path) -> Path:
        """Return the picture at a path, whatever its suffix. Raises BadLabel if there is none."""
        if path.parent not in self.folders:
            entries = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
            self.folders[path.parent] = {
                one.stem: one for one in entries if one.suffix.lower() in EXTENSIONS
            }
        found = self.folders[path.parent].get(path.stem)
        if found is None:
            raise BadLabel(f"no infrared partner {path.stem}.* in {path.parent}")
        return found


Labels = tuple[Rows, Size | None]
LabelReader = Callable[[Found], Labels]


def coco_reader(file: Path, coco: CocoLabels, missing_label: str) -> LabelReader:
    """Return the function from a picture to its labels in a COCO file, whose file names may have any folders."""

    def labels_of(one: Found) -> Labels:
        name = coco.name_of(one.path)
        if name in coco.bad:
            raise BadLabel(f"{file}: {coco.bad[name]}")
        if name is None:
            if missing_label == "bad":
                raise BadLabel(f"{file} does not list it")
            return NO_ROWS, None
        return coco.rows[name], coco.sizes[name]

    return labels_of


def file_reader(classes: Sequence[str], is_voc: bool, missing_label: str) -> LabelReader:
    """Return the function from a picture to the labels in its own file, YOLO's txt or VOC's xml."""

    def labels_of(one: Found) -> Labels:
        file = one.label.with_suffix(".xml") if is_voc else one.label
        if not file.exists() and missing_label == "empty":
            return NO_ROWS, None
        try:
            return read_voc(file, classes) if is_voc else (read_yolo(file, len(classes)), None)
        except BadLabel as error:
            raise BadLabel(f"{file}: {error}") from error

    return labels_of


def read_picture(path: Path, camera: str, max_pixels: int, levels: Levels) -> Image.Image:
    """Read one camera's upright picture, in 8 bits. Raises BadImageError, and ConfigError if no range is set."""
    if camera == "ir":
        return read_grey(path, max_pixels, levels)
    tensor = decode_bytes(path, CHANNELS[camera], None, max_pixels)
    return Image.fromarray(tensor.permute(1, 2, 0).numpy())


def read_scene(pair: Pair, layout: Layout, max_pixels: int, levels: Levels) -> Scene:
    """Read a pair at no more than the size at which it is needed.

    Raises DataError, and ConfigError if no range of an infrared picture is set.
    """
    try:
        pictures = [
            read_picture(path, camera, max_pixels, levels)
            for path, camera in zip(pair.paths, layout.cameras, strict=True)
        ]
    except BadImageError as error:
        raise DataError(
            f"{error.path}: {error.reason}. Replace or remove the file, or set dataset.on_bad=skip to leave such "
            "samples out"
        ) from error
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        found = " and ".join(
            f"{width}x{height}" for width, height in (picture.size for picture in pictures)
        )
        raise DataError(
            f"{pair.paths[0]}: the cameras' pictures are {found} pixels; they must be registered to one size. Resize "
            "one, or set dataset.on_bad=skip"
        )
    width, height = pictures[0].size
    if width != height and pair.labelled_size == (height, width):
        raise DataError(
            f"{pair.paths[0]}: its labels are of a picture of {height}x{width} pixels, and turned upright by its EXIF "
            f"orientation it has {width}x{height}: they are of the picture as stored. Remove the orientation from the "
            "file, or set dataset.on_bad=skip"
        )
    factor = min(layout.width / width, layout.height / height)
    # kept at the canvas's size: a mosaic is drawn from it, smaller or half as large again
    if factor < 1:
        shape = (round(width * factor), round(height * factor))
        pictures = [
            picture.resize(shape, Image.Resampling.BILINEAR, reducing_gap=2.0)
            for picture in pictures
        ]
    return Scene(pictures, pair.rows)
