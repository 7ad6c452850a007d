"""Inference planned without a GPU: its peak at a batch, the largest batch that fits, or the tiles of a large frame.

The networks are built as `mpt infer` builds them (no optimizers), in the run's own mode, in another dtype, or with
their weights stored in half, on fake tensors of a GPU; two batches go through `Task.infer` (`Task.samples` for one that
starts from noise), with the results taken to the host as the command does. Two traces at different batches give every
storage's line (`mpt.planner.trace.batch_fit`), and so the largest batch. Values that are read, such as a label's
number, are zeros (`mpt.planner.device.zero_values`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mpt.config.checking.precision_names import AUTOCAST, FLOAT32
from mpt.config.load import change_precision
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import infer, inferring
from mpt.errors import ConfigError
from mpt.inference.half import halve, in_dtype
from mpt.inference.inputs import needs_inputs, sampler_of
from mpt.inference.results import on_host
from mpt.planner.answers.plan import InferencePlan
from mpt.planner.device import fake_device
from mpt.planner.device.zero_values import values_as_zeros
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.step.run_fake import on_fake_gpu
from mpt.planner.trace import batch_fit
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.replay import fits_at_all_and_surely, replay, split_at
from mpt.planner.trace.time_model import Work
from mpt.planner.trace.trace import Trace
from mpt.planner.trace.unseen import Unseen, unseen_on
from mpt.precision.shared.choice import DTYPES
from mpt.seams import Batch, DataSpec, Inference, Run, Tiles
from mpt.seams.trick_kinds import fold

BATCHES = 2
FRAMES = 4
"""Float32 frames alongside a tile's pass: two inputs, the sum of tiles, their weights."""
MOST_SAMPLES = 2**16
"""A larger batch is not looked for..."""
RETRACED = 8
"""... and, if each has to be traced, none beyond that many times the first one."""


@dataclass(frozen=True)
class InferenceWish:
    """The inference that is planned."""

    batch_size: int
    half: bool = False
    dtype: str | None = None
    """As `--dtype`: float32, float16 or bfloat16; with `half`, the weights' dtype too."""
    budget_bytes: int | None = None
    held_bytes: int = 0
    """Bytes that the process holds on the card in addition, such as the networks in another precision."""
    frame: tuple[int, int] | None = None
    """Height and width of a frame that is to be cut into tiles."""


@dataclass(frozen=True)
class _Traced:
    """Two batches of inference."""

    trace: Trace
    work: Work
    weight_bytes: int
    reads_values: bool
    run: Run


def plan_inference(
    config: Config, data: DataSpec, gpu: Gpu, calibration: Calibration, wish: InferenceWish
) -> InferencePlan:
    """Plan a configuration's inference. Raises CannotPlan, or the configuration's own errors."""
    started = time.perf_counter()
    config, mode = in_mode(config, wish)
    budget, context_bytes = wish.budget_bytes, calibration.context_bytes + wish.held_bytes

    def trace(batch_size: int, spec: DataSpec = data) -> _Traced:
        unseen = unseen_on(gpu, calibration, config.train.deterministic)
        return trace_inference(config, spec, batch_size, gpu, unseen, wish)

    traced = trace(wish.batch_size)
    free = replay(traced.trace)
    split = split_at(traced.trace, free.peak_event)
    held_back = free if budget is None else replay(traced.trace, max(0, budget - context_bytes))
    notes, tile, largest, largest_at_all = [], None, None, None
    if traced.reads_values:
        notes.append("values that are read after the network are taken as 0")
    if budget is not None and wish.frame is not None:
        room = budget, context_bytes
        tile = find_tile(
            traced.run, wish.frame, room, lambda spec: trace(wish.batch_size, spec).trace
        )
    elif budget is not None:
        second = trace(2 * wish.batch_size).trace
        line = batch_fit.fit(traced.trace, wish.batch_size, second, 2 * wish.batch_size)
        largest, largest_at_all = largest_batches(
            wish.batch_size,
            (budget, context_bytes),
            line,
            lambda batch_size: trace(batch_size).trace,
        )
    return InferencePlan(
        batch_size=wish.batch_size,
        mode=mode,
        allocated=free.allocated,
        reserved=free.reserved,
        context_bytes=context_bytes,
        budget_bytes=budget,
        fits=None if budget is None else held_back.fits,
        tight=held_back.fits and held_back.retries > 0,
        reserved_in_budget=held_back.reserved,
        weight_bytes=traced.weight_bytes,
        by_category=split.by_category,
        by_module=split.by_module,
        largest_batch=largest,
        largest_at_all=largest_at_all,
        tile=tile,
        batch_seconds=traced.work.seconds(gpu) * calibration.time_factor,
        time_band=traced.work.band(gpu),
        notes=notes,
        planning_seconds=time.perf_counter() - started,
    )


def in_mode(config: Config, wish: InferenceWish) -> tuple[Config, str]:
    """Return the configuration in the mode that is inferred in, and that mode in words. Raises ConfigError."""
    allowed = DTYPES if wish.half else ("float32", *DTYPES)
    if wish.dtype is not None and wish.dtype not in allowed:
        raise ConfigError(f"--dtype: found {wish.dtype!r}; allowed here are {', '.join(allowed)}.")
    if wish.half:
        dtype = wish.dtype or "float16"
        return in_dtype(change_precision(config, AUTOCAST), dtype), f"weights in {dtype}"
    if wish.dtype == "float32":
        return change_precision(config, FLOAT32), "float32"
    if wish.dtype is not None:
        return in_dtype(
            change_precision(config, AUTOCAST), wish.dtype
        ), f"{wish.dtype} with float32 weights"
    return config, f"as trained, {config.precision.mode}"


def largest_batches(
    batch_size: int,
    room: tuple[int, int],
    line: batch_fit.BatchFit | None,
    trace: Callable[[int], Trace],
) -> tuple[int, int]:
    """Return the largest batch that fits, or if none does that may, and the largest that fits or may; 0 for none.

    `room` is the budget and its part for the context. Without a line over batches each is traced, up to a limit.
    """

    @functools.cache
    def answer(size: int) -> tuple[bool, bool]:
        if line is not None:
            return fits_at_all_and_surely(line.trace, *room, line.sizes(size))
        return fits_at_all_and_surely(trace(size), *room)

    limit = MOST_SAMPLES if line is not None else RETRACED * batch_size
    at_all = batch_fit.largest_batch(lambda size: answer(size)[0], batch_size, limit)
    return batch_fit.largest_batch(
        lambda size: answer(size)[1], batch_size, at_all
    ) or at_all, at_all


def trace_inference(
    config: Config, data: DataSpec, batch_size: int, gpu: Gpu, unseen: Unseen, wish: InferenceWish
) -> _Traced:
    """Build the networks and infer two batches on a fake GPU."""
    device, work, watching = fake_device.fake_gpu(), Work(), [False]
    recorder = Recorder(
        device.type, unseen, lambda *operator: work.observe(*operator) if watching[0] else None
    )
    with on_fake_gpu(recorder, gpu), values_as_zeros(recorder) as values:
        run = build_run(config, device, data, fake=True, trains=False)
        work.read_switches()
        work.products_in_tf32 |= run.precision.numerics.uses_tf32
        if wish.half or wish.dtype is not None:
            fold(run.tricks, run.task.modules)
        if wish.half:
            for module in run.task.modules.values():
                halve(module, run.precision.numerics.dtype)
        recorder.mark_modules(run.task.modules)
        held = {
            tensor
            for module in run.task.modules.values()
            for tensor in (*module.parameters(), *module.buffers())
        }
        results = []
        whole = (
            [torch.zeros(batch_size, 3, *wish.frame, device=device) for _ in range(FRAMES)]
            if wish.frame
            else []
        )
        recorder.mark(whole, "whole batch")
        for number in range(BATCHES):
            watching[0] = number == BATCHES - 1
            results.append(infer_batch(run, recorder, batch_size, number))
    weight_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)
    return _Traced(recorder.trace, work, weight_bytes, values.reads > 0, run)


def infer_batch(run: Run, recorder: Recorder, batch_size: int, number: int) -> Inference:
    """Infer one batch as `mpt infer` does; its results are on the host."""
    recorder.enter_moment(number, "", "loading")
    if not needs_inputs(run.task):
        recorder.enter_moment(number, "", "inference")
        with inferring(run):
            made = sampler_of(run.task).samples(batch_size, 0, batch_size, run.config.seed)
        return on_host(Inference(tiles=made, outputs=made))
    fields = run.data.zeros(batch_size, run.device, stored=True)
    batch: Batch = run.data.as_floats({name: fields.pop(name) for name in run.task.inputs})
    fields.clear()
    recorder.mark(batch.values(), "batch")
    recorder.enter_moment(number, "", "inference")
    return on_host(infer(run, batch, batch_size))


def find_tile(
    run: Run, frame: tuple[int, int], room: tuple[int, int], trace: Callable[[DataSpec], Trace]
) -> tuple[int, int] | None:
    """Return height and width of the largest tile of a frame that fits, of the largest that may fit if none does,
    None if not even the smallest may.

    `room` is the budget and its part for the context. Bytes are lines over a tile's pixels, as they are over the
    samples of a batch. Raises ConfigError for a task that does not cut frames into tiles.
    """
    if not isinstance(run.task, Tiles):
        raise ConfigError("this task does not infer in tiles: leave out --frame")
    tiles = list(run.task.tiles_of(*frame))
    smallest = tiles[-1]
    others = [tile for tile in tiles if tile != smallest] or [(2 * smallest[0], 2 * smallest[1])]
    other = min(others, key=lambda tile: tile[0] * tile[1])
    traces = [trace(with_size(run, tile)) for tile in (smallest, other)]
    line = batch_fit.fit(traces[0], pixels_of(smallest), traces[1], pixels_of(other))

    may = None
    for tile in tiles:
        if line is None:
            at_all, surely = fits_at_all_and_surely(trace(with_size(run, tile)), *room)
        else:
            at_all, surely = fits_at_all_and_surely(line.trace, *room, line.sizes(pixels_of(tile)))
        if surely:
            return tile
        may = may or (tile if at_all else None)
    return may


def pixels_of(size: tuple[int, int]) -> int:
    """Return the number of pixels."""
    return size[0] * size[1]


def with_size(run: Run, size: tuple[int, int]) -> DataSpec:
    """Return the layout of the run's data with inputs of another size."""
    fields = dict(run.data.fields)
    for name in run.task.inputs:
        fields[name] = replace(fields[name], shape=(fields[name].shape[0], *size))
    return replace(run.data, fields=fields)
