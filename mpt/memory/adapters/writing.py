"""Adapters alone as files of other programs: PEFT's folder, diffusers' and kohya's one file.

Layers that were trained as they are (`memory.lora.full`) go into PEFT's folder as `modules_to_save`; the other two
formats have no place for them, and writing is refused. The scale of a diffusers file is in B, so that programs which
read no alpha compute the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mpt.errors import ConfigError
from mpt.memory.adapters.layers import Adapted
from mpt.memory.adapters.names import Place, matrices, outputs_of, rank_of, scaled
from mpt.memory.adapters.originals import JOINED, Original, join, originals, swap
from mpt.nn.shared.mixin import own_class

FORMATS = ("peft", "diffusers", "kohya")


def write(wanted: str, found: Sequence[Place], path: Path, about: Mapping[str, str]) -> None:
    """Write adapters in a format: a folder of `peft`, a file of the others. ConfigError for others."""
    if wanted == "peft":
        write_peft(found, path, about)
        return
    tensors: dict[str, Tensor] = {}
    settings: dict[str, Any] = {}
    for place in found:
        refuse_other_models(wanted, place)
        refuse_full(wanted, place)
        if wanted == "kohya":
            tensors |= kohya_tensors(place)
        else:
            tensors |= diffusers_tensors(place)
            own = peft_settings(
                place, {name: rank_of(layer) for name, layer in place.adapted().items()}, baked=True
            )
            settings |= {
                f"{place.kind}.{name}": value for name, value in unanchored(place, own).items()
            }
    texts = {"format": "pt", **about}
    if settings:
        texts["lora_adapter_metadata"] = json.dumps(settings, sort_keys=True)
    # `save_file` lets nobody else read it
    path.write_bytes(safetensors.torch.save(contiguous(tensors), texts))


def refuse_other_models(wanted: str, place: Place) -> None:
    """Raise ConfigError for a model that a format has no names for."""
    if not place.kind:
        raise ConfigError(
            f"--to {wanted}: {place.name} is a {type(place.model).__name__}, no model of diffusers; use --to peft"
        )
    if (
        wanted == "kohya"
        and place.kind == "transformer"
        and own_class(place.model).__name__ not in JOINED
    ):
        raise ConfigError(
            f"--to kohya: {place.name} is a {type(place.model).__name__}, for which kohya has no names; use "
            "--to diffusers"
        )


def full_parameters(place: Place) -> list[str]:
    """Return the names of trained parameters that are no adapter's."""
    named = place.model.named_parameters()
    return [name for name, one in named if one.requires_grad and ".lora_" not in f".{name}"]


def refuse_full(wanted: str, place: Place) -> None:
    """Raise ConfigError if layers were trained that a format cannot hold."""
    full = full_parameters(place)
    if full:
        raise ConfigError(
            f"--to {wanted}: {full[0]} of {place.name} was trained as it is, and such a file holds adapters alone; use "
            "--to peft, or train with memory.lora.full=[]"
        )


def diffusers_tensors(place: Place) -> dict[str, Tensor]:
    """Return adapters under diffusers' keys, each with its scale in B."""
    tensors: dict[str, Tensor] = {}
    for name, layer in place.adapted().items():
        a, b, magnitude = matrices(layer)
        key = f"{place.kind}.{place.published(name)}"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = (
            a,
            scaled(b, layer.lora_factor),
        )
        if magnitude is not None:
            tensors[f"{key}.lora_magnitude_vector"] = magnitude
    return tensors


def kohya_tensors(place: Place) -> dict[str, Tensor]:
    """Return adapters under kohya's keys: those of UNets by the library's names, others by the checkpoint's.

    A UNet's have all the most frequent alpha, and others are made up for in B: diffusers reads several alphas and
    several ranks of one file wrongly. Raises ConfigError for DoRA on a part of joined layers.
    """
    tensors: dict[str, Tensor] = {}
    adapted = place.adapted()
    is_joined = own_class(place.model).__name__ in JOINED
    wholes = [
        one
        for one in originals(place.model)
        if is_joined and not adapted.keys().isdisjoint(one.parts)
    ]
    named = {name for one in wholes for name in one.parts}
    wholes += [
        Original(place.published(name).replace(".", "_"), (name,))
        for name in adapted
        if name not in named
    ]
    alpha = Counter(layer.lora_factor * rank_of(layer) for layer in adapted.values()).most_common(
        1
    )[0][0]
    for whole in wholes:
        layers = [adapted[name] for name in whole.parts if name in adapted]
        rank = sum(rank_of(layer) for layer in layers)
        factor = layers[0].lora_factor if is_joined else alpha / rank
        a, b, magnitude = joined_tensors(place, whole, factor)
        key = place.kohya + whole.name
        tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"] = a, b
        tensors[f"{key}.alpha"] = torch.tensor(factor * rank)
        if magnitude is not None:
            tensors[f"{key}.dora_scale"] = magnitude.view(-1, *[1] * (a.dim() - 1))
    return tensors


def joined_tensors(
    place: Place, whole: Original, factor: float
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return A, B and the magnitude of a checkpoint's layer under a factor; layers without an adapter add nothing."""
    adapted = place.adapted()
    dtype = matrices(next(adapted[name] for name in whole.parts if name in adapted))[1].dtype
    parts: list[tuple[Tensor, Tensor]] = []
    magnitudes: list[Tensor | None] = []
    for name in whole.parts:
        layer = adapted.get(name)
        if layer is None:
            outputs = outputs_of(place.model.get_submodule(name))
            parts.append((torch.empty(0, 0, dtype=dtype), torch.empty(outputs, 0, dtype=dtype)))
            magnitudes.append(None)
        else:
            a, b, magnitude = matrices(layer)
            parts.append((a, scaled(b, layer.lora_factor / factor)))
            magnitudes.append(magnitude)
    there = [one for one in magnitudes if one is not None]
    if there and len(there) < len(parts):
        raise ConfigError(
            f"--to kohya: its keys join {', '.join(whole.parts)}, and DoRA needs an adapter on each; use --to diffusers"
        )
    a, b = join(parts)
    magnitude = torch.cat(there) if there else None
    if whole.is_swapped:
        b, magnitude = swap(b), None if magnitude is None else swap(magnitude)
    return a, b, magnitude


def peft_settings(place: Place, ranks: Mapping[str, int], baked: bool) -> dict[str, Any]:
    """Return PEFT's settings of some adapters. The most frequent rank and alpha are the common ones."""
    adapted = place.adapted()
    alphas = {name: ranks[name] * (1.0 if baked else adapted[name].lora_factor) for name in ranks}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "rank_pattern": {f"^{name}": value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{name}": value for name, value in alphas.items() if value != alpha},
        "target_modules": sorted(adapted),
        "use_dora": any(layer.lora_magnitude is not None for layer in adapted.values()),
        "use_rslora": False,
        "lora_bias": False,
        "bias": "none",
    }


def unanchored(place: Place, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's settings for a text encoder by ends of names, which versions of transformers begin otherwise."""
    if place.number is None:
        return dict(settings)

    def end(name: str) -> str:
        return name.removeprefix("^").removeprefix("text_model.")

    patterns = {
        key: {end(name): value for name, value in settings[key].items()}
        for key in ("rank_pattern", "alpha_pattern")
    }
    return {
        **settings,
        **patterns,
        "target_modules": [end(name) for name in settings["target_modules"]],
    }


def write_peft(found: Sequence[Place], folder: Path, about: Mapping[str, str]) -> None:
    """Write the folder that `PeftModel.from_pretrained(model, folder)` takes. ConfigError for several networks."""
    if len(found) > 1:
        names = ", ".join(place.name for place in found)
        others = " or ".join(f"--to {name}" for name in FORMATS if name != "peft")
        raise ConfigError(
            f"--to peft: a folder holds the adapters of one network, and {names} have some; use {others}"
        )
    (place,) = found
    adapted = place.adapted()
    tensors: dict[str, Tensor] = {}
    for name, layer in adapted.items():
        a, b, magnitude = matrices(layer)
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
        if magnitude is not None:
            tensors[f"{key}.lora_magnitude_vector"] = magnitude
    own = dict(place.model.named_parameters())
    full = full_parameters(place)
    tensors |= {f"base_model.model.{name}": own[name].detach().cpu() for name in full}
    settings = peft_settings(
        place, {name: rank_of(layer) for name, layer in adapted.items()}, baked=False
    )
    modules = sorted({name.rpartition(".")[0] for name in full})
    written = {
        "peft_type": "LORA",
        "task_type": None,
        "inference_mode": True,
        "base_model_name_or_path": None,
        **settings,
        "modules_to_save": modules or None,
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = safetensors.torch.save(contiguous(tensors), {"format": "pt", **about})
    (folder / "adapter_model.safetensors").write_bytes(data)
    (folder / "adapter_config.json").write_text(
        json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that share no memory, as safetensors wants them."""
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def drop_adapters(modules: Mapping[str, nn.Module]) -> None:
    """Let adapters change nothing: B is zero. A file's adapters are then read into the rest."""
    with torch.no_grad():
        for module in modules.values():
            for layer in module.modules():
                if isinstance(layer, Adapted) and layer.lora_b is not None:
                    layer.lora_b.zero_()
