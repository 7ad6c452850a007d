"""Trace torchvision's detectors on fake tensors: a bound for every size that depends on values.

Which boxes answer for an object is decided by values, which fake tensors do not have. Inside `bounded` the sizes are

- of a selection by a mask: everything that there is to select from. Of a mask in two dimensions (each object's best
  anchors, the hard negatives of each picture) one per row, which is no bound but small either way;
- of suppression: all boxes. torchvision cuts off after it (2000 proposals per picture), so everything after it is
exact;
- of the regions that are sampled per picture: as many as are asked for (512), which is exact for full pictures;
- of the regions of one level of the pyramid: an even share; all levels together have all of them;

and conditions on values (a box without area) do not hold. RoI align is the compiled one, as on a GPU: it keeps its
boxes and gives its result, whatever runs here. Padding of the boxes counts as objects.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.overrides import TorchFunctionMode

VALUES = {Tensor.__bool__: False, Tensor.item: 0, Tensor.__int__: 0, Tensor.__float__: 0.0}
"""The stand-in for a value that is not there."""


class BoundedShapes(TorchFunctionMode):
    """Gives selections their largest size, and conditions on values one outcome."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.where, Tensor.where) and len(args) + len(kwargs) == 1:
            return positions(args[0])
        if func in (torch.nonzero, Tensor.nonzero):
            return torch.stack(positions(args[0]), 1)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], without_masks(args[1]), *args[2:])
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException:
            if func not in VALUES:
                raise
            return VALUES[func]


def positions(mask: Tensor) -> tuple[Tensor, ...]:
    """Return indices in each dimension, as many as could be selected; see the module."""
    count = mask.numel() if mask.dim() < 2 else mask.shape[0]
    return tuple(mask.new_empty(count, dtype=torch.int64) for _ in range(max(1, mask.dim())))


def without_masks(key: Any) -> Any:
    """Return an index whose masks are replaced by positions."""
    if isinstance(key, Tensor) and key.dtype == torch.bool:
        found = positions(key)
        return found if len(found) > 1 else found[0]
    if isinstance(key, tuple) and any(
        isinstance(one, Tensor) and one.dtype == torch.bool for one in key
    ):
        parts = [without_masks(one) for one in key]
        return tuple(
            inner for one in parts for inner in (one if isinstance(one, tuple) else (one,))
        )
    return key


def keep_all(boxes: Tensor, scores: Tensor, *rest: Any) -> Tensor:
    """Stand in for suppression: nothing is suppressed."""
    return scores.new_empty(len(scores), dtype=torch.int64)


class RegionAlign(torch.autograd.Function):
    """Allocations of the compiled RoI align: its result, and in backward the gradient of the map."""

    @staticmethod
    def forward(
        ctx: Any, features_bchw: Tensor, regions_n5: Tensor, size: tuple[int, int]
    ) -> Tensor:
        """Return (n, c, *size)."""
        ctx.save_for_backward(regions_n5)
        ctx.like = features_bchw.shape
        return features_bchw.new_empty((len(regions_n5), features_bchw.shape[1], *size))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the map."""
        return gradient.new_empty(ctx.like), None, None


def align_levels(
    features: list[Tensor],
    boxes: list[Tensor],
    output_size: Any,
    sampling_ratio: int,
    scales: Any,
    mapper: Any,
) -> Tensor:
    """Stand in for torchvision's pooling from several levels: each has an even share of the regions."""
    poolers: Any = importlib.import_module("torchvision.ops.poolers")
    regions = poolers._convert_to_roi_format(boxes)
    size = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    if len(features) > 1:
        mapper(boxes)
    result = features[0].new_zeros((len(regions), features[0].shape[1], *size))
    for level, part in zip(
        features, torch.arange(len(regions), device=regions.device).chunk(len(features))
    ):
        pooled = RegionAlign.apply(level, regions[part], size)  # type: ignore[no-untyped-call]
        result[part] = pooled.to(result.dtype)
    return result


def sampled(self: Any, labels: list[Tensor]) -> list[Tensor]:
    """Stand in for `RoIHeads.subsample`: the requested number of regions per picture."""
    most = self.fg_bg_sampler.batch_size_per_image
    self.fg_bg_sampler(labels)
    return [label.new_empty(min(most, len(label)), dtype=torch.int64) for label in labels]


class Shared(list[Tensor]):
    """Tensors that a copy of their owner shares: a real tensor cannot be copied while others are fake."""

    def __deepcopy__(self, memo: object) -> Shared:
        return self


def place_anchors(net: nn.Module) -> None:
    """Give a network that has no values anchors of the kind that tensors have here, on the CPU, on which they are made.

    They are lists of tensors, which nobody else moves.
    """
    for module in net.modules():
        for name in ("cell_anchors", "_wh_pairs"):
            anchors = vars(module).get(name)
            if isinstance(anchors, list):
                empty = (torch.empty(one.shape, dtype=one.dtype, device="cpu") for one in anchors)
                setattr(module, name, Shared(empty))


@contextlib.contextmanager
def bounded(net: nn.Module) -> Iterator[None]:
    """Let a torchvision detector's forward run on fake tensors inside the block."""
    names = ("ops.boxes", "ops.poolers", "models.detection.roi_heads")
    boxes, poolers, heads = (importlib.import_module(f"torchvision.{name}") for name in names)
    place_anchors(net)
    with (
        replaced(boxes, "batched_nms", keep_all),
        replaced(poolers, "_multiscale_roi_align", align_levels),
        replaced(heads.RoIHeads, "subsample", sampled),
        BoundedShapes(),
    ):
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Let a function of torchvision's be another one inside the block."""
    original = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, original)
