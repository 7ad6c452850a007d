"""Memory that no tensor shows: library workspaces, scratch inside kernels, and the CUDA context.

The trace sees tensors. cuBLAS, cuDNN and attention kernels also ask the caching allocator for scratch space, and the
CUDA context takes memory outside it. Each such part is here, with the source of its size, and nowhere else; the
calibration of one real run (`mpt.planner.facts.calibration`) replaces the parts that cannot be known beforehand.

- cuBLAS: one workspace per handle and stream, 8 MiB + 128 KiB by default, 32 MiB on compute capability 9.0
  (`CUDABlas.cpp`, `parseChosenWorkspaceSize`). Autograd's thread has a handle of its own, so backward adds a second
  one.
- Sums, copies and attention's gradients: `mpt.planner.trace.kernel_scratch`.
- cuDNN: chosen by a heuristic inside the library. On a calibrated card counted as a share of input and output of
  convolutions in one group with kernels larger than 1x1. Until then the share is 0, and a plan's total has as much as
  `mpt.planner.trace.convolution_workspaces` adds to what is reserved, as far as there is room. Under
  `torch.backends.cudnn.benchmark` it can reach gigabytes for a moment.
- Context: 300 to 500 MiB with CUDA 12 and lazy loading, depending on the card.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.multiprocessors import multiprocessors, threads_of_one
from mpt.planner.trace import convolution_workspaces
from mpt.planner.trace.kernel_scratch import ATTENTION, scratch_bytes
from mpt.planner.trace.reductions import REDUCTIONS, reduction_bytes

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
UNCALIBRATED = Calibration()


@dataclass
class Unseen:
    """Scratch space of one process. `scratch` is asked about every operator, in order."""

    capability: tuple[int, int]
    deterministic: bool = False
    cudnn_share: float = 0.0
    """cuDNN's workspace as a share of the bytes of a dense convolution's input and output."""
    multiprocessors: int = 28
    """Of the card."""
    opened_handles: set[str] = field(default_factory=set)

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

    def scratch(self, operator: str, args: Any, result: Any, is_written: bool = False) -> int:
        """Return the bytes of scratch that live while this operator runs, none if a compiler writes its kernel."""
        if operator in CONVOLUTIONS:
            dense = _dense_convolution_bytes(operator, args, result)
            return int(self.cudnn_share * dense) + scratch_bytes(operator, args, result)
        if is_written and ATTENTION not in operator:
            return 0
        if operator in REDUCTIONS:
            threads = threads_of_one(self.capability)
            return reduction_bytes(operator, args, result, self.multiprocessors, threads)
        return scratch_bytes(operator, args, result)

    def workspaces(self, operator: str, args: Any, result: Any) -> Iterable[int]:
        """Return the bytes of each workspace that cuDNN asks for where there is room."""
        if operator not in CONVOLUTIONS or self.cudnn_share:
            return ()
        in_tf32 = self.capability >= (8, 0) and convolution_workspaces.convolutions_in_tf32()
        return convolution_workspaces.workspaces(
            operator, args, result, self.multiprocessors, in_tf32
        )


def unseen_on(
    gpu: Gpu,
    calibration: Calibration = UNCALIBRATED,
    deterministic: bool = False,
    kind: type[Unseen] = Unseen,
) -> Unseen:
    """Return the scratch space of a new process on a card."""
    return kind(
        gpu.capability,
        deterministic,
        calibration.cudnn_share,
        multiprocessors(gpu),
    )


def _dense_convolution_bytes(operator: str, args: Any, result: Any) -> int:
    """Return the bytes of a convolution's input and output, 0 for one of several groups or with a kernel of 1x1."""
    is_backward = operator == "aten::convolution_backward"
    weight, groups = args[2 if is_backward else 1], args[9 if is_backward else 8]
    if groups > 1 or max(weight.shape[2:], default=1) == 1:
        return 0
    outside = args[:2] if is_backward else (args[0], result)
    return sum(tensor.numel() * tensor.element_size() for tensor in outside)
