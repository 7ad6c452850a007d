"""Frames to interpolate between: two pictures, a folder of them, or a video. One at a time, never all in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from mpt.data.pictures.decoding import BadImageError
from mpt.data.video.video import describe_video, is_video, read_frames
from mpt.errors import ConfigError, DataError
from mpt.systems.dain.data.shared.frame_files import check_sizes, list_frames, read_picture

PICTURE_RATE = Fraction(25)
"""Frames per second that pictures are taken to have; it matters to videos made of them alone."""


@dataclass(frozen=True)
class FrameStream:
    """What is interpolated: `files` in order, or a video."""

    height: int
    width: int
    rate: Fraction
    files: tuple[Path, ...] = ()
    video: Path | None = None
    has_audio: bool = False

    def frames(self) -> Iterator[Tensor]:
        """Yield the frames, uint8 (3, h, w). Raises DataError at a damaged one and at one of another size."""
        images = read_frames(self.video) if self.video else (read_one(file) for file in self.files)
        for number, image in enumerate(images):
            if image.shape[1:] != (self.height, self.width):
                raise DataError(
                    f"{self.video or self.files[number]}: frame {number} is {image.shape[2]} x {image.shape[1]}, those "
                    f"before it {self.width} x {self.height}"
                )
            yield image

    def signature(self) -> list[str]:
        """Return what tells this input from another: names, lengths and times of change."""
        paths = [self.video] if self.video else list(self.files)
        return [f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths if path is not None]


def read_one(file: Path) -> Tensor:
    """Return a picture, or raise DataError without a training's advice to skip it: a sequence must not have a gap."""
    try:
        return read_picture(file)
    except BadImageError as error:
        raise DataError(f"{file}: {error.reason}. Replace the file") from error


def open_source(inputs: Sequence[Path], rate: float | None = None, allow_gaps: bool = False) -> FrameStream:
    """Return the frames that the paths name: a video, a folder, or two or more pictures. Raises DataError."""
    if len(inputs) == 1 and is_video(inputs[0]):
        info = describe_video(inputs[0])
        own = Fraction(rate).limit_denominator(100_000) if rate else info.frame_rate
        return FrameStream(info.height, info.width, own, (), inputs[0], info.has_audio)
    if len(inputs) == 1 and inputs[0].is_dir():
        files: Sequence[Path] = list_frames(inputs[0], allow_gaps)
    elif len(inputs) == 1:
        if not inputs[0].exists():
            raise DataError(f"{inputs[0]}: there is no such video, folder or picture")
        raise DataError(f"{inputs[0]}: one picture; two or more, a folder or a video are needed to interpolate between")
    else:
        if any(is_video(path) for path in inputs):
            raise ConfigError("give one video, one folder, or two or more pictures")
        files = list(inputs)
    height, width = check_sizes(files)
    own = Fraction(rate).limit_denominator(100_000) if rate else PICTURE_RATE
    return FrameStream(height, width, own, tuple(files))
