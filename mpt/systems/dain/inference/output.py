"""Where made frames go: a folder of PNG files (of 16 bits for deep frames), or a video in segments, joined at the end.

Both can be gone on with after an interruption: a file or segment that has its name is complete. The segments of a video
lie alongside it in `NAME.parts`, with a note of what they were made from and how; other settings are refused.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Protocol

import torch
from PIL import Image
from torch import Tensor

from mpt.data.video.properties import Colour
from mpt.data.video.video import is_video
from mpt.data.video.video_writer import SDR, VideoWriter, join_videos
from mpt.errors import ConfigError, InputOutputError
from mpt.foreign.files import read_json
from mpt.run.process.files import temporary_name, write_atomically
from mpt.systems.dain.data.shared.deep_pictures import write_deep_picture

SEGMENT = 48
"""Input frames of one segment: what an interruption can cost."""
JOINED = (".mp4", ".m4v", ".mov", ".mkv", ".avi", ".ts", ".flv")
"""Formats of videos that can be written: they hold H.264, and their segments can be joined."""


@dataclass(frozen=True)
class Place:
    """Where the output frames of one input frame go: its number, that of the first of them, and their times."""

    index: int
    first: int
    seconds: tuple[Fraction, ...]


@dataclass(frozen=True)
class Film:
    """How a video is written: rate, whether frames have times of their own, colours, and the tracks that go along."""

    rate: Fraction
    timed: bool = False
    colour: Colour = SDR
    tracks_from: Path | None = None
    slow: Fraction = Fraction(1)
    sound: bool = True


class Output(Protocol):
    """What takes the output frames of one input frame after the other."""

    def has(self, place: Place) -> bool: ...  # all output frames of this input frame?

    def write(self, place: Place, images: list[Tensor]) -> None: ...

    def finish(self) -> None: ...

    # keep what is complete, with which the same command goes on: is there any?
    def pause(self) -> bool: ...

    def discard(self) -> None: ...  # remove everything, for the input is no good


class FrameFolder:
    """`frame-000000.png` and on, each whole or absent."""

    def __init__(self, path: Path, signature: dict[str, object], overwrite: bool = False) -> None:
        self.path = path
        self.note = path / ".interpolation.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputOutputError(f"--output: cannot make {path}: {error.strerror}") from error
        if any(path.glob("frame-*.png")) and not goes_on(self.note, signature, path, overwrite):
            self.remove_frames()
        write_atomically(self.note, json.dumps(signature, indent=1))

    def file(self, number: int) -> Path:
        """Return the name of an output frame."""
        return self.path / f"frame-{number:06d}.png"

    def has(self, place: Place) -> bool:
        """Are all output frames there?"""
        return all(
            self.file(place.first + number).is_file() for number in range(len(place.seconds))
        )

    def write(self, place: Place, images: list[Tensor]) -> None:
        """Write frames, each under a temporary name first."""
        for number, image in enumerate(images, start=place.first):
            temporary = self.path / f"{temporary_name()}.png"
            try:
                save_picture(image, temporary)
                temporary.replace(self.file(number))
            except OSError as error:
                raise InputOutputError(
                    f"{self.file(number)}: cannot be written: {error.strerror or error}"
                ) from error
            finally:
                temporary.unlink(missing_ok=True)

    def finish(self) -> None:
        """Remove the note, after which the folder is the user's."""
        self.note.unlink(missing_ok=True)

    def pause(self) -> bool:
        """Keep the frames, which are whole, and the note; nothing if there is none. Return whether there are any."""
        kept = any(self.path.glob("frame-*.png"))
        if not kept:
            self.discard()
        return kept

    def discard(self) -> None:
        """Remove the frames, the note and, if nothing else is in it, the folder."""
        self.remove_frames()
        self.finish()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def remove_frames(self) -> None:
        """Remove the frames that are there."""
        for frame in self.path.glob("frame-*.png"):
            frame.unlink()


class SegmentedVideo:
    """A video in segments of `SEGMENT` input frames."""

    def __init__(
        self,
        path: Path,
        film: Film,
        signature: dict[str, object],
        overwrite: bool = False,
    ) -> None:
        self.path, self.film = path, film
        self.begins: dict[int, Fraction] = {}
        """When each segment begins, in seconds."""
        self.parts = path.with_name(f"{path.name}.parts")
        self.writer: VideoWriter | None = None
        self.open_segment = -1
        note = self.parts / "made-from.json"
        try:
            self.parts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputOutputError(
                f"--output: cannot make {self.parts}: {error.strerror}"
            ) from error
        if note.exists() and not goes_on(note, signature, self.parts, overwrite):
            for segment in self.parts.glob(f"[0-9]*{path.suffix}"):
                segment.unlink()
        for stray in self.parts.glob(".tmp-*"):
            stray.unlink()
        write_atomically(note, json.dumps(signature, indent=1))

    def file(self, segment: int) -> Path:
        """Return the name of a segment."""
        return self.parts / f"{segment:06d}{self.path.suffix}"

    def has(self, place: Place) -> bool:
        """Is this input frame's segment complete?"""
        segment = self.segment_of(place)
        return segment != self.open_segment and self.file(segment).is_file()

    def segment_of(self, place: Place) -> int:
        """Return the segment of an input frame, and keep in mind when it begins."""
        segment = place.index // SEGMENT
        self.begins.setdefault(segment, place.seconds[0])
        return segment

    def write(self, place: Place, images: list[Tensor]) -> None:
        """Append to the segment of this input frame."""
        segment = self.segment_of(place)
        if segment != self.open_segment:
            self.close_segment()
            film = self.film
            self.writer = VideoWriter(
                self.file(segment), film.rate, colour=film.colour, timed=film.timed
            )
            self.open_segment = segment
        assert self.writer is not None
        for image, seconds in zip(images, place.seconds, strict=True):
            self.writer.write(image, seconds - self.begins[segment])

    def close_segment(self) -> None:
        """Complete the segment that is being written."""
        if self.writer is not None:
            self.writer.__exit__(None, None, None)
        self.writer, self.open_segment = None, -1

    def finish(self) -> None:
        """Join the segments with the sound, and remove them."""
        self.close_segment()
        parts = sorted(self.parts.glob(f"[0-9]*{self.path.suffix}"))
        begins = [self.begins[int(part.stem)] for part in parts] if self.film.timed else None
        film = self.film
        join_videos(parts, self.path, film.tracks_from, begins, film.slow, film.sound)
        shutil.rmtree(self.parts)

    def pause(self) -> bool:
        """Drop the segment that is being written and keep those that are complete. Return whether there are any."""
        if self.writer is not None:
            self.writer.__exit__(KeyboardInterrupt, None, None)
        self.writer, self.open_segment = None, -1
        kept = any(self.parts.glob(f"[0-9]*{self.path.suffix}"))
        if not kept:
            shutil.rmtree(self.parts, ignore_errors=True)
        return kept

    def discard(self) -> None:
        """Remove everything."""
        self.pause()
        shutil.rmtree(self.parts, ignore_errors=True)


def save_picture(image_chw: Tensor, path: Path) -> None:
    """Write a frame as PNG: of 8 bits, or of 16 if it is int32."""
    if image_chw.dtype == torch.uint8:
        Image.fromarray(image_chw.permute(1, 2, 0).cpu().numpy()).save(path)
    else:
        write_deep_picture(image_chw, path)


def goes_on(note: Path, signature: dict[str, object], place: Path, overwrite: bool) -> bool:
    """Return whether what is there is the beginning of what is wanted.

    Raises ConfigError if it is something else, unless that may be overwritten.
    """
    try:
        before = read_json(note)
    except (OSError, ValueError):
        before = None
    same: bool = before == json.loads(json.dumps(signature))
    if not same and not overwrite:
        raise ConfigError(
            f"--output: {place} holds frames that are complete, or were made from another input or with other "
            "settings; write elsewhere, or add --overwrite"
        )
    return same


def open_output(
    path: Path, film: Film, signature: dict[str, object], overwrite: bool = False
) -> Output:
    """Return the output for a video's name or for a folder's. Raises ConfigError for anything that is there or cannot
    be."""
    if is_video(path):
        if path.suffix.lower() not in JOINED:
            raise ConfigError(
                f"--output: {path.suffix} files are not written; allowed are {', '.join(JOINED)}"
            )
        if path.exists() and not overwrite:
            raise ConfigError(
                f"--output: {path} is there already; write elsewhere, or add --overwrite"
            )
        return SegmentedVideo(path, film, signature, overwrite)
    if path.suffix:
        raise ConfigError(
            f"--output: {path} is neither a video's name (.mp4, .mkv, ...) nor a folder's"
        )
    return FrameFolder(path, signature, overwrite)
