"""Where the time of somebody's own step goes: fetching, forward, backward, optimizer. On the device as it is."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mpt.accelerator import synchronize
from mpt.doctor.findings import Section
from mpt.doctor.own.step import SEED, OwnSubject
from mpt.doctor.speed import SLOW_DATA, STEPS, WARM_UP, add_step
from mpt.engine.building.build import seed_everything
from mpt.planner.own.execution.factory import call_factory, find_factory
from mpt.planner.own.execution.script import Ended
from mpt.planner.own.execution.source import Made
from mpt.planner.own.performed import call
from mpt.planner.own.stand_ins.ranks import one_of_several
from mpt.report.units import show_seconds

MOST_SECONDS = 60.0
"""After which no further step is begun."""


def own_speed(subject: OwnSubject) -> Section:
    """Time a few steps of a script; without a card, of one that makes a process group the first process's."""
    with one_of_several(None) if subject.device.type == "cpu" else nullcontext():
        return _timed(subject)


def _timed(subject: OwnSubject) -> Section:
    section = Section("speed")
    seed_everything(SEED)
    made = call(
        lambda: call_factory(subject.source, find_factory(subject.source), subject.arguments)
    )
    try:
        seconds = measured(made, subject.device)
    finally:
        made.stop()
    medians = add_step(section, seconds, subject.batch_size)
    data = medians.get("data")
    if data is not None:
        is_slow = data > SLOW_DATA * medians["whole step"]
        advice = (
            "more workers of the DataLoader, smaller files, or a set that fits in memory"
            if is_slow
            else ""
        )
        section.add(
            "warning" if is_slow else "ok",
            "data",
            f"fetching a batch takes {show_seconds(data)}",
            advice,
        )
    return section


def measured(made: Made, device: torch.device) -> Mapping[str, list[float]]:
    """Return the seconds of each part of some steps; of a script that ends before the first few are over, of these."""
    seconds: dict[str, list[float]] = defaultdict(list)
    begun = time.perf_counter()
    for step in range(WARM_UP + STEPS):
        with laps(device) as parts:
            now = time.perf_counter()
            try:
                call(made.step)
            except Ended:
                if not seconds:
                    raise
                break
            synchronize(device)
            whole = time.perf_counter() - now
        parts["forward and the rest"] = whole - sum(parts.values())
        is_late = time.perf_counter() - begun > MOST_SECONDS
        if step == WARM_UP:
            seconds.clear()
        for name, value in {"whole step": whole, **parts}.items():
            seconds[name].append(value)
        if is_late:
            break
    return seconds


@contextmanager
def laps(device: torch.device) -> Iterator[dict[str, float]]:
    """Add up the seconds of parts of the step inside the block."""
    parts: dict[str, float] = defaultdict(float)
    since: list[float] = []

    def begin(*_: Any) -> None:
        synchronize(device)
        since.append(time.perf_counter())

    def end(*_: Any) -> None:
        synchronize(device)
        parts["optimizer"] += time.perf_counter() - since.pop()

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            now = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(device)
                parts[name] += time.perf_counter() - now

        return run

    with ExitStack() as stack:
        for owner, name, part in (
            (torch.autograd, "backward", "backward"),
            (_BaseDataLoaderIter, "__next__", "data"),
        ):
            stack.enter_context(mock.patch.object(owner, name, timed(part, getattr(owner, name))))
        stack.callback(register_optimizer_step_pre_hook(begin).remove)
        stack.callback(register_optimizer_step_post_hook(end).remove)
        yield parts
