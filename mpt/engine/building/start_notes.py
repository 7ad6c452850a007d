"""Notes before the first step: damaged checkpoints that were passed over, frozen random numbers, images scaled
otherwise than a library's weights were trained with, classes that the test set lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mpt.config.options import OptimizerOptions, setting_of
from mpt.config.schema import Config
from mpt.config.text.messages import few
from mpt.engine.building.initial_weights import Start, never_learnt
from mpt.optim.shared.groups import group_parameters
from mpt.seams.precision import Numerics
from mpt.seams.samples import DataSpec
from mpt.seams.task import Task

RGB = 3
MOST_NAMED = 3


def start_notes(config: Config, task: Task, start: Start) -> list[str]:
    damaged = [f"model.weights: {note}" for note in start.passed_over]
    return [
        *damaged,
        *never_learnt(task.trainable, start.newly_made),
        *other_scaling(config, start),
    ]


def lost_decay(
    config: Config, settings: Mapping[str, OptimizerOptions], numerics: Numerics
) -> list[str]:
    """Return a warning for each network whose weight decay the rounding of its weights takes whole.

    Seen by a step without gradients on weights from 1 to 2, which decay alone should move.
    """
    if not numerics.rounds_weights:
        return []
    found = []
    for name, own in settings.items():
        decay = setting_of(own, "weight_decay", 0.0)
        if not decay:
            continue
        probe = nn.Linear(16, 16, bias=False, dtype=numerics.dtype)
        probe.weight.data = torch.linspace(1, 2, 256).reshape(16, 16).to(numerics.dtype)
        probe.weight.grad = torch.zeros_like(probe.weight)
        before = probe.weight.detach().clone()
        plain: Any = config.optimizer.plugin.native_settings(own).model_copy(
            update={"parts": {}, "no_decay": ()}
        )
        config.optimizer.member("build")(
            plain, group_parameters(name, probe, list(probe.parameters()), plain)
        ).step()
        if torch.equal(probe.weight, before):
            kind = str(numerics.dtype).removeprefix("torch.")
            found.append(
                f"{name}: weight_decay {decay:g} at optimizer.lr {setting_of(own, 'lr', 0.0):g} is lost: it moves "
                f"{kind} weights by less than half an ulp. Use a mode with float32 weights (amp, bf16, O2), bf16-sr or "
                "bf16-kahan (or fp16-24bit), or optimizer.weight_decay=0"
            )
    return found


def other_scaling(config: Config, start: Start) -> list[str]:
    """Return a warning if a library's weights were trained on images of other mean and deviation than the default.

    Values that the configuration file sets are taken as meant, and a file that mpt wrote may be of a run with
    any figures.
    """
    settings = config.task.settings
    given = {"mean", "std"} & settings.model_fields_set
    published = config.model.plugin.optional("published_scaling")
    is_rgb = setting_of(config.model.settings, "channels") == RGB
    if (
        given
        or published is None
        or start.is_own
        or not is_rgb
        or not {"mean", "std"} <= set(type(settings).model_fields)
    ):
        return []
    found = published(config.model.name)
    if found is None or found == tuple(
        RGB * setting_of(settings, name) for name in ("mean", "std")
    ):
        return []
    mean, std = (f"[{', '.join(f'{one:g}' for one in numbers)}]" for numbers in found)
    return [
        f"images are standardised to a mean and deviation of 0.5, and {config.model.name} was published for others: "
        f"set task.mean='{mean}' task.std='{std}', unless these weights were trained otherwise"
    ]


def untested_classes(test: DataSpec) -> list[str]:
    """Return a warning if the test set has no sample of some classes, as a small folder that was split may."""
    counts = test.extra.get("class_counts", ())
    without = [name for name, count in zip(test.classes, counts, strict=False) if count == 0]
    if not without or not sum(counts):
        return []
    return [
        f"none of the {sum(counts)} test samples is of {few(without, MOST_NAMED)}: nothing is measured for "
        f"{len(without)} of {len(counts)} classes. Use a test folder, or a larger dataset.test_fraction"
    ]
