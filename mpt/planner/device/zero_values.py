"""Answer questions about the values of fake tensors: every value that is read is zero.

A step never reads values (`docs/explanation/architecture.md`), but the code after a network may: labels are read off
scores, boxes are drawn. Such work is small compared with the network's, and follows it. So inference and evaluations
are planned as if all values were zero, and a note lists the reads. Shapes that depend on values (`x[mask]`) stay
unanswered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeVar

import numpy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.planner.device.operator_kinds import DEVICE_QUERY, is_known

SCALAR = torch.ops.aten._local_scalar_dense.default


class ZeroValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers `.item()`, `if tensor:` and the like with zero if the value is not known; `reads` counts them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while planning

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY and isinstance(args[0], FakeTensor):
            return args[0].device  # asked many times over
        if func is SCALAR and is_unknown(args[0]):
            return self.number(args[0])
        return func(*args, **(kwargs or {}))

    def number(self, tensor: Tensor) -> Any:
        """Return a fake number's value."""
        return self.array(tensor).item()

    def array(self, tensor: Tensor) -> Any:
        """Return zeros for a fake tensor's values."""
        self.reads += 1
        like = torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype
        return numpy.zeros(tuple(tensor.shape), str(like).removeprefix("torch."))


def is_unknown(value: Any) -> bool:
    """Return whether this is a fake tensor whose values are not known."""
    return isinstance(value, FakeTensor) and not is_known(value)


Answers = TypeVar("Answers", bound=ZeroValues)


class Watcher(Protocol):
    """A mode that sees every operator, and has the numbers that are read answered by `answers`."""

    answers: ZeroValues | None


def values_as_zeros(watcher: Watcher | None = None) -> AbstractContextManager[ZeroValues]:
    """Let every value of a fake tensor that is read inside the block be zero."""
    return values_by(ZeroValues(), watcher)


@contextmanager
def values_by(answers: Answers, watcher: Watcher | None = None) -> Iterator[Answers]:
    """Let a mode answer for the values of fake tensors that are read inside the block.

    With a `watcher`, which is entered already, each operator passes through one mode instead of two.
    """
    fake: Any = FakeTensor
    before = {name: vars(fake)[name] for name in ("tolist", "numpy") if name in vars(fake)}
    fake.tolist = lambda self: answers.array(self).tolist()
    fake.numpy = lambda self, force=False: answers.array(self)
    try:
        if watcher is None:
            with answers:
                yield answers
        else:
            watcher.answers = answers
            yield answers
    finally:
        if watcher is not None:
            watcher.answers = None
        for name in ("tolist", "numpy"):
            if name in before:
                setattr(fake, name, before[name])
            else:
                delattr(fake, name)
