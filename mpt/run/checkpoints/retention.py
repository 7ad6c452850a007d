"""Which checkpoints a run has, keeps, sets aside and cleans away.

The last few are kept, and the best, which is found from the manifests rather than from a note that could disagree
with them. Checkpoints beyond a resume from an earlier one are set aside as `abandoned-step-...` and can be
renamed back; they go when the run has come as far again, or sets other checkpoints aside. Deleting and replacing are
renames first, so that no reader meets half a directory under a checkpoint's name.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from mpt.run.checkpoints.manifest import read_manifest, read_small
from mpt.run.process.files import TEMPORARY, failures_explained, temporary_name, write_atomically
from mpt.run.process.operating_system import opened
from mpt.run.records.layout import CHECKPOINT_NAME, RunDirectory

REPLACED = ".replaced-"
ABANDONED = "abandoned-"
INDEX = "index.json"


@dataclass(frozen=True)
class BestCheckpoint:
    """The checkpoint with the best metric so far."""

    step: int
    metric: float
    path: Path


def list_steps(run: RunDirectory) -> list[int]:
    """Return the steps that have a checkpoint, whole or not, in ascending order."""
    if not run.checkpoints.is_dir():
        return []
    found = (CHECKPOINT_NAME.fullmatch(name) for name in os.listdir(run.checkpoints))
    return sorted(
        int(match.group(1))
        for match in found
        if match and match.string == f"step-{int(match.group(1)):08d}"
    )


def find_best(run: RunDirectory) -> BestCheckpoint | None:
    """Return the checkpoint with the best metric, the earlier one of equals; None if none has a metric."""
    best: BestCheckpoint | None = None
    for step in list_steps(run):
        path = run.checkpoint_path(step)
        try:
            manifest = read_manifest(path)
        except (OSError, ValueError):
            continue
        metric = manifest.get("metric")
        if not isinstance(metric, int | float):
            continue
        sign = 1 if manifest.get("higher_is_better") else -1
        if best is None or sign * metric > sign * best.metric:
            best = BestCheckpoint(step, float(metric), path)
    return best


def list_abandoned(run: RunDirectory) -> dict[int, Path]:
    """Return step -> the checkpoint of that step that was set aside."""
    names = os.listdir(run.checkpoints) if run.checkpoints.is_dir() else []
    found = ((name, CHECKPOINT_NAME.fullmatch(name.removeprefix(ABANDONED))) for name in names)
    return {
        int(m.group(1)): run.checkpoints / name
        for name, m in found
        if m and name.startswith(ABANDONED)
    }


def prune(run: RunDirectory, newest: int, keep_last: int) -> None:
    """Remove all checkpoints but the last `keep_last`, the best, the one just written, and abandoned later ones."""
    steps = list_steps(run)
    best = find_best(run)
    keep = {*steps[-keep_last:], newest, *([best.step] if best else [])}
    doomed = [run.checkpoint_path(step) for step in steps if step not in keep]
    doomed += [path for step, path in list_abandoned(run).items() if step <= newest]
    for path in doomed:
        # Renamed first: a half-deleted directory must not look like a damaged checkpoint.
        temporary = run.checkpoints / temporary_name()
        os.rename(path, temporary)
        remove(temporary)


def remove(path: Path) -> None:
    """Delete a directory, or a link or file that is in for one, without following links."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_index(run: RunDirectory, newest: int) -> None:
    """Note the newest and the best step for people, and so that a newest checkpoint that vanished is missed."""
    best = find_best(run)
    index = {"newest": newest, "best": {"step": best.step, "metric": best.metric} if best else None}
    write_atomically(run.checkpoints / INDEX, json.dumps(index), durable=False)


def read_index(run: RunDirectory) -> int | None:
    """Return the step that was saved last, if that is known."""
    try:
        with opened(run.checkpoints) as directory:
            newest = json.loads(read_small(INDEX, directory))["newest"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return newest if isinstance(newest, int) else None


def set_aside_after(run: RunDirectory, step: int) -> list[str]:
    """Rename the checkpoints after `step`, so that a run resumed there does not meet its own other future; say which.

    They replace those that were set aside before. Call only while holding the run's lock.
    """
    notes = []
    with failures_explained(run.checkpoints):
        later_steps = [later for later in list_steps(run) if later > step]
        for path in list_abandoned(run).values() if later_steps else ():
            remove(path)
        for later in later_steps:
            path = run.checkpoint_path(later)
            target = run.checkpoints / f"{ABANDONED}{path.name}"
            os.rename(path, target)
            notes.append(f"{path.name} lies after step {step} and was renamed {target.name}.")
    if notes:
        write_index(run, step)
    return notes


def clean_temporaries(run: RunDirectory) -> list[str]:
    """Remove unfinished files of a killed writer, with a note. Call only while holding the run's lock."""
    notes = []
    with failures_explained(run.path):
        for folder in (run.path, run.checkpoints, run.samples):
            is_own = folder.is_dir() and (folder == run.path or not folder.is_symlink())
            for name in sorted(os.listdir(folder)) if is_own else []:
                target = folder / name.removeprefix(REPLACED).rpartition("-")[0]
                if name.startswith(REPLACED) and not os.path.lexists(target):
                    os.rename(folder / name, target)
                    notes.append(
                        f"{target.name} was being replaced when the run was killed; the earlier one is back."
                    )
                elif name.startswith((TEMPORARY, REPLACED)):
                    remove(folder / name)
                    notes.append(
                        f"{name} was left unfinished by a run that was killed; it was removed."
                    )
    return notes
