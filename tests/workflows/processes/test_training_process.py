"""What a training in a process of its own leaves for the comparison to say."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from mpt.report.reading.read_run import read_run
from mpt.run.process.launch import SIDE_BY_SIDE
from mpt.workflows.processes.training_process import Surroundings, last_words, train_in_process
from mpt.workflows.processes.turns import HostMemory, Stop, take_turns

CONFIG = {
    "model": {"name": "small_cnn", "image_size": 8, "features": 4},
    "dataset": "digits",
    "precision": "fp32",
    "train": {"steps": 10**6, "log_every": 1, "threads": 1},
}
COMPARE = """
from pathlib import Path
from mpt.workflows.processes.training_process import Surroundings, run_train
run_train(Path("config.yaml"), ["--name", "run"], Surroundings())
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
    with subprocess.Popen(
        [sys.executable, "-c", COMPARE], cwd=tmp_path, stdin=subprocess.DEVNULL
    ) as process:
        wait_for(lambda: metrics.exists() and metrics.stat().st_size > 0)
        process.kill()
    wait_for(summary.is_file)
    steps = json.loads(summary.read_text("utf-8"))["steps"]
    assert (run / "checkpoints" / f"step-{steps:08d}" / "manifest.json").is_file()


def test_two_runs_at_a_time_leave_the_bits_of_a_run_that_is_alone(tmp_path: Path) -> None:
    config = {**CONFIG, "train": {"steps": 3, "threads": 1, "device": "cpu"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    memory = HostMemory()
    ended = {}

    def one(name: str, slot: int, stop: Stop) -> tuple[int, str]:
        train = train_in_process(Surroundings((), {SIDE_BY_SIDE: "2"}, stop, memory))
        return train(tmp_path / f"{name}.yaml", tmp_path / "together", f"slot-{slot}", False)

    works = [partial(one, name) for name in ("config", "config", "absent")]
    take_turns(works, 2, lambda index, answer: ended.update({index: answer}))
    assert (ended[0], ended[1]) == ((0, ""), (0, ""))
    assert (ended[2][0], "absent.yaml" in ended[2][1]) == (2, True)
    assert 50e6 < memory.most_bytes < 5e9
    assert train_in_process(Surroundings())(
        tmp_path / "config.yaml", tmp_path / "alone", "run", False
    ) == (0, "")
    saved = "checkpoints/step-00000003/state.safetensors"
    files = [
        tmp_path / "together" / "slot-0",
        tmp_path / "together" / "slot-1",
        tmp_path / "alone" / "run",
    ]
    assert len({(path / saved).read_bytes() for path in files}) == 1
    environments = [json.loads((path / "env.json").read_text("utf-8")) for path in files]
    assert [found["command"][1:2] for found in environments] == [["train"]] * 3
    assert [read_run(path).at_a_time for path in files] == [2, 2, 1]


def test_the_error_is_what_is_said_and_not_the_warnings_before_it() -> None:
    text = "warning: rolled back (1 of 3)\nwarning: rolled back (2 of 3)\nerror: not finite.\n  Try a lower rate\n"
    assert last_words(text) == "not finite. Try a lower rate"


def test_without_an_error_the_last_lines_are_said() -> None:
    assert last_words("a\nb\nc\nd\nValueError: e\n") == "b c d ValueError: e"
    assert last_words("") == ""
