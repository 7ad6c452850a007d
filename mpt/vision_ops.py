"""Let torchvision be imported though its compiled half does not fit the installed torch.

`import torchvision` ends in "operator torchvision::nms does not exist" when its binary cannot be loaded: a CPU-only
torch with the registry's wheel (built for CUDA), or two wheels of different releases. The Python half only needs the
two operators that it attaches fake kernels to, `nms` and `qnms`, to be declared.

An operator may be declared once: a binary that declares it a second time ends the process from C++. Which file the
binary is differs between releases (torchvision 0.29 renamed it), so torchvision itself is asked first: its import runs
as it is, with the binary if that loads. Only if it fails, and `nms` does not exist afterwards, are the two operators
declared, with a kernel of our own for `nms`, and the import is repeated. Models, transforms, data sets and box
functions then work.

Still impossible without the binary: `torchvision.ops.nms` (it refuses alone; call `mpt.vision_ops.nms`),
`deform_conv2d`, the image decoders of `torchvision.io`, and quantised boxes (`qnms` has no kernel). Detectors
work after `import_detection`.

Every import of torchvision in this package goes through `import_torchvision()` or is below
`from mpt import vision_ops  # noqa: F401`. Importing this module does not import torchvision.

Source: greedy non-maximum suppression as documented for `torchvision.ops.nms` (suppress if IoU > threshold).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

PACKAGE = "torchvision"
_libraries: list[Any] = []  # a Library's registrations vanish with the object


class FirstImport(MetaPathFinder):
    """Finds torchvision at the place of the other finders, and loads it by `Repeated`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torchvision's place; None for every other module."""
        if name != PACKAGE:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, FirstImport)]
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = Repeated(spec.loader)
        return spec


class Repeated(Loader):
    """Runs torchvision's import, and once more with the operators declared if it fails without them."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the real loader's result."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Import torchvision into `module`. Raises torchvision's other errors."""
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.loader
        try:
            self.loader.exec_module(module)
        except RuntimeError:
            if hasattr(torch.ops.torchvision, "nms"):
                raise
            _declare()
            self.loader.exec_module(module)


def suppress(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Return the indices of the boxes that greedy suppression keeps, best score first.

    `boxes` is (n, 4) as x1, y1, x2, y2; `scores` is (n,); the result is int64. A box goes when its intersection over
    union with a better kept one exceeds `iou_threshold`; equal scores are taken in the order given.
    """
    if boxes.dim() != 2 or boxes.size(1) != 4 or scores.shape != boxes.shape[:1]:
        raise ValueError(
            f"nms wants boxes (n, 4) and scores (n,), got {tuple(boxes.shape)} and {tuple(scores.shape)}"
        )
    if boxes.dtype in (torch.float16, torch.bfloat16):
        boxes = boxes.float()  # areas of a 1000-pixel box overflow float16
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while order.numel():
        best, order = order[0], order[1:]
        kept.append(best)
        others = boxes[order]
        corner_low = torch.maximum(boxes[best, :2], others[:, :2])
        corner_high = torch.minimum(boxes[best, 2:], others[:, 2:])
        intersection = (corner_high - corner_low).clamp_min(0).prod(dim=1)
        iou = intersection / (areas[best] + areas[order] - intersection)
        order = order[~(iou > iou_threshold)]  # two empty boxes give NaN, which suppresses nothing
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64, device=boxes.device)


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Call torchvision's operator `nms`: the compiled one if it loads, `suppress` if it does not."""
    if not hasattr(torch.ops.torchvision, "nms"):
        import_torchvision()
    kept: Tensor = torch.ops.torchvision.nms(boxes, scores, iou_threshold)
    return kept


def _declare() -> None:
    """Declare the operators that `import torchvision` needs; only for a process whose torchvision has no binary."""
    library: Any = torch.library.Library(PACKAGE, "FRAGMENT")  # type: ignore[no-untyped-call]
    _libraries.append(library)
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for key in ("CPU", "CUDA"):
        library.impl("nms", suppress, key)


def import_torchvision(submodule: str = "") -> ModuleType:
    """Import and return torchvision, or a submodule such as "transforms.v2", with or without its binary."""
    return importlib.import_module(f"{PACKAGE}.{submodule}" if submodule else PACKAGE)


def import_detection() -> ModuleType:
    """Import and return `torchvision.models.detection`, with a suppression and a RoI align that need no binary.

    If the binary loads, nothing is replaced. Otherwise the detectors' `nms` becomes ours, and their `roi_align`
    torchvision's own in Python, which it would compile first (that takes a C++ compiler, and longer than a short run).
    """
    import_torchvision()
    detection = importlib.import_module("torchvision.models.detection")
    if importlib.import_module("torchvision.extension")._has_ops():
        return detection
    boxes: Any = importlib.import_module("torchvision.ops.boxes")
    poolers: Any = importlib.import_module("torchvision.ops.poolers")
    align: Any = getattr(importlib.import_module("torchvision.ops.roi_align"), "_roi_align", None)
    boxes.nms = nms
    if align is not None:
        poolers.roi_align = eager_roi_align
    return detection


def eager_roi_align(
    input: Tensor,
    boxes: Tensor | list[Tensor],
    output_size: Any,
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """Call torchvision's RoI align in Python, uncompiled. Arguments are those of `torchvision.ops.roi_align`."""
    module: Any = importlib.import_module("torchvision.ops.roi_align")
    function = getattr(module._roi_align, "__wrapped__", module._roi_align)
    rois = boxes if isinstance(boxes, Tensor) else module.convert_boxes_to_roi_format(boxes)
    height, width = module._pair(output_size)
    pooled: Tensor = function(input, rois, spatial_scale, height, width, sampling_ratio, aligned)
    return pooled


if not any(isinstance(finder, FirstImport) for finder in sys.meta_path):
    sys.meta_path.insert(0, FirstImport())
