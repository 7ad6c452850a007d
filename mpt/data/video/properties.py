"""Contents of a video in addition to pictures of 8 bits at even times: bits, colour tags, HDR metadata, the shape of
pixels, alpha, tracks, timing.

Read from the header, the first frame and the packets' times; packets are not decoded, so it takes a pass over the file
but no decoder.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

from mpt.data.video.video import BT709, opened, video_stream

UNSPECIFIED = 2
PQ, HLG = 16, 18
"""Transfer functions of HDR, by their numbers in H.273."""
EVEN_WITHIN = Fraction(2, 1000)
"""Seconds by which frame times may differ from even ones: Matroska rounds to milliseconds."""
CHROMATICITY, LUMINANCE = 50_000, 10_000
"""Units of SMPTE ST 2086: 0.00002 and 0.0001 cd/m^2."""


@dataclass(frozen=True)
class Colour:
    """How pixels are stored: bits, the numbers of H.273 for matrix, primaries and transfer, and HDR metadata."""

    bits: int = 8
    matrix: int = BT709
    primaries: int = BT709
    transfer: int = BT709
    mastering: str | None = None
    """The mastering display, as x265's `master-display` has it."""
    light: str | None = None
    """MaxCLL and MaxFALL, as x265's `max-cll` has them."""
    aspect: Fraction = Fraction(1)
    """The width of a pixel over its height."""


@dataclass(frozen=True)
class Properties:
    """Contents of a video."""

    colour: Colour
    has_alpha: bool
    bits: int
    """Bits of the file; `colour` has at most 10, as the output."""
    audio: tuple[str, ...]
    """Codecs of the audio tracks."""
    subtitles: tuple[str, ...]
    """Codecs of the subtitle tracks."""
    is_hdr: bool
    """Whether the file's transfer function is one of HDR."""
    times: tuple[Fraction, ...]
    """Of the frames, from the first one, in seconds; () if packets have none."""
    is_interlaced: bool = False
    chroma: str | None = None
    """How finely colour is stored if it is finer than 4:2:0, such as 4:4:4."""
    others: tuple[str, ...] = ()
    """Contents that nothing here copies, each in words."""

    @property
    def has_even_times(self) -> bool:
        """Whether the frames come at even times, but for rounding."""
        if len(self.times) < 3:
            return True
        step = self.times[-1] / (len(self.times) - 1)
        return all(
            abs(time - number * step) <= EVEN_WITHIN for number, time in enumerate(self.times)
        )

    @property
    def longest(self) -> Fraction:
        """Return the longest time between two frames, in seconds."""
        return max(
            (later - earlier for earlier, later in pairwise(self.times)), default=Fraction(0)
        )


def read_properties(path: str | Path) -> Properties:
    """Return a video's properties. Raises DataError for an unreadable video."""
    with opened(Path(path)) as container:
        stream = video_stream(container, path)
        first = next(container.decode(stream), None)
        audio = tuple(track.codec_context.name for track in container.streams.audio)
        subtitles = tuple(track.codec_context.name for track in container.streams.subtitles)
        bits = max((part.bits for part in stream.codec_context.format.components), default=8)
        alpha = any(part.is_alpha for part in stream.codec_context.format.components)
        colour = Colour() if first is None else colour_of(first, min(bits, 10))
        is_hdr = first is not None and int(first.color_trc) in (PQ, HLG)
        is_interlaced = first is not None and bool(first.interlaced_frame)
        colour = replace(colour, aspect=aspect_of(stream, first))
        chroma = finer_chroma(stream.codec_context.format)
        others = others_of(container)
    times = packet_times(Path(path))
    return Properties(
        colour, alpha, bits, audio, subtitles, is_hdr, times, is_interlaced, chroma, others
    )


def finer_chroma(layout: Any) -> str | None:
    """Return how finely a pixel format stores colour if it is finer than 4:2:0; None for others, grey included."""
    if len(layout.components) < 3:
        return None
    if layout.is_rgb:
        return "RGB"
    return {(4, 4): "4:4:4", (2, 4): "4:2:2", (4, 2): "4:4:0"}.get(
        (layout.chroma_width(4), layout.chroma_height(4))
    )


def aspect_of(stream: Any, frame: Any) -> Fraction:
    """Return the width of a pixel of the upright picture over its height; 1 if the file does not say."""
    aspect = Fraction(stream.sample_aspect_ratio or 1)
    is_turned = frame is not None and round(getattr(frame, "rotation", 0) / 90) % 2
    return 1 / aspect if is_turned else aspect


def others_of(container: Any) -> tuple[str, ...]:
    """Return the chapters and tracks besides the first video, sound and subtitles, each in words."""
    count = len(container.chapters()) if hasattr(container, "chapters") else 0
    chapters = [f"{count} chapter{'s' if count > 1 else ''}"] if count else []
    read = container.streams.video[0].index
    others = [
        track
        for track in container.streams
        if track.type not in ("audio", "subtitle") and track.index != read
    ]
    return (*chapters, *(f"{track.type} track {track.index}" for track in others))


def packet_times(path: Path) -> tuple[Fraction, ...]:
    """Return the times at which frames are shown, from the first one; () if a packet has none."""
    with opened(path) as container:
        stream = video_stream(container, path)
        packets = [
            packet for packet in container.demux(stream) if packet.size and not packet.is_discard
        ]
        if not packets or any(packet.pts is None for packet in packets):
            return ()
        shown = sorted(packet.pts for packet in packets)
        return tuple((pts - shown[0]) * Fraction(stream.time_base) for pts in shown)


def colour_of(frame: Any, bits: int) -> Colour:
    """Return how a frame's pixels are stored. Of 8 bits they are written as BT.709, whatever they were."""
    if bits <= 8:
        return Colour()
    tags = (int(frame.colorspace), int(frame.color_primaries), int(frame.color_trc))
    matrix, primaries, transfer = (BT709 if tag in (0, UNSPECIFIED) else tag for tag in tags)
    side = {data.type.name: bytes(data) for data in frame.side_data}
    mastering = side.get("MASTERING_DISPLAY_METADATA")
    light = side.get("CONTENT_LIGHT_LEVEL")
    return Colour(
        bits,
        matrix,
        primaries,
        transfer,
        mastering_text(mastering) if mastering else None,
        "{},{}".format(*struct.unpack_from("=2I", light)) if light else None,
    )


def mastering_text(data: bytes) -> str | None:
    """Return FFmpeg's `AVMasteringDisplayMetadata` as x265 writes it; None if a part of it is missing."""
    numbers = struct.unpack_from("=22i", data)
    ratios = [
        Fraction(top, bottom) if bottom else Fraction(0)
        for top, bottom in zip(numbers[:20:2], numbers[1:20:2])
    ]
    if not all(numbers[20:22]):
        return None
    red, green, blue, white = (ratios[place : place + 2] for place in (0, 2, 4, 6))
    points = "".join(
        f"{name}({round(x * CHROMATICITY)},{round(y * CHROMATICITY)})"
        for name, (x, y) in (("G", green), ("B", blue), ("R", red), ("WP", white))
    )
    least, most = (round(one * LUMINANCE) for one in ratios[8:10])
    return f"{points}L({most},{least})"
