"""Measure how long planning takes: one configuration, a search of forty recipes, and the shorter fake mode.

Usage: python scripts/bench_plan.py [CONFIG] [key=value ...] [--gpu rtx2060] [--recipes 40] [--rounds 3]
           [--output FOLDER]

Three things, each beside a baseline of the same run:

- `mpt plan CONFIG` with its largest batch, as a whole process, in turns with a process that only imports torch.
- The search's own recipes on its own two workers, every one of them traced: a real search leaves out those that an
  earlier answer made needless or hopeless, and so needs less.
- One trace under mpt.plan.fake_mode.LeanFakeMode and under torch's FakeTensorMode, in turns in one process.

Wall time needs quiet cores; processor time, children included, stands beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpt.commands.plan import WORKERS
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.plan.calibration import Calibration
from mpt.plan.gpus import Gpu, find_gpu
from mpt.plan.search import PAIRS, PARTS, SINGLE, SPLIT, joined, patched, precision_patches
from mpt.plan.session import Session
from mpt.run.files import write_atomically

ROOT = Path(__file__).resolve().parent.parent
COMMAND = [sys.executable, "-c", "from mpt.cli import main; main()"]


@dataclass(frozen=True)
class Seconds:
    """What something took."""

    wall: float
    processor: float
    """Of this process and of its children that have ended."""


def main() -> None:
    """Measure, print a table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", default=ROOT / "configs" / "resnet50_imagefolder.yaml")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--gpu", default="rtx2060")
    parser.add_argument("--recipes", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for planning.md and planning.json")
    parser.add_argument("--traces", action="store_true", help=argparse.SUPPRESS)  # the part that needs its own process
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.traces:
        print(json.dumps(time_traces(options)))
        return
    config, gpu = load_config(options.config, options.overrides), find_gpu(options.gpu)
    found = {
        "config": options.config.name,
        "overrides": options.overrides,
        "gpu": gpu.name,
        "cores": len(os.sched_getaffinity(0)),
        **time_command(options),
        **time_recipes(config, gpu, options.recipes),
        **json.loads(last_line([sys.executable, __file__, *sys.argv[1:], "--traces"])),
    }
    text = as_markdown(found)
    print(text, end="")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output / "planning.md", text)
        write_atomically(options.output / "planning.json", json.dumps(found, indent=1) + "\n")


def time_command(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of `mpt plan` and of importing torch, medians over rounds in turns."""
    plan = [*COMMAND, "plan", str(options.config), *options.overrides, "--gpu", options.gpu, "--json"]
    planning, importing = [], []
    for _ in range(options.rounds):
        planning.append(timed(lambda: last_line(plan)))
        importing.append(timed(lambda: last_line([sys.executable, "-c", "import torch; print()"])))
    return {"plan": medians(planning), "import": medians(importing)}


def time_recipes(config: Config, gpu: Gpu, count: int) -> dict[str, Any]:
    """Return the seconds of planning `count` of the search's recipes, starting the workers included."""
    recipes = list(itertools.islice(all_recipes(config, gpu), count))
    answers: list[Any] = []

    def plan() -> None:
        with Session(gpu, Calibration(), workers=WORKERS) as session:
            answers.extend(session.plan(recipes, budget_bytes=int(gpu.memory_gib * 2**30), timeline=True))

    took = timed(plan)
    return {"recipes": vars(took), "traced": sum(not one.error for one in answers), "workers": WORKERS}


def all_recipes(config: Config, gpu: Gpu) -> Iterator[Config]:
    """Yield the configurations that a search may try, in its order, without those that it refuses."""
    sizes = [{"micro_batch": -(-config.train.batch_size // parts)} for parts in PARTS]
    split = tuple({**tricks, **size} for size in sizes for tricks in SPLIT)
    seen: list[dict[str, Any]] = []
    for group in (SINGLE, PAIRS, split):
        for precision, tricks in itertools.product(precision_patches(config, gpu), group):
            try:
                changed = patched(config, joined(precision, tricks), ())
            except ConfigError:
                continue
            if changed.to_data() not in seen:
                seen.append(changed.to_data())
                yield changed


def time_traces(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a trace under each fake mode, medians over rounds in turns."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mpt.plan import run_fake, worker
    from mpt.plan.fake_mode import LeanFakeMode
    from mpt.plan.unseen import Unseen

    worker.preload()
    config, gpu = load_config(options.config, options.overrides), find_gpu(options.gpu)
    data, _ = worker.find_data_spec(config)
    unseen = Unseen(gpu.capability, False, Calibration().context_bytes, None)
    seconds: dict[type[FakeTensorMode], list[Seconds]] = {LeanFakeMode: [], FakeTensorMode: []}
    for _ in range(options.rounds + 1):  # the first fills the caches
        for mode, times in seconds.items():
            run_fake.LeanFakeMode = mode  # type: ignore[misc,assignment]
            times.append(timed(lambda: run_fake.trace_config(config, data, config.train.batch_size, gpu, unseen)))
    return {"lean": medians(seconds[LeanFakeMode][1:]), "torch": medians(seconds[FakeTensorMode][1:])}


def timed(work: Callable[[], object]) -> Seconds:
    """Return what a piece of work took."""
    wall, processor = time.perf_counter(), processor_seconds()
    work()
    return Seconds(time.perf_counter() - wall, processor_seconds() - processor)


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def medians(times: list[Seconds]) -> dict[str, float]:
    """Return the median of each clock."""
    return {clock: statistics.median(getattr(one, clock) for one in times) for clock in ("wall", "processor")}


def last_line(command: list[str]) -> str:
    """Run a command and return the last line it printed."""
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {finished.returncode}: {finished.stderr.strip()[-400:]}")
    return finished.stdout.rstrip("\n").rpartition("\n")[2]


def as_markdown(found: dict[str, Any]) -> str:
    """Return the measurements as a table."""
    name = " ".join([found["config"], *found["overrides"]])
    traced = found["traced"]
    each = {clock: seconds / max(1, traced) for clock, seconds in found["recipes"].items()}
    rows = [
        ("import torch", found["import"], None),
        ("`mpt plan`, whole process", found["plan"], found["import"]),
        (f"{traced} recipes traced, {found['workers']} workers", found["recipes"], found["plan"]),
        ("a recipe of these", each, None),
        ("one trace, torch's fake mode", found["torch"], None),
        ("one trace, the shorter fake mode", found["lean"], found["torch"]),
    ]
    lines = [f"{name} for {found['gpu']}, on {found['cores']} cores", ""]
    lines += ["| What | Wall, s | Processor, s | Processor time against |", "|---|---:|---:|---|"]
    against = {id(found["import"]): "importing torch", id(found["plan"]): "one plan", id(found["torch"]): "torch's"}
    for title, took, baseline in rows:
        ratio = f"×{took['processor'] / baseline['processor']:.2f} {against[id(baseline)]}" if baseline else ""
        lines.append(f"| {title} | {took['wall']:.2f} | {took['processor']:.2f} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
