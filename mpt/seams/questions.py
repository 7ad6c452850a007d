"""Questions of the host within an update: whether losses or gradients are finite, on which the rest of it depends.

`ask` waits for the device, unless something has opened `Questions` of its own: a recorded update (`memory.cuda_graphs`)
is divided at each question, and taken to continue as usual. Fake tensors have no values; they answer the usual.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


class Questions:
    """Answers an update's questions inside its `with` block. One is open at a time, for one update runs at a time."""

    open: ClassVar[Questions | None] = None
    """The one that answers now."""

    def __enter__(self) -> None:
        Questions.open = self

    def __exit__(self, *_: object) -> None:
        Questions.open = None

    def ask(self, flag: Tensor, usual: bool) -> bool:
        """Return the answer; `usual` is that of an update that succeeds."""
        return usual if isinstance(flag, FakeTensor) else bool(flag)


WAITING = Questions()


def ask(flag: Tensor, *, usual: bool) -> bool:
    """Return whether a number on the device is not zero. Waits for it, if nobody else answers."""
    return (Questions.open or WAITING).ask(flag, usual)
