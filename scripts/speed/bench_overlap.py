"""What sending gradients beside the last backward wins: steps with `parallel.overlap` against steps without, in turns.

    python scripts/speed/bench_overlap.py                    # 2 gloo ranks on CPUs
    python scripts/speed/bench_overlap.py --link-mbit 200    # ... over a link of that rate; needs root, `ip` and `tc`

Both are built in the same ranks from the same seed, and take their steps alternately, so that a machine that is busy
with other work slows both. Told are medians over the steps: the ratio of their times, and what a rank still waits for
sums after its backward. Over loopback sending is copying, which needs the cores that the backward needs, so that there
is nothing to win: bytes on their way cost processor time instead of waiting. `--link-mbit` puts the ranks into a
network namespace whose loopback lets through so much and no more (`tc`, token bucket), as a cable does: bytes are on
their way while the processor is free, and overlap can win what the backward covers.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import update
from mpt.parallel.start import joined
from tests.parallel.forked import run_ranks

CASES: dict[str, dict[str, Any]] = {
    "small_cnn, 0.4 M weights": {
        "model": {"name": "small_cnn", "features": 64},
        "dataset": "digits",
    },
    "lsgan, 4.2 M weights": {
        "model": {"name": "lsgan", "hidden": 2048, "image_size": 32},
        "dataset": "digits",
    },
    "dcgan, 1.7 M weights": {
        "model": {"name": "dcgan", "features": 64, "image_size": 32},
        "dataset": "digits",
    },
}
LIMITED = "MPT_BENCH_LINK_IS_LIMITED"
COMMON = {
    "precision": "fp32",
    "optimizer": {"name": "sgd", "lr": 1e-4},
    "train": {"batch_size": 32},
}


def on_rank(rank: int, case: str, steps: int, bucket_mib: float) -> dict[str, Any]:
    """Return this rank's times, with overlap and without."""
    config = load_config({**CASES[case], **COMMON, "parallel": {"bucket_mib": bucket_mib}})
    found: dict[bool, dict[str, list[float]]] = {
        way: {"step": [], "waited": [], "early": []} for way in (True, False)
    }
    with joined(config) as world:
        train, _ = build_datasets(config)
        runs, exchanges = {}, {}
        for way in found:
            runs[way], exchanges[way] = (
                build_run(config, torch.device("cpu"), train.spec, world=world),
                {},
            )
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
                        found[way],
                        (seconds, world.take_waited_seconds(), early / buckets),
                        strict=True,
                    ):
                        found[way][name].append(value)
    return {
        way: {name: statistics.median(values) for name, values in one.items()}
        for way, one in found.items()
    }


def rows(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| network | buckets sent in the backward | step, of one without overlap | waited, ms | without overlap, ms |"
    yield "|---|---:|---:|---:|---:|"
    for case in arguments.cases:
        told = run_ranks(2, on_rank, case, arguments.steps, arguments.bucket_mib, limit=600)
        first = told[0]
        ratio = statistics.fmean(one[True]["step"] / one[False]["step"] for one in told)
        yield (
            f"| {case} | {first[True]['early']:.0%} | {ratio:.2f} | {1e3 * first[True]['waited']:.1f} | "
            f"{1e3 * first[False]['waited']:.1f} |"
        )


def start_behind(mbit: int) -> None:
    """Start this script again in a network namespace of its own, with a loopback of a limited rate."""
    if os.geteuid() or not (shutil.which("unshare") and shutil.which("tc")):
        raise SystemExit(
            "--link-mbit: limiting a link needs root, and the programs unshare, ip and tc"
        )
    limit = f"tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb latency 2000ms"
    command = f'ip link set lo up && {limit} && exec "$0" "$@"'
    os.environ[LIMITED] = "1"
    os.execvp("unshare", ["unshare", "-n", "bash", "-c", command, sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bucket-mib", type=float, default=1.0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--link-mbit", type=int, help="rate of the link between the ranks, both directions together"
    )
    arguments = parser.parse_args()
    if arguments.link_mbit and LIMITED not in os.environ:
        start_behind(arguments.link_mbit)
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    for line in rows(arguments):
        print(line, flush=True)


if __name__ == "__main__":
    main()
