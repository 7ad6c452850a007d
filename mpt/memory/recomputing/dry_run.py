"""Saved tensors and costs of a step, measured in one pass over fake tensors: no data, no arithmetic, nothing changed.

Every phase's losses are computed once on the data's layout, without backward. The random generators and the weights are
untouched, since fake tensors have no values; the task's notes on itself are taken back.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from mpt.errors import ConfigError
from mpt.memory.recomputing.blocks import Unit
from mpt.memory.recomputing.operators import DEVICE_QUERY, Operator, Storages, Walk, nominal_seconds
from mpt.outside.own_code import is_in
from mpt.seams import MemoryTrick, Phase, Run
from mpt.seams.phase_losses import draw_batch, losses_of
from mpt.seams.undo import notes_of, take_back


@dataclass
class UnitCost:
    """Bytes that one unit keeps for backward in addition to its inputs, and the cost of running it again."""

    saved_bytes: int = 0
    flops: int = 0


class FlopCount(TorchDispatchMode):
    """Adds up the floating-point operations of a block.

    Torch's own FlopCounterMode follows modules through backward too, which fails on a gradient penalty's autograd.grad.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = flop_registry.get(function._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class SavedTensors(MemoryTrick):
    """Calls a function with every tensor that a forward saves for backward."""

    name = "saved_tensors"

    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        self.pack = pack

    def forward(self) -> AbstractContextManager[Any]:
        """Return the hooks of one forward."""
        return saved_tensors_hooks(self.pack, lambda tensor: tensor)


def count_losses(run: Run, setting: str) -> dict[str, int]:
    """Return the number of backward passes of each phase in one update.

    Raises ConfigError, naming the setting that needs to know, for losses that look at tensors' values.
    """
    counts = {}
    with _explained(setting), on_fake_tensors(run):
        for phase in run.phases:
            counts[phase.name] = sum(1 for _ in _losses(run, phase))
    return counts


def measure_units(run: Run, units: list[Unit], setting: str) -> dict[Unit, UnitCost]:
    """Return the saved bytes and cost of each unit in one step of all phases, by the tensors autograd keeps.

    Raises ConfigError, naming the setting that needs to know, for losses that look at tensors' values.
    """
    costs = {unit: UnitCost() for unit in units}
    inside: list[UnitCost] = []
    seen: set[int] = set()
    alive: list[Tensor] = []  # or a storage's address would be used again

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if inside and key not in seen:
            seen.add(key)
            alive.append(tensor)
            inside[-1].saved_bytes += tensor.untyped_storage().nbytes()
        # a graph that holds its own output and is never walked would not be freed
        return tensor.detach()

    watch = SavedTensors(pack)  # the last of the tricks, so that autograd asks it and no other
    with _explained(setting), on_fake_tensors(run), FlopCount() as counter:
        alive += _weights(run)
        seen.update(weight.untyped_storage()._cdata for weight in alive)
        handles = []
        for unit, cost in costs.items():

            def enter(_: nn.Module, args: Any, cost: UnitCost = cost) -> None:
                inside.append(cost)
                cost.flops -= counter.total

            def leave(*_: Any, cost: UnitCost = cost) -> None:
                cost.flops += counter.total
                inside.pop()

            handles.append(unit.modules[0].register_forward_pre_hook(enter, prepend=True))
            handles.append(unit.modules[-1].register_forward_hook(leave))
        try:
            run.tricks.append(watch)
            for phase in run.phases:
                for _ in _losses(run, phase):
                    pass
        finally:
            run.tricks.remove(watch)
            for handle in handles:
                handle.remove()
    return costs


@dataclass
class Call:
    """One call of a unit in the forward of a loss."""

    unit: Unit
    walk: Walk
    operators: list[Operator] = field(default_factory=list)
    saved: set[int] = field(default_factory=set)
    """Storages of its own making that autograd saves in it."""


@dataclass
class Loss:
    """The calls of all units in one loss, in order."""

    calls: list[Call]
    storages: Storages
    fixed: set[int]
    """Storages that are alive whatever becomes of the units: their inputs, and tensors saved elsewhere."""
    elsewhere: list[tuple[int, int]] = field(default_factory=list)
    """Of each storage that is saved outside of the units: how many calls came before, and its bytes."""


class RecordCalls(TorchDispatchMode):
    """Notes the operators of the call that is under way."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: Call | None = None
        self.storages = Storages()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled meanwhile, so nothing need be kept from the compiler
        return False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is DEVICE_QUERY:
            return args[0].device
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        self.storages.note_changes(function, args, kwargs)
        if self.call is not None:
            operator = self.call.walk.record(function, args, kwargs, result)
            if operator is not None:
                operator.seconds = nominal_seconds(function, args, kwargs, result)
                self.call.operators.append(operator)
        return result


def measure_calls(run: Run, units: list[Unit], setting: str) -> list[Loss]:
    """Return every unit's operators, saved tensors and tensors alive anyway, for every loss of a step.

    Raises ConfigError, naming the setting that needs to know, for losses that look at tensors' values.
    """
    losses: list[Loss] = []
    recorder = RecordCalls()

    def begin_loss() -> None:
        recorder.storages = Storages()
        losses.append(Loss([], recorder.storages, set()))

    def pack(tensor: Tensor) -> Tensor:
        loss, call = losses[-1], recorder.call
        number = loss.storages.find(tensor)
        if call is not None and number in call.walk.made:
            call.saved.add(number)
        elif number is not None:
            loss.fixed.add(number)
        elif call is None and tensor.untyped_storage()._cdata not in weights:
            loss.fixed.add(loss.storages.add(tensor))
            loss.elsewhere.append((len(loss.calls), tensor.untyped_storage().nbytes()))
        return tensor.detach()

    def enter(unit: Unit) -> Callable[..., None]:
        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not torch.is_grad_enabled():
                return  # nothing is kept, nor computed again
            loss = losses[-1]
            recorder.call = Call(unit, Walk(loss.storages))
            recorder.call.walk.begin(args, kwargs)
            loss.fixed |= recorder.call.walk.given
            loss.calls.append(recorder.call)

        return begin

    def leave(*_: Any) -> None:
        recorder.call = None

    watch = SavedTensors(pack)
    with _explained(setting), on_fake_tensors(run), recorder:
        alive = _weights(run)
        weights = {weight.untyped_storage()._cdata for weight in alive}
        handles = []
        for unit in units:
            handles.append(
                unit.modules[0].register_forward_pre_hook(
                    enter(unit), prepend=True, with_kwargs=True
                )
            )
            handles.append(unit.modules[-1].register_forward_hook(leave))
        try:
            run.tricks.append(watch)
            for phase in run.phases:
                begin_loss()
                for _ in _losses(run, phase):
                    begin_loss()
        finally:
            run.tricks.remove(watch)
            for handle in handles:
                handle.remove()
    return [loss for loss in losses if loss.calls]


def _losses(run: Run, phase: Phase) -> Iterator[None]:
    batch = draw_batch(run, phase, run.data.zeros(run.config.train.batch_size, run.device))
    for together in losses_of(run, phase, batch):
        del together  # and their graph: the next losses are computed without it
        yield


@contextmanager
def _explained(setting: str) -> Iterator[None]:
    """Turn the failure of code that depends on values into a ConfigError. A planner explains its own."""
    is_planned = detect_fake_mode() is not None
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        if is_planned:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            one for one in frames if not is_in(one.filename, "torch") and one.filename != __file__
        ]
        raise ConfigError(
            f"{setting}: it has to know the step before there is data, and the loss looks at a tensor's value at "
            f"{own[-1].filename}:{own[-1].lineno} ({own[-1].line}). Compute without .item() and without `if` on "
            "tensors, or leave the setting out"
        ) from error


def _weights(run: Run) -> list[Tensor]:
    """Return the weights and their fake twins, which views of them are of.

    They have to be held while they are recognised: a fake mode forgets a twin that nobody holds, and makes another.
    """
    parameters = [p for module in run.task.modules.values() for p in module.parameters()]
    return [*parameters, *(_fake_twin(p) for p in parameters)]


def _fake_twin(tensor: Tensor) -> Tensor:
    """Return the fake tensor of a real one; a fake mode has one for each."""
    mode = detect_fake_mode()
    assert mode is not None
    return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor)


@contextmanager
def on_fake_tensors(run: Run) -> Iterator[None]:
    """Inside the block a built run computes without memory; nothing that it notes meanwhile remains."""
    notes = notes_of(run.task)
    # A planner's own fake mode serves as well; a second one would refuse its tensors. Its recorder is switched off:
    # memory allocated here is none of the run's.
    fake = detect_fake_mode() or FakeTensorMode(allow_non_fake_inputs=True)
    owners = dict.fromkeys(
        owner for module in run.task.modules.values() for owner in module.modules()
    )
    buffers = [(owner, dict(owner._buffers)) for owner in owners]
    # a fake mode still counts for real on single numbers, as BatchNorm's batches
    for owner, own in buffers:
        owner._buffers.update(
            {name: value.clone() for name, value in own.items() if value is not None}
        )
    try:
        with _disable_current_modes(), fake:
            yield
    finally:
        for owner, own in buffers:
            owner._buffers.update(own)
        take_back(run.task, notes)
