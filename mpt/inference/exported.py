"""An exported file's metadata, and inference from such a file alone.

Safetensors headers, ONNX metadata and `.pt` files hold texts: the run's configuration, the layout of its data (input
size, channels, classes), how images are brought to that size and standardised, the networks, dtype, step and mpt's
version. From these the task is built again; its network takes the file's weights, or is replaced by an ONNX Runtime
session. It computes in float32.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import change_precision, load_config
from mpt.config.schema import Config
from mpt.data.loading.absent import AbsentDataset
from mpt.engine.building.build import build_run
from mpt.engine.building.devices import choose_device
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.graphs.files import open_graph
from mpt.inference.half import networks
from mpt.inference.inputs import fit_of
from mpt.inference.trained import Trained
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from mpt.run.records.layout import RunDirectory
from mpt.seams import DataSpec, Exports, HoldsWeights, Task
from mpt.version import VERSION
from mpt.weights.matching import own_tensors
from mpt.weights.weights_file import load_weights_file, read_weights_file

SUFFIXES = (".onnx", ".safetensors", ".pt")
KEYS = "mpt_output_keys"
"""The metadata's name of the keys of outputs, for a network that returns a dict."""
FITS = {
    "crop": "the largest centred part of the picture in these proportions, resized (bilinear, antialiased): "
    "PIL.ImageOps.fit(picture, (width, height), BILINEAR)",
    "letterbox": "all of the picture between black bars, resized (bilinear, antialiased): "
    "PIL.ImageOps.pad(picture, (width, height), BILINEAR, color=0)",
    "stretch": "all of the picture, distorted to the size (bilinear, antialiased): "
    "picture.resize((width, height), BILINEAR)",
}
"""How a picture in 8 bits is brought to the input's size, with the call of Pillow that does it."""


def described_fit(fit: str, share: float) -> str:
    """Return how a picture is brought to the input's size; `share` of its sides are looked at if it is cut."""
    if fit != "crop" or share == 1:
        return f"{fit}: {FITS[fit]}"
    cut = f"of the middle {share:g} of its width and height, {FITS[fit]}"
    return f"{fit}: {cut[:-1]}, bleed={(1 - share) / 2:g})"


def description(trained: Trained, task: Task, names: list[str], dtype: str) -> dict[str, str]:
    """Return a file's metadata."""
    data = trained.train_data.spec
    settings = trained.config.task.settings.model_dump()
    about = {
        "mpt_version": VERSION,
        "mpt_config": trained.config.to_yaml(),
        "mpt_run": trained.directory.name,
        "mpt_step": str(trained.loaded.step),
        **metric_text(trained),
        "mpt_dtype": dtype,
        "mpt_networks": " ".join(names),
        "mpt_layout": json.dumps(data.to_record()),
        **memory_text(trained),
    }
    if data.classes:
        about["mpt_classes"] = json.dumps(data.classes)
    if task.inputs:
        about["mpt_input_sizes"] = json.dumps(
            {name: list(data.fields[name].shape) for name in task.inputs}
        )
        about["mpt_fit"] = described_fit(*fit_of(trained))
    if "mean" in settings and "std" in settings:
        about |= {"mpt_mean": json.dumps(settings["mean"]), "mpt_std": json.dumps(settings["std"])}
    return {**about, **(task.export_texts() if isinstance(task, Exports) else {})}


def metric_text(trained: Trained) -> dict[str, str]:
    """Return the metric that the checkpoint was saved with, if it was evaluated."""
    value = trained.loaded.manifest.get("metric")
    return (
        {"mpt_metric": f"{trained.run.task.metric} {value!r}"}
        if isinstance(value, int | float)
        else {}
    )


def memory_text(trained: Trained) -> dict[str, str]:
    """Return the settings of the memory tricks that stay in a network: those that narrow it, nothing that is folded."""
    tricks = trained.config.memory.tricks
    kept = {
        trick.name: tricks[trick.name].model_dump()
        for trick in trained.run.tricks
        if isinstance(trick, HoldsWeights)
        and type(trick).pack_weights is not HoldsWeights.pack_weights
        and type(trick).fold is HoldsWeights.fold
    }
    return {"mpt_memory": json.dumps(kept)} if kept else {}


def is_export(text: str | None) -> bool:
    """Return whether a user named an exported file instead of a run. Raises CheckpointError for any other file."""
    if text is None or not Path(text).is_file():
        return False
    if not text.endswith(SUFFIXES):
        raise CheckpointError(
            f"{text}: inference takes a run, or a file that `mpt convert` wrote ({', '.join(SUFFIXES)}); weights from "
            "elsewhere start a training with model.weights"
        )
    return True


def open_exported(
    path: Path, device_name: str, overrides: tuple[str, ...], allow: tuple[str, ...]
) -> Trained:
    """Build the task of an exported file for inference.

    Raises CheckpointError for a file that says too little of itself or does not fit its description.
    """
    about = read_about(path)
    config = configuration(path, about, overrides, allow)
    try:
        spec = DataSpec.from_record(json.loads(about["mpt_layout"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: its metadata is damaged: mpt_layout") from error
    data = AbsentDataset(spec, "an exported file holds no data")
    run = build_run(config, choose_device(device_name), spec, trains=False)
    names = networks_in(about)
    state: dict[str, Any] = {}
    if path.suffix == ".onnx":
        use_session(path, run.task, names, whole=about.get("mpt_inside") == "true")
        if isinstance(run.task, Exports):
            run.task.take_graph_texts(about)
    else:
        take_weights(path, run.task, names)
        state = {
            "modules": {name: module.state_dict() for name, module in run.task.modules.items()}
        }
    refuse_absent_networks(path, run.task, names)
    loaded = LoadedCheckpoint(
        int(about.get("mpt_step", "0")), state, path, {"dtype": about.get("mpt_dtype", "")}
    )
    return Trained(RunDirectory(path.resolve().parent), config, run, data, data, loaded)


def networks_in(about: Mapping[str, str]) -> list[str]:
    """Return the names of a file's networks."""
    return about.get("mpt_networks", "").split()


def configuration(
    path: Path, about: Mapping[str, str], overrides: tuple[str, ...], allow: tuple[str, ...]
) -> Config:
    """Return the configuration that a file was written with, in float32 and without what memory tricks fold."""
    if "mpt_config" not in about or "mpt_layout" not in about:
        raise CheckpointError(
            f"{path}: its metadata are missing (no mpt_config, mpt_layout in its metadata). Exports of `mpt convert` "
            "do; other weights start a training with model.weights"
        )
    memory = ("memory=null", *(f"memory={kept}" for kept in [about.get("mpt_memory")] if kept))
    text = about["mpt_config"] + "\n"
    return change_precision(load_config(text, (*memory, *overrides), allow=allow), FLOAT32)


def read_about(path: Path) -> Mapping[str, str]:
    """Return the texts that a file holds of itself. Raises CheckpointError for a damaged file."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                return dict(file.metadata() or {})
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: not a safetensors file, or damaged ({error})"
            ) from error
    if path.suffix == ".pt":
        return read_weights_file(path).texts
    return dict(open_session(path).get_modelmeta().custom_metadata_map)


def open_session(path: Path) -> Any:
    """Return an ONNX Runtime session. Raises ConfigError if it is not installed, CheckpointError for bad files."""
    if importlib.util.find_spec("onnxruntime") is None:
        raise ConfigError(
            "an .onnx file is run by the package onnxruntime: pip install onnxruntime"
        )
    try:
        return open_graph(path)
    except Exception as error:  # its exceptions have no common class
        raise CheckpointError(
            f"{path}: not an ONNX file, damaged, or not for ONNX Runtime ({str(error).splitlines()[0]})"
        ) from error


def take_weights(path: Path, task: Task, names: list[str]) -> None:
    """Copy a file's tensors into the task's networks. Raises CheckpointError unless each fits."""
    own = own_tensors(task.modules)
    wanted = {key for key in own if any(key.startswith(f"{name}.") for name in names)}
    found = load_weights_file(path)
    wrong = sorted(wanted ^ set(found)) or sorted(
        key for key in wanted if own[key].shape != found[key].shape
    )
    if wrong or not wanted:
        raise CheckpointError(
            f"{path}: its tensors are not those of its configuration ({', '.join(wrong[:3])})"
        )
    with torch.no_grad():
        for key, tensor in found.items():
            own[key].copy_(tensor)


def refuse_absent_networks(path: Path, task: Task, names: list[str]) -> None:
    """Let networks that a file does not hold raise CheckpointError when they are called: their numbers are random."""

    def raising(absent: str) -> Callable[..., Any]:
        def forward(*inputs: Any) -> Any:
            raise CheckpointError(
                f"{path}: it holds {' and '.join(names)} alone, and this needs {absent} too; `mpt convert RUN --to "
                "safetensors` writes all that inference calls into one file"
            )

        return forward

    for name, module in networks(task.modules):
        if name not in names:
            module.forward = raising(name)


def use_session(path: Path, task: Task, names: list[str], whole: bool) -> None:
    """Let an ONNX file compute in place of the task's network. Raises CheckpointError if it names none of them."""
    if len({name for name, _ in networks(task.modules)} & set(names)) != 1:
        raise CheckpointError(
            f"{path}: it is one network of several, or of another task ({', '.join(names)})"
        )
    attach(task, names, whole, open_session(path))


def attach(task: Task, names: Sequence[str], whole: bool, session: Any) -> None:
    """Let an ONNX Runtime session compute in place of the task's network of one of the names."""
    slots = session.get_inputs()
    keys = json.loads(session.get_modelmeta().custom_metadata_map.get(KEYS, "null"))

    def run_session(*inputs: Any) -> Any:
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        if len(slots) == 1 and len(tensors) > 1 and whole:
            tensors = [torch.cat(tensors, 1)]  # its channels lie behind each other
        if len(tensors) != len(slots):
            raise CheckpointError(
                f"the exported file takes {', '.join(slot.name for slot in slots)}, and this asks for more: for a "
                "generator's samples leave truncation out (--truncation 1), or name the run"
            )
        feeds = {
            slot.name: value.to(kind_of(slot)).cpu().numpy() for slot, value in zip(slots, tensors)
        }
        made = [
            torch.from_numpy(one).to(tensors[0].device) for one in run_in_batches(session, feeds)
        ]
        if keys:
            return dict(zip(keys, made, strict=True))
        return made[0] if len(made) == 1 else tuple(made)

    forward: Callable[..., Any] = run_session
    if whole:
        assert isinstance(task, Exports)  # nothing else was written with preprocessing around it
        forward = lambda *inputs: task.from_whole(inputs, run_session)  # noqa: E731
    next(module for name, module in networks(task.modules) if name in names).forward = forward


def kind_of(slot: Any) -> torch.dtype:
    """Return the dtype that a graph's input takes: labels are whole numbers."""
    return {
        "tensor(int64)": torch.int64,
        "tensor(int32)": torch.int32,
        "tensor(bool)": torch.bool,
    }.get(slot.type, torch.float32)


def run_in_batches(session: Any, feeds: Mapping[str, Any]) -> list[Any]:
    """Run a session, in pieces of its batch if that is fixed; the last piece is filled up by its last sample."""
    shape = session.get_inputs()[0].shape
    batch, count = shape[0] if shape else None, len(next(iter(feeds.values())))
    if not isinstance(batch, int) or batch == count:
        return computed(session, feeds)
    pieces = []
    for start in range(0, count, batch):
        rows = [min(row, count - 1) for row in range(start, start + batch)]
        pieces.append(computed(session, {name: value[rows] for name, value in feeds.items()}))
    return [numpy.concatenate(parts)[:count] for parts in zip(*pieces, strict=True)]


def computed(session: Any, feeds: Mapping[str, Any]) -> list[Any]:
    """Return a session's outputs. Raises CheckpointError if ONNX Runtime cannot compute one of the nodes."""
    try:
        return list(session.run(None, dict(feeds)))
    except Exception as error:  # its exceptions have no common class
        if not type(error).__module__.startswith("onnxruntime"):
            raise
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"ONNX Runtime cannot compute this graph: {reason}") from error
