"""Triplets from files: Vimeo-90K (triplets or septuplets), Middlebury's other-data, UCF101, own frames or videos.

`root` trains and tests; `test_root` tests on another set, in its own layout, so that a network trained on Vimeo-90K is
measured on Middlebury. Layouts are in docs/how-to/dain.md. Test frames are whole; training crops are random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from mpt.config.options import DatasetOptions
from mpt.errors import ConfigError, DataError
from mpt.seams import DataSpec
from mpt.systems.dain.data.shared.frame_sequences import (
    LAYOUTS,
    ONE_SIZE,
    TEST_ONLY,
    FrameSource,
    guess_layout,
)
from mpt.systems.dain.data.shared.triplets import Changes, Triplets, triplet_layout

FEW = 24
"""Up to that many test samples each has its own figures in the report."""
VIMEO_SIZE = (256, 448)
VIMEO_COUNTS = {"vimeo_triplet": 51_312, "vimeo_septuplet": 64_612}
"""Samples in the published training lists."""
ASSUMED_COUNT = 1000
Layout = Literal[
    "auto", "vimeo_triplet", "vimeo_septuplet", "middlebury", "ucf101", "frames", "video"
]


class Settings(DatasetOptions):
    """Where the frames are and how training samples are changed."""

    root: str
    """Folder of the data set, or a folder of frames or videos."""
    layout: Layout = "auto"
    """Layout of `root`; auto detects it."""
    test_root: str | None = None
    """Another data set to test on; null tests on the root's own test split."""
    test_layout: Layout = "auto"
    """Layout of `test_root`; auto detects it."""
    crop: list[int] | None = None
    """[height, width] of training crops; null trains on whole frames."""
    flip: bool = True
    """Flip training samples at random, horizontally and vertically, each with probability 0.5."""
    temporal_swap: bool = True
    """Swap first and last frame of training samples at random, with probability 0.5."""
    test_limit: int | None = Field(None, ge=1)
    """Test on this many samples, spread over the set."""
    scene_cut: float = Field(0.72, ge=0, le=1)
    """Of own frames and videos: triplets across a cut are left out; neighbours are of different scenes when the
    similarity of their thumbnails is below this. 0 keeps all."""
    channels: Literal[3] = 3

    @field_validator("crop")
    @classmethod
    def check_crop(cls, sides: list[int] | None) -> list[int] | None:
        if sides is not None and (len(sides) != 2 or min(sides) < 16):
            raise ValueError("two numbers of at least 16: [height, width]")
        return sides


def build(settings: Settings, split: str, seed: int) -> Triplets:
    """Find the samples of one split. Raises DataError for anything that is not there, and ConfigError for anything that
    cannot be."""
    if settings.augment:
        raise ConfigError(
            "dataset.augment: the fields of a triplet change together, by flip and temporal_swap"
        )
    if settings.image_size is not None:
        raise ConfigError(
            "dataset.image_size: frames are not resized; write dataset.crop: [height, width]"
        )
    source = find_samples(settings, split)
    if split == "test":
        return Triplets(source, Changes(), seed, train=False)
    crop = (settings.crop[0], settings.crop[1]) if settings.crop else None
    changes = Changes(crop, settings.flip, settings.temporal_swap)
    names = find_samples(settings, "test").names if settings.test_root is not None else []
    return Triplets(
        source, changes, seed, train=True, test_names=names if len(names) <= FEW else []
    )


def assume(settings: Settings) -> DataSpec | None:
    """Return the layout of frames that are not on this machine, so that a plan needs no data.

    Vimeo-90K's frames and lists are known; of others the crop says the size, and their number is a guess.
    """
    known = VIMEO_COUNTS.get(settings.layout)
    if settings.crop is None and known is None:
        return None
    height, width = settings.crop or VIMEO_SIZE
    return triplet_layout(
        (height, width), known or ASSUMED_COUNT, FrameSource.dtype, FrameSource.has_flow
    )


def find_samples(settings: Settings, split: str) -> FrameSource:
    """Return the samples of one split."""
    is_test = split == "test"
    if is_test and settings.test_root is not None:
        root, layout = Path(settings.test_root), settings.test_layout
    else:
        root, layout = Path(settings.root), settings.layout
    layout_name = guess_layout(root) if layout == "auto" else layout
    if layout_name in TEST_ONLY and not is_test:
        raise ConfigError(
            f"dataset.root: {layout_name} is for testing; train on another set and write test_root: {settings.root}"
        )
    samples = LAYOUTS[layout_name](root, split, settings.scene_cut)
    if not samples:
        raise DataError(f"{root}: no {split} samples in the layout {layout_name}")
    if is_test and settings.test_limit is not None:
        samples = samples[:: -(-len(samples) // settings.test_limit)]
    return FrameSource(samples, layout_name in ONE_SIZE)
