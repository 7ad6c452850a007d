"""`mpt train`: from a configuration to a finished run directory.

Everything a user can get wrong is met before the first step: the configuration, the device, the data, the checkpoint
to go on from. After that the loop saves before it stops, whatever stops it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpt.commands.arguments import TrainArguments
from mpt.config.layers import write_override
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import CheckpointError, MemoryBudgetError, MptError

if TYPE_CHECKING:
    import torch

    from mpt.engine.build import Run
    from mpt.engine.loop import Training
    from mpt.run.console import Console, Style
    from mpt.run.layout import RunDirectory
    from mpt.seams import Dataset, DataSpec


def run(arguments: TrainArguments) -> None:
    """Train as the arguments say. Raises MptError for everything that is the user's to mend."""
    config = read_config(arguments)
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
    return load_config(arguments.config, overrides, allow=arguments.allow, patches=arguments.patches)


def train(config: Config, arguments: TrainArguments, stop_after: int | None = None) -> Path | None:
    """Build, restore where asked, train, report. Return the run's folder, or None after a dry run."""
    prepare_torch(config)
    import torch

    from mpt.data.loader import Loader
    from mpt.engine.build import build_datasets, choose_device
    from mpt.engine.loop import Training
    from mpt.run.console import Console
    from mpt.run.files import write_atomically
    from mpt.run.recorder import Recorder
    from mpt.run.retention import clean_temporaries
    from mpt.run.tensorboard import TensorBoardWriter

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
        built = build_explained(config, device, train_data.spec)
        describe(console, config, built.precision.reason, len(train_data), total_steps, device.type)
        for note in built.notes:
            console.warning(note)
        if arguments.dry_run:
            console.message("dry run: everything builds; nothing was written")
            return None
        directory, source = open_directory(config, arguments, console)
        with directory.hold() as taken_over, Recorder(directory) as recorder:
            for note in ([taken_over] if taken_over else []) + clean_temporaries(directory):
                console.message(note)
            board = TensorBoardWriter(directory) if config.train.tensorboard else None
            training = Training(built, directory, recorder, console, loader, test_data, total_steps, board)
            if source is not None:
                resume(training, source, console, arguments)
            else:
                write_atomically(directory.config_path, config.to_yaml())
            write_environment(directory, source is not None)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            go(training, arguments, stop_after)
            tell_skipped_files(training, train_data, test_data)
            finish(directory, console, training)
    return Path(directory.path)


def build_explained(config: Config, device: torch.device, data: DataSpec) -> Run:
    """Build the run. Raises MemoryBudgetError where not even the weights find room."""
    from mpt.engine.build import build_run
    from mpt.engine.recovery import is_out_of_memory, out_of_memory_reason

    try:
        return build_run(config, device, data)
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
    if "expandable_segments" in config.memory.tricks:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
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


def open_directory(
    config: Config, arguments: TrainArguments, console: Console
) -> tuple[RunDirectory, RunDirectory | Path | None]:
    """Return the run's directory, and what to resume from: the run itself, one of its checkpoints, or None."""
    from mpt.run.layout import create_run, find_run, list_runs

    runs = Path(arguments.runs)
    if arguments.resume == "auto":
        name = re.compile(re.escape(config.run_name) + r"(-[0-9]+)?")
        same = [run for run in list_runs(runs) if name.fullmatch(run.name)]
        if same:
            return same[-1], same[-1]
        console.message(f"nothing to resume: there is no run named {config.run_name} in {runs}; starting one")
    elif arguments.resume is not None:
        directory, checkpoint = find_run(arguments.resume, runs)
        return directory, checkpoint or directory
    directory = create_run(runs, config.run_name)
    console.message(f"run directory {directory.path}")
    return directory, None


def resume(training: Training, source: RunDirectory | Path, console: Console, arguments: TrainArguments) -> None:
    """Load a checkpoint and drop what the record and the folder hold beyond it."""
    from mpt.engine.loop import conditions
    from mpt.run import checkpoint
    from mpt.run.retention import set_aside_after

    loaded = checkpoint.load(source, map_location=training.run.device)
    for note in loaded.notes:
        console.warning(note)
    before, now = loaded.manifest["extra"].get("conditions", {}), conditions(training.run)
    changed = [f"{key} {before[key]} -> {now[key]}" for key in now if key in before and before[key] != now[key]]
    if changed and arguments.exact:
        raise CheckpointError(f"--exact: not bit-exact, since these changed: {', '.join(changed)}")
    training.load(loaded)
    for note in set_aside_after(training.directory, training.step):
        console.message(note)
    training.recorder.truncate_after(training.step)
    training.event("resume", f"resumed at step {training.step} from {loaded.path.name}", notes=list(loaded.notes))
    console.message(f"resumed {training.directory.path} at step {training.step} of {training.total_steps}")
    if changed:
        training.warn(f"this resume is not bit-exact: {', '.join(changed)} changed since the checkpoint")
    if training.step >= training.total_steps:
        console.message("the run was complete already; raise train.steps to train longer")


def write_environment(directory: RunDirectory, resumes: bool) -> None:
    """Write env.json at the start; a resume appends its own environment beside the first."""
    from mpt.run.environment import describe_environment
    from mpt.run.files import write_atomically

    path = directory.env_path
    current = describe_environment()
    if resumes and path.is_file():
        try:
            first = json.loads(path.read_text("utf-8"))
        except ValueError:
            first = {}
        first.setdefault("resumes", []).append(current)
        current = first
    write_atomically(path, json.dumps(current, indent=1) + "\n")


def tell_skipped_files(training: Training, *datasets: Dataset) -> None:
    """Say which files a data set could not read and passed over, where it was allowed to."""
    bad = {path: reason for data in datasets for path, reason in getattr(data, "bad_files", {}).items()}
    if bad:
        path, reason = next(iter(bad.items()))
        training.warn(f"{len(bad)} bad {'file was' if len(bad) == 1 else 'files were'} skipped, first {path}: {reason}")


def finish(directory: RunDirectory, console: Console, training: Training) -> None:
    """Write the report; a report that fails is a warning, never a lost run."""
    from mpt.report.page import write_report

    if not training.step_seconds:  # a finished run that was resumed
        return
    if training.step < training.total_steps:  # a smoke run's first half
        console.message(f"stopped after step {training.step}, to be resumed")
        return
    try:
        write_report(Path(directory.path))
    except (MptError, OSError, ValueError) as error:
        console.warning(f"the report could not be written: {error}")
    figures = "  ".join(f"{name} {value:.4g}" for name, value in training.last_metrics.items())
    console.message(f"done: {figures}  ({training.seconds:.0f} s)  report {directory.path / 'report.html'}")


def with_steps(config: Config, **changes: object) -> Config:
    """Return the configuration with other `train` settings."""
    return dataclasses.replace(config, train=config.train.model_copy(update=changes))
