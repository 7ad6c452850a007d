"""An ONNX file of a network that returns several tensors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.inference.export import write_onnx
from mpt.inference.exported import attach, open_session


class Heads(nn.Module):
    """Two heads, whose outputs have names."""

    def __init__(self) -> None:
        super().__init__()
        self.label, self.place = nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"logits": self.label(image), "centre": self.place(image)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_outputs_by_name_have_their_names_in_the_file_and_when_it_computes(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason="ONNX files are written and run with it")
    network, images = Heads(), torch.rand(3, 4, generator=torch.Generator().manual_seed(0))
    expected = network(images)
    assert "differs from PyTorch's by" in write_onnx(
        tmp_path / "heads.onnx", network, (images,), dtype
    )
    session = open_session(tmp_path / "heads.onnx")
    assert [one.name for one in session.get_outputs()] == ["logits", "centre"]
    task: Any = SimpleNamespace(modules={"net": Heads()})
    attach(task, ["net"], False, session)
    made = task.modules["net"](images)
    assert list(made) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(made[name], value, atol=5e-3, rtol=0)
