"""The limit of a card's memory for a training (`memory.ceiling`), so that a larger allocation is refused.

On Windows and in its Linux the driver moves the excess into system memory: training continues, many times
slower, without an error. PyTorch's allocator has a limit of its own, a share of the card
(`set_per_process_memory_fraction`), beyond which it raises out of memory, as a driver on Linux does. It counts the
allocator's segments and neither the context nor libraries (https://github.com/pytorch/pytorch/issues/58466), so these
are taken off: as the card's calibration counts them, or as measured on the card.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpt.config.sizes import describe_bytes, parse_budget
from mpt.errors import ConfigError
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import installed_gpu
from mpt.run.process import operating_system

if TYPE_CHECKING:
    import torch


def set_ceiling(wanted: str | None, device: torch.device) -> str:
    """Limit this process's allocator on a card; return a line about it, "" if nothing is limited.

    Before the first allocation: the memory that is free is this process's own to take. Raises ConfigError for a ceiling
    that the context alone exceeds.
    """
    from mpt import accelerator

    is_limited = accelerator.has_allocator(device)
    if (
        not is_limited
        or wanted is None
        or (wanted == "auto" and not operating_system.moves_overflow())
    ):
        return ""
    _, total = accelerator.free_and_total(device)
    context = context_bytes(device)
    if wanted == "auto":
        # Libraries are loaded with the first step: of the context, which is open, it is not known how much there is.
        share = total - max(accelerator.outside_bytes(device), context)
        why = "this system moves what does not fit into system memory instead of refusing it"
    else:
        share = min(parse_budget(wanted, "memory.ceiling"), total) - context
        why = f"memory.ceiling={wanted}" + (
            f", with a context of {describe_bytes(context)}" if context else ""
        )
    if share <= 0:
        raise ConfigError(
            f"memory.ceiling: {wanted} leaves nothing beside a context of {describe_bytes(context)}"
        )
    accelerator.limit_share(device, min(1.0, share / total))
    return f"tensors may take {describe_bytes(share)} of the {describe_bytes(total)} on {device}: {why}"


def context_bytes(device: torch.device) -> int:
    """Return the bytes of a card's context and libraries, from its calibration; of a card that has none, 0."""
    if device.type != "cuda":
        return 0
    import torch

    properties = torch.cuda.get_device_properties(device)
    gpu = installed_gpu(
        properties.name, properties.total_memory, (properties.major, properties.minor)
    )
    return load_calibration(gpu.name).context_bytes
