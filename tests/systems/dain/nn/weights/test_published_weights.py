"""Weights go in from baowenbo/DAIN's files and back out."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mpt.engine.building.initial_weights import load_initial_weights
from mpt.errors import CheckpointError, ConfigError, InputOutputError
from mpt.systems.dain.nn.dain import Dain
from mpt.systems.dain.nn.weights import published_weights
from mpt.systems.dain.nn.weights.published_weights import join_parts, publish


@pytest.mark.slow  # files of 96 MB
def test_a_best_pth_loads_whole_and_parts_load_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(1)
    published = Dain()
    torch.save(published.state_dict(), tmp_path / "best.pth")
    net = Dain()
    assert (
        "loaded all 954 tensors"
        in load_initial_weights({"net": net}, tmp_path / "best.pth").message
    )
    assert all(
        torch.equal(value, net.state_dict()[name]) for name, value in published.state_dict().items()
    )

    torch.save({"state_dict": published.flownets.state_dict()}, tmp_path / "pwc_net.pth.tar")
    depth = {f"module.{name}": value for name, value in published.depthNet.state_dict().items()}
    torch.save(depth, tmp_path / "net_G.pth")
    join_parts(tmp_path / "start.safetensors", tmp_path / "pwc_net.pth.tar", tmp_path / "net_G.pth")
    assert "flownets: loaded all" in capsys.readouterr().out
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    assert (
        "new: net.initScaleNets_filter"
        in load_initial_weights({"net": net}, tmp_path / "start.safetensors").message
    )
    found, wanted = net.state_dict(), published.state_dict()
    for name in ("flownets.conv1a.0.weight", "depthNet.4.weight"):
        assert torch.equal(found[name], wanted[name])
    assert found["rectifyNet.block1.0.weight"].abs().max() == 0

    with pytest.raises(CheckpointError):
        join_parts(tmp_path / "other.safetensors", tmp_path / "net_G.pth", None)
    with pytest.raises(ConfigError, match="--flow"):
        join_parts(tmp_path / "other.safetensors", None, None)
    assert not (tmp_path / "other.safetensors").exists()


def test_a_runs_weights_go_back_as_float32_under_the_published_names(
    tmp_path: Path, monkeypatch
) -> None:
    modules = {"net": Dain("tiny"), "net_ema": Dain("tiny").bfloat16()}
    config = SimpleNamespace(memory=SimpleNamespace(tricks={}))
    trained = SimpleNamespace(
        config=config, run=SimpleNamespace(task=SimpleNamespace(modules=modules))
    )
    monkeypatch.setattr(published_weights, "open_trained", lambda *_: trained)
    monkeypatch.setattr(published_weights, "rebuild", lambda *_: trained.run)
    with pytest.raises(ConfigError, match="at size full"):
        publish("small", tmp_path / "best.pth", tmp_path)
    # as the full one has, whose names a test beside this compares with the published
    modules["net_ema"].multiple = 64
    publish("full", tmp_path / "best.pth", tmp_path)
    found, wanted = (
        torch.load(tmp_path / "best.pth", weights_only=True),
        modules["net_ema"].state_dict(),
    )
    assert list(found) == list(wanted)
    assert all(
        value.dtype == torch.float32 for value in found.values() if value.is_floating_point()
    )
    assert all(torch.equal(value, wanted[name].to(value.dtype)) for name, value in found.items())
    with pytest.raises(InputOutputError, match="there already"):
        publish("full", tmp_path / "best.pth", tmp_path)
