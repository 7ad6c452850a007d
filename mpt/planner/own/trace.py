"""Somebody's own training step on fake tensors, with the recorder watching.

Values that are read (`loss.item()`, a GradScaler's check) are taken as zero, and counted
(`mpt.planner.own.values.bounds`). The purposes of its tensors come from outside (`mpt.planner.own.performed`).

A script that names `cuda` puts there what it means to (`mpt.planner.device.cuda_stand_in`). One that never does, since
it would take the device from somewhere else, is planned as if all of it were on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from mpt.errors import ConfigError
from mpt.planner.answers.edits import Edit
from mpt.planner.device.card_answers import questions_answered
from mpt.planner.device.cuda_stand_in import cuda_stands_in
from mpt.planner.device.fake_device import fake_gpu
from mpt.planner.facts.gpus import DEFAULT, Gpu, find_gpu
from mpt.planner.own.execution.all_on_card import all_on_card
from mpt.planner.own.execution.created import noting_what_is_made
from mpt.planner.own.execution.factory import (
    call_factory,
    find_factory,
    import_in_plan,
    reset_default_device,
)
from mpt.planner.own.execution.imports import libraries_as_ever
from mpt.planner.own.execution.source import Source
from mpt.planner.own.execution.switches import switches_kept
from mpt.planner.own.growth import growth_note
from mpt.planner.own.performed import call, name_modules, perform, updated_weights, watch_step
from mpt.planner.own.proposals.accumulation import Accumulation, find_accumulation
from mpt.planner.own.proposals.changes import (
    NOTHING,
    Changes,
    ForwardAutocast,
    Recomputed,
    find_recomputed,
    takes_low_bits,
    unplaced,
)
from mpt.planner.own.proposals.edits import executed, find_edits
from mpt.planner.own.proposals.options import Words, find_words
from mpt.planner.own.proposals.rewritten import noting_rewriting
from mpt.planner.own.stand_ins.added_passes import AddedPasses
from mpt.planner.own.stand_ins.caches import caches_forgotten
from mpt.planner.own.stand_ins.driver import driver_asked
from mpt.planner.own.stand_ins.extensions import nothing_compiled
from mpt.planner.own.stand_ins.files import saved_by_python
from mpt.planner.own.stand_ins.fused import functions_fused
from mpt.planner.own.stand_ins.graphs import Graphs
from mpt.planner.own.stand_ins.jit_traces import by_python
from mpt.planner.own.stand_ins.loaders import loaded_here
from mpt.planner.own.stand_ins.pools import done_at_once
from mpt.planner.own.stand_ins.quantized import made_of_fakes
from mpt.planner.own.stand_ins.ranks import one_of_several
from mpt.planner.own.stand_ins.told_memory import memory_told
from mpt.planner.own.text.names import are_compiled
from mpt.planner.own.text.passes import Passes
from mpt.planner.own.values.attempts import AS_BOUNDS, Answers, Attempt, as_its_data_need
from mpt.planner.own.values.without_values import without_values
from mpt.planner.step.run_fake import STEPS, FakeRun, on_fake_gpu
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.time_model import Work
from mpt.planner.trace.trace import Trace, holds_tensors
from mpt.planner.trace.unseen import Unseen

T = TypeVar("T")
AS_EAGER = "what torch.compile compiles is planned as without it: compiled, it usually needs less memory and time"


@dataclass
class OwnRun:
    """The trace of two steps, and possible changes."""

    fake: FakeRun
    recomputed: Recomputed = NOTHING
    """Parts of networks that could be recomputed."""
    edits: Mapping[str, tuple[Edit, ...]] = field(default_factory=dict)
    """A change -> the edits of the script that make it; none if no place for it is known."""
    unplaced: Mapping[str, list[str]] = field(default_factory=dict)
    """A change -> its lines, for which there is no place."""
    options: Mapping[str, Words] = field(default_factory=dict)
    """A change for which the script has an option -> the words for its command line."""
    accumulation: Accumulation | None = None
    """Its options for smaller batches, of which more are accumulated."""
    has_statistics: bool = False
    """Networks have a batch normalization."""
    weights: int = 0
    """Numbers in the weights of its networks."""
    is_half: bool = False
    """It makes an autocast, or has weights in half."""
    has_adam: bool = False
    """All of its optimizers have an 8-bit form."""
    half: str = ""
    """The dtype of an autocast; none if the step uses one itself."""
    all_on_gpu: bool = False
    """Everything was put on the GPU, because the factory puts nothing there."""
    answers: Answers = AS_BOUNDS
    """How its reads of values were answered."""
    integers: int = 0
    """How many integers it reads that are not known."""

    @property
    def changes(self) -> set[str]:
        """The changes that can be made without an option of the script."""
        possible = {
            "recompute": self.recomputed != NOTHING,
            "autocast": bool(self.half),
            "optimizer": self.has_adam,
        }
        return {name for name, is_possible in possible.items() if is_possible}


def trace_own(
    source: Source,
    arguments: Mapping[str, Any],
    gpu: Gpu,
    unseen: Unseen | None,
    changes: Changes,
    like: OwnRun | None = None,
) -> OwnRun:
    """Build and step somebody's training twice on a fake GPU. Raises CannotPlan with module and line.

    `like`: a run of it that was traced in the way that suits it; without one that is found out.
    """

    def on_gpu(all_on_gpu: bool, answers: Answers, added: AddedPasses) -> Attempt[OwnRun] | None:
        # each attempt is a process of its own, in which no workspace is open yet
        fresh = unseen and replace(unseen, opened_handles=set())
        try:
            return _trace_on_gpu(source, arguments, gpu, fresh, changes, answers, all_on_gpu, added)
        except Exception:
            if not added.left_out:
                raise
        # it does not take what stands in for passes that were left out
        return on_gpu(all_on_gpu, answers, AddedPasses(is_allowed=False))

    def trace(all_on_gpu: bool, answers: Answers) -> Attempt[OwnRun]:
        with executed(source.edits):
            made = None if all_on_gpu else on_gpu(False, answers, AddedPasses())
            if made is not None:
                return made
            made = on_gpu(True, answers, AddedPasses())
        assert made is not None
        made.found.fake.notes.append(
            'it puts nothing on "cuda": planned as if everything were on the GPU'
        )
        return made

    if like is not None:
        return trace(like.all_on_gpu, like.answers).found
    chosen = as_its_data_need(lambda answers: trace(False, answers))
    notes = chosen.found.fake.notes
    notes += chosen.notes
    if chosen.is_unsure:
        notes.append(
            f"integers that are read: {chosen.found.integers}; where one is a size, the step needs more than planned"
        )
    return chosen.found


def import_factory(source: Source, gpu: Gpu) -> Callable[..., Any]:
    """Import a factory as on a machine with the card: a script's first lines choose its device.

    One that uses the card as soon as it is imported is imported in a plan of its own. Raises ConfigError.
    """
    try:
        devices = torch.device("cpu"), torch.device("cuda")
        answered = questions_answered(gpu, *devices)
        with libraries_as_ever(), nothing_compiled(), by_python(), answered:
            return find_factory(source)
    except ConfigError:
        with (
            libraries_as_ever(),
            on_fake_gpu(Recorder(fake_gpu().type), gpu),
            cuda_stands_in(gpu),
            without_values() as values,
            values.building(),
        ):
            return find_factory(source)
    finally:
        reset_default_device(source)


def trace_on_cpu(source: Source, arguments: Mapping[str, Any], is_fake: bool) -> Trace:
    """Build and step a training on the CPU, on fake or real tensors, to check the plan."""

    return as_its_data_need(
        lambda answers: _trace_on_cpu(source, arguments, is_fake, answers)
    ).found


def _trace_on_cpu(
    source: Source, arguments: Mapping[str, Any], is_fake: bool, answers: Answers
) -> Attempt[Trace]:
    recorder = Recorder("cpu")
    factory = find_factory(source)
    recording = on_fake_gpu(recorder, find_gpu(DEFAULT)) if is_fake else recorder.recording()
    bounds = without_values(answers) if is_fake else nullcontext()
    kinds = made_of_fakes() if is_fake else nullcontext()
    with (
        caches_forgotten(),
        libraries_as_ever(),
        ExitStack() as at_end,
        torch.autograd.set_multithreading_enabled(False),
        recording,
        kinds,
        done_at_once(),
        bounds as values,
        noting_what_is_made() as created,
    ):
        if not is_fake:
            at_end.enter_context(loaded_here())
            at_end.enter_context(saved_by_python())
        with nullcontext() if values is None else values.building():
            made = call(lambda: call_factory(source, factory, arguments))
            at_end.callback(made.stop)
        with nullcontext() if values is None else values.stepping():
            perform(made, created, recorder, Changes(), lambda step: None)
    return Attempt.of(recorder.trace, recorder.trace, answers, values)


def _trace_on_gpu(
    source: Source,
    arguments: Mapping[str, Any],
    gpu: Gpu,
    unseen: Unseen | None,
    changes: Changes,
    answers: Answers,
    all_on_gpu: bool,
    added: AddedPasses,
) -> Attempt[OwnRun] | None:
    """Return None if the factory puts nothing on the GPU, unless all is put there."""
    device = fake_gpu()
    work, seen = Work(), {"work": False}

    def observe(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if seen["work"]:
            work.observe(func, args, kwargs, result, recorder.outcome)
        added.observe(func, args, kwargs, result, recorder.outcome)

    def include(recorded: Work) -> None:
        if seen["work"]:
            work.include(recorded)

    def on_step(step: int) -> None:
        seen["work"] = step == STEPS - 1

    def watch() -> AbstractContextManager[None]:
        modules = name_modules(created, {})
        recorder.mark_modules(modules)
        return watch_step(recorder, modules, ForwardAutocast(changes))

    passes = Passes()
    recorder = Recorder(device.type, unseen, observe)
    graphs = Graphs(recorder, watch, include)
    factory = import_factory(source, gpu)
    with (
        switches_kept(),
        caches_forgotten(),
        libraries_as_ever(),
        ExitStack() as at_end,
        on_fake_gpu(recorder, gpu),
        cuda_stands_in(gpu, all_of_it=all_on_gpu) as stand_in,
        driver_asked(gpu),
        memory_told(recorder, gpu.usable_bytes),
        graphs.stand_in(),
        one_of_several(recorder),
        done_at_once(),
        made_of_fakes(),
        functions_fused(recorder),
        without_values(answers) as values,
        ExitStack() as stack,
    ):
        if all_on_gpu:
            stack.enter_context(all_on_card(device))
        stack.callback(reset_default_device, source)
        created = stack.enter_context(noting_what_is_made())
        with values.building():
            factory = import_in_plan(source, factory)
            made = call(lambda: call_factory(source, factory, arguments))
            at_end.callback(made.stop)
        if not (all_on_gpu or stand_in.is_used):
            return None
        work.read_switches()
        left_out = added.noted(recorder, include)
        with values.stepping(), left_out, passes.noted(), noting_rewriting() as rewriting:
            modules = perform(made, created, recorder, changes, on_step, passes)
        if not all_on_gpu and not holds_tensors(recorder.trace):
            return None  # a card was named, and everything put on the host
        # what is recorded already can no longer be changed
        is_open = not graphs.is_used
        weights = updated_weights(created)
        held = {one for module in modules.values() for one in module.parameters()}
        recomputed = find_recomputed(modules, weights, rewriting) if is_open else NOTHING
        optimizers = created.optimizers if is_open else []
        has_adam = bool(optimizers) and all(map(takes_low_bits, optimizers))
        half = "bfloat16" if gpu.has_bfloat16 else "float16"
        made_by = [(one, created.stacks.get(id(one), ())) for one in optimizers]
        edits = find_edits(source, made, recomputed, modules, passes, half, made_by)
        lines = unplaced(recomputed, modules, half)
        options = find_words(made.parsed, half)
        if passes.note and "autocast" not in options:
            recorder.notes.append(passes.note)
        recorder.notes += [AS_EAGER] * are_compiled(created.modules)
    run = OwnRun(
        FakeRun(
            recorder.trace,
            work,
            [
                *recorder.notes,
                *values.notes(),
                *made.notes(),
                *added.notes(),
                *growth_note(recorder.trace),
            ],
            whole=recorder.trace,
        ),
        recomputed=recomputed,
        half="" if stand_in.autocasts else half,
        edits=edits,
        unplaced=lines,
        options=options,
        accumulation=find_accumulation(made.parsed, source.words),
        has_statistics=any(
            isinstance(part, _BatchNorm) for one in modules.values() for part in one.modules()
        ),
        weights=sum(one.numel() for one in held),
        is_half=bool(stand_in.autocasts) or any(one.dtype.itemsize < 4 for one in held),
        has_adam=has_adam,
        all_on_gpu=all_on_gpu,
        answers=answers,
        integers=values.integers,
    )
    return Attempt.of(run, recorder.trace, answers, values)
