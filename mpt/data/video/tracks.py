"""The sound and subtitles that go along with written pictures: copied, or slowed down with the pitch kept.

All audio and subtitle tracks of a file are taken whose format the new file can hold; `lost_tracks` names the others
before anything is written. Copied packets keep their times from the first frame on; slowed sound is decoded, passed
through FFmpeg's `atempo` and encoded as AAC, and subtitles' times are multiplied.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

from mpt.data.video.video import import_av, opened, video_stream

FORMATS = {".mkv": "matroska", ".m4v": "mp4", ".ts": "mpegts"}
SLOWEST_TEMPO = Fraction(1, 2)
"""Of one `atempo`; slower ones are chained."""


def lost_tracks(
    source: Path, ending: str, slow: Fraction = Fraction(1), sound: bool = True
) -> list[str]:
    """Return the tracks that a file with this ending cannot hold, each in words."""
    av = import_av()
    target = av.open(BytesIO(), "w", format=FORMATS.get(ending, ending.removeprefix(".")))
    lost = []
    with opened(source) as container:
        for track in (*(container.streams.audio if sound else ()), *container.streams.subtitles):
            codec = codec_of(track)
            fits = codec in target.supported_codecs
            if not fits and not (track.type == "audio" and slow != 1):
                lost.append(
                    f"{track.type} track {track.index} ({codec}), which {ending} does not hold; .mkv may"
                )
    with contextlib.suppress(Exception):  # nothing was written into it
        target.close()
    return lost


def codec_of(track: Any) -> str:
    """Return the name of a track's codec, as containers list them."""
    return str(track.codec_context.codec.canonical_name)


@dataclass
class Track:
    """One track on its way: packets of the source, and the maker of the target's packet for each."""

    packets: Iterator[Any]
    stream: Any
    slow: Fraction
    begin: Fraction
    encoder: Any = None
    graph: Any = None
    waiting: Any = None
    shown: int = field(default=0)
    """Samples of slowed sound that were encoded."""


class Tracks:
    """The tracks of one file, muxed into a container as its pictures go along."""

    def __init__(
        self, source: Path, target: Any, slow: Fraction = Fraction(1), sound: bool = True
    ) -> None:
        self.target, self.open = target, contextlib.ExitStack()
        self.tracks: list[Track] = []
        self.source = source
        with opened(source) as container:
            begin = start_of(container, source)
            streams = [*(container.streams.audio if sound else ()), *container.streams.subtitles]
            kept = [(track.index, codec_of(track), track.type) for track in streams]
        for index, codec, kind in kept:
            if kind == "audio" and slow != 1:
                self.tracks.append(self.slowed(index, begin, slow))
            elif codec in target.supported_codecs:
                self.tracks.append(self.copied(index, begin, slow))

    def copied(self, index: int, begin: Fraction, slow: Fraction) -> Track:
        """Return a track whose packets stay as they are."""
        container = self.open.enter_context(opened(self.source))  # each reads on its own
        stream = container.streams[index]
        packets = (packet for packet in container.demux(stream) if packet.dts is not None)
        copy = self.target.add_stream_from_template(stream)
        copy.metadata.update(stream.metadata)
        return Track(packets, copy, slow, begin)

    def slowed(self, index: int, begin: Fraction, slow: Fraction) -> Track:
        """Return a track of sound that is made slower."""
        av = import_av()
        container = self.open.enter_context(opened(self.source))
        stream = container.streams[index]
        context = stream.codec_context
        encoder = self.target.add_stream("aac", rate=context.sample_rate)
        encoder.layout = context.layout
        encoder.metadata.update(stream.metadata)
        graph = av.filter.Graph()
        node = graph.add_abuffer(template=stream)
        for tempo in tempos(1 / slow):
            following = graph.add("atempo", str(float(tempo)))
            node.link_to(following)
            node = following
        shape = graph.add("aformat", f"sample_fmts=fltp:sample_rates={context.sample_rate}")
        sink = graph.add("abuffersink")
        node.link_to(shape)
        shape.link_to(sink)
        graph.configure()
        return Track(container.decode(stream), encoder, slow, begin, encoder, graph)

    def copy(self, until_seconds: float) -> None:
        """Mux packets that begin before a time of the new pictures."""
        for track in self.tracks:
            while True:
                if track.waiting is None:
                    track.waiting = next(track.packets, None)
                if track.waiting is None or time_of(track, track.waiting) >= until_seconds:
                    break
                item, track.waiting = track.waiting, None
                if track.encoder is None:
                    self.mux_copied(track, item)
                else:
                    track.graph.push(item)
                    self.mux_slowed(track)

    def mux_copied(self, track: Track, packet: Any) -> None:
        """Write one packet at its new time."""
        for name in ("pts", "dts"):
            time = getattr(packet, name)
            if time is not None:
                seconds = (time * Fraction(packet.time_base) - track.begin) * track.slow
                setattr(packet, name, round(seconds / packet.time_base))
        if track.slow != 1 and packet.duration:
            packet.duration = round(packet.duration * track.slow)
        packet.stream = track.stream
        self.target.mux(packet)

    def mux_slowed(self, track: Track) -> None:
        """Encode the slowed sound that is ready."""
        av = import_av()
        while True:
            try:
                frame = track.graph.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            frame.pts, frame.time_base = track.shown, Fraction(1, frame.sample_rate)
            track.shown += frame.samples
            self.target.mux(track.encoder.encode(frame))

    def finish(self) -> None:
        """Mux the rest, which may last longer than the pictures, and close the source."""
        self.copy(math.inf)
        for track in self.tracks:
            if track.encoder is not None:
                track.graph.push(None)
                self.mux_slowed(track)
                self.target.mux(track.encoder.encode(None))
        self.open.close()


def start_of(container: Any, path: Path) -> Fraction:
    """Return the time of the first picture, from which all times are counted."""
    stream = video_stream(container, path)
    return Fraction(stream.start_time or 0) * Fraction(stream.time_base)


def time_of(track: Track, item: Any) -> float:
    """Return when a packet or a frame of sound begins among the new pictures."""
    time = item.dts if track.encoder is None else item.pts
    return float((Fraction(time or 0) * Fraction(item.time_base) - track.begin) * track.slow)


def tempos(tempo: Fraction) -> list[Fraction]:
    """Return factors that one `atempo` each can do and whose product is the tempo."""
    found = []
    while tempo < SLOWEST_TEMPO:
        found.append(SLOWEST_TEMPO)
        tempo /= SLOWEST_TEMPO
    return [*found, tempo]
