"""SAEHD to and from DeepFaceLab: the work of `mpt deepfacelab leras-to-torch` and `torch-to-leras`.

DeepFaceLab keeps a file per network and per optimizer in its model folder, all beginning with the model's name
(`new_SAEHD_encoder.npy`). To torch they become a run: a folder that `mpt infer` and `mpt train --resume` take, with the
options, the iteration and the state of the optimizers. Files that have no place in a run are kept in it as they were,
in `deepfacelab/`, and go back with it: `_data.dat` with the changes, its loss history grown, the rest untouched.

Weights do not determine everything. Without a `_data.dat` the options `u` and `c` are read from `_summary.txt` or given
as `archi`, and a GAN's patch size must be given in a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import load_config
from mpt.config.options import setting_of
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.errors import CheckpointError, ConfigError
from mpt.foreign.files import LARGEST_RECORD_BYTES, read_text
from mpt.precision.shared.module_state import load_module_state
from mpt.seams import Run
from mpt.systems.deepfacelab.commands.shared.begun_run import data_layout, write_run
from mpt.systems.deepfacelab.commands.shared.convert_xseg import xseg_to_torch
from mpt.systems.deepfacelab.commands.shared.model_folder import (
    Folder,
    find_model,
    keep_others,
)
from mpt.systems.deepfacelab.data.faceset import other_rules
from mpt.systems.deepfacelab.data.leras.model_data import (
    QUICK96,
    QUICK96_RATE,
    QUICK96_SCALE,
    read_settings,
)
from mpt.systems.deepfacelab.nn.weights.leras_weights import (
    Arrays,
    network_from_leras,
    optimizer_from_leras,
    recognize,
)

DISCRIMINATORS = {
    "code_discriminator": ("code_discriminator", "dis"),
    "patch_discriminator": ("GAN", "D_src"),
}
"""Our module -> its file and its name in optimizer keys."""
OPTIMIZERS = {"autoencoder": "src_dst_opt", "code_disc": "D_code_opt", "patch_disc": "GAN_opt"}
"""Trained part -> its optimizer's file."""
TRAINED = {"code_disc": "code_discriminator", "patch_disc": "patch_discriminator"}
KINDS = (frozenset({"ms", "vs"}), frozenset({"acc"}))
SRC, DST = Path("data_src/aligned"), Path("data_dst/aligned")
"""The folders of faces in DeepFaceLab's workspace, alongside the folder of models."""


def leras_to_torch(
    model_dir: Path,
    output: Path,
    archi: str | None = None,
    config: Path | None = None,
    name: str | None = None,
) -> Path:
    """Make a run of a DeepFaceLab model and return its folder.

    With `config` the run is that configuration's, and the weights must be its model's. Raises CheckpointError for
    weights that are hostile, damaged or of another architecture, ConfigError if something that the weights do not
    tell is not said.
    """
    folder = find_model(model_dir, name)
    if folder.is_xseg:
        workspace = folder.path.resolve().parent
        return xseg_to_torch(folder, output, config, (workspace / SRC, workspace / DST))
    data = folder.read_data()
    if data is not None and folder.is_quick:
        data = {**data, "options": {**data["options"], **QUICK96}}
    names = ("encoder", "inter", "inter_AB", "inter_B", "decoder_src", "decoder_dst", "decoder")
    files = {name: arrays for name in names if (arrays := folder.read(name)) is not None}
    found = recognize(files)
    chosen = choose_config(folder, data, found, archi, config)
    check_model(chosen, found, folder)
    run = build_run(chosen, torch.device("cpu"), data_layout(chosen))
    used = {folder.file(name) for name in names}
    load_autoencoder(run, folder, files)
    used |= load_discriminators(run, folder)
    iterations, read = load_optimizers(run, folder)
    used |= read
    step = int(data["iter"]) if data is not None else iterations
    directory = write_run(
        output,
        chosen,
        run,
        step,
        folder.prefix.rstrip("_"),
        lambda kept: keep_others(folder, kept, used),
    )
    model = chosen.model.settings
    print(f"wrote {directory.path}: {model.archi} at {model.image_size} pixels, {step} iterations")
    rules = other_rules(chosen.dataset.settings) if chosen.dataset.name == "faceset" else None
    if rules:
        print(rules)
    if not Path(setting_of(chosen.dataset.settings, "src", ".")).exists():
        print(
            f"to train on: mpt train {directory.config_path} --resume {directory.path} dataset.src=DIR dataset.dst=DIR"
        )
    return directory.path


def choose_config(
    folder: Folder,
    data: Mapping[str, Any] | None,
    found: Mapping[str, Any],
    archi: str | None,
    config: Path | None,
) -> Config:
    """Return the configuration that was named, else one from the model's options, else one from its weights."""
    if config is not None:
        return load_config(config)
    if data is not None:
        return config_of_data(data, folder, archi)
    return config_of_weights(found, archi or read_archi(folder), folder)


def load_autoencoder(run: Run, folder: Folder, files: Mapping[str, Arrays]) -> None:
    """Load the autoencoder's weights from its files. Raises CheckpointError if one is missing."""
    weights: dict[str, Tensor] = {}
    for name, network in run.task.modules["autoencoder"].named_children():
        if name not in files:
            raise CheckpointError(f"{folder.file(name)} is missing: the model is not complete")
        state = network_from_leras(network, files[name], str(folder.file(name)))
        weights |= {f"{name}.{key}": value for key, value in state.items()}
    load_module_state(run.precision, run.task.modules["autoencoder"], weights)


def load_discriminators(run: Run, folder: Folder) -> set[Path]:
    """Load the discriminators that the model has, and return the files that were read."""
    used = set()
    for name, (part, _) in DISCRIMINATORS.items():
        arrays = folder.read(part) if name in run.task.modules else None
        if arrays is not None:
            state = network_from_leras(run.task.modules[name], arrays, str(folder.file(part)))
            load_module_state(run.precision, run.task.modules[name], state)
            used.add(folder.file(part))
    return used


def load_optimizers(run: Run, folder: Folder) -> tuple[int, set[Path]]:
    """Load the optimizers' state; return the most updates that one counts, and the files that were read."""
    iterations, used = 0, set()
    for trained, optimizer in run.optimizers.items():
        file = folder.file(OPTIMIZERS[trained])
        arrays = folder.read(OPTIMIZERS[trained])
        if arrays is None:
            print(f"{file} is missing: this optimizer begins anew")
            continue
        updates = load_optimizer(optimizer, run.task.trainable[trained], trained, arrays, str(file))
        iterations = max(iterations, updates)
        used.add(file)
    return iterations, used


def read_archi(folder: Folder) -> str:
    """Return the archi that DeepFaceLab's summary states; ConfigError if there is none."""
    path = folder.path / f"{folder.prefix}summary.txt"
    if path.is_file():
        stated = re.search(
            r"archi: *([a-z]+(?:-[a-z]+)?)", read_text(path, LARGEST_RECORD_BYTES, "replace")
        )
        if stated:
            return stated.group(1)
    raise ConfigError(
        f"{folder.path}: weights do not tell the options u and c, and there is no {path.name}: add --archi, as df-ud"
    )


def config_of_data(data: Mapping[str, Any], folder: Folder, archi: str | None) -> Config:
    """Return the configuration that a model's `_data.dat` describes, training on DeepFaceLab's usual folders."""
    sections = read_settings(data, str(folder.data_path))
    if archi is not None:
        sections["model"]["archi"] = archi
    workspace = folder.path.resolve().parent
    sections["dataset"] |= {
        "name": "faceset",
        "src": str(workspace / SRC),
        "dst": str(workspace / DST),
    }
    # As DeepFaceLab continues: it trains on all faces, and looks at applied masks, not at polygons.
    sections["dataset"] |= {"hold_out_every": 0, "mask": "xseg"}
    sections["model"] |= {"name": "saehd"}
    if folder.is_quick:
        sections["optimizer"] |= {"lr": QUICK96_RATE, "lr_cos": 0}
        sections["dataset"]["random_scale"] = QUICK96_SCALE
        sections["task"]["stretch_mask"] = False
    return load_config({**sections, "precision": {"mode": FLOAT32}})


def config_of_weights(found: Mapping[str, Any], archi: str, folder: Folder) -> Config:
    """Return a configuration for recognised weights without a `_data.dat`. Its data are drawn faces."""
    model = {"name": "saehd", **found, "archi": archi}
    if folder.file("code_discriminator").is_file():
        model["true_face_power"] = 0.01
    if folder.file("GAN").is_file():
        # Patch sizes whose strides differ have weights of equal shapes: a guess would be a wrong network, silently.
        raise ConfigError(
            f"{folder.path}: there is a GAN and no {folder.data_path.name}, and weights do not tell its patch size: "
            "put the file there, or name it as model.gan_patch_size, with model.gan_power and model.gan_dims, in a "
            "configuration: --config"
        )
    optimizer = folder.read("src_dst_opt")
    name = (
        "rmsprop_leras"
        if optimizer and any(key.startswith("acc_") for key in optimizer)
        else "adabelief"
    )
    data = {
        "model": model,
        "dataset": {"name": "procedural_faces"},
        "precision": {"mode": FLOAT32},
        "optimizer": {"name": name},
        "train": {"batch_size": 8},
    }
    return load_config(data)


def check_model(config: Config, found: Mapping[str, Any], folder: Folder) -> None:
    """Raise CheckpointError when the weights are another model's than the configuration's, saying which."""
    settings = config.model.settings
    if config.model.name != "saehd":
        raise ConfigError(
            f"the configuration's model is {config.model.name}; leras weights are for saehd"
        )
    family, letters = settings.archi.partition("-")[::2]
    visible = family + (
        "-" + "".join(sorted(set(letters) & set("dt"))) if set(letters) & set("dt") else ""
    )
    wanted = {**{name: getattr(settings, name) for name in found}, "archi": visible}
    actual = {
        **found,
        "archi": re.sub(
            r"-(.*)", lambda match: "-" + "".join(sorted(match.group(1))), found["archi"]
        ),
    }
    wrong = [
        f"{name} is {actual[name]}, not {wanted[name]}"
        for name in actual
        if actual[name] != wanted[name]
    ]
    if wrong:
        raise CheckpointError(
            f"{folder.path}: weights of another architecture: {'; '.join(wrong)} (u and c aside)"
        )


def networks_of(trained: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the networks of a trained module by their names in DeepFaceLab's optimizer keys."""
    if trained == "autoencoder":
        return dict(module.named_children())
    return {DISCRIMINATORS[TRAINED[trained]][1]: module}


def load_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, trained: str, arrays: Arrays, where: str
) -> int:
    """Put leras's state into an optimizer that keeps the same kinds; return the count of updates."""
    networks = networks_of(trained, module)
    states, iterations = optimizer_from_leras(networks, arrays, where)
    kinds = set(getattr(optimizer, "state_names", ()))
    flat = {
        (f"{scope}." if trained == "autoencoder" else "") + name: tensors
        for scope, by_name in states.items()
        for name, tensors in by_name.items()
    }
    if kinds != set(next(iter(flat.values()))):
        raise ConfigError(
            f"{where}: its state is of another optimizer than the configuration's; use adabelief for ms "
            "and vs, rmsprop_leras for acc"
        )
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for (name, _), parameter in zip(module.named_parameters(), own, strict=True):
        optimizer.state[parameter] = dict(flat[name])
    for group in optimizer.param_groups:
        group["iterations"] = iterations
    return iterations
