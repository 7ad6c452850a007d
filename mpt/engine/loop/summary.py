"""Contents of summary.json, which comparisons and reports read first."""

from __future__ import annotations

import json
import statistics
from typing import Any

from mpt.engine.building.build import parameter_count
from mpt.engine.loop.training import Training
from mpt.engine.state.memory import outside_bytes
from mpt.run.process.files import write_atomically
from mpt.run.records.recorder import tidy


def write_summary(training: Training) -> None:
    """Write summary.json, which of several processes the first one does."""
    if training.run.world.is_first:
        text = json.dumps(tidy(summary_of(training)), indent=1, allow_nan=False)
        write_atomically(training.directory.summary_path, text + "\n", follow_folder=False)


def summary_of(training: Training) -> dict[str, Any]:
    """Return the summary of a training as far as it is."""
    run, progress = training.run, training.progress
    times = training.step_seconds if run.device.type == "cpu" else training.window_seconds
    median = statistics.median(times) if times else None
    return {
        "metric": run.task.metric,
        "higher_is_better": run.task.higher_is_better,
        "final": progress.last_metrics.get(run.task.metric),
        "best": progress.best,
        "best_step": progress.best_step,
        "steps": progress.step,
        "total_steps": training.total_steps,
        "test_samples": training.tested,
        "skipped_files": training.skipped_files,
        **training.early_end(),
        "median_step_seconds": median,
        "samples_per_second": training.train.batch_size / median if median else None,
        "peak_memory": {**training.measured_memory(), **outside_bytes(run.device)},
        "device_utilization": training.device_use.to_record(),
        "skipped": dict(progress.skipped),
        "precision": {
            "mode": run.precision.name,
            "dtype": str(run.precision.numerics.dtype).removeprefix("torch."),
            "reason": run.precision.numerics.reason,
            **(
                {"raised_to_float32": training.remedies.float32}
                if training.remedies.float32
                else {}
            ),
        },
        "wall_seconds": progress.seconds,
        "parameters": parameter_count(list(run.task.trainable.values())),
        "losses": training.last_losses,
        "evaluations": training.journal.evaluation_spans(),
        "events": training.journal.event_counts(),
        "adapted": dict(run.adaptation.changes),
        **(
            {"ranks": {"count": run.world.size, **training.rank_times.last}}
            if run.world.size > 1
            else {}
        ),
    }
