"""Whether an update does the same each time, seen by writing down two of them operator by operator.

A CUDA graph repeats the kernels of one update on the addresses that they had. It would go wrong in silence if the next
update were another one: a branch of Python, a number of the host that changes, a tensor that was replaced. So two
updates are compared first: the same operators, on the same numbers, on the same memory outside the update. Code that
reads the device or brings numbers of the host to it cannot be recorded at all, and is noticed as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.run.process.storage_trace import tensors_in
from mpt.seams import Task

READS = frozenset(
    {
        *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"),
        *("aten::unique_dim", "aten::unique_consecutive", "aten::is_nonzero", "aten::equal"),
    }
)
"""Operators whose result the host must know, or whose size depends on values."""
Entry = tuple[Any, ...]


class Tape(TorchDispatchMode):
    """Writes down the operators of an update on a device while it is entered.

    Tensors of the update count by the operator that made them, others by their memory, which is kept alive so that its
    address cannot be another's at the next update.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.entries: list[Entry] = []
        self.why_not = ""
        """The first thing that no graph can hold."""
        self._makers: dict[int, int] = {}
        """Address of a storage's C++ object -> the operator that made it last."""
        self._outside: dict[int, Tensor] = {}
        self.is_paused = False
        """Set while a question of the update itself is answered."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        given = list(tensors_in((args, kwargs)))
        if not self.is_paused:
            self._find_obstacle(name, given)
            reads_values = not name.endswith("_like") and not name.startswith("aten::new_")
            entry = (
                str(function),
                *(self._describe(value, reads_values) for value in (*args, *kwargs.items())),
            )
        result = function(*args, **kwargs)
        if self.is_paused:
            return result
        inputs = {one.untyped_storage()._cdata for one in given}
        for tensor in tensors_in(result):
            address = tensor.untyped_storage()._cdata
            if address not in inputs:
                self._makers[address] = len(self.entries)
                self._outside.pop(address, None)
                if tensor.device.type == "cpu" != self.device.type and any(
                    one.device == self.device for one in given
                ):
                    self.why_not = self.why_not or f"{name} copies to the host"
        self.entries.append(entry)
        return result

    def _find_obstacle(self, name: str, given: list[Tensor]) -> None:
        if self.why_not or self.device.type == "cpu":
            return
        on_host = [one for one in given if one.device.type == "cpu"]
        if name in READS and len(on_host) < len(given):
            self.why_not = f"{name} reads the device on the host"
        elif name in ("aten::copy_", "aten::_to_copy") and any(
            not one.is_pinned() for one in on_host
        ):
            self.why_not = f"{name} copies from the host"
        elif any(one.layout != torch.strided for one in given):
            self.why_not = f"{name} is on sparse tensors"

    def _describe(self, value: Any, reads_values: bool) -> Any:
        """Return the part of an argument that has to be equal at the next update."""
        if isinstance(value, Tensor):
            return self._describe_tensor(value, reads_values)
        if isinstance(value, list | tuple):
            return tuple(self._describe(item, reads_values) for item in value)
        return value if isinstance(value, int | float | str | bool | None) else str(value)

    def _describe_tensor(self, tensor: Tensor, reads_values: bool) -> Entry:
        form = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), str(tensor.dtype))
        address = tensor.untyped_storage()._cdata
        if address in self._makers:
            return ("made by", self._makers[address], *form)
        if not reads_values:
            return ("of this form", *form)
        if tensor.device.type == "cpu" != self.device.type and tensor.dim() == 0:
            return ("number", float(tensor), *form)
        self._outside[address] = tensor
        return ("outside", address, *form)


def first_difference(one: Tape, other: Tape) -> str:
    """Return why an update that was written down twice is not the same each time; "" if it is."""
    for tape in (one, other):
        if tape.why_not:
            return tape.why_not
    for before, after in zip(one.entries, other.entries):
        if before == after:
            continue
        if before[0] != after[0]:
            return f"one update computes {before[0]} where the next one computes {after[0]}"
        changed = next(
            (pair for pair in zip(leaves(before), leaves(after)) if pair[0] != pair[1]), ("", "")
        )
        if "outside" in leaves(before) and isinstance(changed[0], int) and changed[0] > 2**32:
            return f"{before[0]} reads a tensor that another one replaces from update to update"
        return f"{before[0]} is given {changed[0]} in one update and {changed[1]} in the next"
    if len(one.entries) != len(other.entries):
        return f"one update has {len(one.entries)} operators, the next one {len(other.entries)}"
    return ""


def leaves(entry: Any) -> list[Any]:
    """Return the items of nested tuples, in order."""
    return (
        [leaf for item in entry for leaf in leaves(item)] if isinstance(entry, tuple) else [entry]
    )


def numbers_of(task: Task) -> dict[str, Any]:
    """Return the plain numbers, words and flags that a task and its networks have as attributes, by their names.

    Python that changes one of them in an update does so once, and not again when the update is repeated.
    """
    found = dict(plain_values("task", vars(task)))
    for key, root in task.modules.items():
        for name, module in root.named_modules():
            found.update(plain_values(f"{key}.{name}" if name else key, vars(module)))
    return found


def plain_values(owner: str, values: Mapping[Any, Any]) -> Iterable[tuple[str, Any]]:
    """Yield names and values, those in dicts and lists too; tensors, modules and other objects are left out."""
    for key, value in values.items():
        name = f"{owner}.{key}"
        if isinstance(value, int | float | str | bool):
            yield name, value
        elif type(value) is dict and not isinstance(value, nn.Module):
            yield from plain_values(name, value)
        elif type(value) in (list, tuple) and all(
            isinstance(item, int | float | str | bool) for item in value
        ):
            yield name, tuple(value)


def first_change(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return which number an update has changed in Python; "" if none."""
    for name in before.keys() | after.keys():
        old, new = before.get(name), after.get(name)
        if old != new and not (old != old and new != new):
            return (
                f"{name} changes from {old} to {new} in an update, which a repetition would not do"
            )
    return ""
