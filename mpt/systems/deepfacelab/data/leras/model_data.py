"""A model's `_data.dat` as DeepFaceLab keeps it (options, iteration, loss history, previews), and its equivalent here.

`MAPPED` is the table of options that have a setting in mpt; docs/how-to/deepfacelab.md shows it. All others stay in the
file: the original is kept in the run's folder, and on the way back only changed entries are replaced, with their type,
so that DeepFaceLab finds everything else as it left it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpt.errors import CheckpointError
from mpt.foreign.files import read_bytes
from mpt.systems.deepfacelab.data.leras.restricted_pickle import read_pickle

MAPPED = {
    "resolution": ("model", "image_size"),
    "archi": ("model", "archi"),
    "ae_dims": ("model", "ae_dims"),
    "e_dims": ("model", "e_dims"),
    "d_dims": ("model", "d_dims"),
    "d_mask_dims": ("model", "d_mask_dims"),
    "true_face_power": ("model", "true_face_power"),
    "gan_power": ("model", "gan_power"),
    "gan_patch_size": ("model", "gan_patch_size"),
    "gan_dims": ("model", "gan_dims"),
    "masked_training": ("task", "masked_training"),
    "eyes_mouth_prio": ("task", "eyes_mouth_priority"),
    "blur_out_mask": ("task", "blur_out_mask"),
    "face_style_power": ("task", "face_style_power"),
    "bg_style_power": ("task", "bg_style_power"),
    "pretrain": ("dataset", "pretrain"),
    "face_type": ("dataset", "face_type"),
    "random_warp": ("dataset", "random_warp"),
    "random_src_flip": ("dataset", "random_src_flip"),
    "random_dst_flip": ("dataset", "random_dst_flip"),
    "random_hsv_power": ("dataset", "random_hsv_power"),
    "uniform_yaw": ("dataset", "uniform_yaw"),
    "ct_mode": ("dataset", "ct_mode"),
    "batch_size": ("train", "batch_size"),
}
"""DeepFaceLab's option -> section and key of the configuration. `read_settings` and `update_options` do the others:
adabelief, lr_dropout, clipgrad and target_iter."""
QUICK96 = {
    "resolution": 96,
    "archi": "df-ud",
    "ae_dims": 128,
    "e_dims": 64,
    "d_dims": 64,
    "d_mask_dims": 16,
    "face_type": "f",
    "masked_training": True,
    "eyes_mouth_prio": False,
    "adabelief": False,
    "lr_dropout": "y",
    "random_warp": True,
    "random_src_flip": False,
    "random_dst_flip": False,
}
"""A Quick96 as an SAEHD; its file of options has none of these."""
QUICK96_RATE = 2e-4
QUICK96_SCALE = 0.05
OTHERS = ("adabelief", "lr_dropout", "clipgrad", "target_iter")
DROPOUT = {"lr_dropout": 0.3, "lr_cos": 500}
"""The meaning of "lr_dropout: y"; "cpu" is the same, drawn elsewhere."""
LARGEST_DATA_BYTES = 1 << 30
"""Options, previews, and two losses for each of some million iterations."""
FURTHER_STEPS = 100_000
"""The length of a converted run if DeepFaceLab's target_iter is 0, which means for ever."""


def read_model_data(path: Path) -> dict[str, Any]:
    """Return the content of a `_data.dat`. Raises CheckpointError for anything else."""
    try:
        content = read_pickle(read_bytes(path, LARGEST_DATA_BYTES), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("options"), dict):
        raise CheckpointError(
            f"{path}: holds no options; it is no _data.dat of a DeepFaceLab model"
        )
    if not isinstance(content.get("iter"), int | np.integer):
        raise CheckpointError(
            f"{path}: holds no iteration; it is no _data.dat of a DeepFaceLab model"
        )
    check_options(content["options"], str(path))
    return content


def read_options(path: Path) -> dict[str, Any]:
    """Return the default options that DeepFaceLab keeps for new models. CheckpointError for anything else."""
    content = read_pickle(read_bytes(path, LARGEST_DATA_BYTES), str(path))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no options")
    return content


def check_options(options: Mapping[Any, Any], where: str) -> None:
    """Raise CheckpointError if an option that is used is of a type that none has."""
    for name in (*MAPPED, *OTHERS):
        value = plain(options.get(name))
        wanted = int | float | None if name == "target_iter" else int | float | str | None
        if not isinstance(value, wanted):
            raise CheckpointError(
                f"{where}: its option {name} is a {type(value).__name__}; no DeepFaceLab writes that"
            )


def plain(value: Any) -> Any:
    """Return a NumPy scalar as Python's number, anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def read_settings(data: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return the sections of a configuration that a model's options ask for."""
    options = {key: plain(value) for key, value in data["options"].items()}
    sections: dict[str, dict[str, Any]] = {
        name: {} for name in ("model", "task", "dataset", "optimizer", "train")
    }
    for option, (section, key) in MAPPED.items():
        if options.get(option) is not None:
            sections[section][key] = options[option]
    for needed in ("resolution", "archi", "ae_dims", "e_dims", "d_dims", "d_mask_dims"):
        if needed not in options:
            raise CheckpointError(
                f"{where}: its options do not say {needed}; it is no model of SAEHD"
            )
    if "df" not in str(options["archi"]):
        sections["model"]["true_face_power"] = 0.0
    if not sections["model"].get("gan_power"):
        sections["model"].pop("gan_patch_size", None)
    sections["optimizer"]["name"] = (
        "adabelief" if options.get("adabelief", True) else "rmsprop_leras"
    )
    pretrains = bool(options.get("pretrain"))
    if options.get("lr_dropout", "n") in ("y", "cpu", True) and not pretrains:
        sections["optimizer"] |= DROPOUT
    if options.get("clipgrad"):
        sections["optimizer"]["clip_grad_norm"] = 1.0
    target = options.get("target_iter") or 0
    sections["train"]["steps"] = (
        target if target > int(data["iter"]) else int(data["iter"]) + FURTHER_STEPS
    )
    return sections


def update_options(
    options: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a model's options with the changes of the configuration (as plain data); types and order are kept.

    A value that means the same as before is left as it is, so that nothing changes on a round trip.
    """
    found = dict(options)

    def put(name: str, value: Any) -> None:
        before = found.get(name)
        if value is None or (before is not None and plain(before) == value):
            return
        found[name] = type(before)(value) if isinstance(before, np.generic) else value

    for option, (section, key) in MAPPED.items():
        if key in config[section]:
            put(option, config[section][key])
    optimizer = config["optimizer"]
    put("adabelief", optimizer["name"] != "rmsprop_leras")
    dropped = optimizer.get("lr_dropout", 1.0) < 1
    pretrains = bool(plain(found.get("pretrain", False)))  # while which DeepFaceLab has no dropout
    if not pretrains and dropped != (plain(found.get("lr_dropout", "n")) in ("y", "cpu", True)):
        found["lr_dropout"] = "y" if dropped else "n"
    put("clipgrad", optimizer.get("clip_grad_norm") is not None)
    if plain(found.get("target_iter", 0)):
        put("target_iter", config["train"]["steps"])
    return found


def default_options(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return options for a run that did not come from DeepFaceLab, which fills in whatever else it wants."""
    options = {"face_type": "f", "models_opt_on_gpu": True, "lr_dropout": "n"}
    options |= {"gan_patch_size": max(3, config["model"]["image_size"] // 8)}
    return update_options(options, config)


def continued(
    content: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    step: int,
    losses: list[tuple[int, list[float]]],
) -> dict[str, Any]:
    """Return a model's `_data.dat` after a run: the one that came with it, or a new one, with options and history.

    DeepFaceLab takes a model at iteration 0 for a new one. Its loss history has an entry per iteration, [source,
    destination] or an XSeg's [loss]; `losses` are logged (step, entry), and count for each step since the one before.
    """
    begun = content or {"sample_for_preview": None, "choosed_gpu_indexes": None}
    kept = begun.get("loss_history")
    history = kept[:step] if isinstance(kept, list) else []
    for logged, entry in losses:
        missing = min(logged, step) - len(history)
        history += [list(entry) for _ in range(missing)]
    return {**begun, "iter": max(step, 1), "options": dict(options), "loss_history": history}
