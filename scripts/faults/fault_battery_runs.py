"""Faults around a run, for `scripts/faults/fault_battery.py`: at every file operation, in every file, and side by side.

What is right is known beforehand: a training that was never disturbed has the same weights, moments and random states,
bit for bit, and the same lines. A case returns nothing where that came out, else one word of `BAD` and what was seen.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file

from scripts.faults.fault_battery_process import (
    ERRORS,
    FAIL,
    FAIL_ON,
    KILL,
    SIGNAL,
    SIGNALS,
    TEAR,
    Ended,
    Fault,
    call,
    start,
)

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 8}
dataset: digits
precision: fp32
optimizer: {name: adam, lr: 0.01}
train: {steps: 4, batch_size: 64, log_every: 1, checkpoint_every: 2, keep_last: 3, plan_memory: false, device: cpu}
name: run
"""
TOLD_CODES = (0, 2, 3, 4, 5, 6, 7)
"""The exit codes of tests/faults.md that a damaged or hindered command may end with."""
DAMAGES = ("flip", "cut", "empty", "hole", "grown", "text", "missing")
TEXTS = (b"{}", b"[]", b"null", b"\xff\xfe", b"{" * 3000, b"1e999", b'{"step": "x"}\n')
PLANTED = ("link", "link to nothing", "link to itself", "pipe", "folder", "full device")

Verdict = tuple[str, str] | None
"""One of "lost", "silent", "traceback", "hang" and what was seen; None where all is well."""


@dataclass
class Battery:
    """The undisturbed runs that cases begin from and are compared with, and how many operations each command has."""

    folder: Path
    operations: dict[str, int] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)
    weights_of_ranks: str = ""
    weights_of_shards: str = ""
    inferred: str = ""

    @property
    def config(self) -> Path:
        """The configuration of all runs."""
        return self.folder / "config.yaml"

    def template(self, name: str) -> Path:
        """The folder of runs that a scenario begins with."""
        return self.folder / "templates" / name

    def words(self, scenario: str, runs: Path) -> list[str]:
        """The command line of a scenario."""
        train = ["train", str(self.config), "--runs", str(runs), "--quiet"]
        return {
            "train": train,
            "extend": [*train, "train.steps=6", "--resume"],
            "earlier": [*train, "--resume", str(runs / "run" / "checkpoints" / "step-00000002")],
            "report": ["report", "run", "--runs", str(runs)],
            "convert": [
                "convert",
                "run",
                "--output",
                str(runs / "weights.safetensors"),
                "--runs",
                str(runs),
            ],
            "infer": ["infer", "run", "--runs", str(runs), "--output", str(runs / "out")],
        }[scenario]


STEPS = {"train": 4, "extend": 6, "earlier": 4, "report": 4, "convert": 4, "infer": 4}
"""Scenario -> the steps its run has in the end. All but the first begin with a finished run of four steps."""


def prepare(folder: Path, learn: Callable[[Iterable[str]], None] = lambda modules: None) -> Battery:
    """Train what cases begin from and count every command's operations. `learn` is told what a command imports."""
    battery = Battery(folder)
    battery.config.write_text(CONFIG)
    for scenario in STEPS:
        runs = battery.template(f"after {scenario}")
        runs.mkdir(parents=True)
        if scenario != "train":
            shutil.copytree(battery.template("after train"), runs, dirs_exist_ok=True)
        modules = folder / "modules.json"
        ended = call(
            battery.words(scenario, runs), folder / f"{scenario}.log", Fault(runs), modules=modules
        )
        assert ended.code == 0, f"{scenario}: {ended.code}\n{ended.text}"
        learn(json.loads(modules.read_text()))
        battery.operations[scenario] = ended.operations
        battery.lines[scenario] = lines_of(runs / "run")
        battery.weights[STEPS[scenario]] = weights_of(runs / "run")
    battery.inferred = inferred(battery.template("after infer") / "out")
    return battery


def weights_of(run: Path) -> str:
    """Return a hash of the newest checkpoint's tensors: weights, moments, random states, of all ranks."""
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name, default=None)
    if newest is None:
        return "no checkpoint"
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(newest.glob("*.safetensors")))
    ).hexdigest()


def lines_of(run: Path) -> list[str]:
    """Return what each line of the record is of, with its losses and figures."""
    found = []
    for text in (run / "metrics.jsonl").read_text("utf-8").splitlines():
        line = json.loads(text)
        found.append(f"{line['kind']} {line['step']} {line.get('losses', line.get('metrics'))}")
    return found


def inferred(output: Path) -> str:
    """Return a hash of what was inferred."""
    files = sorted(path for path in output.rglob("*") if path.suffix in (".csv", ".png", ".json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def check_run(battery: Battery, runs: Path, scenario: str) -> Verdict:
    """Compare a finished run with the one that was never disturbed."""
    run, steps = runs / "run", STEPS[scenario]
    others = sorted(path.name for path in runs.iterdir() if path.name.startswith("run-"))
    if others:
        return "lost", f"the run went on as {others}"
    if weights_of(run) != battery.weights[steps]:
        return "lost", "the weights differ from those of a run never stopped"
    try:
        if lines_of(run) != battery.lines[scenario]:
            return (
                "lost",
                f"the record's lines are {[line.split(' {')[0] for line in lines_of(run)]}",
            )
        summary = json.loads((run / "summary.json").read_text("utf-8"))
        report = json.loads((run / "report.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        return "lost", f"{type(error).__name__}: {error}"
    if (summary["steps"], report["steps"], report["finished"]) != (steps, steps, True):
        return "silent", f"summary of {summary['steps']}, report of {report['steps']} steps"
    if (run / "results.csv").read_text("utf-8").count("\n") < 2:
        return "lost", "results.csv is empty"
    left = [
        path.name
        for folder in (run, run / "checkpoints")
        for path in folder.iterdir()
        if path.name[0] == "."
    ]
    return ("lost", f"left-overs {left}") if left else None


def begin(battery: Battery, place: Path, scenario: str) -> Path:
    """Return a folder of runs as the scenario finds it."""
    runs = place / "runs"
    if scenario == "train":
        runs.mkdir(parents=True)
    else:
        shutil.copytree(battery.template("after train"), runs)
    return runs


def failure_of(ended: Ended, allowed: Sequence[int]) -> Verdict:
    """Return what is wrong with an ending by itself."""
    if ended.hung:
        return "hang", ended.text[-300:]
    if ended.is_traceback or (ended.code == 1 and 1 not in allowed):
        return "traceback", ended.text[-1500:]
    if ended.code not in allowed:
        return "silent", f"exit {ended.code}: {ended.text[-300:]}"
    return None


def again(battery: Battery, place: Path, runs: Path, scenario: str) -> Verdict:
    """Give the command that a user gives after a fault, and compare."""
    words = battery.words("train" if scenario in ("train", "earlier") else scenario, runs)
    if scenario in ("train", "earlier"):
        words.append("--resume")
    if scenario == "infer" and (runs / "out").is_dir() and any((runs / "out").iterdir()):
        words.append("--overwrite")  # without it the message is that the folder holds files
    converted = runs / "weights.safetensors"
    if scenario == "convert" and converted.exists():
        try:
            load_file(converted)  # under its name the file is there whole or not at all
        except Exception as error:
            return "lost", f"half a file was left: {error}"
        words.append("--overwrite")
    ended = call(words, place / "again.log")
    bad = failure_of(ended, (0,))
    if bad is not None:
        return bad if bad[0] in ("traceback", "hang") else ("lost", f"--resume: {bad[1]}")
    if scenario == "convert" and not converted.is_file():
        return "lost", "no file was converted"
    if scenario == "infer" and inferred(runs / "out") != battery.inferred:
        return "lost", "another inference"
    # a start of `mpt train` removes what a killed writer has left
    if scenario in ("report", "infer", "convert"):
        bad = failure_of(
            call([*battery.words("train", runs), "--resume"], place / "resumed.log"), (0,)
        )
        if bad is not None:
            return bad
    return check_run(battery, runs, scenario)


def at_operation(
    battery: Battery, place: Path, scenario: str, action: int, detail: int, at: int
) -> Verdict:
    """Let one operation of a command meet a fault, then go on as a user would."""
    runs = begin(battery, place, scenario)
    ended = call(
        battery.words(scenario, runs), place / "first.log", Fault(runs, at, action, detail)
    )
    if action in (KILL, TEAR):
        if ended.code not in (0, -signal.SIGKILL):
            return "silent", f"exit {ended.code} where it was killed: {ended.text[-300:]}"
    elif action == SIGNAL:
        # before the run begins a signal ends it
        bad = failure_of(ended, (0, 128 + detail, -detail))
        if bad:
            return bad
    else:
        bad = failure_of(ended, TOLD_CODES)
        if bad:
            return bad
        silent = (
            ended.code == 0
            and scenario in ("train", "extend", "earlier")
            and "warning" not in ended.text
        )
        if silent and (wrong := check_run(battery, runs, scenario)):
            return "silent", f"exit 0, and {wrong[1]}"
    return again(battery, place, runs, scenario)


def killed_often(battery: Battery, place: Path, scenario: str, *places: int) -> Verdict:
    """Kill a command, then its resume, then the resume of that, then let it end."""
    runs = begin(battery, place, scenario)
    words = battery.words(scenario, runs)
    for at in places:
        ended = call(words, place / "first.log", Fault(runs, at, KILL))
        if ended.code not in (0, -signal.SIGKILL):
            return "silent", f"exit {ended.code} where it was killed: {ended.text[-300:]}"
        words = battery.words("extend" if scenario == "extend" else "train", runs)
        words += [] if scenario == "extend" else ["--resume"]
    return again(battery, place, runs, scenario)


def damage(path: Path, kind: str, generator: random.Random) -> None:
    """Injure one file."""
    content = bytearray(path.read_bytes())
    place = generator.randrange(max(1, len(content)))
    if kind == "flip" and content:
        content[place] ^= 1 << generator.randrange(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "empty":
        content.clear()
    elif kind == "hole":
        content[place : place + 512] = bytes(len(content[place : place + 512]))
    elif kind == "grown":
        content += generator.randbytes(generator.randrange(1, 2000))
    elif kind == "text":
        content = bytearray(generator.choice(TEXTS))
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(content)


def in_file(
    battery: Battery, place: Path, name: str, kind: str, scenario: str, seed: int
) -> Verdict:
    """Injure a file of a finished run and give a command on the run."""
    runs = begin(battery, place, scenario)
    damage(runs / "run" / name, kind, random.Random(seed))
    return after_damage(battery, place, runs, name, scenario)


def after_damage(battery: Battery, place: Path, runs: Path, name: str, scenario: str) -> Verdict:
    """Give a command on a damaged run: it does the same as on a whole one, or says what is wrong."""
    ended = call(battery.words(scenario, runs), place / "first.log")
    bad = failure_of(ended, TOLD_CODES)
    if bad or ended.code:
        return bad
    if (
        scenario in ("extend", "earlier")
        and weights_of(runs / "run") != battery.weights[STEPS[scenario]]
    ):
        return "silent", f"exit 0 with other weights after damage to {name}"
    told = any(word in ended.text for word in ("refused", "used instead", "missing", "warning"))
    # hold settings: another value is another wish
    settles = name in ("config.yaml", "data.json", "parts.json")
    if (
        scenario == "infer"
        and not told
        and not settles
        and inferred(runs / "out") != battery.inferred
    ):
        return "silent", f"exit 0 with other results after damage to {name}"
    return None


def planted(battery: Battery, place: Path, name: str, kind: str, scenario: str) -> Verdict:
    """Put something that is no file in a file's place; nothing may hang or be written through it."""
    runs = begin(battery, place, scenario)
    path, elsewhere = runs / "run" / name, place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("precious")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(elsewhere if name in ("checkpoints", "samples") else elsewhere / "precious")
    elif kind == "link to nothing":
        path.symlink_to(place / "nothing")
    elif kind == "link to itself":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/full")
    bad = after_damage(battery, place, runs, name, scenario)
    if [(p.name, p.read_text()) for p in elsewhere.iterdir()] != [("precious", "precious")]:
        return "lost", f"a {kind} at {name} was followed"
    return (
        ("lost", f"{place / 'nothing'} was made through a link")
        if (place / "nothing").exists()
        else bad
    )


def closed(descriptors: Sequence[int], how: str) -> Callable[[], None]:
    """Return what takes a process's output away."""

    def take() -> None:
        for number in descriptors:
            if how == "closed":
                os.close(number)
            elif how == "full":
                os.dup2(os.open("/dev/full", os.O_WRONLY), number)
            else:
                reading, writing = os.pipe()
                os.close(reading)
                os.dup2(writing, number)

    return take


def without_output(
    battery: Battery, place: Path, scenario: str, style: str, descriptors: Sequence[int], how: str
) -> Verdict:
    """Run a command whose output nobody takes. A training goes on and is whole."""
    runs = begin(battery, place, scenario)
    words = [word for word in battery.words(scenario, runs) if word != "--quiet"] + (
        [style] if style else []
    )
    ended = call(words, place / "first.log", streams=closed(descriptors, how))
    trains = scenario in ("train", "extend", "earlier")
    bad = failure_of(ended, (0,) if trains else (0, 1, 5))
    return bad or (check_run(battery, runs, scenario) if trains else None)


def together(battery: Battery, place: Path, kind: str, seed: int) -> Verdict:
    """Give commands at the same time."""
    generator = random.Random(seed)
    if kind == "starts":
        runs = begin(battery, place, "train")
        pair = [start(battery.words("train", runs), place / f"{n}.log") for n in range(2)]
        for ended in [one.wait() for one in pair]:
            if bad := failure_of(ended, (0,)):
                return bad
        names = sorted(path.name for path in runs.iterdir())
        same = {weights_of(runs / name) for name in names} == {battery.weights[4]}
        return None if names == ["run", "run-2"] and same else ("lost", f"two starts made {names}")
    if kind == "resumes":
        runs = begin(battery, place, "extend")
        pair = [start(battery.words("extend", runs), place / f"{n}.log") for n in range(2)]
        ends = [one.wait() for one in pair]
        for ended in ends:
            if bad := failure_of(ended, (0, 4, 5)):
                return bad
        return (
            check_run(battery, runs, "extend")
            if any(one.code == 0 for one in ends)
            else ("lost", "both gave up")
        )
    runs = begin(battery, place, "extend")
    writer = start(battery.words("extend", runs), place / "writer.log")
    readers = []
    for number in range(6):
        time.sleep(generator.uniform(0, 0.08))
        words = battery.words(kind, runs)
        if kind != "report":
            words = [word.replace(str(runs / "out"), str(place / f"out{number}")) for word in words]
            words = [
                word.replace(str(runs / "weights"), str(place / f"weights{number}"))
                for word in words
            ]
        readers.append(start(words, place / f"reader{number}.log"))
    for ended in [one.wait() for one in readers]:
        if bad := failure_of(ended, (0, 4, 5)):
            return bad
    if bad := failure_of(writer.wait(), (0,)):
        return bad
    # A report of before may have replaced the one of the end.
    ended = call(battery.words("report", runs), place / "report.log")
    return failure_of(ended, (0,)) or check_run(battery, runs, "extend")


def kill_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Every operation of every command, killed before it and in the middle of it; then again while it is resumed."""
    once = [
        (at_operation, scenario, action, 0, at)
        for scenario, count in battery.operations.items()
        for action in (KILL, TEAR)
        for at in range(1, count + 1)
    ]
    generator = random.Random(0)
    often = [
        (
            killed_often,
            scenario,
            *(generator.randrange(1, battery.operations[scenario] + 1) for _ in range(3)),
        )
        for scenario in ("train", "extend", "earlier")
        for _ in range(110)
    ]
    return once + often


def error_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Every operation, failing once, with the errors in turn, and failing from there on as on a full disk."""
    return [
        (at_operation, scenario, action, number, at)
        for scenario, count in battery.operations.items()
        for at in range(1, count + 1)
        for action, number in ((FAIL, ERRORS[at % len(ERRORS)]), (FAIL_ON, errno.ENOSPC))
    ]


def signal_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Every operation of a training, with two of the signals."""
    return [
        (at_operation, scenario, SIGNAL, int(number), at)
        for scenario in ("train", "extend", "earlier")
        for at in range(1, battery.operations[scenario] + 1)
        for number in (SIGNALS[at % len(SIGNALS)], SIGNALS[(at + 1) % len(SIGNALS)])
    ]


def files_of(battery: Battery) -> list[str]:
    """Every file of a finished run."""
    run = battery.template("after train") / "run"
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


def file_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Every file, each kind of damage, under every command; flips, cuts and holes at several places."""
    return [
        (in_file, name, kind, scenario, seed)
        for seed in range(6)
        for name in files_of(battery)
        for kind in DAMAGES
        for scenario in ("report", "extend", "earlier", "infer", "convert")
        if seed == 0 or kind in ("flip", "cut", "hole")
    ]


def planted_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Every file and folder, with everything that may stand in its place."""
    return [
        (planted, name, kind, scenario)
        for name in (*files_of(battery), "checkpoints", "samples")
        for kind in PLANTED
        for scenario in ("report", "extend", "infer", "convert")
    ]


def output_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Every command with its output closed, full or unread."""
    return [
        (without_output, scenario, style, descriptors, how)
        for scenario in STEPS
        for style in (
            ("", "--json", "--quiet") if scenario in ("train", "extend", "earlier") else ("",)
        )
        for descriptors in ((1,), (2,), (1, 2))
        for how in ("closed", "full", "unread")
    ]


def together_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Two writers, and readers beside a writer."""
    return [
        (together, kind, seed)
        for seed in range(12)
        for kind in ("starts", "resumes", "report", "infer", "convert")
    ]
