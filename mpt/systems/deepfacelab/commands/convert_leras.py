"""SAEHD to and from DeepFaceLab: what `mpt deepfacelab leras-to-torch` and `torch-to-leras` do.

DeepFaceLab keeps a file per network and per optimizer in its model folder, all beginning with the model's name
(`new_SAEHD_encoder.npy`). To torch they become a run: a folder that `mpt infer` and `mpt train --resume` take, with the
options, the iteration and the state of the optimizers. What has no place in a run is kept in it as it was, in
`deepfacelab/`, and goes back with it: `_data.dat` with what changed, its loss history grown, the rest untouched.

Weights do not tell everything. Without a `_data.dat` the options `u` and `c` are read from `_summary.txt` or given as
`archi`, and a GAN's patch size must be given in a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.load import load_config
from mpt.config.options import setting_of
from mpt.config.precision_names import FLOAT32
from mpt.config.schema import Config
from mpt.engine.build import build_datasets, build_networks, build_run
from mpt.engine.state import capture
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.trained import tell_notes
from mpt.run import checkpoint
from mpt.run.data_layout import read_layout, write_layout
from mpt.run.files import failures_explained, write_atomically
from mpt.run.layout import RunDirectory, create_run, find_run
from mpt.run.recorder import read_lines
from mpt.seams import DataSpec
from mpt.systems.deepfacelab.commands.model_folder import (
    KEPT,
    Folder,
    find_model,
    keep_others,
    kept_folder,
    model_prefix,
    restore_others,
    write_file,
)
from mpt.systems.deepfacelab.data.leras_pickle import write_plain
from mpt.systems.deepfacelab.data.model_data import (
    default_options,
    extend_history,
    read_settings,
    update_options,
)
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
KINDS = (frozenset({"ms", "vs"}), frozenset({"acc"}))
SRC, DST = Path("data_src/aligned"), Path("data_dst/aligned")
"""Where DeepFaceLab's workspace has its faces, beside the folder of models."""


def leras_to_torch(model_dir: Path, output: Path, archi: str | None = None, config: Path | None = None) -> Path:
    """Make a run of a DeepFaceLab model and return its folder.

    With `config` the run is that configuration's, and the weights must be its model's. Raises CheckpointError for
    weights that are hostile, damaged or of another architecture, ConfigError where something that the weights do not
    tell is not said.
    """
    folder = find_model(model_dir)
    data = folder.read_data()
    names = ("encoder", "inter", "inter_AB", "inter_B", "decoder_src", "decoder_dst", "decoder")
    files = {name: arrays for name in names if (arrays := folder.read(name)) is not None}
    found = recognize(files)
    if config is not None:
        chosen = load_config(config)
    elif data is not None:
        chosen = config_of_data(data, folder, archi)
    else:
        chosen = config_of_weights(found, archi or read_archi(folder), folder)
    check_model(chosen, found, folder)
    run = build_run(chosen, torch.device("cpu"), data_layout(chosen))
    weights: dict[str, Tensor] = {}
    for name, network in run.task.modules["autoencoder"].named_children():
        if name not in files:
            raise CheckpointError(f"{folder.file(name)} is missing: the model is not complete")
        state = network_from_leras(network, files.pop(name), str(folder.file(name)))
        weights |= {f"{name}.{key}": value for key, value in state.items()}
    run.precision.load_module_state(run.task.modules["autoencoder"], weights)
    used = {folder.file(name) for name in names}
    for name, (part, _) in DISCRIMINATORS.items():
        arrays = folder.read(part) if name in run.task.modules else None
        if arrays is not None:
            state = network_from_leras(run.task.modules[name], arrays, str(folder.file(part)))
            run.precision.load_module_state(run.task.modules[name], state)
            used.add(folder.file(part))
    iterations = 0
    for trained, optimizer in run.optimizers.items():
        arrays = folder.read(OPTIMIZERS[trained])
        if arrays is not None:
            where = str(folder.file(OPTIMIZERS[trained]))
            iterations = max(iterations, load_optimizer(optimizer, run.task.trainable[trained], trained, arrays, where))
            used.add(folder.file(OPTIMIZERS[trained]))
    step = int(data["iter"]) if data is not None else iterations
    directory = create_run(output.parent, output.name)
    write_atomically(directory.config_path, chosen.to_yaml())
    write_layout(directory.data_path, run.data)
    keep_others(folder, directory.path / KEPT, used)
    captured = capture(run)
    captured["loop"] = start_of_loop(step)
    checkpoint.save(directory, step, captured, keep_last=1, extra_manifest={"source": folder.prefix.rstrip("_")})
    model = chosen.model.settings
    print(f"wrote {directory.path}: {model.archi} at {model.image_size} pixels, {step} iterations")
    if not Path(setting_of(chosen.dataset.settings, "src", ".")).exists():
        print(
            f"to train on: mpt train {directory.config_path} --resume {directory.path} dataset.src=DIR dataset.dst=DIR"
        )
    return directory.path


def start_of_loop(step: int) -> dict[str, Any]:
    """Return what the training loop notes in a checkpoint, for a run that has trained elsewhere."""
    loop = {"step": step, "seconds": 0.0, "skipped": {}, "sums": {}, "counts": {}, "best": None, "best_step": 0}
    return {**loop, "last_metrics": {}, "scales_seen": {}, "memory": {}}


def data_layout(config: Config) -> DataSpec:
    """Return what the configuration's data set delivers, without opening it where it can be told so."""
    assume = config.dataset.plugin.optional("assume")
    spec = assume(config.sized_dataset.native_settings()) if assume else None
    return spec or build_datasets(config)[0].spec


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


def config_of_data(data: Mapping[str, Any], folder: Folder, archi: str | None) -> Config:
    """Return the configuration that a model's `_data.dat` describes, training on DeepFaceLab's usual folders."""
    sections = read_settings(data, str(folder.data_path))
    if archi is not None:
        sections["model"]["archi"] = archi
    workspace = folder.path.resolve().parent
    sections["dataset"] |= {"name": "faceset", "src": str(workspace / SRC), "dst": str(workspace / DST)}
    sections["model"] |= {"name": "saehd"}
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
    name = "rmsprop_leras" if optimizer and any(key.startswith("acc_") for key in optimizer) else "adabelief"
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


def torch_to_leras(run: str, output: Path, name: str | None = None, runs: str = "runs") -> Path:
    """Write a run's newest whole checkpoint as a DeepFaceLab model and return the folder.

    The model keeps the name under which it came, or takes `name` ("foo", or "foo_SAEHD"). Raises CheckpointError for
    runs without a checkpoint, ConfigError for runs that are no saehd's.
    """
    directory, chosen = find_run(run, Path(runs))
    config = load_config(directory.config_path)
    if config.model.name != "saehd":
        raise ConfigError(f"{directory.path}: its model is {config.model.name}; only saehd has a form in DeepFaceLab")
    loaded = checkpoint.load(chosen or directory)
    tell_notes(loaded)
    modules = build_networks(config, read_layout(directory.data_path) or data_layout(config), fake=True)
    kept = kept_folder(directory.path / KEPT)
    folder = Folder(output, model_prefix(name) if name else kept.prefix if kept else "new_SAEHD_")
    written: set[str] = set()
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
            written.add(part)
    for trained, state in loaded.state["optimizers"].items():
        arrays = optimizer_arrays(modules[TRAINED.get(trained, trained)], trained, state)
        written.add(OPTIMIZERS[trained])
        if arrays is None:
            print(f"{OPTIMIZERS[trained]}: left out, for {config.optimizer.name} has no counterpart in DeepFaceLab")
        else:
            write_file(folder.file(OPTIMIZERS[trained]), arrays)
    write_options(folder, kept, config, directory, loaded.step)
    if kept is not None:
        restore_others(kept, folder, written)
    model = config.model.settings
    print(
        f"wrote {output}: {folder.prefix.rstrip('_')}, {model.archi} at {model.image_size} pixels, step {loaded.step}"
    )
    return output


def write_options(folder: Folder, kept: Folder | None, config: Config, directory: RunDirectory, step: int) -> None:
    """Write `_data.dat`: the one that is there, or came with the run, with what changed; and the summary."""
    base = folder.read_data() or (kept.read_data() if kept else None)
    plain = config.to_data()
    losses = logged_losses(directory)
    if base is None:
        content: dict[str, Any] = {"iter": 1, "options": default_options(plain), "loss_history": []}
        content |= {"sample_for_preview": None, "choosed_gpu_indexes": None}
    else:
        content = {**base, "options": update_options(base["options"], plain)}
    # DeepFaceLab takes a model at iteration 0 for a new one, and asks for all its options again.
    content["iter"] = max(step, 1)
    content["loss_history"] = extend_history(list(content.get("loss_history") or []), step, losses)
    write_atomically(folder.data_path, write_plain(content))
    lines = [f"== {key}: {value} ==" for key, value in content["options"].items()]
    heading = [f"== Model name: {folder.prefix.rstrip('_')} ==", f"== Current iteration: {content['iter']} =="]
    write_atomically(folder.path / f"{folder.prefix}summary.txt", "\n".join([*heading, *lines]) + "\n")


def logged_losses(directory: RunDirectory) -> list[tuple[int, float, float]]:
    """Return the run's logged (step, source, destination) losses per sample."""
    found = []
    for line in read_lines(directory.metrics_path):
        losses = line.get("losses") if line.get("kind") == "train" else None
        if isinstance(losses, dict) and {"autoencoder/src", "autoencoder/dst"} <= set(losses):
            found.append((int(line["step"]), float(losses["autoencoder/src"]), float(losses["autoencoder/dst"])))
    return found


def optimizer_arrays(module: nn.Module, trained: str, saved: Mapping[str, Any]) -> Arrays | None:
    """Return an optimizer's saved state as leras keeps it; None where its kinds are others or there is none yet."""
    tensors: Mapping[Any, Mapping[str, Tensor]] = saved["state"]
    kinds = {frozenset(state) for state in tensors.values()}
    if len(kinds) != 1 or next(iter(kinds)) not in KINDS:
        return None
    order = [index for group in saved["param_groups"] for index in group["params"]]
    by_name = {}
    for (name, parameter), index in zip(module.named_parameters(), order, strict=True):
        # What was never trained (inter_AB without random warp) has no state yet; DeepFaceLab has zeros.
        zeros = {kind: torch.zeros(parameter.shape) for kind in next(iter(kinds))} if index not in tensors else {}
        by_name[name] = tensors.get(index) or zeros
    networks = networks_of(trained, module)
    states: dict[str, dict[str, Mapping[str, Tensor]]] = {}
    for scope, network in networks.items():
        prefix = f"{scope}." if trained == "autoencoder" else ""
        states[scope] = {name: by_name[prefix + name] for name, _ in network.named_parameters()}
    return optimizer_to_leras(networks, states, int(saved["param_groups"][0]["iterations"]))
