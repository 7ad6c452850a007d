"""Changes to a step that a script of somebody else could make, made from outside while it is planned.

Each is a few lines that its author would write (`Changes.lines`): autocast around forward and loss, activation
checkpointing of repeated blocks, an optimizer with 8-bit state. Nothing in the script is edited.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from mpt.memory.low_bit_optimizer import AllocatedAdam
from mpt.nn.shared.named_modules import module_at
from mpt.parallel.local import is_sharded
from mpt.planner.device.fake_device import DEVICE
from mpt.planner.own.names import as_written

FEWEST_BLOCKS = 2


@dataclass(frozen=True)
class Changes:
    """Changes of the script."""

    autocast: str = ""
    """float16, bfloat16 or empty."""
    recompute: tuple[str, ...] = ()
    """Paths of containers whose blocks are checkpointed, such as `model.layers`."""
    low_bit_optimizer: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the training stays the same to rounding."""
        return not (self.autocast or self.low_bit_optimizer)

    def is_part_of(self, other: Changes) -> bool:
        """Return whether another one makes all of these changes."""
        pairs = zip(astuple(self), astuple(other), strict=True)
        return all(one in (theirs, type(one)()) for one, theirs in pairs)

    def lines(self) -> list[str]:
        """Return the line to write into the script for each change."""
        found = []
        if self.recompute:
            paths = [as_written(path) for path in self.recompute]
            blocks = paths[0] if len(paths) == 1 else f"[*{', *'.join(paths)}]"
            found.append(
                f"for block in {blocks}: block.forward = "
                "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
            )
        if self.autocast:
            scaled = "; scale the loss with torch.amp.GradScaler" * (self.autocast == "float16")
            found.append(
                f'with torch.autocast("cuda", torch.{self.autocast}):  # around forward and loss{scaled}'
            )
        if self.low_bit_optimizer:
            found.append("bitsandbytes.optim.AdamW8bit (Adam8bit) in the place of torch.optim's")
        return found


def find_block_lists(modules: Mapping[str, nn.Module], updated: Container[int]) -> tuple[str, ...]:
    """Return the paths of lists of like blocks, such as `model.layers`: those that recomputing is worth trying on.

    `updated`: identities of the weights that are trained. Of nested ones the outermost counts, and lists whose blocks
    are single layers or only hold others are left out.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for key, root in modules.items():
        for name, module in root.named_modules():
            path = f"{key}.{name}" if name else key
            if id(module) in seen or any(path.startswith(f"{outer}.") for outer in found):
                continue
            is_list = isinstance(module, nn.ModuleList | nn.Sequential) and _has_like_blocks(module)
            if is_list and any(id(weight) in updated for weight in module.parameters()):
                found[path] = module
                seen.update(map(id, module.modules()))
    return tuple(found)


def _has_like_blocks(blocks: Iterable[nn.Module]) -> bool:
    kinds = Counter(
        type(block)
        for block in blocks
        if any(block.children()) and type(block).forward is not nn.Module.forward
    )
    return bool(kinds) and max(kinds.values()) >= FEWEST_BLOCKS


def apply_to_modules(changes: Changes, modules: Mapping[str, nn.Module]) -> None:
    """Checkpoint the blocks of the chosen lists."""
    for path in changes.recompute:
        for block in module_at(modules, path).children():
            recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False)
            setattr(block, "forward", recomputed)  # noqa: B010 - mypy calls it a method


def apply_to_optimizers(changes: Changes, optimizers: Iterable[Optimizer]) -> None:
    """Let Adam and AdamW keep 8-bit state."""
    for optimizer in optimizers:
        if changes.low_bit_optimizer and takes_low_bits(optimizer):
            replacement = AllocatedAdam(optimizer.param_groups)
            setattr(optimizer, "step", replacement.step)  # noqa: B010 - mypy calls it a method


def takes_low_bits(optimizer: Optimizer) -> bool:
    """Return whether there is an 8-bit form of an optimizer; bitsandbytes has none for weights of FSDP2."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and not any(
        map(is_sharded, weights)
    )


class ForwardAutocast:
    """Autocast around forward and loss: everything but backward passes and optimizers' steps."""

    def __init__(self, changes: Changes) -> None:
        self.dtype = getattr(torch, changes.autocast) if changes.autocast else None

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Autocast inside the block."""
        with self._autocast(True):
            yield

    @contextmanager
    def outside(self) -> Iterator[None]:
        """No autocast inside the block, if `around_step` turned it on."""
        with self._autocast(False):
            yield

    def _autocast(self, is_on: bool) -> AbstractContextManager[Any]:
        if self.dtype is None:
            return nullcontext()
        if not is_on:
            torch.clear_autocast_cache()
        return torch.autocast(DEVICE, self.dtype, enabled=is_on)
