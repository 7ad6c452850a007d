"""Picture files with boxes, from one camera or from a visible and an infrared one: LLVIP, YOLO txt pairs, COCO json.

Layouts that are found by themselves below `root`, with `train` and one of `val`, `test` or `valid` for a split:

    images/train/a.jpg   imagesIR/train/a.jpg   labels/train/a.txt      YOLOFuse's LLVIP, and any YOLO pair
    visible/train/a.jpg  infrared/train/a.jpg   Annotations/a.xml       LLVIP as published
    train/images/a.jpg   train/imagesIR/a.jpg   train/labels/a.txt      YOLO as Roboflow exports it

A YOLO data file (`data.yaml`) as `root` names the splits, in folders or lists of pictures, and names the
classes (`yolo_data_file`). Others are named with `images`, `infrared` and `labels`, in which `{split}` is replaced by
the split's folder; labels that end in .json are COCO's, and without a folder of one of these layouts their pictures are
those that the file lists. Labels belong to the visible picture; the infrared one has the same name in its own folder.

A fault of a pair (no partner, no or a bad label file, pictures of two sizes, a file that cannot be decoded)
stops the run by name, or with `on_bad: skip` the sample is left out, and `bad_files` says which and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from mpt.errors import ConfigError, DataError
from mpt.seams import Batch, DataSpec
from mpt.systems.yolofuse.data.shared.detection_labels import read_coco
from mpt.systems.yolofuse.data.shared.given_files import read_sample
from mpt.systems.yolofuse.data.shared.pair_files import (
    Pair,
    Search,
    by_convention,
    coco_file,
    coco_reader,
    file_reader,
    find_folders,
    find_pictures,
    has_folders,
    holds_voc,
    list_pairs,
    pictures_of_coco,
    read_scene,
)
from mpt.systems.yolofuse.data.shared.scene_augmentation import Scene
from mpt.systems.yolofuse.data.shared.scene_dataset import (
    SIDES,
    Layout,
    SceneDataset,
    canvas_of,
    changes_of,
    check_common,
    levels_of,
    most_boxes,
)
from mpt.systems.yolofuse.data.shared.scene_settings import SceneOptions
from mpt.systems.yolofuse.data.shared.yolo_data_file import (
    SUFFIXES,
    DataFile,
    beside,
    read_data_file,
)

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
    """Height of the pictures in pixels if they are not square; `image_size` is then their width."""
    on_bad: Literal["stop", "skip"] = "stop"
    """Treatment of a pair that cannot be used."""
    missing_label: Literal["bad", "empty"] = "bad"
    """Whether a picture without a label file is bad, or has no objects."""
    most_boxes: int | None = Field(None, ge=1)
    """Boxes per sample for which memory is planned; null is the most that the fullest pictures can give. None is ever
    left out: a sample with more takes more memory than planned."""
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

    @model_validator(mode="after")
    def _keep_the_width_longer(self) -> Settings:
        if (
            self.height is not None
            and self.image_size is not None
            and self.height > self.image_size
        ):
            raise ValueError(
                f"dataset.height={self.height} is above image_size={self.image_size}, which is the width"
            )
        return self


class DetectionFiles(SceneDataset):
    """Pairs of picture files; labels are read at the start, pictures when they are needed."""

    def __init__(
        self, settings: Settings, pairs: list[Pair], classes: Sequence[str], split: str, seed: int
    ) -> None:
        largest = max((len(pair.rows) for pair in pairs), default=1)
        layout = _layout(settings, largest, classes, split)
        super().__init__(
            layout,
            len(pairs),
            None if split == "test" else changes_of(settings),
            settings.mosaic_epochs,
            seed,
        )
        self.pairs, self.settings, self.levels = pairs, settings, levels_of(settings)
        self.cached: dict[int, Scene] = {}

    def is_left_out(self, index: int) -> bool:
        """Return whether the pair at this place could not be decoded."""
        return self.pairs[index].name in self.bad_files

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
                scene = read_scene(pair, self.layout, self.settings.max_pixels, self.levels)
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
    needed = most_boxes(
        largest, 0 if is_test else settings.mosaic, 0 if is_test else settings.mixup
    )
    boxes = settings.most_boxes or needed
    height = settings.height or width
    most = math.inf
    if is_test:
        width, height, most = canvas_of(settings, width, height)
    return Layout(SIDES[settings.cameras], width, height, boxes, tuple(classes), most)


def build(settings: Settings, split: str, seed: int) -> DetectionFiles:
    """Return one split. Raises DataError for the missing parts, and for bad pairs unless they are skipped."""
    check_common(settings.image_size, settings.height, settings.canvas)
    file = data_file_of(settings)
    listed = file is not None and names_lists(file, split)
    if file is not None:
        settings = told_by_data_file(settings, file, None if listed else split)
    wanted = Search(**{name: getattr(settings, name) for name in Search.__dataclass_fields__})
    coco_path = coco_file(wanted, split)
    coco = read_coco(coco_path) if coco_path is not None else None
    if coco is None and not settings.classes:
        raise ConfigError(
            "dataset.classes is empty; name the classes in the order of their numbers"
        )
    is_voc = False
    if listed:
        assert file is not None
        pictures = [
            by_convention(path, settings.cameras, coco is None) for path in file.pictures(split)
        ]
    elif coco_path is not None and coco is not None and not has_folders(wanted, split):
        root = Path(settings.root).expanduser()
        pictures = pictures_of_coco(
            coco, [root, coco_path.parent, coco_path.parent.parent], settings.cameras
        )
    else:
        folders = find_folders(wanted, split)
        pictures = find_pictures(folders)
        if coco is None:
            is_voc = holds_voc(folders)
    if coco_path is not None and coco is not None:
        labels_of, classes = coco_reader(coco_path, coco, settings.missing_label), coco.classes
    else:
        labels_of, classes = (
            file_reader(settings.classes, is_voc, settings.missing_label),
            tuple(settings.classes),
        )
    pairs = list_pairs(pictures, labels_of, settings.on_bad)
    if not pairs.pairs:
        raise DataError(
            f"{settings.root}: none of its {len(pairs.bad)} {split} pictures can be used; the first: "
            f"{next(iter(pairs.bad.items()), 'there are none')}"
        )
    dataset = DetectionFiles(settings, pairs.pairs, classes, split, seed)
    dataset.bad_files.update(pairs.bad)
    return dataset


def data_file_of(settings: Settings) -> DataFile | None:
    """Return the YOLO data file that `root` names, None if it names a folder."""
    path = Path(settings.root).expanduser()
    return read_data_file(path) if path.suffix in SUFFIXES and not path.is_dir() else None


def names_lists(file: DataFile, split: str) -> bool:
    """Return whether a split is a list: of folders, or a text file of pictures."""
    entries = file.entries(split)
    return len(entries) > 1 or entries[0].endswith(".txt")


def told_by_data_file(settings: Settings, file: DataFile, split: str | None) -> Settings:
    """Return the settings with those of a data file; those that are set as well win.

    `split` is one that is a folder, None for one that lists pictures. Raises ConfigError for classes that differ from
    the file's, and for folders that are set together with a list.
    """
    if settings.classes not in (list(LLVIP_CLASSES), list(file.classes)):
        raise ConfigError(
            f"dataset.classes are {', '.join(settings.classes)}, and {file.path} names {', '.join(file.classes)}; "
            "leave dataset.classes out"
        )
    found: dict[str, object] = {"root": str(file.root), "classes": list(file.classes)}
    if split is None:
        is_coco = settings.labels is not None and settings.labels.endswith(".json")
        if settings.images or settings.infrared or (settings.labels and not is_coco):
            raise ConfigError(
                f"{file.path} lists pictures; leave out dataset.images, dataset.infrared and dataset.labels: partners "
                "and labels lie in imagesIR and labels in place of images"
            )
        return settings.model_copy(update=found)
    images = settings.images or file.entries(split)[0]
    found["images"] = images
    if settings.labels is None:
        found["labels"] = beside(images, "labels")
    if settings.infrared is None and settings.cameras != "rgb":
        found["infrared"] = beside(images, "imagesIR")
    return settings.model_copy(update=found)


def sample_of_files(settings: Settings, data: DataSpec, files: Mapping[str, Path]) -> Batch:
    """Return one sample of the files that `mpt infer --input` was given. Raises DataError."""
    return read_sample(data, files, settings)


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of pictures that are not on this machine, so that a plan needs no data."""
    file = data_file_of(settings) if Path(settings.root).expanduser().is_file() else None
    if file is not None:
        settings = told_by_data_file(
            settings, file, None if names_lists(file, "train") else "train"
        )
    if settings.image_size is None or (
        settings.labels is not None and settings.labels.endswith(".json")
    ):
        return None
    if not settings.classes:
        raise ConfigError("dataset.classes is empty; name the classes")
    return _layout(settings, ASSUMED_BOXES, settings.classes, "train").spec(ASSUMED_COUNT)
