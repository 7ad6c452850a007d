"""Images in folders, one folder per class, as torchvision's ImageFolder lays them out and orders them.

Two layouts: `root/train/CLASS/...` with `root/test/...` (or `val`), or `root/CLASS/...` alone, of which a share
chosen by hashing each file's name is held out: adding files moves no other file to the other side. With `flat: true`
there are no classes, every image below the folder counts, and there is no "label".

Files are decoded when they are needed. A bad one (damaged, no image, above `max_pixels`) stops the run by name, or
under `on_bad_image: skip` the next good file in order takes its place, the same one each time and for any number of
workers; `bad_files` then lists those that were met, and an evaluation leaves them out. If `augment` begins with
RandomResizedCrop it cuts from the whole picture as stored; otherwise the picture is first made square as `fit` says
and resized.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mpt.config.options import DatasetOptions
from mpt.data.pictures.augment import Augmentation, preserved_generator
from mpt.data.pictures.decoding import EXTENSIONS, MODES, BadImageError, decode_bytes
from mpt.data.pictures.ram_cache import RamCache
from mpt.errors import ConfigError, DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.seams.samples import class_counts

TEST_FOLDERS = ("test", "val", "valid", "validation")
MOST_BAD_IN_A_ROW = 100
ASSUMED_COUNT = 1000


class Settings(DatasetOptions):
    root: str = Field("data/images", min_length=1)
    """The folder with `train` and `test` (or `val`) in it, or with the classes themselves; `~` is your home."""
    flat: bool = False
    """Images without classes, in any sub-folders."""
    fit: Literal["crop", "letterbox", "stretch"] = "crop"
    """How pictures of other proportions become square: cut around the centre, between black bars, or distorted."""
    test_share: float = Field(1.0, gt=0.1, le=1)
    """The middle share of a cut picture that testing, and inference from files, looks at. torchvision and timm test
    most networks at 0.875, pictures resized to 256 and cut to 224."""
    test_fraction: float = Field(0.1, gt=0, lt=1)
    """The share held out for testing, if there is no test folder."""
    decoding: Literal["exact", "fast"] = "exact"
    """fast: JPEGs are decoded at a half, a quarter or an eighth if that is still twice the wanted size, by
    simplejpeg if that is installed and they are decoded whole, and RandomResizedCrop cuts bytes. Pixels differ from
    those of exact by a few levels of 255."""
    on_bad_image: Literal["stop", "skip"] = "stop"
    """The answer to an image that cannot be read: stop the run, or skip the image."""
    max_pixels: int = Field(64_000_000, ge=1, le=178_000_000)
    """Larger images are bad images: they are refused from their header, before they are decoded."""
    cache: Literal["ram"] | None = None
    """ram keeps each decoded image in memory, for sets that fit: files are read once. The weights are the same."""
    cache_gib: float = Field(8.0, gt=0)
    """The most that `cache` may take, for training and test images each, in each process of a parallel training."""

    @model_validator(mode="after")
    def check_share(self) -> Settings:
        if self.test_share < 1 and self.fit != "crop":
            raise ValueError(
                f"test_share is {self.test_share:g}, which belongs to fit: crop; fit is {self.fit}: leave one out"
            )
        return self


class ImageFolder(Dataset):
    """Image files with their classes' numbers."""

    def __init__(
        self,
        paths: list[Path],
        labels: list[int] | None,
        classes: tuple[str, ...],
        settings: Settings,
        split: str,
        seed: int,
        left_out: dict[str, str] | None = None,
    ) -> None:
        if settings.image_size is None:
            raise ConfigError(
                "dataset.image_size is not set, and the model has none of its own: set it"
            )
        self.channels = settings.channels or 3
        if self.channels not in MODES:
            raise ConfigError(
                f"dataset.channels is {self.channels}; images can be read with 1 (grey), 3 or 4 (alpha)"
            )
        self.paths, self.labels, self.settings, self.image_size = (
            paths,
            labels,
            settings,
            settings.image_size,
        )
        self.share = 1.0 if split == "train" else settings.test_share
        self.bad_files: dict[str, str] = dict(left_out or {})
        """Path -> why it was skipped, of the omissions of the list and the bad files met so far."""
        entries = settings.augment if split == "train" else ()
        self.augmentation = (
            Augmentation(entries, self.image_size, self.channels, seed) if entries else None
        )
        self.reads_whole = self.augmentation is not None and self.augmentation.crops_from_original
        self.cache = self.make_cache() if settings.cache else None
        dtype = torch.float32 if entries else torch.uint8  # augmentations compute in float32
        fields = {
            "image": FieldSpec((self.channels, self.image_size, self.image_size), dtype, "image")
        }
        if labels is not None:
            fields["label"] = FieldSpec((), torch.int64)
        self.spec = DataSpec(fields, len(paths), classes, class_counts(labels or (), classes))

    def __len__(self) -> int:
        return len(self.paths)

    def make_cache(self) -> RamCache:
        """Return room for the decoded images. Raises DataError if there is none, or they have no common size."""
        if self.reads_whole:
            raise ConfigError(
                "dataset.cache: RandomResizedCrop as the first augmentation cuts from whole pictures, which are not "
                "kept; put another one before it to cut from the resized ones, or leave the cache out"
            )
        shape = (self.channels, self.image_size, self.image_size)
        return RamCache(
            len(self.paths), shape, self.settings.cache_gib, shared=self.settings.workers > 0
        )

    def read(self, used: int) -> Tensor:
        """Return one image as uint8, from its file or the cache. Raises BadImageError."""
        if self.cache is not None:
            return self.cache.get(used, lambda: self.decode(used))
        return self.decode(used)

    def decode(self, used: int) -> Tensor:
        """Return one image as uint8, at the wanted size. Raises BadImageError."""
        size, pixels, path = (
            (self.image_size, self.image_size),
            self.settings.max_pixels,
            self.paths[used],
        )
        reduces = self.settings.decoding == "fast"
        return decode_bytes(
            path, self.channels, size, pixels, self.settings.fit, share=self.share, reduces=reduces
        )

    def decode_cut(self, used: int, augmentation: Augmentation, epoch: int, index: int) -> Tensor:
        """Return one image of which only the part that is drawn was taken from the file. Raises BadImageError."""
        augmentation.begin(epoch, index)
        path, pixels, is_fast = (
            self.paths[used],
            self.settings.max_pixels,
            self.settings.decoding == "fast",
        )
        cut = decode_bytes(
            path, self.channels, None, pixels, reduces=is_fast, choose_cut=augmentation.choose_cut
        )
        return augmentation.apply_to_cut(cut, as_bytes=is_fast)

    def augmented(self, used: int, epoch: int, index: int) -> Tensor:
        """Return one image in the spec's dtype, changed by the draws for `index`. Raises BadImageError."""
        if self.augmentation is None:
            return self.read(used)
        if self.reads_whole:
            return self.decode_cut(used, self.augmentation, epoch, index)
        return self.augmentation.apply(self.read(used).float().div_(255), epoch, index)

    def class_labels(self) -> list[int] | None:
        """Return the class of every image."""
        return self.labels

    def name_of(self, index: int) -> str:
        """Return the file that is at this place, the next good one if it was found to be bad."""
        numbers = ((index + attempt) % len(self.paths) for attempt in range(len(self.paths)))
        return next(
            (str(self.paths[one]) for one in numbers if str(self.paths[one]) not in self.bad_files),
            "",
        )

    def is_left_out(self, index: int) -> bool:
        """Return whether the file at this place was found to be bad."""
        return str(self.paths[index]) in self.bad_files

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        """Return the samples of `indices`, decoded. Raises DataError naming a bad file, unless they are skipped."""
        with preserved_generator():
            samples = [self.sample(index, epoch) for index in indices]
        batch = {"image": torch.stack([image for image, _ in samples])}
        if self.labels is not None:
            batch["label"] = torch.tensor([self.labels[used] for _, used in samples])
        return batch

    def sample(self, index: int, epoch: int) -> tuple[Tensor, int]:
        """Return one image, in the spec's dtype, and the index it came from: `index`, or the next that can be read."""
        for attempt in range(min(len(self.paths), MOST_BAD_IN_A_ROW)):
            used = (index + attempt) % len(self.paths)
            path = self.paths[used]
            if str(path) in self.bad_files:
                continue
            try:
                image = self.augmented(used, epoch, index)
            except BadImageError as error:
                if self.settings.on_bad_image == "stop":
                    raise
                self.bad_files[str(path)] = error.reason
                continue
            return image, used
        reason = self.bad_files[str(self.paths[index])]
        raise DataError(
            f"{self.paths[index]} and the files after it are all bad (the first: {reason}); check dataset.root"
        )


def build(settings: Settings, split: str, seed: int) -> ImageFolder:
    """Return one split of the images below `settings.root`. Raises DataError for the missing parts or empty."""
    root = Path(settings.root).expanduser()
    if not root.is_dir():
        raise DataError(
            f"no folder {root}. Set dataset.root to a folder that holds train/CLASS/*.jpg and test/CLASS/*.jpg, or "
            "CLASS/*.jpg (or any images, with dataset.flat=true)"
        )
    train_folder, test_folder = split_folders(root)
    classes = () if settings.flat else find_classes(train_folder)
    folder = test_folder if split == "test" and test_folder is not None else train_folder
    if folder is test_folder and not settings.flat:
        refuse_new_classes(folder, train_folder, classes)
    paths, labels, left_out = list_images(folder, classes)
    if labels and folder is not test_folder:
        refuse_empty_classes(folder, classes, labels)
    if test_folder is None:
        paths, labels = share_of_split(root, paths, labels, split, settings.test_fraction)
    if not paths:
        raise DataError(f"{folder}: no images in it (looked for {', '.join(EXTENSIONS)})")
    return ImageFolder(
        paths, None if settings.flat else labels, classes, settings, split, seed, left_out
    )


def split_folders(root: Path) -> tuple[Path, Path | None]:
    """Return the folders of training and test images; without a folder `train` all are in one, and there is no test."""
    train_folder = root / "train"
    if not train_folder.is_dir():
        return root, None
    return train_folder, next(
        (root / name for name in TEST_FOLDERS if (root / name).is_dir()), None
    )


def refuse_new_classes(folder: Path, train_folder: Path, classes: Sequence[str]) -> None:
    """Raise DataError for a test folder with a class that is not trained."""
    unknown = sorted(set(find_classes(folder)) - set(classes))
    if unknown:
        raise DataError(
            f"{folder / unknown[0]}: there is no class {unknown[0]!r} in {train_folder}"
        )


def refuse_empty_classes(folder: Path, classes: Sequence[str], labels: Sequence[int]) -> None:
    """Raise DataError for a class without images."""
    empty = sorted(set(range(len(classes))) - set(labels))
    if empty:
        raise DataError(
            f"{folder / classes[empty[0]]}: no images in this class (looked for {', '.join(EXTENSIONS)}). Put some in, "
            "or remove the folder"
        )


def share_of_split(
    root: Path, paths: Sequence[Path], labels: Sequence[int], split: str, test_fraction: float
) -> tuple[list[Path], list[int]]:
    """Return one split's images with their labels, of a folder that has all. Raises DataError if it has none."""
    kept = [
        n
        for n, path in enumerate(paths)
        if is_held_out(path, root, test_fraction) == (split == "test")
    ]
    if paths and not kept:
        raise DataError(
            f"{root}: none of its {len(paths)} images falls to the {split} split; add a test folder, or change "
            f"dataset.test_fraction={test_fraction}"
        )
    return [paths[n] for n in kept], [labels[n] for n in kept]


def evaluation_set(
    settings: Settings, folder: Path, classes: tuple[str, ...], seed: int
) -> ImageFolder:
    """Return all images of a folder as a test set: those of `CLASS/` in it, or in its test folder if it has one.

    A class that a run has not learnt is a DataError; one of the run's that has no images is none.
    """
    folder = next((folder / name for name in TEST_FOLDERS if (folder / name).is_dir()), folder)
    if classes and (unknown := sorted(set(find_classes(folder)) - set(classes))):
        raise DataError(
            f"{folder / unknown[0]}: the run knows no class {unknown[0]!r}; it learnt {', '.join(classes[:20])}"
        )
    paths, labels, left_out = list_images(folder, classes)
    if not paths:
        raise DataError(f"{folder}: no images in it (looked for {', '.join(EXTENSIONS)})")
    return ImageFolder(
        paths, labels if classes else None, classes, settings, "test", seed, left_out
    )


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of unlabelled images that are not on this machine, so that a plan needs no data."""
    if settings.image_size is None or not settings.flat:
        return None
    shape = (settings.channels or 3, settings.image_size, settings.image_size)
    dtype = torch.float32 if settings.augment else torch.uint8
    return DataSpec({"image": FieldSpec(shape, dtype, "image")}, ASSUMED_COUNT, ())


def find_classes(folder: Path) -> tuple[str, ...]:
    """Return the names of the class folders, sorted."""
    classes = tuple(sorted(entry.name for entry in os.scandir(folder) if entry.is_dir()))
    if not classes:
        raise DataError(
            f"{folder}: no class folders in it. Sort the images into CLASS/, or set dataset.flat=true"
        )
    return classes


def list_images(
    folder: Path, classes: tuple[str, ...]
) -> tuple[list[Path], list[int], dict[str, str]]:
    """Return the image files below each class folder (or below `folder`, without classes), sorted, with their class.

    Third comes the omissions, with the reason. Links to folders are followed, but no folder is listed twice: a link
    back up would never end, and one into another class would give its images two labels.
    """
    paths: list[Path] = []
    labels: list[int] = []
    left_out: dict[str, str] = {}
    starts = {
        label: folder / name
        for label, name in enumerate(classes or ("",))
        if (folder / name).is_dir()
    }
    seen: set[tuple[int, int]] = {identity(folder)} if classes else set()
    for start in starts.values():
        if identity(start) in seen:
            raise DataError(
                f"{start}: a link to {start.resolve()}, which is a class already or holds them: remove it"
            )
        seen.add(identity(start))
    for label, start in starts.items():
        found = sorted(walk(start, seen, left_out), key=lambda path: (str(path.parent), path.name))
        paths += found
        labels += [label] * len(found)
    return paths, labels, left_out


def walk(start: Path, seen: set[tuple[int, int]], left_out: dict[str, str]) -> Iterator[Path]:
    """Yield the image files below a folder, and note the folders met and the files left out."""
    waiting = [start]
    while waiting:
        directory = waiting.pop()
        for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
            path = directory / entry.name
            if entry.is_dir() and identity(path) in seen:
                left_out[str(path)] = f"a link to {path.resolve()}, which is listed already"
            elif entry.is_dir():
                seen.add(identity(path))
                waiting.append(path)
            elif entry.name.lower().endswith(EXTENSIONS):
                # a link to nothing is a bad image, by name
                if entry.is_file() or not path.exists():
                    yield path
                else:
                    left_out[str(path)] = "not a regular file"


def identity(folder: Path) -> tuple[int, int]:
    """Return a folder's device and inode, which are the same by every path to it."""
    about = folder.stat()
    return about.st_dev, about.st_ino


def is_held_out(path: Path, root: Path, fraction: float) -> bool:
    """Say whether a file belongs to the test split: by a hash of its name below `root`, so it never changes sides."""
    digest = hashlib.sha256(
        path.relative_to(root).as_posix().encode("utf-8", "surrogateescape")
    ).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64
