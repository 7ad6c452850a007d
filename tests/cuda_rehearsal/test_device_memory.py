"""The pretend device's memory: statistics, limits, workspaces and segments as CUDA's caching allocator has them."""

import gc
import os

import pytest
import torch

from mpt.planner.trace.unseen import CUBLAS_BYTES, CUBLAS_BYTES_DETERMINISTIC

MIB = 2**20


@pytest.mark.cards("rtx2060", memory_bytes=1024 * MIB)
def test_memory_is_the_planners_allocators() -> None:
    assert torch.cuda.memory_allocated() == 0
    small = torch.ones(3, device="cuda")
    assert torch.cuda.memory_allocated() == 512
    assert torch.cuda.memory_reserved() == 2 * MIB
    large = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    del large
    gc.collect()
    assert torch.cuda.memory_allocated() == 512
    assert torch.cuda.max_memory_allocated() == 30 * MIB + 512
    assert torch.cuda.memory_reserved() == 32 * MIB
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == 2 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 512
    with pytest.raises(
        torch.OutOfMemoryError, match=r"CUDA out of memory. Tried to allocate 1024.00 MiB"
    ):
        torch.empty(1024 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(0.1)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    assert "CUDA OOMs: 2" in torch.cuda.memory_summary()
    free, total = torch.cuda.mem_get_info()
    assert total == 1024 * MIB
    assert 0 < free < total
    assert small.sum().item() == 3


def test_cublas_takes_a_workspace_that_stays_until_it_is_cleared() -> None:
    matrix = torch.ones(8, 8, device="cuda")
    torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]  # which other tests may have left
    before = torch.cuda.memory_allocated()
    # A test before this one may have trained with train.deterministic, which sets the variable for its process.
    wanted = (
        CUBLAS_BYTES_DETERMINISTIC if os.environ.get("CUBLAS_WORKSPACE_CONFIG") else CUBLAS_BYTES
    )
    for _ in range(2):
        matrix @ matrix
        taken = torch.cuda.memory_allocated() - before
        assert taken == wanted
        matrix @ matrix
        assert torch.cuda.memory_allocated() - before == taken
        torch._C._cuda_clearCublasWorkspaces()  # type: ignore[attr-defined]
        assert torch.cuda.memory_allocated() == before


@pytest.mark.cards("rtx2060", memory_bytes=1024 * MIB)
def test_growing_tensors_leave_segments_behind_unless_segments_grow() -> None:
    def grow() -> tuple[int, int]:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        retries = torch.cuda.memory_stats()["num_alloc_retries"]
        for size in (30, 40, 50, 60):
            torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
        return torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()[
            "num_alloc_retries"
        ] - retries

    assert grow() == (180 * MIB, 0)
    torch.cuda.set_per_process_memory_fraction(100 / 1024)
    assert grow() == (70 * MIB, 2)
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    assert grow() == (60 * MIB, 0)


def test_the_environment_is_asked_for_growing_segments_at_the_first_request() -> None:
    # the card is known before `mpt train` has read its configuration
    assert torch.cuda.get_device_name()
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    for size in (40, 60):
        torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_reserved() == 60 * MIB
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"  # too late
    torch.empty(80 * MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.max_memory_reserved() == 80 * MIB
