"""Train small adapters beside frozen weights: LoRA, for fine-tuning what does not fit otherwise.

Each chosen `nn.Linear` and 1x1 `nn.Conv2d` computes W x + (alpha / rank) B A x with A of `rank` rows and B of `rank`
columns. W and everything else stay as they were loaded, so neither gradients nor optimizer state nor the activations
that W's gradient needs are held. B begins at zero: the first forward is the loaded network's. Layers that `full` names
are trained as they are, which a new head must be.

The adapters are parameters of the layers (`lora_a`, `lora_b`), saved in checkpoints beside the weights, and are added
into the weights for export (`fold`). Layers of subclasses are left alone, for others may read their weights past
`forward` (torch's attention does), as are those within `nn.TransformerEncoderLayer`, whose fast path does so. Layers
that share a weight share its adapter; a weight that another kind of layer reads too (a tied embedding) gets none.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, equation 3 and section 4.1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import TypeGuard

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.nn.shared.devices import compute_device
from mpt.nn.shared.mixin import become
from mpt.seams import MemoryTrick, Precision, Run, Task

LOSSY = True


class Settings(Options):
    """How large the adapters are, and where they are."""

    shorthand = "rank"

    rank: int = Field(8, ge=1)
    """Rows of A and columns of B: what an adapter can express, and what it costs."""
    alpha: float | None = Field(None, gt=0)
    """The adapters' output is multiplied by alpha / rank; null is twice the rank."""
    targets: list[str] = Field(default_factory=lambda: ["*"])
    """Globs over dotted module names ("net.blocks.*.attn.qkv"): the Linear layers and 1x1 convolutions that get one."""
    full: list[str] = Field(default_factory=lambda: ["*.fc.*", "*.head.*", "*.heads.*", "*.classifier.*"])
    """Globs over dotted parameter names that are trained as they are, without adapter: a head for new classes."""


class Adapted(nn.Module):
    """What a layer with an adapter has beside its own."""

    lora_a: nn.Parameter | None
    """(rank, in)"""
    lora_b: nn.Parameter | None
    """(out, rank)"""
    lora_factor: float

    def fold(self) -> None:
        """Add the adapter into the weight."""
        if self.lora_a is None or self.lora_b is None:
            return
        weight = self.weight
        assert isinstance(weight, Tensor)
        change = self.lora_factor * (self.lora_b.float() @ self.lora_a.float())
        with torch.no_grad():
            weight.copy_(weight.float() + change.view_as(weight))

    def drop(self) -> None:
        """Leave the adapter out from now on."""
        self.lora_a = self.lora_b = None


class AdaptedLinear(nn.Linear, Adapted):
    """A Linear layer with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output and the adapter's, (..., out)."""
        output = super().forward(input)
        if self.lora_a is None or self.lora_b is None:
            return output
        return output + self.lora_factor * functional.linear(functional.linear(input, self.lora_a), self.lora_b)


class AdaptedConv2d(nn.Conv2d, Adapted):
    """A 1x1 convolution with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output and the adapter's, (b, out, h, w)."""
        output = super().forward(input)
        if self.lora_a is None or self.lora_b is None:
            return output
        narrow = functional.conv2d(input, self.lora_a[:, :, None, None], stride=self.stride)
        return output + self.lora_factor * functional.conv2d(narrow, self.lora_b[:, :, None, None])


class Lora(MemoryTrick):
    """Freezes the networks and gives the chosen layers adapters."""

    name, exact = "lora", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def apply(self, task: Task, precision: Precision) -> None:
        """Freeze and adapt the trained networks, and their EMA twins with the same adapters."""
        chosen = {name: dict(self.layers(name, module)) for name, module in task.trainable.items()}
        if not any(chosen.values()):
            raise ConfigError(
                f"memory.lora: no Linear layer or 1x1 convolution matches {', '.join(self.settings.targets)}; globs go "
                "over whole dotted names ('net.layer4.*'), and layers that memory.lora.full names get none"
            )
        for name, module in task.trainable.items():
            full = self.full_parameters(name, module)
            for parameter in module.parameters():
                if parameter not in full:
                    parameter.requires_grad_(False)
        for name, network in task.trainable.items():
            averages = list(twins(network, task))
            self.adapt_all(network, name, chosen[name], {key: key for key in chosen[name]}, trained=True)
            for prefix, twin in averages:
                keys = {key: key.removeprefix(prefix) for key in chosen[name] if key.startswith(prefix)}
                self.adapt_all(twin, name, chosen[name], keys, trained=False)

    def adapt_all(
        self, root: nn.Module, name: str, chosen: Mapping[str, nn.Module], keys: Mapping[str, str], trained: bool
    ) -> None:
        """Give layers of a network, or of a moving average of it, their adapters: one for each weight.

        With one for each layer, every fold would add to a shared weight. `keys` are the layers' names in the trained
        network, `name`, and their names here.
        """
        first_names: dict[nn.Parameter, str] = {}
        for key, layer in chosen.items():
            first_names.setdefault(layer.get_parameter("weight"), key)
        made: dict[str, Adapted] = {}
        for key, own_key in keys.items():
            first = first_names[chosen[key].get_parameter("weight")]
            layer = root.get_submodule(own_key)
            if first in made:
                share(layer, made[first])
            else:
                made[first] = self.adapt(layer, f"{name}.{first}", trained)

    def layers(self, name: str, network: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
        """Yield the layers of a network that get an adapter: all that read a weight, or none of them."""
        closed = {m for one in network.modules() if isinstance(one, nn.TransformerEncoderLayer) for m in one.modules()}
        full = self.full_parameters(name, network)
        found: list[tuple[str, nn.Linear | nn.Conv2d]] = []
        for key, module in network.named_modules():
            is_chosen = any(fnmatchcase(f"{name}.{key}", glob) for glob in self.settings.targets)
            if key and is_chosen and module not in closed and is_adaptable(module) and module.weight not in full:
                found.append((key, module))
        adapted = {module for _, module in found}
        read_by_others = {
            parameter
            for module in network.modules()
            if module not in adapted
            for parameter in module.parameters(recurse=False)
        }
        yield from ((key, module) for key, module in found if module.weight not in read_by_others)

    def full_parameters(self, name: str, network: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that are trained as they are, under any of their names."""
        named = network.named_parameters(remove_duplicate=False)
        return {parameter for key, parameter in named if self.is_full(f"{name}.{key}")}

    def is_full(self, parameter_name: str) -> bool:
        """Return whether a parameter is trained as it is."""
        return any(fnmatchcase(parameter_name, glob) for glob in self.settings.full)

    def adapt(self, layer: nn.Module, name: str, trained: bool) -> Adapted:
        """Give a layer its adapter. Random numbers follow from the run's seed and the name: twins begin alike."""
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        weight, rank = layer.weight, self.settings.rank
        generator = torch.Generator().manual_seed(zlib.crc32(f"{torch.initial_seed()} {name}".encode()))
        bound = 1 / math.sqrt(weight.shape[1])  # nn.Linear's own, as in the published code
        down = torch.empty(rank, weight.shape[1]).uniform_(-bound, bound, generator=generator)
        become(layer, AdaptedLinear if isinstance(layer, nn.Linear) else AdaptedConv2d)
        device = compute_device(layer)  # the weight may wait on the host
        layer.lora_a = nn.Parameter(down.to(device, weight.dtype), trained)
        up = torch.zeros(weight.shape[0], rank, dtype=weight.dtype, device=device)
        layer.lora_b = nn.Parameter(up, trained)
        layer.lora_factor = (self.settings.alpha or 2 * rank) / rank  # type: ignore[assignment]
        assert isinstance(layer, Adapted)
        return layer

    def attach(self, run: Run) -> None:
        """Say what is trained, and warn of adapters beside weights that were not loaded."""
        weights = [parameter for module in run.task.trainable.values() for parameter in module.parameters()]
        trained = sum(parameter.numel() for parameter in weights if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in weights)
        run.messages.append(f"memory.lora: {trained:,} of {total:,} parameters are trained, adapters included")
        if not run.config.model.settings.weights:
            run.notes.append("memory.lora: the weights that stay as they are were never trained; set model.weights")

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Add every adapter into its layer's weight, once where several layers share both."""
        adapted = [layer for module in modules.values() for layer in module.modules() if isinstance(layer, Adapted)]
        folded: set[Tensor] = set()
        for layer in dict.fromkeys(adapted):
            weight = layer.weight
            assert isinstance(weight, Tensor)
            if weight not in folded:
                layer.fold()
                folded.add(weight)
        for layer in adapted:
            layer.drop()


def is_adaptable(module: nn.Module) -> TypeGuard[nn.Linear | nn.Conv2d]:
    """Return whether a layer is one that can have an adapter, and of torch's own class."""
    return type(module) is nn.Linear or (type(module) is nn.Conv2d and is_pointwise(module))


def share(layer: nn.Module, other: Adapted) -> None:
    """Give a layer the adapter of another one, whose weight it has."""
    become(layer, type(other))
    assert isinstance(layer, Adapted)
    layer.lora_a, layer.lora_b = other.lora_a, other.lora_b
    layer.lora_factor = other.lora_factor


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Return whether a convolution is a matrix product at each place."""
    return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding in ((0, 0), "valid")


def twins(network: nn.Module, task: Task) -> Iterator[tuple[str, nn.Module]]:
    """Yield the untrained networks of a task that have the same weights as a trained one: moving averages.

    Each comes with the path of the one in the trained network: networks that train together are averaged one by one.
    """
    members = {"": network}
    if isinstance(network, nn.ModuleDict):
        members |= {f"{name}.": member for name, member in network.items()}
    trained = {module for one in task.trainable.values() for module in one.modules()}
    for root in task.modules.values():
        if root in trained:
            continue
        for prefix, member in members.items():
            if layout_of(member) == layout_of(root):
                yield prefix, root
                break


def layout_of(network: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of a network's state."""
    return {name: value.shape for name, value in network.state_dict().items()}


def build(settings: Settings) -> Lora:
    """Build the trick."""
    return Lora(settings)
