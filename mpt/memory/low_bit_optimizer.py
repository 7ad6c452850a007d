"""Adam, AdamW and Muon with state in few bits: two bytes per weight instead of eight, or four, or one.

8-bit state is quantised in blocks of 256 values, each with its own scale (Dettmers et al., "8-bit optimizers via
block-wise quantization", 2022), by one of two extras: bitsandbytes (CUDA kernels, the fastest) or torchao (compiled
PyTorch, any device with a compiler); or by `own`, plain PyTorch that needs neither, has 4 and 16 bits too, and Muon's
momentum (`mpt.memory.low_bit.states`). The update is rounded differently from the full one, so training is not
bit-equal; small tensors (under 4096 values) keep full state.
"""

from __future__ import annotations

import importlib
from collections.abc import Container
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.cpu_optimizer import refuse_own_steps
from mpt.memory.low_bit.states import LowBitAdam, LowBitMuon
from mpt.optim.muon import MuonWithAdam
from mpt.seams import MemoryTrick, Precision

CONFLICTS = {
    "optimizer_in_backward": "8-bit optimizers keep state per parameter group; use one of the two",
    "cpu_optimizer": "8-bit states live on the device; use one of the two",
}
RELIEVES = "optimizer"
PROPOSALS = (True,)
RANK = 3
LOSSY = True
BLOCK, SMALLEST_QUANTISED = 256, 4096
INSTALL = "pip install bitsandbytes or pip install torchao"


class Settings(Options):
    """Whose 8-bit optimizer is used."""

    shorthand: ClassVar[str | None] = "backend"

    backend: Literal["auto", "bitsandbytes", "torchao", "own"] = "auto"
    """`auto` takes bitsandbytes if it is installed, else torchao; `own` needs neither and is slower."""
    bits: Literal[4, 8, 16] = 8
    """Bits of each running mean; 4 and 16 (bfloat16), and Muon, are `own`'s."""


class LowBitOptimizer(MemoryTrick):
    """Replaces each Adam or AdamW by its 8-bit form."""

    name, exact = "low_bit_optimizer", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def replace_optimizer(self, optimizer: Optimizer, precision: Precision) -> Optimizer:
        """Return an 8-bit optimizer with the same groups and hyperparameters."""
        refuse_own_steps(optimizer, precision, "memory.low_bit_optimizer")
        own = self.own_optimizer(optimizer)
        if own is not None:
            return own
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            raise ConfigError(
                f"memory.low_bit_optimizer: there is no 8-bit {type(optimizer).__name__}; use optimizer=adam or adamw"
            )
        if any(group["amsgrad"] for group in optimizer.param_groups):
            raise ConfigError(
                "memory.low_bit_optimizer: there is no 8-bit amsgrad; use optimizer.amsgrad=false"
            )
        if torch._guards.detect_fake_mode() is not None:
            return AllocatedAdam(optimizer.param_groups)
        return make_low_bit(optimizer, choose_backend(self.settings.backend))

    def own_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer that is written here, if settings or the kind ask for it."""
        backend, bits = self.settings.backend, self.settings.bits
        is_muon = type(optimizer) is MuonWithAdam
        if backend not in ("own", "auto") and (bits != 8 or is_muon):
            raise ConfigError(
                f"memory.low_bit_optimizer: {backend} has no {bits}-bit {'Muon' if is_muon else 'state here'}; use "
                "backend: own"
            )
        groups = [dict(group) for group in optimizer.param_groups]
        if any(group.get("amsgrad") for group in groups):
            return None
        if is_muon:
            return LowBitMuon(groups, bits)
        is_adam = type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        if not is_adam or (backend != "own" and bits == 8):
            return None
        return LowBitAdam(groups, bits, type(optimizer) is torch.optim.AdamW)


class AllocatedAdam(Optimizer):
    """Allocates as bitsandbytes' Adam8bit and computes nothing: its kernels do not run on fake tensors.

    Per tensor of at least 4096 values: two codes of a byte per value, and a float32 scale per 256 of them; smaller
    tensors keep float32 state. All share two tables of the codes' 256 values. Its kernels change weights in place
    without temporaries.
    """

    def __init__(self, groups: list[dict[str, Any]], whole: Container[int] = ()) -> None:
        """`whole`: identities of parameters whose state is not quantised."""
        super().__init__([dict(group) for group in groups], {})
        self._whole = whole
        self._tables: dict[str, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Allocate the state at the first step of each parameter."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter in self.state:
                    continue
                is_large = parameter.numel() >= SMALLEST_QUANTISED
                quantised = is_large and id(parameter) not in self._whole
                dtype = torch.uint8 if quantised else torch.float32
                state = {
                    name: torch.zeros_like(parameter, dtype=dtype) for name in ("state1", "state2")
                }
                if quantised:
                    if not self._tables:
                        self._tables = {
                            name: parameter.new_zeros(BLOCK, dtype=torch.float32)
                            for name in ("qmap1", "qmap2")
                        }
                    blocks = (-(-parameter.numel() // BLOCK),)
                    state |= {
                        name: parameter.new_zeros(blocks, dtype=torch.float32)
                        for name in ("absmax1", "absmax2")
                    }
                    state |= self._tables
                self.state[parameter] = state
        return loss


def choose_backend(wanted: str) -> str:
    """Return an installed backend; ConfigError with the command that installs one."""
    there = [name for name in ("bitsandbytes", "torchao") if find_spec(name) is not None]
    if wanted != "auto":
        if wanted not in there:
            raise ConfigError(
                f"memory.low_bit_optimizer: {wanted} is not installed; pip install {wanted}, "
                "or take the 8-bit optimizer out"
            )
        return wanted
    if not there:
        raise ConfigError(
            f"memory.low_bit_optimizer: needs bitsandbytes or torchao, and neither is installed; {INSTALL}"
        )
    return there[0]


def make_low_bit(optimizer: Optimizer, backend: str) -> Optimizer:
    """Return the 8-bit form of an Adam or AdamW, over the same groups."""
    kind = type(optimizer).__name__
    module = importlib.import_module(
        "bitsandbytes.optim" if backend == "bitsandbytes" else "torchao.optim"
    )
    make = getattr(module, f"{kind}8bit")
    names = ("params", "lr", "betas", "eps", "weight_decay", "lr_scale")
    groups = [
        {name: group[name] for name in names if name in group} for group in optimizer.param_groups
    ]
    first = groups[0]
    result: Optimizer = make(groups, lr=first["lr"], betas=first["betas"], eps=first["eps"])
    result.register_state_dict_post_hook(flatten_state)
    result.register_load_state_dict_pre_hook(rebuild_state)
    if any(isinstance(group["lr"], Tensor) for group in result.param_groups):
        hold_rates_as_tensors(result)
    return result


def hold_rates_as_tensors(optimizer: Optimizer) -> None:
    """Let each step, and nothing else, see the groups' rates as tensors: torchao compiles its step and refuses numbers,
    which schedules set, logs read and checkpoints hold.
    """
    rates: list[float] = []

    def before(_: Optimizer, args: Any, kwargs: Any) -> None:
        rates[:] = [float(group["lr"]) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = torch.tensor(rate)

    def after(_: Optimizer, args: Any, kwargs: Any) -> None:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def flatten_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Take torchao's state tensors apart: a checkpoint holds plain tensors and runs no other package's classes."""

    def flatten(value: Any) -> Any:
        if not isinstance(value, Tensor) or not hasattr(value, "__tensor_flatten__"):
            return value
        names, (signed, dtype) = value.__tensor_flatten__()
        tensors = {name: getattr(value, name) for name in names}
        return {**tensors, "signed": signed, "dtype": str(dtype).removeprefix("torch.")}

    return {
        **state,
        "state": {
            key: {n: flatten(v) for n, v in own.items()} for key, own in state["state"].items()
        },
    }


def rebuild_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Put torchao's state tensors together again."""

    def rebuild(value: Any) -> Any:
        if not isinstance(value, dict) or set(value) != {
            "codes",
            "scale",
            "qmap",
            "signed",
            "dtype",
        }:
            return value
        kind = importlib.import_module("torchao.optim.subclass_8bit").OptimState8bit
        dtype = getattr(torch, value["dtype"])
        return kind(value["codes"], value["scale"], value["qmap"], value["signed"], dtype)

    return {
        **state,
        "state": {
            key: {n: rebuild(v) for n, v in own.items()} for key, own in state["state"].items()
        },
    }


def build(settings: Settings) -> LowBitOptimizer:
    """Build the trick."""
    return LowBitOptimizer(settings)
