"""A Linear layer whose frozen weight is packed, and is unpacked for each product, in forward and in backward.

The product keeps nothing for its backward but the packed tensors, by `save_for_backward`: `stream_weights` sees
them there and fetches them again. A packed tensor that were kept on the context instead would be read in backward from
wherever the block's copies were in forward, which may hold another block's by then.

`weight` is the unpacked weight: code that reads it past the layer gets the right numbers, made anew for each read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mpt.memory.low_bit.formats import FORMATS
from mpt.nn.shared.devices import compute_device
from mpt.nn.shared.mixin import become, exchange_own_class

PREFIX = "weight_"


class PackedProduct(torch.autograd.Function):
    """input @ weight.T, or input @ weight if `is_turned`, with a weight that is unpacked for it."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        name: str,
        rows: int,
        columns: int,
        is_turned: bool,
        *packed: Tensor,
    ) -> Tensor:
        """Return the product in the input's dtype."""
        ctx.save_for_backward(*packed)
        ctx.terms = name, rows, columns, is_turned
        weight = FORMATS[name].unpack(packed, rows, columns, input.dtype)
        return input @ (weight if is_turned else weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the input's gradient: the other of the two products, which can be differentiated again."""
        name, rows, columns, is_turned = ctx.terms
        packed = ctx.saved_tensors  # once: recomputed tensors may be unpacked but once
        return product(gradient, name, rows, columns, not is_turned, *packed), *[None] * (
            4 + len(packed)
        )


product: Any = PackedProduct.apply


class PackedLinear(nn.Linear):
    """A Linear layer with a packed weight: parameters `weight_codes`, `weight_scales` and, of NF4, `weight_table`."""

    plain_class: ClassVar[type[nn.Linear]] = nn.Linear
    """The plain layer, once its weight is unpacked."""
    packed_format: str
    packed_dtype: torch.dtype
    """The dtype of the weight that was packed."""

    def packed(self) -> list[Tensor]:
        """Return the packed tensors on their present device: on the device, of a layer that computes."""
        return [self._parameters[PREFIX + name] for name in FORMATS[self.packed_format].names]  # type: ignore[misc]

    def unpacked(self) -> Tensor:
        """Return the weight (out, in) in the dtype that it had."""
        return FORMATS[self.packed_format].unpack(
            [tensor.detach() for tensor in self.packed()],
            self.out_features,
            self.in_features,
            self.packed_dtype,
        )

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The unpacked weight."""
        return self.unpacked()

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output in the dtype of the mode, (..., out)."""
        kind = input.device.type
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))
        output: Tensor = product(
            input, self.packed_format, self.out_features, self.in_features, False, *self.packed()
        )
        return output if self.bias is None else output + self.bias.to(output.dtype)


def pack(
    layer: nn.Linear, name: str, packed: Sequence[nn.Parameter] | None = None
) -> list[nn.Parameter]:
    """Pack a layer's weight, or take the packed tensors of a layer that shares it; return them.

    On `meta` the tensors have no values.
    """
    weight = layer.weight
    if packed is None:
        if weight.is_meta:
            shapes = FORMATS[name].shapes(*weight.shape)
            tensors = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in shapes]
        else:
            tensors = [tensor.clone() for tensor in FORMATS[name].pack(weight.detach())]
        packed = [nn.Parameter(tensor, requires_grad=False) for tensor in tensors]
    del layer._parameters["weight"]
    become(layer, PackedLinear)
    layer.packed_format, layer.packed_dtype = name, weight.dtype  # type: ignore[assignment]
    for own, parameter in zip(FORMATS[name].names, packed, strict=True):
        layer.register_parameter(PREFIX + own, parameter)
    return list(packed)


def unpack(layer: PackedLinear, weight: nn.Parameter | None = None) -> nn.Parameter:
    """Give a layer its weight back, or that of a layer which shared the packed one; return it."""
    device = compute_device(layer)
    for name in getattr(layer, "travelling_names", ()):
        parameter = layer.get_parameter(name)
        parameter.data = parameter.data.to(device)
    if weight is None:
        weight = nn.Parameter(layer.unpacked(), requires_grad=False)
    for name in FORMATS[layer.packed_format].names:
        del layer._parameters[PREFIX + name]
    plain = layer.plain_class
    for name in ("packed_format", "packed_dtype", "travelling_names", "weights_travel_to"):
        vars(layer).pop(name, None)
    exchange_own_class(layer, plain)
    # First, as it was: state dicts keep their order.
    layer._parameters = {"weight": weight, **layer._parameters}
    return weight


def unpack_all(modules: Mapping[str, nn.Module]) -> None:
    """Give all packed layers of networks their weights back, those that they share once.

    A moving average has the packed weights of its network, and adapters of its own, which are folded into the weight:
    so only layers with the same adapter have the same weight.
    """
    made: dict[tuple[nn.Parameter, nn.Parameter | None], nn.Parameter] = {}
    for root in modules.values():
        for layer in [one for one in root.modules() if isinstance(one, PackedLinear)]:
            both = layer.get_parameter(f"{PREFIX}codes"), layer._parameters.get("lora_a")
            made[both] = unpack(layer, made.get(both))
