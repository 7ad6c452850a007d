"""Do several processes train what one trains, and do all act alike when one fails? Two tables, by one command.

    python scripts/parallel_table.py                                    # both, on gloo and CPUs
    python scripts/parallel_table.py --what equality --tasks lsgan vae --modes fp32 amp --ranks 2 --ways ddp full

Equality: some steps by one process and by several ranks from the same seed: every task in float32 by 2 ranks, the small
ones in every mode, and by 4 ranks; with ddp, and with fsdp in its three ways of sharding. Options restrict that. The
difference is the largest of any weight, beside how far the weights moved; skipped steps and loss scales must be equal.
SGD is used throughout, since Adam's first steps turn the rounding of a vanishing gradient into a step of full size.
BatchNorm sees all ranks' samples (`parallel.sync_batchnorm`) where the batch divides. What a strategy refuses is in the
table with its reason.

Faults: a failure of each kind on each rank; how all ranks ended, and the step that was saved last.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loader import Loader
from mpt.engine.build import build_datasets, build_run
from mpt.engine.loop import agree_on_notes
from mpt.engine.rank_inputs import inputs_of
from mpt.engine.step import update
from mpt.errors import ConfigError
from mpt.parallel.local import full
from mpt.parallel.start import joined
from mpt.parallel.world import ALONE, World
from tests.parallel.forked import run_ranks
from tests.parallel.test_faults import injected, saved_step

TASKS: dict[str, tuple[str, ...]] = {
    "classifier": ("classify_digits", "model.features=8"),
    "vae": ("vae",),
    "lsgan": ("lsgan",),
    "wgan_gp": ("wgan_gp",),
    "dcgan": ("dcgan_fp32", "model.features=8", "model.image_size=16"),
    "stylegan2": ("stylegan2_16",),
    "saehd": ("saehd_demo",),
    "yolofuse": ("yolofuse_demo", "dataset.count=40", "dataset.test_count=8"),
    "dain": ("dain_demo", "task.flow_steps=1"),
}
SMALL = ("classifier", "vae", "lsgan", "wgan_gp", "dcgan")
"""Tasks that are tried in every mode, and by more ranks than 2."""
WAYS: dict[str, tuple[str, ...]] = {
    "ddp": ("parallel.strategy=ddp",),
    **{shard: ("parallel.strategy=fsdp", f"parallel.shard={shard}") for shard in ("full", "grad", "hybrid")},
}
MODES: dict[str, tuple[str, ...]] = {
    "fp32": ("precision=fp32",),
    "amp": ("precision=amp", "precision.dtype=float16", "precision.init_scale=1024"),
    "bf16": ("precision=bf16",),
    "O1": ("precision=O1", "precision.dtype=float16", "precision.init_scale=1024"),
    "O2": ("precision=O2", "precision.dtype=float16", "precision.init_scale=1024"),
    "bf16-sr": ("precision=bf16-sr",),
}
FIRST = re.compile(r"; |\. ")
"""Where the first statement of a refusal ends."""
FAULTS = ("memory", "nan", "inf", "signal", "error", "kill", "hang")
CONFIGS = Path(__file__).parent.parent / "configs"


def make_config(task: str, mode: str, way: str, batch_size: int, ranks: int) -> Config:
    """Return a task's configuration, small and with SGD; hybrid is over two groups of ranks."""
    name, *changes = TASKS[task]
    common = ["optimizer=null", "optimizer=sgd", "optimizer.lr=0.005", f"train.batch_size={batch_size}"]
    parallel = [*WAYS[way], "parallel.sync_batchnorm=true"]
    parallel += [f"parallel.shard_ranks={ranks // 2}"] if way == "hybrid" else []
    return load_config(CONFIGS / f"{name}.yaml", [*changes, "precision=null", *MODES[mode], *common, *parallel])


def perform(world: World, config: Config, steps: int) -> dict[str, Any]:
    """Perform some steps as the training does, and return what they came to."""
    train, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), train.spec, world=world)
    first = weights_of(run)
    count = config.train.batch_size
    stream = Loader(train, count, config.seed, place=world.place).batches()
    skipped = []
    for step in range(steps):
        batch = inputs_of(run, next(stream), count)
        for phase in (phase for phase in run.phases if phase.is_due(step)):
            skipped.append(update(run, phase, batch).stats.skipped)
        agree_on_notes(run)
        run.task.after_step(step, step * count)
        agree_on_notes(run)
    last = weights_of(run)
    moved = float((last - first).abs().max())
    return {"weights": last.numpy(), "moved": moved, "skipped": skipped, "scales": run.precision.scales()}


def weights_of(run: Any) -> torch.Tensor:
    """Return all weights of a task, whole, one after the other."""
    found = [full(p).detach().float().flatten() for m in run.task.modules.values() for p in m.parameters()]
    return torch.cat([one.clone() for one in found])


def on_rank(rank: int, config: tuple[Any, ...], steps: int) -> Any:
    """Do a rank's part of a comparison."""
    try:
        made = make_config(*config)
        with joined(made) as world:
            return perform(world, made, steps)
    except ConfigError as error:
        return str(error)


def equality_rows(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the table of equality."""
    yield "| task | mode | strategy | shard | ranks | largest difference | weights moved | skipped steps, scales |"
    yield "|---|---|---|---|---:|---:|---:|---|"
    alone: dict[Any, Any] = {}
    for task, mode, ranks, way in cases(arguments):
        batch = arguments.batch_size // ranks * ranks
        if (task, mode, batch) not in alone:
            alone[task, mode, batch] = perform(ALONE, make_config(task, mode, "ddp", batch, 1), arguments.steps)
        of_one = alone[task, mode, batch]
        start = time.perf_counter()
        told = run_ranks(ranks, on_rank, (task, mode, way, batch, ranks), arguments.steps, limit=300)
        print(f"{task} {mode} {way} {ranks}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        head = f"| {task} | {mode} | {'ddp |' if way == 'ddp' else f'fsdp | {way}'} | {ranks} |"
        if not all(isinstance(one, dict) for one in told):
            reason = next((one for one in told if isinstance(one, str)), f"exit codes {told}")
            yield f"{head} refused: {FIRST.split(reason.split(': ', 1)[-1])[0]} | | |"
            continue
        same = all(numpy.array_equal(one["weights"], told[0]["weights"]) for one in told)
        difference = float(numpy.abs(told[0]["weights"] - of_one["weights"]).max())
        equal = told[0]["skipped"] == of_one["skipped"] and told[0]["scales"] == of_one["scales"]
        words = f"{'equal' if equal else 'DIFFERENT'}, {sum(of_one['skipped'])} skipped"
        between = "" if same else " (RANKS DIFFER)"
        yield f"{head} {difference:.1e}{between} | {of_one['moved']:.1e} | {words} |"


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, str]]:
    """Yield task, mode, number of ranks and way of each row."""
    for mode, ranks, task, way in itertools.product(arguments.modes, arguments.ranks, arguments.tasks, arguments.ways):
        is_basic = mode == "fp32" and ranks == 2
        if task not in SMALL and not is_basic and len(arguments.tasks) > 1:
            continue
        if (mode != "fp32" and (ranks > 2 or way not in ("ddp", "full"))) or (way == "hybrid" and ranks < 4):
            continue
        yield task, mode, ranks, way


def fault_rows() -> Iterator[str]:
    """Yield the lines of the table of faults."""
    yield "| fault | on rank | exit codes | saved step | seconds | event |"
    yield "|---|---:|---|---:|---:|---|"
    for kind, rank in itertools.product(FAULTS, (0, 1)):
        with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
            precision = "{mode: amp, dtype: float16, init_scale: 1024}" if kind == "inf" else "fp32"
            started = time.perf_counter()
            ends, events = injected(Path(name), rank, kind, precision)
            seconds = time.perf_counter() - started
            codes = ", ".join("0" if end == "done" else str(end) for end in ends)
            said = [kind for kind in ("out_of_memory", "rollback", "overflow", "rank_lost") if kind in events]
            saved = saved_step(Path(name))
        yield f"| {kind} | {rank} | {codes} | {saved} | {seconds:.0f} | {', '.join(said) or '-'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("equality", "faults"), default=["equality", "faults"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fp32", "amp", "bf16", "O2"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    if "equality" in arguments.what:
        for line in equality_rows(arguments):
            print(line, flush=True)
        print()
    if "faults" in arguments.what:
        for line in fault_rows():
            print(line, flush=True)


if __name__ == "__main__":
    main()
