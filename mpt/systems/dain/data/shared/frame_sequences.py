"""Published sets of frame sequences, and a user's own, as lists of samples.

| Layout | Files |
|---|---|
| `vimeo_triplet` | `tri_trainlist.txt`, `tri_testlist.txt`, `sequences/00001/0001/im1.png` to `im3.png` |
| `vimeo_septuplet` | `sep_trainlist.txt`, `sep_testlist.txt`, `sequences/.../im1.png` to `im7.png` |
| `middlebury` | `other-data/NAME/frame10.png` and `frame11.png`, truth `other-gt-interp/NAME/frame10i11.png` |
| `ucf101` | `NUMBER/frame_00.png`, `frame_02.png`, truth `frame_01_gt.png` |
| `frames` | a folder of numbered pictures, or a folder of such folders |
| `video` | a video file, or a folder of them |

A sample of n frames has n - 2 middle ones; every one of them may be drawn in training, the central one tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mpt.data.video.video import is_video, read_frames
from mpt.errors import DataError
from mpt.foreign.files import LARGEST_RECORD_BYTES, read_text
from mpt.systems.dain.data.shared.frame_files import (
    check_sizes,
    list_frames,
    picture_size,
    read_picture,
)
from mpt.systems.dain.data.shared.scene_cuts import is_cut, thumbnail
from mpt.systems.dain.data.shared.triplets import Triplet

LARGEST_VIDEO_BYTES = 4 * 2**30
TEST_EVERY = 10
"""Of a user's own frames each tenth sample is for testing."""


@dataclass(frozen=True)
class Sample:
    """One sample: two or more frames with at least one between the ends."""

    name: str
    frames: tuple[Path, ...] | Tensor
    """Files, or decoded frames (n, 3, h, w) uint8."""

    def picture(self, index: int) -> Tensor:
        """Return a frame, uint8 (3, h, w)."""
        return (
            self.frames[index]
            if isinstance(self.frames, Tensor)
            else read_picture(self.frames[index])
        )

    def size(self) -> tuple[int, int]:
        """Return height and width."""
        if isinstance(self.frames, Tensor):
            height, width = self.frames.shape[-2:]
            return height, width
        return picture_size(self.frames[0])


class FrameSource:
    """The source of triplets for `Triplets`."""

    dtype = torch.uint8
    has_flow = has_order = False

    def __init__(self, samples: Sequence[Sample], one_size: bool) -> None:
        self.samples = samples
        self.names = [sample.name for sample in samples]
        self.one_size = one_size

    def __len__(self) -> int:
        return len(self.samples)

    def largest(self) -> tuple[int, int]:
        """Return the largest height and width; where all are of one size only the first is looked at."""
        sizes = [sample.size() for sample in (self.samples[:1] if self.one_size else self.samples)]
        return max(height for height, _ in sizes), max(width for _, width in sizes)

    def read(self, index: int, draw: int) -> Triplet:
        """Return the ends of a sample and one frame between. Raises DataError for frames of different sizes."""
        sample = self.samples[index]
        count = len(sample.frames)
        middle = 1 + draw % (count - 2) if draw else count // 2
        first, between, last = (sample.picture(place) for place in (0, middle, count - 1))
        if not first.shape == between.shape == last.shape:
            sizes = ", ".join(
                f"{image.shape[2]} x {image.shape[1]}" for image in (first, between, last)
            )
            raise DataError(
                f"{sample.name}: the frames of one sample have different sizes ({sizes})"
            )
        return Triplet(first, between, last, middle / (count - 1))


def read_list(path: Path) -> list[str]:
    """Return the lines of a list of sequences. Raises DataError."""
    try:
        return [
            line.strip()
            for line in read_text(path, LARGEST_RECORD_BYTES).splitlines()
            if line.strip()
        ]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{path}: the list of sequences cannot be read: {reason}") from error


def vimeo(root: Path, split: str, prefix: str, count: int) -> list[Sample]:
    """Return Vimeo-90K's samples of one split."""
    names = read_list(root / f"{prefix}_{split}list.txt")
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(
                f"{root / f'{prefix}_{split}list.txt'}: {name!r} leads out of the data set"
            )
    samples = []
    for name in names:
        folder = root / "sequences" / name
        samples.append(
            Sample(name, tuple(folder / f"im{number}.png" for number in range(1, count + 1)))
        )
    require_files(samples[:1] + samples[-1:])
    return samples


def middlebury(root: Path, split: str) -> list[Sample]:
    """Return Middlebury's `other` sequences that have a true middle frame."""
    samples = []
    for truth in sorted((root / "other-gt-interp").glob("*/frame10i11.png")):
        frames = root / "other-data" / truth.parent.name
        samples.append(
            Sample(truth.parent.name, (frames / "frame10.png", truth, frames / "frame11.png"))
        )
    require_files(samples)
    return samples


def ucf101(root: Path, split: str) -> list[Sample]:
    """Return the UCF101 test triplets of Liu et al. (`frame_00`, `frame_01_gt`, `frame_02`)."""
    samples = []
    for truth in sorted(
        root.glob("*/frame_01_gt.png"), key=lambda path: (len(path.parent.name), path.parent.name)
    ):
        folder = truth.parent
        samples.append(
            Sample(folder.name, (folder / "frame_00.png", truth, folder / "frame_02.png"))
        )
    require_files(samples)
    return samples


def own_frames(root: Path, split: str, cut_threshold: float) -> list[Sample]:
    """Return the triplets of a folder of frames, or of the folders in it, without those across a cut."""
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    samples: list[Sample] = []
    for folder in folders or [root]:
        files = list_frames(folder)
        check_sizes(files)
        cuts = find_cuts((thumbnail(read_picture(file)) for file in files), cut_threshold)
        samples += [
            Sample(f"{folder.name}/{files[start + 1].name}", tuple(files[start : start + 3]))
            for start in starts_of_triplets(len(files), cuts)
        ]
    return of_split(samples, split)


def own_videos(root: Path, split: str, cut_threshold: float) -> list[Sample]:
    """Return the triplets of a video, or of the videos in a folder, without those across a cut; decoded at once."""
    files = [root] if root.is_file() else sorted(path for path in root.glob("*") if is_video(path))
    if not files:
        raise DataError(f"{root}: there is no video here")
    samples: list[Sample] = []
    held = 0
    for file in files:
        images: list[Tensor] = []
        for image in read_frames(file):
            images.append(image)
            held += image.numel()
            if held > LARGEST_VIDEO_BYTES:
                raise DataError(
                    f"{root}: more than {LARGEST_VIDEO_BYTES / 2**30:.0f} GiB of frames, which would be held in "
                    "memory; extract them (ffmpeg -i VIDEO FOLDER/%06d.png) and use layout: frames"
                )
        if len(images) < 3:
            raise DataError(f"{file}: {len(images)} frames; a triplet has three")
        frames = torch.stack(images)
        cuts = find_cuts((thumbnail(image) for image in frames), cut_threshold)
        samples += [
            Sample(f"{file.name}:{start + 1}", frames[start : start + 3])
            for start in starts_of_triplets(len(frames), cuts)
        ]
    return of_split(samples, split)


def find_cuts(thumbnails: Iterator[Tensor], threshold: float) -> set[int]:
    """Return the numbers of the frames that begin a scene."""
    cuts, before = set(), None
    for number, current in enumerate(thumbnails):
        if before is not None and is_cut(before, current, threshold):
            cuts.add(number)
        before = current
    return cuts


def starts_of_triplets(count: int, cuts: set[int]) -> list[int]:
    """Return where three frames of one scene begin."""
    return [start for start in range(count - 2) if start + 1 not in cuts and start + 2 not in cuts]


def of_split(samples: list[Sample], split: str) -> list[Sample]:
    """Return each tenth run of ten for testing and the rest for training, so that neighbours are seldom in both."""
    is_test = [
        (number // TEST_EVERY) % TEST_EVERY == TEST_EVERY - 1 for number in range(len(samples))
    ]
    if not any(is_test):  # a short clip: the last tenth, at least one
        is_test = [
            number >= len(samples) - max(1, len(samples) // TEST_EVERY)
            for number in range(len(samples))
        ]
    return [
        sample for sample, test in zip(samples, is_test, strict=True) if test == (split == "test")
    ]


def require_files(samples: Sequence[Sample]) -> None:
    """Raise DataError if a file of these samples is missing."""
    for sample in samples:
        assert not isinstance(sample.frames, Tensor)
        for path in sample.frames:
            if not path.is_file():
                raise DataError(
                    f"{path}: missing; see `mpt list` for the layouts that frame_triplets reads"
                )


LAYOUTS: dict[str, Callable[[Path, str, float], list[Sample]]] = {
    "vimeo_triplet": lambda root, split, cut: vimeo(root, split, "tri", 3),
    "vimeo_septuplet": lambda root, split, cut: vimeo(root, split, "sep", 7),
    "middlebury": lambda root, split, cut: middlebury(root, split),
    "ucf101": lambda root, split, cut: ucf101(root, split),
    "frames": own_frames,
    "video": own_videos,
}
TEST_ONLY = ("middlebury", "ucf101")
ONE_SIZE = ("vimeo_triplet", "vimeo_septuplet", "ucf101")


def guess_layout(root: Path) -> str:
    """Return the layout of a folder or file by what is in it. Raises DataError."""
    if is_video(root):
        return "video"
    marks = {
        "vimeo_triplet": "tri_testlist.txt",
        "vimeo_septuplet": "sep_testlist.txt",
        "middlebury": "other-gt-interp",
    }
    for layout, mark in marks.items():
        if (root / mark).exists():
            return layout
    if next(root.glob("*/frame_01_gt.png"), None):
        return "ucf101"
    if root.is_dir():
        return "video" if any(is_video(path) for path in root.glob("*")) else "frames"
    raise DataError(f"dataset.root: there is no folder or video {root}")
