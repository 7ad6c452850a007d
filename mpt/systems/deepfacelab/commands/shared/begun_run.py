"""The first files of a run that was trained elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets
from mpt.engine.state.moving_averages import follow
from mpt.engine.state.state import capture
from mpt.run.checkpoints import checkpoint
from mpt.run.process.files import write_atomically
from mpt.run.records.data_layout import write_layout
from mpt.run.records.layout import RunDirectory, create_run
from mpt.seams import DataSpec, Run
from mpt.systems.deepfacelab.commands.shared.model_folder import KEPT


def write_run(
    output: Path, config: Config, run: Run, step: int, source: str, keep: Callable[[Path], None]
) -> RunDirectory:
    """Make the folder of a run that has come to a step; `keep` writes further files into a folder inside."""
    directory = create_run(output.parent, output.name)
    write_atomically(directory.config_path, config.to_yaml())
    write_layout(directory.data_path, run.data)
    keep(directory.path / KEPT)
    for name, average in run.averages.items():
        # It begins with the weights, which were loaded after it was made.
        follow(average, run.task.modules[name], 0.0)
    captured = capture(run)
    captured["loop"] = start_of_loop(step)
    checkpoint.save(directory, step, captured, keep_last=1, extra_manifest={"source": source})
    return directory


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
