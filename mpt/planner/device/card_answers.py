"""Answers to a script's questions about the card, on a machine without one: `torch.cuda` and `torch.accelerator`.

The card is empty and of the size of the GPU that is planned for; its streams and events do nothing, and what changes
its state (a limit of memory, a history of it) changes nothing. Random numbers are nobody's.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor, distributed

from mpt.planner.facts.gpus import Gpu

CUDA_VERSION, NCCL_VERSION = "12.8", (2, 27, 5)
"""Releases that a build of torch without CUDA is taken to have."""

_COUNTED = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_METERS = ("utilization", "temperature", "power_draw", "clock_rate", "memory_usage")
"""Questions that the driver answers."""
_CALLS = (
    "synchronize",
    "empty_cache",
    "empty_host_cache",
    "set_device",
    "set_stream",
    "ipc_collect",
    "init",
    "set_per_process_memory_fraction",
    "set_sync_debug_mode",
    "reset_peak_memory_stats",
    "reset_peak_host_memory_stats",
    "reset_accumulated_memory_stats",
    "reset_accumulated_host_memory_stats",
    "reset_max_memory_allocated",
    "reset_max_memory_cached",
    "_record_memory_history",
    "_dump_snapshot",
    "start",
    "stop",
)
"""Functions that do nothing; the last two are the profiler's."""
_STREAMS = (
    "Stream",
    "ExternalStream",
    "Event",
    "stream",
    "current_stream",
    "default_stream",
    "device",
    "device_of",
)


class Inert:
    """A stream, an event or a choice of a card, which does nothing: the step is planned as if it had one stream."""

    device: torch.device

    def record_event(self, event: Any = None) -> Any:
        """Return an event."""
        return event or Inert()

    def elapsed_time(self, other: Any) -> float:
        """Return no time."""
        return 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _answers(gpu: Gpu, target: torch.device) -> dict[str, Any]:
    """Return replacements for functions of `torch.cuda`, one each: the compiler's table refuses duplicates."""
    properties = SimpleNamespace(
        name=gpu.name,
        total_memory=gpu.usable_bytes,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=1,  # of cards that are compared with each other
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
    )
    return {
        **{name: lambda *args, **kwargs: None for name in _CALLS},
        **{
            name: lambda *args, **kwargs: 0
            for name in (*_COUNTED, *_METERS, "device_memory_used", "current_device")
        },
        **{name: type("Inert", (Inert,), {"device": target}) for name in _STREAMS},
        "cudart": Inert,
        "memory_summary": lambda *args, **kwargs: "",
        "memory_stats": lambda device=None: Counter(),
        "memory_snapshot": lambda *args, **kwargs: [],
        "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": []},
        "get_allocator_backend": lambda: "native",
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "get_sync_debug_mode": lambda: 0,
        "can_device_access_peer": lambda device, peer: device != peer,
        "is_available": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: int(os.environ.get("WORLD_SIZE", 1)),
        "is_bf16_supported": lambda including_emulation=True: gpu.has_bfloat16,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (gpu.usable_bytes, gpu.usable_bytes),
    }


def _random_states() -> dict[str, Any]:
    """Return replacements for functions of the card's random numbers, which no plan draws."""

    def state(device: Any = "cuda") -> Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    names = (
        "set_rng_state",
        "set_rng_state_all",
        "manual_seed",
        "manual_seed_all",
        "seed",
        "seed_all",
    )
    return {
        **{name: lambda *args, **kwargs: None for name in names},
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
        "initial_seed": lambda: 0,
    }


def _accelerator_answers(gpu: Gpu, target: torch.device) -> dict[str, Any]:
    """Return replacements for functions of `torch.accelerator`, by which a script need not name CUDA."""
    names = {
        "current_device_index": "current_device",
        "set_device_index": "set_device",
        "get_memory_info": "mem_get_info",
    }
    same = (
        "device_count",
        "synchronize",
        "empty_cache",
        "memory_stats",
        "reset_peak_memory_stats",
        "reset_accumulated_memory_stats",
        *_COUNTED,
    )
    answers = _answers(gpu, target)
    found = torch.device(target.type)
    # as in a build without CUDA: optimizers ask what they find for its stream
    accelerator = None if target.type == "cpu" else found
    return {
        **{name: answers[name] for name in same},
        **{name: answers[other] for name, other in names.items()},
        "is_available": lambda: True,
        "current_accelerator": lambda check_available=False: accelerator,
    }


def _build_answers(gpu: Gpu) -> list[Any]:
    """Return what a build of torch with CUDA says of itself: scripts ask for it before they use bfloat16.

    One for ROCm has no release of CUDA, and calls its own exchange NCCL.
    """
    release = None if gpu.is_amd else torch.version.cuda or CUDA_VERSION
    return [
        mock.patch.object(torch.version, "cuda", release),
        mock.patch.object(torch.cuda.nccl, "version", return_value=NCCL_VERSION),
        mock.patch.object(distributed, "is_nccl_available", return_value=True),
    ]


@contextmanager
def questions_answered(
    gpu: Gpu, target: torch.device, accelerator: torch.device | None = None
) -> Iterator[None]:
    """Answer a script's questions about the card inside the block.

    `target`: the device in its place, which is the accelerator too if none is named.
    """
    answers = {**_answers(gpu, target), **_random_states()}
    with ExitStack() as stack:
        for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.profiler):
            named = {name: one for name, one in answers.items() if hasattr(module, name)}
            stack.enter_context(mock.patch.multiple(module, **named))
        others = _accelerator_answers(gpu, accelerator or target)
        stack.enter_context(mock.patch.multiple(torch.accelerator, **others))
        for one in _build_answers(gpu):
            stack.enter_context(one)
        yield
