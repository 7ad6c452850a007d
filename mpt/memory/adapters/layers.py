"""Layers with an adapter: W x + factor * B A x, or with a trained magnitude per output (DoRA).

Under DoRA the rows of W + factor * B A are scaled to `lora_magnitude`, by a norm that gradients do not pass through
(its section 4.3). Without it the layer adds the adapter's output to its own.

Sources: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, equation 3; Liu et al., "DoRA:
Weight-decomposed low-rank adaptation", 2024, equations 5 and 11.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.memory.low_bit.packed_linear import PackedLinear, unpack_all
from mpt.nn.shared.devices import compute_device
from mpt.nn.shared.mixin import become
from mpt.precision.shared.float32_modules import full_precision


class Adapted(nn.Module):
    """Attributes of a layer with an adapter in addition to its own."""

    lora_a: nn.Parameter | None
    """(rank, in), of a convolution larger than 1x1 (rank, in, h, w)"""
    lora_b: nn.Parameter | None
    """(out, rank)"""
    lora_magnitude: nn.Parameter | None
    """(out,), of DoRA alone"""
    lora_factor: float

    def change(self) -> Tensor:
        """Return factor * B A in float32, in the weight's shape."""
        assert self.lora_a is not None
        assert self.lora_b is not None
        shape = (self.lora_b.shape[0], *self.lora_a.shape[1:])
        product = self.lora_b.float() @ self.lora_a.float().flatten(1)
        return (self.lora_factor * product).view(shape)

    def row_scale(self) -> Tensor:
        """Return magnitude / norm of W + factor * B A, (out,) in float32."""
        assert self.lora_magnitude is not None
        with torch.no_grad(), full_precision(self.lora_magnitude.device.type):
            change = self.change()
            norm = norms(change.add_(plain_weight(self).to(change.device).view_as(change)))
        return self.lora_magnitude.float() / norm

    def adapt(self, output: Tensor, added: Tensor, rows: tuple[int, ...]) -> Tensor:
        """Return the output with B A x in it; `rows` is the shape of one number per output."""
        if self.lora_magnitude is None:
            return output + self.lora_factor * added
        scale = self.row_scale().to(output.dtype).view(rows)
        bias = self.bias
        plain = (
            output if not isinstance(bias, Tensor) else output - bias.to(output.dtype).view(rows)
        )
        return output + (scale - 1) * plain + scale * (self.lora_factor * added)

    def adapt_linear(self, output: Tensor, input: Tensor) -> Tensor:
        """Return a Linear layer's output with the adapter's in it, (..., out)."""
        if self.lora_a is None or self.lora_b is None:
            return output
        added = functional.linear(functional.linear(input, self.lora_a), self.lora_b)
        return self.adapt(output, added, (-1,))

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight with the adapter in it, in float32."""
        change = self.change()
        merged = plain_weight(self).to(change.device).view_as(change) + change
        if self.lora_magnitude is not None:
            merged = merged * self.row_scale().view(-1, *[1] * (merged.dim() - 1))
        return merged

    def fold(self) -> None:
        """Add the adapter into the weight."""
        if self.lora_a is None or self.lora_b is None:
            return
        weight = self.weight
        assert isinstance(weight, Tensor)
        with torch.no_grad():
            weight.copy_(self.merged().view_as(weight))

    def drop(self) -> None:
        """Leave the adapter out from now on."""
        self.lora_a = self.lora_b = self.lora_magnitude = None


class AdaptedLinear(nn.Linear, Adapted):
    """A Linear layer with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output and the adapter's, (..., out)."""
        return self.adapt_linear(super().forward(input), input)


class AdaptedPacked(PackedLinear, Adapted):
    """A Linear layer with a packed weight and an adapter."""

    plain_class = AdaptedLinear

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output and the adapter's, (..., out)."""
        return self.adapt_linear(super().forward(input), input)


class AdaptedConv2d(nn.Conv2d, Adapted):
    """A convolution with an adapter: one as wide to `rank` channels, and a 1x1 from there."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output and the adapter's, (b, out, h, w)."""
        output = super().forward(input)
        if self.lora_a is None or self.lora_b is None:
            return output
        if self.lora_a.dim() == 2:
            narrow = functional.conv2d(input, self.lora_a[:, :, None, None], stride=self.stride)
        else:
            narrow = self._conv_forward(input, self.lora_a, None)
        return self.adapt(
            output, functional.conv2d(narrow, self.lora_b[:, :, None, None]), (-1, 1, 1)
        )


CLASSES: dict[type[nn.Module], type[Adapted]] = {
    nn.Linear: AdaptedLinear,
    PackedLinear: AdaptedPacked,
    nn.Conv2d: AdaptedConv2d,
}


def is_adaptable(module: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Return whether a layer can have an adapter: one of torch's own class, or packed."""
    return type(module) in CLASSES and (not isinstance(module, nn.Conv2d) or module.groups == 1)


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Return whether a convolution is a matrix product at each place."""
    return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding in ((0, 0), "valid")


def weight_of(layer: nn.Module) -> nn.Parameter:
    """Return the parameter by which layers that share a weight are known."""
    return layer.get_parameter("weight_codes" if isinstance(layer, PackedLinear) else "weight")


def plain_weight(layer: nn.Module) -> Tensor:
    """Return a layer's weight in float32, unpacked if it is packed."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return weight.detach().float()


def norms(weight: Tensor) -> Tensor:
    """Return the norm of each row, (out,)."""
    found: Tensor = torch.linalg.vector_norm(weight.flatten(1), dim=1)
    return found


def put_adapter(
    layer: nn.Linear | nn.Conv2d,
    rank: int,
    factor: float,
    generator: torch.Generator,
    trained: bool,
    dora: bool,
) -> Adapted:
    """Give a layer an adapter that changes nothing yet: B is zero, and A as nn.Linear begins, as in the published code.

    The random numbers are drawn on the CPU: layers begin alike on every device.
    """
    if isinstance(layer, nn.Linear):
        inside, outputs = [layer.in_features], layer.out_features
    else:
        inside = list(layer.weight.shape[1:])[: 1 if is_pointwise(layer) else None]
        outputs = layer.out_channels
    dtype = layer.packed_dtype if isinstance(layer, PackedLinear) else layer.weight.dtype
    bound = 1 / math.sqrt(math.prod(inside))
    down = torch.empty(rank, *inside).uniform_(-bound, bound, generator=generator)
    become(layer, CLASSES[type(layer)])
    assert isinstance(layer, Adapted)
    device = compute_device(layer)  # the weight may wait on the host
    layer.lora_a = nn.Parameter(down.to(device, dtype), trained)
    layer.lora_b = nn.Parameter(torch.zeros(outputs, rank, dtype=dtype, device=device), trained)
    layer.lora_factor = factor
    layer.lora_magnitude = None
    if dora:
        layer.lora_magnitude = nn.Parameter(norms(plain_weight(layer)).to(device, dtype), trained)
    return layer


def share(layer: nn.Module, other: Adapted) -> None:
    """Give a layer the adapter of another one, whose weight it has."""
    become(layer, type(other))
    assert isinstance(layer, Adapted)
    layer.lora_a, layer.lora_b, layer.lora_magnitude = (
        other.lora_a,
        other.lora_b,
        other.lora_magnitude,
    )
    layer.lora_factor = other.lora_factor


def fold_all(modules: Mapping[str, nn.Module]) -> None:
    """Add every adapter into its layer's weight, unpacked if it was packed, once if several layers share both."""
    unpack_all(modules)
    adapted = [
        layer
        for module in modules.values()
        for layer in module.modules()
        if isinstance(layer, Adapted)
    ]
    folded: set[Tensor] = set()
    for layer in dict.fromkeys(adapted):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        if weight not in folded:
            layer.fold()
            folded.add(weight)
    for layer in adapted:
        layer.drop()
