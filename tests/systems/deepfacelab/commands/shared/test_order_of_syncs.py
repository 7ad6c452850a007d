"""A model that is returned is durable before it takes the place of the one that is there, and its place after."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mpt.systems.deepfacelab.commands.shared import model_switch
from mpt.systems.deepfacelab.commands.shared.model_folder import Folder, new_file
from mpt.systems.deepfacelab.commands.shared.model_switch import replacing
from tests.storage_order import StorageOrder

pytestmark = pytest.mark.tier("fast")
PLACE = ".mpt-return-model-*"


def give_back(target: Path) -> None:
    """Return a model of one file."""
    with (
        replacing(Folder(target, "foo_SAEHD_")) as folder,
        new_file(folder.path / "foo_SAEHD_encoder.npy") as file,
    ):
        file.write(b"new")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_returned_model_and_its_backup_are_durable_before_the_folders_change_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "foo_SAEHD_encoder.npy").write_bytes(b"old")
    order = StorageOrder(tmp_path, monkeypatch)
    exchange, left = model_switch.exchange, []

    def switch(new: Path, old: Path) -> bool:
        left.append(order.not_durable(new))
        note = new.parent / "note.json"
        left.append(order.not_durable(note))
        assert json.loads(note.read_text())["replaced"] == ["foo_SAEHD_encoder.npy"]
        order.add("switch")
        return exchange(new, old) if exchanges else False

    monkeypatch.setattr(model_switch, "exchange", switch)
    give_back(target)
    assert left == [[], []]
    after = order.events[order.events.index("switch") + 1 :]
    renames = [f"rename model > {PLACE}/old", f"rename {PLACE}/new > model"]
    assert after == [*([] if exchanges else renames), "sync ./"]
    assert order.not_durable(target) == []
    assert (target / "foo_SAEHD_encoder.npy").read_bytes() == b"new"
    assert (
        target / "foo_SAEHD_autobackups" / "01" / "foo_SAEHD_encoder.npy"
    ).read_bytes() == b"old"


def test_copies_are_durable_on_a_file_system_without_second_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "foo_SAEHD_encoder.npy").write_bytes(b"old")

    def link(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", link)
    order = StorageOrder(tmp_path, monkeypatch)
    give_back(target)
    assert order.not_durable(target) == []


def test_the_first_model_in_a_folder_is_durable_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = StorageOrder(tmp_path, monkeypatch)
    give_back(tmp_path / "model")
    assert order.events[-2:] == [f"rename {PLACE}/new > model", "sync ./"]
    assert order.not_durable(tmp_path / "model") == []
