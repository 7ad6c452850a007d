"""A graph in float16 keeps those operators in float32 that ONNX Runtime has for it alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mpt.inference.graphs.files import export_graph, open_graph
from mpt.inference.graphs.mixed import named_nodes, to_half


class Splatted(nn.Module):
    """Adds rows of (n, 4) to places of (3, 4), several to one place: a projection of a flow, a histogram."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return the sums."""
        places = torch.arange(8) % 3
        return torch.zeros(3, 4).index_put((places,), rows * 0.5, accumulate=True)


class Scattered(Splatted):
    """The same by elements."""

    def forward(self, rows: Tensor) -> Tensor:
        """Return the sums."""
        places = (torch.arange(8) % 3)[:, None].expand(8, 4)
        return torch.zeros(3, 4).scatter_add(0, places, rows * 0.5)


@pytest.mark.parametrize("network", [Splatted(), Scattered()])
def test_sums_into_places_stay_float32(network: nn.Module, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    export_graph(network, (rows,), tmp_path / "x.onnx", dynamo=True)
    model = to_half(named_nodes(onnx.load(str(tmp_path / "x.onnx"))), ())
    opened = open_graph(model.SerializeToString())
    made = opened.run(None, {opened.get_inputs()[0].name: rows.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(made), network(rows), atol=2e-3, rtol=0)
