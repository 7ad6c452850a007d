"""Run as a program: compare plans with real steps on this CPU, and print one JSON object per configuration.

`python -m tests.planner.against_real few|all [--markdown]`, or `few|all --modes` for what the planner's fake mode and
torch's own say of the same configurations. A program of its own, since planning registers a device for
good. Two sets: `SMALL`, images of 16 x 16 pixels, where scratch inside CPU kernels is up to a fifth of the allocator's
record; and `DEEP`, networks of 10 layers and more on 64 x 64, where it is little.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from typing import Any

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets
from mpt.planner.device import fake_mode
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step import run_fake
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.trace import live_peak
from mpt.seams import DataSpec
from tests.planner.configs import DIGITS, UNET, VIT, make, photos
from tests.planner.cpu_truth import profile_peak, trace_real
from tests.planner.torch_fake_mode import TorchFakeMode

O1, O2 = {"mode": "O1", "dtype": "bfloat16"}, {"mode": "O2", "dtype": "bfloat16"}
RESNET, MOBILENET, DENSENET = (
    "torchvision:resnet18",
    "torchvision:mobilenet_v2",
    "torchvision:densenet121",
)
Settings = tuple[str, Any, dict[str, Any]]

FEW_SMALL: list[Settings] = [
    ("dcgan", "amp", {}),
    ("dcgan", O2, {"release_grads_after": ["disc"]}),
    (UNET, O1, {"recompute": "all"}),
    (VIT, "fp32", {"optimizer_in_backward": True}),
    # oneDNN has no LSTM in bfloat16 without AVX-512.
    *(
        [("tests.planner.models:Recurrent", "amp", {})]
        if torch.ops.mkldnn._is_mkldnn_bf16_supported()
        else []
    ),
    ("tests.planner.models:Normed", "amp", {}),
]
SMALL: list[Settings] = [
    *FEW_SMALL,
    ("small_cnn", "fp32", {}),
    (UNET, "fp32", {"micro_batch": 3}),
    *((model, mode, {}) for model in ("small_cnn", UNET) for mode in ("amp", "bf16-pure")),
    ("dcgan", "bf16-pure", {}),
    *((model, mode, {}) for model in ("small_cnn", "dcgan", UNET) for mode in (O1, O2)),
    *((model, "fp32", {"recompute": "sqrt"}) for model in ("small_cnn", "dcgan", UNET, VIT)),
    *((model, "fp32", {"micro_batch": 4}) for model in ("small_cnn", "dcgan", VIT)),
    (UNET, "amp", {"recompute": "selective"}),
    (VIT, "fp32", {"set_to_none": False}),
    ("small_cnn", "fp32", {"channels_last": True}),
    ("@stylegan2_16", "fp32", {}),
    ("@stylegan2_16", "amp", {}),
]
FEW_DEEP: list[Settings] = [(RESNET, "fp32", {})]
DEEP: list[Settings] = [
    *FEW_DEEP,
    (MOBILENET, "fp32", {}),
    *((RESNET, mode, {}) for mode in ("amp", "bf16-pure", O1, O2)),
    *((RESNET, "fp32", {"recompute": layers}) for layers in ("sqrt", "all", "selective")),
    (RESNET, "fp32", {"micro_batch": 16}),
    (RESNET, "fp32", {"optimizer_in_backward": True}),
    (RESNET, "fp32", {"cpu_optimizer": True}),
    (RESNET, "fp32", {"set_to_none": False}),
    (RESNET, "amp", {"micro_batch": 16, "recompute": "all"}),
    (MOBILENET, "amp", {}),
    (MOBILENET, "fp32", {"recompute": "sqrt"}),
    (DENSENET, "fp32", {}),
    (DENSENET, "amp", {}),
    (VIT, "fp32", {}),
    (VIT, "amp", {"recompute": "sqrt"}),
    ("@saehd_demo", "fp32", {}),
    ("@saehd_demo", "amp", {"recompute": "all"}),
    ("@yolofuse_demo", "fp32", {}),
    ("@yolofuse_demo", "amp", {"micro_batch": 4}),
    ("@yolofuse_demo", "fp32", {"recompute": "sqrt"}),
]


def prepare(settings: Settings, is_deep: bool) -> tuple[Config, DataSpec, int]:
    """Return a configuration with its data and batch."""
    name, precision, memory = settings
    if name.startswith("@"):
        data = {**load_config(name).to_data(), "precision": {"mode": precision}, "memory": memory}
        if data["optimizer"]["name"] == "adam":
            data["optimizer"]["foreach"] = True
        config = load_config(data)
        return config, build_datasets(config)[0].spec, config.train.batch_size
    if not is_deep:
        return make(name, precision, 16, **memory), DIGITS, 16
    batch_size = 16 if name == DENSENET else 64
    return (
        make(name, precision, batch_size, image_size=64, channels=3, **memory),
        photos(64),
        batch_size,
    )


def compare(settings: Settings, is_deep: bool) -> dict[str, Any]:
    """Return the peaks of one configuration, in bytes."""
    config, data, batch_size = prepare(settings, is_deep)
    gpu = find_gpu("rtx3060")
    record = profile_peak(config, data, batch_size)
    model, precision, memory = settings
    mode = precision if isinstance(precision, str) else precision["mode"]
    return {
        "name": " ".join(
            [model.rpartition(":")[2], mode, *(f"{key} {value}" for key, value in memory.items())]
        ),
        "deep": is_deep,
        "batch_size": batch_size,
        "fake_gpu": live_peak(trace_config(config, data, batch_size, gpu, None).trace),
        "fake_cpu": live_peak(
            trace_config(config, data, batch_size, gpu, None, torch.device("cpu")).trace
        ),
        "tracked": live_peak(trace_real(config, data, batch_size)),
        "record": record.peak,
        "record_tensors": record.tensors,
    }


def compare_modes(settings: Settings, is_deep: bool) -> dict[str, Any]:
    """Return whether plans under the planner's fake mode and under torch's own hold the same bytes at each moment."""
    config, data, batch_size = prepare(settings, is_deep)
    seen = []
    for mode in (fake_mode.LeanFakeMode, TorchFakeMode):
        run_fake.LeanFakeMode = mode  # type: ignore[misc]
        trace = trace_config(config, data, batch_size, find_gpu("rtx3060"), None).trace
        seen.append(([(one.size, one.category) for one in trace.storages], trace.events))
    run_fake.LeanFakeMode = fake_mode.LeanFakeMode  # type: ignore[misc]
    model, precision, memory = settings
    return {"name": f"{model} {precision} {memory}", "same": seen[0] == seen[1]}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a table for docs/benchmarks/plan_on_cpu.md, and its medians."""
    print(
        "| Configuration | Planned MiB | Tracked | Allocator, tensors | Allocator, all |\n|---|---:|---:|---:|---:|"
    )
    for row in rows:
        planned = row["fake_cpu"]
        errors = [
            f"{planned / row[key] - 1:+.2%}" for key in ("tracked", "record_tensors", "record")
        ]
        print(f"| {row['name']} | {planned / 2**20:.1f} | {' | '.join(errors)} |")
    for name, part in (
        ("small", [r for r in rows if not r["deep"]]),
        ("deep", [r for r in rows if r["deep"]]),
    ):
        for key in ("tracked", "record_tensors", "record") if part else ():
            errors = [abs(row["fake_cpu"] / row[key] - 1) for row in part]
            print(
                f"{name}, {key}: median {statistics.median(errors):.2%}, largest {max(errors):.2%} of {len(errors)}"
            )


def main() -> None:
    """Print the peaks of every configuration asked for: `few` or `all`."""
    warnings.simplefilter("ignore")
    few = sys.argv[1] == "few"
    sets = {False: FEW_SMALL if few else SMALL, True: FEW_DEEP if few else DEEP}
    rows = []
    for is_deep, settings in ((is_deep, row) for is_deep, chosen in sets.items() for row in chosen):
        rows.append((compare_modes if "--modes" in sys.argv else compare)(settings, is_deep))
        print("ROW " + json.dumps(rows[-1]), flush=True)
    if "--markdown" in sys.argv:
        show(rows)


if __name__ == "__main__":
    main()
