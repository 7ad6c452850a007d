"""SAEHD's weights as DeepFaceLab's layer library, leras, stores them, and back, bit for bit.

A leras convolution is HWIO, a transposed one HWOI, a dense layer (inputs, outputs). Beyond these transpositions two
orders differ. Its depth_to_space takes output k*c + j of a convolution for pixel k of channel j, `pixel_shuffle` takes
j*4 + k: the outputs of every `Upscale` are permuted. Its images are BGR: the inputs of the first convolution and the
outputs of the last are reversed. Both are permutations of values, so nothing is rounded.

A weight's key is its path below the network, `down1/downs_0/conv1/weight:0`; an optimizer's is made from the whole
name, `ms_encoder/down1/downs_0/conv1/weight_0:0`, alongside `iters:0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpt.errors import CheckpointError
from mpt.systems.deepfacelab.nn.saehd import Decoder, Encoder
from mpt.systems.deepfacelab.nn.shared.patch_discriminator import (
    PatchDiscriminator,
    TransposedConvolution,
)
from mpt.systems.deepfacelab.nn.shared.saehd_layers import Convolution, Dense, Upscale

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Slot:
    """One tensor of a network: its names on both sides and how its values are laid out there."""

    name: str
    key: str
    axes: tuple[int, ...]
    """The torch axis that each leras axis is."""
    folded: bool = False
    """Outputs are in pixel_shuffle's order."""
    reversed_axis: int | None = None
    """The torch axis that counts colours."""

    def to_leras(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Return the tensor's values in leras's layout, contiguous."""
        if self.folded:
            tensor = tensor.reshape(-1, 4, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)
        if self.reversed_axis is not None:
            tensor = tensor.flip(self.reversed_axis)
        return np.ascontiguousarray(tensor.detach().permute(self.axes).cpu().numpy())

    def to_torch(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Return an array's values in torch's layout, contiguous, in memory of their own."""
        inverse = [self.axes.index(axis) for axis in range(len(self.axes))]
        tensor = torch.from_numpy(np.array(array)).permute(inverse)
        if self.reversed_axis is not None:
            tensor = tensor.flip(self.reversed_axis)
        if self.folded:
            tensor = tensor.reshape(4, -1, *tensor.shape[1:]).transpose(0, 1).flatten(0, 1)
        return tensor.contiguous()

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the shape that leras gives this tensor."""
        return tuple(tensor.shape[axis] for axis in self.axes)


def slots(network: nn.Module) -> Iterator[Slot]:
    """Yield a slot per parameter of one network: an encoder, an inter, a decoder or a discriminator."""
    for path, layer in network.named_modules():
        if not isinstance(layer, Convolution | Dense | TransposedConvolution):
            continue
        parent = network.get_submodule(path.rpartition(".")[0])
        key = re.sub(r"^down1\.(\d)", r"down1.downs_\1", path)
        key = re.sub(r"convs\.(\d+)", r"convs_\1", key).replace(".", "/")
        if isinstance(layer, Dense):
            axes: tuple[int, ...] = (1, 0)
        else:
            axes = (2, 3, 1, 0)  # HWIO of torch's OIHW, and HWOI of its transposed IOHW
        takes_colours = (
            isinstance(network, Encoder | PatchDiscriminator) and layer.weight.shape[1] == 3
        )
        takes_colours = takes_colours and isinstance(layer, Convolution)
        gives_colours = isinstance(network, Decoder) and layer.weight.shape[0] == 3
        folded = isinstance(parent, Upscale)
        colours = 1 if takes_colours else 0 if gives_colours else None
        yield Slot(f"{path}.weight", f"{key}/weight:0", axes, folded, colours)
        yield Slot(f"{path}.bias", f"{key}/bias:0", (0,), folded, 0 if gives_colours else None)


def network_to_leras(network: nn.Module, state: Mapping[str, Tensor]) -> Arrays:
    """Return a network's float32 weights by leras key."""
    return {slot.key: slot.to_leras(state[slot.name].float()) for slot in slots(network)}


def network_from_leras(network: nn.Module, arrays: Arrays, where: str) -> dict[str, Tensor]:
    """Return a state dict for the network; CheckpointError when keys or shapes are another architecture's."""
    expected = {slot.key: slot for slot in slots(network)}
    parameters = dict(network.named_parameters())
    check_keys(set(expected), set(arrays), where)
    for key, slot in expected.items():
        wanted, found = slot.shape(parameters[slot.name]), arrays[key].shape
        if wanted != found:
            raise CheckpointError(
                f"{where}: {key} has shape {found}; this architecture wants {wanted}"
            )
    return {slot.name: slot.to_torch(arrays[slot.key]).float() for slot in expected.values()}


def check_keys(expected: set[str], found: set[str], where: str) -> None:
    """Raise CheckpointError naming the first key that is missing or unknown."""
    missing, unknown = sorted(expected - found), sorted(found - expected)
    if missing or unknown:
        parts = [f"{len(missing)} weights are missing, such as {missing[0]}"] if missing else []
        parts += [f"{len(unknown)} are unknown, such as {unknown[0][:80]}"] if unknown else []
        raise CheckpointError(
            f"{where}: {' and '.join(parts)}: these are weights of another architecture"
        )


def optimizer_key(kind: str, scope: str, key: str) -> str:
    """Return the key of a weight's state: kind `ms`, `vs` or `acc`; scope is the network's name in DeepFaceLab."""
    return f"{kind}_{scope}/{key}".replace(":", "_") + ":0"


def optimizer_to_leras(
    networks: Mapping[str, nn.Module],
    states: Mapping[str, Mapping[str, Mapping[str, Tensor]]],
    iterations: int,
) -> Arrays:
    """Return an optimizer's state by leras key. `states[scope][parameter name]` holds tensors by kind."""
    arrays: Arrays = {"iters:0": np.asarray(iterations, dtype=np.int64)}
    kinds: Sequence[str] = sorted(
        {kind for state in states.values() for tensors in state.values() for kind in tensors}
    )
    for kind in kinds:
        for scope, network in networks.items():
            for slot in slots(network):
                tensor = states[scope][slot.name][kind]
                arrays[optimizer_key(kind, scope, slot.key)] = slot.to_leras(tensor.float())
    return arrays


def optimizer_from_leras(
    networks: Mapping[str, nn.Module], arrays: Arrays, where: str
) -> tuple[dict[str, dict[str, dict[str, Tensor]]], int]:
    """Return state by scope, parameter name and kind, and the count of updates; CheckpointError when it does not
    fit."""
    kinds = ("acc",) if any(key.startswith("acc_") for key in arrays) else ("ms", "vs")
    expected = {"iters:0"} | {
        optimizer_key(kind, scope, slot.key)
        for kind in kinds
        for scope, network in networks.items()
        for slot in slots(network)
    }
    check_keys(expected, set(arrays), where)
    states: dict[str, dict[str, dict[str, Tensor]]] = {}
    for scope, network in networks.items():
        parameters = dict(network.named_parameters())
        for slot in slots(network):
            tensors = {}
            for kind in kinds:
                array = arrays[optimizer_key(kind, scope, slot.key)]
                if array.shape != slot.shape(parameters[slot.name]):
                    raise CheckpointError(
                        f"{where}: {kind} of {scope}/{slot.key} has shape {array.shape}: another model's"
                    )
                tensors[kind] = slot.to_torch(array).float()
            states.setdefault(scope, {})[slot.name] = tensors
    if arrays["iters:0"].size != 1:
        raise CheckpointError(f"{where}: iters:0 is no single number")
    return states, int(arrays["iters:0"].reshape(()))


def recognize(files: Mapping[str, Arrays]) -> dict[str, Any]:
    """Return model settings as far as weights determine them: all but the options u and c, which have no weights.

    `files` maps `encoder`, `inter` or `inter_AB`, `decoder_src` or `decoder` to their arrays. CheckpointError when
    they are no SAEHD's.
    """
    try:
        family = "liae" if "inter_AB" in files else "df"
        encoder, inter = files["encoder"], files["inter_AB" if family == "liae" else "inter"]
        decoder = files["decoder" if family == "liae" else "decoder_src"]
        deep = "down1/conv1/weight:0" in encoder
        e_dims = encoder["down1/conv1/weight:0" if deep else "down1/downs_0/conv1/weight:0"].shape[
            3
        ]
        features, ae_dims = inter["dense1/weight:0"].shape
        side = round((features / (e_dims * 8)) ** 0.5)
        d_dims = decoder["upscale0/conv1/weight:0"].shape[3] // 32
        d_mask_dims = decoder["upscalem0/conv1/weight:0"].shape[3] // 32
    except (KeyError, IndexError, ValueError) as error:
        raise CheckpointError(f"the files are no SAEHD weights: {error} is missing") from error
    letters = ("d" if "out_conv1/weight:0" in decoder else "") + ("t" if deep else "")
    return {
        "archi": family + ("-" + letters if letters else ""),
        "image_size": side * (32 if deep else 16),
        "ae_dims": int(ae_dims),
        "e_dims": int(e_dims),
        "d_dims": int(d_dims),
        "d_mask_dims": int(d_mask_dims),
    }
