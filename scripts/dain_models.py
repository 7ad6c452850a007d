"""The table of docs/dain.md that sets the networks of task `interpolate` side by side.

    python scripts/dain_models.py                       # configs/dain_demo.yaml with each network
    python scripts/dain_models.py train.steps=100       # the same, shorter

Each network is trained as `mpt train configs/dain_demo.yaml` trains DAIN: the same data, seed, steps and schedule. A
network without a flow of its own has no flow phase. Runs stay below `runs/dain_models`; a finished one is not trained
again. Seconds are CPU seconds of one thread, the least of several steps after the training; memory is the peak of live
tensors in training.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import yaml

from mpt import api
from mpt.config.schema import Config
from mpt.report.read_run import RunRecord, read_run

CONFIG = Path(__file__).parent.parent / "configs" / "dain_demo.yaml"
RUNS = Path("runs") / "dain_models"
NETWORKS: dict[str, list[str]] = {
    "flow_warp": ["model=null", "model={name: flow_warp}", "optimizer.parts=null", "optimizer.parts={}"],
    "rife": [
        "model=null",
        "model={name: rife, size: small}",
        "task.flow_steps=0",
        "optimizer.parts=null",
        "optimizer.parts={}",
    ],
    "dain": [],
}
TIMED_STEPS = 4
MEBI = 2**20


def configure(name: str, overrides: list[str]) -> Config:
    """Return the demo's configuration with another network."""
    return api.load(CONFIG, *NETWORKS[name], f"name={name}", "train.plan_memory=false", *overrides)


def trained(config: Config) -> RunRecord:
    """Return the finished run of a configuration, trained now or before."""
    folder = RUNS / config.run_name
    if folder.is_dir():
        record = read_run(folder)
        if record.is_finished and record.config == config_values(config):
            return record
    return api.train(config, runs=RUNS)


def config_values(config: Config) -> Any:
    """Return a configuration as its file has it."""
    return yaml.safe_load(config.to_yaml())


def step_seconds(config: Config) -> float:
    """Return the CPU seconds of a step of the last phase."""
    built = api.build(config)
    batch = next(built.batches())
    seconds = []
    for _ in range(TIMED_STEPS):
        begun = time.process_time()
        api.update(built, batch, config.train.steps - 1)
        seconds.append(time.process_time() - begun)
    return min(seconds)


def row(name: str, config: Config, record: RunRecord) -> str:
    """Return one line of the table."""
    figures = record.evaluations[-1]["metrics"]
    peak = max(line["memory"]["peak_bytes"] for line in record.train)
    average = f"{figures['average_psnr']:.2f}"
    return (
        f"| `{name}` | {record.summary['parameters']:,} | {figures['psnr']:.2f} ({average}) | {figures['ssim']:.4f} | "
        f"{figures['ie']:.2f} | {peak / MEBI:.0f} | {step_seconds(config):.2f} |"
    )


def main() -> None:
    """Train what is not trained yet and print the table."""
    torch.set_num_threads(1)
    print("| Network | Parameters | PSNR, dB (mean of both frames) | SSIM | IE | Peak, MiB | Step, CPU s |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in NETWORKS:
        config = configure(name, sys.argv[1:])
        print(row(name, config, trained(config)), flush=True)


if __name__ == "__main__":
    main()
