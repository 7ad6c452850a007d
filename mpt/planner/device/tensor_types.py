"""The old names of a card's tensors: `torch.cuda.FloatTensor(3)`, `x.type("torch.cuda.HalfTensor")`.

Scripts older than `device=` make and convert tensors by these classes, compare them with `x.type()`, and put all that
they make on the card by `torch.set_default_tensor_type`. Torch refuses each without CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

_new = Tensor.__new__
CARD, HOST = "torch.cuda.", "torch."
NAMES = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "ByteTensor", "CharTensor", "ShortTensor",
    "IntTensor", "LongTensor", "BoolTensor",
)  # fmt: skip


class CardType(type):
    """The class of a class in the place of `torch.cuda.FloatTensor` and the like."""

    dtype: torch.dtype
    make: Callable[..., Tensor]
    is_cuda = True
    is_sparse = False

    def __call__(cls, *args: Any, **options: Any) -> Tensor:
        """Make a tensor of sizes, of numbers or of an array, as the host's class does, on the card."""
        return cls.make(*args, **options).cuda()

    def __instancecheck__(cls, instance: Any) -> bool:
        """Return whether this is a tensor of the card with that type of numbers."""
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype == cls.dtype

    def __str__(cls) -> str:
        return CARD + cls.__name__


def card_types() -> dict[str, CardType]:
    """Return classes in the place of those of `torch.cuda`, by name."""
    found = {}
    for name in NAMES:
        host = getattr(torch, name)
        found[name] = CardType(name, (), {"dtype": host.dtype, "make": staticmethod(host)})
    return found


class TypeNames:
    """What the old names mean in a plan."""

    def __init__(self, card: Callable[[], torch.device]) -> None:
        """`card`: returns the device in the place of the card, which is used from then on."""
        self.card = card
        self.types = card_types()

    def of_card(self, kind: Any) -> CardType | None:
        """Return the class that a name or a class of the card means; None for all others."""
        if isinstance(kind, str) and kind.startswith(CARD):
            return self.types.get(kind.removeprefix(CARD))
        return kind if isinstance(kind, CardType) else None

    def convert(
        self, tensor: Tensor, dtype: Any = None, non_blocking: bool = False, **options: Any
    ) -> Any:
        """Convert a tensor as `Tensor.type`, or name its type."""
        kind = self.of_card(dtype)
        if kind is not None:
            return tensor.to(self.card(), kind.dtype, non_blocking=non_blocking)
        if dtype is not None:
            return Tensor.type(tensor, dtype, non_blocking, **options)
        name: str = Tensor.type(tensor)
        return CARD + name.rpartition(".")[2] if tensor.device == self.card() else name

    def set_default(self, kind: Any) -> None:
        """Let all tensors be made as those of a class, as `torch.set_default_tensor_type`."""
        card = self.of_card(kind)
        host = kind if card is None else HOST + card.__name__
        self._set_on_host(host)
        torch.set_default_device(None if card is None else self.card())
        self._take_back()
        if card is not None:
            self._make_on_card()

    def _make_on_card(self) -> None:
        setattr(Tensor, "__new__", functools.partial(self._made, self.card()))  # noqa: B010 - mypy

    @staticmethod
    def _made(place: torch.device, kind: type[Tensor], *args: Any, **options: Any) -> Tensor:
        """Make what `torch.Tensor(3)` does, which follows the default type and no default device."""
        asked = options.get("device", place)
        if kind is not Tensor or torch.device(asked).type not in (place.type, "cuda"):
            return _new(kind, *args, **options)
        options.pop("device", None)  # whose constructor takes the host alone
        return _new(kind, *args, **options).to(place)

    @staticmethod
    def _take_back() -> None:
        if "__new__" in vars(Tensor):
            delattr(Tensor, "__new__")

    @contextmanager
    def in_force(self, all_of_it: bool = False) -> Iterator[None]:
        """Let scripts use the names inside the block. `all_of_it`: `torch.Tensor(3)` is made on the card."""
        self._set_on_host = torch.set_default_tensor_type
        dtype = torch.get_default_dtype()
        names: Any = mock.patch.multiple(torch.cuda, **cast(Any, self.types))
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, dtype)
            stack.callback(self._take_back)
            stack.enter_context(names)
            stack.enter_context(
                mock.patch.object(torch, "set_default_tensor_type", self.set_default)
            )
            if all_of_it:
                self._make_on_card()
            yield
