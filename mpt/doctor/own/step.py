"""One step of somebody's own training, taken for real and watched: its losses, gradients, updates and operators.

The factory is called anew for each step, or a script is executed anew up to it, from the same random numbers, so that
each step sees the same weights and the same data, wherever the script takes them from. A phase is what ends in an
optimizer's step. Its update is measured and taken back, so that the phases of one step all see the weights that the
script began with.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

# optimizers import it, and it must not see the functions that take the place of torch.cuda's
import torch._dynamo
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpt.doctor.measuring.cuda_lists import CudaLists
from mpt.doctor.measuring.half_arithmetic import RoundedHalf
from mpt.doctor.measuring.instrument import Instrument, observed, real_values
from mpt.doctor.measuring.measured_step import Step
from mpt.doctor.numerics.rewrites import Place
from mpt.doctor.own.arithmetic import (
    HALVES,
    Arithmetic,
    LossScale,
    Seen,
    added_autocast,
    arithmetic,
    change_modules,
    scaled_backward,
)
from mpt.engine.building.build import seed_everything
from mpt.nn.shared.module_places import module_places, source_line
from mpt.planner.device.cuda_stand_in import cuda_stands_in
from mpt.planner.device.kept_modes import backward_of, has_none
from mpt.planner.facts.gpus import Gpu
from mpt.planner.own.execution.created import noting_what_is_made
from mpt.planner.own.execution.factory import batch_size_of, call_factory, find_factory
from mpt.planner.own.execution.imports import libraries_as_ever
from mpt.planner.own.execution.source import Made, Source
from mpt.planner.own.execution.switches import switches_kept
from mpt.planner.own.performed import call, name_modules
from mpt.planner.own.stand_ins.caches import caches_forgotten
from mpt.planner.own.stand_ins.files import saved_by_python
from mpt.planner.own.stand_ins.jit_traces import nothing_traced
from mpt.planner.own.stand_ins.loaders import loaded_here
from mpt.planner.own.stand_ins.pools import done_at_once
from mpt.planner.own.stand_ins.ranks import one_of_several
from mpt.precision.stable.stable_forms import StableForms
from mpt.precision.stable.stable_logs import Rewrite

SEED = 0


@dataclass(frozen=True)
class OwnSubject:
    """A factory of a step, and where its steps are taken."""

    source: Source
    arguments: Mapping[str, Any]
    device: torch.device
    gpu: Gpu
    """The card that the script is told about on a machine without one."""
    step: int = 0
    indices: Sequence[int] = ()
    tell: Callable[[str], None] = lambda doing: None
    """Called with what is done now, which may take a while."""

    @property
    def batch_size(self) -> int:
        """Samples of the step, if its factory says so; else 0."""
        return batch_size_of(find_factory(self.source), self.arguments) or 0


@dataclass
class Taken:
    """A step that was taken."""

    phases: dict[str, Step]
    moves: dict[str, dict[str, Tensor]]
    """Phase -> parameter -> how far its update moved it."""
    seen: Seen
    modules: dict[str, nn.Module]
    error: Exception | None = None
    """What the step raised."""


@dataclass
class _Watch:
    """Collects a step's phases as its optimizers step."""

    modules: Mapping[str, nn.Module]
    seen: Seen
    instrument: Instrument | None = None
    lists: CudaLists | None = None
    phases: dict[str, Step] = field(default_factory=dict)
    moves: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    begun: int = 0
    """Where the phase begins among the operators."""
    before: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    """Weights as they are before an update."""

    def __post_init__(self) -> None:
        self.names: dict[int, str] = {}
        for key, module in self.modules.items():
            for path, weight in module.named_parameters():
                self.names.setdefault(id(weight), f"{key}.{path}")

    def note_loss(self, value: float) -> None:
        """Note a value that is propagated back."""
        number = len(self.losses) + 1
        self.losses["loss" if number == 1 else f"loss {number}"] = value

    def finish(self, weights: Sequence[tuple[str, Tensor]]) -> str:
        """End a phase whose gradients these weights have, and return its name."""
        known = self.instrument.results if self.instrument is not None else []
        name = self._phase_name([key for key, _ in weights])
        self.phases[name] = Step(
            losses=self.losses,
            gradients={
                key: real_values(weight.grad.detach().to_dense()).float().cpu().clone()
                for key, weight in weights
                if weight.grad is not None
            },
            buffers={
                f"{key}.{path}": value.detach().float().cpu().clone()
                for key, module in self.modules.items()
                for path, value in module.named_buffers()
                if value.is_floating_point()
            },
            scale=self.seen.scale if self.seen.has_scaler or self.seen.scale != 1.0 else None,
            results=known[self.begun :],
            by_cuda_lists=sorted(self.lists.used) if self.lists is not None else [],
        )
        self.losses = {}
        self.begun = len(known)
        return name

    def _phase_name(self, names: Sequence[str]) -> str:
        owners = dict.fromkeys(name.partition(".")[0] for name in names)
        stem = name = ", ".join(owners) or "step"
        number = 1
        while name in self.phases:
            number += 1
            name = f"{stem}, {number}"
        return name

    def weights_of(self, optimizer: Optimizer) -> list[tuple[str, Tensor]]:
        """Return an optimizer's weights by name."""
        updated = [one for group in optimizer.param_groups for one in group["params"]]
        return [
            (self.names.get(id(one), f"parameter {number}"), one)
            for number, one in enumerate(updated)
        ]

    def skip(self, optimizer: Optimizer) -> None:
        """End a phase whose gradients are not finite."""
        self.finish(self.weights_of(optimizer))

    def before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End the phase, and remember the weights."""
        weights = self.weights_of(optimizer)
        phase = self.finish(weights)
        self.before = [(phase, one, one.detach().clone()) for _, one in weights]

    def after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Note how far weights moved, and take that back."""
        names = {id(one): name for name, one in self.weights_of(optimizer)}
        with torch.no_grad():
            for phase, weight, value in self.before:
                moved = real_values((weight - value).detach()).to("cpu", torch.float32, copy=True)
                self.moves.setdefault(phase, {})[names[id(weight)]] = moved
                weight.copy_(value)
        self.before = []
        if self.instrument is not None:
            self.begun = len(self.instrument.results)


def take(
    subject: OwnSubject,
    how: Arithmetic,
    *,
    watched: bool = False,
    forms: Sequence[str] = (),
    on_form: Callable[[Place], None] = lambda place: None,
) -> Taken:
    """Build the training and take one step by an arithmetic, with some forms of a formula computed by stable ones.

    What the step itself raises is in the result. `on_form` is called with each place of such a form.
    """
    seen, on_cpu = Seen(), subject.device.type == "cpu"
    with ExitStack() as stack:
        if subject.source.is_script:
            for one in (switches_kept(), caches_forgotten(), loaded_here(), saved_by_python()):
                stack.enter_context(one)
        stack.enter_context(nothing_traced(are_called=False))  # often with what lay in memory
        if on_cpu:
            stack.enter_context(libraries_as_ever())
            stack.enter_context(done_at_once())  # in another thread `cuda` would mean a card
            stack.enter_context(cuda_stands_in(subject.gpu, subject.device))
            stack.enter_context(one_of_several(None))
        skipped: list[Callable[[Optimizer], None]] = []
        scale, scope = stack.enter_context(
            arithmetic(how, seen, subject.device, lambda one: skipped[0](one))
        )
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        seed_everything(SEED)
        created = stack.enter_context(noting_what_is_made())
        made = call(
            lambda: call_factory(subject.source, find_factory(subject.source), subject.arguments)
        )
        stack.callback(made.stop)
        modules = name_modules(created, made.named)
        # once each: a network may be known by itself and as a part of another one
        weights = (one for module in modules.values() for one in module.parameters())
        trained = [*dict.fromkeys(one for one in weights if one.requires_grad)]
        seen.half_weights = {one.dtype for one in trained if one.dtype in HALVES}
        change_modules(how, modules, subject.device, scope)
        watch = _Watch(modules, seen)
        skipped.append(watch.skip)
        if on_cpu and not how.is_reference:
            watch.lists = stack.enter_context(CudaLists())
            stack.enter_context(RoundedHalf())
        if watched:
            watch.instrument = stack.enter_context(observed(modules))
        if forms:
            stack.enter_context(_stable(forms, modules, on_form))
        for handle in (
            register_optimizer_step_pre_hook(watch.before_optimizer),
            register_optimizer_step_post_hook(watch.after_optimizer),
        ):
            stack.callback(handle.remove)
        error = step_once(made, how, watch, scale, trained, subject.device)
    return Taken(watch.phases, watch.moves, seen, modules, error)


@contextmanager
def _stable(
    forms: Sequence[str], modules: Mapping[str, nn.Module], on_form: Callable[[Place], None]
) -> Iterator[None]:
    with module_places(modules) as places:

        def found(form: str, rewrite: Rewrite) -> None:
            on_form(Place(form, places.current()[0], source_line(), rewrite.was, rewrite.instead))

        with StableForms(forms, found):
            yield


def step_once(
    made: Made,
    how: Arithmetic,
    watch: _Watch,
    scale: LossScale,
    trained: Sequence[Tensor],
    device: torch.device,
) -> Exception | None:
    """Take the step; return its exception."""
    seed_everything(SEED)
    with ExitStack() as stack:
        factor = stack.enter_context(scaled_backward(how, trained, watch.seen))
        original = torch.autograd.backward
        around = functools.partial(_backward, original, how, watch, scale, factor, device)
        stack.enter_context(mock.patch.object(torch.autograd, "backward", around))
        # As functions of torch they would be called without the modes in force, and so would what is recomputed.
        stack.enter_context(mock.patch.object(Tensor, "backward", backward_of))
        stack.enter_context(mock.patch.object(torch.autograd, "has_torch_function", has_none))
        stack.enter_context(added_autocast(how, device))
        try:
            call(made.step)
            # it leaves the optimizer to somebody else, or has one that is not torch's
            if not watch.phases:
                found = [
                    (name, one) for one in trained if (name := watch.names.get(id(one))) is not None
                ]
                watch.finish([(name, one) for name, one in found if one.grad is not None])
        except Exception as error:
            return error
    return None


def _backward(
    original: Callable[..., None],
    how: Arithmetic,
    watch: _Watch,
    scale: LossScale,
    factor: float,
    device: torch.device,
    tensors: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    roots = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    for root in roots:
        known = scale.values.pop(id(root), None)
        watch.note_loss(float(root.detach().float().sum()) if known is None else known)
    if factor != 1.0:
        roots = [root * factor for root in roots]
    with without_autocast(device) if how.adds_autocast else nullcontext():
        original(roots, *args, **kwargs)


@contextmanager
def without_autocast(device: torch.device) -> Iterator[None]:
    """Switch autocast off inside the block: it is to be around forward and loss alone."""
    was_on = torch.is_autocast_enabled(device.type)
    torch.set_autocast_enabled(device.type, False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device.type, was_on)
