"""Video files in and out, frame by frame, with the sound kept: PyAV behind the extra `video`.

Frames are uint8 RGB tensors (3, h, w), turned upright as the file's display matrix says. Reading and writing stream:
memory does not grow with the length. A file appears under its name only when it is complete.

Colours: files say which matrix their luma and chroma were made with; where they do not, it is BT.709 from 720 lines on
and BT.601 below, as players assume. What is written here is BT.709 and says so.

Only local files are opened, whatever a playlist inside asks for.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpt.errors import DataError, InputOutputError, MptError

EXTENSIONS = (".mp4", ".mkv", ".mov", ".avi", ".webm", ".m4v", ".mpg", ".mpeg", ".ts", ".wmv", ".flv", ".gif")
"""What is taken for a video by its name, in lower case."""
HD_LINES = 720
BT709, BT601, UNSPECIFIED = 1, 5, 2
READ_OPTIONS = {"protocol_whitelist": "file"}
REORDERED_FRAMES = 2
"""By how many frames x264 decodes ahead of showing, where B-frames refer to B-frames."""
COMPLETE_SHARE = 0.9
"""A file whose header promises more than this many times the frames that can be read is called truncated."""


def import_av() -> Any:
    """Import PyAV. Raises MptError where it is not installed."""
    try:
        import av
    except ImportError as error:
        raise MptError("video files are read and written with PyAV: pip install 'mpt-trainer[video]'") from error
    return av


def is_video(path: str | Path) -> bool:
    """Does the name end like a video's?"""
    return Path(path).suffix.lower() in EXTENSIONS


@dataclass(frozen=True)
class VideoInfo:
    """What a video's header says. Width and height are those of the upright picture, as frames have them."""

    width: int
    height: int
    frame_rate: Fraction
    """Frames per second, on average."""
    frame_count: int | None
    """None where the header does not say; from the duration where only that is known, so not exact."""
    has_audio: bool


@dataclass(frozen=True)
class Frame:
    """One decoded frame: `image` is uint8 RGB (3, h, w), `seconds` its time from the first frame."""

    image: Tensor
    seconds: float


def describe_video(path: str | Path) -> VideoInfo:
    """Return what the header says and the size of the first frame. Raises DataError for what is no readable video."""
    with _opened(Path(path)) as container:
        stream = _video_stream(container, path)
        first = next(_decoded(container, stream, Path(path)), None)
        if first is None:
            raise DataError(f"{path}: the video has no frame that can be decoded")
        _, height, width = first.image.shape
        rate = stream.average_rate or stream.guessed_rate or Fraction(25)
        return VideoInfo(width, height, Fraction(rate), _count(container, stream, rate), bool(container.streams.audio))


def read_frames(path: str | Path, first: int = 0, stop: int | None = None) -> Iterator[Tensor]:
    """Yield frames `first` up to but without `stop`, uint8 RGB (3, h, w). Raises DataError at a damaged one."""
    for frame in read_timed_frames(path, first, stop):
        yield frame.image


def read_timed_frames(path: str | Path, first: int = 0, stop: int | None = None) -> Iterator[Frame]:
    """Yield frames with their times. Those before `first` are decoded and dropped: seeking is not exact in all
    formats.

    Raises DataError where a frame cannot be decoded, and at the end of a file that holds much less than it says.
    """
    path = Path(path)
    with _opened(path) as container:
        stream = _video_stream(container, path)
        count = 0
        for frame in _decoded(container, stream, path):
            if stop is not None and count >= stop:
                return
            if count >= first:
                yield frame
            count += 1
        promised = _count(container, stream, stream.average_rate)
        if promised and count < COMPLETE_SHARE * promised:
            raise DataError(f"{path}: the file is cut off: {count} of about {promised} frames could be read")


class VideoWriter:
    """Write frames as H.264 with the sound of another file; a context manager.

    The file takes its name when the block ends without an exception; otherwise nothing is left. Sound packets are
    copied as they are, up to the length of the picture. Sides that are odd are kept by storing colour at full
    resolution (yuv444p), which few hardware players decode.
    """

    def __init__(
        self,
        path: str | Path,
        frame_rate: Fraction | float,
        audio_from: str | Path | None = None,
        crf: int = 16,
        codec: str = "libx264",
    ) -> None:
        self.path, self.crf, self.codec = Path(path), crf, codec
        self.frame_rate = Fraction(frame_rate).limit_denominator(100_000)
        self.audio_from = Path(audio_from) if audio_from else None
        self.frames = 0
        self.size: tuple[int, int] | None = None
        self._temporary = self.path.with_name(f".tmp-{secrets.token_hex(8)}{self.path.suffix or '.mp4'}")
        self._open = contextlib.ExitStack()
        self._container: Any = None
        self._stream: Any = None
        self._sound: Iterator[Any] = iter(())
        self._waiting: Any = None

    def __enter__(self) -> VideoWriter:
        return self

    def write(self, image_chw: Tensor) -> None:
        """Append a frame: uint8 RGB (3, h, w), or floats in [0, 1]. Raises InputOutputError."""
        av = import_av()
        pixels = image_chw.detach()
        if pixels.is_floating_point():
            pixels = pixels.float().clamp(0, 1).mul(255).round().to(torch.uint8)
        height, width = pixels.shape[-2:]
        if self.size is None:
            self._begin(av, height, width)
        if self.size != (height, width):
            raise DataError(f"{self.path}: frame {self.frames} is {width}x{height}, those before it were not")
        array = np.ascontiguousarray(pixels.permute(1, 2, 0).cpu().numpy())
        frame = av.VideoFrame.from_ndarray(array, format="rgb24")
        frame = frame.reformat(format=self._stream.pix_fmt, dst_colorspace=BT709)
        frame.pts, frame.time_base = self.frames, 1 / self.frame_rate
        frame.colorspace = BT709
        with self._failures():
            self._container.mux(self._stream.encode(frame))
            self.frames += 1
            self._copy_sound(float(self.frames / self.frame_rate))

    def _begin(self, av: Any, height: int, width: int) -> None:
        self.size = (height, width)
        with self._failures():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            container = self._open.enter_context(av.open(str(self._temporary), "w"))
            stream = container.add_stream(self.codec, rate=self.frame_rate)
            stream.width, stream.height = width, height
            stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
            stream.options = {"crf": str(self.crf)}
            context = stream.codec_context
            context.time_base = 1 / self.frame_rate
            context.colorspace = context.color_primaries = context.color_trc = BT709
            context.color_range = 1
            self._container, self._stream = container, stream
            self._begin_sound()

    def append(self, part: Path) -> None:
        """Append a whole video's packets, which `VideoWriter` wrote with the same settings; instead of `write`."""
        av = import_av()
        with _opened(part) as source, self._failures():
            video = source.streams.video[0]
            if self._container is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._container = self._open.enter_context(av.open(str(self._temporary), "w"))
                self._stream = self._container.add_stream_from_template(video)
                self.frame_rate = Fraction(video.average_rate)
                self._begin_sound()
            offset = round(Fraction(self.frames) / self.frame_rate / video.time_base)
            delay = round(REORDERED_FRAMES / self.frame_rate / video.time_base)
            packets = [packet for packet in source.demux(video) if packet.size]  # the last one is empty
            # Matroska stores no decoding times, a lone frame has no delay, and some formats begin at the delay instead
            # of 0: so the times to decode at are found anew, from the order.
            times = sorted(packet.pts for packet in packets)
            for packet, time in zip(packets, times, strict=True):
                packet.pts += offset - times[0]
                packet.dts = min(time - delay + offset - times[0], packet.pts)
                packet.stream = self._stream
                self._container.mux(packet)
                self.frames += 1
            self._copy_sound(float(self.frames / self.frame_rate))

    def _begin_sound(self) -> None:
        if self.audio_from is not None:
            self._sound = self._sound_packets(self._container)
            self._waiting = next(self._sound, None)

    def _sound_packets(self, container: Any) -> Iterator[Any]:
        assert self.audio_from is not None
        source = self._open.enter_context(_opened(self.audio_from))
        if not source.streams.audio:
            return iter(())
        track = source.streams.audio[0]
        copy = container.add_stream_from_template(track)

        def packets() -> Iterator[Any]:
            for packet in source.demux(track):
                if packet.dts is not None:
                    seconds = float(packet.dts * packet.time_base)
                    packet.stream = copy
                    yield seconds, packet

        return packets()

    def _copy_sound(self, until_seconds: float) -> None:
        while self._waiting is not None and self._waiting[0] < until_seconds:
            self._container.mux(self._waiting[1])
            self._waiting = next(self._sound, None)

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        av = import_av()
        try:
            yield
        except (av.error.FFmpegError, OSError) as error:
            raise InputOutputError(f"{self.path} could not be written: {error}") from error
        except ValueError as error:  # a codec that the container cannot hold
            raise InputOutputError(
                f"{self.path} could not be written: {error}; try a name that ends in .mkv"
            ) from error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._container is not None:
                with self._failures():
                    if self.size is not None:  # frames were encoded; appended packets are complete
                        self._container.mux(self._stream.encode(None))
                    self._copy_sound(float(self.frames / self.frame_rate))
                    self._open.close()
                    os.replace(self._temporary, self.path)
        finally:
            with contextlib.suppress(Exception):
                self._open.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()


def join_videos(parts: Sequence[str | Path], path: str | Path, audio_from: str | Path | None = None) -> None:
    """Write the frames of several videos, made by `VideoWriter` with the same settings, one after the other.

    Packets are copied as they are. With `audio_from`, its sound up to the length of the picture. The file appears when
    it is complete. Raises InputOutputError.
    """
    with VideoWriter(path, 1, audio_from) as writer:
        for part in parts:
            writer.append(Path(part))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    av = import_av()
    if not path.is_file():
        raise DataError(f"{path}: there is no such video file")
    try:
        container = av.open(str(path), options=READ_OPTIONS)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{path}: not a video that can be read: {_reason(error)}") from error
    with container:
        yield container


def _video_stream(container: Any, path: str | Path) -> Any:
    if not container.streams.video:
        raise DataError(f"{path}: the file has no video stream")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    return stream


def _decoded(container: Any, stream: Any, path: Path) -> Iterator[Frame]:
    av = import_av()
    rate = stream.average_rate or stream.guessed_rate or Fraction(25)
    number, start = 0, None
    frames = container.decode(stream)
    while True:
        try:
            frame = next(frames, None)
        except (av.error.FFmpegError, ValueError) as error:
            raise DataError(f"{path}: frame {number} cannot be decoded: {_reason(error)}") from error
        if frame is None:
            return
        if frame.is_corrupt:
            raise DataError(f"{path}: frame {number} is damaged")
        seconds = number / float(rate) if frame.time is None else float(frame.time)
        start = seconds if start is None else start
        yield Frame(_upright(frame), seconds - start)
        number += 1


def _upright(frame: Any) -> Tensor:
    """Return a frame's pixels, turned by quarter turns as its display matrix says."""
    matrix = frame.colorspace
    if int(matrix) in (UNSPECIFIED, 0) and frame.format.name.startswith("yuv"):
        matrix = BT709 if frame.height >= HD_LINES else BT601
        array = frame.to_ndarray(format="rgb24", src_colorspace=matrix)
    else:
        array = frame.to_ndarray(format="rgb24")
    image = torch.from_numpy(array).permute(2, 0, 1)
    quarter_turns = round(getattr(frame, "rotation", 0) / 90) % 4  # counter-clockwise, as rot90 turns
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


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
