"""A resume on fake tensors: the networks are built and a checkpoint's state is put into them, before the first step.

Some programs need more memory to resume than to train: the checkpoint is read onto the GPU, alongside the weights that
it replaces. Here it is read into host memory (`mpt.run.checkpoints.checkpoint.load`) and copied tensor by tensor; that
is traced with the run's own functions, so that the memory of a mode or a trick meanwhile is in the plan. What the
checkpoint takes in host memory is its own size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mpt.engine.state.state import capture, restore_tensors
from mpt.planner.answers.plan import RESUME, PlannedMoment
from mpt.planner.device.zero_values import values_as_zeros
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.replay import replay
from mpt.planner.trace.trace import Trace
from mpt.seams import Run


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint without its values, which outlives the fake mode that it was made in."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class Resume:
    """The trace of a resume, or the reason that there is none."""

    trace: Trace = field(default_factory=Trace)
    host_bytes: int = 0
    problem: str = ""


def outline(run: Run) -> dict[str, Any]:
    """Return the state of a traced run's checkpoint, without random numbers."""
    state = {name: part for name, part in capture(run).items() if name != "random"}
    found = tree_map_only(
        Tensor, lambda tensor: SavedTensor(tuple(tensor.shape), tensor.dtype), state
    )
    assert isinstance(found, dict)
    return found


def put_in(run: Run, saved: Mapping[str, Any], recorder: Recorder) -> int:
    """Put an outlined checkpoint into a built run, from host memory; return its bytes there."""
    state = tree_map_only(
        SavedTensor, lambda one: torch.empty(one.shape, dtype=one.dtype, device="cpu"), dict(saved)
    )
    with values_as_zeros(recorder):
        restore_tensors(run, state)
    return sum(one.nbytes for one in tree_leaves(dict(saved)) if isinstance(one, SavedTensor))


def trace_resume(
    build: Callable[[], Run],
    saved: Mapping[str, Any],
    recorder: Recorder,
    explain: Callable[[BaseException], str],
) -> Resume:
    """Build a run and resume it, in a fake mode whose recorder is this one."""
    try:
        return Resume(recorder.trace, put_in(build(), saved, recorder))
    except Exception as error:
        return Resume(problem=explain(error))


def describe_resume(
    resume: Resume | None, reserved: int, capacity: int | None, expandable: bool
) -> dict[str, PlannedMoment]:
    """Return the moment of a resume: its own peak, from nothing; `reserved` are the steps' bytes."""
    if resume is None:
        return {}
    if resume.problem:
        return {RESUME: PlannedMoment(problem=resume.problem)}
    played = replay(resume.trace, expandable=expandable)
    fits = None
    if capacity is not None:
        fits = (
            played.reserved <= capacity
            or replay(resume.trace, capacity, expandable=expandable).fits
        )
    moment = PlannedMoment(
        allocated=played.allocated,
        reserved=played.reserved,
        grown=max(0, played.reserved - reserved),
        fits=fits,
        host_bytes=resume.host_bytes,
    )
    return {RESUME: moment}
