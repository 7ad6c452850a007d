"""Video files written frame by frame or put together from parts, with the sound and subtitles of another file.

A file appears under its name only when it is complete. Writing streams: memory does not grow with the length. Pictures
of 8 bits are H.264 in BT.709, those of more HEVC of 10 bits with the colours and HDR metadata that are asked for; the
file says so. Frames come at an even rate, or each at its own time.
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

from mpt.data.video.properties import Colour
from mpt.data.video.tracks import Tracks
from mpt.data.video.video import BT709, import_av, opened
from mpt.errors import DataError, InputOutputError

REORDERED_FRAMES = 2
"""By how many frames x264 and x265 decode ahead of showing, if B-frames refer to B-frames."""
CLOCK = Fraction(1, 90_000)
"""Unit of the times of frames that have each their own, in seconds."""
SDR = Colour()


class VideoWriter:
    """Write frames as H.264 or HEVC with the tracks of another file; a context manager.

    The file takes its name when the block ends without an exception; otherwise nothing is left. Tracks of sound and
    subtitles are copied as they are, to their end if the pictures end before; with `slow` they are made that many times
    as long, and without `sound` only subtitles are taken. Sides that are odd are kept by storing colour at full
    resolution (yuv444p), which few hardware players decode. With `timed` every frame is written at its own time.
    """

    def __init__(
        self,
        path: str | Path,
        frame_rate: Fraction | float,
        audio_from: str | Path | None = None,
        crf: int = 16,
        colour: Colour = SDR,
        timed: bool = False,
        slow: Fraction = Fraction(1),
        sound: bool = True,
    ) -> None:
        self.path, self.crf, self.colour, self.timed = Path(path), crf, colour, timed
        self.slow, self.with_sound = slow, sound
        self.frame_rate = Fraction(frame_rate).limit_denominator(100_000)
        self.audio_from = Path(audio_from) if audio_from else None
        self.frames = 0
        self.size: tuple[int, int] | None = None
        self._temporary = self.path.with_name(
            f".tmp-{secrets.token_hex(8)}{self.path.suffix or '.mp4'}"
        )
        self._open = contextlib.ExitStack()
        self._container: Any = None
        self._stream: Any = None
        self._tracks: Tracks | None = None
        self._shown: list[Fraction] = []
        """The times of the frames that were appended, in seconds."""

    def __enter__(self) -> VideoWriter:
        return self

    @property
    def is_deep(self) -> bool:
        """Whether pictures of more than 8 bits are written."""
        return self.colour.bits > 8

    def write(self, image_chw: Tensor, time: Fraction | None = None) -> None:
        """Append a frame: uint8 RGB (3, h, w), floats in [0, 1], or int32 up to 65535 for 10 bits. Raises
        InputOutputError.

        `time` is in seconds from the first frame, for a writer that is `timed`.
        """
        av = import_av()
        height, width = image_chw.shape[-2:]
        if self.size is None:
            self._begin(av, height, width)
        if self.size != (height, width):
            raise DataError(
                f"{self.path}: frame {self.frames} is {width}x{height}, those before it were not"
            )
        array = pixels_of(image_chw.detach(), self.is_deep)
        frame = av.VideoFrame.from_ndarray(array, format="rgb48le" if self.is_deep else "rgb24")
        matrix = self.colour.matrix if self.is_deep else BT709
        frame = frame.reformat(format=self._stream.pix_fmt, dst_colorspace=known_matrix(av, matrix))
        if self.timed:
            assert time is not None
            frame.pts, frame.time_base = round(time / CLOCK), CLOCK
        else:
            frame.pts, frame.time_base = self.frames, 1 / self.frame_rate
        frame.colorspace = matrix
        with self._failures():
            self._container.mux(self._stream.encode(frame))
            self.frames += 1
            self._copy_tracks(float(frame.pts * frame.time_base))

    def _begin(self, av: Any, height: int, width: int) -> None:
        self.size = (height, width)
        with self._failures():
            self._open_container()
            stream = self._container.add_stream(
                "libx265" if self.is_deep else "libx264", rate=self.frame_rate
            )
            stream.width, stream.height = width, height
            sampling = "yuv444p" if height % 2 or width % 2 else "yuv420p"
            stream.pix_fmt = f"{sampling}10le" if self.is_deep else sampling
            stream.options = {
                "crf": str(self.crf),
                **(x265_options(self.colour) if self.is_deep else {}),
            }
            context = stream.codec_context
            context.time_base = CLOCK if self.timed else 1 / self.frame_rate
            colour = self.colour if self.is_deep else SDR
            context.colorspace, context.color_range = colour.matrix, 1
            context.color_primaries, context.color_trc = colour.primaries, colour.transfer
            context.sample_aspect_ratio = self.colour.aspect
            if self.is_deep and self.path.suffix.lower() in (".mp4", ".m4v", ".mov"):
                context.codec_tag = "hvc1"
            self._stream = stream
            self._begin_tracks()

    def _open_container(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._container = self._open.enter_context(import_av().open(str(self._temporary), "w"))

    def append(self, part: Path, begin: Fraction | None = None) -> None:
        """Append a whole video's packets, which `VideoWriter` wrote with the same settings; instead of `write`.

        `begin` is the time of its first frame, in seconds; by default it follows at the even rate.
        """
        with opened(part) as source, self._failures():
            video = source.streams.video[0]
            if self._container is None:  # before its first frame
                self._open_container()
                assert self._container is not None
                self._stream = self._container.add_stream_from_template(video)
                self.frame_rate = Fraction(video.average_rate or self.frame_rate)
                self._begin_tracks()
            start = self.frames / self.frame_rate if begin is None else begin
            unit = Fraction(video.time_base)
            # the last one is empty
            packets = [packet for packet in source.demux(video) if packet.size]
            # Matroska stores no decoding times, a lone frame has no delay, and some formats begin at the delay instead
            # of 0: so the times to decode at are found anew: those at which the frames two before are shown.
            times = sorted(packet.pts for packet in packets)
            self._shown += [start + (time - times[0]) * unit for time in times]
            for packet in packets:
                seconds = start + (packet.pts - times[0]) * unit
                packet.pts = round(seconds / unit)
                packet.dts = min(round(self._decoding_time(self.frames) / unit), packet.pts)
                packet.stream = self._stream
                self._container.mux(packet)
                self.frames += 1
            self._copy_tracks(float(self._shown[-1]))

    def _decoding_time(self, number: int) -> Fraction:
        if number >= REORDERED_FRAMES:
            return self._shown[number - REORDERED_FRAMES]
        return self._shown[0] - (REORDERED_FRAMES - number) / self.frame_rate

    def _begin_tracks(self) -> None:
        if self.audio_from is not None:
            self._tracks = Tracks(self.audio_from, self._container, self.slow, self.with_sound)

    def _copy_tracks(self, until_seconds: float) -> None:
        if self._tracks is not None:
            self._tracks.copy(until_seconds)

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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._container is not None:
                with self._failures():
                    if self.size is not None:  # frames were encoded; appended packets are complete
                        self._container.mux(self._stream.encode(None))
                    if self._tracks is not None:
                        self._tracks.finish()
                    self._open.close()
                    os.replace(self._temporary, self.path)
        finally:
            with contextlib.suppress(Exception):
                self._open.close()
            with contextlib.suppress(OSError):
                self._temporary.unlink()


def join_videos(
    parts: Sequence[str | Path],
    path: str | Path,
    audio_from: str | Path | None = None,
    begins: Sequence[Fraction] | None = None,
    slow: Fraction = Fraction(1),
    sound: bool = True,
) -> None:
    """Write the frames of several videos, made by `VideoWriter` with the same settings, one after the other.

    Packets are copied as they are. `begins` are the times at which the parts begin, if they are not of even rate.
    With `audio_from`, its tracks. The file appears when it is complete. Raises
    InputOutputError.
    """
    with VideoWriter(path, 1, audio_from, slow=slow, sound=sound) as writer:
        for number, part in enumerate(parts):
            writer.append(Path(part), begins[number] if begins is not None else None)


def pixels_of(image_chw: Tensor, deep: bool) -> np.ndarray:
    """Return an image as an array (h, w, 3) of 8 bits, or of 16."""
    most, dtype = (65535, torch.int32) if deep else (255, torch.uint8)
    if image_chw.is_floating_point():
        image_chw = image_chw.float().clamp(0, 1).mul(most).round().to(dtype)
    elif deep and image_chw.dtype == torch.uint8:
        image_chw = image_chw.to(dtype) * 257
    array = image_chw.permute(1, 2, 0).cpu().numpy()
    return np.ascontiguousarray(array.astype(np.uint16) if deep else array)


def known_matrix(av: Any, matrix: int) -> Any:
    """Return a matrix by its number, BT.709 for one that PyAV cannot convert to."""
    known = {int(one): one for one in av.video.reformatter.Colorspace}
    return known.get({6: 5}.get(matrix, matrix), known[BT709])


def x265_options(colour: Colour) -> dict[str, str]:
    """Return the encoder's options for these colours."""
    own = ["log-level=error", "pools=none", "frame-threads=1"]
    if colour.mastering is not None:
        own.append(f"master-display={colour.mastering}")
    if colour.light is not None:
        own.append(f"max-cll={colour.light}")
    return {"x265-params": ":".join([*own, "hdr10=1"] if len(own) > 3 else own)}
