"""Variables of torch: set for the chosen tricks, and never against the user's own."""

import os

import pytest

from mpt.config.load import load_config
from mpt.engine.building.torch_settings import prepare_torch

pytestmark = pytest.mark.tier("fast")

CONFIG = {
    "model": "small_cnn",
    "dataset": "digits",
    "train": {"batch_size": 32},
    "memory": {"expandable_segments": True},
}


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        # torch reads the new name alone if both are set
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, None),
    ],
)
def test_the_users_allocator_settings_stay(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], expected: str | None
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    prepare_torch(load_config(CONFIG))
    assert os.environ.get("PYTORCH_ALLOC_CONF") == expected
    os.environ.pop("PYTORCH_ALLOC_CONF", None)
