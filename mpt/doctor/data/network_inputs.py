"""A batch as it reaches the first layer with weights, after whatever the task and the network do to it before.

The layer's input is recognised by its values: each of its channels is a linear function of the batch's. A layer that
gets something else (noise, features, several pictures in one tensor) is not judged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mpt.doctor.findings import Section
from mpt.engine.step.step import back_propagate
from mpt.nn.shared.named_modules import named_modules
from mpt.seams import Batch, Phase, Run
from mpt.seams.phase_losses import draw_batch

LINEAR = 0.999
"""Correlation of a channel with the batch's, from which on it is the same picture in other units."""
LARGE, SMALL = 20.0, 0.02
"""Root mean square and standard deviation of the inputs that no standardisation of pictures makes."""
LEAST_OFFSET, MOST_TIMES = 0.1, 6.0
"""A mean in the units of bytes leaves an offset at least this large; standardising divides by 1/6 or more."""
LEAST_DEVIATION = 0.05
"""Of the batch's own pictures; darker ones are a finding of their own."""


class _Arrived(Exception):
    def __init__(self, layer: str, value: Tensor) -> None:
        super().__init__(layer)
        self.layer, self.value = layer, value


def examine_inputs(section: Section, run: Run, batch: Batch) -> None:
    """Say how a batch reaches the network, and the faults with its scale. The run is not usable afterwards."""
    given = run.data.as_floats({name: value.to(run.device) for name, value in batch.items()})
    for phase in run.phases:
        for name, spec in run.data.fields.items():
            if spec.kind != "image" or len(spec.shape) != 3 or name not in given:
                continue
            found = arrival(run, phase, given, name)
            if found is not None:
                judge(section, name, given[name], found)
                return


def arrival(run: Run, phase: Phase, batch: Batch, name: str) -> _Arrived | None:
    """Return the first layer with weights that a field of the batch reaches; None if it is not seen to."""
    try:
        with watched(run, batch[name]):
            back_propagate(run, phase, draw_batch(run, phase, dict(batch)))
    except _Arrived as found:
        return found
    return None


@contextlib.contextmanager
def watched(run: Run, image_bchw: Tensor) -> Iterator[None]:
    """Raise _Arrived within the block before a layer that is given the image."""

    def look(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        value = inputs[0] if inputs else None
        if isinstance(value, Tensor) and is_linear_in(value, image_bchw):
            raise _Arrived(names[layer], value.detach().float().reshape(image_bchw.shape))

    names: dict[nn.Module, str] = {}
    handles = []
    for name, layer in named_modules(run.task.modules):
        has_weights = any(weight.dim() >= 2 for weight in layer.parameters(recurse=False))
        if has_weights and layer not in names:
            names[layer] = name
            handles.append(layer.register_forward_pre_hook(look))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_linear_in(value: Tensor, image_bchw: Tensor) -> bool:
    """Return whether each channel that varies is a linear function of the image's."""
    if (
        not value.is_floating_point()
        or value.numel() != image_bchw.numel()
        or len(value) != len(image_bchw)
    ):
        return False
    channels = image_bchw.shape[1]
    sides = [one.detach().double().reshape(image_bchw.shape) for one in (value, image_bchw)]
    planes = [one.transpose(0, 1).reshape(channels, -1) for one in sides]
    centred = [one - one.mean(1, keepdim=True) for one in planes]
    norms = centred[0].norm(dim=1) * centred[1].norm(dim=1)
    varies = norms > 0
    products = (centred[0] * centred[1]).sum(1).abs()
    return bool(varies.any()) and bool((products[varies] > LINEAR * norms[varies]).all())


def judge(section: Section, name: str, image_bchw: Tensor, found: _Arrived) -> None:
    """Say with which mean and deviation the image arrives, and whether that can be meant."""
    mean, deviation = float(found.value.mean()), deviation_of(found.value)
    size = float(found.value.square().mean().sqrt())
    before = deviation_of(image_bchw)
    text = f"{name} reaches {found.layer} with mean {mean:.3g} and deviation {deviation:.3g}"
    row = {
        "field": name,
        "layer": found.layer,
        "mean": round(mean, 6),
        "deviation": round(deviation, 6),
    }
    section.tables.setdefault("network inputs", []).append(row)
    about = "network"
    if size > LARGE:
        section.add(
            "warning", about, text, "are task.mean and task.std in the units of pixels from 0 to 1?"
        )
    elif deviation < SMALL and before > LEAST_DEVIATION:
        section.add("warning", about, text, why_small(mean, deviation * 255 / before))
    else:
        section.add("ok", about, text)


def deviation_of(image_bchw: Tensor) -> float:
    """Return the standard deviation within channels: that between them is no contrast."""
    return float(image_bchw.float().transpose(0, 1).flatten(1).var(1).mean().sqrt())


def why_small(mean: float, times: float) -> str:
    """Return the likely reason of a small deviation, which is `times` the stored pixels' through 255."""
    if abs(times - 1) < 0.02:
        return "its pixels are divided by 255 twice: data sets deliver 0 to 1"
    if abs(mean) < LEAST_OFFSET and 1 < times < MOST_TIMES:
        return "are its pixels divided by 255 twice, or is task.std not in the units of pixels from 0 to 1?"
    return "networks expect about 0.2 to 1: is task.std in the units of pixels from 0 to 1?"
