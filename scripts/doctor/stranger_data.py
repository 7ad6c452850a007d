"""Folders of pictures as found on disks, each with one fault, and sound ones, for `scripts/doctor/doctor_table.py`.

Pictures are made of noise, gradients and spots by numpy and saved by Pillow. Each function fills a folder and returns
changes to the configuration, and words one of which the doctor's page must have for the fault to count as named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray
from PIL import Image

Picture = NDArray[numpy.uint8]
CLASSES = ("boat", "car", "dog")
Made = tuple[dict[str, Any], Sequence[str]]


def picture(random: numpy.random.Generator, label: int, side: int = 40) -> Picture:
    """Draw a coloured picture of a class (side, side, 3): a shaded ground, spots, a stripe as its class says."""
    y, x = numpy.mgrid[0:side, 0:side] / side
    colours = random.uniform(30, 220, (6, 3)) * (1.0, 0.85, 0.6)
    ground = (
        colours[0]
        + (colours[1] - colours[0]) * (x * random.random() + y * random.random())[..., None]
    )
    for colour in colours[2:5]:
        centre, radius = random.random(2), random.uniform(0.08, 0.25)
        ground = numpy.where(
            ((x - centre[0]) ** 2 + (y - centre[1]) ** 2 < radius**2)[..., None], colour, ground
        )
    stripe = (x, y, (x + y) / 2)[label % 3]
    ground = numpy.where(
        (abs(stripe - random.uniform(0.3, 0.7)) < 0.05)[..., None], colours[5], ground
    )
    return (ground + random.normal(0, 6, ground.shape)).clip(0, 255).astype(numpy.uint8)


def fill(
    folder: Path,
    per_class: int = 24,
    change: Callable[[Picture, str], Picture] | None = None,
    **options: Any,
) -> None:
    """Fill `train` and `test`; `change` is applied to each picture with its set's name."""
    random = numpy.random.default_rng(options.pop("seed", 7))
    suffix = options.pop("suffix", "png")
    for split, count in (("train", per_class), ("test", max(8, per_class // 3))):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                made = picture(random, label)
                made = made if change is None else change(made, split)
                Image.fromarray(made).save(
                    folder / split / name / f"{number:04d}.{suffix}", **options
                )


def first(folder: Path, split: str, name: str, number: int = 0) -> Path:
    return sorted((folder / split / name).iterdir())[number]


def mean_and_deviation_of_bytes(folder: Path) -> Made:
    fill(folder)
    return {"task": {"mean": [123.7, 116.3, 103.5], "std": [58.4, 57.1, 57.4]}}, [
        "in the units of pixels from 0 to 1?"
    ]


def divided_twice(folder: Path) -> Made:
    fill(folder)
    return {
        "model": {
            "name": "scripts.doctor.stranger_data_models:DividesAgain",
            "image_size": 32,
            "channels": 3,
        }
    }, ["divided by 255 twice"]


def twelve_bits_in_sixteen(folder: Path) -> Made:
    random = numpy.random.default_rng(3)
    for split, count in (("train", 24), ("test", 8)):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                grey = picture(random, label).mean(2)
                deep = (grey * 16).astype(numpy.uint16)
                Image.fromarray(deep).save(folder / split / name / f"{number}.png")
    return {"dataset": {"channels": 1}}, ["12 bits in files of 16"]


def empty_plane(folder: Path) -> Made:
    def without_blue(image: Picture, _: str) -> Picture:
        image = image.copy()
        image[..., 2] = 0
        return image

    fill(folder, change=without_blue)
    return {}, ["channel 2 of image is 0 in every pixel"]


def lens_caps(folder: Path) -> Made:
    fill(folder)
    for number in (3, 9):
        path = first(folder, "train", "car", number)
        noise = numpy.random.default_rng(number).integers(0, 6, (40, 40, 3))
        Image.fromarray(noise.astype(numpy.uint8)).save(path)
    return {}, ["nearly black"]


def test_by_opencv(folder: Path) -> Made:
    fill(
        folder,
        per_class=60,
        change=lambda image, split: image[..., ::-1].copy() if split == "test" else image,
    )
    return {}, ["BGR"]


def test_pictures_saved_again(folder: Path) -> Made:
    fill(folder)
    for number, name in enumerate(CLASSES):
        with Image.open(first(folder, "test", name, number)) as image:
            image.save(folder / "train" / name / "found-on-the-web.jpg", quality=80)
    return {}, ["3 pictures are in the training and in the test set"]


def test_pictures_made_smaller(folder: Path) -> Made:
    fill(folder)
    for name in CLASSES:
        with Image.open(first(folder, "test", name)) as image:
            image.resize((34, 34), Image.Resampling.BICUBIC).save(
                folder / "train" / name / "thumb.jpg", quality=85
            )
    return {}, ["3 pictures are in the training and in the test set"]


def one_in_a_thousand(folder: Path) -> Made:
    fill(folder, per_class=8)
    random = numpy.random.default_rng(5)
    for number in range(1000):
        Image.fromarray(picture(random, 1)[:32, :32]).save(
            folder / "train" / "car" / f"more-{number}.png"
        )
    for path in sorted((folder / "train" / "dog").iterdir())[1:]:
        path.unlink()
    return {}, ["class car has 1008 samples and the rarest, dog, 1"]


def labelled_twice(folder: Path) -> Made:
    fill(folder)
    for number in (2, 5):
        with Image.open(first(folder, "train", "boat", number)) as image:
            image.save(folder / "train" / "dog" / f"copy-{number}.jpg", quality=92)
    return {}, ["2 samples are one picture in two classes"]


def broken_off(folder: Path) -> Made:
    fill(folder, suffix="jpg", quality=90)
    path = first(folder, "train", "dog", 4)
    path.write_bytes(path.read_bytes()[:400])
    return {}, ["0004.jpg"]


def page_in_a_picture(folder: Path) -> Made:
    fill(folder)
    first(folder, "test", "boat", 1).write_text("<html><title>404 Not Found</title></html>")
    return {}, ["0001.png"]


def darker_test_set(folder: Path) -> Made:
    fill(
        folder,
        per_class=60,
        change=lambda image, split: (
            (255 * (image / 255) ** 2.2).astype(numpy.uint8) if split == "test" else image
        ),
    )
    return {}, ["were the two sets prepared in the same way?"]


def class_missing_in_the_test_set(folder: Path) -> Made:
    fill(folder)
    for path in (folder / "test" / "car").iterdir():
        path.unlink()
    (folder / "test" / "car").rmdir()
    return {}, ["car"]


def placeholder_pictures(folder: Path) -> Made:
    fill(folder)
    for name in CLASSES:
        Image.new("RGB", (40, 40), (238, 238, 238)).save(folder / "train" / name / "removed.png")
    return {}, ["of one colour"]


FAULTS: tuple[Callable[[Path], Made], ...] = (
    mean_and_deviation_of_bytes,
    divided_twice,
    twelve_bits_in_sixteen,
    empty_plane,
    lens_caps,
    test_by_opencv,
    test_pictures_saved_again,
    test_pictures_made_smaller,
    one_in_a_thousand,
    labelled_twice,
    broken_off,
    page_in_a_picture,
    darker_test_set,
    class_missing_in_the_test_set,
    placeholder_pictures,
)


def plain_pictures(folder: Path) -> Made:
    fill(folder)
    return {}, []


def small_jpegs(folder: Path) -> Made:
    fill(folder, per_class=40, suffix="jpg", quality=60, seed=9)
    return {"dataset": {"augment": ["RandomHorizontalFlip"]}}, []


def imagenet_scaling(folder: Path) -> Made:
    fill(folder, seed=11)
    return {"task": {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}}, []


def night(folder: Path) -> Made:
    fill(folder, change=lambda image, _: image // 3, seed=12)
    return {}, []


def grey_in_colour_files(folder: Path) -> Made:
    def grey(image: Picture, _: str) -> Picture:
        return numpy.repeat(image.mean(2, keepdims=True), 3, 2).astype(numpy.uint8)

    fill(folder, change=grey, seed=13)
    return {}, []


def sixteen_bits(folder: Path) -> Made:
    random = numpy.random.default_rng(14)
    for split, count in (("train", 24), ("test", 8)):
        for label, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True, exist_ok=True)
            for number in range(count):
                deep = (picture(random, label).mean(2) * 257).astype(numpy.uint16)
                Image.fromarray(deep).save(folder / split / name / f"{number}.png")
    return {"dataset": {"channels": 1}}, []


def frames_of_one_scene(folder: Path) -> Made:
    """Pictures of one camera: a ground that all share, and what moves."""
    random = numpy.random.default_rng(15)
    ground = picture(random, 0).astype(float)

    def over_ground(image: Picture, _: str) -> Picture:
        made = ground.copy()
        top, left = random.integers(0, 20, 2)
        made[top : top + 18, left : left + 18] = image[:18, :18]
        return (made + random.normal(0, 4, made.shape)).clip(0, 255).astype(numpy.uint8)

    fill(folder, per_class=40, change=over_ground, seed=16)
    return {}, []


SOUND: tuple[Callable[[Path], Made], ...] = (
    plain_pictures,
    small_jpegs,
    imagenet_scaling,
    night,
    grey_in_colour_files,
    sixteen_bits,
    frames_of_one_scene,
)
