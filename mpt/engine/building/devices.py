"""The device of a run."""

from __future__ import annotations

import torch

from mpt import accelerator
from mpt.errors import ConfigError


def choose_device(wanted: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda`, `xpu` or `cuda:1`; ConfigError when it is not there.

    A card that is named by number becomes the current one.
    """
    kind = accelerator.available()
    if wanted == "auto":
        return torch.device("cpu" if kind is None or kind in accelerator.CHOSEN_BY_NAME else kind)
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"device: {wanted!r} is no device; use auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    if device.type != kind:
        found = "CUDA device" if device.type == "cuda" else f"{device.type} device"
        instead = (
            f"torch's accelerator here is {kind}"
            if kind
            else "use --device cpu, or see `mpt doctor`"
        )
        raise ConfigError(
            f"device: {device.type} is asked for, but torch sees no {found}; {instead}"
        )
    if (device.index or 0) >= (count := torch.accelerator.device_count()):
        shown = "CUDA" if kind == "cuda" else kind
        raise ConfigError(
            f"device: found {wanted!r}; torch sees {count} {shown} device(s), from {kind}:0"
        )
    accelerator.select(device)
    return device
