"""Checkpoints that a step writes and reads while it is planned.

Nothing is written: a plan must not replace a file of the training, and fake tensors have no contents. What a step saved
it can load again. Files that are there are read by torch itself, which makes fake tensors of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Self
from unittest import mock

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from mpt.planner.device.operator_kinds import is_known

SHARDED = "torch.distributed.checkpoint.state_dict_saver"


class Place:
    """Stands for a storage that a `map_location` moves; `device` says where to."""

    device: Any = "cpu"

    def cuda(self, device: Any = None, *options: Any, **named: Any) -> Self:
        """Move it to the card."""
        self.device = "cuda"
        return self

    def cpu(self) -> Self:
        """Move it to the host."""
        self.device = "cpu"
        return self


def place_of(map_location: Any) -> Any:
    """Return the device that a function for storages moves to, and anything else as it is."""
    if not callable(map_location) or isinstance(map_location, torch.device):
        return map_location
    moved = map_location(Place(), "cpu")
    return moved.device if isinstance(moved, Place) else "cpu"


class Files:
    """The checkpoints of one plan."""

    def __init__(self, load: Callable[..., Any]) -> None:
        self._load = load
        self._saved: dict[Any, tuple[Any, Any]] = {}
        """File -> the file, and its contents with `Kept` for tensors."""

    def save(self, given: Any, file: Any, *options: Any, **named: Any) -> None:
        """Keep the contents in place of writing them."""
        self._saved[key_of(file)] = file, tree_map_only(Tensor, keep, given)

    def load(self, file: Any, map_location: Any = None, *options: Any, **named: Any) -> Any:
        """Return the kept contents, or read a file."""
        place = place_of(map_location)
        found = self._saved.get(key_of(file))
        if found is None:
            return counted(self._load(file, place, *options, **named))

        shared: dict[Any, Tensor] = {}

        def restored(kept: Kept) -> Tensor:
            if kept.memory not in shared:
                anywhere = place is None or isinstance(place, dict)
                shared[kept.memory] = kept.made().to(kept.device if anywhere else place)
                return shared[kept.memory]
            return shared[kept.memory].detach()

        return tree_map_only(Kept, restored, found[1])


def save_no_shards(module: ModuleType) -> None:
    """Let `torch.distributed.checkpoint` write nothing: its files have a part of each process."""

    def save(*given: Any, **named: Any) -> Any:
        return module.Metadata({})

    def save_later(*given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(module.Metadata({}))
        return done

    vars(module).update(save=save, save_state_dict=save, async_save=save_later)


def counted(loaded: Any) -> Any:
    """Return what torch has read, with memory that is seen: it gives fake tensors a device without a call."""
    memory: dict[int, Tensor] = {}

    def made_there(tensor: Tensor) -> Tensor:
        is_seen = isinstance(tensor, nn.Parameter)  # by the call that makes it one
        if is_seen or not isinstance(tensor, FakeTensor) or is_known(tensor) or tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in memory:
            memory[storage._cdata] = torch.empty(
                storage.nbytes(), dtype=torch.uint8, device=tensor.device
            )
        whole = memory[storage._cdata].view(tensor.dtype)
        same = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return same.requires_grad_(tensor.requires_grad)

    def seen(one: Any) -> Any:
        return made_there(one) if isinstance(one, Tensor) else one._apply(made_there)

    return tree_map_only((Tensor, nn.Module), seen, loaded)


class OpenedOnHost:
    """A file of safetensors that is read to the host, and each of its tensors moved: its own reader wants the card."""

    def __init__(self, filename: Any, framework: str, device: Any = "cpu", **options: Any) -> None:
        self._file: Any = safetensors.safe_open(
            filename, framework=framework, device="cpu", **options
        )
        self._device = device

    def __enter__(self) -> Self:
        """Open it."""
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self._file.__exit__(*exception)

    def __getattr__(self, name: str) -> Any:
        """Return what has no tensors."""
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Tensor:
        """Return a tensor on the device."""
        found: Tensor = self._file.get_tensor(name).to(self._device)
        return found

    def get_tensors(self) -> dict[str, Tensor]:
        """Return all tensors on the device, by name."""
        names = self._file.keys()
        return {name: self.get_tensor(name) for name in names}


@dataclass
class Kept:
    """A tensor in a file, which takes no memory."""

    form: Tensor
    """A tensor like it that has no memory."""
    values: Any
    """Its numbers as a list, if they are known."""
    device: torch.device
    memory: Any
    """The same for two tensors that are the same view of the same memory."""

    def made(self) -> Tensor:
        """Return such a tensor on the host."""
        if self.values is None:
            return torch.empty_like(self.form, device="cpu")
        return torch.tensor(self.values, dtype=self.form.dtype, device="cpu")


def keep(tensor: Tensor) -> Kept:
    """Return what is left of a tensor in a file."""
    detached: Any = tensor.detach()
    values = detached.constant.tolist() if is_known(detached) else None
    memory = detached.untyped_storage()._cdata, detached.shape, detached.stride()
    return Kept(torch.empty_like(detached, device="meta"), values, tensor.device, memory)


def pickled(tensor: FakeTensor, protocol: Any) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
    """Return a function that makes a tensor again and its arguments, for `pickle`, which a fake tensor refuses."""
    detached: Any = tensor.detach()
    values = detached.constant.tolist() if is_known(detached) else None
    is_parameter = isinstance(tensor, nn.Parameter)
    form = tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.device), values
    return made_again, (*form, tensor.requires_grad, is_parameter)


def made_again(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    values: Any,
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """Return a tensor of memory of its own."""
    if values is not None:
        made = torch.tensor(values, dtype=dtype, device=device)
    else:
        made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def copied(tensor: Tensor) -> Tensor:
    """Return what `copy.copy` does: a tensor of the same memory."""
    same = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(same, tensor.requires_grad)
    return same.requires_grad_(tensor.requires_grad)


def key_of(file: Any) -> Any:
    """Return a name for a path or an open file."""
    return os.fspath(file) if isinstance(file, str | os.PathLike) else id(file)


def tensor_in_file(storage: torch.UntypedStorage, dtype: torch.dtype, **options: Any) -> Tensor:
    """Return a tensor for a part of a mapped file, which safetensors reads so: its values are not needed."""
    return torch.empty(storage.nbytes() // dtype.itemsize, dtype=dtype, device="cpu")


@contextmanager
def without_files() -> Iterator[None]:
    """Let `torch.save` and safetensors write nothing inside the block."""
    files = Files(torch.load)
    tables = [one for one in ("_flatten", "_flatten_as_ptr") if hasattr(safetensors.torch, one)]
    unsaved: dict[str, Any] = {
        **dict.fromkeys(tables, lambda tensors, *kept: {}),
        "serialize_file": lambda table, path, metadata=None: None,
        "serialize": lambda table, metadata=None: b"",
        "safe_open": OpenedOnHost,
    }
    with (
        mock.patch.multiple(torch, save=files.save, load=files.load),
        mock.patch.object(FakeTensor, "__reduce_ex__", pickled),
        mock.patch.object(FakeTensor, "__copy__", copied, create=True),
        mock.patch.multiple(safetensors.torch, **unsaved),
    ):
        yield


@contextmanager
def saved_by_python() -> Iterator[None]:
    """Let `torch.save` open files by `open` inside the block, as of a script whose folders are kept apart."""
    save = torch.save

    def call(given: Any, file: Any, *options: Any, **named: Any) -> None:
        is_name = isinstance(file, str | os.PathLike)
        with open(file, "wb") if is_name else nullcontext(file) as opened:
            save(given, opened, *options, **named)

    with mock.patch.object(torch, "save", call):
        yield
