"""Beginning a run's directory and going on in it: which run, from which checkpoint, and the changes since.

A resume that trains further leaves its settings in `config.yaml` and those that held before alongside them (see
`mpt.run.records.settings_history`). Changes are reported, recorded as an event, and refused under `--exact` if
they change the numbers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from mpt.boards.console import Console
from mpt.config.differences import Difference, find_differences
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.config.text.yaml_text import MAX_BYTES
from mpt.config.text.yaml_text import read_text as parse_yaml
from mpt.data.loading.fingerprint import hash_of_list
from mpt.engine.loop.saving import conditions
from mpt.engine.loop.summary import write_summary
from mpt.engine.loop.training import Training
from mpt.errors import CheckpointError, ConfigError, InputOutputError
from mpt.foreign.files import read_json, read_text
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from mpt.run.checkpoints.retention import set_aside_after
from mpt.run.process.files import write_atomically
from mpt.run.records.data_layout import read_training_list, write_layout
from mpt.run.records.environment import describe_environment
from mpt.run.records.kept_parts import keep_parts
from mpt.run.records.layout import RunDirectory, create_run, find_run, list_runs, open_run
from mpt.run.records.settings_history import replace_settings, settings_at
from mpt.run.records.skipped_files import write_skipped_files
from mpt.run.records.used_parts import changed_parts, write_used_parts
from mpt.seams import Legend

WITHOUT_EFFECT = (
    "train.log_every",
    "train.evaluate_every",
    "train.checkpoint_every",
    "train.keep_last",
    "train.early_stopping",
    "train.early_stopping.metric",
    "train.early_stopping.patience",
    "train.early_stopping.min_delta",
    "train.early_stopping.mode",
    "train.asynchronous_save",
    "train.sample_every",
    "train.keep_samples",
    "train.on_non_finite",
    "train.max_rollbacks",
    "train.tensorboard",
    "train.boards",
    "train.plan_memory",
    "train.on_end",
    "train.device",  # the device that it chose is compared as a condition
    "memory.on_oom",
    "memory.ceiling",
)
"""Settings that change no number of a step."""
LENGTHS = ("train.steps", "train.epochs")
MOST_SHOWN = 8


def find_run_to_resume(
    config: Config, wanted: str | None, runs: Path, console: Console
) -> tuple[RunDirectory | None, RunDirectory | Path | None]:
    """Return the directory to continue in, and the source of the resume: the run itself or one of its checkpoints.

    `wanted` names a run or a checkpoint, "auto" is the newest run of the configuration's name. Both are None for a new
    run; a run that never saved has a directory to begin anew in. Nothing is made yet.
    """
    if wanted is None:
        return None, None
    if wanted == "auto":
        name = re.compile(re.escape(config.run_name) + r"(-[0-9]+)?")
        same = [run for run in list_runs(runs) if name.fullmatch(run.name)]
        if not same:
            console.message(
                f"nothing to resume: there is no run named {config.run_name} in {runs}; starting one"
            )
            return None, None
        directory, chosen = open_run(same[-1].path), None
    else:
        directory, chosen = find_run(wanted, runs)
    if chosen is None and never_saved(directory):
        console.message(f"{directory.path} was stopped before its first checkpoint; it begins anew")
        return directory, None
    return directory, chosen or directory


def make_directory(config: Config, runs: Path, console: Console) -> RunDirectory:
    """Make the directory of a new run."""
    directory = create_run(runs, config.run_name)
    console.message(f"run directory {directory.path}")
    return directory


def never_saved(directory: RunDirectory) -> bool:
    """Did this run stop before it had saved anything? One whose checkpoints were removed has a summary or no folder."""
    return (
        directory.checkpoints.is_dir()
        and not any(directory.checkpoints.glob("[!.]*"))
        and not directory.summary_path.exists()
    )


def begin(training: Training) -> None:
    """Write the files of a run from step 0, over those of a run that never saved. Call with the lock held."""
    if not never_saved(training.directory):  # another process trained here since this one looked
        raise InputOutputError(
            f"{training.directory.path} has checkpoints by now; go on from them with --resume"
        )
    training.journal.recorder.truncate_after(-1)
    write_atomically(training.directory.config_path, training.run.config.to_yaml())
    write_layout(
        training.directory.data_path, training.run.data, hash_of_list(training.loader.dataset)
    )
    write_used_parts(training.directory.parts_path)
    keep_parts(training.directory)
    write_environment(training.directory, resumes=False)
    for message in training.run.messages:
        training.journal.event("weights", message)
    say_of_task(training)


def say_of_task(training: Training) -> None:
    """Print and log notes about the task's figures."""
    task = training.run.task
    note = task.metric_note if isinstance(task, Legend) else None
    if note is not None:
        training.journal.event("note", note)
        training.journal.say(note)


def resume(training: Training, loaded: LoadedCheckpoint, exact: bool = False) -> bool:
    """Continue from a checkpoint and drop everything later in the record and the folder.

    Returns False, with the directory as it was, for a run that is complete. Raises CheckpointError for a checkpoint
    that does not fit and, with `exact`, for changes.
    """
    directory, console = training.directory, training.journal.console
    for note in loaded.notes:
        console.warning(note)
    # with the dtype of a run that fell back
    training.run.precision.load_state_dict(loaded.state["precision"])
    training_list = hash_of_list(training.loader.dataset)
    changed = changed_conditions(training, loaded, training_list)
    config, settings = changed_settings(training.run.config, settings_at(directory, loaded.step))
    if exact:
        refuse_changes(changed, [change for change in settings if has_effect(change, config)])
    name_optimizers(loaded, settings)
    carried = training.load(loaded)
    changed += [f"the optimizer of {name}" for name in carried]
    step, journal = training.progress.step, training.journal
    training.skipped_files = write_skipped_files(directory, {})
    complete = why_complete(training)
    if complete is not None:
        console.message(f"{directory.path}: the run was complete already: {complete}")
        return False
    # from here on it is not the run's end: it says how far the run is
    if directory.summary_path.exists():
        write_summary(training)
    for note in set_aside_after(directory, step):
        console.message(note)
    # a run that was converted from elsewhere has not
    has_trained_here = directory.env_path.exists()
    journal.recorder.truncate_after(step)
    replace_settings(directory, step, config.to_yaml())
    write_layout(directory.data_path, training.run.data, training_list)
    write_used_parts(directory.parts_path)
    keep_parts(directory)
    write_environment(directory, resumes=True)
    journal.event(
        "resume", f"resumed at step {step} from {loaded.path.name}", notes=list(loaded.notes)
    )
    console.message(f"resumed {directory.path} at step {step} of {training.total_steps}")
    if not has_trained_here:
        say_of_task(training)
    if settings:
        journal.event("settings", f"changed: {', '.join(map(str, settings))}")
        console.message(f"settings changed since: {shorten(settings)}")
    for name, what in carried.items():
        journal.warn(f"{name}: {what}", "optimizer_state")
    if changed:
        journal.warn(
            f"this resume is not bit-exact: {', '.join(changed)} changed since the checkpoint"
        )
    return True


def changed_conditions(
    training: Training, loaded: LoadedCheckpoint, training_list: str | None
) -> list[str]:
    """Return the differences since a checkpoint was written: the machine's conditions, parts' files, the data."""
    before, now = loaded.manifest["extra"].get("conditions", {}), conditions(training.run)
    changed = [
        f"{key} {before[key]} -> {now[key]}"
        for key in now
        if key in before and before[key] != now[key]
    ]
    changed += [f"the part {file}" for file in changed_parts(training.directory.parts_path)]
    listed = read_training_list(training.directory.data_path)
    if listed is not None and listed != training_list:
        changed.append("the list of training samples")
    return changed


def name_optimizers(loaded: LoadedCheckpoint, settings: Sequence[Difference]) -> None:
    """Name the optimizers in a checkpoint of before, which did not, if the configuration has another by now."""
    for change in settings:
        if change.key == "optimizer.name":
            for saved in loaded.state["optimizers"].values():
                saved["kind"] = saved.get("kind") or [str(change.before)]


def why_complete(training: Training) -> str | None:
    """Return why nothing is left to train, and a remedy; None if something is."""
    step, total = training.progress.step, training.total_steps
    if training.progress.owes_evaluation:
        return None
    if training.is_over and step < total:
        return (
            f"it stopped early at step {step}; raise train.early_stopping.patience, or set train.early_stopping=null, "
            "to train on"
        )
    if step < total:
        return None
    beyond = f" and {total} were asked for" if step > total else ""
    return f"it has {step} steps{beyond}; raise train.steps to train longer"


def changed_settings(config: Config, file: Path) -> tuple[Config, list[Difference]]:
    """Return the configuration under the run's own name, and how it differs from a settings file of the run.

    The file is read as a configuration of now, so that a setting which is new since has its default; if that fails
    it is read unchanged, and one that cannot be read differs in nothing.
    """
    now = config.to_data()
    if not file.is_file():  # a pipe in its place would be waited on for ever
        return config, []
    try:
        before = load_config(file, allow=config.granted).to_data()
    except ConfigError:
        node, _ = parse_yaml(read_text(file, MAX_BYTES, "replace"), file.name)
        plain = node.plain()
        before = plain if isinstance(plain, dict) else {}
    if not before:
        return config, []
    config = dataclasses.replace(config, name=before.get("name"))
    return config, find_differences(before, {**now, "name": before.get("name")})


def has_effect(change: Difference, config: Config) -> bool:
    """Can this change make the run differ from one never stopped? The length matters to schedules of the rate alone."""
    if change.key in LENGTHS:
        return bool(config.optimizer.settings.schedule != "constant")
    return change.key not in WITHOUT_EFFECT


def refuse_changes(conditions: list[str], settings: list[Difference]) -> None:
    """Raise CheckpointError if anything changed."""
    if conditions or settings:
        changes = ", ".join([*conditions, *map(str, settings)])
        raise CheckpointError(f"--exact: not bit-exact, since these changed: {changes}")


def shorten(settings: list[Difference]) -> str:
    """Return the changes in a line; the event has them all."""
    shown = ", ".join(map(str, settings[:MOST_SHOWN]))
    more = len(settings) - MOST_SHOWN
    return f"{shown}, and {more} more (events.jsonl)" if more > 0 else shown


def write_environment(directory: RunDirectory, resumes: bool) -> None:
    """Write env.json at the start; a resume appends its own environment alongside the first."""
    path = directory.env_path
    current = describe_environment()
    if resumes and path.is_file():
        try:
            first = read_json(path)
        except (OSError, ValueError):
            first = {}
        if isinstance(first, dict):
            earlier = first.get("resumes")
            current = {
                **first,
                "resumes": [*(earlier if isinstance(earlier, list) else []), current],
            }
    write_atomically(path, json.dumps(current, indent=1) + "\n")
