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

from mpt.systems.dain.data.shared.scene_cuts import is_cut, thumbnail
from mpt.systems.dain.inference.halving import by_halving
from mpt.systems.dain.inference.output import Output
from mpt.systems.dain.inference.source import FrameStream
from mpt.systems.dain.inference.tiles import TileDifference, TileGrid, tiled
from mpt.systems.dain.inference.timeline import plan_times
from mpt.systems.dain.nn.operators.interpolation import Interpolator

REPORT_SECONDS = 10.0


@dataclass
class Job:
    """The output frames of one input frame: taken over, or made between it and the next."""

    index: int
    first: int
    times: tuple[Fraction, ...]
    current: Tensor
    following: Tensor | None
    blends: bool
    made: dict[Fraction, Tensor] = field(default_factory=dict)

    @property
    def wanted(self) -> tuple[Fraction, ...]:
        """The times at which the network makes a frame."""
        return tuple(time for time in self.times if time) if self.blends else ()

    def images(self) -> list[Tensor]:
        """Return the output frames in order, uint8."""
        found = []
        for moment in self.times:
            if moment in self.made:
                found.append(self.made[moment])
            else:
                late = self.following is not None and moment >= Fraction(1, 2)
                found.append(self.following if late and self.following is not None else self.current)
        return found


@dataclass
class Summary:
    """What was done."""

    read: int = 0
    made: int = 0
    written: int = 0
    cuts: int = 0
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
        first = torch.stack([current for current, _ in pairs]).float() / 255  # on the host, where tiles are cut
        last = torch.stack([following for _, following in pairs if following is not None]).float() / 255
        if self.net.any_time:
            frames = self.frames_between(first, last, [[float(moment) for moment in job.wanted] for job in jobs])
        else:
            trios = zip(first, last, jobs, strict=True)
            frames = torch.stack([self.frames_by_halving(one, other, job.wanted) for one, other, job in trios])
        frames = frames.clamp(0, 1).mul(255).round().to(torch.uint8).cpu()
        for job, images in zip(jobs, frames, strict=True):
            job.made = dict(zip(job.wanted, images, strict=True))

    def frames_between(self, first: Tensor, last: Tensor, moments: Sequence[Sequence[float]]) -> Tensor:
        """Return frames (b, n, 3, h, w) at n times for each pair."""
        times = torch.tensor(moments, device=self.device)
        return tiled(self.net, first, last, times, self.grid, self.overlap, self.seams)

    def frames_by_halving(self, first: Tensor, last: Tensor, moments: Sequence[Fraction]) -> Tensor:
        """Return frames (n, 3, h, w) of one pair by a network that makes the middle one only."""

        def middle(one: Tensor, other: Tensor) -> Tensor:
            return self.frames_between(one, other, [[0.5]])[:, 0].to(first.device)

        return torch.cat(by_halving(middle, first[None], last[None], moments))


def plan_jobs(
    source: FrameStream, target: Fraction, cut_threshold: float, output: Output, summary: Summary
) -> Iterator[Job]:
    """Yield what is still to be written, in order."""
    written = 0
    frames = source.frames()
    current = next(frames, None)
    index = 0
    while current is not None:
        following = next(frames, None)
        summary.read += 1
        times = plan_times(source.rate, target, index).times
        if times and output.has(index, len(times), written):
            summary.resumed += len(times)
        elif times:
            cut = following is not None and is_cut(thumbnail(current), thumbnail(following), cut_threshold)
            summary.cuts += int(cut)
            blends = following is not None and not cut
            yield Job(index, written, times, current, following if following is not None else None, blends)
        written += len(times)
        index, current = index + 1, following


def interpolate(
    source: FrameStream,
    target: Fraction,
    maker: Maker,
    output: Output,
    *,
    batch: int = 1,
    cut_threshold: float = 0.2,
    tell: bool = True,
) -> Summary:
    """Make and write all frames; return what was done. The caller finishes or discards the output."""
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
            output.write(job.index, images, job.first)
            summary.made += len(job.made)
            summary.written += len(images)
        waiting.clear()
        if tell and time.perf_counter() - told > REPORT_SECONDS:
            told = time.perf_counter()
            print(f"{summary.written} frames written, {summary.made} made", file=sys.stderr)

    for job in plan_jobs(source, target, cut_threshold, output, summary):
        waiting.append(job)
        if len(waiting) >= batch:
            flush()
    flush()
    summary.seconds = time.perf_counter() - started
    return summary
