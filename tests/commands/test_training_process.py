"""What a training in a process of its own leaves for the comparison to say."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from mpt.commands.training_process import last_words

CONFIG = {
    "model": {"name": "small_cnn", "image_size": 8, "features": 4},
    "dataset": "digits",
    "precision": "fp32",
    "train": {"steps": 10**6, "log_every": 1, "threads": 1},
}
COMPARE = """
from pathlib import Path
from mpt.commands.training_process import run_train
run_train(Path("config.yaml"), ["--name", "run"], [])
"""
PATIENCE = 60.0


def wait_for(there: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not there():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_run_whose_comparison_is_killed_saves_and_ends(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    run = tmp_path / "runs" / "run"
    metrics, summary = run / "metrics.jsonl", run / "summary.json"
    with subprocess.Popen([sys.executable, "-c", COMPARE], cwd=tmp_path, stdin=subprocess.DEVNULL) as process:
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        process.kill()
    wait_for(summary.is_file)
    steps = json.loads(summary.read_text("utf-8"))["steps"]
    assert (run / "checkpoints" / f"step-{steps:08d}" / "manifest.json").is_file()


def test_the_error_is_what_is_said_and_not_the_warnings_before_it() -> None:
    text = "warning: rolled back (1 of 3)\nwarning: rolled back (2 of 3)\nerror: not finite.\n  Try a lower rate\n"
    assert last_words(text) == "not finite. Try a lower rate"


def test_without_an_error_the_last_lines_are_said() -> None:
    assert last_words("a\nb\nc\nd\nValueError: e\n") == "b c d ValueError: e"
    assert last_words("") == ""
