"""`fp8` and `int8`: the products of large Linear layers in 8 bits, everything else as under `bf16`.

Inputs, weights and gradients are scaled and rounded to 8 bits for each product, by the extra torchao: float8 with a
scale per tensor (compute capability 8.9 and later), int8 with a scale per row (8.0 and later; a prototype of torchao).
Weights stay float32, and so do their gradients and the optimizer's state; autograd saves the same tensors as in `bf16`.
So time may be saved, memory is not: a cast that is not fused holds its operand twice in float32 for a moment, some 3 %
of a ViT-B's peak in batches of 64 on an H100.

A layer takes part if both sides are multiples of 16 and the predicted gain is worth it. The prediction is a roofline of
the layer's three products and of the passes over their operands that the scaling adds; it is reported before the first
step. Convolutions stay in bfloat16: torchao has no 8-bit kernels for them. The casts are cheap only if they are fused:
use `memory.compile`.

Source: Micikevicius et al., "FP8 formats for deep learning", 2022. Speeds: the makers' datasheets.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.nn.shared.mixin import become
from mpt.precision.amp import Autocast
from mpt.precision.shared.float32_modules import Float32Module
from mpt.precision.shared.policy import Policy
from mpt.seams import Task

NAMES: dict[str, dict[str, object]] = {"fp8": {}, "int8": {}}
ABOUT = {
    "fp8": "Products of large Linear layers in float8, all else as under bf16; saves time, not memory.",
    "int8": "Products of large Linear layers in int8, all else as under bf16; saves time, not memory.",
}

ALIGNMENT = 16
FLOPS_PER_BYTE = {(8, 9): 164.0, (9, 0): 295.0, (10, 0): 281.0, (12, 0): 117.0}
"""Compute capability -> bfloat16 operations per byte of bandwidth (RTX 4090, H100, B200, RTX 5090)."""
LEAST_CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}
MANY_ROWS = 65536
SCALING_BYTES = 5
"""Per element of an operand: read for the largest value, read again and written in 8 bits."""


class Settings(PrecisionOptions):
    dtype: Literal["auto", "bfloat16"] = "bfloat16"
    min_speedup: float = Field(1.05, ge=0)
    """Layers that are predicted to gain less, whatever the batch, stay in bfloat16."""
    emulate: bool = False
    """Compute fp8's numbers in float32 if there is no hardware for them, slowly: for tests."""


class LowBitProducts(Autocast):
    """bfloat16 autocast, with chosen Linear layers replaced."""

    settings: Settings
    can_fall_back = False

    def prepare(self, task: Task, *, is_sharded: bool = False) -> None:
        """Replace the layers that gain, and say which and how much. Raises ConfigError if none does."""
        super().prepare(task, is_sharded=is_sharded)
        capability = check_device(self.name, self.device, self.settings.emulate)
        if find_spec("torchao") is None:
            raise ConfigError(
                f"precision.mode: {self.name} needs torchao, which is not installed; pip install torchao"
            )
        ratio = FLOPS_PER_BYTE.get(capability, FLOPS_PER_BYTE[8, 9])
        chosen: dict[tuple[int, int], list[str]] = defaultdict(list)
        reasons: dict[str, int] = defaultdict(int)
        for key, network in task.trainable.items():
            for name, layer in eligible_layers(network, reasons):
                gain = predicted_speedup(layer.in_features, layer.out_features, MANY_ROWS, ratio)
                if gain < self.settings.min_speedup:
                    reasons[
                        f"too small to gain ({layer.in_features} x {layer.out_features}: {gain:.2f}x at most)"
                    ] += 1
                    continue
                chosen[layer.in_features, layer.out_features].append(f"{key}.{name}")
                network.set_submodule(name, replacement(self.name, layer, self.settings.emulate))
        if not chosen:
            why = (
                "; ".join(f"{count} {reason}" for reason, count in reasons.items())
                or "it has no Linear layers"
            )
            raise ConfigError(
                f"precision.mode: {self.name} has nothing to do in this model: {why}. Convolutions have no 8-bit "
                "kernels. Use precision=bf16"
            )
        notes = tell(self.name, chosen, reasons, ratio)
        self.numerics = replace(self.numerics, notes=(*self.numerics.notes, *notes))


def eligible_layers(network: nn.Module, reasons: dict[str, int]) -> list[tuple[str, nn.Linear]]:
    """Return the Linear layers whose shape 8-bit products can have, by name; count why others cannot."""
    kept = {
        m
        for module in network.modules()
        if isinstance(module, Float32Module)
        for m in module.modules()
    }
    found = []
    for name, module in network.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            reasons["convolutions"] += 1
        if type(module) is not nn.Linear or not name or module in kept:
            continue
        if module.in_features % ALIGNMENT or module.out_features % ALIGNMENT:
            reasons[f"with a side that is no multiple of {ALIGNMENT}"] += 1
            continue
        found.append((name, module))
    return found


def predicted_speedup(inputs: int, outputs: int, rows: int, ratio: float) -> float:
    """Return how much faster a layer's forward and backward are predicted to be than in bfloat16.

    `ratio` is operations per byte of bandwidth. Each of three products takes the longer of arithmetic and traffic;
    8 bits double the arithmetic and halve the traffic, and add a pass of scaling over each operand.
    """
    operands = rows * inputs + inputs * outputs + rows * outputs
    flops = 2.0 * rows * inputs * outputs

    def products(speed: float, width: float) -> float:
        return 3 * max(flops / speed, width * operands * ratio)

    return products(1, 2) / (products(2, 1) + SCALING_BYTES * operands * ratio)


def tell(
    name: str, chosen: dict[tuple[int, int], list[str]], reasons: dict[str, int], ratio: float
) -> list[str]:
    """Return the lines before a run: the predicted gain of each shape, and the memory that does not shrink."""
    notes = []
    for (inputs, outputs), layers in chosen.items():
        rows = [2**n for n in range(4, 17) if predicted_speedup(inputs, outputs, 2**n, ratio) > 1]
        start = f"faster from about {rows[0]} rows (samples x tokens) on" if rows else "not faster"
        best = predicted_speedup(inputs, outputs, MANY_ROWS, ratio)
        some = layers[0] if len(layers) == 1 else f"{len(layers)} layers like {layers[0]}"
        notes.append(
            f"{name}: {some} ({inputs} x {outputs}): predicted {best:.2f}x bf16's speed at most, {start}"
        )
    left = "; ".join(f"{count} {reason}" for reason, count in reasons.items())
    if left:
        notes.append(f"{name}: left in bfloat16: {left}")
    notes.append(
        f"{name}: memory does not shrink against bf16; only memory.compile makes the casts cheap"
    )
    return notes


def check_device(name: str, device: torch.device, emulate: bool) -> tuple[int, int]:
    """Return the compute capability, (0, 0) on a CPU. Raises ConfigError if the device cannot run the mode."""
    if (
        device.type != "cpu"
        and torch._guards.detect_fake_mode() is not None
        and not torch.cuda.is_available()
    ):
        return 0, 0  # a plan for a card that is not here
    if device.type != "cuda":
        if name == "fp8" and not emulate:
            raise ConfigError(
                f"precision.mode: fp8 needs a GPU of compute capability 8.9 or later, not {device.type}; use "
                "precision=bf16, or precision.emulate=true for its numbers without its speed"
            )
        return 0, 0
    capability = torch.cuda.get_device_capability(device)
    least = LEAST_CAPABILITY[name]
    if capability < least and not (name == "fp8" and emulate):
        found, needed = (".".join(map(str, version)) for version in (capability, least))
        raise ConfigError(
            f"precision.mode: {name} needs compute capability {needed} or later; this GPU has {found}. "
            "Use precision=bf16, or amp before 8.0"
        )
    return capability


def replacement(name: str, layer: nn.Linear, emulate: bool) -> nn.Module:
    """Return a layer with the same parameters that multiplies in 8 bits."""
    if name == "int8":
        become(layer, Int8Linear)
        return layer
    float8: Any = importlib.import_module("torchao.float8")
    linear: Any = importlib.import_module("torchao.float8.float8_linear")
    # The number of rows is a side of the weight gradient's product: padding lets it be any.
    config = float8.Float8LinearConfig(pad_inner_dim=True, emulate=emulate)
    converted: nn.Module = linear.Float8Linear.from_float(layer, config)
    return converted.train(layer.training)


class Int8Linear(nn.Linear):
    """A Linear layer whose three products are of int8 numbers with a scale per row, by torchao's prototype."""

    def forward(self, input: Tensor) -> Tensor:
        """Return bfloat16 outputs; inputs of any floating dtype."""
        training: Any = importlib.import_module(
            "torchao.prototype.quantized_training.int8_mixed_precision"
        )
        entry = input.to(torch.bfloat16).contiguous()
        config = training.Int8MixedPrecisionTrainingConfig(module_swap=True)
        function: Any = training._Int8MixedPrecisionTrainingLinearFunction
        output: Tensor = function.apply(entry, self.weight, None, config)
        if output.requires_grad:
            output.register_hook(lambda g: g.contiguous())  # type: ignore[no-untyped-call]  # torchao's backward takes views of it
        return output if self.bias is None else output + self.bias.to(output.dtype)


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode."""
    kind = {"fp8": "float8", "int8": "int8"}[name]
    reason = f"bfloat16, and {kind} in the products of large Linear layers"
    mode = LowBitProducts(name, settings, device, torch.bfloat16, reason)
    mode.numerics = replace(mode.numerics, product_unit=2.0**-3 if name == "fp8" else 2.0**-7)
    return mode
