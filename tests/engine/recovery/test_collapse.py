"""A game between networks is watched: samples that are all alike, loss scales that fall, losses that part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpt.config.schema import Collapse
from mpt.engine.recovery.collapse import HISTORY, CollapseWatch
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from tests.engine.recovery.test_recovery import start

KINDS = ("collapse", "rollback", "remedy")


def watch(floor: float = 1.0, bounded: bool = True, **limits: Any) -> CollapseWatch:
    settings = Collapse.model_validate({"after": 0, "patience": 3, **limits})
    return CollapseWatch(settings, ("disc", "gen"), bounded, {"gen": floor})


def lines(
    watched: CollapseWatch, disc: float, gen: float, count: int, scale: float = 1024.0
) -> list[dict[str, str]]:
    losses = {"disc/real": disc / 2, "disc/fake": disc / 2, "gen/loss": gen, "gen_path/loss": 9.0}
    return [watched.look_at_line(step, losses, {"gen": scale}) for step in range(count)]


def test_losses_that_leave_their_own_range_for_long_are_a_sign() -> None:
    watched = watch()
    assert lines(watched, 1.0, 1.0, HISTORY) == [{}] * HISTORY
    assert lines(watched, 0.02, 1.0, 2) == [{}, {}]
    assert lines(watched, 1.0, 1.0, 1) == [{}]  # it came back
    *before, found = lines(watched, 0.02, 1.0, 3)
    assert before == [{}, {}]
    assert "discriminator's loss has become small" in found["ratio"]
    assert "is 0.02 and was 1 to 1 until" in found["ratio"]
    assert not watched.is_quiet
    (found,) = lines(watch(patience=1), 1.0, 1.0, HISTORY)[-1:]
    assert found == {}
    critic = watch(bounded=False)
    assert lines(critic, 1.0, 1.0, HISTORY) + lines(critic, 1e-6, 1.0, 9) == [{}] * (HISTORY + 9)


def test_a_loss_scale_that_falls_or_stays_at_its_floor_is_a_sign() -> None:
    watched = watch()
    scales = [1024.0, 512.0, 256.0, 256.0, 128.0, 64.0, 32.0]
    found = [lines(watched, 1.0, 1.0, 1, scale)[0] for scale in scales]
    assert found[:-1] == [{}] * 6
    assert found[-1]["scale"] == "gen: the loss scale has fallen at 3 log lines in a row (now 32)"
    assert "has been at its floor" in lines(watch(), 1.0, 1.0, 3, 1.0)[-1]["scale"]
    assert lines(watch(after=99), 1.0, 1.0, 9, 1.0)[-1] == {}  # the run is young


@pytest.mark.parametrize("action", ["advise", "rollback"])
def test_samples_that_are_alike_are_told_and_returned_from_and_looking_changes_no_bit(
    tmp_path: Path, action: str
) -> None:
    """No generator is as varied as this asks."""
    weights = {}
    for name, collapse in (
        ("plain", {"samples": 0}),
        ("watched", {"after": 2, "every": 1, "samples": 8, "diversity": 1e3, "patience": 2}),
    ):
        (tmp_path / name).mkdir()
        path = start(
            tmp_path / name,
            model={"name": "vanilla_gan", "image_size": 8},
            task={"metric_samples": 8, "preview_count": 4},
            train={
                "steps": 6,
                "batch_size": 16,
                "log_every": 1,
                "checkpoint_every": 3,
                "on_collapse": action,
                "max_rollbacks": 1,
                "plan_memory": False,
                "collapse": collapse,
            },
        )
        weights[name] = checkpoint.load(open_run(path)).state["modules"]
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        told = [
            (event["kind"], event["step"], event["message"])
            for event in events
            if event["kind"] in KINDS
        ]
        if name == "plain":
            assert told == []
            continue
        assert told[0][:2] == ("collapse", 3)
        assert (
            "times as much as the data at 2 looks in a row: try a lower optimizer.lr" in told[0][2]
        )
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [row for row in rows if row.get("variety", 0) > 0]
        returned = [("rollback", 0), ("remedy", 0), ("collapse", 3)] if action == "rollback" else []
        assert [(kind, step) for kind, step, _ in told[1:]] == returned
    if action == "advise":
        for module, state in weights["plain"].items():
            assert all(
                torch.equal(value, weights["watched"][module][key]) for key, value in state.items()
            )
