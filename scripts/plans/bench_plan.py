"""Measure how long planning takes: one configuration, a search of twenty recipes, and the shorter fake mode.

Usage: python scripts/plans/bench_plan.py [CONFIG] [key=value ...] [--gpu rtx2060] [--recipes 20] [--rounds 3]
           [--output FOLDER]

Three things, each beside a baseline of the same run:

- `mpt plan` of CONFIG and of a transformer with a billion weights as whole processes, in turns with one that only
  imports torch.
- The search's own recipes on its own workers, every one of them traced: a real search leaves out those that an
  earlier answer made needless or hopeless, and so needs less.
- Tracing the first recipes, once each, under mpt.planner.device.fake_mode.LeanFakeMode and under torch's
  FakeTensorMode, in processes that take turns.

Wall time needs quiet cores; processor time, children included, stands beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import ConfigError, MptError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Answer, Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import Gpu, find_gpu
from mpt.planner.recipes.patches import combinations, joined, parted, patched, precision_patches
from mpt.planner.recipes.search import PARTS
from mpt.run.process.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
TRACED = 8
"""Recipes that are traced to compare the fake modes."""
BILLION = """model: {name: "timm:vit_giant_patch14_224"}
dataset: {name: image_folder, root: nowhere}
precision: amp
optimizer: {name: adamw, lr: 1.0e-4}
train: {batch_size: 8, steps: 10}
"""
"""A vision transformer with 1.01 billion weights."""
COMMAND = [sys.executable, "-m", "mpt"]


@dataclass(frozen=True)
class Seconds:
    """What something took."""

    wall: float
    processor: float
    """Of this process and of its children that have ended."""


def main() -> None:
    """Measure, print a table, and write it where that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "config", type=Path, nargs="?", default=ROOT / "configs" / "resnet50_imagefolder.yaml"
    )
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--gpu", default="rtx2060")
    parser.add_argument("--recipes", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="folder for planning.md and planning.json")
    parser.add_argument("--traces", help=argparse.SUPPRESS)  # a process that traces under this mode
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.traces:
        print(json.dumps(vars(trace_recipes(options))))
        return
    config, gpu = load_config(options.config, options.overrides), find_gpu(options.gpu)
    found = {
        "config": options.config.name,
        "overrides": options.overrides,
        "gpu": gpu.name,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        **time_command(options),
        **time_recipes(config, gpu, options.recipes),
        **time_modes(options),
    }
    text = as_markdown(found)
    print(text, end="")
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        write_atomically(options.output / "planning.md", text)
        write_atomically(options.output / "planning.json", json.dumps(found, indent=1) + "\n")


def time_command(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of two plans and of importing torch, medians over rounds in turns."""
    with tempfile.TemporaryDirectory() as folder:
        large = Path(folder) / "large.yaml"
        large.write_text(BILLION)
        ends = ["--gpu", options.gpu, "--json"]
        commands = {
            "plan": [*COMMAND, "plan", str(options.config), *options.overrides, *ends],
            "large": [*COMMAND, "plan", str(large), *ends],
            "import": [sys.executable, "-c", "import torch; print()"],
        }
        times: dict[str, list[Seconds]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                times[name].append(timed(partial(last_line, command)))
    return {name: medians(taken) for name, taken in times.items()}


def time_recipes(config: Config, gpu: Gpu, count: int) -> dict[str, Any]:
    """Return the seconds in which `count` of the search's recipes are traced, starting the workers included.

    What the planner refuses is asked for on the way and not counted; fewer are traced where there are no more.
    """
    recipes, counts, workers = (
        all_recipes(config, gpu),
        {"traced": 0, "refused": 0},
        count_workers(),
    )

    def plan() -> None:
        with Session(gpu, Calibration(), workers=workers) as session:
            pending: deque[Future[Answer[Plan]]] = deque()
            while counts["traced"] < count:
                for recipe in itertools.islice(recipes, workers - len(pending)):
                    pending.append(
                        session.submit(
                            recipe, budget_bytes=int(gpu.memory_gib * 2**30), timeline=True
                        )
                    )
                if not pending:
                    break
                counts["refused" if pending.popleft().result().error else "traced"] += 1

    return {"recipes": vars(timed(plan)), "workers": workers, **counts}


def all_recipes(config: Config, gpu: Gpu) -> Iterator[Config]:
    """Yield the configurations that a search may try, in its order, without those that it refuses."""
    split = tuple(
        {**tricks, **parted(config, parts)} for parts in PARTS for tricks in combinations().split
    )
    seen: list[dict[str, Any]] = []
    for group in (combinations().single, combinations().pairs, split):
        for precision, tricks in itertools.product(precision_patches(config, gpu), group):
            try:
                changed = patched(config, joined(precision, tricks), ())
            except ConfigError:
                continue
            if changed.to_data() not in seen:
                seen.append(changed.to_data())
                yield changed


def time_modes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of a trace under each fake mode, medians over rounds in turns, each in a fresh process."""
    seconds: dict[str, list[Seconds]] = {"lean": [], "torch": []}
    for _ in range(options.rounds):
        for mode, times in seconds.items():
            told = last_line([sys.executable, __file__, *sys.argv[1:], "--traces", mode])
            times.append(Seconds(**json.loads(told)))
    return {mode: medians(times) for mode, times in seconds.items()}


def trace_recipes(options: argparse.Namespace) -> Seconds:
    """Return the mean seconds of a recipe's one trace under a fake mode. The first also fills torch's caches."""
    from mpt.planner.server import worker
    from mpt.planner.step import run_fake
    from mpt.planner.trace.unseen import unseen_on
    from tests.planner.torch_fake_mode import TorchFakeMode

    worker.preload()
    config, gpu = load_config(options.config, options.overrides), find_gpu(options.gpu)
    data = worker.find_data(config)[1]
    if options.traces == "torch":
        vars(run_fake)["LeanFakeMode"] = TorchFakeMode
    took = []
    for recipe in all_recipes(config, gpu):
        unseen = unseen_on(gpu)
        with contextlib.suppress(MptError):  # what the planner refuses
            trace = partial(
                run_fake.trace_config, recipe, data, recipe.train.batch_size, gpu, unseen
            )
            took.append(timed(trace))
        if len(took) == TRACED:
            break
    return Seconds(
        *(statistics.mean(getattr(one, clock) for one in took) for clock in ("wall", "processor"))
    )


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
    return {
        clock: statistics.median(getattr(one, clock) for one in times)
        for clock in ("wall", "processor")
    }


def last_line(command: list[str]) -> str:
    """Run a command and return the last line it printed."""
    finished = subprocess.run(command, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(
            f"{' '.join(command)}: exit {finished.returncode}: {finished.stderr.strip()[-400:]}"
        )
    return finished.stdout.rstrip("\n").rpartition("\n")[2]


def as_markdown(found: dict[str, Any]) -> str:
    """Return the measurements as a table."""
    name = " ".join([found["config"], *found["overrides"]])
    traced = found["traced"]
    beyond = {clock: found["plan"][clock] - found["import"][clock] for clock in found["plan"]}
    refused = f" ({found['refused']} more refused)" if found["refused"] else ""
    each = {clock: seconds / max(1, traced) for clock, seconds in found["recipes"].items()}
    rows = [
        ("import torch", found["import"], None),
        ("`mpt plan`, whole process", found["plan"], found["import"]),
        ("the same beyond importing torch", beyond, found["import"]),
        ("`mpt plan` of a transformer of 1.01 billion weights", found["large"], found["import"]),
        (
            f"{traced} recipes traced by {found['workers']} workers{refused}",
            found["recipes"],
            found["plan"],
        ),
        ("a recipe of these", each, None),
        ("a trace, torch's fake mode", found["torch"], None),
        ("a trace, the shorter fake mode", found["lean"], found["torch"]),
    ]
    load = f"a load of {found['load_before']:.1f} before"
    lines = [f"{name} for {found['gpu']}, on {found['cores']} cores with {load}", ""]
    lines += ["| What | Wall, s | Processor, s | Processor time against |", "|---|---:|---:|---|"]
    against = {
        id(found["import"]): "importing torch",
        id(found["plan"]): "one plan",
        id(found["torch"]): "torch's",
    }
    for title, took, baseline in rows:
        ratio = (
            f"×{took['processor'] / baseline['processor']:.2f} {against[id(baseline)]}"
            if baseline
            else ""
        )
        lines.append(f"| {title} | {took['wall']:.2f} | {took['processor']:.2f} | {ratio} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
