"""Recomputing a module in backward so that it repeats the forward exactly.

`torch.utils.checkpoint` (non-reentrant) replays random numbers and autocast. This adds the state that it does not know:
O1's casts, and buffers. BatchNorm would update its running statistics a second time, and a spectral norm would start
from another vector; so a recomputation works on copies of the buffers, with the values they had before the forward
where those matter, and throws the copies away.

Source: Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from mpt.errors import ConfigError
from mpt.memory.recomputing.keeping import KeepChosen, Record, ReuseChosen
from mpt.memory.recomputing.operators import Key
from mpt.memory.recomputing.selective import KeepOutputs, ReuseOutputs
from mpt.nn.shared.mixin import Mixin, mix_in
from mpt.precision import o1
from mpt.precision.stable.stable_forms import checkpoint_context

Keeps = bool | frozenset[Key]
"""Tensors kept of a recomputed block in addition to its inputs: nothing, the outputs of all dear operators, or
these."""


def recompute(
    function: Callable[..., Any],
    modules: list[nn.Module],
    keeps: Keeps,
    args: tuple[Any, ...],
    kwargs: Any,
) -> Any:
    """Call `function`, which runs `modules`, keeping its inputs instead of its activations."""
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    # checkpoint reads the device whose autocast it replays from positional arguments only; without any it assumes cuda.
    values, count = (*args, *kwargs.values()), len(args)
    before = [(value, value._version) for value in values if isinstance(value, Tensor)]
    record = keeps if isinstance(keeps, bool) else Record(keeps)
    called = function if isinstance(record, bool) else record.told(function)

    def call(*given: Any) -> Any:
        return called(*given[:count], **dict(zip(kwargs, given[count:], strict=True)))

    result = checkpoint(
        call, *values, use_reentrant=False, context_fn=lambda: make_contexts(modules, record)
    )
    if any(value._version != version for value, version in before):
        raise ConfigError(
            f"memory.recompute: {type(modules[0]).__name__} changes its input in place, so that it cannot be computed "
            "again. Leave it out with memory.recompute={modules: [globs of the others]}"
        )
    return result


def make_contexts(
    modules: list[nn.Module], keeps: bool | Record
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a forward and of its recomputations."""
    state = BufferState(modules)
    forward, again = o1.checkpoint_contexts()
    before, after = [forward, checkpoint_context()], [again, checkpoint_context()]
    if isinstance(keeps, Record):
        before, after = [KeepChosen(keeps), *before], [ReuseChosen(keeps), *after]
    elif keeps:
        keep = KeepOutputs()
        before, after = [keep, *before], [ReuseOutputs(keep), *after]
    return Together(state.remember, *before), Together(state.replace, *after)


class Together(AbstractContextManager[None]):
    """Several contexts as one, which may be entered again after it was left: a graph may be walked twice."""

    def __init__(
        self, *contexts: AbstractContextManager[Any] | Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self.contexts = contexts
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        for context in self.contexts:
            stack.enter_context(
                context if isinstance(context, AbstractContextManager) else context()
            )
        self.stacks.append(stack)

    def __exit__(self, *exception: Any) -> None:
        self.stacks.pop().__exit__(*exception)


class BufferState:
    """The buffers of some modules, as they were before a forward."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.owners = [inner for module in modules for inner in module.modules()]
        self.earlier: dict[tuple[nn.Module, str], Tensor] = {}

    def remember(self) -> AbstractContextManager[Any]:
        """Return a context around the forward that keeps the earlier values of those buffers that it changes."""
        return _Around(self._start, self._finish)

    def replace(self) -> AbstractContextManager[Any]:
        """Return a context around a recomputation in which the modules own copies."""
        return _Around(self._swap_in, self._swap_out)

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        for owner in self.owners:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield owner, name, buffer

    def _start(self) -> None:
        # In training a norm layer writes its statistics and does not read them: their earlier values do not matter.
        self.before = [
            (owner, name, buffer, buffer._version, buffer.clone())
            for owner, name, buffer in self._buffers()
            if owner.training and not isinstance(owner, _NormBase) and buffer.is_floating_point()
        ]

    def _finish(self) -> None:
        for owner, name, buffer, version, value in self.before:
            if owner._buffers[name] is not buffer or buffer._version != version:
                self.earlier[owner, name] = value
        del self.before

    def _swap_in(self) -> None:
        self.real = list(self._buffers())
        for owner, name, buffer in self.real:
            if owner.training:
                owner._buffers[name] = self.earlier.get((owner, name), buffer).clone()

    def _swap_out(self) -> None:
        for owner, name, buffer in self.real:
            owner._buffers[name] = buffer
        del self.real


class _Around(AbstractContextManager[None]):
    def __init__(self, enter: Callable[[], None], leave: Callable[[], None]) -> None:
        self.enter, self.leave = enter, leave

    def __enter__(self) -> None:
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.leave()


class Recomputed(Mixin, nn.Module):
    """Mixed in front of a module's class: its forward is recomputed in backward."""

    recomputed_keeps: Keeps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, keeping only its inputs."""
        return recompute(super().forward, [self], self.recomputed_keeps, args, kwargs)


class RecomputedSequence(Mixin, nn.Sequential):
    """Mixed in front of a plain Sequential: runs of its children are recomputed in backward."""

    recomputed_runs: tuple[tuple[int, int, Keeps], ...]

    def forward(self, input: Any) -> Any:
        """Run the children in order, the named runs of them keeping only their inputs."""
        children: list[nn.Module] = [child for child in self._modules.values() if child is not None]
        value, position = input, 0
        for start, stop, keeps in (*self.recomputed_runs, (len(children), len(children), False)):
            for child in children[position:start]:
                value = child(value)
            run = children[start:stop]
            if run:
                value = recompute(_Run(run), run, keeps, (value,), {})
            position = stop
        return value


class _Run:
    def __init__(self, modules: list[nn.Module]) -> None:
        self.modules = modules

    def __call__(self, value: Any) -> Any:
        for module in self.modules:
            value = module(value)
        return value


def wrap_module(module: nn.Module, keeps: Keeps) -> None:
    """Recompute one module. Its class is swapped, so that a deep copy owns its wrapper; its state-dict keys stay."""
    if isinstance(module, Recomputed):
        return
    mix_in(module, Recomputed)
    module.recomputed_keeps = keeps  # type: ignore[assignment]
    forbid_in_place(module)


def wrap_runs(sequential: nn.Module, runs: list[tuple[int, int, Keeps]]) -> None:
    """Recompute runs of children of a plain Sequential, each as one, with its kept outputs."""
    mix_in(sequential, RecomputedSequence)
    sequential.recomputed_runs = tuple(sorted(runs, key=lambda run: run[:2]))  # type: ignore[assignment]
    children = list(sequential._modules.values())
    for start, stop, _ in runs:
        for child in children[start:stop]:
            forbid_in_place(child)


def forbid_in_place(module: nn.Module | None) -> list[nn.Module]:
    """Turn off `inplace` activations: one that comes first in a run would overwrite the input that is kept, and one
    after a convolution the output that `selective` keeps. Returns those that were changed."""
    changed = (
        [inner for inner in module.modules() if getattr(inner, "inplace", False) is True]
        if module
        else []
    )
    for inner in changed:
        inner.inplace = False  # type: ignore[assignment]
    return changed
