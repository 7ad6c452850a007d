"""The first files of a run that was trained elsewhere."""

from __future__ import annotations

from typing import Any

from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets
from mpt.seams import DataSpec


def start_of_loop(step: int) -> dict[str, Any]:
    """Return the training loop's entries of a checkpoint, for a run that was trained elsewhere."""
    loop = {
        "step": step,
        "seconds": 0.0,
        "skipped": {},
        "sums": {},
        "counts": {},
        "best": None,
        "best_step": 0,
    }
    return {**loop, "last_metrics": {}, "scales_seen": {}, "memory": {}}


def data_layout(config: Config) -> DataSpec:
    """Return the data spec of the configuration's data set, without opening it if possible."""
    assume = config.dataset.plugin.optional("assume")
    spec = assume(config.sized_dataset.native_settings()) if assume else None
    return spec or build_datasets(config)[0].spec
