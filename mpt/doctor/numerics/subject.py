"""An examination's subject: a configuration with data, a batch and weights, and the same with another precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mpt.config.checking.precision_names import FLOAT32
from mpt.config.load import change_precision
from mpt.config.options import setting_of
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.engine.state.state import restore_trained
from mpt.seams import Batch, DataSpec, Run

Weights = Mapping[str, Any] | None
"""A checkpoint's state; None examines the run as it begins."""


@dataclass(frozen=True)
class Subject:
    """The subject of an examination: a configuration, its data's layout, a batch on the CPU and weights."""

    config: Config
    data: DataSpec
    batch: Batch
    device: torch.device
    weights: Weights = None
    step: int = 0
    """How far the weights are trained."""
    indices: Sequence[int] = ()
    """Indices of the batch's samples in the data set."""
    reference_forms: Sequence[str] = ()
    """Forms that the float32 step computes by stable ones: none, unless it is not finite as it is written."""

    @property
    def batch_size(self) -> int:
        """Samples of the batch."""
        return len(next(iter(self.batch.values())))

    def build(self, config: Config) -> Run:
        """Build the run in some precision, with the weights."""
        run = build_run(config, self.device, self.data)
        if self.weights is not None:
            restore_trained(run, self.weights)
        return run

    def build_reference(self) -> Run:
        """Build the run in float32, as its model and losses are written but for the `reference_forms`."""
        forms = list(self.reference_forms)
        return self.build(
            with_precision(change_precision(self.config, FLOAT32), stable_forms=forms)
        )


def as_on_a_gpu(config: Config, dtype: str | None = None) -> Config:
    """Return the configuration with the dtype that a GPU would choose: float16 unless set otherwise."""
    settings = config.precision.settings
    if setting_of(settings, "dtype") != "auto" and dtype is None:
        return config
    if "dtype" not in type(settings).model_fields:
        return config
    return with_precision(config, dtype=dtype or "float16")


def with_precision(config: Config, **changes: Any) -> Config:
    """Return the configuration with some settings of its precision changed."""
    changed = config.precision.settings.model_copy(update=changes)
    return dataclasses.replace(
        config, precision=dataclasses.replace(config.precision, settings=changed)
    )


def with_float32(config: Config, modules: Sequence[str]) -> Config:
    """Return the configuration with these modules in float32 in addition to those that it names."""
    return with_precision(
        config, keep_fp32=list(dict.fromkeys([*config.precision.settings.keep_fp32, *modules]))
    )


def with_stable_forms(config: Config, forms: Sequence[str]) -> Config:
    """Return the configuration with these forms replaced in addition to those that it names."""
    return with_precision(
        config, stable_forms=list(dict.fromkeys([*config.precision.settings.stable_forms, *forms]))
    )


def without_augmentation(config: Config) -> Config:
    """Return the configuration with training pictures as they are stored; the same object if they are already."""
    settings = config.dataset.settings
    if not setting_of(settings, "augment"):
        return config
    plain = dataclasses.replace(
        config.dataset, settings=settings.model_copy(update={"augment": []})
    )
    return dataclasses.replace(config, dataset=plain)
