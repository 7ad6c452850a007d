"""Do several processes train what one trains, and do all act alike when one fails? Two tables, by one command.

    python scripts/quality/parallel_table.py                                    # both, on gloo and CPUs
    python scripts/quality/parallel_table.py --what equality --tasks lsgan vae --modes fp32 --ranks 2 --ways ddp

Equality: one process trains a task with its own optimizer; from those weights it takes some more steps with SGD, and so
do micro-batches and several ranks, on the same batches. A batch is sorted by what its samples weigh, so that ranks have
very unequal shares of a loss that is normalised over the batch. The update distance is how far their weights end from
one process's, as a share of how far it moved them (both in the 2-norm); skipped steps and loss scales must be equal.
SGD is used since Adam's steps turn the rounding of a vanishing gradient into one of full size. BatchNorm, of which a
rank has its own statistics, uses its running ones in micro-batches and ddp; with `sync` and fsdp it sees all ranks'
samples (`parallel.sync_batchnorm`). What a strategy refuses is in the table with its reason.

What is left in float32 is the order of sums, or a mistake. So every row of fp32 is trained a second time with weights,
data and arithmetic in float64: rounding then falls by orders of magnitude, and a mistake stays as it is.

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
from torch.nn.modules.batchnorm import _BatchNorm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.data.loading.loader import Loader
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.state.state import restore_modules
from mpt.engine.step.rank_inputs import inputs_of
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.parallel.local import full
from mpt.parallel.ranks import Ranks
from mpt.parallel.start import joined
from mpt.parallel.world import ALONE, World
from mpt.seams import Batch, Dataset, Run, loss_scales
from tests.parallel.forked import run_ranks
from tests.parallel.test_faults import injected, saved_step

TASKS: dict[str, tuple[str, ...]] = {
    "classifier": ("classify_digits", "model.features=8"),
    "class weights": (
        "classify_digits",
        "model.features=8",
        'task.class_weights={"0": 0.01, "1": 40}',
    ),
    "mixup": ("classify_digits", "model.features=8", "task.mixup=0.4", "task.cutmix=1.0"),
    "vae": ("vae",),
    "cvae": ("vae", "model.name=cvae"),
    "dvae": ("vae", "model.name=dvae"),
    "lsgan": ("lsgan",),
    **{
        name: ("lsgan", f"model.name={name}")
        for name in ("vanilla_gan", "cgan", "acgan", "infogan")
    },
    **{name: ("lsgan", f"model.name={name}") for name in ("aae", "bigan", "ebgan", "wgan")},
    "wgan_gp": ("wgan_gp",),
    "began": ("began",),
    "dcgan": ("dcgan_fp32", "model.features=8", "model.image_size=16"),
    "stylegan2": ("stylegan2_16", "task.path_weight=0"),
    "path lengths": ("stylegan2_16",),
    "stylegan2 ada": ("stylegan2_16", "task.path_weight=0", "task.ada_target=0.6"),
    "saehd": ("saehd_demo",),
    "saehd, gan": (
        "saehd_demo",
        "model.gan_power=0.1",
        "model.gan_dims=8",
        "model.true_face_power=0.1",
    ),
    "yolofuse": ("yolofuse_demo", "dataset.count=40", "dataset.test_count=8"),
    "one camera": ("yolofuse_demo", "model.fusion=ir", "dataset.count=40", "dataset.test_count=8"),
    "dain": ("dain_demo", "task.flow_steps=1"),
    "rife": ("rife_demo", "task.flow_steps=1"),
    "flow_warp": (
        "dain_demo",
        "model=null",
        "model=flow_warp",
        "optimizer=null",
        "optimizer=adamax",
        "optimizer.lr=3.5e-3",
        "task.flow_steps=1",
    ),
    "diffusion": ("diffusion_digits",),
}
"""Name -> the configuration and its changes."""
SMALL = ("classifier", "class weights", "vae", "lsgan", "wgan_gp", "dcgan")
"""Tasks that are tried in every mode."""
BATCHES = {"stylegan2": 16, "path lengths": 16, "stylegan2 ada": 16}
"""Other batches than `--batch-size`: StyleGAN2's discriminator looks at groups of four samples."""
RATES = {
    "yolofuse": 2e-4,
    "one camera": 2e-4,
    "saehd": 1e-3,
    "saehd, gan": 1e-3,
    "vae": 1e-3,
    "cvae": 1e-3,
    "dvae": 1e-3,
}
"""Other rates than 0.005: losses that are sums over many places."""
TRAINED_STEPS = {
    **dict.fromkeys(("dain", "rife", "flow_warp"), 20),
    **dict.fromkeys(("saehd", "saehd, gan", "stylegan2", "path lengths", "stylegan2 ada"), 40),
}
"""Other numbers of steps before the comparison than `--trained`."""
SYNCHRONISED = ("parallel.sync_batchnorm=true",)
WAYS: dict[str, tuple[str, ...]] = {
    "micro-batches": (),
    "ddp": ("parallel.strategy=ddp",),
    "ddp, sync": ("parallel.strategy=ddp", *SYNCHRONISED),
    **{
        f"fsdp {shard}": ("parallel.strategy=fsdp", f"parallel.shard={shard}", *SYNCHRONISED)
        for shard in ("full", "grad", "hybrid")
    },
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


def make_config(
    task: str, mode: str, way: str, batch_size: int, ranks: int, *changes: str
) -> Config:
    """Return a task's small configuration; hybrid is over two groups of ranks."""
    name, *own = TASKS[task]
    parallel = [
        *WAYS[way],
        *([f"parallel.shard_ranks={ranks // 2}"] if way.endswith("hybrid") else []),
    ]
    split = [f"memory.micro_batch={batch_size // 4}"] if way == "micro-batches" else []
    words = [
        *own,
        "precision=null",
        *MODES[mode],
        f"train.batch_size={batch_size}",
        *parallel,
        *split,
        *changes,
    ]
    return load_config(f"@{name}", words)


def with_sgd(task: str) -> tuple[str, ...]:
    """Return the changes to a configuration with which it is compared."""
    return "optimizer=null", "optimizer=sgd", f"optimizer.lr={RATES.get(task, 0.005)}"


def weight_of(batch: Batch) -> torch.Tensor:
    """Return what each sample of a batch weighs in a normalised loss, as far as that differs."""
    if "box_mask" in batch:
        return batch["box_mask"].sum(1)
    label = batch.get("label", torch.zeros(len(next(iter(batch.values())))))
    return (label == 1).long() - (label == 0).long()


def batches(run: Run, config: Config, data: Dataset) -> Iterator[Batch]:
    """Yield this rank's parts of the batches, which are sorted by what samples weigh."""
    count = config.train.batch_size
    start, stop = run.world.place(count)
    for whole in Loader(data, count, config.seed).batches():
        order = weight_of(whole).argsort(stable=True)
        part = inputs_of(
            run, {name: value[order][start:stop] for name, value in whole.items()}, count
        )
        yield {name: in_default_dtype(value) for name, value in part.items()}


def take_steps(run: Run, config: Config, data: Dataset, steps: int) -> list[bool]:
    """Perform steps as the training does; return which updates were skipped."""
    skipped = []
    stream = batches(run, config, data)
    for step in range(steps):
        batch = next(stream)
        for phase in (phase for phase in run.phases if phase.is_due(step)):
            skipped.append(update(run, phase, batch).stats.skipped)
        follow_step(run, step)
    return skipped


def train_before(config: Config, steps: int, path: Path) -> None:
    """Train in one process and save the networks and what the task has counted."""
    data, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), data.spec)
    take_steps(run, config, data, steps)
    modules = {name: module.state_dict() for name, module in run.task.modules.items()}
    torch.save({"modules": modules, "task": run.task.state_dict()}, path)


def perform(
    world: World, config: Config, data: Dataset, steps: int, start: Path, keeps_norms: bool
) -> dict[str, Any]:
    """Go on from trained networks for some steps, and return what they came to."""
    run = build_run(config, torch.device("cpu"), data.spec, world=world)
    saved = torch.load(start, weights_only=True)
    restore_modules(run, {"modules": saved["modules"]})
    run.task.load_state_dict(
        {name: in_default_dtype(value) for name, value in saved["task"].items()}
    )
    for norm in (
        m
        for module in run.task.modules.values()
        for m in module.modules()
        if isinstance(m, _BatchNorm)
    ):
        norm.train(not keeps_norms)
    first = weights_of(run)
    skipped = take_steps(run, config, data, steps)
    last = weights_of(run)
    return {
        "first": first.numpy(),
        "last": last.numpy(),
        "skipped": skipped,
        "scales": loss_scales(run.precision),
    }


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Build and compute in float64 inside the block, what asks for float32 by `float()` too."""
    plain = torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = plain  # type: ignore[method-assign]
        torch.set_default_dtype(torch.float32)


def perform_both(world: World, config: Config, mode: str, *more: Any) -> list[dict[str, Any]]:
    """Go on from trained networks, of fp32 in float64 as well."""
    data, _ = build_datasets(config)
    found = [perform(world, config, data, *more)]
    if mode == "fp32":
        if isinstance(world, Ranks):
            world.exchanges.clear()  # they belong to the weights of the run before
        with float64():
            found.append(perform(world, config, data, *more))
    return found


def in_default_dtype(value: Any) -> Any:
    """Return a number that a task has counted in the dtype of the comparison."""
    return (
        value.to(torch.get_default_dtype())
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
    )


def weights_of(run: Run) -> torch.Tensor:
    """Return all trained weights of a task, whole, one after the other."""
    found = [
        full(p).detach().double().flatten()
        for m in run.task.trainable.values()
        for p in m.parameters()
    ]
    return torch.cat([one.clone() for one in found])


def on_rank(rank: int, config: tuple[Any, ...], *more: Any) -> Any:
    """Do a rank's part of a comparison."""
    try:
        made = make_config(*config)
        with joined(made) as world:
            return perform_both(world, made, config[1], *more)
    except ConfigError as error:
        return str(error)


def distance(of_one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the update distance."""
    moved = numpy.linalg.norm(of_one["last"] - of_one["first"])
    return float(numpy.linalg.norm(other["last"] - of_one["last"]) / moved)


def equality_rows(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    """Yield the lines of the table of equality."""
    yield "| task | mode | way | ranks | update distance | in float64 | weights moved | skipped steps, scales |"
    yield "|---|---|---|---:|---:|---:|---:|---|"
    alone: dict[Any, Any] = {}
    for task, mode, ranks, way in cases(arguments):
        batch = BATCHES.get(task, arguments.batch_size) // ranks * ranks
        start = folder / f"{task}-{batch}.pt"
        if not start.exists():
            steps = TRAINED_STEPS.get(task, arguments.trained)
            train_before(make_config(task, "fp32", "ddp", batch, 1), steps, start)
        keeps_norms = "sync" not in way and "fsdp" not in way
        more = (arguments.steps, start, keeps_norms)
        if (task, mode, batch, keeps_norms) not in alone:
            config = make_config(task, mode, "ddp", batch, 1, *with_sgd(task))
            alone[task, mode, batch, keeps_norms] = perform_both(ALONE, config, mode, *more)
        of_one = alone[task, mode, batch, keeps_norms]
        began = time.perf_counter()
        config_words = (task, mode, way, batch, ranks, *with_sgd(task))
        if way == "micro-batches":
            told = [perform_both(ALONE, make_config(*config_words), mode, *more)]
        else:
            told = run_ranks(ranks, on_rank, config_words, *more, limit=300)
        print(f"{task} {mode} {way} {ranks}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        head = f"| {task} | {mode} | {way} | {ranks} |"
        if not all(isinstance(one, list) for one in told):
            reason = next((one for one in told if isinstance(one, str)), f"exit codes {told}")
            yield f"{head} refused: {FIRST.split(reason.split(': ', 1)[-1])[0]} | | | |"
            continue
        yield f"{head} {compared(of_one, told)} |"


def compared(of_one: list[dict[str, Any]], told: list[list[dict[str, Any]]]) -> str:
    """Return the last four cells of a row: the distances of the first rank from one process, and what is alike."""
    alone, first = of_one[0], told[0][0]
    same = all(
        numpy.array_equal(ours["last"], one["last"])
        for one in told
        for ours, one in zip(told[0], one, strict=True)
    )
    moved = numpy.linalg.norm(alone["last"] - alone["first"]) / numpy.linalg.norm(alone["first"])
    equal = first["skipped"] == alone["skipped"] and first["scales"] == alone["scales"]
    distances = [
        f"{distance(alone, other):.1e}" for alone, other in zip(of_one, told[0], strict=True)
    ]
    in_float64 = distances[1] if len(distances) > 1 else ""
    words = f"{'equal' if equal else 'DIFFERENT'}, {sum(alone['skipped'])} skipped"
    return (
        f"{distances[0]}{'' if same else ' (RANKS DIFFER)'} | {in_float64} | {moved:.1e} | {words}"
    )


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, str]]:
    """Yield task, mode, number of ranks and way of each row."""
    for mode, task, way, ranks in itertools.product(
        arguments.modes, arguments.tasks, arguments.ways, arguments.ranks
    ):
        if mode != "fp32" and (
            task not in SMALL or ranks > 2 or way not in ("micro-batches", "ddp", "fsdp full")
        ):
            continue
        if way == "micro-batches":
            if ranks == arguments.ranks[0]:
                yield task, mode, 1, way
            continue
        if (way.endswith("hybrid") and ranks < 4) or (
            way in ("fsdp grad", "ddp, sync") and ranks > 2
        ):
            continue
        if way == "ddp, sync" and not has_norm(task):
            continue
        yield task, mode, ranks, way


def has_norm(task: str) -> bool:
    """Return whether a task's networks have BatchNorm."""
    config = make_config(task, "fp32", "ddp", 8, 1)
    run = build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)
    return any(
        isinstance(m, _BatchNorm) for module in run.task.modules.values() for m in module.modules()
    )


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
            said = [
                kind
                for kind in ("out_of_memory", "rollback", "overflow", "rank_lost")
                if kind in events
            ]
            saved = saved_step(Path(name))
        yield f"| {kind} | {rank} | {codes} | {saved} | {seconds:.0f} | {', '.join(said) or '-'} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--what", nargs="+", choices=("equality", "faults"), default=["equality", "faults"]
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["fp32", "amp"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument(
        "--trained", type=int, default=160, help="steps before those that are compared"
    )
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.pop("WORLD_SIZE", None)
    if "equality" in arguments.what:
        with tempfile.TemporaryDirectory() as name:
            for line in equality_rows(arguments, Path(name)):
                print(line, flush=True)
        print()
    if "faults" in arguments.what:
        for line in fault_rows():
            print(line, flush=True)


if __name__ == "__main__":
    main()
