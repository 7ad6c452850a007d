"""Adapters from files of other programs into networks that have adapters: PEFT's folders, diffusers' and kohya's files.

A file fits if every one of its adapters has a layer with an adapter of its rank; layers that the file leaves out keep
theirs, which changes nothing yet. Files are safetensors: no pickle is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mpt.errors import CheckpointError
from mpt.foreign.files import read_json
from mpt.memory.adapters.layers import Adapted
from mpt.memory.adapters.names import Place, flat, outputs_of, places, rank_of, split_key
from mpt.memory.adapters.originals import Original, originals, split, swap

WHERE = "memory.lora.weights"
PEFT_FILE, PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"
LARGEST_SETTINGS = 1 << 20
OF_TEXT_ENCODERS = ("text_encoder", "lora_te")
SHOWN = 3


@dataclass
class FileAdapter:
    """One adapter as a file holds it."""

    key: str
    a: Tensor | None = None
    b: Tensor | None = None
    magnitude: Tensor | None = None
    alpha: float | None = None


@dataclass(frozen=True)
class AdapterFile:
    """The contents of a file or a folder of adapters."""

    path: Path
    adapters: dict[str, FileAdapter]
    """By the layer's flat name."""
    others: dict[str, Tensor]
    """Weights that are no adapter's: layers that were trained as they are."""
    settings: Mapping[str, Any]
    """PEFT's, of a folder."""

    def factor(self, one: FileAdapter) -> float:
        """Return the factor of an adapter's output: alpha / rank, 1 if no alpha is given."""
        assert one.a is not None
        rank = one.a.shape[0]
        if one.alpha is not None:
            return one.alpha / rank
        if not self.settings:
            return 1.0
        name = one.key.removeprefix("base_model.model.")
        patterns = {
            key.removeprefix("^"): value
            for key, value in (self.settings.get("alpha_pattern") or {}).items()
        }
        found = [
            value for key, value in patterns.items() if name == key or name.endswith(f".{key}")
        ]
        alpha = float(found[0] if found else self.settings.get("lora_alpha", rank))
        return float(alpha / (rank**0.5 if self.settings.get("use_rslora") else rank))


def read_adapters(path: Path) -> AdapterFile:
    """Read a file, or PEFT's folder. Raises CheckpointError for anything that is none."""
    path = path.expanduser()
    settings: Mapping[str, Any] = {}
    file = path
    if path.is_dir():
        file = path / PEFT_FILE
        settings = read_settings(path / PEFT_SETTINGS)
    if not file.is_file():
        raise CheckpointError(f"{WHERE}: there is no file {file}")
    adapters: dict[str, FileAdapter] = {}
    others: dict[str, Tensor] = {}
    try:
        with safe_open(file, "pt") as opened:
            for key in list(opened.keys()):
                place(key, opened.get_tensor(key), adapters, others)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{WHERE}: {file} is not a safetensors file, or damaged ({error})"
        ) from error
    torn = [one.key for one in adapters.values() if one.a is None or one.b is None]
    if torn or not adapters:
        raise CheckpointError(
            f"{WHERE}: {file} has {f'only half of the adapter {torn[0]}' if torn else 'no adapters of LoRA'}; it is "
            "read from PEFT's, diffusers' and kohya's keys"
        )
    return AdapterFile(path, adapters, others, settings)


def place(
    key: str, tensor: Tensor, adapters: dict[str, FileAdapter], others: dict[str, Tensor]
) -> None:
    """Put a file's tensor into its adapter."""
    split = split_key(key)
    if split is None:
        others[key] = tensor
        return
    layer, part = split
    one = adapters.setdefault(flat(layer), FileAdapter(layer))
    if part == "alpha":
        one.alpha = float(tensor)
    else:
        setattr(one, part, tensor)


def read_settings(path: Path) -> Mapping[str, Any]:
    """Read PEFT's settings. Raises CheckpointError for other kinds of adapters."""
    try:
        settings = read_json(path, LARGEST_SETTINGS)
        kind = settings["peft_type"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{WHERE}: {path} is missing, or no settings of PEFT") from error
    if kind != "LORA":
        raise CheckpointError(
            f"{WHERE}: {path} is of adapters of the kind {kind}; LoRA and DoRA are read"
        )
    return settings  # type: ignore[no-any-return]


@torch.no_grad()
def load_adapters(modules: Mapping[str, nn.Module], file: AdapterFile) -> str:
    """Copy a file's adapters into networks; return a line that says how many.

    Raises CheckpointError if an adapter has no layer, or one of another rank or shape.
    """
    used: set[str] = set()
    for one in places(modules):
        divided = divide(one, file)
        for name, layer in one.adapted().items():
            key = next((key for key in one.keys(name) if key in file.adapters), "")
            found, key = divided.get(name) or (file.adapters.get(key), key)
            if found is not None:
                copy_adapter(layer, found, file, f"{one.name}.{name}")
                used.add(key)
        copy_others(one, file)
    left = [one.key for name, one in file.adapters.items() if name not in used]
    if left:
        more = f" and {len(left) - SHOWN} more" if len(left) > SHOWN else ""
        what = (
            "it is of another model"
            if not used
            else "memory.lora.targets leaves these layers out, or they are missing"
        )
        if all(key.startswith(OF_TEXT_ENCODERS) for key in left):
            what = "text encoders are not trained here; set model.text_encoders=true, or leave their adapters out"
        raise CheckpointError(
            f"{WHERE}: {len(left)} of the {len(file.adapters)} adapters in {file.path} have no layer here: "
            f"{', '.join(left[:SHOWN])}{more}; {what}"
        )
    return f"{WHERE}: {len(used)} adapters from {file.path}"


def divide(one: Place, file: AdapterFile) -> dict[str, tuple[FileAdapter, str]]:
    """Return the adapters that a file has under the names of the published checkpoint: layer -> adapter, file's name.

    Raises CheckpointError if a part of one has no layer with an adapter, and changes something.
    """
    adapted = one.adapted()
    found: dict[str, tuple[FileAdapter, str]] = {}
    for original in originals(one.model):
        whole = file.adapters.get(original.name)
        parts = [adapted.get(name) for name in original.parts]
        if whole is None or not any(parts):
            continue
        for name, layer, piece in zip(
            original.parts, parts, pieces(one, original, parts, whole, file), strict=True
        ):
            if layer is not None:
                found[name] = piece, original.name
            elif piece.b is not None and bool(piece.b.any()):
                raise CheckpointError(
                    f"{WHERE}: {whole.key} in {file.path} adapts {name} too, which has no adapter here; "
                    "memory.lora.targets leaves this layer out"
                )
    return found


def pieces(
    one: Place,
    original: Original,
    parts: Sequence[Adapted | None],
    whole: FileAdapter,
    file: AdapterFile,
) -> list[FileAdapter]:
    """Return the adapters of a checkpoint's layer for each of the library's. Raises CheckpointError for other sizes."""
    assert whole.a is not None
    assert whole.b is not None
    sizes = [outputs_of(one.model.get_submodule(name)) for name in original.parts]
    if whole.b.shape[0] != sum(sizes):
        raise CheckpointError(
            f"{WHERE}: the adapter {whole.key} in {file.path} is of a layer of another size"
        )
    a, b, magnitude = whole.a, whole.b, whole.magnitude
    if original.is_swapped:
        b, magnitude = swap(b), None if magnitude is None else swap(magnitude)
    ranks = [0 if layer is None else rank_of(layer) for layer in parts]
    both = [(a, b)] if len(sizes) == 1 else split(a, b, sizes, ranks)
    magnitudes = (
        [None] * len(sizes)
        if magnitude is None
        else torch.split_with_sizes(magnitude.flatten(), sizes)
    )
    factor = file.factor(whole)
    return [
        FileAdapter(whole.key, narrow, rows, own, factor * len(narrow))
        for (narrow, rows), own in zip(both, magnitudes, strict=True)
    ]


def copy_adapter(layer: Adapted, found: FileAdapter, file: AdapterFile, name: str) -> None:
    """Copy one adapter, with the file's scale in B. Raises CheckpointError for another rank or shape."""
    assert layer.lora_a is not None
    assert layer.lora_b is not None
    assert found.a is not None
    assert found.b is not None
    rank = found.a.shape[0]
    if rank != rank_of(layer):
        raise CheckpointError(
            f"{WHERE}: the adapter of {name} in {file.path} has rank {rank}, and memory.lora gives it "
            f"{rank_of(layer)}; set memory.lora.rank={rank}, or memory.lora.ranks for single layers"
        )
    if found.a.numel() != layer.lora_a.numel() or found.b.numel() != layer.lora_b.numel():
        raise CheckpointError(
            f"{WHERE}: the adapter of {name} in {file.path} is of a layer of another size"
        )
    if (found.magnitude is None) != (layer.lora_magnitude is None):
        has = (
            "is DoRA: set memory.lora.dora=true"
            if found.magnitude is not None
            else "is not DoRA: leave dora out"
        )
        raise CheckpointError(f"{WHERE}: the adapter of {name} in {file.path} {has}")
    layer.lora_a.copy_(found.a.view_as(layer.lora_a))
    layer.lora_b.copy_(
        (found.b.float() * (file.factor(found) / layer.lora_factor)).view_as(layer.lora_b)
    )
    if layer.lora_magnitude is not None and found.magnitude is not None:
        layer.lora_magnitude.copy_(found.magnitude.view_as(layer.lora_magnitude))


def copy_others(one: Place, file: AdapterFile) -> None:
    """Copy the layers of PEFT's folder that were trained as they are. Raises CheckpointError for other sizes."""
    own = dict(one.model.named_parameters())
    for key, tensor in file.others.items():
        parameter = own.get(key.removeprefix("base_model.model."))
        if parameter is None or parameter.shape != tensor.shape:
            raise CheckpointError(
                f"{WHERE}: {key} in {file.path} is no weight of {one.name}, or of another size"
            )
        parameter.copy_(tensor)
