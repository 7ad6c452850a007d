"""Run as a program: compare planned resumes with real ones on this CPU, and print one JSON object per configuration.

A program of its own, since planning registers a device for good.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import restore_tensors
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import live_peak
from mpt.run.checkpoints import checkpoint
from mpt.workflows.training.train import train
from tests.planner.cpu_truth import profiled

CPU = torch.device("cpu")
SETTINGS: list[tuple[str, Any, dict[str, Any]]] = [
    ("small_cnn", {"mode": "O2", "dtype": "bfloat16"}, {}),
    ("small_cnn", "fp32", {"cpu_optimizer": True}),
]
FURTHER: list[tuple[str, Any, dict[str, Any]]] = [
    ("small_cnn", "fp32", {}),
    ("small_cnn", "bf16-kahan", {}),
    ("small_cnn", "bf16-24bit", {}),
    ("dcgan", "amp", {}),
]


def compare(config: Config) -> dict[str, int]:
    """Return the peaks of a resume in bytes: planned, tracked on real tensors, and of the allocator."""
    data = build_datasets(config)[0].spec
    with tempfile.TemporaryDirectory() as folder:
        run = train(config, runs=Path(folder), reports=False)
        assert run is not None

        def resume() -> None:
            built = build_run(config, CPU, data, restores=True)
            restore_tensors(built, checkpoint.load(run).state)

        recorder = Recorder("cpu")
        with recorder.recording():
            resume()
        record = profiled(resume)
    fake = trace_config(
        config, data, 16, find_gpu("rtx3060"), None, CPU, batch_ahead=False, whole_run=True
    )
    assert fake.resume is not None
    assert not fake.resume.problem, fake.resume.problem
    return {
        "planned": live_peak(fake.resume.trace),
        "tracked": live_peak(recorder.trace),
        "record": record.tensors,
        "host": fake.resume.host_bytes,
    }


def main() -> None:
    """Print the peaks of the configurations, with `all` in the command those of the further ones too."""
    warnings.simplefilter("ignore")
    for name, precision, memory in SETTINGS + (FURTHER if "all" in sys.argv else []):
        settings = {
            "model": {"name": name, "features": 32, "image_size": 16},
            "dataset": {"name": "digits", "image_size": 16},
            "optimizer": {"name": "adamw", "foreach": True},
            "train": {
                "steps": 2,
                "batch_size": 16,
                "evaluate_every": 0,
                "sample_every": 0,
                "device": "cpu",
            },
        }
        found = compare(load_config({**settings, "precision": precision, "memory": memory}))
        print("ROW " + json.dumps({"name": f"{name} {precision} {memory}", **found}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
