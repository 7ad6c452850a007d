"""A pretend card whose driver moves what does not fit into system memory, as on Windows; the rest of a run is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpt.engine.state import spill_watch
from mpt.run.process import operating_system
from tests.cuda_rehearsal.programs import CLASSIFIER, train
from tests.cuda_rehearsal.torch_cuda import installed

MIB = 2**20
WIDE = CLASSIFIER.replace("features: 4", "features: 64").replace(
    "batch_size: 32", "batch_size: 1024"
)


def spilling_card(free_bytes: int) -> object:
    """Make this process's card one that spills beyond `free_bytes`, on a system that is known to."""
    (card,) = installed().memory.cards
    card.others_bytes = card.capacity_bytes - free_bytes
    card.spills = True
    operating_system.moves_overflow = lambda: True
    return card


def events_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.cards("rtx2060")
def test_without_a_ceiling_a_training_spills_and_the_watch_names_the_driver_s_setting(
    tmp_path: Path,
) -> None:
    card = spilling_card(160 * MIB)
    said = train(tmp_path, WIDE, "train.steps=2", "train.log_every=1", "memory.ceiling=null")
    assert said.code == 0, said
    assert card.peak_reserved > 160 * MIB
    assert (
        "more are in use than the card has: the driver has moved memory of this training"
        in said.text
    )
    assert "CUDA - Sysmem Fallback Policy" in said.text
    (event,) = [one for one in events_of(tmp_path / "runs/run") if one["kind"] == "spill"]
    assert event["beyond_bytes"] > 0


@pytest.mark.cards("rtx2060")
def test_the_ceiling_turns_a_spill_into_an_answered_out_of_memory(tmp_path: Path) -> None:
    card = spilling_card(160 * MIB)
    said = train(tmp_path, WIDE, "train.steps=2", "memory.on_oom=stop")
    assert said.code == 7, said
    assert "this system moves what does not fit into system memory" in said.text
    assert "mpt train" in said.text  # the recipe
    assert card.spilled == 0
    (tmp_path / "again").mkdir()
    again = train(tmp_path / "again", WIDE, "train.steps=2", "memory.on_oom=adapt")
    assert again.code == 0, again
    assert card.peak_reserved <= 160 * MIB
    assert "moved memory of this training" not in again.text


@pytest.mark.slow
@pytest.mark.cards("rtx2060")
def test_a_ceiling_of_a_size_holds_on_a_card_that_refuses_too(tmp_path: Path) -> None:
    import torch

    from mpt.planner.facts.calibration import load_calibration

    said = train(tmp_path, WIDE, "train.steps=1", "memory.on_oom=stop", "memory.ceiling=610MiB")
    assert said.code == 7, said
    assert "memory.ceiling=610MiB" in said.text
    (card,) = installed().memory.cards
    allowed = 610 * MIB - load_calibration("rtx2060").context_bytes
    assert card.peak_reserved <= allowed
    assert torch.cuda.get_per_process_memory_fraction(0) == pytest.approx(
        allowed / card.total_bytes
    )
    little = train(tmp_path, WIDE, "train.steps=1", "memory.ceiling=200MiB")
    assert little.code == 2
    assert "memory.ceiling: 200MiB leaves nothing beside a context of" in little.text


@pytest.mark.cards("rtx2060")
def test_where_the_driver_refuses_nothing_is_limited_by_default(tmp_path: Path) -> None:
    import torch

    said = train(tmp_path, CLASSIFIER, "train.steps=1")
    assert said.code == 0, said
    assert torch.cuda.get_per_process_memory_fraction(0) == 1
    assert "tensors may take" not in said.text


@pytest.mark.cards("rtx2060")
def test_a_full_card_with_slow_steps_is_named_once(tmp_path: Path) -> None:
    import torch

    spilling_card(256 * MIB)
    watch = spill_watch.SpillWatch(torch.device("cuda"))
    # slow, and not full
    assert [watch.look(seconds) for seconds in (9.0, 1.0, 1.1, 0.9, 5.0)] == [None] * 5
    held = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda")
    assert watch.look(1.5) is None
    text, figures = watch.look(4.4) or ("", {})
    assert "the card is full and steps take 4.0 times as long as before" in text
    assert figures == {"beyond_bytes": 0, "slower": 4.0}
    assert watch.look(9.0) is None
    del held
