"""Train small adapters beside frozen weights: LoRA, for fine-tuning what does not fit otherwise.

Each chosen `nn.Linear` and 1x1 `nn.Conv2d` computes W x + (alpha / rank) B A x with A of `rank` rows and B of `rank`
columns. W and everything else stay as they were loaded, so neither gradients nor optimizer state nor the activations
that W's gradient needs are held. B begins at zero: the first forward is the loaded network's. Layers that `full` names
are trained as they are, which a new head must be.

The adapters are parameters of the layers (`lora_a`, `lora_b`), saved in checkpoints beside the weights, and are added
into the weights for export (`fold`). Layers of subclasses are left alone, for others may read their weights past
`forward` (torch's attention does), as are those within `nn.TransformerEncoderLayer`, whose fast path does so.

Source: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, equation 3 and section 4.1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.nn.devices import compute_device
from mpt.nn.mixin import become
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
        """Add the adapter into the weight and drop it."""
        if self.lora_a is None or self.lora_b is None:
            return
        weight = self.weight
        assert isinstance(weight, Tensor)
        change = self.lora_factor * (self.lora_b.float() @ self.lora_a.float())
        with torch.no_grad():
            weight.copy_(weight.float() + change.view_as(weight))
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
            for key, parameter in module.named_parameters():
                if not self.is_full(f"{name}.{key}"):
                    parameter.requires_grad_(False)
        for name, network in task.trainable.items():
            for root in [network, *twins(network, task)]:
                for key in chosen[name]:
                    self.adapt(root.get_submodule(key), f"{name}.{key}", trained=root is network)

    def layers(self, name: str, network: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
        """Yield the layers of a network that get an adapter."""
        closed = {m for one in network.modules() if isinstance(one, nn.TransformerEncoderLayer) for m in one.modules()}
        for key, module in network.named_modules():
            full_name = f"{name}.{key}"
            if module in closed or not any(fnmatchcase(full_name, glob) for glob in self.settings.targets):
                continue
            if self.is_full(f"{full_name}.weight") or not key:
                continue
            if type(module) is nn.Linear or (type(module) is nn.Conv2d and is_pointwise(module)):
                yield key, module

    def is_full(self, parameter_name: str) -> bool:
        """Return whether a parameter is trained as it is."""
        return any(fnmatchcase(parameter_name, glob) for glob in self.settings.full)

    def adapt(self, layer: nn.Module, name: str, trained: bool) -> None:
        """Give a layer its adapter. Random numbers follow from the name, so that twins begin alike."""
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        weight, rank = layer.weight, self.settings.rank
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        bound = 1 / math.sqrt(weight.shape[1])  # nn.Linear's own, as in the published code
        down = torch.empty(rank, weight.shape[1]).uniform_(-bound, bound, generator=generator)
        become(layer, AdaptedLinear if isinstance(layer, nn.Linear) else AdaptedConv2d)
        device = compute_device(layer)  # the weight may wait on the host
        layer.lora_a = nn.Parameter(down.to(device, weight.dtype), trained)
        up = torch.zeros(weight.shape[0], rank, dtype=weight.dtype, device=device)
        layer.lora_b = nn.Parameter(up, trained)
        layer.lora_factor = (self.settings.alpha or 2 * rank) / rank  # type: ignore[assignment]

    def attach(self, run: Run) -> None:
        """Say what is trained, and warn of adapters beside weights that were not loaded."""
        weights = [parameter for module in run.task.trainable.values() for parameter in module.parameters()]
        trained = sum(parameter.numel() for parameter in weights if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in weights)
        run.messages.append(f"memory.lora: {trained:,} of {total:,} parameters are trained, adapters included")
        if not run.config.model.settings.weights:
            run.notes.append("memory.lora: the weights that stay as they are were never trained; set model.weights")

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Add every adapter into its layer's weight."""
        for module in modules.values():
            for layer in module.modules():
                if isinstance(layer, Adapted):
                    layer.fold()


def is_pointwise(layer: nn.Conv2d) -> bool:
    """Return whether a convolution is a matrix product at each place."""
    return layer.kernel_size == (1, 1) and layer.groups == 1 and layer.padding in ((0, 0), "valid")


def twins(network: nn.Module, task: Task) -> list[nn.Module]:
    """Return the untrained networks of a task that have the same weights as a trained one: moving averages."""
    layout = {name: value.shape for name, value in network.state_dict().items()}
    others = [root for root in task.modules.values() if all(root is not one for one in task.trainable.values())]
    return [root for root in others if {name: value.shape for name, value in root.state_dict().items()} == layout]


def build(settings: Settings) -> Lora:
    """Build the trick."""
    return Lora(settings)
