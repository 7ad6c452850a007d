"""Whatever draws with a trained network does so with its average, if it has one (`train.ema`)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.state.state import capture
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import create_run
from mpt.seams import Run
from mpt.systems.deepfacelab.commands import export_dfm
from mpt.systems.deepfacelab.commands.shared.begun_run import write_run
from mpt.systems.deepfacelab.inference import masks


def built() -> tuple[Config, Run]:
    """Return the smallest SAEHD with an average."""
    sizes = {"image_size": 64, "ae_dims": 6, "e_dims": 4, "d_dims": 4, "d_mask_dims": 2}
    config = load_config(
        {
            "model": {"name": "saehd", **sizes},
            "dataset": {"name": "procedural_faces", "count": 4, "test_count": 2},
            "optimizer": {"name": "adabelief"},
            "precision": {"mode": "fp32"},
            "train": {"batch_size": 2, "steps": 1, "ema": 0.9},
        }
    )
    return config, build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)


def test_a_dfm_draws_what_the_merger_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = built()
    with torch.no_grad():
        for weight in run.averages["autoencoder"].parameters():
            weight.add_(0.125)
    directory = create_run(tmp_path, "faces")
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, 0, capture(run), keep_last=1)
    written = []
    monkeypatch.setattr(
        "mpt.systems.deepfacelab.inference.dfm.write_dfm",
        lambda path, network, *_, **__: path.touch() or written.append(network),
    )
    export_dfm.run(export_dfm.Command(str(directory.path), tmp_path / "model.dfm"))
    for ours, average in zip(
        written[0].parameters(), run.averages["autoencoder"].parameters(), strict=True
    ):
        assert torch.equal(ours, average)


def test_an_xsegs_masks_are_its_averages(monkeypatch: pytest.MonkeyPatch) -> None:
    network, average = nn.Identity(), nn.Identity()
    task = SimpleNamespace(modules={"xseg": network, "xseg_ema": average})
    settings = SimpleNamespace(image_size=masks.SIDE, face_type="wf")
    part = SimpleNamespace(name="xseg", settings=settings)
    trained = SimpleNamespace(config=SimpleNamespace(model=part, dataset=part))
    monkeypatch.setattr(masks, "find_run", lambda *_: (None, None))
    monkeypatch.setattr(masks, "open_trained", lambda *_, **__: trained)
    monkeypatch.setattr(masks, "rebuild", lambda *_: SimpleNamespace(task=task))
    monkeypatch.setattr(masks, "setting_of", lambda *_: "wf")
    found = masks.load_run(Path("run"), torch.device("cpu"), Path("runs"))
    assert found.segment.args[0] is average


def test_the_average_of_a_converted_model_begins_with_its_weights(tmp_path: Path) -> None:
    config, run = built()
    with torch.no_grad():
        for weight in run.task.modules["autoencoder"].parameters():
            weight.add_(0.125)
    directory = write_run(tmp_path / "begun", config, run, 9, "test", lambda _: None)
    saved = checkpoint.load(directory).state["modules"]
    for name, value in saved["autoencoder"].items():
        assert torch.equal(saved["autoencoder_ema"][name], value), name
