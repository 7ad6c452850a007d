"""Answers to reads of a tensor's memory, which a fake tensor has not, and to reads at which a script would end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from mpt.planner.device.kept_modes import KeptInBackward
from mpt.planner.device.sparse_rows import SparseRows, of_dense
from mpt.planner.own.stand_ins.exchange import set_data
from mpt.planner.own.stand_ins.files import tensor_in_file
from mpt.planner.own.stand_ins.sequences import PackedSequences, ctc_loss
from mpt.run.process.storage_trace import tensors_in

ADDRESS_BITS = 16
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

COMPRESSED = {
    getattr(torch, f"sparse_{kind}_tensor") for kind in ("csr", "csc", "bsr", "bsc", "compressed")
} | {getattr(Tensor, f"to_sparse_{kind}") for kind in ("csr", "csc", "bsr", "bsc")}
ONLY_COO = "{} makes a sparse tensor of a layout that is not followed; a matrix in COO is (`matrix.to_sparse()`)"


class WithoutMemory(KeptInBackward):
    """Answers reads of a tensor's memory by torch's own functions, and those at which a script would end."""

    def __init__(self, packed: PackedSequences) -> None:
        super().__init__()
        self.packed = packed

    def handle(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Answer a read, or call the function."""
        if func == SET_DATA:
            return set_data(*args)
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return address_of(args[0])
        if func is Tensor.__deepcopy__:
            return copy_deeply(*args)
        if func in (torch.isfinite, Tensor.isfinite) and not args[0].dim():
            return torch.tensor(True)
        if func is torch.sparse.mm and isinstance(args[0], SparseRows):
            return torch.mm(*args)
        if func is Tensor.__format__ and not args[0].dim():
            return args[0].item().__format__(*args[1:])
        if func is torch._is_all_true:  # a distribution checks its parameters and samples
            func(*args, **kwargs)
            return torch.tensor(True)
        if func is Tensor.to_sparse and isinstance(args[0], FakeTensor):
            return of_dense(*args, **kwargs)
        if func in COMPRESSED:
            raise NotImplementedError(ONLY_COO.format(func.__name__))
        if func is torch.asarray and isinstance(args[0], torch.UntypedStorage):  # by safetensors
            return tensor_in_file(*args, **kwargs)
        if func is torch.tensor and isinstance(args[0], list | tuple):
            return tensor_of(*args, **kwargs)
        if func is nn.functional.one_hot and (count := number_of_classes(*args, **kwargs)) > 0:
            zeros = args[0].new_zeros((*args[0].shape, count))  # and no places compared, as on meta
            return zeros.scatter_(-1, args[0].unsqueeze(-1), 1)
        if func is nn.functional.ctc_loss:
            return ctc_loss(*args, **kwargs)
        if self.packed.handles(func, args):
            return self.packed.call(func, args)
        return func(*args, **kwargs)


def address_of(tensor: Tensor) -> int:
    """Return a number in place of a fake tensor's address, which scripts tell tensors apart by."""
    start = address_of_memory(tensor.untyped_storage()) if not tensor.is_meta else 0
    return start + int(tensor.storage_offset()) * tensor.itemsize if start and tensor.numel() else 0


def address_of_memory(storage: Any) -> int:
    """Return a number of a storage that no other one has, nor any tensor in another one; 0 if it is empty."""
    return storage._cdata << ADDRESS_BITS if storage.nbytes() else 0


_address: Callable[[Any], int] = torch.UntypedStorage.data_ptr


def _address_in_plan(storage: Any) -> int:
    is_fake = storage.device.type == "meta"
    return address_of_memory(storage) if is_fake else _address(storage)


@contextmanager
def without_memory(packed: PackedSequences) -> Iterator[None]:
    """Answer reads of a tensor's memory inside the block."""
    addresses = mock.patch.object(torch.UntypedStorage, "data_ptr", _address_in_plan)
    # torch writes to empty memory at places that it knows, whose values are not followed
    inverse = mock.patch.object(nn.utils.rnn, "invert_permutation", inverted)
    with addresses, inverse, WithoutMemory(packed):
        yield


def inverted(order: Tensor | None) -> Tensor | None:
    """Return the places at which sequences that were sorted by their lengths had been."""
    return None if order is None else order.argsort()


def number_of_classes(labels: Tensor, num_classes: int = -1) -> int:
    """Return how many classes `one_hot` was asked for; -1 if they follow from the labels."""
    return num_classes


def tensor_of(values: Any, **options: Any) -> Tensor:
    """Return a tensor of numbers, some of which may be in fake tensors, whose memory torch would read."""
    numbers = list(tensors_in(values))
    if len(numbers) and len(numbers) == len(tree_leaves(values)):
        options.setdefault("dtype", numbers[0].dtype)
    return torch.tensor(tree_map_only(Tensor, lambda one: one.item(), values), **options)


def copy_deeply(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Return a copy of a fake tensor, whose memory torch would read the address of.

    As with real ones, tensors that share memory share it afterwards, if they are no parameters.
    """
    if id(tensor) not in memo:
        if isinstance(tensor, nn.Parameter):
            memo[id(tensor)] = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
        else:
            copies = memo.setdefault("memory", {})
            form = tensor.untyped_storage()._cdata, tensor.shape, tensor.stride()
            if form not in copies:
                copies[form] = tensor.detach().clone()
            tensor.new_empty(())  # which torch puts the copied memory into
            memo[id(tensor)] = copies[form].detach().requires_grad_(tensor.requires_grad)
    found: Tensor = memo[id(tensor)]
    return found
