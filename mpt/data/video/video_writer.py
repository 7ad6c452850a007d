"""Video files written frame by frame or put together from parts, with the sound of another file.

A file appears under its name only when it is complete. Writing streams: memory does not grow with the length. Colours
are BT.709, and the file says so.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpt.data.video.video import BT709, import_av, opened
from mpt.errors import DataError, InputOutputError

REORDERED_FRAMES = 2
"""By how many frames x264 decodes ahead of showing, where B-frames refer to B-frames."""


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
        with opened(part) as source, self._failures():
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
        source = self._open.enter_context(opened(self.audio_from))
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
