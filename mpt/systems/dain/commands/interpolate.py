"""Make a video or a sequence of pictures smoother: x2, x4, x8 or to a frame rate, with a trained interpolation run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.sizes import describe_bytes, parse_budget
from mpt.engine.state.evaluation import inferring
from mpt.errors import ConfigError, DataError, Interrupted, MemoryBudgetError
from mpt.inference.half import choose_half, rebuild, rebuild_half
from mpt.inference.trained import Trained
from mpt.precision.shared.choice import DTYPES
from mpt.report.units import counted
from mpt.seams import Run
from mpt.systems.dain.data.shared.duplicates import MOST_HELD
from mpt.systems.dain.inference.delivery import choose_film, choose_pace
from mpt.systems.dain.inference.interpolate import Detection, Maker, Summary, interpolate, kind_of
from mpt.systems.dain.inference.memory import choose_tiles, pass_memory, room_of
from mpt.systems.dain.inference.output import Output, open_output
from mpt.systems.dain.inference.published import adjust, holds_published, open_network
from mpt.systems.dain.inference.source import FrameStream, open_source
from mpt.systems.dain.inference.tiles import TileGrid, grid_of_tiles, seam_error, tiled
from mpt.systems.dain.inference.timeline import Pace
from mpt.systems.dain.metrics.shared.depth_order import order_kept
from mpt.systems.dain.metrics.shared.image_quality import peak_signal_to_noise
from mpt.systems.dain.nn.dain import Dain
from mpt.systems.dain.nn.operators.interpolation import Interpolator

INFER_OPTIONS = ("factor", "rate", "allow_gaps")
SIGINT = 2


@dataclass(frozen=True)
class Command:
    """Make a video, a folder of frames or two pictures smoother with a trained run or published weights.

    RIFE's flownet.pkl and DAIN's best.pth are taken in the place of a run. Sound is kept. Frames of different scenes
    are not blended. After Ctrl-C the same command continues.

    Examples:
      mpt dain interpolate RUN clip.mp4 --output smooth.mp4 --factor 4
      mpt dain interpolate flownet.pkl clip.mp4 --output smooth.mp4 --vram 4GiB
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A run's name or folder, a checkpoint's folder, or a published file of weights."""
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", show_default=False)]
    """A video, a folder of numbered frames, or two or more pictures."""
    output: Annotated[Path, typer.Option(metavar="PATH", show_default=False)]
    """The video (.mp4, .mkv, ...) or folder to write."""
    factor: int | None = None
    """How many times as many frames; by default 2, with --slow N as many as it is slow."""
    rate: float | None = None
    """The frame rate to reach, instead of a factor."""
    input_rate: float | None = None
    """Frames per second of the input; by default a video's own, 25 for pictures."""
    slow: float = 1.0
    """Slow motion: how many times as long the output lasts."""
    sound: str | None = None
    """Of what is slowed down: stretch (longer, with its pitch kept; the default) or drop."""
    half: bool = False
    """Make frames in half precision, and say how far the first is from float32."""
    dtype: str | None = None
    """float16 or bfloat16, with --half; by default what the device is fast at."""
    vram: str | None = None
    """Memory that may be used, such as 6GiB: frames are cut into tiles that fit."""
    tile: int | None = None
    """Side of the tiles in pixels, instead of choosing it for --vram."""
    check_seams: bool = False
    """Measure on the first pair what tiles change; needs memory for a whole frame."""
    scale: float = 1.0
    """With a published RIFE: work at this multiple of the size; 0.5 for 4K."""
    pad_to: int | None = None
    """With a published RIFE: pad frames to multiples of this; 128 as Practical-RIFE's video program does."""
    ensemble: bool = False
    """With RIFE 4.0 to 4.20 or 4.24: the mean of both directions, in twice the time."""
    batch_size: Annotated[int, typer.Option("--batch", "--batch-size")] = 1
    """Pairs of frames that go through the network together."""
    scene_cut: float = 0.72
    """Below this similarity two frames are of different scenes; 0 blends all."""
    keep_repeats: bool = False
    """Take a repeated frame as it is, instead of interpolating over it."""
    overwrite: bool = False
    """Write over a video, or over a folder's frames that were made otherwise."""
    allow_gaps: bool = False
    """Take a folder whose numbering has gaps as it is."""
    device: str = "auto"
    """cpu, cuda or cuda:N."""
    runs: Path = Path("runs")
    """The folder in which RUN is looked for by name."""


def from_infer(
    task: str | None, inputs: Sequence[tuple[str | None, Path]]
) -> dict[str, Any] | None:
    """Return this command's fields for `mpt infer RUN --input VIDEO`, a folder of frames, or two or more pictures; also
    for published weights in the place of RUN. Raises DataError for these without frames."""
    if task is None:
        weights, *given = (path for _, path in inputs)
        if not holds_published(weights):
            return None
        if not given:
            raise DataError(
                f"{weights}: this network makes frames between others; add --input with a video, a folder of numbered "
                "frames, or a picture each"
            )
        return {"inputs": given}
    if task != "interpolate" or not inputs or any(name is not None for name, _ in inputs):
        return None
    return {"inputs": [path for _, path in inputs]}


def run(command: Command) -> None:
    """Read, make and write. Raises MptError for whatever cannot be."""
    if command.batch_size < 1:
        raise ConfigError(f"--batch: found {command.batch_size}; allowed is 1 or more")
    source = open_source(command.inputs, command.input_rate, command.allow_gaps)
    pace = choose_pace(source, command.factor, command.rate, command.slow)
    trained = open_network(command.run, command.runs, command.device)
    run, dtype = choose_run(trained, command)
    net = network_of(run)
    adjust(net, command.scale, command.pad_to, command.ensemble)
    grid, overlap = choose_grid(command, net, source, pace, dtype)
    signature: dict[str, object] = {
        "input": source.signature(),
        "pace": str(pace),
        "sound": command.sound,
        "run": str(Path(trained.directory.path).resolve()),
        "step": trained.loaded.state.get("step"),
        "dtype": str(dtype),
        "tiles": list(grid.size),
        "ways": [command.scale, command.pad_to, command.ensemble],
        "scene_cut": [command.scene_cut, command.keep_repeats],
    }
    if command.output.resolve() in {
        place.resolve() for path in command.inputs for place in (path, path.parent)
    }:
        raise ConfigError(f"--output: {command.output} holds the input; write elsewhere")
    film = choose_film(source, pace, command.output, command.sound)
    output = open_output(command.output, film, signature, command.overwrite)
    maker = Maker(net, run.device, grid, overlap)
    summary = guarded(source, pace, maker, output, command, run, trained)
    say(command, source, film.rate, maker, summary)


def guarded(
    source: FrameStream,
    pace: Pace,
    maker: Maker,
    output: Output,
    command: Command,
    run: Run,
    trained: Trained,
) -> Summary:
    """Interpolate; leave nothing behind where the input is no good, else what is complete, with which to continue."""
    detection = Detection(command.scene_cut, not command.keep_repeats)
    try:
        tell_first_pair(command, source, maker, run, trained)
        with inferring(run):
            summary = interpolate(
                source,
                pace,
                maker,
                output,
                batch=command.batch_size,
                detection=detection,
            )
        output.finish()
    except DataError:
        output.discard()
        raise
    except KeyboardInterrupt as stop:
        how = (
            "goes on where it stopped"
            if output.pause()
            else "begins anew, for nothing was complete yet"
        )
        raise Interrupted(f"interrupted; the same command {how}", SIGINT) from stop
    except BaseException:
        output.pause()
        raise
    return summary


def choose_run(trained: Trained, command: Command) -> tuple[Run, torch.dtype | None]:
    """Return the run in the wanted precision, and its half dtype if it has one."""
    if not command.half:
        if command.dtype is not None:
            raise ConfigError(
                "--dtype goes with --half; without it frames are made as the run was trained"
            )
        dtype = trained.run.precision.numerics.dtype
        return trained.run, None if dtype == torch.float32 else dtype
    choice = choose_half(command.dtype, trained.run.device)
    print(choice.statement)
    return rebuild_half(trained, choice.dtype), DTYPES[choice.dtype]


def network_of(run: Run) -> Interpolator:
    """Return the network that is evaluated. Raises ConfigError for a run of another kind."""
    net = run.task.modules.get("net_ema", run.task.modules.get("net"))
    if not isinstance(net, Interpolator):
        raise ConfigError(
            f"RUN: {run.config.model.name} does not interpolate frames; name a run of dain, rife or alike"
        )
    return net


def choose_grid(
    command: Command, net: Interpolator, source: FrameStream, pace: Pace, dtype: torch.dtype | None
) -> tuple[TileGrid, int]:
    """Return the tiles and their overlap: as asked, or the fewest that fit --vram, or none."""
    overlap = 2 * net.margin
    height, width = source.height, source.width
    if command.tile is not None:
        least = overlap + net.multiple
        if command.tile < least or command.tile % net.multiple:
            raise ConfigError(
                f"--tile: found {command.tile}; allowed are multiples of {net.multiple} from {least} on (tiles overlap "
                f"by {overlap})"
            )
        return grid_of_tiles(
            height, width, (command.tile, command.tile), overlap, net.multiple
        ), overlap
    if command.vram is None:
        return grid_of_tiles(height, width, (height, width), overlap), overlap
    memory = pass_memory(
        net, dtype, pace.most_between(source.longest, 1 if command.keep_repeats else MOST_HELD + 1)
    )
    budget = parse_budget(command.vram)
    room = room_of(budget, next(net.parameters()).device, height * width * command.batch_size)
    grid = choose_tiles(net, height, width, memory, room // command.batch_size)
    peak = memory.peak_bytes(*grid.size) * command.batch_size
    beside = (
        f" beside {describe_bytes(budget - room)} for the CUDA context and whole frames"
        if room < budget
        else ""
    )
    print(
        f"{counted(grid.count, 'tile')} of {grid.size[1]} x {grid.size[0]}: about "
        f"{describe_bytes(peak)} of {command.vram}{beside}"
    )
    return grid, overlap


def tell_first_pair(
    command: Command, source: FrameStream, maker: Maker, run: Run, trained: Trained
) -> None:
    """Say what half precision and what tiles change about the first pair's middle frame, where asked."""
    if not (command.half or (command.check_seams and maker.grid.count > 1)):
        return
    frames = source.frames()
    pair = [next(frames, None), next(frames, None)]
    if pair[0] is None or pair[1] is None:
        return
    first, last = (
        one.image[None].float() / kind_of(one.image)[1] for one in pair if one is not None
    )
    if command.half:
        exact = rebuild(trained, FLOAT32)
        adjust(network_of(exact), command.scale, command.pad_to, command.ensemble)
        tell_half(command, maker, first, last, (run, exact))
    if command.check_seams and maker.grid.count > 1:
        with inferring(run):
            error = seam_error(maker.net, first, last, maker.grid, maker.overlap)
        print(
            f"tiles against the whole frame on the first pair: mean difference {error:.4f} grey levels"
        )


def tell_half(
    command: Command, maker: Maker, first: Tensor, last: Tensor, runs: tuple[Run, Run]
) -> None:
    """Say how far the first pair's middle frame in half is from float32's, both in tiles with which float32 fits."""
    grid = maker.grid
    if command.vram is not None and command.tile is None:
        net, (height, width) = network_of(runs[1]), first.shape[-2:]
        memory = pass_memory(net)
        beside = int(memory.fixed / 2)  # the same weights in half
        try:
            room = room_of(parse_budget(command.vram), runs[1].device, height * width) - beside
            grid = choose_tiles(net, height, width, memory, room)
        except MemoryBudgetError:
            print(
                f"half is not compared with float32, of which not even a small tile fits {command.vram}"
            )
            return
    frames, depths = [], []
    for one in runs:
        net = network_of(one)
        with inferring(one):
            if isinstance(net, Dain):
                depths.append(net.depth_of(padded_tile(first, net, grid).to(one.device)))
            time = first.new_full((1, 1), 0.5, device=one.device)
            frames.append(
                tiled(network_of(one), first, last, time, grid, maker.overlap)[0].clamp(0, 1)
            )
    order = (
        f", order of depth kept in {order_kept(depths[1], depths[0]):.2%} of pixel pairs"
        if depths
        else ""
    )
    print(
        f"half against float32 on the first pair: PSNR {float(peak_signal_to_noise(*frames)[0]):.1f} dB{order}"
    )


def padded_tile(frame: Tensor, net: Interpolator, grid: TileGrid) -> Tensor:
    """Return the first tile of a frame, in a size that the network takes."""
    rows, columns = grid.size
    return net.padded(frame[..., :rows, :columns])


def say(
    command: Command, source: FrameStream, target: Fraction, maker: Maker, summary: Summary
) -> None:
    """Print the result."""
    pace = f", {summary.made / summary.seconds:.2f} made per second" if summary.made else ""
    cuts = f", {counted(summary.cuts, 'scene cut')} not blended" if summary.cuts else ""
    repeats = f", {summary.repeats} repeated frames interpolated over" if summary.repeats else ""
    uneven = "" if source.is_even else " on average, at their own times"
    again = f", {summary.resumed} there already" if summary.resumed else ""
    print(
        f"{summary.read} frames of {source.width} x {source.height} at {float(source.rate):g} -> "
        f"{summary.written + summary.resumed} at {float(target):g} frames per second{uneven}{cuts}{repeats}"
        f"{again}{pace}"
    )
    if maker.seams.count:
        print(
            f"where tiles overlap they differ by {maker.seams.grey_levels:.2f} grey levels on average"
        )
    print(f"wrote {command.output}")
