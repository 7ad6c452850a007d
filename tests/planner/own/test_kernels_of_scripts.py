"""Kernels that a script writes in Triton."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.planner.client.session import Session
from tests.planner.own.test_scripts import planned, script_of

pytest.importorskip("triton")

TEXT = """
import torch
import triton
import triton.language as tl

@triton.jit
def double(given, result, count, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + places, 2 * tl.load(given + places))

tuned = triton.autotune([triton.Config({"BLOCK": 64})], key=["count"])(double)

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, given):
        result = torch.empty_like(given)
        double[(2,)](given, result, given.numel(), BLOCK=64)
        return result

    @staticmethod
    def backward(ctx, gradient):
        result = torch.empty_like(gradient)
        tuned[lambda meta: (128 // meta["BLOCK"],)](gradient, result, gradient.numel())
        return result

layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for _ in range(9):
    optimizer.zero_grad()
    Doubled.apply(layer(torch.rand(2, 64, device="cuda"))).sum().backward()
    optimizer.step()
"""


def test_kernels_in_triton_are_planned_with_their_tensors(session: Session, tmp_path: Path) -> None:
    plan = planned(session, script_of(tmp_path, TEXT)).plan
    assert plan.by_category["parameters"] == plan.by_category["gradients"] == 4 * 64 * 64 + 512
    assert any("4 calls of kernels in Triton" in note for note in plan.notes)
