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
from mpt.memory.adapters.names import KOHYA, Place, matrices, rank_of, scaled

FORMATS = ("peft", "diffusers", "kohya")
JOINED = ("FluxTransformer2DModel", "SD3Transformer2DModel")
"""Models whose projections kohya's programs hold joined, under other names."""


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
            own = peft_settings(place, {name: rank_of(layer) for name, layer in place.adapted().items()}, baked=True)
            settings |= {f"{place.kind}.{name}": value for name, value in own.items()}
    texts = {"format": "pt", **about}
    if settings:
        texts["lora_adapter_metadata"] = json.dumps(settings, sort_keys=True)
    safetensors.torch.save_file(contiguous(tensors), str(path), metadata=texts)


def refuse_other_models(wanted: str, place: Place) -> None:
    """Raise ConfigError for a model that a format has no names for."""
    if not place.kind:
        raise ConfigError(
            f"--to {wanted}: {place.name} is a {type(place.model).__name__}, no model of diffusers; use --to peft"
        )
    if wanted == "kohya" and (place.kind not in KOHYA or type(place.model).__name__ in JOINED):
        raise ConfigError(
            f"--to kohya: {place.name} is a {type(place.model).__name__}, whose projections kohya's keys join; "
            "use --to diffusers, which ComfyUI reads too"
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
        key = f"{place.kind}.{name}"
        tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, scaled(b, layer.lora_factor)
        if magnitude is not None:
            tensors[f"{key}.lora_magnitude_vector"] = magnitude
    return tensors


def kohya_tensors(place: Place) -> dict[str, Tensor]:
    """Return adapters under kohya's keys, all with the most frequent alpha.

    Others are made up for in B: diffusers reads several alphas and several ranks of one file wrongly.
    """
    tensors: dict[str, Tensor] = {}
    alphas = {name: layer.lora_factor * rank_of(layer) for name, layer in place.adapted().items()}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    for name, layer in place.adapted().items():
        a, b, magnitude = matrices(layer)
        key = KOHYA[place.kind] + name.replace(".", "_")
        tensors[f"{key}.lora_down.weight"], tensors[f"{key}.lora_up.weight"] = a, scaled(b, alphas[name] / alpha)
        tensors[f"{key}.alpha"] = torch.tensor(alpha)
        if magnitude is not None:
            tensors[f"{key}.dora_scale"] = magnitude.view(-1, *[1] * (a.dim() - 1))
    return tensors


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


def write_peft(found: Sequence[Place], folder: Path, about: Mapping[str, str]) -> None:
    """Write the folder that `PeftModel.from_pretrained(model, folder)` takes. ConfigError for several networks."""
    if len(found) > 1:
        names = ", ".join(place.name for place in found)
        raise ConfigError(f"--to peft: a folder holds the adapters of one network, and {names} have some")
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
    settings = peft_settings(place, {name: rank_of(layer) for name, layer in adapted.items()}, baked=False)
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
    safetensors.torch.save_file(
        contiguous(tensors), str(folder / "adapter_model.safetensors"), {"format": "pt", **about}
    )
    (folder / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")


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
