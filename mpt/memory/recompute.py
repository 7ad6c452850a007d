"""Gradient checkpointing: keep the inputs of blocks instead of their activations, and compute them again in backward.

`sqrt` joins about sqrt(N) neighbouring blocks per segment and leaves the last segment alone, since backward starts
there (Chen et al., 2016); `all` recomputes each block on its own; `every: N` each N-th block; `modules` the ones that
the globs name; `selective` all blocks, but keeps the outputs of matrix products and convolutions, so that only cheap
operators run twice; `budget` as few blocks as bring the measured activation bytes under that share, those first that
save most per operation, or with `per: tensor` a choice for each output of each operator
(`mpt.memory.recomputing.choices`).

Gradients are bit-equal: random numbers are replayed, BatchNorm counts once, casts are the same. Blocks that do not
are in a plain `nn.Sequential` cannot be joined, as foreign code runs between them: `sqrt` recomputes each on its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from torch import nn

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.recomputing.blocks import Chain, Unit, find_chains
from mpt.memory.recomputing.choices import choose_outputs, list_choices
from mpt.memory.recomputing.dry_run import UnitCost, measure_calls, measure_units
from mpt.memory.recomputing.replay import Keeps, Recomputed, forbid_in_place, wrap_module, wrap_runs
from mpt.memory.travelling.streaming import Streamed, refuse_recomputed_parts
from mpt.nn.shared.hidden_channels import is_plain_sequential
from mpt.nn.shared.named_modules import matching_modules
from mpt.seams import MemoryTrick, Precision, Run, Task

CONFLICTS = {
    "compile": "compiled networks choose for themselves what to recompute; leave one of the two out"
}
RELIEVES = "activations"
PROPOSALS = ("sqrt", "selective", "all")
DIALS = ({"budget": (0.0, 1.0), "per": "tensor"}, {"budget": (0.0, 1.0)}, {"every": (2, 8)})
LADDER = "sqrt"
RANK = 1
SHARDED = True
BUDGET = "memory.recompute.budget"


class Settings(Options):
    """Which blocks are recomputed: `recompute: sqrt`, or one of the keys below."""

    shorthand: ClassVar[str | None] = "mode"

    mode: Literal["sqrt", "all", "selective"] = "sqrt"
    """Segments of about sqrt(N) blocks, each block alone, or each block without its products and convolutions."""
    every: int | None = Field(None, ge=1)
    """Recompute every N-th block only. null leaves the choice to the other keys."""
    modules: list[str] = Field(default_factory=list)
    """Globs over module names ("net.layer1.*"). With `mode: selective` these are recomputed selectively."""
    budget: float | None = Field(None, ge=0, le=1)
    """Share of the blocks' activation bytes that may be kept."""
    per: Literal["block", "tensor"] = "block"
    """With a budget: whole blocks are recomputed, or in each block the cheapest operators for their bytes."""

    @model_validator(mode="after")
    def check_one_choice(self) -> Settings:
        """Refuse two ways of choosing at once."""
        given = [
            name for name, value in (("every", self.every), ("modules", self.modules), ("budget", self.budget))
            if value not in (None, [])
        ]  # fmt: skip
        if len(given) > 1:
            raise ValueError(f"give one of every, modules and budget, not {' and '.join(given)}")
        if self.per == "tensor" and self.budget is None:
            raise ValueError("per: tensor chooses by a budget; add one, such as budget: 0.5")
        return self


class Recompute(MemoryTrick):
    """Wraps the chosen blocks; the step knows nothing of it."""

    name = "recompute"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.selective = settings.mode == "selective"
        self.chains: list[Chain] = []

    def apply(self, task: Task, precision: Precision) -> None:
        """Find the blocks and wrap them; with a budget they are measured first, in `attach`."""
        if self.settings.modules:
            for module in _matching(task, self.settings.modules):
                wrap_module(module, self.selective)
            return
        names = {id(module): name for name, module in task.modules.items()}
        for network in dict.fromkeys(task.blocks):
            self.chains += find_chains(network, names.get(id(network), type(network).__name__))
        if not self.chains:
            known = ", ".join(
                f"{name}.{child}"
                for name, m in task.trainable.items()
                for child, _ in m.named_children()
            )
            raise ConfigError(
                "memory.recompute: found no blocks (a Sequential, a ModuleList or a repeated class) in this model; "
                f"name modules with memory.recompute={{modules: [globs]}}. There are {known}"
            )
        if self.settings.budget is None:
            self.wrap(self.choose())

    def attach(self, run: Run) -> None:
        """Choose by measured bytes, if there is a budget."""
        if self.settings.budget is not None:
            units = [unit for chain in self.chains for unit in chain]
            if self.settings.per == "tensor":
                self.wrap_by_tensor(run)
            else:
                costs = measure_units(run, units, BUDGET)
                self.wrap([[unit] for unit in choose_by_budget(costs, self.settings.budget)])
            for block in (one for root in run.task.modules.values() for one in root.modules()):
                if isinstance(block, Streamed):
                    refuse_recomputed_parts(block)

    def choose(self) -> list[list[Unit]]:
        """Return runs of units, each to be recomputed as one."""
        units = [unit for chain in self.chains for unit in chain]
        if self.settings.every is not None:
            return [[unit] for unit in units[self.settings.every - 1 :: self.settings.every]]
        if self.settings.mode != "sqrt":
            return [[unit] for unit in units]
        runs = []
        for owners in _by_network(self.chains):
            length = max(1, round(math.sqrt(sum(len(chain) for chain in owners))))
            segments = [segment for chain in owners for segment in _segments(chain, length)]
            runs += segments[:-1]
        return runs

    def wrap(self, runs: list[list[Unit]]) -> None:
        """Wrap runs of neighbouring units."""
        by_sequence: dict[nn.Module, list[tuple[int, int, Keeps]]] = defaultdict(list)
        for run in runs:
            first, last = run[0], run[-1]
            if first.stop is None:
                wrap_module(first.owner, self.selective)
            elif is_plain_sequential(first.owner):
                assert last.stop is not None
                by_sequence[first.owner].append((first.start, last.stop, self.selective))
            else:  # kept in float32 since: its own forward must stay the outermost
                for module in (m for unit in run for m in unit.modules):
                    wrap_module(module, self.selective)
        for sequential, spans in by_sequence.items():
            wrap_runs(sequential, spans)

    def wrap_by_tensor(self, run: Run) -> None:
        """Choose the tensors to keep of each unit, or of runs of them, and wrap those of which not all is kept."""
        assert self.settings.budget is not None
        single = [one for chain in self.chains for unit in chain for one in _wrappable(unit)]
        # Measured as they will be when recomputed: an activation in place would overwrite a tensor that may be kept.
        changed = {module: forbid_in_place(module) for unit in single for module in unit.modules}
        listed = (list_choices(measure_calls(run, units, BUDGET)) for units in self.partitions())
        chosen = choose_outputs(listed, self.settings.budget)
        wrapped = {module for unit in chosen for module in unit.modules}
        for one in (
            one for module, inner in changed.items() if module not in wrapped for one in inner
        ):
            one.inplace = True  # type: ignore[assignment]
        by_sequence: dict[nn.Module, list[tuple[int, int, Keeps]]] = defaultdict(list)
        for unit, keeps in chosen.items():
            if unit.stop is None:
                wrap_module(unit.owner, keeps)
            else:
                by_sequence[unit.owner].append((unit.start, unit.stop, keeps))
        for sequential, spans in by_sequence.items():
            wrap_runs(sequential, spans)

    def partitions(self) -> Iterator[list[Unit]]:
        """Yield the units one by one, and then in runs of up to 2, 4, 8, ... that can be joined."""
        longest = max(len(chain) if _can_be_joined(chain) else 1 for chain in self.chains)
        for length in [2**power for power in range((longest - 1).bit_length() + 1)]:
            yield [
                one
                for chain in self.chains
                for unit in _joined(chain, length)
                for one in _wrappable(unit)
            ]


def choose_by_budget(costs: dict[Unit, UnitCost], budget: float) -> list[Unit]:
    """Return the units to recompute so that at most this share of their saved bytes is kept."""
    allowed = budget * sum(cost.saved_bytes for cost in costs.values())
    kept = sum(cost.saved_bytes for cost in costs.values())
    chosen = []
    for unit in sorted(costs, key=lambda unit: -costs[unit].saved_bytes / (1 + costs[unit].flops)):
        if kept <= allowed:
            break
        if costs[unit].saved_bytes:
            chosen.append(unit)
            kept -= costs[unit].saved_bytes
    return chosen


def _wrappable(unit: Unit) -> list[Unit]:
    """Return a unit, or its modules if the Sequential around them has a forward of its own by now."""
    if unit.stop is None or is_plain_sequential(unit.owner):
        return [unit]
    return [Unit(f"{unit.name}.{number}", module) for number, module in enumerate(unit.modules)]


def _can_be_joined(chain: Chain) -> bool:
    return chain[0].stop is not None and is_plain_sequential(chain[0].owner)


def _joined(chain: Chain, length: int) -> list[Unit]:
    """Return a chain's runs of at most `length` units, each as one unit if they can be joined."""
    if length == 1 or not _can_be_joined(chain):
        return chain
    runs = [(run[0], run[-1]) for run in _segments(chain, length)]
    return [
        Unit(f"{first.name} to {last.name}", first.owner, first.start, last.stop)
        for first, last in runs
    ]


def _by_network(chains: list[Chain]) -> list[list[Chain]]:
    groups: dict[str, list[Chain]] = defaultdict(list)
    for chain in chains:
        groups[chain[0].name.split(".")[0]].append(chain)
    return list(groups.values())


def _segments(chain: Chain, length: int) -> list[list[Unit]]:
    """Cut a chain into nearly equal segments of at most `length` units; units that cannot be joined stay alone."""
    if chain[0].stop is None:
        return [[unit] for unit in chain]
    count = math.ceil(len(chain) / length)
    edges = [round(i * len(chain) / count) for i in range(count + 1)]
    return [chain[start:stop] for start, stop in pairwise(edges)]


def _matching(task: Task, globs: list[str]) -> list[nn.Module]:
    chosen = matching_modules(task.trainable, globs, "memory.recompute.modules")
    # A module inside another chosen one would be recomputed twice over.
    inner = {m for module in chosen for m in module.modules() if m is not module}
    return [
        module for module in chosen if module not in inner and not isinstance(module, Recomputed)
    ]


def build(settings: Settings) -> Recompute:
    """Build the trick."""
    return Recompute(settings)
