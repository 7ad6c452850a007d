"""SAEHD to and from DeepFaceLab: what `mpt deepfacelab leras-to-torch` and `torch-to-leras` do.

DeepFaceLab keeps a file per network and per optimizer in its model folder, all beginning with the model's name
(`new_SAEHD_encoder.npy`). To torch they become a run: a folder that `mpt infer` and `mpt train --resume` take. To
leras they are written beside a `_data.dat` with the options, without which DeepFaceLab would start anew; one that is
there is left.

Weights do not tell the options `u` and `c`. They are read from `_summary.txt`, which DeepFaceLab writes beside the
weights, or given as `archi`. `_data.dat` is not read: it holds more kinds of objects than are safe to allow.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.restricted_pickle import read_arrays
from mpt.engine.build import build_datasets, build_networks, build_run
from mpt.engine.state import capture
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.trained import tell_notes
from mpt.run import checkpoint
from mpt.run.files import failures_explained, write_atomically
from mpt.run.layout import create_run, find_run
from mpt.systems.deepfacelab.data.leras_pickle import write_arrays, write_plain
from mpt.systems.deepfacelab.nn.leras_weights import (
    Arrays,
    network_from_leras,
    network_to_leras,
    optimizer_from_leras,
    optimizer_to_leras,
    recognize,
)

DISCRIMINATORS = {"code_discriminator": ("code_discriminator", "dis"), "patch_discriminator": ("GAN", "D_src")}
"""Our module -> its file and its name in optimizer keys."""
OPTIMIZERS = {"autoencoder": "src_dst_opt", "code_disc": "D_code_opt", "patch_disc": "GAN_opt"}
"""What we train -> its optimizer's file."""
TRAINED = {"code_disc": "code_discriminator", "patch_disc": "patch_discriminator"}
KINDS = ({"ms", "vs"}, {"acc"})


@dataclass(frozen=True)
class Folder:
    """A DeepFaceLab model folder and the name its files begin with."""

    path: Path
    prefix: str

    def file(self, part: str) -> Path:
        """Return the path of a network's or an optimizer's file."""
        return self.path / f"{self.prefix}{part}.npy"

    def read(self, part: str) -> Arrays | None:
        """Return a file's arrays, None where there is no such file."""
        return read_arrays(self.file(part)) if self.file(part).is_file() else None


def leras_to_torch(model_dir: Path, output: Path, archi: str | None = None, config: Path | None = None) -> Path:
    """Make a run of a DeepFaceLab model and return its folder.

    With `config` the run is that configuration's, and the weights must be its model's. Raises CheckpointError for
    weights that are hostile, damaged or of another architecture, ConfigError where `archi` is missing or wrong.
    """
    folder = find_model(model_dir)
    names = ("encoder", "inter", "inter_AB", "inter_B", "decoder_src", "decoder_dst", "decoder")
    files = {name: arrays for name in names if (arrays := folder.read(name)) is not None}
    found = recognize(files)
    chosen = load_config(config) if config else make_config(found, archi or read_archi(folder), folder)
    check_model(chosen, found, folder)
    train_data, _ = build_datasets(chosen)
    run = build_run(chosen, torch.device("cpu"), train_data.spec)
    weights: dict[str, Tensor] = {}
    for name, network in run.task.modules["autoencoder"].named_children():
        if name not in files:
            raise CheckpointError(f"{folder.file(name)} is missing: the model is not complete")
        state = network_from_leras(network, files.pop(name), str(folder.file(name)))
        weights |= {f"{name}.{key}": value for key, value in state.items()}
    run.precision.load_module_state(run.task.modules["autoencoder"], weights)
    for name, (part, _) in DISCRIMINATORS.items():
        arrays = folder.read(part)
        if name in run.task.modules and arrays is not None:
            state = network_from_leras(run.task.modules[name], arrays, str(folder.file(part)))
            run.precision.load_module_state(run.task.modules[name], state)
    iterations = 0
    for trained, optimizer in run.optimizers.items():
        arrays = folder.read(OPTIMIZERS[trained])
        if arrays is not None:
            where = str(folder.file(OPTIMIZERS[trained]))
            iterations = max(iterations, load_optimizer(optimizer, run.task.trainable[trained], trained, arrays, where))
    directory = create_run(output.parent, output.name)
    write_atomically(directory.config_path, chosen.to_yaml())
    captured = capture(run)
    loop = {"step": iterations, "seconds": 0.0, "skipped": {}, "sums": {}, "counts": {}, "best": None, "best_step": 0}
    captured["loop"] = {**loop, "scales_seen": {}, "memory": {}}
    checkpoint.save(directory, iterations, captured, keep_last=1, extra_manifest={"source": folder.prefix.rstrip("_")})
    print(
        f"wrote {directory.path}: {chosen.model.settings.archi} at {chosen.model.settings.image_size} pixels, "
        f"{iterations} iterations"
    )
    return directory.path


def find_model(model_dir: Path) -> Folder:
    """Return the one model in a folder; CheckpointError when there is none, or several."""
    if not model_dir.is_dir():
        raise CheckpointError(f"{model_dir}: there is no such folder; name the folder of DeepFaceLab's model files")
    found = sorted(path.name.removesuffix("encoder.npy") for path in model_dir.glob("*encoder.npy"))
    if len(found) != 1:
        what = f"holds several models ({', '.join(found)})" if found else "holds no MODEL_encoder.npy"
        raise CheckpointError(f"{model_dir} {what}; put one SAEHD model's files into a folder of its own")
    return Folder(model_dir, found[0])


def read_archi(folder: Folder) -> str:
    """Return the archi that DeepFaceLab's summary states; ConfigError where there is none."""
    path = folder.path / f"{folder.prefix}summary.txt"
    if path.is_file():
        stated = re.search(r"archi: *([a-z]+(?:-[a-z]+)?)", path.read_text("utf-8", errors="replace"))
        if stated:
            return stated.group(1)
    raise ConfigError(
        f"{folder.path}: weights do not tell the options u and c, and there is no {path.name}: add --archi, as df-ud"
    )


def make_config(found: Mapping[str, Any], archi: str, folder: Folder) -> Config:
    """Return a configuration for recognised weights. Its data are drawn faces, to be replaced for training."""
    model = {"name": "saehd", **found, "archi": archi}
    if folder.file("code_discriminator").is_file():
        model["true_face_power"] = 0.01
    gan = folder.read("GAN")
    if gan is not None and "in_conv/weight:0" in gan:
        model |= {"gan_power": 0.1, "gan_dims": int(gan["in_conv/weight:0"].shape[-1])}
    optimizer = folder.read("src_dst_opt")
    name = "rmsprop_leras" if optimizer and any(key.startswith("acc_") for key in optimizer) else "adabelief"
    data = {
        "model": model,
        "dataset": {"name": "procedural_faces"},
        "precision": {"mode": "fp32"},
        "optimizer": {"name": name},
        "train": {"batch_size": 8},
    }
    return load_config(data)


def check_model(config: Config, found: Mapping[str, Any], folder: Folder) -> None:
    """Raise CheckpointError when the weights are another model's than the configuration's, saying which."""
    settings = config.model.settings
    if config.model.name != "saehd":
        raise ConfigError(f"the configuration's model is {config.model.name}; leras weights are for saehd")
    family, letters = settings.archi.partition("-")[::2]
    visible = family + ("-" + "".join(sorted(set(letters) & set("dt"))) if set(letters) & set("dt") else "")
    wanted = {**{name: getattr(settings, name) for name in found}, "archi": visible}
    actual = {**found, "archi": re.sub(r"-(.*)", lambda match: "-" + "".join(sorted(match.group(1))), found["archi"])}
    wrong = [f"{name} is {actual[name]}, not {wanted[name]}" for name in actual if actual[name] != wanted[name]]
    if wrong:
        raise CheckpointError(f"{folder.path}: weights of another architecture: {'; '.join(wrong)} (u and c aside)")


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


def torch_to_leras(run: str, output: Path, name: str = "new_SAEHD", runs: str = "runs") -> Path:
    """Write a run's newest whole checkpoint as a DeepFaceLab model and return the folder.

    Raises CheckpointError for runs without one, ConfigError for runs that are no saehd's.
    """
    directory, chosen = find_run(run, Path(runs))
    config = load_config(directory.config_path)
    if config.model.name != "saehd":
        raise ConfigError(f"{directory.path}: its model is {config.model.name}; only saehd has a form in DeepFaceLab")
    loaded = checkpoint.load(chosen or directory)
    tell_notes(loaded)
    train_data, _ = build_datasets(config)
    modules = build_networks(config, train_data.spec, fake=True)
    folder = Folder(output, f"{name}_")
    with failures_explained(output):
        output.mkdir(parents=True, exist_ok=True)
    saved: Mapping[str, Mapping[str, Tensor]] = loaded.state["modules"]
    for part, network in modules["autoencoder"].named_children():
        state = {key: value for key, value in saved["autoencoder"].items() if key.startswith(f"{part}.")}
        state = {key.removeprefix(f"{part}."): value for key, value in state.items()}
        write_file(folder.file(part), network_to_leras(network, state))
    for module_name, (part, _) in DISCRIMINATORS.items():
        if module_name in modules:
            write_file(folder.file(part), network_to_leras(modules[module_name], saved[module_name]))
    iterations = loaded.step
    for trained, state in loaded.state["optimizers"].items():
        module = modules[TRAINED.get(trained, trained)]
        arrays = optimizer_arrays(module, trained, state)
        if arrays is None:
            print(f"{OPTIMIZERS[trained]}: left out, for {config.optimizer.name} has no counterpart in DeepFaceLab")
        else:
            write_file(folder.file(OPTIMIZERS[trained]), arrays)
    options = output / f"{folder.prefix}data.dat"
    if not options.exists():
        write_atomically(options, write_plain(make_options(config, iterations)))
    model = config.model.settings
    summary = output / f"{folder.prefix}summary.txt"
    if not summary.exists():
        write_atomically(summary, f"resolution: {model.image_size}\narchi: {model.archi}\n")
    print(f"wrote {output}: {model.archi} at {model.image_size} pixels, step {loaded.step}")
    return output


def optimizer_arrays(module: nn.Module, trained: str, saved: Mapping[str, Any]) -> Arrays | None:
    """Return an optimizer's saved state as leras keeps it; None where its kinds are others or there is none yet."""
    tensors: Mapping[Any, Mapping[str, Tensor]] = saved["state"]
    names = [name for name, _ in module.named_parameters()]
    if len(tensors) != len(names) or any(set(state) not in KINDS for state in tensors.values()):
        return None
    order = [index for group in saved["param_groups"] for index in group["params"]]
    by_name = {name: tensors[index] for name, index in zip(names, order, strict=True)}
    networks = networks_of(trained, module)
    states: dict[str, dict[str, Mapping[str, Tensor]]] = {}
    for scope, network in networks.items():
        prefix = f"{scope}." if trained == "autoencoder" else ""
        states[scope] = {name: by_name[prefix + name] for name, _ in network.named_parameters()}
    return optimizer_to_leras(networks, states, int(saved["param_groups"][0]["iterations"]))


def write_file(path: Path, arrays: Arrays) -> None:
    """Write one file under a temporary name, then give it its own."""
    temporary = path.with_name(path.name + ".tmp")
    with failures_explained(path, sum(array.nbytes for array in arrays.values())):
        try:
            with temporary.open("wb") as file:
                write_arrays(file, arrays)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def make_options(config: Config, iterations: int) -> dict[str, Any]:
    """Return what DeepFaceLab's `_data.dat` holds, as far as the run says it; DeepFaceLab fills in the rest."""
    model, data = config.model.settings, config.dataset.settings
    options = {
        "resolution": model.image_size,
        "face_type": "f",
        "archi": model.archi,
        "ae_dims": model.ae_dims,
        "e_dims": model.e_dims,
        "d_dims": model.d_dims,
        "d_mask_dims": model.d_mask_dims,
        "masked_training": config.task.settings.masked_training,
        "eyes_mouth_prio": config.task.settings.eyes_mouth_priority,
        "adabelief": config.optimizer.name != "rmsprop_leras",
        "true_face_power": model.true_face_power,
        "gan_power": model.gan_power,
        "gan_patch_size": model.gan_patch_size or model.image_size // 8,
        "gan_dims": model.gan_dims,
        "batch_size": config.train.batch_size,
        "random_warp": getattr(data, "random_warp", True),
        "random_src_flip": getattr(data, "random_src_flip", False),
        "random_dst_flip": getattr(data, "random_dst_flip", False),
    }
    return {"iter": max(iterations, 1), "options": options, "loss_history": [], "sample_for_preview": None}
