"""Keep the weights of some blocks in host memory and send them to the device one block ahead, in forward and backward.

The device then holds the weights of at most two blocks of those (`mpt.memory.travelling.streaming`). Frozen weights
stay in place. Trained ones have their gradients and the optimizer's state on the host too, and the
optimizer's step is done there: to let the state travel as well would move 16 bytes more per weight and step. Weights
that are smaller than `min_kibibytes`, shared between layers, or read past their layer by torch (recurrent layers) stay.

Gradients are bit-equal. On a GPU the host's optimizer step is done by other kernels and may differ in the last bit;
frozen weights and runs on a CPU are exact throughout. On a CPU, where host and device are the same, copies are made
too. A run that has begun cannot be changed to it: the out-of-memory ladder does not propose it, the planner does.

Trainers of image models call it block swap. Source: Pudipeddi et al., "Training large neural networks with
constant memory using a new execution algorithm" (L2L), 2020; Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import nn

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.recomputing.blocks import Unit, find_chains
from mpt.memory.travelling.host_blocks import block_bytes
from mpt.memory.travelling.streaming import Streamed, make_streamed, refuse_recomputed_parts, settle
from mpt.memory.travelling.weight_traffic import Stream, Traffic
from mpt.seams import NOTHING, HoldsWeights, Phase, Run

CONFLICTS = {
    "compile": "compiled graphs hold on to the weights that they were made with; leave one of the two out"
}
RELIEVES = "weights"
PROPOSALS = (1.0,)
DIALS = ({"fraction": (1.0, 0.0)},)
RANK = 1


class Settings(Options):
    """How many of the blocks: `stream_weights: 0.5`, or one of the keys below."""

    shorthand: ClassVar[str | None] = "fraction"

    fraction: float | None = Field(None, ge=0, le=1)
    """Share of the blocks of every network whose weights wait on the host. null, without `blocks`, is all of them."""
    blocks: int | None = Field(None, ge=1)
    """The number of blocks of every network, all if it has fewer."""
    min_kibibytes: float = Field(64.0, ge=0)
    """Smaller weights (biases, norms) stay on the device: a copy has a fixed cost."""

    @model_validator(mode="after")
    def check_one_choice(self) -> Settings:
        """Refuse two ways of choosing at once."""
        if self.fraction is not None and self.blocks is not None:
            raise ValueError("give one of fraction and blocks")
        return self

    def count(self, blocks: int) -> int:
        """Return how many of a network's blocks are streamed."""
        if self.blocks is not None:
            return min(self.blocks, blocks)
        return round((1.0 if self.fraction is None else self.fraction) * blocks)


class StreamWeights(HoldsWeights):
    """Chooses blocks when networks are built; the blocks do the rest."""

    name = "stream_weights"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.traffic: Traffic | None = None
        self.chosen: list[Streamed] = []

    def host(self, networks: Mapping[str, nn.Module], device: torch.device) -> None:
        """Choose blocks of the built networks, and mark their weights as ones that stay on the host."""
        self.traffic = Traffic(device)
        shared = Counter(
            id(p)
            for root in networks.values()
            for m in root.modules()
            for p in m._parameters.values()
        )
        found = 0
        for name, network in networks.items():
            blocks = [
                block for block in find_blocks(name, network) if self.heavy_layers(block, shared)
            ]
            found += len(blocks)
            stream = Stream(self.traffic)
            for order, block in enumerate(spread(blocks, self.settings.count(len(blocks)))):
                for layer, names in self.heavy_layers(block, shared).items():
                    layer.travelling_names, layer.weights_travel_to = names, device  # type: ignore[assignment]
                make_streamed(block, stream, order)
                self.chosen.append(block)  # type: ignore[arg-type]
        if not found:
            raise ConfigError(
                "memory.stream_weights: found no blocks (a Sequential, a ModuleList or a repeated class) with weights "
                f"of {self.settings.min_kibibytes:g} KiB or more in {', '.join(networks)}; lower min_kibibytes, or "
                "leave the trick out"
            )

    def heavy_layers(
        self, block: nn.Module, shared: Counter[int]
    ) -> dict[nn.Module, tuple[str, ...]]:
        """Return the layers of a block with weights that can travel, and the names of those in them."""
        least = self.settings.min_kibibytes * 2**10
        names = {
            layer: tuple(
                name
                for name, weight in layer._parameters.items()
                if weight is not None and shared[id(weight)] == 1 and weight.nbytes >= max(least, 1)
            )
            for layer in block.modules()
            if not isinstance(layer, nn.RNNBase)  # keeps its weights in a list of its own
        }
        return {layer: own for layer, own in names.items() if own}

    def attach(self, run: Run) -> None:
        """Refuse settings that do not go together; log the streamed blocks."""
        trained = any(
            weight.requires_grad for block in self.chosen for weight in block.travelling()
        )
        self.exact = not trained or run.device.type == "cpu"
        for block in self.chosen:
            refuse_recomputed_parts(block)
        if trained:
            refuse_trained(run)
        if "lora" in run.config.memory.tricks and any(
            next(one.children(), None) is None for one in self.chosen
        ):
            raise ConfigError(
                "memory.stream_weights: single layers of a Sequential travel here, and memory.lora gives those no "
                "adapter; leave one of the two out"
            )
        weights = [weight for block in self.chosen for weight in block.travelling()]
        moved = sum(weight.nbytes for weight in weights)
        # what pinning adds to the weights, and to the gradients of those that are trained
        self.host_bytes = sum(
            (1 + weight.requires_grad) * (block_bytes(weight.nbytes) - weight.nbytes)
            for weight in weights
        )
        run.messages.append(
            f"memory.stream_weights: {moved / 2**20:,.1f} MiB of weights of {len(self.chosen)} blocks wait on the host"
        )

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Take all weights to the device for good."""
        for root in modules.values():
            for block in list(root.modules()):
                if isinstance(block, Streamed):
                    settle(block)

    def abandon(self, phase: Phase) -> None:
        """Forget gradients of an update that failed."""
        assert self.traffic is not None
        self.traffic.forget()

    def forward(self) -> AbstractContextManager[None]:
        """Note that a forward begins."""
        assert self.traffic is not None
        self.traffic.cast_weights.clear()
        return NOTHING

    @contextlib.contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Let nothing be under way while the optimizer writes to the weights."""
        assert self.traffic is not None
        self.traffic.synchronise()
        self.traffic.release()
        yield


def find_blocks(name: str, network: nn.Module) -> list[nn.Module]:
    """Return the modules of a network's units, in the order of its definition."""
    units: list[Unit] = [unit for chain in find_chains(network, name) for unit in chain]
    return [module for unit in units for module in unit.modules]


def spread(blocks: Sequence[nn.Module], count: int) -> list[nn.Module]:
    """Return that many blocks, evenly spread: resident ones between give time for the next copy."""
    total = len(blocks)
    return [
        block for i, block in enumerate(blocks) if (i + 1) * count // total > i * count // total
    ]


def refuse_trained(run: Run) -> None:
    """Raise ConfigError for anything that cannot be with trained weights on the host."""
    refused = "memory.stream_weights: trained weights travel, "
    tricks = run.config.memory.tricks
    if "optimizer_in_backward" in tricks:
        raise ConfigError(
            f"{refused}whose gradients are on the host when the backward is over; leave out "
            "memory.optimizer_in_backward, or freeze the blocks (train.freeze)"
        )
    if "low_bit_optimizer" in tricks:
        raise ConfigError(
            f"{refused}whose optimizer state is on the host, and 8-bit states are on the device; use "
            "memory.cpu_optimizer beside it, or freeze the blocks (train.freeze)"
        )
    if run.precision.numerics.lifts_state:
        raise ConfigError(
            f"{refused}and {run.precision.name} takes the optimizer's steps on the device; use precision=bf16-pure, or "
            "freeze the blocks (train.freeze)"
        )
    if run.world.size > 1:
        raise ConfigError(
            f"{refused}whose gradients are on the host and not summed over processes; use parallel.strategy=fsdp "
            "without the trick, or freeze the blocks (train.freeze)"
        )


def build(settings: Settings) -> StreamWeights:
    """Build the trick."""
    return StreamWeights(settings)
