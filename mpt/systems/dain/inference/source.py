"""Frames to interpolate between: two pictures, a folder of them, or a video. One at a time, never all in memory.

A frame has a time. Videos of even rate have those of their number, so that a container's rounding is not taken for
motion; others have their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from mpt.data.pictures.decoding import BadImageError
from mpt.data.video.properties import Colour, Properties, read_properties
from mpt.data.video.video import Frame, describe_video, is_video, read_timed_frames
from mpt.errors import ConfigError, DataError
from mpt.systems.dain.data.shared.deep_pictures import has_alpha, is_deep_picture, read_deep_picture
from mpt.systems.dain.data.shared.frame_files import check_sizes, list_frames, read_picture

PICTURE_RATE = Fraction(25)
"""Frames per second that pictures are taken to have; it matters to videos made of them alone."""
STATED_WITHIN = Fraction(1, 100)
"""Share by which a header's rate may differ from that of the frames' times."""
DEEP_PICTURES = Colour(bits=10)
"""How pictures of 16 bits are stored in a video."""


@dataclass(frozen=True)
class FrameStream:
    """What is interpolated: `files` in order, or a video."""

    height: int
    width: int
    rate: Fraction
    """Frames per second, on average where the times are uneven."""
    files: tuple[Path, ...] = ()
    video: Path | None = None
    properties: Properties | None = None
    """Of a video."""
    deep: bool = False
    """Whether pixels have more than 8 bits."""
    own_rate: Fraction | None = None
    """A video's rate by its own times, where `rate` was given instead."""

    @property
    def is_even(self) -> bool:
        """Whether frames come at even times."""
        return (
            self.properties is None or self.own_rate is not None or self.properties.has_even_times
        )

    @property
    def longest(self) -> Fraction:
        """Return the longest time between two frames, in seconds."""
        return 1 / self.rate if self.is_even or self.properties is None else self.properties.longest

    @property
    def colour(self) -> Colour:
        """Return how the pixels are stored."""
        if self.properties is not None:
            return self.properties.colour
        return DEEP_PICTURES if self.deep else Colour()

    @property
    def has_tracks(self) -> bool:
        """Whether there is sound, or there are subtitles."""
        return self.properties is not None and bool(
            self.properties.audio or self.properties.subtitles
        )

    def frames(self) -> Iterator[Frame]:
        """Yield the frames: uint8 (3, h, w), or int32 up to 65535 if deep.

        Raises DataError at a damaged one and at one of another size.
        """
        for number, frame in enumerate(self.decoded()):
            if frame.image.shape[1:] != (self.height, self.width):
                raise DataError(
                    f"{self.video or self.files[number]}: frame {number} is {frame.image.shape[2]} x "
                    f"{frame.image.shape[1]}, those before it {self.width} x {self.height}"
                )
            yield frame

    def decoded(self) -> Iterator[Frame]:
        """Yield the frames with their times."""
        step = 1 / self.rate
        if self.video is None:
            read = read_deep_picture if self.deep else read_one
            for number, file in enumerate(self.files):
                yield Frame(read(file), number * step, step)
            return
        for number, frame in enumerate(read_timed_frames(self.video, deep=self.deep)):
            yield Frame(frame.image, number * step, step) if self.is_even else frame

    def signature(self) -> list[str]:
        """Return an input's identity: names, lengths and times of change."""
        paths = [self.video] if self.video else list(self.files)
        return [
            f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}"
            for path in paths
            if path is not None
        ]

    def not_kept(self) -> list[str]:
        """Return the properties of the input that the output cannot keep, each in words."""
        if self.properties is None:
            alpha = any(has_alpha(file) for file in self.files)
            return ["alpha: frames become opaque"] if alpha else []
        lost = ["alpha: frames become opaque"] if self.properties.has_alpha else []
        if self.properties.bits > self.colour.bits:
            lost.append(f"{self.properties.bits} bits become {self.colour.bits}")
        if self.colour.bits <= 8 and self.properties.is_hdr:
            lost.append("HDR of 8 bits becomes BT.709")
        if self.properties.is_interlaced:
            lost.append(
                "interlacing: both fields are taken as one frame, combed if they moved; deinterlace first"
            )
        lost += self.properties.others
        return lost


def read_one(file: Path) -> Tensor:
    """Return a picture, or raise DataError without a training's advice to skip it: a sequence must not have a gap."""
    try:
        return read_picture(file)
    except BadImageError as error:
        raise DataError(f"{file}: {error.reason}. Replace the file") from error


def open_source(
    inputs: Sequence[Path], rate: float | None = None, allow_gaps: bool = False
) -> FrameStream:
    """Return the frames that the paths name: a video, a folder, or two or more pictures. Raises DataError."""
    if len(inputs) == 1 and is_video(inputs[0]):
        return open_video(inputs[0], rate)
    if len(inputs) == 1 and inputs[0].is_dir():
        files: Sequence[Path] = list_frames(inputs[0], allow_gaps)
    elif len(inputs) == 1:
        if not inputs[0].exists():
            raise DataError(f"{inputs[0]}: there is no such video, folder or picture")
        raise DataError(
            f"{inputs[0]}: one picture; two or more, a folder or a video are needed to interpolate between"
        )
    else:
        if any(is_video(path) for path in inputs):
            raise ConfigError("give one video, one folder, or two or more pictures")
        files = list(inputs)
    height, width = check_sizes(files)
    own = Fraction(rate).limit_denominator(100_000) if rate else PICTURE_RATE
    return FrameStream(
        height, width, own, tuple(files), deep=any(is_deep_picture(file) for file in files)
    )


def open_video(path: Path, rate: float | None) -> FrameStream:
    """Return a video's frames, at its own times or at a rate that is given."""
    info, properties = describe_video(path), read_properties(path)
    given = Fraction(rate).limit_denominator(100_000) if rate else None
    own = shown_rate(properties, info.frame_rate)
    return FrameStream(
        info.height,
        info.width,
        given or own,
        (),
        path,
        properties,
        deep=properties.colour.bits > 8,
        own_rate=own if given else None,
    )


def shown_rate(properties: Properties, stated: Fraction) -> Fraction:
    """Return a video's frames per second by its frames' times, or as stated if both are about the same.

    Matroska without a default duration states the unit of its clock, 1000.
    """
    times = properties.times
    if len(times) < 2:
        return stated
    rate = (len(times) - 1) / times[-1]
    is_right = properties.has_even_times and abs(rate / stated - 1) < STATED_WITHIN
    return stated if is_right else rate.limit_denominator(1001)
