"""What is written for good is synced before it gets its name, and its folder after: seen call by call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpt.engine.loop import saving
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.shards import write_rows
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import create_run
from mpt.run.records.recorder import Recorder
from tests.storage_order import StorageOrder

pytestmark = pytest.mark.tier("fast")
STATE = {"modules": {"net": {"weight": torch.arange(3.0)}}}
TEMPORARY = "run/checkpoints/.tmp-*"
WHOLE = [
    f"write {TEMPORARY}/state.safetensors",
    f"sync {TEMPORARY}/state.safetensors",
    f"write {TEMPORARY}/state.json",
    f"sync {TEMPORARY}/state.json",
    f"write {TEMPORARY}/manifest.json",
    f"sync {TEMPORARY}/manifest.json",
    f"sync {TEMPORARY}/",
]
NAMED = [f"rename {TEMPORARY} > run/checkpoints/step-00000003", "sync run/checkpoints/"]
INDEX = [f"write {TEMPORARY}", f"rename {TEMPORARY} > run/checkpoints/index.json"]
"""Not synced: it can be made anew."""


@pytest.mark.parametrize("is_there", [False, True])
def test_a_replaced_file_is_synced_then_named_then_its_folder_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    if is_there:
        (tmp_path / "a").write_text("old")
    order = StorageOrder(tmp_path, monkeypatch)
    write_atomically(tmp_path / "a", "new")
    assert order.events == ["write .tmp-*", "sync .tmp-*", "rename .tmp-* > a", "sync ./"]
    assert order.not_durable(tmp_path) == []
    write_atomically(tmp_path / "a", "newer", durable=False)
    assert order.events[4:] == ["write .tmp-*", "rename .tmp-* > a"]
    assert order.not_durable(tmp_path / "a") == ["a"]


def test_a_checkpoint_is_synced_whole_before_it_has_its_name_and_its_place_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path, "run")
    order = StorageOrder(tmp_path, monkeypatch)
    checkpoint.save(run, 3, STATE, keep_last=1)
    assert order.events == [*WHOLE, *NAMED, *INDEX]
    assert order.not_durable(run.checkpoint_path(3)) == []
    order.events.clear()
    checkpoint.save(run, 3, STATE, keep_last=1)
    aside = "rename run/checkpoints/step-00000003 > run/checkpoints/.replaced-step-00000003-*"
    assert order.events == [*WHOLE, aside, *NAMED, *INDEX]


def test_the_lines_of_a_run_are_durable_before_a_checkpoint_of_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = create_run(tmp_path, "run")
    train: Any = SimpleNamespace(asynchronous_save=False, keep_last=1)
    task: Any = SimpleNamespace(higher_is_better=False)
    run: Any = SimpleNamespace(
        config=SimpleNamespace(train=train), task=task, world=SimpleNamespace(size=1)
    )
    monkeypatch.setattr(saving, "conditions", lambda run: {})
    with Recorder(directory) as recorder:
        order = StorageOrder(tmp_path, monkeypatch)
        recorder.write_metrics(3, {"loss": 1.0})
        recorder.write_event(3, "note")
        lines = ["run/metrics.jsonl", "run/events.jsonl"]
        assert order.events == [f"write {name}" for name in lines]
        saver = saving.CheckpointSaver(run, directory, SimpleNamespace(recorder=recorder))  # type: ignore[arg-type]
        saver.committer(3, 0.5)(checkpoint.encode(STATE), None)
        assert order.events[2:] == [*(f"sync {name}" for name in lines), *WHOLE, *NAMED, *INDEX]
        assert [
            order.not_durable(path) for path in (directory.metrics_path, directory.events_path)
        ] == [[], []]
    assert checkpoint.load(directory).manifest["higher_is_better"] is False


def test_a_rank_s_rows_are_synced_before_the_manifest_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = StorageOrder(tmp_path, monkeypatch)
    name, entry = write_rows(
        tmp_path, "shard-00000-of-00001.safetensors", {"weight": torch.arange(4.0)}
    )
    assert order.events == [f"write {name}", f"sync {name}"]
    assert order.not_durable(tmp_path / name) == []
    assert entry["bytes"] == (tmp_path / name).stat().st_size
