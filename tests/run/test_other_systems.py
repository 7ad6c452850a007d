"""What a system without fcntl, fork and descriptors of folders does: Windows, as far as Linux can stand in for it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpt import cli
from mpt.errors import ConfigError
from mpt.run.process import operating_system
from mpt.run.records import layout

CONFIG = """
model: {name: small_cnn, image_size: 16, features: 4}
dataset: {name: digits, workers: 1}
precision: bf16
train: {steps: 4, batch_size: 16, checkpoint_every: 2, log_every: 1}
name: größe
"""
PROGRAM = Path(__file__).with_name("without_posix.py")


def go(*words: str, cwd: Path) -> tuple[int, str]:
    environment = {
        **os.environ,
        "PYTHONIOENCODING": "cp1252",
        "PYTHONPATH": str(PROGRAM.parents[2]),
    }
    command = [sys.executable, str(PROGRAM), *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=280)
    return done.returncode, (done.stdout + done.stderr).decode("cp1252")


def test_a_run_trains_resumes_and_infers_without_posix_and_is_the_same_to_the_bit(
    tmp_path: Path,
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG, "utf-8")
    (tmp_path / "target").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "target")
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.yaml").write_text("")
    with (
        layout.RunDirectory(tmp_path / "held").hold(),
        open(tmp_path / "held" / "lock", "rb+") as file,
    ):
        # Windows' lock lies on a byte far behind the text.
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX, 1, operating_system.LOCKED_BYTE)
        code, said = go(
            *(
                "train",
                "c.yaml",
                "then",
                "train",
                "c.yaml",
                "--resume",
                "train.steps=6",
                "dataset.workers=0",
                "then",
            ),
            *(
                "infer",
                "größe",
                "-o",
                "out.csv",
                "then",
                "train",
                "c.yaml",
                "--resume",
                "held",
                "--runs",
                ".",
            ),
            cwd=tmp_path,
        )
    assert said.count("exit code 0") == 3, said
    assert "step 6/6" in said
    assert "Traceback" not in said
    assert "is being written by process" in said, said
    assert code == 5, said  # of the command that found the run held
    with pytest.raises(SystemExit):
        cli.main(
            [
                "train",
                str(tmp_path / "c.yaml"),
                "--runs",
                str(tmp_path / "usual"),
                "train.steps=6",
                "--quiet",
            ]
        )
    tensors = Path("größe", "checkpoints", "step-00000006", "state.safetensors")
    assert (tmp_path / "runs" / tensors).read_bytes() == (tmp_path / "usual" / tensors).read_bytes()


def test_links_are_refused_and_files_replaced_where_folders_have_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operating_system, "IS_POSIX", False)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "file").write_text("old")
    (tmp_path / "to-file").symlink_to("file")
    with pytest.raises(OSError, match="symbolic link"), operating_system.opened(tmp_path / "link"):
        pass
    with pytest.raises(NotADirectoryError), operating_system.opened(tmp_path / "file"):
        pass
    with pytest.raises(OSError, match="symbolic link"):
        operating_system.open_file(tmp_path / "to-file", os.O_WRONLY)
    tries: list[Path] = []
    real = os.replace

    def held(old: Path, new: Path) -> None:
        tries.append(new)
        if len(tries) < 3:
            raise PermissionError(13, "in use")
        real(old, new)

    monkeypatch.setattr(os, "replace", held)
    with operating_system.opened(tmp_path) as folder:
        (tmp_path / "new").write_text("new")
        operating_system.replace("new", "file", folder)
    assert (tmp_path / "file").read_text() == "new"
    assert len(tries) == 3


@pytest.mark.parametrize("name", ["nul", "COM1", "aux.old", "run."])
def test_names_that_windows_keeps_are_no_runs_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.check_name(name)
    monkeypatch.setattr(layout, "IS_POSIX", False)
    with pytest.raises(ConfigError, match="on Windows"):
        layout.check_name(name)


@pytest.mark.slow
def test_a_comparison_that_is_stopped_without_signals_saves_its_runs(tmp_path: Path) -> None:
    """There a signal to another process ends it where it stands."""
    config = {
        "model": {"name": "small_cnn", "image_size": 8, "features": 4},
        "dataset": "digits",
        "train": {
            "steps": 10**6,
            "log_every": 1,
            "threads": 1,
            "device": "cpu",
            "checkpoint_every": 10**6,
        },
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    words = [
        "compare",
        "fp32",
        "amp",
        "--config",
        "config.yaml",
        "--seeds",
        "1",
        "--quiet",
        "--jobs",
        "1",
    ]
    with subprocess.Popen([sys.executable, str(PROGRAM), *words], cwd=tmp_path) as process:
        until = time.monotonic() + 120
        while not any(log.stat().st_size for log in tmp_path.rglob("metrics.jsonl")):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        code = process.wait(timeout=60)
    assert code == 130
    saved = {
        int(manifest.parent.name.removeprefix("step-"))
        for manifest in tmp_path.rglob("step-*/manifest.json")
    }
    assert max(saved) > 0, saved
