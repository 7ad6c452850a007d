"""Run as a program: compare plans with real steps on this CPU, and print one JSON object per configuration.

A program of its own, since planning registers a device for good.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from mpt.plan.check import profiled_peak, trace_real
from mpt.plan.gpus import find_gpu
from mpt.plan.run_fake import trace_config
from mpt.plan.trace import Trace
from tests.plan.configs import DIGITS, UNET, VIT, make

BFLOAT16 = {"dtype": "bfloat16"}
FEW: list[tuple[str, Any, dict[str, Any]]] = [
    ("small_cnn", "fp32", {}),
    ("dcgan", "amp", {}),
    ("dcgan", {"mode": "O2", **BFLOAT16}, {"release_grads_after": ["disc"]}),
    (UNET, {"mode": "O1", **BFLOAT16}, {"recompute": "all"}),
    (UNET, "fp32", {"micro_batch": 3}),
    (VIT, "fp32", {"optimizer_in_backward": True}),
]
ALL: list[tuple[str, Any, dict[str, Any]]] = [
    *FEW,
    *((model, mode, {}) for model in ("small_cnn", "dcgan", UNET) for mode in ("amp", "bf16-pure")),
    *((model, {"mode": mode, **BFLOAT16}, {}) for model in ("small_cnn", "dcgan", UNET) for mode in ("O1", "O2")),
    *((model, "fp32", {"recompute": "sqrt"}) for model in ("small_cnn", "dcgan", UNET, VIT)),
    *((model, "fp32", {"micro_batch": 4}) for model in ("small_cnn", "dcgan", VIT)),
    (UNET, "amp", {"recompute": "selective"}),
    (VIT, "fp32", {"set_to_none": False}),
    ("small_cnn", "fp32", {"channels_last": True}),
]


def peak(trace: Trace) -> int:
    """Return the largest sum of live bytes."""
    live = highest = 0
    for entry in trace.events:
        live += trace.storages[entry].size if entry >= 0 else -trace.storages[~entry].size
        highest = max(highest, live)
    return highest


def main() -> None:
    """Print the peaks of every configuration asked for: `few` or `all`."""
    warnings.simplefilter("ignore")
    gpu = find_gpu("rtx3060")
    for model, precision, memory in FEW if sys.argv[1] == "few" else ALL:
        config = make(model, precision, 16, **memory)
        row = {
            "name": f"{model} {precision} {memory}",
            "fake_gpu": peak(trace_config(config, DIGITS, 16, gpu, None).trace),
            "fake_cpu": peak(trace_config(config, DIGITS, 16, gpu, None, torch.device("cpu")).trace),
            "real": peak(trace_real(config, DIGITS, 16)),
            "profiler": profiled_peak(config, DIGITS, 16),
        }
        print("ROW " + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
