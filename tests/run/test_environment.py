"""The environment record says what may change the numbers, and no secret."""

from __future__ import annotations

import json

import torch

from mpt.run.environment import compare_environments, current_commit, describe_environment


def test_versions_threads_and_devices_are_recorded_as_json(monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = json.loads(json.dumps(describe_environment(), allow_nan=False))
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["variables"]["OMP_NUM_THREADS"] == "1"
    assert {"python", "processor", "processor_features", "devices", "command", "mpt"} <= set(found)


def test_environment_variables_that_may_be_secret_are_not_recorded(monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2-token")
    monkeypatch.setenv("CUDA_SECRET", "hunter2-cuda")
    assert "hunter2" not in json.dumps(describe_environment())


def test_a_folder_without_a_repository_has_no_commit(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert current_commit(tmp_path) is None


def test_differences_that_may_change_the_numbers_are_named() -> None:
    now = describe_environment()
    assert compare_environments(now, now) == []
    before = {**now, "threads": 64, "torch": "2.11.0", "command": ["other"]}
    assert compare_environments(before, now) == [
        f"torch is now {torch.__version__} and was 2.11.0",
        f"threads is now {torch.get_num_threads()} and was 64",
    ]
