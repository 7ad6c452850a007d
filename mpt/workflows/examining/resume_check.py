"""Does a training that was stopped and resumed end as one that was not, bit for bit?

The same configuration is trained twice for a few steps, each time in processes of its own: once in one go, and once
stopped half way and resumed, or killed without warning at several moments. Then every tensor of the last checkpoint,
every number around it and every logged loss are compared. If they differ it is trained in one go once more: a training
that does not even repeat itself says nothing about its resume. If it does repeat itself, the lost state is looked
for (`mpt.doctor.partings.resume_cause`).
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpt.config.checking.layers import write_override
from mpt.config.finding.part_packages import use_parts
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.errors import MptError
from mpt.report.reading.read_run import read_run
from mpt.workflows.comparing.compare_progress import last_step
from mpt.workflows.processes.training_process import last_words

if TYPE_CHECKING:
    from mpt.doctor.partings.resume_cause import Cause
    from mpt.doctor.partings.run_difference import RunDifference

KILLS = 3
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Check:
    """How a resume is checked."""

    steps: int = 20
    kill: bool = False
    allow: Sequence[str] = ()
    tell: Callable[[str], None] = print
    """Reports progress."""


@dataclass(frozen=True)
class ResumeCheck:
    """Findings of a check."""

    same: bool
    repeats: bool
    """Whether two trainings in one go are the same; True if the resume is exact."""
    stops: Sequence[str]
    files: RunDifference
    cause: Cause | None = None
    is_deterministic: bool = False
    """Whether both were asked for kernels that repeat themselves."""

    @property
    def where(self) -> str:
        """Differences of the two trainings."""
        return describe(self.files)

    @property
    def text(self) -> str:
        """The finding, in a sentence."""
        if self.same:
            tensors = self.files.checkpoints[-1]["tensors"]
            stops = ", ".join(self.stops)
            return f"resume is exact: {stops}; {tensors} tensors and the losses of all steps are equal to the bit"
        if not self.repeats:
            advice = (
                "a kernel of it adds in any order, or other programs left it less of the card, so that other kernels "
                "were chosen"
                if self.is_deterministic
                else "set train.deterministic=true"
            )
            differ = f"two trainings in one go differ as well ({self.where})"
            return f"{differ}, so this says nothing about resuming: {advice}"
        said = self.cause.describe() if self.cause is not None else ""
        reason = f"; {said}" if said else ""
        return f"after {', '.join(self.stops)} the training is another one: {self.where}{reason}"

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        record = {"same": self.same, "repeats": self.repeats, "stops": list(self.stops)}
        cause = self.cause.to_record() if self.cause is not None else None
        return {**record, "files": self.files.to_record(), "cause": cause}


def verify_resume(config: Config, folder: Path, check: Check) -> ResumeCheck:
    """Train with and without a stop below a folder and compare. Raises MptError if a training fails."""
    from mpt.doctor.partings.run_difference import compare_runs

    config = prepare(config, check.steps)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config.yaml"
    file.write_text(config.to_yaml(), "utf-8")
    check.tell(f"training {check.steps} steps in one go")
    train(file, folder, "whole", check)
    stops = stop_and_resume(file, folder, check)
    found = compare_runs(read_run(folder / "whole"), read_run(folder / "resumed"))
    if is_same(found, check.steps):
        return ResumeCheck(True, True, stops, found)
    check.tell("they differ; training in one go once more")
    train(file, folder, "again", check)
    again = compare_runs(read_run(folder / "whole"), read_run(folder / "again"))
    repeats = is_same(again, check.steps)
    cause = why(config, check) if repeats else None
    return ResumeCheck(False, repeats, stops, found, cause, config.train.deterministic)


def why(config: Config, check: Check) -> Cause | None:
    """Look for state that a resume loses; None if the search itself fails."""
    from mpt.doctor.partings.resume_cause import find_cause

    check.tell("looking for what was lost")
    try:
        return find_cause(config, max(1, check.steps // 2))
    except Exception as error:  # the comparison is valid without it
        check.tell(f"the search for the cause failed: {type(error).__name__}: {error}")
        return None


def prepare(config: Config, steps: int) -> Config:
    """Return the configuration shortened, with frequent checkpoints."""
    data = config.to_data()
    data.pop("name", None)
    data["train"] = {
        **data["train"],
        "steps": steps,
        "epochs": None,
        "log_every": 1,
        "checkpoint_every": max(1, steps // 8),
        "evaluate_every": max(1, steps // 2),
        "early_stopping": None,
        "sample_every": 0,
        "keep_last": 2,
        "plan_memory": False,
        "tensorboard": False,
        "boards": [],
    }
    return load_config(data, allow=config.granted)


def is_same(found: RunDifference, steps: int) -> bool:
    """Return whether two runs are equal to the bit, down to their last checkpoint."""
    return not found.differs and found.common is not None and found.common.step == steps


def describe(found: RunDifference) -> str:
    """Report the differences of two runs."""
    said = []
    if found.logged:
        said.append(f"{found.logged['name']} at step {found.logged['step']}")
    row = next((row for row in found.checkpoints if row["differing"]), None)
    if row is not None:
        first = row["largest"]["name"] if row["largest"] else "a state beside the weights"
        said.append(
            f"{row['differing']} of {row['tensors']} tensors at step {row['step']}, such as {first}"
        )
    return "; ".join([*said, *found.notes]) or "a number in the state beside the tensors"


def stop_and_resume(file: Path, folder: Path, check: Check) -> list[str]:
    """Train with stops; return the stops."""
    steps = check.steps
    if not check.kill:
        check.tell(f"training {steps // 2} steps, and the rest after a resume")
        train(file, folder, "resumed", check, stop_after=steps // 2)
        train(file, folder, "resumed", check, resumes=True)
        return [f"a stop at step {steps // 2}"]
    moments = random.Random(steps)
    stops = []
    for index in range(KILLS):
        target = steps * (index + 1) // (KILLS + 1)
        reached = kill_at(file, folder, target, moments.random(), check)
        if reached is None:
            break
        stops.append(f"a kill at step {reached}")
        check.tell(f"killed after step {reached}")
    train(file, folder, "resumed", check, resumes=can_resume(folder / "resumed"))
    if not stops:
        raise MptError(
            "verify-resume: the training was over before it could be killed; ask for more --steps"
        )
    return stops


def can_resume(path: Path) -> bool:
    """Return whether a run has a checkpoint to continue from; one that was killed before its first is removed."""
    if any((path / "checkpoints").glob("step-*")):
        return True
    shutil.rmtree(path, ignore_errors=True)
    return False


def command(
    file: Path, folder: Path, name: str, stop_after: int | None, resumes: bool, allow: Sequence[str]
) -> list[str]:
    """Return the command of a training in a process of its own."""
    given = {"stop_after": stop_after, "resumes": resumes, "allow": list(allow)}
    return [sys.executable, "-m", __name__, str(file), str(folder), name, json.dumps(given)]


def train(
    file: Path,
    folder: Path,
    name: str,
    check: Check,
    *,
    stop_after: int | None = None,
    resumes: bool = False,
) -> None:
    """Train in a process of its own. Raises MptError with its last words if it fails."""
    words = command(file, folder, name, stop_after, resumes, check.allow)
    done = subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        failure = MptError(f"verify-resume: {name} failed: {last_words(done.stderr)}")
        failure.exit_code = done.returncode if done.returncode > 0 else 1
        raise failure


def kill_at(file: Path, folder: Path, target: int, moment: float, check: Check) -> int | None:
    """Train, and kill the process some time after it logged a step; None if it ended alone before.

    `moment`, 0 to 1, is how long after, as a share of a step's time.
    """
    path = folder / "resumed"
    resumes = can_resume(path)
    words = command(file, folder, "resumed", None, resumes, check.allow)
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        before, since = last_step(path), time.monotonic()
        seconds = 0.0
        while process.poll() is None:
            now = last_step(path)
            if now != before:
                seconds, since, before = time.monotonic() - since, time.monotonic(), now
            if now >= target:
                time.sleep(moment * min(seconds, 1.0))
                break
            time.sleep(POLL_SECONDS)
        if process.poll() is not None:
            return None
        process.kill()
        process.wait()
        return before
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def main(words: Sequence[str]) -> None:
    """Train as the words say: the process that `command` starts."""
    from mpt.workflows.training.train import train as train_here

    file, folder, name, text = words
    given: dict[str, Any] = json.loads(text)
    use_parts([])
    resume = str(Path(folder) / name) if given["resumes"] else None
    config = load_config(Path(file), [write_override("name", name)], allow=given["allow"])
    train_here(config, runs=Path(folder), resume_from=resume, stop_after=given["stop_after"])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except MptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
