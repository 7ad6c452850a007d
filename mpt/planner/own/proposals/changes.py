"""Changes to a step that a script of somebody else could make: autocast around forward and loss, activation
checkpointing of repeated blocks, an optimizer with 8-bit state.

Each is a few lines that its author would write. Where they have a place in the script's text, its text with them is
planned (`mpt.planner.own.proposals.edits`); else the change is made from outside while the script as it stands is
planned.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
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
from mpt.planner.own.text.names import as_written

FEWEST_BLOCKS = 2
FEWEST_LAYERS = 6
"""Layers of a Sequential that is recomputed in pieces."""
FEWEST_IN_RUN = 3
ITEM = re.compile(r"(.*)\[(\d+)\]")
"""A block that is one of a list."""
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
    networks: tuple[tuple[str, str], ...] = ()
    """Networks of libraries that recompute their blocks themselves, and the call that lets them."""
    has_statistics: bool = False
    """Whether there is a batch normalization among them."""

    @property
    def paths(self) -> list[str]:
        """The paths of all parts."""
        named = [path for path, _ in (*self.pieces, *self.networks)]
        return [*self.lists, *self.blocks, *named]

    def only(self, paths: Container[str]) -> Recomputed:
        """Return those of the parts that are at some paths."""
        return replace(
            self,
            lists=tuple(one for one in self.lists if one in paths),
            blocks=tuple(one for one in self.blocks if one in paths),
            pieces=tuple(one for one in self.pieces if one[0] in paths),
            networks=tuple(one for one in self.networks if one[0] in paths),
        )

    def lines(self, networks: Mapping[str, nn.Module], name: str = "block") -> list[str]:
        """Return the lines to write into the script; `name`: of the loop's variable."""
        found = [f"{as_written(path, networks)}.{call}" for path, call in self.networks]
        for path, count in self.pieces:
            whole = as_written(path, networks)
            found.append(
                f"{whole}.forward = functools.partial(torch.utils.checkpoint.checkpoint_sequential, "
                f"{whole}, {count}, use_reentrant=False)"
            )
        lists = [f"*{as_written(path, networks)}" for path in self.lists]
        parts = [*lists, *in_runs(as_written(path, networks) for path in self.blocks)]
        if parts:
            is_one = len(parts) == 1 and parts[0].startswith("*")
            blocks = parts[0][1:] if is_one else f"[{', '.join(parts)}]"
            found.append(
                f"for {name} in {blocks}: {name}.forward = "
                f"functools.partial(torch.utils.checkpoint.checkpoint, {name}.forward, use_reentrant=False)"
            )
        if found and self.has_statistics:
            found[-1] += "  # updates the statistics of batch normalization twice"
        return found


def in_runs(blocks: Iterable[str]) -> list[str]:
    """Return blocks as Python has them, those that follow each other in a list as a part of it: `*layers[2:9]`."""
    runs: list[list[str]] = []
    for block in blocks:
        if not (runs and _follows(runs[-1][-1], block)):
            runs.append([])
        runs[-1].append(block)
    found: list[str] = []
    for run in runs:
        first, last = ITEM.fullmatch(run[0]), ITEM.fullmatch(run[-1])
        if len(run) < FEWEST_IN_RUN or first is None or last is None:
            found += run
        else:
            found.append(f"*{first[1]}[{first[2]}:{int(last[2]) + 1}]")
    return found


def _follows(block: str, other: str) -> bool:
    one, next_one = ITEM.fullmatch(block), ITEM.fullmatch(other)
    return bool(one and next_one and one[1] == next_one[1] and int(one[2]) + 1 == int(next_one[2]))


NOTHING = Recomputed()


@dataclass(frozen=True)
class Changes:
    """Changes of the script."""

    autocast: str = ""
    """float16, bfloat16 or empty."""
    recompute: Recomputed = NOTHING
    low_bit_optimizer: bool = False
    keeps_embeddings: bool = False
    """Its state of embeddings is not in 8 bits: so transformers asks bitsandbytes for it."""


def unplaced(
    recomputed: Recomputed, networks: Mapping[str, nn.Module], half: str
) -> dict[str, list[str]]:
    """Return the lines of each change where no place for them is known."""
    scaled = "; scale the loss with torch.amp.GradScaler" * (half == "float16")
    return {
        "recompute": recomputed.lines(networks),
        "autocast": [
            f'with torch.autocast("cuda", torch.{half}):  # around forward and loss{scaled}'
        ],
        "optimizer": ["bitsandbytes.optim.AdamW8bit (Adam8bit) in the place of torch.optim's"],
    }


def find_recomputed(
    modules: Mapping[str, nn.Module], updated: Container[int], rewriting: Container[int] = ()
) -> Recomputed:
    """Return the parts of networks that recomputing is worth trying on.

    `updated`: identities of the weights that are trained. `rewriting`: of networks that change a list that they are
    given (`mpt.planner.own.proposals.rewritten`). Networks that can do it themselves; lists of like blocks,
    such as `model.layers`: of nested ones the outermost counts, those whose blocks are single layers are left out, and
    of lists without like blocks in lists, those that are like each other. In networks without any, like blocks that are
    attributes, and long Sequentials of layers.
    """
    lists: dict[str, nn.Module] = {}
    blocks: dict[str, nn.Module] = {}
    pieces: dict[str, nn.Module] = {}
    whole: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def take(found: dict[str, nn.Module], path: str, module: nn.Module) -> None:
        if id(module) not in seen and any(id(one) in updated for one in module.parameters()):
            found[path] = module
            seen.update(map(id, module.modules()))

    for key, root in modules.items():
        for name, module in root.named_modules():
            if getattr(module, "is_gradient_checkpointing", False) is True:
                seen.update(map(id, module.modules()))  # it does already
            elif recompute_call(module):
                take(whole, f"{key}.{name}" if name else key, module)
        for name, module in root.named_modules():
            if isinstance(module, nn.ModuleList | nn.Sequential) and _has_like_blocks(module):
                path = f"{key}.{name}" if name else key
                # without a place that is left out (None), which has no forward pass to recompute
                if not any(
                    one is None or id(one) in rewriting or changes_its_input(one) for one in module
                ):
                    take(lists, path, module)
                    continue
                for child, part in module.named_children():
                    if _can_be_recomputed(part) and id(part) not in rewriting:
                        take(blocks, f"{path}.{child}", part)
        for name, module in root.named_modules():
            for inner, part in _blocks_in_pairs(module).items():
                if id(part) not in rewriting:
                    take(blocks, f"{key}.{name}.{inner}" if name else f"{key}.{inner}", part)
        if not seen.isdisjoint(map(id, root.modules())):
            continue
        for name, module in root.named_modules():
            path = f"{key}.{name}" if name else key
            if isinstance(module, nn.Sequential):
                if pieces_of(module):
                    take(pieces, path, module)
                continue
            for child in _like_children(module):
                take(blocks, f"{path}.{child}", module.get_submodule(child))
    chosen = [*lists.values(), *blocks.values(), *pieces.values(), *whole.values()]
    return Recomputed(
        tuple(lists),
        tuple(blocks),
        tuple((path, pieces_of(one)) for path, one in pieces.items()),
        tuple((path, recompute_call(one)) for path, one in whole.items()),
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
        if _can_be_recomputed(child)
        and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        and not (isinstance(child, nn.Sequential) and len(child) >= FEWEST_LAYERS)
    }
    counts = Counter(blocks.values())
    return [name for name, kind in blocks.items() if counts[kind] >= FEWEST_BLOCKS]


def _blocks_in_pairs(layers: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a list of lists, such as an attention and a feed-forward network for each layer."""
    if not isinstance(layers, nn.ModuleList):
        return {}
    found = {
        f"{place}.{name}": part
        for place, layer in layers.named_children()
        if isinstance(layer, nn.ModuleList | nn.ModuleDict)
        for name, part in layer.named_children()
        if _can_be_recomputed(part) and not isinstance(part, nn.ModuleList | nn.ModuleDict)
    }
    counts = Counter(map(type, found.values()))
    return {path: part for path, part in found.items() if counts[type(part)] >= FEWEST_BLOCKS}


def recompute_call(network: nn.Module) -> str:
    """Return the call by which a network of transformers or diffusers recomputes its blocks; nothing for others.

    It switches caches off too, which a block that is computed again would fill twice.
    """
    if getattr(network, "supports_gradient_checkpointing", False) is True:
        return (
            'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})'
        )
    if getattr(network, "_supports_gradient_checkpointing", False) is True:
        return "enable_gradient_checkpointing()"
    return ""


def pieces_of(layers: nn.Module) -> int:
    """Return into how many pieces a Sequential is cut, about the root of its layers; 0 if it is not cut.

    No piece may begin with a layer that changes what it is given: it is what the piece is computed again from.
    """
    assert isinstance(layers, nn.Sequential)
    length = len(layers)
    if length < FEWEST_LAYERS:
        return 0
    counts = sorted(range(2, length // 2 + 1), key=lambda count: abs(count - math.sqrt(length)))
    for count in counts:
        begins = [layers[place * (length // count)] for place in range(count)]
        if not any(map(changes_its_input, begins)):
            return count
    return 0


def _can_be_recomputed(module: nn.Module) -> bool:
    """Return whether a module is a block, and not a layer, that leaves what it is given as it is."""
    return any(module.children()) and not changes_its_input(module)


def changes_its_input(module: nn.Module) -> bool:
    """Return whether the first layer of a module works in place."""
    first = next((one for one in module.modules() if not any(one.children())), module)
    return bool(getattr(first, "inplace", False))


def _has_like_blocks(blocks: Iterable[nn.Module]) -> bool:
    kinds = Counter(
        type(block)
        for block in blocks
        if block is not None
        and any(block.children())
        and type(block).forward is not nn.Module.forward
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
    for path, call in chosen.networks:
        network: Any = module_at(modules, path)
        if call.startswith("gradient"):
            network.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            network.enable_gradient_checkpointing()
    for path, count in chosen.pieces:
        whole = module_at(modules, path)
        in_pieces = functools.partial(checkpoint_sequential, whole, count, use_reentrant=False)
        setattr(whole, "forward", in_pieces)  # noqa: B010 - mypy calls it a method


def apply_to_optimizers(
    changes: Changes, optimizers: Iterable[Optimizer], modules: Iterable[nn.Module]
) -> None:
    """Let Adam and AdamW keep 8-bit state."""
    tables = {
        id(one.weight)
        for module in modules
        for one in module.modules()
        if isinstance(one, nn.Embedding) and changes.keeps_embeddings
    }
    for optimizer in optimizers:
        if changes.low_bit_optimizer and takes_low_bits(optimizer):
            replacement = AllocatedAdam(optimizer.param_groups, tables)
            setattr(optimizer, "step", replacement.step)  # noqa: B010 - mypy calls it a method


def takes_low_bits(optimizer: Optimizer) -> bool:
    """Return whether there is an 8-bit form of an optimizer; bitsandbytes has none for weights of FSDP2."""
    groups = optimizer.param_groups
    weights = (weight for group in groups for weight in group["params"])
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and not any(group["amsgrad"] or group["maximize"] for group in groups)
        # AdamW under another name
        and not (type(optimizer) is torch.optim.Adam and any(map(_is_decoupled, groups)))
        and not any(map(is_sharded, weights))
    )


def _is_decoupled(group: Mapping[str, Any]) -> bool:
    return bool(group.get("decoupled_weight_decay")) and group["weight_decay"] != 0


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
