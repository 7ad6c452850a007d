"""What rehearsals do with mpt: commands as a user types them, in this process, and what they left behind."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

MODES = (
    *(
        "fp32",
        "tf32",
        "amp",
        "bf16",
        "O1",
        "O2",
        "{mode: O3, loss_scale: 128}",
        "fp16-pure",
        "bf16-pure",
    ),
    *("bf16-sr", "bf16-kahan", "bf16-24bit", "fp16-24bit", "{mode: bf16-sr, accumulate: float32}"),
)
"""Precision modes that an RTX 3060 has."""
CLASSIFIER = """
model: {name: small_cnn, features: 4, image_size: 8}
dataset: digits
optimizer: {name: sgd, lr: 0.05}
train: {steps: 4, batch_size: 32, log_every: 2, checkpoint_every: 2, device: cuda, plan_memory: false}
precision: fp32
name: run
"""
GAN = """
model: {name: dcgan, features: 4, image_size: 16}
dataset: {name: digits, image_size: 16}
task: {metric_samples: 64}
optimizer: {name: adam, lr: 0.0002}
train: {steps: 4, batch_size: 16, log_every: 2, checkpoint_every: 2, device: cuda, plan_memory: false}
precision: fp32
name: run
"""


@dataclass
class Said:
    """A command's exit code and everything it printed."""

    code: int
    text: str

    def __str__(self) -> str:
        return f"exit {self.code}: {self.text}"


def mpt(*words: str | Path) -> Said:
    """Run `mpt WORDS` in this process."""
    from mpt.cli import main

    printed = io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main([str(word) for word in words])
        except SystemExit as exit:
            code = exit.code
    print(printed.getvalue())
    return Said(int(code or 0), printed.getvalue())


def train(folder: Path, config: str, *words: str) -> Said:
    """Train a config's text in a folder; runs go to `runs` in it."""
    os.chdir(folder)
    path = folder / "config.yaml"
    path.write_text(config)
    return mpt("train", path, *words)


def rows(run: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return a run's log."""
    return [json.loads(line) for line in (run / file).read_text().splitlines()]
