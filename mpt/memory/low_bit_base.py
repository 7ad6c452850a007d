"""Hold the frozen weights of Linear layers in 8 or 4 bits, and unpack each for its products: fp8, int8, NF4.

Everything trained alongside (adapters of `memory.lora`, layers that `train.freeze` leaves out) is in the mode's own
numbers, and so are the products. A weight takes 1 byte (fp8 and int8, a scale per row) or 0.56 (NF4, a scale per 64
values), against 4 of float32 and 2 of bfloat16; unpacking it takes time in forward, in backward and in a recomputed
forward. Weights are packed on the host, so the device never holds a plain one but the layer's that computes.

The network computes with rounded weights from the first step on, so this is not exact. Convolutions stay as they are,
and so do layers that `keep` names, weights that another kind of layer reads too, and layers within
`nn.TransformerEncoderLayer`, whose fast path reads weights past their layers. Checkpoints hold the packed weights; an
export (`mpt convert`) holds plain ones, as the network computed with them.

Source: Dettmers et al., "QLoRA: Efficient finetuning of quantized LLMs", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.low_bit.formats import packed_bytes
from mpt.memory.low_bit.packed_linear import PackedLinear, pack, unpack_all
from mpt.seams import HoldsWeights, Run

RELIEVES = "weights"
PROPOSALS = ("fp8", "nf4")
RANK = 2
LOSSY = True


class Settings(Options):
    """The format, and the layers."""

    shorthand: ClassVar[str | None] = "format"

    format: Literal["fp8", "int8", "nf4"] = "nf4"
    """fp8 and int8: a byte per weight and a scale per row. nf4: half a byte, and a scale per 64 weights."""
    layers: list[str] = Field(default_factory=lambda: ["*"])
    """Globs over dotted module names ("net.blocks.*"): the Linear layers that are packed."""
    keep: list[str] = Field(
        default_factory=lambda: ["*.fc.*", "*.head.*", "*.heads.*", "*.classifier.*"]
    )
    """Globs over dotted parameter names that stay as they are: the trained ones, as `memory.lora.full` names them."""


class LowBitBase(HoldsWeights):
    """Packs weights when networks are built; the layers do the rest."""

    name, exact = "low_bit_base", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.packed: dict[str, PackedLinear] = {}
        self.trained_before: set[str] = set()
        """Those whose weight would get a gradient, unless something freezes it after the build."""

    def pack_weights(self, networks: Mapping[str, nn.Module]) -> None:
        """Pack the weights of built networks, shared ones once."""
        made: dict[nn.Parameter, list[nn.Parameter]] = {}
        with torch.no_grad(), unset_fake_temporarily():
            for name, network in networks.items():
                for key, layer in list(self.layers(name, network)):
                    weight = layer.get_parameter("weight")
                    if weight.requires_grad:
                        self.trained_before.add(f"{name}.{key}")
                    made[weight] = pack(layer, self.settings.format, made.get(weight))
                    assert isinstance(layer, PackedLinear)
                    self.packed[f"{name}.{key}"] = layer
        if not self.packed:
            raise ConfigError(
                f"memory.low_bit_base: no Linear layer matches {', '.join(self.settings.layers)}; globs go over whole "
                "dotted names ('net.blocks.*'), and layers that memory.low_bit_base.keep names stay as they are"
            )

    def layers(self, name: str, network: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
        """Yield the layers of a network that are packed: all that read a weight, or none of them."""
        closed = {
            m
            for one in network.modules()
            if isinstance(one, nn.TransformerEncoderLayer)
            for m in one.modules()
        }
        found: dict[nn.Module, tuple[str, nn.Linear]] = {}
        for key, module in network.named_modules():
            full = f"{name}.{key}".rstrip(".")
            if type(module) is nn.Linear and module not in closed and self.is_chosen(full):
                found[module] = (key, module)
        others = (module for module in network.modules() if module not in found)
        read_by_others = {
            parameter for module in others for parameter in module.parameters(recurse=False)
        }
        yield from (one for one in found.values() if one[1].weight not in read_by_others)

    def is_chosen(self, name: str) -> bool:
        """Return whether the settings choose a layer by its dotted name."""
        is_kept = any(fnmatchcase(f"{name}.weight", glob) for glob in self.settings.keep)
        return not is_kept and any(fnmatchcase(name, glob) for glob in self.settings.layers)

    def attach(self, run: Run) -> None:
        """Refuse packed weights that were to be trained; log the packed bytes."""
        if run.precision.numerics.casts_calls:
            raise ConfigError(
                f"memory.low_bit_base: {run.precision.name} casts call by call, and the product of a packed weight is "
                "none of its calls; use precision=bf16 or amp"
            )
        for name in self.packed:
            if name in self.trained_before and not is_frozen(run, name):
                raise ConfigError(
                    f"memory.low_bit_base: {name} is trained, and a packed weight cannot be; freeze it (memory.lora, "
                    "train.freeze), or name it in memory.low_bit_base.keep"
                )
        layers = [(layer.out_features, layer.in_features) for layer in self.packed.values()]
        held = sum(packed_bytes(self.settings.format, rows, columns) for rows, columns in layers)
        plain = sum(2 * rows * columns for rows, columns in layers)
        run.messages.append(
            f"memory.low_bit_base: {len(layers)} Linear layers in {self.settings.format}: {held / 2**20:,.1f} MiB of "
            f"weights, against {plain / 2**20:,.1f} in half"
        )

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Unpack every weight, once if several layers share it."""
        unpack_all(modules)


def is_frozen(run: Run, name: str) -> bool:
    """Return whether a layer's weight would not be trained: by the task, `train.freeze` or adapters."""
    if name.partition(".")[0] not in run.task.trainable:
        return True
    weight = f"{name}.weight"
    if any(fnmatchcase(weight, glob) for glob in run.config.train.freeze):
        return True
    adapters = run.config.memory.tricks.get("lora")
    return adapters is not None and not any(fnmatchcase(weight, glob) for glob in adapters.full)


def build(settings: Settings) -> LowBitBase:
    """Build the trick."""
    return LowBitBase(settings)
