"""Video files, frame by frame: PyAV behind the extra `video`. `mpt.data.video.video_writer` writes them.

Frames are uint8 RGB tensors (3, h, w), turned upright as the file's display matrix says. Reading streams: memory does
not grow with the length.

Colours: files say which matrix their luma and chroma were made with; if they do not, it is BT.709 from 720 lines on
and BT.601 below, as players assume.

Only local files are opened, whatever a playlist inside asks for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.errors import ConfigError, DataError

EXTENSIONS = (
    ".mp4",
    ".mkv",
    ".mov",
    ".avi",
    ".webm",
    ".m4v",
    ".mpg",
    ".mpeg",
    ".ts",
    ".wmv",
    ".flv",
    ".gif",
)
"""Endings of videos' names, in lower case."""
HD_LINES = 720
BT709, BT601, UNSPECIFIED = 1, 5, 2
READ_OPTIONS = {"protocol_whitelist": "file"}
COMPLETE_SHARE = 0.9
"""A file whose header promises more than this many times the frames that can be read is called truncated."""


def import_av() -> Any:
    """Import PyAV. Raises ConfigError if it is not installed."""
    try:
        import av
    except ImportError as error:
        raise ConfigError(
            "video files are read and written with PyAV: pip install 'mpt-trainer[video]'"
        ) from error
    return av


def is_video(path: str | Path) -> bool:
    """Does the name end like a video's?"""
    return Path(path).suffix.lower() in EXTENSIONS


@dataclass(frozen=True)
class VideoInfo:
    """The fields of a video's header. Width and height are those of the upright picture, as frames have them."""

    width: int
    height: int
    frame_rate: Fraction
    """Frames per second, on average."""


@dataclass(frozen=True)
class Frame:
    """One decoded frame: `image` is RGB (3, h, w), uint8 or with `deep` int32 up to 65535."""

    image: Tensor
    time: Fraction
    """Seconds from the first frame."""
    duration: Fraction
    """Seconds for which the file shows it; 0 if it does not say."""


def describe_video(path: str | Path) -> VideoInfo:
    """Return the header's fields and the size of the first frame. Raises DataError for an unreadable video."""
    with opened(Path(path)) as container:
        stream = video_stream(container, path)
        first = next(_decoded(container, stream, Path(path)), None)
        if first is None:
            raise DataError(f"{path}: the video has no frame that can be decoded")
        _, height, width = first.image.shape
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        return VideoInfo(width, height, Fraction(rate))


def read_frames(path: str | Path, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
    """Yield frames `first` up to but without `stop`, uint8 RGB (3, h, w). Raises DataError at a damaged one."""
    for frame in read_timed_frames(path, first, stop):
        yield frame.image


def read_timed_frames(
    path: str | Path, first: int = 0, stop: int | None = None, deep: bool = False
) -> Iterator[Frame]:
    """Yield frames with their times. Those before `first` are decoded and dropped: seeking is not exact in all
    formats. With `deep` pixels have 16 bits.

    Raises DataError if a frame cannot be decoded, and at the end of a file that holds much less than it says.
    """
    path = Path(path)
    with opened(path) as container:
        stream = video_stream(container, path)
        count = 0
        for frame in _decoded(container, stream, path, deep):
            if stop is not None and count >= stop:
                return
            if count >= first:
                yield frame
            count += 1
        promised = _count(container, stream, stream.average_rate)
        # Frames that come at uneven times are fewer than the rate promises, in a file that is whole.
        if promised and count < COMPLETE_SHARE * promised and not _is_whole(path):
            raise DataError(
                f"{path}: the file is cut off: {count} of about {promised} frames could be read"
            )


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a video to be read from. Raises DataError."""
    av = import_av()
    if not path.is_file():
        raise DataError(f"{path}: there is no such video file")
    try:
        container = av.open(str(path), options=READ_OPTIONS)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{path}: not a video that can be read: {_reason(error)}") from error
    with container:
        yield container


def video_stream(container: Any, path: str | Path) -> Any:
    """Return the first video stream. Raises DataError if there is none."""
    if not container.streams.video:
        raise DataError(f"{path}: not a video: the file has no video stream")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    return stream


def _decoded(container: Any, stream: Any, path: Path, deep: bool = False) -> Iterator[Frame]:
    av = import_av()
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    number, start = 0, None
    frames = container.decode(stream)
    while True:
        try:
            frame = next(frames, None)
        except (av.error.FFmpegError, ValueError) as error:
            raise DataError(
                f"{path}: frame {number} cannot be decoded: {_reason(error)}"
            ) from error
        if frame is None:
            return
        if frame.is_corrupt:
            raise DataError(f"{path}: frame {number} is damaged")
        time = (
            number / Fraction(rate) if frame.pts is None else frame.pts * Fraction(frame.time_base)
        )
        start = time if start is None else start
        duration = (frame.duration or 0) * Fraction(frame.time_base or 0)
        yield Frame(_upright(frame, deep), time - start, duration)
        number += 1


def _upright(frame: Any, deep: bool = False) -> Tensor:
    """Return a frame's pixels, turned by quarter turns as its display matrix says."""
    kind = "rgb48le" if deep else "rgb24"
    matrix = frame.colorspace
    if int(matrix) in (UNSPECIFIED, 0) and frame.format.name.startswith("yuv"):
        matrix = BT709 if frame.height >= HD_LINES else BT601
        array = frame.to_ndarray(format=kind, src_colorspace=matrix)
    else:
        array = frame.to_ndarray(format=kind)
    image = torch.from_numpy(array.astype("int32") if deep else array).permute(2, 0, 1)
    # counter-clockwise, as rot90 turns
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4
    return torch.rot90(image, quarter_turns, (1, 2)).contiguous()


def _count(container: Any, stream: Any, rate: Any) -> int | None:
    if stream.frames:
        return int(stream.frames)
    if stream.duration and stream.time_base and rate:
        return round(float(stream.duration * stream.time_base * rate))
    duration: int | None = container.duration
    if duration and rate:
        return round(duration * float(rate) / 1_000_000)
    return None


def _is_whole(path: Path) -> bool:
    """Return whether packets of any stream reach about as far as the header says."""
    with opened(path) as container:
        if not container.duration:
            return False
        begin = Fraction(container.start_time or 0, 1_000_000)
        ends = [
            (packet.pts + (packet.duration or 0)) * Fraction(packet.time_base)
            for packet in container.demux()
            if packet.pts is not None
        ]
        return max(ends, default=begin) - begin >= COMPLETE_SHARE * Fraction(
            container.duration, 1_000_000
        )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
