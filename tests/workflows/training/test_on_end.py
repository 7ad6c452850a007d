"""`train.on_end`: a command or an address is told how a training ended."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import read_config
from mpt.config.load import load_config
from mpt.errors import ConfigError, NonFiniteError
from mpt.workflows.training.train import train

CONFIG: dict[str, Any] = {
    "model": {"name": "small_cnn", "features": 4, "image_size": 8},
    "precision": "fp32",
    "train": {"steps": 2, "batch_size": 32, "checkpoint_every": 0},
    "name": "run",
}


@pytest.fixture
def server() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A local server and what was posted to it."""
    posted: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/good" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as opened:
        thread = threading.Thread(target=opened.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{opened.server_port}", posted
        opened.shutdown()


def test_an_address_gets_the_summary_and_a_line_for_people(
    tmp_path: Path, server: tuple[str, list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    address, posted = server
    train(load_config(CONFIG, [f"train.on_end={address}/good"]), runs=tmp_path, reports=False)
    assert posted[0]["status"] == "finished"
    assert posted[0]["summary"]["steps"] == 2
    assert posted[0]["text"].startswith("run finished at step 2 of 2, accuracy ")
    train(
        load_config(CONFIG, [f"train.on_end={address}/bad", "name=other"]),
        runs=tmp_path,
        reports=False,
    )
    assert "warning: train.on_end: HTTP Error 500" in capsys.readouterr().err


def test_a_command_is_run_after_a_failure_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "told.json"
    command = f"cat > {out}; test $MPT_STATUS = failed"
    config = load_config(
        CONFIG,
        [
            f"train.on_end='{command}'",
            "train.on_non_finite=stop",
            "optimizer.lr=1e30",
            "train.steps=9",
        ],
    )
    with pytest.raises(NonFiniteError):
        train(config, runs=tmp_path, reports=False)
    told = json.loads(out.read_text())
    assert (told["status"], told["run"]) == ("failed", str((tmp_path / "run").resolve()))
    assert "not finite" in told["text"]
    assert "train.on_end" not in capsys.readouterr().err


def test_the_command_of_a_file_is_run_only_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: small_cnn\ntrain: {on_end: 'rm -rf /tmp/x'}\n")
    with pytest.raises(ConfigError, match="if you trust it, add --allow on_end"):
        read_config(TrainArguments(path))
    assert read_config(TrainArguments(path, allow=("on_end",))).train.on_end == "rm -rf /tmp/x"
    assert read_config(TrainArguments(path, ("train.on_end=date",))).train.on_end == "date"
    assert load_config(path).train.on_end == "rm -rf /tmp/x", (
        "what only reads a run's configuration runs nothing"
    )
