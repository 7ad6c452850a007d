"""Changes to a step that a script of somebody else could make, made from outside while it is planned.

Each is a few lines that its author would write (`Changes.lines`): autocast around forward and loss, activation
checkpointing of repeated blocks, an optimizer with 8-bit state. Nothing in the script is edited.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from mpt.memory.low_bit_optimizer import AllocatedAdam
from mpt.nn.shared.named_modules import module_at
from mpt.parallel.local import is_sharded
from mpt.planner.device.fake_device import DEVICE
from mpt.planner.own.names import as_written

FEWEST_BLOCKS = 2
FEWEST_LAYERS = 6
"""Layers of a Sequential that is recomputed in pieces."""
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(frozen=True)
class Recomputed:
    """Parts of networks whose activations are computed again, by their paths."""

    lists: tuple[str, ...] = ()
    """Containers of like blocks, such as `model.layers`."""
    blocks: tuple[str, ...] = ()
    """Blocks that are attributes: `model.down1`, `model.down2`."""
    pieces: tuple[tuple[str, int], ...] = ()
    """Sequentials of layers, and the pieces of each."""
    has_statistics: bool = False
    """Whether there is a batch normalization among them."""

    def lines(self) -> list[str]:
        """Return the lines to write into the script."""
        found = [
            f"{as_written(path)}.forward = functools.partial(torch.utils.checkpoint.checkpoint_sequential, "
            f"{as_written(path)}, {count}, use_reentrant=False)"
            for path, count in self.pieces
        ]
        lists = [f"*{as_written(path)}" for path in self.lists]
        parts = [*lists, *map(as_written, self.blocks)]
        if parts:
            blocks = lists[0][1:] if parts == lists[:1] else f"[{', '.join(parts)}]"
            found.append(
                f"for block in {blocks}: block.forward = "
                "functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
            )
        if found and self.has_statistics:
            found[-1] += "  # updates the statistics of batch normalization twice"
        return found


NOTHING = Recomputed()


@dataclass(frozen=True)
class Changes:
    """Changes of the script."""

    autocast: str = ""
    """float16, bfloat16 or empty."""
    recompute: Recomputed = NOTHING
    low_bit_optimizer: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the training stays the same to rounding."""
        return not (self.autocast or self.low_bit_optimizer)

    def is_part_of(self, other: Changes) -> bool:
        """Return whether another one makes all of these changes."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return all(one in (theirs, type(one)()) for one, theirs in pairs)

    def lines(self) -> list[str]:
        """Return the line to write into the script for each change."""
        found = self.recompute.lines()
        if self.autocast:
            scaled = "; scale the loss with torch.amp.GradScaler" * (self.autocast == "float16")
            found.append(
                f'with torch.autocast("cuda", torch.{self.autocast}):  # around forward and loss{scaled}'
            )
        if self.low_bit_optimizer:
            found.append("bitsandbytes.optim.AdamW8bit (Adam8bit) in the place of torch.optim's")
        return found


def find_recomputed(modules: Mapping[str, nn.Module], updated: Container[int]) -> Recomputed:
    """Return the parts of networks that recomputing is worth trying on.

    `updated`: identities of the weights that are trained. Lists of like blocks, such as `model.layers`: of nested ones
    the outermost counts, and those whose blocks are single layers or only hold others are left out. In networks
    without any, like blocks that are attributes, and long Sequentials of layers.
    """
    lists: dict[str, nn.Module] = {}
    blocks: dict[str, nn.Module] = {}
    pieces: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def take(found: dict[str, nn.Module], path: str, module: nn.Module) -> None:
        if id(module) not in seen and any(id(one) in updated for one in module.parameters()):
            found[path] = module
            seen.update(map(id, module.modules()))

    for key, root in modules.items():
        for name, module in root.named_modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and _has_like_blocks(module):
                take(lists, f"{key}.{name}" if name else key, module)
        if not seen.isdisjoint(map(id, root.modules())):
            continue
        for name, module in root.named_modules():
            path = f"{key}.{name}" if name else key
            if isinstance(module, nn.Sequential):
                if len(module) >= FEWEST_LAYERS:
                    take(pieces, path, module)
                continue
            for child in _like_children(module):
                take(blocks, f"{path}.{child}", module.get_submodule(child))
    chosen = [*lists.values(), *blocks.values(), *pieces.values()]
    return Recomputed(
        tuple(lists),
        tuple(blocks),
        tuple((path, round(math.sqrt(len(one)))) for path, one in pieces.items()),  # type: ignore[arg-type]
        any(
            isinstance(one, _BatchNorm) and one.training
            for part in chosen
            for one in part.modules()
        ),
    )


def _like_children(module: nn.Module) -> list[str]:
    """Return the names of a module's children that are blocks, and not the only ones of their class."""
    if isinstance(module, LISTS):
        return []
    blocks = {
        name: type(child)
        for name, child in module.named_children()
        if any(child.children())
        and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        and not (isinstance(child, nn.Sequential) and len(child) >= FEWEST_LAYERS)
    }
    counts = Counter(blocks.values())
    return [name for name, kind in blocks.items() if counts[kind] >= FEWEST_BLOCKS]


def _has_like_blocks(blocks: Iterable[nn.Module]) -> bool:
    kinds = Counter(
        type(block)
        for block in blocks
        if any(block.children()) and type(block).forward is not nn.Module.forward
    )
    return bool(kinds) and max(kinds.values()) >= FEWEST_BLOCKS


def apply_to_modules(changes: Changes, modules: Mapping[str, nn.Module]) -> None:
    """Checkpoint the chosen parts."""
    chosen = changes.recompute
    blocks = [module_at(modules, path) for path in chosen.blocks]
    for path in chosen.lists:
        blocks += module_at(modules, path).children()
    for block in blocks:
        recomputed = functools.partial(checkpoint, block.forward, use_reentrant=False)
        setattr(block, "forward", recomputed)  # noqa: B010 - mypy calls it a method
    for path, count in chosen.pieces:
        whole = module_at(modules, path)
        in_pieces = functools.partial(checkpoint_sequential, whole, count, use_reentrant=False)
        setattr(whole, "forward", in_pieces)  # noqa: B010 - mypy calls it a method


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
