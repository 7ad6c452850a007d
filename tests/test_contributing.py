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
EXAMPLE = re.compile(
    r"^`(my-parts/\w+/\w+\.py)`:\n\n```python\n(.*?)^```\n\n```sh\n(mpt train [^\n]*)\n```$", re.M | re.S
)
WANTED = {
    "precision": "my-parts/precision/rounded.py",
    "nn": "my-parts/nn/perceptron.py",
    "data": "my-parts/data/stripes.py",
    "metrics": "my-parts/metrics/calibration_error.py",
}
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
    path: str
    source: str
    words: list[str]

    @property
    def run_name(self) -> str:
        return next(word.removeprefix("name=") for word in self.words if word.startswith("name="))


def read_examples() -> dict[str, Example]:
    """Return the examples of the page by their subpackage."""
    found = EXAMPLE.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    examples = [Example(path, source, shlex.split(command)[1:]) for path, source, command in found]
    return {example.path.split("/")[1]: example for example in examples}


EXAMPLES = read_examples()


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the examples as parts, in which each was validated and trained for its two steps."""
    folder = tmp_path_factory.mktemp("contributing").resolve()
    shutil.copytree(ROOT / "configs", folder / "configs")
    for example in EXAMPLES.values():
        (folder / example.path).parent.mkdir(parents=True)
        (folder / example.path).write_text(example.source, "utf-8")
    training = [example.words for example in EXAMPLES.values()]
    validating = [["validate", *words[1:]] for words in training]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN_ALL, json.dumps(validating + training)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def last_row(run: Path) -> dict[str, str]:
    with (run / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))[-1]


def test_the_page_has_an_example_of_each_kind() -> None:
    assert {subpackage: example.path for subpackage, example in EXAMPLES.items()} == WANTED


@pytest.mark.parametrize("subpackage", sorted(WANTED))
def test_every_example_trains_its_two_steps(workplace: Path, subpackage: str) -> None:
    run = workplace / "runs" / EXAMPLES[subpackage].run_name
    assert json.loads((run / "summary.json").read_text("utf-8"))["steps"] == 2
    assert 0 <= float(last_row(run)["accuracy"]) <= 1


def test_the_precision_mode_leaves_weights_that_bfloat16_can_hold(workplace: Path) -> None:
    checkpoints = workplace / "runs" / "rounded" / "checkpoints"
    start, end = (
        load_file(checkpoints / f"step-{step:08d}" / "state.safetensors")["modules.net.head.3.weight"]
        for step in (0, 2)
    )
    assert not torch.equal(start, start.bfloat16().float())
    assert end.dtype == torch.float32
    assert torch.equal(end, end.bfloat16().float())


def test_the_data_set_and_the_model_are_the_ones_trained(workplace: Path) -> None:
    assert "name: stripes" in (workplace / "runs" / "stripes" / "config.yaml").read_text("utf-8")
    assert "name: perceptron" in (workplace / "runs" / "perceptron" / "config.yaml").read_text("utf-8")


def test_the_metric_is_in_the_results(workplace: Path) -> None:
    assert 0 < float(last_row(workplace / "runs" / "calibrated")["calibration_error"]) < 1


def test_the_examples_keep_the_style_of_the_house(workplace: Path) -> None:
    paths = [str(workplace / path) for path in WANTED.values()]
    for words in (["check", "--config", str(ROOT / "pyproject.toml")], ["format", "--check", "--line-length", "120"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, *paths], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
