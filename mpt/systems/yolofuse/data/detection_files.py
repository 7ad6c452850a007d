"""Picture files with boxes, from one camera or from a visible and an infrared one: LLVIP, YOLO txt pairs, COCO json.

Layouts that are found by themselves below `root`, with `train` and one of `val`, `test` or `valid` for a split:

    images/train/a.jpg   imagesIR/train/a.jpg   labels/train/a.txt      YOLOFuse's LLVIP, and any YOLO pair
    visible/train/a.jpg  infrared/train/a.jpg   Annotations/a.xml       LLVIP as published
    train/images/a.jpg   train/imagesIR/a.jpg   train/labels/a.txt      YOLO as Roboflow exports it

A YOLO data file (`data.yaml`) as `root` says where the splits are and how the classes are called (`yolo_data_file`).
Others are named with `images`, `infrared` and `labels`, where `{split}` stands for the split's folder; labels that end
in .json are COCO's. Labels belong to the visible picture; the infrared one has the same name in its own folder.

What is wrong with a pair (no partner, no or a bad label file, pictures of two sizes, a file that cannot be decoded)
stops the run by name, or with `on_bad: skip` the sample is left out, and `bad_files` says which and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from mpt.errors import ConfigError, DataError
from mpt.seams import DataSpec
from mpt.systems.yolofuse.data.pair_files import Folders, Pair, Search, find_folders, list_pairs, read_scene
from mpt.systems.yolofuse.data.scene_augmentation import Scene
from mpt.systems.yolofuse.data.scene_dataset import SIDES, Layout, SceneDataset, changes_of, check_common, most_boxes
from mpt.systems.yolofuse.data.scene_settings import SceneOptions
from mpt.systems.yolofuse.data.yolo_data_file import SUFFIXES, beside, read_data_file

ASSUMED_COUNT, ASSUMED_BOXES = 10_000, 16
LLVIP_CLASSES = ("person",)


class Settings(SceneOptions):
    root: str = Field("data/LLVIP", min_length=1)
    """The folder that holds the pictures and the labels, or YOLO's data.yaml about them; `~` is your home."""
    classes: list[str] = Field(default_factory=lambda: list(LLVIP_CLASSES))
    """Names of the classes, in the order of their numbers. Of COCO labels the file's own names are taken."""
    images: str | None = None
    """Folder of the visible pictures below `root`, such as `images/{split}`; null finds it."""
    infrared: str | None = None
    """Folder of the infrared pictures."""
    labels: str | None = None
    """Folder of the label files, or a COCO file, such as `annotations/instances_{split}.json`."""
    height: int | None = Field(None, ge=32, multiple_of=32)
    """Height of the pictures in pixels where they are not square; `image_size` is then their width."""
    on_bad: Literal["stop", "skip"] = "stop"
    """What happens at a pair that cannot be used."""
    missing_label: Literal["bad", "empty"] = "bad"
    """Whether a picture without a label file is bad, or has no objects."""
    most_boxes: int | None = Field(None, ge=1, le=2000)
    """Boxes per sample, padded; null is what the fullest pictures need, at most 300."""
    cache: bool = False
    """Keep decoded pictures in memory, at the size they are needed (each worker process its own)."""
    max_pixels: int = Field(64_000_000, ge=1, le=178_000_000)
    """Larger pictures are bad: they are refused from their header, before they are decoded."""
    flip_down: float = Field(0.0, ge=0, le=1)
    """Probability that a sample is mirrored top to bottom."""
    hue: float = Field(0.015, ge=0, le=1)
    """Largest relative change of hue, the same for both cameras."""
    saturation: float = Field(0.7, ge=0, le=1)
    """Largest relative change of saturation, the same for both cameras."""


class DetectionFiles(SceneDataset):
    """Pairs of picture files; labels are read at the start, pictures when they are needed."""

    def __init__(self, settings: Settings, pairs: list[Pair], classes: Sequence[str], split: str, seed: int) -> None:
        largest = max((len(pair.rows) for pair in pairs), default=1)
        layout = _layout(settings, largest, classes, split)
        super().__init__(
            layout, len(pairs), None if split == "test" else changes_of(settings), settings.mosaic_epochs, seed
        )
        self.pairs, self.settings = pairs, settings
        self.cached: dict[int, Scene] = {}

    def scene(self, index: int) -> Scene:
        """Return one pair, decoded; under `on_bad: skip` the next good one in order in place of a bad one."""
        for attempt in range(len(self.pairs)):
            number = (index + attempt) % len(self.pairs)
            pair = self.pairs[number]
            if number in self.cached:
                return self.cached[number]
            if pair.name in self.bad_files:
                continue
            try:
                scene = read_scene(pair, self.layout, self.settings.max_pixels)
            except DataError as error:
                if self.settings.on_bad == "stop":
                    raise
                self.bad_files[pair.name] = str(error)
                continue
            if self.settings.cache:
                self.cached[number] = scene
            return scene
        raise DataError(
            f"{self.settings.root}: no pair could be decoded; the first: {next(iter(self.bad_files.items()))}"
        )


def _layout(settings: Settings, largest: int, classes: Sequence[str], split: str) -> Layout:
    width = settings.image_size or 0
    is_test = split == "test"
    needed = most_boxes(largest, 0 if is_test else settings.mosaic, 0 if is_test else settings.mixup)
    boxes = settings.most_boxes or needed
    return Layout(SIDES[settings.cameras], width, settings.height or width, boxes, tuple(classes))


def build(settings: Settings, split: str, seed: int) -> DetectionFiles:
    """Return one split. Raises DataError for what is missing, and for what is bad unless it is skipped."""
    check_common(settings.image_size, settings.height, settings.channels, settings.augment)
    settings = told_by_data_file(settings, split)
    wanted = Search(**{name: getattr(settings, name) for name in Search.__dataclass_fields__})
    folders: Folders = find_folders(wanted, split)
    listed = list_pairs(folders, wanted)
    if not listed.pairs:
        raise DataError(
            f"{folders.images}: none of its {len(listed.bad)} pictures can be used; the first: "
            f"{next(iter(listed.bad.items()), 'there are none')}"
        )
    dataset = DetectionFiles(settings, listed.pairs, listed.classes, split, seed)
    dataset.bad_files.update(listed.bad)
    return dataset


def told_by_data_file(settings: Settings, split: str) -> Settings:
    """Return the settings with what a data file says that `root` names; those that are set as well win.

    Raises DataError for a file that does not say it, ConfigError for classes that differ from the file's.
    """
    path = Path(settings.root).expanduser()
    if path.suffix not in SUFFIXES or path.is_dir():
        return settings
    file = read_data_file(path)
    if settings.classes not in (list(LLVIP_CLASSES), list(file.classes)):
        raise ConfigError(
            f"dataset.classes are {', '.join(settings.classes)}, and {path} names {', '.join(file.classes)}; leave "
            "dataset.classes out"
        )
    images = settings.images or file.images(split)
    found = {"root": str(file.root), "classes": list(file.classes), "images": images}
    if settings.labels is None:
        found["labels"] = beside(images, "labels")
    if settings.infrared is None and settings.cameras != "rgb":
        found["infrared"] = beside(images, "imagesIR")
    return settings.model_copy(update=found)


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of pictures that are not on this machine, so that a plan needs no data."""
    if Path(settings.root).expanduser().is_file():
        settings = told_by_data_file(settings, "train")
    if settings.image_size is None or (settings.labels is not None and settings.labels.endswith(".json")):
        return None
    if not settings.classes:
        raise ConfigError("dataset.classes is empty; name the classes")
    return _layout(settings, ASSUMED_BOXES, settings.classes, "train").spec(ASSUMED_COUNT)
