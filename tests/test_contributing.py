"""The worked examples of CONTRIBUTING.md do what they say: each goes to a folder of parts, and its command is run."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
FILE = re.compile(r"^`(my-parts/\w+/\w+\.py)`:\n\n```python\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^```sh\n(mpt train [^\n]* --parts my-parts)\n```$", re.M)
WANTED = {
    "rounded": ["my-parts/precision/rounded.py"],
    "perceptron": ["my-parts/nn/perceptron.py"],
    "stripes": ["my-parts/data/stripes.py"],
    "calibrated": ["my-parts/metrics/calibration_error.py"],
    "heads": [
        "my-parts/nn/two_heads.py",
        "my-parts/tasks/rebuild_and_name.py",
        "my-parts/metrics/rebuilt_psnr.py",
    ],
}
"""The run of each example -> its files."""
RUN_ALL = """
import json, sys
from mpt.cli import main
for words in json.loads(sys.argv[1]):
    try:
        main(words)
    except SystemExit as end:
        if end.code:
            sys.exit(f"{words} ended with {end.code}")
"""


@dataclass(frozen=True)
class Example:
    """The files before a command, and the command."""

    sources: dict[str, str]
    words: list[str]


def read_examples() -> dict[str, Example]:
    """Return the examples of the page by the name of their run."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    examples, start = {}, 0
    for command in COMMAND.finditer(text):
        words = shlex.split(command[1])[1:]
        name = next(word.removeprefix("name=") for word in words if word.startswith("name="))
        examples[name] = Example(dict(FILE.findall(text[start : command.start()])), words)
        start = command.end()
    return examples


EXAMPLES = read_examples()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples as parts, in which each was validated and trained for its two steps."""
    folder = tmp_path_factory.mktemp("contributing").resolve()
    shutil.copytree(ROOT / "configs", folder / "configs")
    for path, source in (item for example in EXAMPLES.values() for item in example.sources.items()):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(source, "utf-8")
    training = [example.words for example in EXAMPLES.values()]
    validating = [["validate", *words[1:]] for words in training]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, json.dumps(validating + training)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def last_row(run: Path) -> dict[str, str]:
    with (run / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def test_the_page_has_an_example_of_each_kind() -> None:
    assert {name: list(example.sources) for name, example in EXAMPLES.items()} == WANTED


@pytest.mark.parametrize("name", WANTED)
def test_every_example_trains_its_two_steps(workplace: Path, name: str) -> None:
    run = workplace / "runs" / name
    assert json.loads((run / "summary.json").read_text("utf-8"))["steps"] == 2
    assert 0 <= float(last_row(run)["accuracy"]) <= 1


def test_the_precision_mode_leaves_weights_that_bfloat16_can_hold(workplace: Path) -> None:
    checkpoints = workplace / "runs" / "rounded" / "checkpoints"
    start, end = (
        load_file(checkpoints / f"step-{step:08d}" / "state.safetensors")[
            "modules.net.head.3.weight"
        ]
        for step in (0, 2)
    )
    assert not torch.equal(start, start.bfloat16().float())
    assert end.dtype == torch.float32
    assert torch.equal(end, end.bfloat16().float())


def test_the_data_set_and_the_model_are_the_ones_trained(workplace: Path) -> None:
    assert "name: stripes" in (workplace / "runs" / "stripes" / "config.yaml").read_text("utf-8")
    assert "name: perceptron" in (workplace / "runs" / "perceptron" / "config.yaml").read_text(
        "utf-8"
    )


def test_the_metric_is_in_the_results(workplace: Path) -> None:
    assert 0 < float(last_row(workplace / "runs" / "calibrated")["calibration_error"]) < 1


def test_the_task_logs_each_loss_by_name_and_what_it_likes_and_is_judged_by_a_metric_of_its_own(
    workplace: Path,
) -> None:
    run = workplace / "runs" / "heads"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    (first, *_) = [line for line in lines if line["kind"] == "train"]
    assert list(first["losses"]) == ["net/pixels", "net/label"]
    assert 0.1 < first["logged"]["net/certainty"] < 1
    assert float(last_row(run)["rebuilt_psnr"]) > 0


def test_the_task_is_planned_resumed_and_used_by_the_other_commands(workplace: Path) -> None:
    config = [word for word in EXAMPLES["heads"].words[1:] if not word.startswith("name=")]
    commands = [
        ["train", *config, "name=heads", "train.steps=3", "--resume"],
        ["train", *config, "--dry-run"],
        ["plan", *config],
        ["infer", "heads"],
        ["report", "heads"],
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, json.dumps(commands)],
        cwd=workplace,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MPT_PARTS": "my-parts",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Logged figures" in (workplace / "runs" / "heads" / "report.html").read_text("utf-8")


def test_the_examples_keep_the_style_of_the_house(workplace: Path) -> None:
    paths = [str(workplace / path) for paths in WANTED.values() for path in paths]
    for words in (
        ["check", "--config", str(ROOT / "pyproject.toml")],
        ["format", "--check", "--line-length", "100"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, *paths],
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
