"""How much memory one pass of inference takes at a size, without making it: the network is run on fake tensors.

The figure is the peak of live tensors, weights included. What a driver takes for itself on CUDA is taken off a budget
first (`room_of`); of the rest `SPARE_SHARE` is left for kernels' workspaces and for what the allocator splits off.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.config.sizes import describe_bytes
from mpt.errors import MemoryBudgetError
from mpt.planner.facts.calibration import load_calibration
from mpt.run.process.memory_meter import MemoryMeter
from mpt.systems.dain.inference.tiles import TileGrid, grid_of_tiles, tiles_of
from mpt.systems.dain.nn.operators.interpolation import Interpolator

SPARE_SHARE = 0.2
FRAME_BYTES = 4 * 3 * 4
"""Per pixel: four float32 frames, which are two inputs, the sum of tiles and their weights."""


@dataclass(frozen=True)
class PassMemory:
    """Peak bytes of one pass as a line over its pixels: `fixed` for the weights, `per_pixel` for the rest."""

    fixed: float
    per_pixel: float

    def peak_bytes(self, height: int, width: int) -> float:
        """Return the peak for a frame or tile whose sides are multiples already."""
        return self.fixed + self.per_pixel * height * width


def measure_pass(
    net: Interpolator, height: int, width: int, dtype: torch.dtype | None, times: int = 1
) -> int:
    """Return the peak bytes of making that many frames between two, under autocast to `dtype` where one is given."""
    twin = copy.deepcopy(net).cpu().eval()
    context = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), context:
        first, last, time = (
            torch.empty(1, 3, height, width),
            torch.empty(1, 3, height, width),
            torch.empty(1, times),
        )
        with MemoryMeter(lambda: {"parameters": twin.parameters()}) as meter:
            twin(first, last, time)
    return meter.split.peak_bytes


def pass_memory(net: Interpolator, dtype: torch.dtype | None = None, times: int = 1) -> PassMemory:
    """Return the line through two sizes, for a pass that makes frames at that many times.

    From the second time on each adds its frame and its number alone, which need not be tried.
    """
    small, large = 4 * net.multiple, 8 * net.multiple
    one, other = (
        measure_pass(net, side, side, dtype, min(times, 2))
        + max(0, times - 2) * 4 * (3 * side**2 + 1)
        for side in (small, large)
    )
    per_pixel = (other - one) / (large**2 - small**2)
    return PassMemory(one - per_pixel * small**2, per_pixel)


def room_of(budget_bytes: int, device: torch.device, pixels: int) -> int:
    """Return the bytes of a budget that a pass over tiles can have on a device: on a GPU without the CUDA context, and
    without the whole frames alongside it, of that many pixels.

    Raises MemoryBudgetError for a budget that the context exceeds.
    """
    if device.type != "cuda":
        return budget_bytes
    context = load_calibration(torch.cuda.get_device_name(device)).context_bytes
    if context >= budget_bytes:
        raise MemoryBudgetError(
            f"--vram: {describe_bytes(budget_bytes)} is less than the CUDA context takes ({describe_bytes(context)})"
        )
    return budget_bytes - context - FRAME_BYTES * pixels


def choose_tiles(
    net: Interpolator, height: int, width: int, memory: PassMemory, room_bytes: int
) -> TileGrid:
    """Return the fewest tiles that fit into what tensors can have. Raises MemoryBudgetError if not even small ones
    do.
    """
    overlap, room = 2 * net.margin, room_bytes * (1 - SPARE_SHARE)
    for tile in tiles_of(height, width, overlap, net.multiple):
        needed = memory.peak_bytes(*tile)
        if needed <= room:
            return grid_of_tiles(height, width, tile, overlap, net.multiple)
    raise MemoryBudgetError(
        f"--vram: a tile of {tile[1]} x {tile[0]} takes {describe_bytes(needed)}, more than "
        f"{describe_bytes(max(0, room))} ({1 - SPARE_SHARE:.0%} of what is left of it); use --half or a smaller network"
    )
