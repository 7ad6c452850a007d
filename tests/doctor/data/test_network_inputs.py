"""Pictures as they arrive at the first layer with weights, whoever changed their scale on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.config.load import load_config
from mpt.doctor.data.network_inputs import examine_inputs
from mpt.doctor.findings import Finding, Section
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.loop.assembly import supply_batches

CPU = torch.device("cpu")


def arrive(network: nn.Module | None = None, **settings: Any) -> Finding:
    """Return what is said of small digits that go through a task, and through a network of one's own if it is given."""
    model = {"name": "small_cnn", "image_size": 16, "features": 4}
    train = {"steps": 1, "batch_size": 16}
    config = load_config(
        {"model": model, "dataset": "digits", "precision": "fp32", "train": train, **settings}
    )
    data, _ = build_datasets(config)
    run = build_run(config, CPU, data.spec)
    if network is not None:
        run.task.net = network  # type: ignore[attr-defined]
        run.task.modules = {"net": network}
    section = Section("data")
    examine_inputs(section, run, next(iter(supply_batches(config, data).batches(0))))
    (said,) = section.findings
    return said


class Scaled(nn.Module):
    """Changes its pictures itself before the first layer."""

    def __init__(self, factor: float, first: nn.Module | None = None) -> None:
        super().__init__()
        self.factor, self.first = factor, first or nn.Identity()
        self.layer = nn.Linear(256, 10)

    def forward(self, image: Tensor) -> Tensor:
        made: Tensor = self.layer(self.first(image * self.factor).flatten(1))
        return made


def test_pictures_that_the_task_standardises_are_in_order() -> None:
    said = arrive()
    assert said.level == "ok"
    assert (
        said.text.startswith("image reaches net.stem.0 with mean -") or "reaches net." in said.text
    )


@pytest.mark.parametrize(
    "task",
    [{"mean": [50.0]}, {"std": [0.005]}, {"std": [50.0]}, {"mean": [127.5], "std": [0.5]}],
    ids=["mean by 100", "std by a hundredth", "std by 100", "mean of bytes"],
)
def test_a_mean_or_deviation_that_is_wrong_by_100_is_a_warning(task: Mapping[str, Any]) -> None:
    said = arrive(task={"name": "classify", **task})
    assert said.level == "warning"
    assert "the units of pixels from 0 to 1?" in said.advice


def test_a_network_that_divides_by_255_once_more_is_named_with_its_layer() -> None:
    said = arrive(Scaled(1 / 255), task={"name": "classify", "mean": [0.0], "std": [1.0]})
    assert (said.level, said.advice) == (
        "warning",
        "its pixels are divided by 255 twice: data sets deliver 0 to 1",
    )
    assert said.text.startswith("image reaches net.layer with mean 0.00")


@pytest.mark.parametrize("factor", [255.0, 1 / 255], ids=["bytes", "small"])
def test_pictures_of_any_scale_in_front_of_a_normalising_layer_are_in_order(factor: float) -> None:
    assert arrive(Scaled(factor, nn.BatchNorm2d(1, eps=1e-12))).level == "ok"


def test_a_generator_s_noise_is_not_taken_for_a_picture() -> None:
    said = arrive(model={"name": "vanilla_gan", "image_size": 16, "channels": 1})
    assert said.level == "ok"
    assert "reaches disc." in said.text


def test_channels_in_units_of_bytes_are_not_taken_for_contrast() -> None:
    """Each channel is nearly constant, at a value of its own: the deviation of all together is that of the means."""
    data = {"name": "shapes", "size": 32, "image_size": 16, "channels": 3}
    task = {"name": "classify", "mean": [123.7, 116.3, 103.5], "std": [58.4, 57.1, 57.4]}
    said = arrive(dataset=data, task=task)
    assert said.level == "warning"
    assert "is task.std in the units of pixels from 0 to 1?" in said.advice


def test_a_network_that_divides_standardised_pixels_by_255_is_named_too() -> None:
    said = arrive(Scaled(1 / 255))
    assert said.level == "warning"
    assert "divided by 255 twice" in said.advice
