"""Adam and AdamW with 8-bit state: two bytes per weight instead of eight.

The state is quantised in blocks of 256 values, each with its own scale (Dettmers et al., "8-bit optimizers via
block-wise quantization", 2022), by one of two extras: bitsandbytes (CUDA kernels, the fastest) or torchao (compiled
PyTorch, any device with a compiler). The update is rounded differently from the full one, so training is not
bit-equal; small tensors (under 4096 values) keep full state.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.cpu_optimizer import replace_optimizers
from mpt.memory.trick import Trick

CONFLICTS = {
    "optimizer_in_backward": "8-bit optimizers keep state per parameter group; use one of the two",
    "cpu_optimizer": "8-bit states live on the device; use one of the two",
}
INSTALL = "pip install 'mpt[bitsandbytes]' or pip install 'mpt[torchao]'"


class Settings(Options):
    """Whose 8-bit optimizer is used."""

    shorthand: ClassVar[str | None] = "backend"

    backend: Literal["auto", "bitsandbytes", "torchao"] = "auto"
    """`auto` takes bitsandbytes on CUDA where it is installed, else torchao."""


class LowBitOptimizer(Trick):
    """Replaces each Adam or AdamW by its 8-bit form."""

    name, exact = "low_bit_optimizer", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def attach(self, run: Any) -> None:
        """Put 8-bit optimizers in place, with the same groups and hyperparameters."""
        for optimizer in run.optimizers.values():
            if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
                raise ConfigError(
                    f"memory.low_bit_optimizer: there is no 8-bit {type(optimizer).__name__}; "
                    "use optimizer=adam or adamw"
                )
            if any(group["amsgrad"] for group in optimizer.param_groups):
                raise ConfigError("memory.low_bit_optimizer: there is no 8-bit amsgrad; use optimizer.amsgrad=false")
        if torch._guards.detect_fake_mode() is not None:
            raise ConfigError(
                "memory.low_bit_optimizer: its kernels do not run on fake tensors, so this cannot be planned. "
                "Plan without it: the optimizer's state then shrinks to about a quarter"
            )
        backend = choose_backend(self.settings.backend, run.device)
        replace_optimizers(run, {o: make_low_bit(o, backend) for o in run.optimizers.values()})


def choose_backend(wanted: str, device: torch.device) -> str:
    """Return an installed backend; ConfigError with the command that installs one."""
    there = [name for name in ("bitsandbytes", "torchao") if find_spec(name) is not None]
    if wanted != "auto":
        if wanted not in there:
            raise ConfigError(
                f"memory.low_bit_optimizer: {wanted} is not installed; pip install 'mpt[{wanted}]', "
                "or take the 8-bit optimizer out"
            )
        return wanted
    usable = [name for name in there if name == "torchao" or device.type == "cuda"]
    if not usable:
        raise ConfigError(
            "memory.low_bit_optimizer: needs bitsandbytes (on CUDA) or torchao, and neither can be used on "
            f"{device.type} here; {INSTALL}"
        )
    return usable[0]


def make_low_bit(optimizer: Optimizer, backend: str) -> Optimizer:
    """Return the 8-bit form of an Adam or AdamW, over the same groups."""
    kind = type(optimizer).__name__
    module = importlib.import_module("bitsandbytes.optim" if backend == "bitsandbytes" else "torchao.optim")
    make = getattr(module, f"{kind}8bit")
    names = ("params", "lr", "betas", "eps", "weight_decay", "lr_scale")
    groups = [{name: group[name] for name in names if name in group} for group in optimizer.param_groups]
    first = groups[0]
    result: Optimizer = make(groups, lr=first["lr"], betas=first["betas"], eps=first["eps"])
    return result


def build(settings: Settings) -> LowBitOptimizer:
    """Build the trick."""
    return LowBitOptimizer(settings)
