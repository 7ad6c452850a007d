"""Memory that no tensor shows: library workspaces, scratch inside kernels, and the CUDA context.

The trace sees tensors. cuBLAS, cuDNN and attention kernels also ask the caching allocator for scratch space, and the
CUDA context takes memory outside it. Each such part is here, with the source of its size, and nowhere else; the
calibration of one real run (`mpt.planner.facts.calibration`) replaces the parts that cannot be known beforehand.

- cuBLAS: one workspace per handle and stream, 8 MiB + 128 KiB by default, 32 MiB on compute capability 9.0
  (`CUDABlas.cpp`, `parseChosenWorkspaceSize`). Autograd's thread has a handle of its own, so backward adds a second
  one.
- Flash attention's backward: a float32 accumulator of the queries' gradient and one float32 per query, rows rounded
  up to 128 and head size to 32 (`flash_api.cpp`).
- cuDNN: chosen by a heuristic inside the library. Counted as a share of input and output of convolutions in one group
  with kernels larger than 1x1, the classes for which the library unrolls. Until a card is calibrated the share is 0 in
  the trace, and a plan's total has a share of 1 of the largest convolution (`ASSUMED_SHARE`) as far as there is room.
  Under `torch.backends.cudnn.benchmark` it can reach gigabytes for a moment.
- The mean squared error and its like: the values of all elements, before they are summed up.
- Context: 300 to 500 MiB with CUDA 12 and lazy loading, depending on the card.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mpt.planner.facts.calibration import CONTEXT_BYTES
from mpt.planner.trace.kept_sizes import ELEMENTWISE, least_bytes

MIB = 2**20
CUBLAS_BYTES = 2 * 4096 * 1024 + 8 * 16 * 1024
CUBLAS_BYTES_SM90 = 32 * MIB
CUBLAS_BYTES_DETERMINISTIC = 8 * 4096 * 1024
"""Under CUBLAS_WORKSPACE_CONFIG=:4096:8, which `train.deterministic` sets."""
MATRIX_PRODUCTS = frozenset(
    f"aten::{name}{place}"
    for name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv")
    for place in ("", "_")
)
CONVOLUTIONS = frozenset({"aten::convolution", "aten::convolution_backward", "aten::_convolution"})
ASSUMED_SHARE = 1.0
"""Of the largest convolution's input and output, for a card without a calibration. In xMem's measurements VGG-19 needed
0.85 of them, the most of 15 runs (`mpt/planner/facts/published.json`)."""
FLASH_BACKWARD = "aten::_scaled_dot_product_flash_attention_backward"


@dataclass
class Unseen:
    """Scratch space of one process. `scratch` is asked about every operator, in order."""

    capability: tuple[int, int]
    deterministic: bool = False
    context_bytes: int = CONTEXT_BYTES
    cudnn_share: float = 0.0
    """cuDNN's workspace as a share of the bytes of a dense convolution's input and output."""
    opened_handles: set[str] = field(default_factory=set)
    largest_convolution: int = 0
    """Bytes of the input and output of the largest dense convolution so far."""

    @property
    def cublas_bytes(self) -> int:
        """Bytes of one cuBLAS workspace."""
        if self.deterministic:
            return CUBLAS_BYTES_DETERMINISTIC
        return CUBLAS_BYTES_SM90 if self.capability == (9, 0) else CUBLAS_BYTES

    def opens_handle(self, operator: str, in_backward: bool) -> bool:
        """Return whether this operator is the first of its thread to need a cuBLAS workspace, which then stays."""
        thread = "backward" if in_backward else "main"
        if operator not in MATRIX_PRODUCTS or thread in self.opened_handles:
            return False
        self.opened_handles.add(thread)
        return True

    def scratch(self, operator: str, args: Any, result: Any) -> int:
        """Return the bytes of scratch that live while this operator runs."""
        if operator == FLASH_BACKWARD:
            return _flash_backward_bytes(args[1])
        if operator in CONVOLUTIONS:
            dense = _dense_convolution_bytes(operator, args, result)
            self.largest_convolution = max(self.largest_convolution, dense)
            return int(self.cudnn_share * dense)
        if operator in ELEMENTWISE and not result.dim():
            return least_bytes(operator, args, result)
        return 0


def _dense_convolution_bytes(operator: str, args: Any, result: Any) -> int:
    """Return the bytes of a convolution's input and output, 0 for one of several groups or with a kernel of 1x1."""
    is_backward = operator == "aten::convolution_backward"
    weight, groups = args[2 if is_backward else 1], args[9 if is_backward else 8]
    if groups > 1 or max(weight.shape[2:], default=1) == 1:
        return 0
    outside = args[:2] if is_backward else (args[0], result)
    return sum(tensor.numel() * tensor.element_size() for tensor in outside)


def _flash_backward_bytes(query: Tensor) -> int:
    batch, heads, length, size = query.shape
    rows = -(-length // 128) * 128
    return int(4 * batch * heads * rows * (-(-size // 32) * 32 + 1))
