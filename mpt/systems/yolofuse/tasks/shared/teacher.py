"""A trained detector whose answers another one learns (`task.teacher`): a run of model yolofuse, or its checkpoint.

The teacher is no module of the task: it is not trained, saved or averaged, and a checkpoint does not hold it, so its
run must be there to continue a training. It may be larger, of another family or fusion, or see one camera alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import change_precision, load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_networks, build_run
from mpt.engine.state.moving_averages import SUFFIX
from mpt.engine.state.state import restore_modules
from mpt.errors import ConfigError
from mpt.nn.shared.devices import place
from mpt.run.checkpoints.checkpoint import load
from mpt.run.checkpoints.choice import load_wanted
from mpt.run.records.data_layout import read_layout
from mpt.run.records.layout import find_run
from mpt.seams import Batch, DataSpec
from mpt.seams.trick_kinds import fold
from mpt.systems.yolofuse.nn.yolofuse import YoloFuse


class Teacher:
    """A network in evaluation mode; called with a batch, it returns its raw maps."""

    def __init__(self, network: YoloFuse) -> None:
        self.network = network.eval().requires_grad_(False)
        network.head.answers_once = False  # one-to-many maps: they answer at every place
        self.cameras, self.bins = network.cameras, network.bins
        self.dtype = next(network.parameters()).dtype

    @torch.no_grad()
    def __call__(self, batch: Batch) -> list[Tensor]:
        maps: list[Tensor] = self.network(
            *(batch[camera].to(self.dtype) for camera in self.cameras)
        )
        return maps


def open_teacher(
    wanted: str, student: nn.Module, fields: Sequence[str], classes: Sequence[str]
) -> Teacher:
    """Build the teacher that a run's or checkpoint's path names, on the student's device.

    `fields` are the data's pictures, of which the teacher may see others than the student. A planned student gets a
    teacher without values, of which no checkpoint is read. Raises ConfigError for a run that cannot teach this student,
    CheckpointError if there is none.
    """
    path = Path(wanted).expanduser()
    directory, chosen = find_run(str(path), path.parent)
    config = load_config(directory.config_path)
    layout = read_layout(directory.data_path)
    if config.model.name != "yolofuse" or layout is None:
        raise ConfigError(
            f"task.teacher: {wanted} trained {config.model.name}; name a finished run of model yolofuse"
        )
    if tuple(layout.classes) != tuple(classes):
        raise ConfigError(
            f"task.teacher: {wanted} knows the classes {', '.join(layout.classes)}, and here are {', '.join(classes)}; "
            "both must have the same, in one order"
        )
    weight = next(student.parameters())
    is_planned = isinstance(weight, FakeTensor)
    if is_planned:
        network = build_networks(config, layout, is_planned)["net"]
    else:
        loaded = load(chosen) if chosen is not None else load_wanted(directory, None, "map50")[0]
        network = trained_network(config, layout, loaded.state)
    assert isinstance(network, YoloFuse)
    check_fit(wanted, network, student, fields)
    return Teacher(place(network, weight.device, is_planned))  # type: ignore[arg-type]


def check_fit(wanted: str, network: YoloFuse, student: Any, fields: Sequence[str]) -> None:
    """Raise ConfigError for a teacher that sees a camera that the data have not, or answers at other places."""
    if not set(network.cameras) <= set(fields):
        raise ConfigError(
            f"task.teacher: {wanted} sees {' and '.join(network.cameras)}, and the data hold {' and '.join(fields)}; "
            "set dataset.cameras=pair"
        )
    if tuple(network.strides) != tuple(student.strides):
        raise ConfigError(
            f"task.teacher: {wanted} answers at strides {', '.join(map(str, network.strides))}, and this network at "
            f"{', '.join(map(str, student.strides))}; choose another fusion"
        )


def trained_network(config: Config, layout: DataSpec, state: Mapping[str, Any]) -> nn.Module:
    """Return a checkpoint's network in float32, its average if it has one, as it is without memory tricks."""
    alone = load_config(config.to_data(), ("task.teacher=null",))
    run = build_run(change_precision(alone, FLOAT32), torch.device("cpu"), layout, trains=False)
    restore_modules(run, state)
    fold(run.tricks, run.task.modules)
    return run.task.modules.get(f"net{SUFFIX}", run.task.modules["net"])
