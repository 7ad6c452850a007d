"""What is durable before what, so that a power loss at any moment leaves a run that is whole."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpt.engine.loop import saving
from mpt.engine.state import evaluation
from mpt.errors import InputOutputError
from mpt.run.checkpoints.checkpoint import EncodedState
from mpt.run.records.layout import create_run
from mpt.run.records.recorder import Recorder


def test_a_checkpoint_s_own_lines_are_durable_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume drops the lines after its checkpoint; a line that the power loss took never came back."""
    done: list[str] = []
    train: Any = SimpleNamespace(asynchronous_save=False, keep_last=1)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(train=train),
        task=SimpleNamespace(higher_is_better=True),
        world=SimpleNamespace(size=1),
    )
    journal: Any = SimpleNamespace(recorder=SimpleNamespace(sync=lambda: done.append("lines")))
    monkeypatch.setattr(saving, "conditions", lambda run: {})
    monkeypatch.setattr(saving.checkpoint, "write", lambda *_, **__: done.append("checkpoint"))
    saver = saving.CheckpointSaver(run, None, journal)  # type: ignore[arg-type]
    saver.committer(1, None)(EncodedState(b"", {}), None)
    assert done == ["lines", "checkpoint"]


def test_nothing_is_written_behind_a_link_that_takes_the_run_s_place(tmp_path: Path) -> None:
    """Metrics, events and checkpoints went into the link's target."""
    directory = create_run(tmp_path, "run")
    config: Any = SimpleNamespace(train=SimpleNamespace(asynchronous_save=False, keep_last=1))
    run: Any = SimpleNamespace(config=config, world=SimpleNamespace(size=1))
    with Recorder(directory) as recorder:
        saver = saving.CheckpointSaver(run, directory, SimpleNamespace(recorder=recorder))  # type: ignore[arg-type]
        directory.path.rename(tmp_path / "away")
        victim = tmp_path / "victim"
        (victim / "checkpoints").mkdir(parents=True)
        directory.path.symlink_to(victim)
        with pytest.raises(
            InputOutputError, match="a symbolic link has taken the place of the run's folder"
        ):
            saver.tell_removed_files()
    assert [path.name for path in victim.rglob("*")] == ["checkpoints"]


def test_neither_samples_nor_results_are_written_behind_such_a_link_between_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, victim = create_run(tmp_path, "run"), tmp_path / "victim"
    with Recorder(directory) as recorder:
        directory.path.rename(tmp_path / "away")
        (victim / "samples").mkdir(parents=True)
        directory.path.symlink_to(victim)
        with pytest.raises(
            InputOutputError, match="a symbolic link has taken the place of the run's folder"
        ):
            recorder.write_evaluation(4, {"accuracy": 0.5})
    monkeypatch.setattr(evaluation, "preview", lambda run, batch: torch.zeros(1, 1, 8, 8))
    monkeypatch.setattr(evaluation, "to_device", lambda batch, device, spec: batch)
    config: Any = SimpleNamespace(train=SimpleNamespace(batch_size=1))
    run: Any = SimpleNamespace(
        config=config, device=None, data=None, task=None, world=SimpleNamespace(is_first=True)
    )
    data: Any = type(
        "Data", (), {"fetch": lambda self, numbers, seed: {}, "__len__": lambda self: 1}
    )()
    with pytest.raises(
        InputOutputError, match="a symbolic link has taken the place of the run's folder"
    ):
        evaluation.write_preview(run, data, directory, 4)
    assert [path.name for path in victim.rglob("*")] == ["samples"]
