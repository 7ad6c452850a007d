"""How files of adapters name a layer: PEFT's, diffusers' and kohya's keys, and their entries for scale and magnitude.

| Format | Key of layer `a.b` | Scale |
|---|---|---|
| PEFT | `base_model.model.a.b.lora_A.weight`, `.lora_B.weight`, `.lora_magnitude_vector` | adapter_config.json |
| diffusers | `unet.a.b.lora_A.weight`, or `transformer.`, `text_encoder.`, `text_encoder_2.` | in B: the scale is 1 |
| kohya | `lora_unet_a_b.lora_down.weight`, `.lora_up.weight`, `.alpha`, `.dora_scale` | alpha / rank |

kohya's prefix of a text encoder is `lora_te_` with SD 1 and 2, else `lora_te1_` and `lora_te2_`. Names are those within
the library's model: the prefixes of mpt's own network are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mpt.memory.adapters.layers import Adapted
from mpt.nn.shared.mixin import own_class
from mpt.nn.shared.named_modules import named_modules

LIBRARIES = ("diffusers", "transformers")
PREFIXES = (
    "base_model.model.",
    "unet.",
    "transformer.",
    "diffusion_model.",
    "lora_unet_",
    "lora_transformer_",
)
OF_TEXT_ENCODER = re.compile(
    r"(?:base_model\.model\.)?(?:text_encoder(?:_(\d))?\.|lora_te(\d)?_)(?:text_model[._])?"
)
PARTS = {
    "lora_A.weight": "a",
    "lora_B.weight": "b",
    "lora.down.weight": "a",
    "lora.up.weight": "b",
    "lora_down.weight": "a",
    "lora_up.weight": "b",
    "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
    "dora_scale": "magnitude",
    "alpha": "alpha",
}
"""End of a key -> its contents."""


@dataclass(frozen=True)
class Place:
    """A network, or the library's model within it, by which layers are named."""

    name: str
    """Of the network in the task, and the path of the model within it."""
    model: nn.Module
    is_numbered: bool = False
    """Of a text encoder: whether kohya's keys have its number, as in pipelines with several."""

    @property
    def library(self) -> str:
        """The library whose model it is, or ""."""
        package = own_class(self.model).__module__.partition(".")[0]
        return package if package in LIBRARIES else ""

    @property
    def kind(self) -> str:
        """The model's name in a pipeline of diffusers: unet, transformer, text_encoder, text_encoder_2; or ""."""
        name = own_class(self.model).__name__
        if self.library == "diffusers":
            return "unet" if "UNet" in name else "transformer" if "Transformer" in name else ""
        own = self.name.rpartition(".")[2]
        known = own if re.fullmatch(r"text_encoder(_\d)?", own) else "text_encoder"
        return known if self.library == "transformers" and "Text" in name else ""

    @property
    def number(self) -> int | None:
        """The text encoder's number in its pipeline, from 1; None for another model."""
        if not self.kind.startswith("text_encoder"):
            return None
        return int(self.kind.removeprefix("text_encoder").removeprefix("_") or 1)

    @property
    def kohya(self) -> str:
        """What kohya's keys begin with."""
        if self.number is None:
            return "lora_unet_"
        return f"lora_te{self.number}_" if self.is_numbered else "lora_te_"

    def published(self, name: str) -> str:
        """Return a layer's name in files: with the `text_model.` that newer versions of transformers leave out."""
        is_shortened = own_class(self.model).__name__ == "CLIPTextModel" and not hasattr(
            self.model, "text_model"
        )
        return f"text_model.{name}" if is_shortened else name

    def keys(self, name: str) -> tuple[str, ...]:
        """Return the flat names that a layer may have in files; of one of several encoders that with its number."""
        if self.number is None:
            return (flat(name),)
        numbered = flat(f"lora_te{self.number}_{self.published(name)}")
        return (numbered,) if self.is_numbered else (numbered, flat(name))

    def adapted(self) -> dict[str, Adapted]:
        """Return the layers with adapters by their names."""
        return {
            name: layer for name, layer in self.model.named_modules() if isinstance(layer, Adapted)
        }


def places(networks: Mapping[str, nn.Module]) -> Iterator[Place]:
    """Yield the models of libraries in some networks that have adapters, and networks of another kind as they are."""
    for name, network in networks.items():
        inner = [
            Place(full, module)
            for full, module in named_modules({name: network})
            if own_class(module).__module__.partition(".")[0] in LIBRARIES
        ]
        outermost = [
            one
            for one in inner
            if not any(one.name.startswith(f"{other.name}.") for other in inner if other is not one)
        ]
        encoders = sum(one.number is not None for one in outermost)
        is_numbered = encoders > 1 or any(one.kind == "transformer" for one in outermost)
        for place in outermost or [Place(name, network)]:
            if place.adapted():
                yield replace(place, is_numbered=is_numbered)


def split_key(key: str) -> tuple[str, str] | None:
    """Return a key's layer and which of an adapter's tensors it holds; None for another key."""
    for end, part in PARTS.items():
        if key.endswith(f".{end}"):
            return key.removesuffix(f".{end}"), part
    return None


def flat(name: str) -> str:
    """Return a layer's name as kohya writes it, without any prefix: dots are underscores. A text encoder's keeps its
    number."""
    if (match := OF_TEXT_ENCODER.match(name)) is not None:
        return f"te{match[1] or match[2] or 1}_{name[match.end() :].replace('.', '_')}"
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace(".", "_")


def as_conv(layer: Adapted, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B as other programs hold them: of a convolution with four dimensions."""
    if not isinstance(layer, nn.Conv2d):
        return a, b
    return a if a.dim() == 4 else a[:, :, None, None], b[:, :, None, None]


def matrices(layer: Adapted) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return A, B and the magnitude of a layer on the CPU, A and B in the shapes of other programs."""
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    a, b = as_conv(layer, layer.lora_a.detach().cpu(), layer.lora_b.detach().cpu())
    magnitude = layer.lora_magnitude
    return a, b, None if magnitude is None else magnitude.detach().cpu()


def rank_of(layer: Adapted) -> int:
    """Return the rank of a layer's adapter."""
    assert layer.lora_a is not None
    return layer.lora_a.shape[0]


def outputs_of(layer: nn.Module) -> int:
    """Return the number of outputs of a layer that has, or might have, an adapter."""
    return int(layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features)  # type: ignore[arg-type]


@torch.no_grad()
def scaled(b: Tensor, factor: float) -> Tensor:
    """Return B with the scale in it."""
    return b if factor == 1.0 else b.float().mul(factor).to(b.dtype)
