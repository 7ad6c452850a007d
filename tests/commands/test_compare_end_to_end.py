"""The command as a user types it: processes of its own, exit codes, an interruption and its continuation."""

import json
import signal
import subprocess
import sys
import time

import pytest

SETTINGS = [
    "model.image_size=16",
    "model.features=8",
    "train.epochs=null",
    "train.steps=6",
    "train.batch_size=16",
]
CONFIG = "model: {name: small_cnn}\ndataset: {name: digits}\ntrain: {steps: 6, log_every: 2}\n"


@pytest.fixture
def start(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)

    def begin(*words):
        command = [
            sys.executable,
            "-m",
            "mpt",
            "compare",
            *words,
            "--config",
            str(tmp_path / "config.yaml"),
            *SETTINGS,
        ]
        command += ["--runs", str(tmp_path / "runs"), "--device", "cpu"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    return begin


@pytest.mark.slow
def test_an_interrupted_comparison_ends_with_130_and_goes_on(start, tmp_path):
    first = start("fp32", "amp", "--seeds", "2", "--jobs", "2")
    folder = tmp_path / "runs" / "compare-small_cnn-fp32-amp"
    deadline = time.monotonic() + 120
    while not (folder / "fp32-seed-1").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.send_signal(signal.SIGINT)
    _, words = first.communicate(timeout=120)
    assert first.returncode == 130, words
    assert "Traceback" not in words
    second = start("fp32", "amp", "--seeds", "2", "--jobs", "2", "--json")
    said, words = second.communicate(timeout=240)
    assert second.returncode == 0, words
    content = json.loads(said)
    assert [mode["mode"] for mode in content["modes"]] == ["fp32", "amp"]
    assert all(mode["peak_bytes"] > 0 for mode in content["modes"])
    assert content["modes"][1]["verdict"]["outcome"] == "undecided"
    gated = start("fp32", "amp", "--seeds", "2", "--gate")
    _, words = gated.communicate(timeout=120)
    assert gated.returncode == 8
    assert "not decidable" in words
