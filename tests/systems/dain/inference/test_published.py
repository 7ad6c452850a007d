"""Published files of weights in the place of a run, and back."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from mpt.cli import main
from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.initial_weights import load_initial_weights
from mpt.engine.state.state import capture
from mpt.errors import CheckpointError, ConfigError
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import create_run
from mpt.systems.dain.commands import interpolate as command
from mpt.systems.dain.inference.halving import by_halving
from mpt.systems.dain.inference.published import adjust, open_network, open_published
from mpt.systems.dain.inference.tiles import tiled
from mpt.systems.dain.nn import rife
from mpt.systems.dain.nn.flow_warp import FlowWarp
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.versions import build_version
from mpt.systems.dain.nn.weights.published_weights import publish


@pytest.fixture(scope="module")
def flownet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a file as Practical-RIFE has it, with a part that only training used."""
    torch.manual_seed(0)
    net = build_version("hd3")
    state = {f"module.{name}": value for name, value in net.state_dict().items()}
    path = tmp_path_factory.mktemp("weights") / "flownet.pkl"
    torch.save({**state, "module.caltime.0.weight": torch.zeros(3)}, path)
    return path


def type_in(*words: object) -> int:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return int(left.value.code or 0)


def test_a_flownet_pkl_makes_frames_and_comes_back_as_it_was(
    flownet, tmp_path, capsys, monkeypatch
):
    for number in range(2):
        Image.new("RGB", (80, 50), (40 * number,) * 3).save(tmp_path / f"{number}.png")
    pictures, out = sorted(tmp_path.glob("?.png")), tmp_path / "out"
    assert type_in("dain", "interpolate", flownet, *pictures, "--output", out, "--factor", 4) == 0
    said = capsys.readouterr().out
    assert f"{flownet}: RIFE hd3, 2,533,295 parameters" in said
    assert "2 frames of 80 x 50 at 25 -> 8 at 100 frames per second" in said
    assert len(list(out.iterdir())) == 8

    trained = open_network(str(flownet), tmp_path, "cpu")
    for name, found in (("open_trained", trained), ("rebuild", trained.run)):
        monkeypatch.setattr(
            f"mpt.systems.dain.nn.weights.published_weights.{name}", lambda *_, found=found: found
        )
    publish("run", tmp_path / "back.pkl", tmp_path)
    back, wanted = (
        torch.load(path, weights_only=True) for path in (tmp_path / "back.pkl", flownet)
    )
    assert list(back) == list(wanted)[:-1]
    assert all(torch.equal(value, wanted[name]) for name, value in back.items())


def test_mpt_infer_takes_a_flownet_pkl_in_the_place_of_a_run(flownet, tmp_path, capsys):
    for number in range(2):
        Image.new("RGB", (64, 32), (40 * number,) * 3).save(tmp_path / f"{number}.png")
    pictures, out = [("--input", path) for path in sorted(tmp_path.glob("?.png"))], tmp_path / "out"
    assert (
        type_in(
            "infer", flownet, *pictures[0], *pictures[1], "-o", out, "--factor", 2, "--vram", "4GiB"
        )
        == 0
    )
    assert "these inputs are for `mpt dain interpolate`" in capsys.readouterr().out
    assert len(list(out.iterdir())) == 4
    assert type_in("infer", flownet) == 3
    assert "makes frames between others; add --input with a video" in capsys.readouterr().err


def test_half_is_compared_with_float32_at_the_same_scale_and_padding(
    flownet, tmp_path, monkeypatch
):
    ways = []

    def noting(net: PublishedRife, *arguments: Any) -> torch.Tensor:
        ways.append((net.scales, net.multiple))
        return tiled(net, *arguments)

    monkeypatch.setattr(command, "tiled", noting)
    for number in range(2):
        Image.new("RGB", (64, 32), (40 * number,) * 3).save(tmp_path / f"{number}.png")
    words = [
        flownet,
        *sorted(tmp_path.glob("?.png")),
        "--output",
        tmp_path / "out",
        "--half",
        "--scale",
        0.5,
    ]
    assert type_in("dain", "interpolate", *words, "--pad-to", 128) == 0
    assert ways == [((8, 4, 2), 128)] * 2


def test_adapters_are_published_in_the_weights(tmp_path):
    config = load_config(
        {
            "model": {"name": "rife", "version": "hd3"},
            "task": {"name": "interpolate", "loss": "laplacian"},
            "dataset": {"name": "procedural_triplets", "image_size": 64, "count": 2},
            "precision": "fp32",
            "memory": {"lora": {"rank": 2, "targets": ["convolutions"]}},
            "optimizer": "adamw",
            "train": {"steps": 1, "batch_size": 2},
        }
    )
    run = build_run(config, torch.device("cpu"), build_datasets(config)[0].spec)
    net = run.task.modules["net"]
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.endswith("lora_b"):
                weight.normal_(std=0.05)
    directory = create_run(tmp_path, "adapted")
    directory.config_path.write_text(config.to_yaml())
    checkpoint.save(directory, 0, capture(run), keep_last=1)
    publish(str(directory.path), tmp_path / "back.pkl", tmp_path)
    back = open_network(str(tmp_path / "back.pkl"), tmp_path, "cpu").run.task.modules["net"]
    assert {name for name, _ in back.named_parameters()} < {n for n, _ in net.named_parameters()}
    frames, time = torch.rand(2, 1, 3, 64, 64), torch.tensor([0.5])
    with torch.no_grad():
        (adapted, _), (ours, _) = net.eval()(*frames, time), back.eval()(*frames, time)
    torch.testing.assert_close(ours, adapted, atol=1e-4, rtol=0)


def test_a_pruned_run_is_not_published(tmp_path, monkeypatch):
    pruned = SimpleNamespace(config=SimpleNamespace(memory=SimpleNamespace(tricks={"prune": 0.5})))
    monkeypatch.setattr(
        "mpt.systems.dain.nn.weights.published_weights.open_trained", lambda *_: pruned
    )
    with pytest.raises(ConfigError, match=r"it is pruned \(memory\.prune\)"):
        publish("run", tmp_path / "back.pkl", tmp_path)
    assert not (tmp_path / "back.pkl").exists()


def test_a_file_of_another_version_or_network_is_refused_by_name(flownet, tmp_path):
    with pytest.raises(
        CheckpointError, match=r"holds RIFE's network hd3; set model\.version to hd3"
    ):
        load_initial_weights({"net": build_version("hd3_older")}, flownet, rife.translate_weights)
    torch.save({"a.weight": torch.zeros(2, 2)}, tmp_path / "other.pth")
    with pytest.raises(
        CheckpointError, match=r"neither DAIN's weights nor those of a RIFE version .*4\.25"
    ):
        open_published(tmp_path / "other.pth", "cpu")


def test_what_a_network_cannot_do_is_refused():
    with torch.device("meta"):
        newest, older = build_version("4.25"), build_version("4.6")
    adjust(FlowWarp([4, 8, 8]), 1.0, None, False)
    with pytest.raises(ConfigError, match="are for RIFE's published networks"):
        adjust(FlowWarp([4, 8, 8]), 0.5, None, False)
    with pytest.raises(ConfigError, match=r"--scale: found 0\.3; allowed are 0\.25, 0\.5"):
        adjust(newest, 0.3, None, False)
    with pytest.raises(ConfigError, match=r"--pad-to: found 32; allowed here are 64, 128"):
        adjust(newest, 1.0, 32, False)
    with pytest.raises(ConfigError, match=r"--ensemble: 4\.0 to 4\.20 and 4\.24 have it"):
        adjust(newest, 1.0, None, True)
    adjust(older, 0.5, 128, True)
    assert (older.multiple, older.scales[0]) == (128, 16)


def test_a_network_without_a_time_reaches_times_by_halves_of_halves():
    first, last = torch.zeros(1, 3, 2, 2), torch.full((1, 3, 2, 2), 32.0)
    made: list[float] = []

    def middle(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        made.append(float((one + other).mean()) / 2)
        return (one + other) / 2

    moments = [Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(2, 5)]
    frames = by_halving(middle, first, last, moments)
    assert [float(frame.mean()) for frame in frames] == [8, 16, 24, 13]  # 2/5 is nearest to 13/32
    assert made == [16, 8, 24, 12, 14, 13]
