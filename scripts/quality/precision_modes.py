"""Print the table of docs/benchmarks/precision.md that sets every mode's bytes, step time and quality side by side.

Usage: python scripts/quality/precision_modes.py [--config FILE] [--seeds N] [--margin 1%] [--runs DIR] [MODE|KEY=VALUE
...]

Trains the configuration in every mode with `mpt compare` (fp32 first, whose figures the verdicts are against) and adds
what each mode keeps per weight between two steps: weights, masters, gradients and optimizer state, counted on one built
run. A folder that holds such a comparison already is read instead of trained again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.devices import choose_device
from mpt.engine.step.step import update

MODES = (
    "fp32",
    "amp",
    "O1",
    "O2",
    "bf16-pure",
    "bf16-sr",
    "bf16-kahan",
    "bf16-24bit",
    "fp16-24bit",
)
QUICK = ("train.checkpoint_every=0", "train.sample_every=0")


def bytes_per_weight(config_path: str, mode: str, overrides: list[str]) -> float:
    """Return the bytes that live after an update, per parameter: weights, masters, gradients, optimizer state."""
    config = load_config(Path(config_path), [*overrides, f"precision={mode}"])
    train_data, _ = build_datasets(config)
    device = choose_device(config.train.device)
    run = build_run(config, device, train_data.spec)
    batch = run.data.as_floats(run.data.zeros(config.train.batch_size, device, stored=True))
    for phase in run.phases:
        update(run, phase, batch)
    weights = {p for module in run.task.trainable.values() for p in module.parameters()}
    masters = {
        p for o in run.optimizers.values() for group in o.param_groups for p in group["params"]
    } - weights
    held: list[Tensor] = [*weights, *masters]
    held += [p.grad for p in (*weights, *masters) if p.grad is not None]
    held += [
        v
        for o in run.optimizers.values()
        for s in o.state.values()
        for v in s.values()
        if isinstance(v, Tensor)
    ]
    return sum(tensor.nbytes for tensor in held) / sum(p.numel() for p in weights)


def compare(
    config_path: str, modes: list[str], seeds: int, margin: str, overrides: list[str], runs: Path
) -> dict[str, Any]:
    """Train the modes, unless the folder holds a comparison, and return its record."""
    if not list(runs.glob("compare-*/comparison.json")):
        command = [
            sys.executable,
            "-m",
            "mpt",
            "compare",
            *modes,
            "--config",
            config_path,
            "--seeds",
            str(seeds),
        ]
        command += ["--margin", margin]
        subprocess.run(
            [*command, "--runs", str(runs), *QUICK, *overrides], check=True, stdout=sys.stderr
        )
    (found,) = runs.glob("compare-*/comparison.json")
    record: dict[str, Any] = json.loads(found.read_text())
    return record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/classify_digits.yaml")
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--margin", default="1%")
    parser.add_argument("--runs", type=Path)
    parser.add_argument("words", nargs="*", metavar="MODE or KEY=VALUE")
    given = parser.parse_args()
    overrides = [word for word in given.words if "=" in word]
    modes = [word for word in given.words if "=" not in word] or list(MODES)
    with tempfile.TemporaryDirectory() as scratch:
        record = compare(
            given.config, modes, given.seeds, given.margin, overrides, given.runs or Path(scratch)
        )
    print(f"torch {torch.__version__}, {record['metric']}, {len(record['seeds'])} seeds\n")
    print("| mode | dtype | bytes per weight | peak | step | figure, final | verdict |")
    print("|---|---|---:|---:|---:|---:|---|")
    for row in record["modes"]:
        print(
            describe(
                row,
                bytes_per_weight(given.config, row["mode"], overrides),
                record["margin"]["size"],
            )
        )


def describe(row: dict[str, Any], per_weight: float, margin: float) -> str:
    """Return a mode's line."""
    verdict = row["verdict"]
    words = (
        ""
        if verdict is None
        else f"{verdict['outcome']} ({verdict['low']:+.2%} to {verdict['high']:+.2%})"
    )
    return (
        f"| {row['mode']} | {row['dtype']} | {per_weight:.1f} | {row['peak_ratio']:.3f}x | {row['step_ratio']:.2f}x | "
        f"{row['final']['mean']:.4f} ± {row['final']['deviation']:.4f} | {words} |"
    )


if __name__ == "__main__":
    main()
