"""`mpt train`: from a configuration to a finished run directory.

Everything a user can get wrong is met before the first step: the configuration, the device, the data, the checkpoint
to go on from. After that the loop saves before it stops, whatever stops it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpt.commands.arguments import TrainArguments
from mpt.config.layers import write_override
from mpt.config.load import load_config
from mpt.config.patch_origin import find_strange_patches
from mpt.config.relief import environment
from mpt.config.schema import Config
from mpt.errors import MemoryBudgetError, MptError
from mpt.run.launch import refuse_several_processes
from mpt.run.used_parts import missing_parts_explained

if TYPE_CHECKING:
    import torch

    from mpt.engine.loop import Training
    from mpt.run.console import Console, Style
    from mpt.run.layout import RunDirectory
    from mpt.seams import Dataset, DataSpec, Run


def run(arguments: TrainArguments) -> None:
    """Train as the arguments say. Raises MptError for everything that is the user's to mend."""
    refuse_several_processes()
    config = read_config(arguments)
    for warning in find_strange_patches(arguments.patches, config):
        print(f"warning: {warning}", file=sys.stderr)
    if arguments.print_config:
        sys.stdout.write(config.to_yaml())
        return
    if arguments.smoke and not arguments.dry_run:
        from mpt.commands.smoke import smoke

        smoke(config, arguments)
        return
    train(config, arguments)


def read_config(arguments: TrainArguments) -> Config:
    """Read the file, its overrides and the options that stand for overrides."""
    overrides = list(arguments.overrides)
    for key, value in (
        ("name", arguments.name),
        ("seed", arguments.seed),
        ("train.device", arguments.device),
    ):
        if value is not None:
            overrides.append(write_override(key, value))
    with missing_parts_explained(arguments.config.parent):
        return load_config(arguments.config, overrides, allow=arguments.allow, patches=arguments.patches)


def train(config: Config, arguments: TrainArguments, stop_after: int | None = None) -> Path | None:
    """Build, restore where asked, train, report. Return the run's folder, or None after a dry run."""
    prepare_torch(config)
    import torch

    from mpt.commands.resume import begin, find_run_to_resume, make_directory, resume
    from mpt.data.loader import Loader
    from mpt.engine.build import build_datasets, choose_device
    from mpt.engine.loop import Training
    from mpt.planner.beside import plan_beside
    from mpt.run.console import Console
    from mpt.run.recorder import Recorder
    from mpt.run.retention import clean_temporaries
    from mpt.run.tensorboard import TensorBoardWriter, check_installed

    if config.train.tensorboard:
        check_installed()
    device = choose_device(config.train.device)
    train_data, test_data = build_datasets(config)
    loader = Loader(
        train_data,
        config.train.batch_size,
        config.seed,
        workers=config.dataset.settings.workers,
        pin_memory=device.type == "cuda",
    )
    total_steps = config.train.steps or max(1, round((config.train.epochs or 0) * loader.steps_per_epoch))
    with Console(style(arguments), total_steps) as console:
        found, source = find_run_to_resume(config, arguments, console)
        built = build_explained(config, device, train_data.spec, restores=source is not None)
        describe(console, config, built.precision.reason, len(train_data), total_steps, device.type)
        for message in built.messages:
            console.message(message)
        for note in built.notes:
            console.warning(note)
        if arguments.dry_run:
            console.message("dry run: everything builds; nothing was written")
            return None
        directory = found or make_directory(config, arguments, console)
        with directory.hold() as taken_over, Recorder(directory) as recorder:
            for note in ([taken_over] if taken_over else []) + clean_temporaries(directory):
                console.message(note)
            board = TensorBoardWriter(directory) if config.train.tensorboard else None
            training = Training(built, directory, recorder, console, loader, test_data, total_steps, board)
            if source is not None and not resume(training, source, arguments):
                finish_again(training)
                return Path(directory.path)
            if source is None:
                begin(training)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            with plan_beside(config, train_data.spec, device, directory.plan_path, arguments.allow) as plan:
                go(training, arguments, stop_after)
                tell_skipped_files(training, train_data, test_data)
                if training.step == training.total_steps:
                    plan.wait()
                finish(directory, console, training)
    return Path(directory.path)


def build_explained(config: Config, device: torch.device, data: DataSpec, restores: bool = False) -> Run:
    """Build the run. Raises MemoryBudgetError where not even the weights find room."""
    from mpt.engine.build import build_run
    from mpt.engine.recovery import is_out_of_memory, out_of_memory_reason

    try:
        return build_run(config, device, data, restores=restores)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = out_of_memory_reason(error)
    raise MemoryBudgetError(
        f"out of memory before the first step ({reason}): the weights alone are too much for {device}. "
        "Use a smaller model, or precision=bf16-pure; `mpt plan CONFIG` says what it needs"
    )


def go(training: Training, arguments: TrainArguments, stop_after: int | None) -> None:
    """Train until the end. Raises MemoryBudgetError with a card when memory runs out for good."""
    from mpt.engine.recovery import is_out_of_memory, out_of_memory_reason
    from mpt.run.signals import StopRequest

    try:
        with StopRequest() as stop:
            training.go(stop, stop_after)
        return
    except MemoryBudgetError as error:
        message = str(error)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = (
            f"out of memory at step {training.step}, outside the update: while loading, evaluating or saving "
            f"({out_of_memory_reason(error)})"
        )
    # Past the except blocks: a traceback would go on holding what filled the memory.
    from mpt.commands.memory_card import add_card

    raise MemoryBudgetError(add_card(message, training, arguments))


def prepare_torch(config: Config) -> None:
    """Set what must be set before torch allocates: deterministic kernels, threads, the allocator."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in environment(config.memory.plugins).items():
        os.environ.setdefault(name, value)
    import torch

    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    torch.backends.cudnn.benchmark = not config.train.deterministic
    torch.backends.cudnn.deterministic = config.train.deterministic


def style(arguments: TrainArguments) -> Style:
    """Return how the console should speak."""
    return "json" if arguments.json else "quiet" if arguments.quiet else "auto"


def describe(console: Console, config: Config, reason: str, samples: int, steps: int, device: str) -> None:
    """Say what is about to be trained, and why in this precision."""
    console.message(
        f"{config.model.name} on {config.dataset.name} ({samples} samples), "
        f"{steps} steps of {config.train.batch_size}, {device}"
    )
    console.message(f"precision {config.precision.mode}: {reason}")


def tell_skipped_files(training: Training, *datasets: Dataset) -> None:
    """Say which files a data set could not read and passed over, where it was allowed to."""
    bad = {path: reason for data in datasets for path, reason in getattr(data, "bad_files", {}).items()}
    if bad:
        path, reason = next(iter(bad.items()))
        training.warn(f"{len(bad)} bad {'file was' if len(bad) == 1 else 'files were'} skipped, first {path}: {reason}")


def finish(directory: RunDirectory, console: Console, training: Training) -> None:
    """Write the report; a report that fails is a warning, never a lost run."""
    from mpt.report.page import write_report
    from mpt.report.read_run import read_run
    from mpt.report.units import show_bytes

    if training.step < training.total_steps:  # a smoke run's first half
        console.message(f"stopped after step {training.step}, to be resumed")
        return
    try:
        write_report(Path(directory.path))
    except (MptError, OSError, ValueError) as error:
        console.warning(f"the report could not be written: {error}")
    else:
        for row in read_run(Path(directory.path)).planned:
            planned, measured = show_bytes(row.planned), show_bytes(row.measured)
            console.message(f"memory {row.name}: planned {planned}, measured {measured} ({row.error:+.1%})")
    figures = "  ".join(f"{name} {value:.4g}" for name, value in training.last_metrics.items())
    console.message(f"done: {figures}  ({training.seconds:.0f} s)  report {directory.path / 'report.html'}")


def finish_again(training: Training) -> None:
    """Write what a run that was killed between its last checkpoint and its end still lacks."""
    directory = training.directory
    if not directory.summary_path.is_file() or not directory.report_path("html").is_file():
        training.write_summary()
        finish(directory, training.console, training)


def with_steps(config: Config, **changes: object) -> Config:
    """Return the configuration with other `train` settings."""
    return dataclasses.replace(config, train=config.train.model_copy(update=changes))
