"""Train small adapters alongside frozen weights: LoRA and DoRA, for fine-tuning networks that do not fit otherwise.

Each chosen `nn.Linear` and `nn.Conv2d` computes W x + (alpha / rank) B A x with A of `rank` rows and B of `rank`
columns; `mpt.memory.adapters.layers` has the arithmetic, of DoRA too. W and everything else stay as they were loaded,
so neither gradients nor optimizer state nor the activations that W's gradient needs are held. B begins at zero: the
first forward is the loaded network's. Layers that `full` names are trained as they are, which a new head must be. The
weights may be packed (`memory.low_bit_base`).

The adapters are parameters of the layers (`lora_a`, `lora_b`, `lora_magnitude`), saved in checkpoints alongside the
weights, and are added into the weights for export (`fold`). `mpt convert RUN --to peft` writes them alone. Layers of
subclasses are left alone, for others may read their weights past `forward` (torch's attention does), as are those
within `nn.TransformerEncoderLayer`, whose fast path does so. Layers that share a weight share its adapter; a weight
that another kind of layer reads too (a tied embedding) gets none.

Sources: Hu et al., "LoRA: Low-rank adaptation of large language models", 2021, equation 3 and section 4.1;
Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA", 2023; Liu et al., "DoRA", 2024.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from torch import nn

from mpt.config.options import Options, setting_of
from mpt.errors import ConfigError
from mpt.memory.adapters.layers import (
    Adapted,
    fold_all,
    is_adaptable,
    is_pointwise,
    put_adapter,
    share,
    weight_of,
)
from mpt.memory.adapters.reading import load_adapters, read_adapters
from mpt.memory.low_bit.packed_linear import PackedLinear
from mpt.seams import HoldsWeights, Precision, Run, Task

LOSSY = True
KINDS = {
    "attention": (
        *(
            "*.to_q",
            "*.to_k",
            "*.to_v",
            "*.to_out.0",
            "*.to_add_out",
            "*.add_q_proj",
            "*.add_k_proj",
            "*.add_v_proj",
        ),
        *(
            "*.q_proj",
            "*.k_proj",
            "*.v_proj",
            "*.o_proj",
            "*.out_proj",
            "*.attn.qkv",
            "*.attn.proj",
        ),
    ),
    "linear": ("*",),
    "convolutions": ("*",),
}
"""Words of `targets`: the projections of attention by the names that diffusers, transformers and timm give them, all
Linear layers, all convolutions."""

TEXT_ENCODERS = ("text_encoder", "text_model", "lora_te")
"""Names of a text encoder's layers in diffusers, transformers and kohya."""


class Settings(Options):
    """Size and place of the adapters."""

    shorthand = "rank"

    rank: int = Field(8, ge=1)
    """Rows of A and columns of B: the capacity of an adapter, and its cost."""
    alpha: float | None = Field(None, gt=0)
    """The adapters' output is multiplied by alpha / rank; null is twice the rank."""
    rank_stabilised: bool = False
    """Multiply by alpha / sqrt(rank) instead: adapters of large rank learn as fast as small ones."""
    dora: bool = False
    """Train a magnitude per output as well, which scales the rows of the weight with its adapter."""
    ranks: dict[str, int] = Field(default_factory=dict)
    """Glob over dotted module names -> rank, if it differs; the first that matches counts."""
    alphas: dict[str, float] = Field(default_factory=dict)
    """Glob over dotted module names -> alpha, if it differs."""
    targets: list[str] = Field(default_factory=lambda: ["*"])
    """The layers that get one: globs over dotted module names ("net.blocks.*.attn.qkv"), which choose Linear layers and
    1x1 convolutions, or the words attention, linear and convolutions (of every size)."""
    full: list[str] = Field(
        default_factory=lambda: ["*.fc.*", "*.head.*", "*.heads.*", "*.classifier.*"]
    )
    """Globs over dotted parameter names that are trained as they are, without adapter: a head for new classes."""
    weights: str | None = None
    """A file of adapters to begin with: PEFT's folder, or a safetensors file of diffusers or kohya."""

    def rank_of(self, name: str) -> int:
        """Return the rank of a layer's adapter by its dotted name."""
        return first_match(self.ranks, name) or self.rank

    def factor_of(self, name: str) -> float:
        """Return the factor of a layer's adapter."""
        rank = self.rank_of(name)
        alpha = first_match(self.alphas, name) or self.alpha or 2 * rank
        return alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    def chooses(self, name: str, layer: nn.Module) -> bool:
        """Return whether a layer gets an adapter by its dotted name and kind."""
        is_linear = isinstance(layer, nn.Linear)
        for target in self.targets:
            if target == "convolutions":
                is_chosen = isinstance(layer, nn.Conv2d)
            elif target in KINDS:
                is_chosen = is_linear and any(fnmatchcase(name, glob) for glob in KINDS[target])
            else:
                is_chosen = (is_linear or is_pointwise_conv(layer)) and fnmatchcase(name, target)
            if is_chosen:
                return True
        return False


def first_match(values: Mapping[str, float], name: str) -> Any:
    """Return the value of the first glob that matches a name; None if none does."""
    return next((value for glob, value in values.items() if fnmatchcase(name, glob)), None)


def is_pointwise_conv(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution that is a matrix product at each place."""
    return isinstance(layer, nn.Conv2d) and is_pointwise(layer)


class Lora(HoldsWeights):
    """Freezes the networks and gives the chosen layers adapters."""

    name, exact = "lora", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def apply(self, task: Task, precision: Precision) -> None:
        """Freeze and adapt the trained networks, and their EMA twins with the same adapters."""
        self.refuse_text_encoders(task.trainable)
        chosen = {name: dict(self.layers(name, module)) for name, module in task.trainable.items()}
        if not any(chosen.values()):
            raise ConfigError(
                f"memory.lora: no Linear layer or 1x1 convolution matches {', '.join(self.settings.targets)}; globs go "
                "over whole dotted names ('net.layer4.*'), and layers that memory.lora.full names get none"
            )
        for name, module in task.trainable.items():
            full = self.full_parameters(name, module)
            if not chosen[name] and not full:
                raise ConfigError(
                    f"memory.lora: nothing of network {name} would be trained: no layer of it matches "
                    f"{', '.join(self.settings.targets)}, as Linear layers and convolutions (not transposed ones) can; "
                    f'memory.lora.full=["{name}.*"] trains it without adapters'
                )
            for parameter in module.parameters():
                if parameter not in full:
                    parameter.requires_grad_(False)
        for name, network in task.trainable.items():
            averages = list(twins(network, task))
            self.adapt_all(
                network, name, chosen[name], {key: key for key in chosen[name]}, trained=True
            )
            for prefix, twin in averages:
                keys = {
                    key: key.removeprefix(prefix) for key in chosen[name] if key.startswith(prefix)
                }
                self.adapt_all(twin, name, chosen[name], keys, trained=False)

    def refuse_text_encoders(self, networks: Mapping[str, nn.Module]) -> None:
        """Raises ConfigError for a glob over a text encoder that no layer here matches."""
        names = [
            f"{name}.{key}"
            for name, network in networks.items()
            for key, _ in network.named_modules()
        ]
        given = {
            "targets": self.settings.targets,
            "ranks": self.settings.ranks,
            "alphas": self.settings.alphas,
        }
        for setting, globs in given.items():
            for glob in globs:
                if any(word in glob for word in TEXT_ENCODERS) and not any(
                    fnmatchcase(name, glob) for name in names
                ):
                    raise ConfigError(
                        f"memory.lora.{setting}: {glob} is of a text encoder, and none is trained here by that name, "
                        f"only {', '.join(networks)}; networks of diffusers have theirs with model.text_encoders=true, "
                        "as net.text_encoder"
                    )

    def adapt_all(
        self,
        root: nn.Module,
        name: str,
        chosen: Mapping[str, nn.Module],
        keys: Mapping[str, str],
        trained: bool,
    ) -> None:
        """Give layers of a network, or of a moving average of it, their adapters: one for each weight.

        With one for each layer, every fold would add to a shared weight. `keys` are the layers' names in the trained
        network, `name`, and their names here.
        """
        first_names: dict[nn.Parameter, str] = {}
        for key, layer in chosen.items():
            first_names.setdefault(weight_of(layer), key)
        made: dict[str, Adapted] = {}
        for key, own_key in keys.items():
            first = first_names[weight_of(chosen[key])]
            layer = root.get_submodule(own_key)
            if first in made:
                share(layer, made[first])
            else:
                made[first] = self.adapt(layer, f"{name}.{first}", trained)

    def layers(self, name: str, network: nn.Module) -> Iterator[tuple[str, nn.Linear | nn.Conv2d]]:
        """Yield the layers of a network that get an adapter: all that read a weight, or none of them."""
        closed = {
            m
            for one in network.modules()
            if isinstance(one, nn.TransformerEncoderLayer)
            for m in one.modules()
        }
        full = self.full_parameters(name, network)
        found: list[tuple[str, nn.Linear | nn.Conv2d]] = []
        for key, module in network.named_modules():
            if not key or module in closed or not is_adaptable(module) or weight_of(module) in full:
                continue
            if self.settings.chooses(f"{name}.{key}", module):
                found.append((key, module))
        adapted = {module for _, module in found}
        read_by_others = {
            parameter
            for module in network.modules()
            if module not in adapted
            for parameter in module.parameters(recurse=False)
        }
        yield from (
            (key, module) for key, module in found if weight_of(module) not in read_by_others
        )

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
        settings = self.settings
        generator = torch.Generator().manual_seed(
            zlib.crc32(f"{torch.initial_seed()} {name}".encode())
        )
        factor = settings.factor_of(name)
        return put_adapter(layer, settings.rank_of(name), factor, generator, trained, settings.dora)

    def check_start(self) -> None:
        """Raise CheckpointError if the adapters' file is missing or none."""
        if self.settings.weights is not None:
            read_adapters(Path(self.settings.weights))

    def begin(self, task: Task) -> str | None:
        """Read the adapters that the settings name, if they do."""
        if self.settings.weights is None:
            return None
        return load_adapters(task.modules, read_adapters(Path(self.settings.weights)))

    def attach(self, run: Run) -> None:
        """Log the trained parts, and warn of adapters alongside weights that were not loaded."""
        weights = [
            parameter for module in run.task.trainable.values() for parameter in module.parameters()
        ]
        trained = sum(parameter.numel() for parameter in weights if parameter.requires_grad)
        total = sum(parameter.numel() for parameter in weights if parameter.is_floating_point())
        layers = {layer for module in run.task.trainable.values() for layer in module.modules()}
        total += sum(
            one.out_features * one.in_features for one in layers if isinstance(one, PackedLinear)
        )
        run.messages.append(
            f"memory.lora: {trained:,} of {total:,} parameters are trained, adapters included"
        )
        # a model whose settings have none may read its own
        if setting_of(run.config.model.settings, "weights", default=True) is None:
            run.notes.append(
                "memory.lora: the weights that stay as they are were never trained; set model.weights"
            )

    def fold(self, modules: Mapping[str, nn.Module]) -> None:
        """Add every adapter into its layer's weight."""
        fold_all(modules)


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
