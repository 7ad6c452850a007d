"""The report of a run whose memory ran out, under a limit that the pretended card's allocator keeps."""

import json
import pickle
import re
import shlex
from pathlib import Path

import pytest
import torch

from mpt.config.text.yaml_text import read_file
from tests.cuda_rehearsal.programs import CLASSIFIER, mpt, train
from tests.cuda_rehearsal.torch_cuda import installed

MIB = 2**20
WIDE = CLASSIFIER.replace("features: 4", "features: 64").replace(
    "batch_size: 32", "batch_size: 1024"
)


@pytest.mark.cards("rtx2060")
def test_the_recipe_of_the_report_trains_within_the_limit(tmp_path: Path) -> None:
    (card,) = installed().memory.cards
    card.others_bytes = card.capacity_bytes - 160 * MIB
    said = train(tmp_path, WIDE, "train.steps=2", "memory.on_oom=stop")
    assert said.code == 7, said
    assert "for this process, of 6,144 MiB on NVIDIA GeForce RTX 2060; measured peak" in said.text
    assert "planned peak: " in said.text
    snapshot = tmp_path / "runs/run/memory_snapshot.pickle"
    assert "segments" in pickle.loads(snapshot.read_bytes())
    assert "torch's snapshot of it: " in said.text
    patch = tmp_path / "runs/run/plan.yaml"
    assert read_file(patch)[0].plain()
    command = next(line for line in said.text.splitlines() if line.strip().startswith("mpt train"))
    again = mpt(*shlex.split(command)[1:])
    assert again.code == 0, again
    memory = json.loads((tmp_path / "runs/run/summary.json").read_text())["peak_memory"]
    promised = re.search(r"([\d,]+) MiB planned instead of ([\d,]+) MiB", said.text)
    assert promised, said
    planned, before = (int(figure.replace(",", "")) * MIB for figure in promised.groups())
    assert memory["steps_peak_bytes"] == pytest.approx(planned, rel=0.02)
    assert planned < before


@pytest.mark.cards("rtx2060")
def test_weights_that_find_no_room_are_said_to_be_too_much(tmp_path: Path) -> None:
    (card,) = installed().memory.cards
    card.others_bytes = card.capacity_bytes - 4 * MIB
    said = train(tmp_path, WIDE.replace("features: 64", "features: 256"), "train.steps=1")
    assert said.code == 7, said
    assert "before the first step" in said.text
    assert "the weights alone are too much for cuda" in said.text
    assert "other programs hold 6,1" in said.text, said


@pytest.mark.cards("rtx2060")
def test_the_budget_is_what_others_leave_and_the_process_may_have() -> None:
    from mpt.planner.facts.calibration import load_calibration
    from mpt.workflows.training.out_of_memory_report import find_budget

    (card,) = installed().memory.cards
    context = load_calibration("rtx2060").context_bytes
    held = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    whole = find_budget(torch.device("cuda"), "")
    assert whole.gpu.name == "rtx2060"
    assert "measured peak 64 MiB" in whole.text
    card.others_bytes = 1024 * MIB
    assert find_budget(torch.device("cuda"), "").limit_bytes == whole.limit_bytes - 1024 * MIB
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(0.25)
    assert find_budget(torch.device("cuda"), "").limit_bytes == total // 4 + context
    del held
