"""The run directory: its names, who may write into it, and how a user's words find it.

A run owns one directory, made by `mkdir`, which two processes cannot both succeed at, and whoever writes holds its
lock (`mpt.run.records.lock`). Runs are found by name, by path, or by the path of one of their checkpoints. Never
imports torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from mpt.config.finding.shipped import MARK, shipped_files
from mpt.config.schema import RUN_NAME
from mpt.config.text.yaml_text import WEIGHTS
from mpt.errors import CheckpointError, ConfigError, InputOutputError
from mpt.run.process.files import failures_explained
from mpt.run.process.operating_system import IS_POSIX, is_reserved
from mpt.run.records.lock import hold_lock

THROWN_AWAY = "mpt-smoke-"
"""The beginning of the name of a folder of runs that will not be kept."""
CHECKPOINT_NAME = re.compile(r"step-(\d{8,18})", re.ASCII)
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MARKS = ("config.yaml", "metrics.jsonl", "checkpoints", "lock")
"""A directory with one of these is a run."""
CLOCKS_APART_NS = 60 * 10**9
"""How far the clock of a file server may be ahead."""


class Inside:
    """A name in a run's directory: an attribute that is its path."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, owner: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """One run's directory and the names in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    config_path = Inside("config.yaml")
    """The resolved config, which runs again as it is."""
    env_path = Inside("env.json")
    """The run's environment: versions, devices, command line."""
    data_path = Inside("data.json")
    """The data set's fields and classes, so that the run can infer without the data."""
    parts_path = Inside("parts.json")
    """Which parts from outside of the package the run used; absent if it used none."""
    metrics_path = Inside("metrics.jsonl")
    """One line per logged step and per evaluation."""
    events_path = Inside("events.jsonl")
    """Overflows, skipped steps, recoveries, resumes."""
    results_path = Inside("results.csv")
    """One row per evaluation."""
    skipped_files_path = Inside("skipped_files.csv")
    """The files of the data set that were skipped because they are bad, and why."""
    summary_path = Inside("summary.json")
    """The finished run's figures; absent until the end."""
    plan_path = Inside("plan.json")
    """The memory planned during the training, or the reason that none was; absent without a plan."""
    doctor_path = Inside("doctor.json")
    """The findings of `mpt doctor` in the run; absent if it did not run."""
    checkpoints = Inside("checkpoints")
    """The directory of checkpoints."""
    samples = Inside("samples")
    """The directory of sample images."""
    lock_path = Inside("lock")
    """The file whose lock makes its holder the only writer."""
    snapshot_path = Inside("memory_snapshot.pickle")
    """Torch's own snapshot of the card's memory when it had run out (`torch.cuda.memory._snapshot`)."""

    def refuse_link(self) -> None:
        """Raise InputOutputError if a link has taken the place of the folder: nothing is to be written behind it."""
        if self.path.is_symlink():
            raise InputOutputError(
                f"{self.path}: a symbolic link has taken the place of the run's folder while it was trained; "
                "nothing is written behind it. Put the folder back and continue with --resume."
            )

    def report_path(self, suffix: str) -> Path:
        """Return the report's path for `md`, `html` or `json`."""
        return self.path / f"report.{suffix}"

    def checkpoint_path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, which need not exist."""
        return self.checkpoints / f"step-{step:08d}"

    def hold(self) -> AbstractContextManager[str | None]:
        """Be the only writer within the block; yields a sentence if a killed holder's lock was taken over.

        Raises InputOutputError if another process writes here, naming it.
        """
        return hold_lock(self.lock_path, self.path)


def check_name(name: str) -> None:
    """Raise ConfigError unless `name` can be nothing but the name of one directory."""
    if not IS_POSIX and is_reserved(name):
        raise ConfigError(
            f"{name!r} cannot be a run's name on Windows, which keeps it for itself or cuts its end off."
        )
    if not RUN_NAME.fullmatch(name):
        shown = repr(name if len(name) <= 60 else name[:57] + "...")
        raise ConfigError(
            f"{shown} cannot be a run's name: 1 to 100 letters, digits, '.', '_' and '-' are allowed, and no dot at "
            "the beginning."
        )


def create_run(runs_dir: Path, name: str) -> RunDirectory:
    """Make a new run directory: `name`, or `name-2`, `name-3`, ... if that exists.

    Raises ConfigError for a name that is none, InputOutputError if the directory cannot be made.
    """
    check_name(name)
    with failures_explained(runs_dir):
        runs_dir.mkdir(parents=True, exist_ok=True)
        number = 1
        while not claim(
            run := RunDirectory(runs_dir / (name if number == 1 else f"{name}-{number}"))
        ):
            number += 1
        run.samples.mkdir(exist_ok=True)
    return run


def claim(run: RunDirectory) -> bool:
    """Make this directory the caller's. False if anything but an empty directory has the name, a link included.

    A kill after the first of two mkdirs leaves an empty directory, which the next start takes. Of processes that find
    it, or make it, at once, one makes `checkpoints` and owns it.
    """
    try:
        try:
            run.path.mkdir()
        except FileExistsError:
            if run.path.is_symlink() or not run.path.is_dir() or os.listdir(run.path):
                return False
        run.checkpoints.mkdir()
    except FileExistsError:
        return False
    return True


def is_run(path: Path) -> bool:
    return path.is_dir() and any((path / mark).exists() for mark in MARKS)


def open_run(path: Path) -> RunDirectory:
    """Return an existing run. Raises CheckpointError if there is none, or if a link is in for part of it."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such run directory.")
    if not is_run(path):
        raise CheckpointError(
            f"{path} is not a run directory: it holds none of {', '.join(MARKS)}."
        )
    run = RunDirectory(path.resolve())
    refuse_links(run)
    return run


def refuse_links(run: RunDirectory) -> None:
    """Raise CheckpointError if a link or a file has taken the place of one of the run's directories."""
    for part in (run.checkpoints, run.samples):
        if part.is_symlink():
            raise CheckpointError(
                f"{part} is a symbolic link, which is not followed: put the directory itself there."
            )
        if part.exists() and not part.is_dir():
            raise CheckpointError(
                f"{part} is a file; the run's directory of that name belongs there."
            )


def list_runs(runs_dir: Path) -> list[RunDirectory]:
    """Return all runs, the one that was written to last coming last."""
    if not runs_dir.is_dir():
        return []
    paths = [path for path in runs_dir.iterdir() if not path.is_symlink() and is_run(path)]
    return [RunDirectory(path.resolve()) for path in sorted(paths, key=last_written)]


def last_written(path: Path) -> tuple[int, int, int, str]:
    """Return a key that orders runs by when they were last trained, then by number, then by name.

    Pictures and reports that are made afterwards change the folder's own time and leave an old run old. A run with
    times in the future alone, from a clock that was wrong, is older than all others: it would be the newest for ever.
    """
    times = writing_times(path)
    latest = time.time_ns() + CLOCKS_APART_NS
    times = times or [path.stat().st_mtime_ns]
    past = [one for one in times if one <= latest]
    number = re.search(r"-(\d{1,9})$", path.name)
    return len(past) > 0, max(past or times), int(number.group(1)) if number else 1, path.name


def writing_times(path: Path) -> list[int]:
    """Return when the files that training alone writes were last written, in nanoseconds."""
    times: list[int] = []
    for name in ("config.yaml", "metrics.jsonl", "lock"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime_ns)
    return times


def newest_run(runs_dir: Path) -> RunDirectory:
    """Return the run that was written to last, one that was stopped at its very start only if there is no other.

    Raises CheckpointError if there is none.
    """
    runs = list_runs(runs_dir)
    if not runs:
        raise CheckpointError(
            f"{runs_dir} holds no run yet: start one with `mpt train CONFIG`, or name one by its path."
        )
    return next((run for run in reversed(runs) if run.config_path.is_file()), runs[-1])


def find_run(text: str, runs_dir: Path) -> tuple[RunDirectory, Path | None]:
    """Return the run that a user named, and the checkpoint if it was that.

    `text` is a run's name in `runs_dir`, the path of a run, or the path of a checkpoint in one. Raises CheckpointError.
    """
    if "\0" in text or not text:
        raise CheckpointError(f"{text!r} is neither a run nor a checkpoint.")
    try:
        for path in (Path(text), runs_dir / text):
            if (
                path.name.startswith("step-")
                and path.parent.is_dir()
                and is_run(path.parent.parent)
            ):
                if not (CHECKPOINT_NAME.fullmatch(path.name) and path.is_dir()):
                    raise_missing_checkpoint(path)
                return open_run(path.parent.parent), path.resolve()
            if is_run(path):
                return open_run(path), None
    except OSError as error:
        raise CheckpointError(f"{text[:100]!r} cannot be looked for: {error.strerror}.") from error
    raise CheckpointError(explain_no_run(text, runs_dir))


def explain_no_run(text: str, runs_dir: Path) -> str:
    """Return why a text names neither a run nor a checkpoint, and the names that do."""
    for path in (Path(text), runs_dir / text):
        if path.name == "checkpoints" and is_run(path.parent):
            return f"{path} holds checkpoints: name the run, {path.parent}, or one of them."
        inner = list_runs(path)
        if inner:
            return f"{path} is no run but holds runs: name one of them, such as {inner[0].path}."
        if path.is_dir() and any(file.suffix.lower() in PICTURES for file in path.rglob("*.*")):
            return f"{path} is a folder of pictures, not a run: mpt infer RUN --input {path}"
        if path.is_file():
            use = (
                ", or train from these weights with model.weights=" + str(path)
                if path.suffix in WEIGHTS
                else ""
            )
            return f"{path} is a file, not a run or checkpoint: name a run{use}."
    if Path(text).suffix == ".onnx":
        return f"There is no file {text}."
    if (name := text.removeprefix(MARK).removesuffix(".yaml")) in shipped_files():
        return f"{text} is a configuration and no run: train it first with mpt train {MARK}{name}"
    if Path(text).suffix in WEIGHTS:
        return f"There is no file {text}. It would be weights, not a run: mpt train CONFIG model.weights={text}"
    names = [run.name for run in list_runs(runs_dir)]
    nearest = get_close_matches(text, names, n=1)
    which = "Runs here" if len(names) <= 5 else f"The newest of {len(names)} runs"
    hint = (
        f" Did you mean {nearest[0]}?"
        if nearest
        else f" {which}: {', '.join(names[-5:]) or 'none'}."
    )
    return f"There is no run or checkpoint {text!r}, neither as a path nor in {runs_dir}.{hint}"


def raise_missing_checkpoint(path: Path) -> NoReturn:
    """Raise CheckpointError that names the checkpoints which the run still has."""
    kept = sorted(name for name in os.listdir(path.parent) if CHECKPOINT_NAME.fullmatch(name))
    raise CheckpointError(
        f"{path.parent} holds no {path.name}; it has {', '.join(kept) or 'none'} (train.keep_last says how many stay)."
    )
