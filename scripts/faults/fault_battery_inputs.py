"""Hostile and mutated inputs for `scripts/faults/fault_battery.py`: checkpoints, weights files, configurations."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import torch

from mpt.config.load import load_config
from mpt.errors import CheckpointError, ConfigError
from mpt.run.checkpoints.checkpoint import load
from mpt.run.records.layout import open_run
from mpt.weights.weights_file import load_weights_file
from scripts.faults.fault_battery_process import call
from scripts.faults.fault_battery_runs import TOLD_CODES, Battery, Verdict, damage, failure_of

PER_CASE = 100
"""Inputs that one case of a quick kind tries."""
SLOWEST_SECONDS = 20.0
SMOKE_BYTES = 4 << 30
VALUES = (
    "0", "-1", "1", "2", "1e300", "-1e300", "1e-300", ".inf", "-.inf", ".nan", "null", "true", "''", "[]", "{}",
    "[1, 2, 3]", "{a: 1}", "9223372036854775807", "18446744073709551616", "'../x'", "'/dev/null'", "\"\\0\"", "0x10",
    "1:30", "2147483648", "'\u202e'", "auto", "fp16", "digits", "small_cnn", "adam", "3.5", "999999999",
)  # fmt: skip
"""What is put in place of a value."""
BASE = """model: {name: small_cnn, features: 4, image_size: 8}
task: {name: classify}
dataset: {name: digits, workers: 0}
precision: {mode: amp, dtype: bfloat16}
optimizer: {name: adam, lr: 0.01, betas: [0.9, 0.99], schedule: cosine, warmup_steps: 1, clip_grad_norm: 1.0}
memory: {micro_batch: 32, on_oom: adapt}
train: {steps: 2, batch_size: 64, log_every: 1, checkpoint_every: 1, keep_last: 1, on_non_finite: rollback}
seed: 0
name: run
"""


def damaged_checkpoints(battery: Battery, place: Path, seed: int) -> Verdict:
    """Injure the newest checkpoint many times: it is always refused by name and the one before is used."""
    generator = random.Random(seed)
    shutil.copytree(battery.template("after train"), place / "runs")
    run = open_run(place / "runs" / "run")
    newest = run.checkpoint_path(4)
    whole = {path.name: path.read_bytes() for path in newest.iterdir()}
    for _ in range(PER_CASE):
        name = generator.choice(sorted(whole))
        kind = generator.choice(("flip", "flip", "cut", "hole", "grown"))
        damage(newest / name, kind, generator)
        if (newest / name).read_bytes() != whole[name]:
            try:
                found = load(run)
            except CheckpointError as error:
                return "lost", f"{kind} in {name}: {error}"
            if found.step != 2 or not any("step-00000004" in note for note in found.notes):
                return "silent", f"{kind} in {name}: step {found.step}, {found.notes}"
        (newest / name).write_bytes(whole[name])
    return None


def damaged_weights(battery: Battery, place: Path, kind: str, seed: int) -> Verdict:
    """Injure a weights file many times: refused, or the weights are right, in bounded time."""
    generator = random.Random(seed)
    torch.manual_seed(0)
    state = {f"layer{n}.weight": torch.randn(20, 5) for n in range(4)} | {"count": torch.tensor(3)}
    path = place / f"w.{'safetensors' if kind == 'safetensors' else 'pt'}"
    if kind == "safetensors":
        from mpt.run.checkpoints.tensor_file import write_tensors
        from mpt.run.process.files import open_new

        write_tensors(open_new(path), state)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    whole = path.read_bytes()
    # Neither a legacy file nor safetensors has checksums: there only the reading itself is judged.
    checked = kind == "zip"
    for _ in range(PER_CASE):
        content = bytearray(whole)
        for _ in range(generator.choice((1, 1, 1, 8, 64))):
            where = generator.randrange(len(content))
            if (how := generator.randrange(4)) == 0:
                del content[where : where + generator.randrange(1, 40)]
            elif how == 1:
                content[where:where] = generator.randbytes(generator.randrange(1, 40))
            else:
                content[where] = generator.randrange(256)
            if not content:
                break
        path.write_bytes(content)
        started = time.process_time()
        try:
            found = load_weights_file(path)
        except CheckpointError:
            found = None
        if time.process_time() - started > SLOWEST_SECONDS:
            return "hang", f"{kind}: {time.process_time() - started:.0f} s"
        if found is not None and checked:
            wrong = [
                name
                for name in found
                if name in state and not torch.equal(found[name], state[name])
            ]
            if wrong:
                return "silent", f"{kind}: {wrong} differ"
    return None


def mutate(generator: random.Random) -> str:
    """Return a configuration with one to three mistakes of spelling, type, range or structure."""
    lines = BASE.splitlines()
    for _ in range(generator.randrange(1, 4)):
        number = generator.randrange(len(lines))
        line = lines[number]
        where = generator.randrange(len(line) + 1)
        how = generator.randrange(8)
        if how < 4 and ": " in line:
            parts = line.split(", ")
            chosen = generator.randrange(len(parts))
            key, _, value = parts[chosen].rpartition(": ")
            end = value[len(value.rstrip("}]")) :]
            parts[chosen] = f"{key}: {generator.choice(VALUES)}{end}"
            lines[number] = ", ".join(parts)
        elif how == 4:
            lines[number] = (
                line[:where] + generator.choice("{}[]:,'\"&*!|>%@`#\t\0 abc-0") + line[where:]
            )
        elif how == 5:
            lines[number] = line[:where] + line[where + generator.randrange(1, 5) :]
        elif how == 6:
            lines.insert(number, generator.choice(lines))
        else:
            del lines[number]
        if not lines:
            lines = ["model: small_cnn"]
    return "\n".join(lines) + "\n"


def mutated_configs(battery: Battery, place: Path, seed: int) -> Verdict:
    """Read many mutated configurations: taken or refused in words."""
    generator = random.Random(seed)
    path = place / "c.yaml"
    for _ in range(PER_CASE):
        text = mutate(generator)
        path.write_text(text)
        try:
            load_config(path)
        except ConfigError as error:
            if "c.yaml" not in str(error):
                return "silent", f"no place is named for {text!r}: {error}"
    return None


def smoke_config(battery: Battery, place: Path, seed: int) -> Verdict:
    """Train two steps of a mutated configuration that was taken: it trains, or is refused in words."""
    generator = random.Random(seed)
    path = place / "c.yaml"
    for _ in range(200):
        path.write_text(mutate(generator))
        try:
            load_config(path)
            break
        except ConfigError:
            continue
    ended = call(
        ["train", str(path), "--smoke", "2", "--quiet"],
        place / "first.log",
        memory_bytes=SMOKE_BYTES,
    )
    bad = failure_of(ended, TOLD_CODES)
    return (bad[0], f"{path.read_text()}\n{bad[1]}") if bad else None


def checkpoint_cases(battery: Battery) -> list[tuple[object, ...]]:
    """4,000 damaged checkpoints."""
    return [(damaged_checkpoints, seed) for seed in range(40)]


def weights_cases(battery: Battery) -> list[tuple[object, ...]]:
    """3,000 damaged weights files."""
    return [
        (damaged_weights, kind, seed)
        for seed in range(10)
        for kind in ("zip", "legacy", "safetensors")
    ]


def config_cases(battery: Battery) -> list[tuple[object, ...]]:
    """10,000 mutated configurations."""
    return [(mutated_configs, seed) for seed in range(100)]


def smoke_cases(battery: Battery) -> list[tuple[object, ...]]:
    """Mutated configurations that were taken, trained for two steps."""
    return [(smoke_config, seed) for seed in range(300)]
