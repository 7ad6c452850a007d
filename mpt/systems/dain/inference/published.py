"""A published file of weights in the place of a run: RIFE's `flownet.pkl`, DAIN's `best.pth`.

Which network a file holds is found from its names and shapes (`mpt.systems.dain.nn.rife_published.versions`). The file
is read by the restricted reader, which runs nothing in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from mpt.config.load import load_config
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_run
from mpt.engine.building.devices import choose_device
from mpt.engine.building.initial_weights import load_initial_weights
from mpt.errors import CheckpointError, ConfigError, MptError
from mpt.inference.trained import Trained, open_trained
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from mpt.run.records.layout import RunDirectory
from mpt.systems.dain.data.shared.triplets import triplet_layout
from mpt.systems.dain.nn import rife
from mpt.systems.dain.nn.operators.interpolation import Interpolator
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.practical import PracticalRife
from mpt.systems.dain.nn.rife_published.version_settings import Version
from mpt.systems.dain.nn.rife_published.versions import described, unwrapped, version_of
from mpt.weights.weights_file import load_weights_file

SUFFIXES = (".pkl", ".pth", ".pt", ".safetensors")
DAIN_MARK = "depthNet."
ANY_SIZE = (64, 64)
"""Of the pictures of a data set that is not there; the networks take any size."""
SCALES = (0.25, 0.5, 1.0, 2.0, 4.0)
MULTIPLES = (32, 64, 128, 256)


def open_network(wanted: str, runs: Path, device_name: str) -> Trained:
    """Return a run, or a published file as one. Raises CheckpointError and ConfigError."""
    path = Path(wanted)
    if path.suffix.lower() in SUFFIXES and path.is_file():
        return open_published(path, device_name)
    return open_trained(wanted, runs, device_name)


def holds_published(path: Path) -> bool:
    """Return whether a file holds one of the published networks."""
    if path.suffix.lower() not in SUFFIXES:
        return False
    try:
        return model_of(load_weights_file(path)) is not None
    except MptError:
        return False


def model_of(tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Return the model's configuration for a file's tensors; None for another network's."""
    version = version_of(tensors)
    if version is not None:
        return {"name": "rife", "version": version}
    is_dain = any(name.removeprefix("module.").startswith(DAIN_MARK) for name in tensors)
    return {"name": "dain"} if is_dain else None


def open_published(path: Path, device_name: str) -> Trained:
    """Return a published network as if it were a run's. Raises CheckpointError for a file of another network."""
    tensors = load_weights_file(path)
    version = version_of(tensors)
    model = model_of(tensors)
    if model is None:
        raise CheckpointError(
            f"{path}: neither DAIN's weights nor those of a RIFE version that is known here "
            f"({', '.join(get_args(Version))}); HD 1.x and 2.x are not. Of a run name its folder"
        )
    config = load_config(
        {"model": model, "dataset": {"name": "procedural_triplets"}, "train": {"steps": 1}}
    )
    spec = triplet_layout(ANY_SIZE, 1, torch.uint8, has_flow=False)
    run = build_run(config, choose_device(device_name), spec, trains=False)
    networks = dict(run.task.modules)
    start = load_initial_weights(networks, path, rife.translate_weights if version else None)
    if start.newly_made:
        raise CheckpointError(
            f"{path}: {len(start.newly_made)} of the network's tensors are not in it; it is damaged"
        )
    kind = f"RIFE {described(version)}" if version else "DAIN"
    print(
        f"{path}: {kind}, {sum(value.numel() for value in unwrapped(tensors).values()):,} parameters"
    )
    stamp = path.stat()
    state = {
        "modules": {name: module.state_dict() for name, module in networks.items()},
        "step": f"{stamp.st_size} {stamp.st_mtime_ns}",
    }
    data = AbsentDataset(spec, f"{path} is a file of weights")
    return Trained(
        RunDirectory(path), config, run, data, data, LoadedCheckpoint(0, state, path, {})
    )


def adjust(net: Interpolator, scale: float, pad_to: int | None, ensemble: bool) -> None:
    """Set the ways in which a published RIFE may be run. Raises ConfigError for networks that do not have them."""
    if scale == 1.0 and pad_to is None and not ensemble:
        return
    if not isinstance(net, PublishedRife):
        raise ConfigError("--scale, --pad-to and --ensemble are for RIFE's published networks")
    if scale not in SCALES:
        raise ConfigError(
            f"--scale: found {scale:g}; allowed are {', '.join(f'{one:g}' for one in SCALES)}"
        )
    net.use_scale(scale)
    if pad_to is not None:
        if pad_to not in MULTIPLES or pad_to % net.multiple:
            raise ConfigError(
                f"--pad-to: found {pad_to}; allowed here are "
                f"{', '.join(str(one) for one in MULTIPLES if one % net.multiple == 0)}"
            )
        net.multiple = pad_to
    if ensemble:
        if not isinstance(net, PracticalRife) or net.plan.passes_features:
            raise ConfigError(
                "--ensemble: 4.0 to 4.20 and 4.24 have it (3.x always does it); the paper's networks and those whose "
                "blocks hand features on (4.21 to 4.23, 4.25, 4.26) do not"
            )
        net.ensemble = True
