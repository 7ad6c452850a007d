"""A resume with another optimizer: what state is kept, converted and dropped; nothing is reused by its name."""

from __future__ import annotations

import copy
import json
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.cli import main
from mpt.engine.state.state import capture, restore
from mpt.run.checkpoints.state import pack, unpack
from mpt.seams import Run
from tests.engine import parts
from tests.memory import mechanism

OPTIMIZERS = (
    *("sgd", "adam", "adamw", "adamax", "rmsprop", "lion", "muon", "adafactor", "schedule_free"),
    *("adabelief", "rmsprop_leras", "sgd_warmup"),
)
FAMILIES = ({"adam", "adamw"}, {"sgd", "sgd_warmup"})


def trained(optimizer: dict[str, Any], mode: str = "fp32") -> Run:
    run = parts.classifier(mode, optimizer={"lr": 1e-3, **optimizer})
    mechanism.train(run, [parts.batch()])
    return run


def change(
    saved: dict[str, Any], optimizer: dict[str, Any], mode: str = "fp32", named: bool = True
) -> tuple[Run, str]:
    """Return the run that goes on with another optimizer, and what is said of the state."""
    run = parts.classifier(mode, optimizer={"lr": 1e-3, **optimizer})
    state = copy.deepcopy(saved)
    if not named:
        del state["optimizers"]["net"]["kind"]
    carried = restore(run, state)
    mechanism.train(run, [parts.batch(1)])
    return run, str(carried.get("net", ""))


def test_every_optimizer_goes_on_from_every_other() -> None:
    states = {name: unpack(*pack(capture(trained({"name": name})))) for name in OPTIMIZERS}
    keys = {
        name: {
            key
            for state in trained({"name": name}).optimizers["net"].state.values()
            for key in state
        }
        for name in OPTIMIZERS
    }
    for before, now in permutations(OPTIMIZERS, 2):
        run, said = change(states[before], {"name": now})
        together = any({before, now} <= family for family in FAMILIES)
        assert {key for state in run.optimizers["net"].state.values() for key in state} == keys[now]
        assert ("kept" in said) is together, (before, now, said)
        assert together or "dropped " in said


def test_what_is_dropped_begins_anew_and_not_from_what_has_its_name() -> None:
    run, said = change(capture(trained({"name": "adamw"})), {"name": "lion"})
    weights = list(run.task.net.parameters())
    size = sum(weight.numel() for weight in weights)
    assert said == (
        f"optimizer AdamW -> Lion: dropped step ({4 * len(weights):,} bytes), exp_avg ({4 * size:,} bytes), "
        f"exp_avg_sq ({4 * size:,} bytes)"
    )
    state = run.optimizers["net"].state
    # of one step
    assert all(torch.allclose(state[p]["exp_avg"], 0.01 * p.grad, atol=1e-8) for p in weights)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"name": "adam"}, {"name": "adam", "amsgrad": True}, "converted max_exp_avg_sq"),
        ({"name": "adam", "amsgrad": True}, {"name": "adam"}, "dropped max_exp_avg_sq"),
        ({"name": "rmsprop"}, {"name": "rmsprop", "momentum": 0.9}, "converted momentum_buffer"),
        ({"name": "rmsprop", "momentum": 0.9}, {"name": "rmsprop"}, "dropped momentum_buffer"),
        ({"name": "sgd"}, {"name": "sgd", "momentum": 0}, "dropped momentum_buffer"),
    ],
    ids=lambda value: str(value),
)
def test_what_a_changed_setting_needs_is_made(
    before: dict[str, Any], now: dict[str, Any], told: str
) -> None:
    _, said = change(capture(trained(before)), now)
    assert told in said


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_optimizer_keeps_all_and_says_nothing(optimizer: str) -> None:
    for named in (True, False):
        assert (
            change(capture(trained({"name": optimizer})), {"name": optimizer}, named=named)[1] == ""
        )


@pytest.mark.parametrize("now", ["fp32", "bf16-sr"])
def test_a_compensation_goes_with_the_mode_that_keeps_it(now: str) -> None:
    run, said = change(capture(trained({"name": "adam"}, "bf16-kahan")), {"name": "adam"}, now)
    assert not any("compensation" in state for state in run.optimizers["net"].state.values())
    assert ("dropped compensation" in said) is (now == "fp32")  # in bf16-sr the weights take it up


@pytest.mark.parametrize(("is_named", "name"), [(True, "AdamW"), (False, "adamw")])
def test_a_resume_says_what_became_of_the_state(
    is_named: bool,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def train(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(
                [
                    "train",
                    *words,
                    "train.epochs=null",
                    "model.features=4",
                    "--runs",
                    str(tmp_path),
                    "--device",
                    "cpu",
                ]
            )
        said = capsys.readouterr()
        assert ended.value.code == 0, said.err
        return said.err

    with monkeypatch.context() as changed:
        if not is_named:  # a checkpoint of before
            changed.setattr("mpt.engine.state.state.lineage", lambda optimizer: [])
        train("@classify_digits", "train.steps=2", "optimizer=null", "optimizer.name=adamw")
    said = train(
        "@classify_digits",
        "train.steps=4",
        "optimizer=null",
        "optimizer.name=schedule_free",
        "--resume",
    )
    assert f"net: optimizer {name} -> ScheduleFreeAdamW: dropped step (" in said
    assert "not bit-exact: the optimizer of net changed since the checkpoint" in said
    (run,) = tmp_path.iterdir()
    kinds = [json.loads(line)["kind"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert kinds.count("optimizer_state") == 1
