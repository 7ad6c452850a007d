"""The table of docs/benchmarks/dain.md that sets the networks of task `interpolate` side by side.

    python scripts/quality/dain_models.py                       # every network, trained now or before
    python scripts/quality/dain_models.py train.steps=600       # the same, with other settings
    python scripts/quality/dain_models.py --only rife           # one of them

Each network is trained as `mpt train @dain_demo` trains DAIN: the same data, seed, steps and schedule; one
of them as `@rife_demo` says, on the same data. A network without a flow of its own has no flow phase. Runs
stay below `runs/dain_models`; a finished one is not trained again. Seconds are CPU seconds of one thread, the least of
several after the training: of a step in training, and per megapixel of frames made in float32. Memory is the peak of
live tensors: in training, and per megapixel of inference.
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
from mpt.report.reading.read_run import read_run
from mpt.report.reading.run_record import RunRecord
from mpt.systems.dain.inference.memory import pass_memory

RUNS = Path("runs") / "dain_models"
NETWORKS: dict[str, tuple[str, str, list[str]]] = {
    "flow_warp": (
        "`flow_warp`",
        "dain_demo",
        ["model=null", "model={name: flow_warp}", "optimizer.parts=null", "optimizer.parts={}"],
    ),
    "rife_paper": (
        "`rife`, `size: small`",
        "dain_demo",
        [
            "model=null",
            "model={name: rife, size: small}",
            "task.flow_steps=0",
            "optimizer.parts=null",
            "optimizer.parts={}",
        ],
    ),
    "rife": ("`rife`, `size: small`, `start: cost_volume`", "rife_demo", []),
    "dain": ("`dain`, `size: tiny`", "dain_demo", []),
}
"""What each is called in the table, the file that it is trained by, and what is changed in it."""
TIMED = 4
INFERRED = (256, 256)
MEBI, GIBI, MEGAPIXEL = 2**20, 2**30, 1e6


def configure(name: str, overrides: list[str]) -> Config:
    """Return a network's configuration."""
    _, file, changes = NETWORKS[name]
    return api.load(f"@{file}", *changes, f"name={name}", "train.plan_memory=false", *overrides)


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
    for _ in range(TIMED):
        begun = time.process_time()
        api.update(built, batch, config.train.steps - 1)
        seconds.append(time.process_time() - begun)
    return min(seconds)


def inference_cost(config: Config) -> tuple[float, float]:
    """Return the CPU seconds and the bytes per megapixel of a frame made in float32."""
    net = api.build(config).run.task.modules["net"].eval()
    first, last, time_b = (
        torch.rand(1, 3, *INFERRED),
        torch.rand(1, 3, *INFERRED),
        torch.full((1,), 0.5),
    )
    seconds = []
    with torch.no_grad():
        for _ in range(TIMED):
            begun = time.process_time()
            net(first, last, time_b)
            seconds.append(time.process_time() - begun)
    megapixels = INFERRED[0] * INFERRED[1] / MEGAPIXEL
    return min(seconds) / megapixels, pass_memory(net).per_pixel * MEGAPIXEL


def row(name: str, config: Config, record: RunRecord) -> str:
    """Return one line of the table."""
    figures = record.evaluations[-1]["metrics"]
    peak = max(line["memory"]["peak_bytes"] for line in record.train)
    average = f"{figures['average_psnr']:.2f}"
    seconds, inference_bytes = inference_cost(config)
    return (
        f"| {NETWORKS[name][0]} | {record.summary['parameters']:,} | {figures['psnr']:.2f} ({average}) | "
        f"{figures['ssim']:.4f} | {figures['ie']:.2f} | {peak / MEBI:.0f} | {step_seconds(config):.2f} | "
        f"{inference_bytes / GIBI:.2f} | {seconds:.1f} |"
    )


def main() -> None:
    """Train what is not trained yet and print the table."""
    torch.set_num_threads(1)
    words, names = sys.argv[1:], list(NETWORKS)
    if words[:1] == ["--only"]:
        if len(words) < 2 or words[1] not in NETWORKS:
            sys.exit(f"--only: name one of {', '.join(NETWORKS)}")
        names, words = [words[1]], words[2:]
    print(
        "| Network | Parameters | PSNR, dB (mean of both frames) | SSIM | IE | Training: peak, MiB | Step, CPU s | "
        "Inference: GiB per megapixel | CPU s per megapixel |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in names:
        config = configure(name, words)
        print(row(name, config, trained(config)), flush=True)


if __name__ == "__main__":
    main()
