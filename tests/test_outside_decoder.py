"""A language model from outside of the package: token ids, no pictures; trained small, planned with wide blocks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import mpt
from mpt.commands.convert import Command as Convert
from mpt.commands.convert import run as convert
from mpt.commands.evaluate import Command as Evaluate
from mpt.commands.evaluate import run as evaluate
from mpt.commands.infer import Command as Infer
from mpt.commands.infer import run as infer
from mpt.errors import ConfigError

PARTS = Path(__file__).parent / "outside_parts"
LARGE = PARTS / "gpt2_xl.yaml"


@pytest.fixture(autouse=True)
def no_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPT_PARTS", "")


@pytest.mark.parametrize("precision", ["bf16-sr", "O2"])
def test_it_learns_which_tokens_may_follow(tmp_path: Path, precision: str) -> None:
    small = {
        "model": "decoder",
        "dataset": "letters",
        "optimizer": {"name": "schedule_free", "lr": 1e-2},
    }
    training = {"steps": 40, "batch_size": 32, "evaluate_every": 0, "checkpoint_every": 0}
    config = mpt.load({**small, "precision": precision, "train": training}, parts=[PARTS])
    run = mpt.train(config, runs=tmp_path)
    assert math.log(2) < run.figures["nats"] < 0.8 * math.log(31)  # every other token is a coin's


def test_networks_of_a_task_that_does_not_infer_are_written_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = mpt.load(
        {
            "model": "decoder",
            "dataset": "letters",
            "precision": "fp32",
            "train": {"steps": 2, "batch_size": 8},
        },
        parts=[PARTS],
    )
    run = mpt.train(config, runs=tmp_path)
    file = tmp_path / "decoder.safetensors"
    convert(Convert(run=str(run.path), output=str(file)))
    for measured in (run.path, file):
        evaluate(Evaluate(run=str(measured), output=str(tmp_path / measured.stem), device="cpu"))
        found = json.loads((tmp_path / measured.stem / "evaluation.json").read_text())
        assert [*found["figures"].values()] == [{"nats": run.figures["nats"]}]
    with pytest.raises(ConfigError, match=r"NextToken does not infer: `mpt evaluate` measures it"):
        infer(Infer(run=str(run.path), device="cpu", output=str(tmp_path / "inferred")))


def test_adapters_go_onto_a_model_whose_settings_name_no_weights() -> None:
    words = {"model": "decoder", "dataset": "letters", "precision": "fp32", "memory": {"lora": 2}}
    config = mpt.load({**words, "train": {"steps": 1}}, parts=[PARTS])
    run = mpt.build(config, device="cpu").run
    assert any("memory.lora: " in message for message in run.messages)
    assert not run.notes, "it may read weights of its own"


@pytest.mark.slow
def test_half_weights_are_planned_once_with_the_peak_in_the_step() -> None:
    """The peak is the weights and a copy of the largest, which the shared embedding is: building takes no more."""
    config = mpt.load(LARGE, "model.layers=6", "precision=bf16-sr", parts=[PARTS])
    plan = mpt.plan(config).plan
    width, vocabulary, length = 1600, 50257, 513
    embedding = vocabulary * width
    block = 12 * width**2 + 13 * width
    weights = 2 * (6 * block + embedding + length * width + 2 * width)
    assert plan.moment.startswith("phase net, backward")
    # and the table of random numbers, and a batch
    assert 0 <= plan.held_throughout - weights < 32 * 2**20
    assert plan.allocated < weights + 4 * 2 * embedding
