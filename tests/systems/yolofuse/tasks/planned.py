"""Run as a program: the planned and the tracked peak of a step of some detectors, as JSON lines.

A program of its own, since planning registers a device for good.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from mpt.engine.building.build import build_datasets
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.trace import live_peak
from tests.planner.cpu_truth import trace_real
from tests.systems.yolofuse.tasks.small import config

DATA = {"name": "rgb_ir_scenes", "count": 4, "test_count": 1, "cameras": "rgb"}
DETECTORS: dict[str, dict[str, Any]] = {
    "yolofuse": {"model": {"name": "yolofuse", "fusion": "rgb", "image_size": 64}, "dataset": DATA},
    "ssdlite": {
        "model": {"name": "torchvision:ssdlite320_mobilenet_v3_large", "image_size": 64},
        "dataset": DATA,
    },
}


def main() -> None:
    """Print a line for each detector."""
    warnings.simplefilter("ignore")
    for name, sections in DETECTORS.items():
        optimizer, train = (
            {"name": "adam", "foreach": True},
            {"steps": 1, "batch_size": 2, "threads": 1},
        )
        settings = config(**sections, optimizer=optimizer, train=train)
        data = build_datasets(settings)[0].spec
        planned = trace_config(
            settings, data, 2, find_gpu("rtx3060"), None, torch.device("cpu")
        ).trace
        row = {
            "name": name,
            "planned": live_peak(planned),
            "tracked": live_peak(trace_real(settings, data, 2)),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
