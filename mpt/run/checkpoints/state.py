"""A training state as plain text plus named tensors, and back, bit for bit.

A state is nested dicts, lists, tuples, numbers, strings, None and tensors, nothing else: anything that needs code to be
rebuilt has no place in a checkpoint, so reading one runs none. Integer keys (optimizers have them), tuples, big
integers, the sign of zero, infinities and memory layouts (channels last) all come back as they were. A tensor that
occurs twice is stored once and comes back as one tensor. Different views of one storage come back as separate tensors
of equal values.

In the text, `null`, booleans, strings, lists, finite floats and small integers represent themselves; everything else
is an object with one key that names its kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mpt.errors import PartError
from mpt.parallel.local import is_sharded
from mpt.run.checkpoints.tensor_file import NAMES, bytes_of

EXACT_INTEGERS = 2**53
"""Beyond this other JSON readers would round; such integers are written as hexadecimal text."""


def pack(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """Split a state into a JSON-able structure and its tensors by name.

    Raises PartError naming a value that has no place in it.
    """
    structure, tensors, parts = pack_parts(state)
    assert not parts, (
        "a sharded state is written by all ranks together, see mpt.run.checkpoints.shards"
    )
    return structure, tensors


def pack_parts(state: Mapping[str, Any]) -> tuple[Any, dict[str, Tensor], dict[str, Tensor]]:
    """Split a state as `pack` does, and keep its sharded tensors by name apart from the others."""
    packer = Packer()
    return packer.encode(state, ()), packer.tensors, packer.parts


def unpack(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Put a state together again. Raises ValueError if the structure is not one that `pack` made."""
    try:
        return Unpacker(tensors).decode(structure)
    except (
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise ValueError(
            f"its structure cannot be rebuilt ({type(error).__name__}: {error})"
        ) from error


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Do these strides walk each element of one gapless block exactly once?"""
    expected = 1
    for step, size in sorted(
        (step, size) for step, size in zip(stride, shape, strict=True) if size != 1
    ):
        if step != expected:
            return False
        expected *= size
    return True


class Packer:
    """One walk over a state."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parts: dict[str, Tensor] = {}
        """Sharded tensors. They are named as if they were whole, and never twice: an empty part has no address."""
        self.seen: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value) if abs(value) < EXACT_INTEGERS else {"int": hex(value)}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": str(float(value))}
        if isinstance(value, Tensor):
            return self.encode_tensor(value, path)
        if isinstance(value, tuple):
            return {"tuple": [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]}
        if isinstance(value, list):
            return [self.encode(item, (*path, str(i))) for i, item in enumerate(value)]
        if isinstance(value, Mapping):
            if all(isinstance(key, str) for key in value):
                return {
                    "dict": {
                        str(key): self.encode(item, (*path, key)) for key, item in value.items()
                    }
                }
            pairs = [
                [self.encode(k, (*path, "key")), self.encode(v, (*path, str(k)))]
                for k, v in value.items()
            ]
            return {"items": pairs}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise PartError(
            f"state[{'.'.join(path)}] is a {kind}; a checkpoint holds plain containers, numbers and tensors"
        )

    def encode_tensor(self, tensor: Tensor, path: tuple[str, ...]) -> dict[str, Any]:
        """Return a tensor's reference and keep the tensor, once for all its aliases."""
        if is_sharded(tensor):
            name = self.name_of(path)
            self.parts[name] = tensor
            return {"tensor": name}
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise PartError(
                f"state[{'.'.join(path)}] is a {tensor.layout} {tensor.dtype} tensor on {tensor.device}"
            )
        node: dict[str, Any] = {}
        if not tensor.is_contiguous() and is_dense(tuple(tensor.shape), tensor.stride()):
            node["stride"] = list(tensor.stride())
        stored = tensor.detach()
        if tensor.dtype not in NAMES:
            stored = bytes_of(tensor)
            node |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
        place = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        # Empty tensors have no address to distinguish them by.
        if tensor.numel() == 0 or place not in self.seen:
            name = self.name_of(path)
            self.tensors[name] = stored
            self.seen[place] = name
        return {"tensor": self.seen[place], **node}

    def name_of(self, path: tuple[str, ...]) -> str:
        """Return a name in the tensor file that is not taken; paths may collide once joined by dots."""
        name = wanted = ".".join(path) or "tensor"
        number = 1
        while name in self.tensors or name in self.parts or name == "__metadata__":
            number += 1
            name = f"{wanted}#{number}"
        return name


class Unpacker:
    """One walk over a structure. Aliases come back as one tensor."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.rebuilt: dict[str, Tensor] = {}

    def decode(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.decode(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "tensor" in node:
            return self.decode_tensor(node)
        if len(node) != 1:
            raise ValueError("its structure holds an object of no known kind")
        kind, content = next(iter(node.items()))
        if kind == "dict":
            return {key: self.decode(item) for key, item in content.items()}
        if kind == "items":
            return {self.decode(key): self.decode(item) for key, item in content}
        if kind == "tuple":
            return tuple(self.decode(item) for item in content)
        if kind == "int":
            return int(content, 16)
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        raise ValueError(f"its structure holds an object of the unknown kind {kind!r}")

    def decode_tensor(self, node: Mapping[str, Any]) -> Tensor:
        """Return a tensor with its dtype and memory layout."""
        name = node["tensor"]
        if name in self.rebuilt:
            return self.rebuilt[name]
        tensor = self.tensors[name]
        if "dtype" in node:
            dtype = getattr(torch, node["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"its structure names the unknown dtype {node['dtype']!r}")
            tensor = tensor.view(dtype).reshape(node["shape"])
        if "stride" in node:
            stride = tuple(node["stride"])
            if not is_dense(tuple(tensor.shape), stride):
                raise ValueError(f"its structure gives tensor {name!r} impossible strides")
            tensor = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
        self.rebuilt[name] = tensor
        return tensor
