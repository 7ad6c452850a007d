"""What sending gradients beside the last backward wins: steps with `parallel.overlap` against steps without, in turns.

    python scripts/bench_overlap.py                    # 2 gloo ranks on CPUs

Both are built in the same ranks from the same seed, and take their steps alternately, so that a machine that is busy
with other work slows both. Told are medians over the steps: the ratio of their times, and what a rank still waits for
sums after its backward. gloo sums on the CPU that computes too, so little of the time can be won here; what a network
of its own would win is the share of buckets that leave in the backward.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpt.config.load import load_config
from mpt.engine.build import build_datasets, build_run
from mpt.engine.step import update
from mpt.parallel.start import joined
from tests.parallel.forked import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "small_cnn, 0.4 M weights": {"model": {"name": "small_cnn", "features": 64}, "dataset": "digits"},
    "lsgan, 4.2 M weights": {"model": {"name": "lsgan", "hidden": 2048, "image_size": 32}, "dataset": "digits"},
    "dcgan, 1.7 M weights": {"model": {"name": "dcgan", "features": 64, "image_size": 32}, "dataset": "digits"},
}
COMMON = {"precision": "fp32", "optimizer": {"name": "sgd", "lr": 1e-4}, "train": {"batch_size": 32}}


def on_rank(rank: int, case: str, steps: int, bucket_mib: float) -> dict[str, Any]:
    """Return this rank's times, with overlap and without."""
    config = load_config({**CASES[case], **COMMON, "parallel": {"bucket_mib": bucket_mib}})
    found: dict[bool, dict[str, list[float]]] = {way: {"step": [], "waited": [], "early": []} for way in (True, False)}
    with joined(config) as world:
        train, _ = build_datasets(config)
        runs, exchanges = {}, {}
        for way in found:
            runs[way], exchanges[way] = build_run(config, torch.device("cpu"), train.spec, world=world), {}
        batch = train.spec.as_floats(train.fetch(list(range(32)), 0))
        for step in range(steps + 2):
            for way in (True, False) if step % 2 else (False, True):
                world.exchanges = exchanges[way]
                world.settings = config.parallel.model_copy(update={"overlap": way})
                world.take_waited_seconds()
                begun = time.perf_counter()
                for phase in runs[way].phases:
                    update(runs[way], phase, batch)
                seconds = time.perf_counter() - begun
                buckets = sum(len(one.buckets) for one in world.exchanges.values())
                early = sum(one.sent_in_backward for one in world.exchanges.values())
                if step >= 2:  # the first backward of all is not known to be the last one
                    for name, value in zip(
                        found[way], (seconds, world.take_waited_seconds(), early / buckets), strict=True
                    ):
                        found[way][name].append(value)
    return {way: {name: statistics.median(values) for name, values in one.items()} for way, one in found.items()}


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| network | buckets sent in the backward | step, of one without overlap | waited, ms | without overlap, ms |"
    yield "|---|---:|---:|---:|---:|"
    for case in CASES:
        told = run_ranks(2, on_rank, case, arguments.steps, arguments.bucket_mib, limit=600)
        first = told[0]
        ratio = statistics.fmean(one[True]["step"] / one[False]["step"] for one in told)
        yield (
            f"| {case} | {first[True]['early']:.0%} | {ratio:.2f} | {1e3 * first[True]['waited']:.1f} | "
            f"{1e3 * first[False]['waited']:.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bucket-mib", type=float, default=1.0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    for line in rows(arguments):
        print(line, flush=True)


if __name__ == "__main__":
    main()
