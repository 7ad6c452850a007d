"""Published networks from the command line: pictures and videos, a configuration to train on, and a file back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from mpt.cli import main
from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.moving_averages import follow_step
from mpt.inference.evaluating import measure_in_half, measure_trained
from mpt.inference.exported import open_exported
from mpt.inference.half import rebuild
from mpt.inference.trained import open_trained
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.seams import DataSpec, FieldSpec
from mpt.systems.stylegan2.nn.weights.network_pickle import read_network_pickle
from tests.commands.conftest import save_run
from tests.systems.stylegan2.original import network_pickle
from tests.tasks.generative import STYLEGAN2


def code_of(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


def test_infer_draws_a_network_pickle_by_seeds(tmp_path: Path, capsys: Any) -> None:
    network = str(network_pickle("a32", tmp_path))
    words = ("--count", "2", "--seed", "3", "--truncation", "0.7", "-o", str(tmp_path / "a"))
    assert code_of("infer", network, *words) == 0
    assert "`mpt stylegan2 generate`" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "grid.png",
        "seed0003.png",
        "seed0004.png",
    ]
    assert not code_of(
        "stylegan2",
        "generate",
        network,
        "--seeds",
        "4",
        "--truncation",
        "0.7",
        "-o",
        str(tmp_path / "b"),
    )
    assert np.array_equal(
        pixels(tmp_path / "a" / "seed0004.png"), pixels(tmp_path / "b" / "seed0004.png")
    )


def is_alike(one, other):
    """Return whether pictures of different batches are equal; on many processors their rounding differs by a level."""
    return np.abs(one.astype(int) - other.astype(int)).max() <= 1


def test_walks_and_mixed_styles_are_videos(tmp_path: Path) -> None:
    pytest.importorskip("av")
    from mpt.data.video.video import read_frames

    network, folder = str(network_pickle("b64", tmp_path)), tmp_path / "out"
    words = ["stylegan2", "generate", network, "--class", "1", "--seeds", "0,1", "-o", str(folder)]
    assert not code_of(*words, "--walk", "--frames", "3", "--mix", "0:1,2", "--mix-layers", "0-3")
    for name, frames in (("walk", 2 * 3), ("mix", 2 * 3)):
        assert sum(1 for _ in read_frames(folder / f"{name}.mp4")) == frames
    table = pixels(folder / "mix.png")
    assert table.shape == (2 * 64, 3 * 64, 3)
    assert is_alike(table[64:, :64], pixels(folder / "seed0000.png")), (
        "the row's own picture on the left"
    )
    assert is_alike(table[:64, 64:128], pixels(folder / "seed0001.png")), "the column's above"
    assert not np.array_equal(table[64:, 64:128], table[64:, :64])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "this network has 5 classes; give one of 0 to 4"),
        (["--class", "7"], "5 classes"),
        (["--class", "1", "--seeds", "a"], "write numbers and ranges"),
        (["--class", "1", "--noise", "loud"], "allowed are const, random, none"),
        (["--class", "1", "--mix", "1"], "write the rows' seeds, a colon"),
        (["--class", "1", "--mix", "1:2", "--mix-layers", "0-99"], "layers 0 to 9"),
        (["--class", "1", "--seeds", "1", "--walk"], "two seeds at least"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    network = str(network_pickle("b64", tmp_path))
    assert code_of("stylegan2", "generate", network, "-o", str(tmp_path / "out"), *words)
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_transfer_starts_from_the_network_with_its_first_layers_frozen(
    tmp_path: Path, capsys: Any
) -> None:
    network, config = network_pickle("a32", tmp_path), tmp_path / "transfer.yaml"
    assert not code_of(
        "stylegan2",
        "transfer",
        str(network),
        "--data",
        str(tmp_path),
        "--batch",
        "4",
        "--freeze-d",
        "5",
        "-o",
        str(config),
    )
    written = yaml.safe_load(config.read_text())
    assert written["task"]["r1_gamma"] == pytest.approx(0.0002 * 32**2 / 4)
    data = DataSpec({"image": FieldSpec((3, 32, 32), torch.float32)}, 64)
    run = build_run(load_config(written), torch.device("cpu"), data)
    given = read_network_pickle(network).tensors()
    assert torch.equal(run.task.modules["gen"].synthesis.constant, given["G.synthesis.b4.const"])
    assert torch.equal(
        run.task.modules["gen_ema"].synthesis.constant, given["G_ema.synthesis.b4.const"]
    )
    # NVIDIA's program has no ramp there; with one the first step would replace the file's average
    written["train"]["ema"]["rampup"] = 0.05
    rising = build_run(load_config(written), torch.device("cpu"), data)
    follow_step(rising, 0)
    torch.testing.assert_close(
        rising.task.modules["gen_ema"].synthesis.constant,
        given["G_ema.synthesis.b4.const"],
        atol=0.02,
        rtol=0,
    )
    frozen = [
        name for name, one in run.task.modules["disc"].named_parameters() if not one.requires_grad
    ]
    of_block = [
        f"blocks.0.{name}"
        for name in ("first.weight", "first.bias", "second.weight", "second.bias", "skip.weight")
    ]
    assert frozen == [
        "from_image.weight",
        "from_image.bias",
        *of_block,
        "blocks.1.first.weight",
        "blocks.1.first.bias",
    ]
    assert code_of(
        "stylegan2", "transfer", str(network), "--data", "x", "--freeze-d", "99", "-o", "y.yaml"
    )
    assert "has 10 such layers" in capsys.readouterr().err


def test_another_resolution_takes_the_blocks_that_both_have(tmp_path: Path) -> None:
    network, config = network_pickle("a32", tmp_path), tmp_path / "transfer.yaml"
    assert not code_of(
        "stylegan2",
        "transfer",
        str(network),
        "--data",
        str(tmp_path),
        "--size",
        "64",
        "-o",
        str(config),
    )
    data = DataSpec({"image": FieldSpec((3, 64, 64), torch.float32)}, 64)
    run = build_run(load_config(config.read_text()), torch.device("cpu"), data)
    given = read_network_pickle(network).tensors()
    gen, disc = run.task.modules["gen"], run.task.modules["disc"]
    assert torch.equal(gen.synthesis.blocks[3].second.weight, given["G.synthesis.b32.conv1.weight"])
    assert torch.equal(disc.blocks[1].second.weight, given["D.b32.conv1.weight"])
    assert any("loaded 78 of 100 tensors" in said for said in run.messages)


def test_a_file_without_a_discriminator_is_not_trained_on(tmp_path: Path, capsys: Any) -> None:
    network = network_pickle("alias_free_t", tmp_path)
    assert code_of("stylegan2", "transfer", str(network), "--data", "x")
    assert "holds no G and D to train" in capsys.readouterr().err


def test_figures_of_the_training_s_state_come_from_the_checkpoint_and_are_no_export_s(
    tmp_path: Path,
) -> None:
    task = {"metric_samples": 8, "ada_target": 0.6}
    data = {"name": "shapes", "size": 16}
    words = {"model": STYLEGAN2, "task": task, "dataset": data, "precision": "fp32"}
    folder = save_run(tmp_path, {**words, "train": {"batch_size": 8, "steps": 1}, "name": "run"})
    loaded = checkpoint.load(open_run(folder))
    loaded.state["task"]["path_mean"].fill_(0.75)
    loaded.state["modules"]["augment"]["probability"].fill_(0.25)
    checkpoint.save(open_run(folder), 2, loaded.state, keep_last=9)
    trained = open_trained(str(folder), tmp_path, "cpu")
    runs = [trained.run, *(rebuild(trained, mode) for mode in ("fp32", "amp"))]
    for run in runs:
        assert float(run.task.path_mean) == 0.75
    found = measure_trained(trained, trained.test_data, 64).figures
    assert (found["path_length"], found["augment_probability"]) == (0.75, 0.25)
    assert not code_of("convert", str(folder), "-o", str(tmp_path / "gen.pt"))
    exported = open_exported(tmp_path / "gen.pt", "cpu", (), ())
    for measured in (
        measure_trained(exported, trained.test_data, 64),
        *measure_in_half(exported, trained.test_data, 64, "bfloat16"),
    ):
        assert set(found) - set(measured.figures) == {"path_length", "augment_probability"}


def test_a_run_without_a_generator_is_refused_in_one_line(tmp_path: Path, capsys: Any) -> None:
    words = {"model": "small_cnn", "dataset": "digits", "train": {"steps": 1}, "name": "run"}
    folder = save_run(tmp_path, words)
    assert code_of("stylegan2", "generate", str(folder), "-o", str(tmp_path / "a")) == 4
    (*_, said) = capsys.readouterr().err.splitlines()
    assert said.endswith("its model is small_cnn; mpt infer draws its samples")
    assert not (tmp_path / "a").exists()
