"""Whole scripts that do as those of large libraries: their metrics, transforms, samplers and copies."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.planner.client.session import Session
from tests.planner.own.test_scripts import planned, script_of

HEAD = """
import torch
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(9):
    optimizer.zero_grad()
    found = layer(torch.rand(2, 64, device="cuda"))
    found.sum().backward()
    optimizer.step()
"""
WEIGHTS = 4 * 64 * 64 + 512

ACCURACY = """
    with torch.inference_mode():
        places = found.topk(5, 1)[1].t()
        right = places.eq(torch.zeros(2, dtype=torch.long, device="cuda")[None])
        share = right[:1].flatten().sum(dtype=torch.float32)
    print(share.item(), float(share), share.cpu().numpy())
"""
CHOICE = """
    sizes = [640, 672, 704]
    print(sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())])
"""


@pytest.mark.parametrize("further", [ACCURACY, CHOICE], ids=["inferred", "chosen"])
def test_a_step_with_more_than_a_step_is_planned(
    session: Session, tmp_path: Path, further: str
) -> None:
    held = planned(session, script_of(tmp_path, HEAD + further)).plan.by_category
    assert held["parameters"] == held["gradients"] == WEIGHTS
