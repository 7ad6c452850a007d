"""A run becomes a DeepFaceLab model again: the work of `mpt deepfacelab torch-to-leras`.

The model replaces one of its name only if it is the same model and no older, unless told otherwise; see `model_switch`
for how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_networks
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.trained import tell_notes
from mpt.run.checkpoints import checkpoint
from mpt.run.records.data_layout import read_layout
from mpt.run.records.layout import RunDirectory, find_run
from mpt.run.records.recorder import read_lines
from mpt.systems.deepfacelab.commands.shared.begun_run import data_layout
from mpt.systems.deepfacelab.commands.shared.convert_leras import (
    DISCRIMINATORS,
    OPTIMIZERS,
    TRAINED,
    networks_of,
)
from mpt.systems.deepfacelab.commands.shared.convert_xseg import torch_to_xseg
from mpt.systems.deepfacelab.commands.shared.model_folder import (
    KEPT,
    Folder,
    kept_folder,
    model_files,
    model_prefix,
    refuse_later,
    restore_others,
    write_file,
    write_options,
)
from mpt.systems.deepfacelab.commands.shared.model_switch import replacing
from mpt.systems.deepfacelab.data.leras.model_data import (
    QUICK96,
    continued,
    default_options,
    plain,
    update_options,
)
from mpt.systems.deepfacelab.nn.weights.leras_weights import (
    Arrays,
    network_to_leras,
    optimizer_to_leras,
    recognize,
)

KINDS = {"adabelief": ("ms", "vs"), "rmsprop_leras": ("acc",)}
"""State of DeepFaceLab's optimizers for every weight."""
PARTS = ("mask", "eyes_mouth", "face")
HISTORY = (
    ("src", *(f"src_{part}" for part in PARTS), "style", "face_style", "background_style"),
    ("dst", *(f"dst_{part}" for part in PARTS)),
)
"""Names of the losses that are DeepFaceLab's of the source and of the destination. Earlier versions logged `src`, `dst`
and `style`."""
SHAPING = ("resolution", "archi", "ae_dims", "e_dims", "d_dims", "d_mask_dims")
"""The options that make one model's files another's."""


def torch_to_leras(
    run: str, output: Path, name: str | None = None, runs: str = "runs", *, replace: bool = False
) -> Path:
    """Write a run's newest whole checkpoint as a DeepFaceLab model and return the folder.

    The model keeps the name under which it came, or takes `name` ("foo", or "foo_SAEHD"). One that has the name already
    goes into its newest backup. Raises CheckpointError for runs without a checkpoint, and, unless `replace` is set, for
    a folder whose model of that name is of another shape or of a later iteration; ConfigError for runs that are neither
    a saehd's nor an xseg's.
    """
    directory, chosen = find_run(run, Path(runs))
    config = load_config(directory.config_path)
    if config.model.name not in ("saehd", "xseg"):
        model = config.model.name
        raise ConfigError(
            f"{directory.path}: its model is {model}; only saehd and xseg have a form in DeepFaceLab"
        )
    loaded = checkpoint.load(chosen or directory)
    tell_notes(loaded)
    if config.model.name == "xseg":
        return torch_to_xseg(directory, config, loaded, output, name, replace)
    kept = kept_folder(directory.path / KEPT)
    prefix = model_prefix(name) if name else kept.prefix if kept else "new_SAEHD_"
    target = Folder(output, prefix)
    if not replace:
        refuse_replacing(target, config, loaded.step)
    has_backup = bool(model_files(target))
    content = model_data(kept, config, directory, loaded.step)
    modules = build_networks(
        config, read_layout(directory.data_path) or data_layout(config), fake=True
    )
    with replacing(target) as folder:
        write_networks(folder, modules, loaded.state["modules"])
        write_optimizers(folder, modules, loaded.state["optimizers"], config.optimizer.name)
        write_options(folder, content)
        if kept is not None:
            absent = {part for module, (part, _) in DISCRIMINATORS.items() if module in modules}
            restore_others(
                kept,
                folder,
                absent | {OPTIMIZERS[trained] for trained in loaded.state["optimizers"]},
            )
    model, name = config.model.settings, prefix.rstrip("_")
    print(f"wrote {output}: {name}, {model.archi} at {model.image_size} pixels, step {loaded.step}")
    if has_backup:
        print(f"what was there is in {output / f'{name}_autobackups' / '01'}")
    return output


def refuse_replacing(target: Folder, config: Config, step: int) -> None:
    """Raise CheckpointError for a folder whose model of that name is another one, or further trained."""
    if not model_files(target):
        return
    otherwise = (
        "give --name, name another folder, or add --replace: the model there becomes a backup"
    )
    try:
        shape, iterations = describe_model(target)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; it is not replaced: {otherwise}") from error
    ours = comparable(update_options({}, config.to_data()))
    wrong = [f"{key} is {shape[key]}, not {ours[key]}" for key in shape if shape[key] != ours[key]]
    model = f"{target.path} holds a {target.prefix.rstrip('_')}"
    if wrong:
        raise CheckpointError(f"{model} of another shape: {'; '.join(wrong)}; {otherwise}")
    refuse_later(model, iterations, step, otherwise)


def describe_model(folder: Folder) -> tuple[dict[str, Any], int]:
    """Return the options of a model that make its shape, as far as its files show, and its iteration.

    CheckpointError for damaged files.
    """
    data = folder.read_data()
    if data is not None:
        return comparable(QUICK96 if folder.is_quick else data["options"]), int(data["iter"])
    parts = ("encoder", "inter", "inter_AB", "decoder_src", "decoder")
    found = recognize({part: arrays for part in parts if (arrays := folder.read(part)) is not None})
    found["resolution"] = found.pop("image_size")
    del found["archi"]  # weights do not determine u and c
    optimizer = folder.read("src_dst_opt") or {}
    return found, int(optimizer["iters:0"].reshape(-1)[0]) if "iters:0" in optimizer else 0


def comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that make a model's shape, letters of the archi in order."""
    found = {key: plain(options[key]) for key in SHAPING if key in options}
    if "archi" in found:
        family, dash, letters = str(found["archi"]).partition("-")
        found["archi"] = family + dash + "".join(sorted(letters))
    return found


def write_networks(
    folder: Folder, modules: Mapping[str, nn.Module], saved: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Write the networks' files."""
    for part, network in modules["autoencoder"].named_children():
        state = {
            key: value for key, value in saved["autoencoder"].items() if key.startswith(f"{part}.")
        }
        state = {key.removeprefix(f"{part}."): value for key, value in state.items()}
        write_file(folder.file(part), network_to_leras(network, state))
    for module_name, (part, _) in DISCRIMINATORS.items():
        if module_name in modules:
            write_file(
                folder.file(part), network_to_leras(modules[module_name], saved[module_name])
            )


def write_optimizers(
    folder: Folder,
    modules: Mapping[str, nn.Module],
    saved: Mapping[str, Mapping[str, Any]],
    name: str,
) -> None:
    """Write the files of the optimizers' state, if DeepFaceLab has an optimizer of that name."""
    for trained, state in saved.items():
        if name not in KINDS:
            print(f"{OPTIMIZERS[trained]}: left out, for {name} has no counterpart in DeepFaceLab")
            continue
        arrays = optimizer_arrays(
            modules[TRAINED.get(trained, trained)], trained, state, KINDS[name]
        )
        write_file(folder.file(OPTIMIZERS[trained]), arrays)


def model_data(
    kept: Folder | None, config: Config, directory: RunDirectory, step: int
) -> dict[str, Any]:
    """Return a model's `_data.dat`: the one that came with the run with the changes, or a new one.

    One that is where the model goes is another training's, or of an earlier return: nothing of it is taken.
    """
    settings = config.to_data()
    base = kept.read_data() if kept else None
    if base is None:
        options = default_options(settings)
    elif kept is not None and kept.is_quick:
        options = {**base["options"], "batch_size": settings["train"]["batch_size"]}
    else:
        options = update_options(base["options"], settings)
    return continued(base, options, step, logged_losses(directory))


def logged_losses(directory: RunDirectory) -> list[tuple[int, list[float]]]:
    """Return the run's logged losses per sample, (step, [source, destination]), as DeepFaceLab adds them up.

    Its history never has the discriminators' losses, total variation or background.
    """
    found = []
    for line in read_lines(directory.metrics_path):
        losses = line.get("losses") if line.get("kind") == "train" else None
        if not isinstance(losses, dict):
            continue
        source, destination = (
            [
                float(losses[f"autoencoder/{name}"])
                for name in names
                if f"autoencoder/{name}" in losses
            ]
            for names in HISTORY
        )
        if source and destination:
            found.append((int(line["step"]), [sum(source), sum(destination)]))
    return found


def optimizer_arrays(
    module: nn.Module, trained: str, saved: Mapping[str, Any], kinds: Sequence[str]
) -> Arrays:
    """Return an optimizer's saved state as leras keeps it."""
    tensors: Mapping[Any, Mapping[str, Tensor]] = saved["state"]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    by_name = {}
    for (name, parameter), index in zip(module.named_parameters(), order, strict=True):
        # A part that was never trained (all before the first step, inter_AB without random warp) has no state yet;
        # DeepFaceLab has zeros. What a precision mode keeps there, the remainder of its rounding, has no place in it.
        state = tensors.get(index) or {kind: torch.zeros(parameter.shape) for kind in kinds}
        by_name[name] = {kind: state[kind] for kind in kinds}
    states: dict[str, dict[str, Mapping[str, Tensor]]] = {}
    networks = networks_of(trained, module)
    for scope, network in networks.items():
        prefix = f"{scope}." if trained == "autoencoder" else ""
        states[scope] = {name: by_name[prefix + name] for name, _ in network.named_parameters()}
    return optimizer_to_leras(networks, states, int(saved["param_groups"][0].get("iterations", 0)))
