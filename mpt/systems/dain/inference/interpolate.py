"""More frames per second: read, make what lies between, write; what `mpt dain interpolate` does.

Frames of different scenes are not blended: up to the middle of the interval the first is shown, then the second.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from mpt.data.video.video import Frame
from mpt.systems.dain.data.shared.duplicates import distinct_frames, is_repeat
from mpt.systems.dain.data.shared.scene_cuts import THRESHOLD, is_cut, thumbnail
from mpt.systems.dain.inference.halving import by_halving
from mpt.systems.dain.inference.output import Output, Place
from mpt.systems.dain.inference.source import FrameStream
from mpt.systems.dain.inference.tiles import TileDifference, TileGrid, tiled
from mpt.systems.dain.inference.timeline import Pace, Shown
from mpt.systems.dain.nn.operators.interpolation import Interpolator

REPORT_SECONDS = 10.0


@dataclass
class Job:
    """The output frames of one input frame: taken over, or made between it and the next."""

    place: Place
    shown: tuple[Shown, ...]
    current: Tensor
    following: Tensor | None
    blends: bool
    made: dict[Fraction, Tensor] = field(default_factory=dict)

    @property
    def wanted(self) -> tuple[Fraction, ...]:
        """The times at which the network makes a frame."""
        return tuple(one.moment for one in self.shown if one.moment) if self.blends else ()

    def images(self) -> list[Tensor]:
        """Return the output frames in order, uint8."""
        found = []
        for moment in (one.moment for one in self.shown):
            if moment in self.made:
                found.append(self.made[moment])
            else:
                late = self.following is not None and moment >= Fraction(1, 2)
                found.append(
                    self.following if late and self.following is not None else self.current
                )
        return found


@dataclass
class Summary:
    """What was done."""

    read: int = 0
    made: int = 0
    written: int = 0
    cuts: int = 0
    repeats: int = 0
    """Input frames that were interpolated over."""
    resumed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Maker:
    """The network and how it is fed."""

    net: Interpolator
    device: torch.device
    grid: TileGrid
    overlap: int
    seams: TileDifference = field(default_factory=TileDifference)

    def make(self, jobs: list[Job]) -> None:
        """Make the frames of several jobs that want equally many."""
        pairs = [(job.current, job.following) for job in jobs]
        kind, most = kind_of(pairs[0][0])
        # on the host, where tiles are cut
        first = torch.stack([current for current, _ in pairs]).float() / most
        last = (
            torch.stack([following for _, following in pairs if following is not None]).float()
            / most
        )
        if self.net.any_time:
            frames = self.frames_between(
                first, last, [[float(moment) for moment in job.wanted] for job in jobs]
            )
        else:
            trios = zip(first, last, jobs, strict=True)
            frames = torch.stack(
                [self.frames_by_halving(one, other, job.wanted) for one, other, job in trios]
            )
        frames = frames.clamp(0, 1).mul(most).round().to(kind).cpu()
        for job, images in zip(jobs, frames, strict=True):
            job.made = dict(zip(job.wanted, images, strict=True))

    def frames_between(
        self, first: Tensor, last: Tensor, moments: Sequence[Sequence[float]]
    ) -> Tensor:
        """Return frames (b, n, 3, h, w) at n times for each pair."""
        times = torch.tensor(moments, device=self.device)
        return tiled(self.net, first, last, times, self.grid, self.overlap, self.seams)

    def frames_by_halving(self, first: Tensor, last: Tensor, moments: Sequence[Fraction]) -> Tensor:
        """Return frames (n, 3, h, w) of one pair by a network that makes the middle one only."""

        def middle(one: Tensor, other: Tensor) -> Tensor:
            return self.frames_between(one, other, [[0.5]])[:, 0].to(first.device)

        return torch.cat(by_halving(middle, first[None], last[None], moments))


def kind_of(image: Tensor) -> tuple[torch.dtype, int]:
    """Return an image's dtype and the value of white in it."""
    return (torch.uint8, 255) if image.dtype == torch.uint8 else (torch.int32, 65535)


@dataclass(frozen=True)
class Detection:
    """What is looked for between frames."""

    cut_threshold: float = THRESHOLD
    """Below this similarity frames are of different scenes; 0 finds none."""
    repeats: bool = True
    """Whether repeated frames are interpolated over."""

    def is_cut(self, one: Frame, other: Frame) -> bool:
        """Are the frames of different scenes?"""
        return is_cut(thumbnail(one.image), thumbnail(other.image), self.cut_threshold)

    def is_same(self, one: Frame, other: Frame) -> bool:
        """Do the frames show one picture?"""
        return self.repeats and is_repeat(one.image, other.image)


def plan_jobs(
    source: FrameStream, pace: Pace, detection: Detection, output: Output, summary: Summary
) -> Iterator[Job]:
    """Yield what is still to be written, in order."""
    written = index = 0
    step = 1 / source.rate
    frames = distinct_frames(source.frames(), detection.is_same, detection.is_cut)
    current = next(frames, None)
    while current is not None:
        following = next(frames, None)
        frame, repeats = current.frame, current.repeats
        summary.read += 1 + len(repeats)
        summary.repeats += len(repeats)
        edges = [frame.time, *(one.time for one in repeats)]
        edges.append(
            edges[-1] + (frame.duration or step) if following is None else following.frame.time
        )
        step = edges[-1] - edges[-2]
        shown = pace.over(edges)
        place = Place(index, written, tuple(one.seconds for one in shown))
        if shown and output.has(place):
            summary.resumed += len(shown)
        elif shown:
            cut = following is not None and detection.is_cut(frame, following.frame)
            summary.cuts += int(cut)
            blends = following is not None and not cut and not current.still
            after = None if following is None or current.still else following.frame.image
            yield Job(place, shown, frame.image, after, blends)
        written += len(shown)
        index, current = index + 1 + len(repeats), following


def interpolate(
    source: FrameStream,
    pace: Pace,
    maker: Maker,
    output: Output,
    *,
    batch: int = 1,
    detection: Detection = Detection(),  # it is frozen
    tell: bool = True,
) -> Summary:
    """Make and write all frames; return a summary. The caller finishes or discards the output."""
    summary, started = Summary(), time.perf_counter()
    told = started
    waiting: list[Job] = []

    def flush() -> None:
        nonlocal told
        asking = [job for job in waiting if job.wanted]
        for count in sorted({len(job.wanted) for job in asking}):
            maker.make([job for job in asking if len(job.wanted) == count])
        for job in waiting:
            images = job.images()
            output.write(job.place, images)
            summary.made += len(job.made)
            summary.written += len(images)
        waiting.clear()
        if tell and time.perf_counter() - told > REPORT_SECONDS:
            told = time.perf_counter()
            print(f"{summary.written} frames written, {summary.made} made", file=sys.stderr)

    for job in plan_jobs(source, pace, detection, output, summary):
        waiting.append(job)
        if len(waiting) >= batch:
            flush()
    flush()
    summary.seconds = time.perf_counter() - started
    return summary
