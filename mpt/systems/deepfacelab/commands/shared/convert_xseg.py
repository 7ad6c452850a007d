"""XSeg to and from DeepFaceLab: `mpt deepfacelab leras-to-torch` and `torch-to-leras` for the network of masks.

Its model folder holds `XSeg_256.npy`, `XSeg_256_opt.npy`, `XSeg_data.dat` and `XSeg_summary.txt`. A folder can hold an
XSeg alongside face swaps; the two are returned each alone, as in `return_leras`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_networks, build_run
from mpt.errors import CheckpointError, ConfigError
from mpt.precision.shared.module_state import load_module_state
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from mpt.run.records.data_layout import read_layout
from mpt.run.records.layout import RunDirectory
from mpt.run.records.recorder import read_lines
from mpt.systems.deepfacelab.commands.shared.begun_run import data_layout, write_run
from mpt.systems.deepfacelab.commands.shared.model_folder import (
    KEPT,
    XSEG,
    XSEG_NAME,
    Folder,
    keep_others,
    kept_folder,
    model_files,
    refuse_later,
    restore_others,
    write_file,
    write_options,
)
from mpt.systems.deepfacelab.commands.shared.model_switch import replacing
from mpt.systems.deepfacelab.data.leras.model_data import FURTHER_STEPS, continued, plain
from mpt.systems.deepfacelab.nn.facelib.xseg import SIDE, WIDTH, XSeg
from mpt.systems.deepfacelab.nn.weights.facelib_weights import (
    fill_network,
    network_arrays,
    read_averages,
    write_averages,
)

WEIGHTS, OPTIMIZER = f"{SIDE}", f"{SIDE}_opt"
OPTIONS = {
    "face_type": ("dataset", "face_type"),
    "pretrain": ("dataset", "pretrain"),
    "batch_size": ("train", "batch_size"),
}
"""DeepFaceLab's option of an XSeg -> section and key of the configuration."""
DEFAULTS = {"face_type": "wf", "pretrain": False, "batch_size": 4}
RATE, DROPOUT = 1e-4, 0.3
KEPT_STATE = "acc"


def xseg_to_torch(
    folder: Folder, output: Path, config_path: Path | None, workspace: tuple[Path, Path]
) -> Path:
    """Make a run of an XSeg and return its folder. Raises the errors of `leras_to_torch`."""
    data = folder.read_data()
    arrays = folder.read(WEIGHTS)
    assert arrays is not None, "found by its file"
    averages = folder.read(OPTIMIZER)
    updates = 0
    if averages is not None:
        updates = int(averages["iters:0"].reshape(-1)[0]) if "iters:0" in averages else 0
    step = int(data["iter"]) if data is not None else updates
    config = load_config(config_path) if config_path else config_of(data, step, workspace)
    check_size(config)
    run = build_run(config, torch.device("cpu"), data_layout(config))
    network = run.task.modules["xseg"]
    filled = fill_network(XSeg(), arrays, str(folder.file(WEIGHTS)))
    load_module_state(run.precision, network, filled.state_dict())
    used = {folder.file(WEIGHTS)}
    if averages is None:
        print(f"{folder.file(OPTIMIZER)} is missing: this optimizer begins anew")
    else:
        load_averages(
            run.optimizers["xseg"], network, averages, updates, str(folder.file(OPTIMIZER))
        )
        used.add(folder.file(OPTIMIZER))
    directory = write_run(
        output, config, run, step, XSEG_NAME, lambda kept: keep_others(folder, kept, used)
    )
    print(f"wrote {directory.path}: an XSeg, {step} iterations")
    print(
        f"to train on: mpt train {directory.config_path} --resume {directory.path} dataset.src=DIR dataset.dst=DIR"
    )
    return directory.path


def config_of(data: Mapping[str, Any] | None, step: int, workspace: tuple[Path, Path]) -> Config:
    """Return the configuration that a model's options describe, which trains as DeepFaceLab does."""
    options = {
        **DEFAULTS,
        **{key: plain(value) for key, value in (data or {"options": {}})["options"].items()},
    }
    sections: dict[str, dict[str, Any]] = {
        "model": {"name": "xseg"},
        "dataset": {
            "name": "labelled_faces",
            "src": str(workspace[0]),
            "dst": str(workspace[1]),
            "hold_out_every": 0,
        },
        "precision": {"mode": FLOAT32},
        "optimizer": {"name": "rmsprop_leras", "lr": RATE, "lr_dropout": DROPOUT},
        "train": {"steps": step + FURTHER_STEPS},
    }
    for option, (section, key) in OPTIONS.items():
        sections[section][key] = options[option]
    return load_config(sections)


def check_size(config: Config) -> None:
    """Raise ConfigError unless the configuration's model is an XSeg as DeepFaceLab has it."""
    settings = config.model.settings
    if config.model.name != "xseg":
        raise ConfigError(
            f"the configuration's model is {config.model.name}; these weights are for xseg"
        )
    if (settings.image_size, settings.width) != (SIDE, WIDTH):
        raise ConfigError(
            f"its xseg has {settings.image_size} pixels and width {settings.width}; DeepFaceLab knows {SIDE} and "
            f"{WIDTH} alone"
        )


def load_averages(
    optimizer: torch.optim.Optimizer, network: nn.Module, arrays: Any, updates: int, where: str
) -> None:
    """Put leras's running squares into the optimizer. ConfigError for an optimizer of another kind."""
    if tuple(getattr(optimizer, "state_names", ())) != (KEPT_STATE,):
        raise ConfigError(f"{where}: its state is of RMSprop; use optimizer.name rmsprop_leras")
    found = read_averages(network, arrays, XSEG_NAME, where)
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for (name, _), parameter in zip(network.named_parameters(), own, strict=True):
        optimizer.state[parameter] = {KEPT_STATE: found[name]}
    for group in optimizer.param_groups:
        group["iterations"] = updates


def torch_to_xseg(
    directory: RunDirectory,
    config: Config,
    loaded: LoadedCheckpoint,
    output: Path,
    name: str | None,
    replace: bool,
) -> Path:
    """Write an XSeg's checkpoint as a DeepFaceLab model and return the folder. Raises as `torch_to_leras`."""
    check_size(config)
    if name not in (None, XSEG_NAME):
        raise ConfigError(
            f"--name {name}: DeepFaceLab has one XSeg in a folder, which is called {XSEG_NAME}"
        )
    target = Folder(output, XSEG)
    if not replace:
        refuse_replacing(target, config, loaded.step)
    has_backup = bool(model_files(target))
    kept = kept_folder(directory.path / KEPT)
    content = model_data(kept, config, directory, loaded.step)
    network = build_networks(
        config, read_layout(directory.data_path) or data_layout(config), fake=True
    )["xseg"]
    weights = loaded.state["modules"]["xseg"]
    with replacing(target) as folder:
        write_file(folder.file(WEIGHTS), network_arrays(weights))
        if config.optimizer.name == "rmsprop_leras":
            saved = loaded.state["optimizers"]["xseg"]
            write_file(
                folder.file(OPTIMIZER), write_averages(network, saved, KEPT_STATE, XSEG_NAME)
            )
        else:
            print(
                f"{OPTIMIZER}: left out, for {config.optimizer.name} has no counterpart in DeepFaceLab's XSeg"
            )
        write_options(folder, content)
        if kept is not None:
            restore_others(kept, folder, {WEIGHTS, OPTIMIZER})
    print(
        f"wrote {output}: {XSEG_NAME}, face type {content['options']['face_type']}, step {loaded.step}"
    )
    if has_backup:
        print(f"what was there is in {output / f'{XSEG_NAME}_autobackups' / '01'}")
    return output


def refuse_replacing(target: Folder, config: Config, step: int) -> None:
    """Raise CheckpointError for a folder whose XSeg sees other faces, or is further trained, or damaged."""
    if not model_files(target):
        return
    otherwise = "name another folder, or add --replace: the model there becomes a backup"
    try:
        data = target.read_data()
        iterations = int(data["iter"]) if data is not None else 0
        kind = plain(data["options"].get("face_type")) if data is not None else None
        target.read(WEIGHTS)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it is not replaced: {otherwise}") from error
    ours = config.to_data()["dataset"].get("face_type")
    if kind is not None and ours is not None and kind != ours:
        raise CheckpointError(
            f"{target.path} holds an XSeg of face type {kind}, not {ours}; {otherwise}"
        )
    refuse_later(f"{target.path} holds an XSeg", iterations, step, otherwise)


def model_data(
    kept: Folder | None, config: Config, directory: RunDirectory, step: int
) -> dict[str, Any]:
    """Return `XSeg_data.dat`: the one that came with the run with the changes, or a new one."""
    base = kept.read_data() if kept else None
    options, settings = dict(base["options"] if base else DEFAULTS), config.to_data()
    for option, (section, key) in OPTIONS.items():
        value = settings[section].get(key)
        before = options.get(option)
        if value is not None and (before is None or plain(before) != value):
            options[option] = type(before)(value) if isinstance(before, np.generic) else value
    return continued(base, options, step, logged_losses(directory))


def logged_losses(directory: RunDirectory) -> list[tuple[int, list[float]]]:
    """Return the run's logged losses, (step, [loss])."""
    found = []
    for line in read_lines(directory.metrics_path):
        losses = line.get("losses") if line.get("kind") == "train" else None
        if isinstance(losses, dict) and "xseg/loss" in losses:
            found.append((int(line["step"]), [float(losses["xseg/loss"])]))
    return found
