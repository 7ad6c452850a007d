"""Where a step's time goes: data, transfer, forward, backward, optimizer; and remedies.

The step is the run's own, taken apart at its seams with the device awaited at each; the whole step is timed too, as the
loop takes it, so that the cost of waiting can be seen.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping

from mpt.accelerator import synchronize
from mpt.data.loading.loader import Loader, to_device
from mpt.doctor.findings import Section
from mpt.engine.step.built_parts import check_graph
from mpt.engine.step.micro_batches import split, weigh
from mpt.engine.step.step import drop_gradients, only, update
from mpt.report.units import show_seconds
from mpt.seams import Batch, Run
from mpt.seams.phase_losses import draw_batch, losses_of

WARM_UP, STEPS = 2, 8
SLOW_DATA = 0.3
"""Share of a step from which on fetching is worth mending."""


def examine_speed(run: Run, loader: Loader) -> Section:
    """Time a few steps. The run is trained by them: build it anew for anything else."""
    section = Section("speed")
    seconds: dict[str, list[float]] = defaultdict(list)
    stream = loader.batches(0)
    for step in range(WARM_UP + STEPS):
        parts = _time_parts(run, stream, step)
        if step >= WARM_UP:
            for name, value in parts.items():
                seconds[name].append(value)
    train = run.config.train
    steps = train.steps or max(1, round((train.epochs or 0) * loader.steps_per_epoch))
    section.tables["run"] = [{"steps": steps, "batch size": train.batch_size}]
    medians = add_step(section, seconds, train.batch_size, ("data", "whole step"))
    whole, data, workers = medians["whole step"], medians["data"], loader.workers
    text = f"fetching a batch takes {show_seconds(data)}" + (
        f" with {workers} workers" if workers else " in the loop"
    )
    if not workers and data > SLOW_DATA * whole:
        section.add("warning", "data", text, "set dataset.workers to fetch beside the step")
    elif workers and data > SLOW_DATA * whole:
        section.add(
            "warning",
            "data",
            text,
            "more dataset.workers, smaller files, or a set that fits in memory",
        )
    else:
        section.add("ok", "data", text)
    return section


def add_step(
    section: Section,
    seconds: Mapping[str, list[float]],
    batch_size: int | None,
    unsaid: Container[str] = ("whole step",),
) -> dict[str, float]:
    """Report the parts of a step by their medians over some steps, and return these."""
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    section.tables["step"] = [
        {"part": name, "milliseconds": round(1e3 * value, 3)} for name, value in medians.items()
    ]
    parts = (
        f"{name} {show_seconds(value)}" for name, value in medians.items() if name not in unsaid
    )
    samples = f" for {batch_size} samples" if batch_size else ""
    section.add("ok", "step", f"{show_seconds(medians['whole step'])}{samples}: {', '.join(parts)}")
    return medians


def _time_parts(run: Run, stream: Iterator[Batch], step: int) -> dict[str, float]:
    parts: dict[str, float] = defaultdict(float)

    def lap(name: str, since: float) -> float:
        synchronize(run.device)
        now = time.perf_counter()
        parts[name] += now - since
        return now

    now = time.perf_counter()
    stored = next(stream)
    now = lap("data", now)
    batch = to_device(stored, run.device, run.data)
    now = lap("transfer", now)
    due = [phase for phase in run.phases if phase.is_due(step)]
    for phase in due:
        drop_gradients(run, phase)
        drawn = draw_batch(run, phase, batch)
        with only(run.frozen[phase.name]):
            for part, share in split(drawn, run.adaptation.micro_batch_size):
                done: list[str] = []
                now = time.perf_counter()
                for together in losses_of(run, phase, part):
                    values = weigh(together, share)
                    value = sum(values[1:], values[0])
                    now = lap("forward", now)
                    try:
                        run.precision.backward(value, phase)
                    except RuntimeError as error:
                        check_graph(error, together, done, phase)
                        raise
                    now = lap("backward", now)
                    done += [loss.name for loss in together]
                    del together, value
        now = time.perf_counter()
        run.precision.step(phase, run.clip_norms[phase.name])
        now = lap("optimizer", now)
    now = time.perf_counter()
    for phase in due:
        update(run, phase, batch)
    lap("whole step", now)
    return parts
