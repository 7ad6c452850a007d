"""The environment record says what may change the numbers, and no secret."""

from __future__ import annotations

import json

import pytest
import torch

from mpt.run.records.environment import current_commit, describe_environment

pytestmark = pytest.mark.tier("fast")


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
