"""Weights of DeepFaceLab's own networks (`facelib/S3FD.npy`, `2DFAN.npy`, an XSeg's) into ours, and an XSeg's back.

Modules have leras's names, so a key is a path: `conv2/bn1/running_mean:0`. Convolutions are HWIO there and transposed
ones HWOI: one permutation for both. Dense layers are (inputs, outputs).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from mpt.errors import CheckpointError
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_arrays
from mpt.systems.deepfacelab.nn.weights.leras_weights import Arrays, optimizer_key

Network = TypeVar("Network", bound=nn.Module)
COUNTER = "num_batches_tracked"
"""Tensors that torch keeps of a batch normalisation and leras does not."""


def load_network(network: Network, path: Path) -> Network:
    """Fill a network from a file and return it, ready to infer. CheckpointError for any other file."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: there is no such file; name the folder in which DeepFaceLab has it"
        )
    return fill_network(network, read_arrays(path), str(path))


def fill_network(network: Network, arrays: Arrays, where: str) -> Network:
    """Fill a network from leras's arrays. CheckpointError when they are another network's, or not finite."""
    state = {
        name: value for name, value in network.state_dict().items() if not name.endswith(COUNTER)
    }
    missing = sorted(set(map(key_of, state)) - set(arrays))
    if missing:
        raise CheckpointError(
            f"{where}: holds no {missing[0]}: these are weights of another network"
        )
    with torch.no_grad():
        for name, value in state.items():
            array = arrays[key_of(name)]
            found = to_torch(array)
            if found.numel() != value.numel() or (
                found.ndim == value.ndim and found.shape != value.shape
            ):
                raise CheckpointError(
                    f"{where}: {key_of(name)} has shape {array.shape}: another network's"
                )
            if not np.isfinite(array).all():
                raise CheckpointError(f"{where}: {key_of(name)} is not finite; get the file anew")
            value.copy_(found.reshape(value.shape))
    return network.eval()


def network_arrays(state: Mapping[str, Tensor]) -> Arrays:
    """Return a network's state as leras keeps its weights, in its order."""
    return {
        key_of(name): to_leras(value) for name, value in state.items() if not name.endswith(COUNTER)
    }


def read_averages(network: nn.Module, arrays: Arrays, scope: str, where: str) -> dict[str, Tensor]:
    """Return RMSprop's state of each parameter by its name. `scope` is the network's name in DeepFaceLab.

    CheckpointError when the state is another network's, or not finite.
    """
    found = {}
    for name, parameter in network.named_parameters():
        key = optimizer_key("acc", scope, key_of(name))
        if key not in arrays:
            raise CheckpointError(
                f"{where}: holds no {key}: this is the state of another network, or optimizer"
            )
        value = to_torch(arrays[key])
        if value.shape != parameter.shape or not np.isfinite(arrays[key]).all():
            raise CheckpointError(
                f"{where}: {key} has shape {arrays[key].shape} or is not finite; get the file anew"
            )
        found[name] = value.contiguous()
    return found


def write_averages(network: nn.Module, saved: Mapping[str, Any], kind: str, scope: str) -> Arrays:
    """Return an optimizer's saved state as leras keeps it; zeros for weights that were never updated."""
    order = [index for group in saved["param_groups"] for index in group["params"]]
    updates = int(saved["param_groups"][0].get("iterations", 0))
    arrays: Arrays = {"iters:0": np.asarray(updates, dtype=np.int64)}
    for (name, parameter), index in zip(network.named_parameters(), order, strict=True):
        state = saved["state"].get(index)
        value = torch.zeros(parameter.shape) if state is None else state[kind]
        arrays[optimizer_key("acc", scope, key_of(name))] = to_leras(value)
    return arrays


def key_of(name: str) -> str:
    """Return leras's key of a parameter."""
    return f"{name.replace('.', '/')}:0"


def to_torch(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    """Return an array in torch's layout."""
    tensor = torch.from_numpy(np.array(array, np.float32))
    if tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1)
    return tensor.T if tensor.ndim == 2 else tensor


def to_leras(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return a tensor in leras's layout, contiguous."""
    value = tensor.detach().float().cpu()
    if value.ndim == 4:
        value = value.permute(2, 3, 1, 0)
    return np.ascontiguousarray((value.T if value.ndim == 2 else value).numpy())
