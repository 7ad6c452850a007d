"""A detector from outside of the package: model, data set of padded boxes, and task, each in one file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mpt
from mpt.cli import main

PARTS = Path(__file__).parent / "outside_parts"
CONFIG = {
    "model": "grid_net",
    "dataset": "drawn_boxes",
    "precision": "fp32",
    "optimizer": {"name": "adam", "lr": 3e-3},
    "train": {"steps": 60, "batch_size": 16},
    "name": "detector",
}


@pytest.fixture(autouse=True)
def no_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPT_PARTS", "")


def test_it_learns_and_its_run_infers_from_the_record_alone(tmp_path: Path) -> None:
    config = mpt.load(CONFIG, parts=[PARTS])
    untrained = mpt.build(config).evaluate()
    run = mpt.train(config, runs=tmp_path)
    assert run.figures["pixels_off"] < 0.7 * untrained["pixels_off"]
    (result, *_) = mpt.infer(run.path)
    assert set(result.rows[0]) == {"score", "box"}


def test_micro_batches_are_exact_though_losses_are_divided_by_the_number_of_boxes() -> None:
    weights = []
    for micro_batch in ("false", "5"):
        built = mpt.build(
            mpt.load(
                CONFIG, f"memory.micro_batch={micro_batch}", "optimizer.name=sgd", parts=[PARTS]
            )
        )
        for step, batch in zip(range(2), built.batches(), strict=False):
            mpt.update(built, batch, step)
        weights.append(list(built.modules["net"].parameters()))
    for whole, parts in zip(*weights, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-4, atol=1e-6)


def test_it_is_planned() -> None:
    plan = mpt.plan(mpt.load(CONFIG, parts=[PARTS])).plan
    assert plan.allocated > 0


ALL_FOUR = """
model: grid_net
dataset: drawn_boxes
precision: my_fp8
memory: {in_place: true}
optimizer: {name: adam, lr: 3e-3}
train: {steps: 3, batch_size: 8, evaluate_every: 0}
name: strangers
"""


def test_a_strangers_detector_data_set_mode_and_trick_go_through_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one file in a folder outside of the package; the commands are those that a user types."""

    def run(*words: object) -> str:
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in words])
        said = capsys.readouterr()
        assert caught.value.code == 0, said
        return said.out + said.err

    monkeypatch.chdir(tmp_path)
    parts = shutil.copytree(
        PARTS, tmp_path / "strange parts", ignore=shutil.ignore_patterns("__pycache__")
    )
    run("init", "--part", "precision", "my_fp8", "--into", parts)  # rounds operands to float8
    run("init", "--part", "trick", "in_place", "--into", parts)
    Path("all.yaml").write_text(ALL_FOUR)
    run("train", "all.yaml", "--parts", parts)
    summary = json.loads(Path("runs/strangers/summary.json").read_text())
    assert summary["precision"]["mode"] == "my_fp8"
    assert summary["metric"] == "found"
    assert "on rtx3060: needs " in run("plan", "all.yaml", "--parts", parts)
    compared = run(
        "compare", "fp32", "my_fp8", "--config", "all.yaml", "--seeds", "1", "--parts", parts
    )
    assert "my_fp8" in compared
    assert "found" in compared
    run("infer", "runs/strangers", "--parts", parts)
    (table,) = Path("runs/strangers/inference").glob("*.csv")
    assert table.read_text().splitlines()[0].split(",")[-2:] == ["score", "box"]
