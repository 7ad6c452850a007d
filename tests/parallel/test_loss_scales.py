"""Loss scales of ranks: those of as many micro-batches, which are not always one process's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from mpt.cli import main


@pytest.mark.slow
def test_the_loss_scale_of_ranks_is_that_of_micro_batches_and_one_process_may_skip_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight's gradient is a float16 sum over the samples: the whole batch's overflows where its halves do not."""
    monkeypatch.chdir(tmp_path)
    words = ["precision.mode=amp", "precision.dtype=float16", "train.steps=2", "train.log_every=1"]
    words += ["train.evaluate_every=0", "task.metric_samples=64"]
    scales = {}
    for name, extra in {
        "whole": [],
        "halves": ["memory.micro_batch=32"],
        "ranks": ["--nproc", "2"],
    }.items():
        command = ["train", "@lsgan", *words, "--name", name, *extra, "--quiet"]
        if name == "ranks":
            subprocess.run([sys.executable, "-m", "mpt", *command], check=True, capture_output=True)
        else:
            with pytest.raises(SystemExit, match=r"^0$"):
                main(command)
        lines = map(
            json.loads, (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
        )
        scales[name] = [line["scale"] for line in lines if line["kind"] == "train"]
    assert scales["ranks"] == scales["halves"]
    assert scales["whole"][0]["disc"] < scales["halves"][0]["disc"]
