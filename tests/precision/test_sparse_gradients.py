"""Embeddings with sparse gradients: unscaled, clipped and accumulated like any other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.precision.shared.module_state import module_state
from mpt.precision.shared.scaler import LossScaler, clip_gradients, stored_gradients
from mpt.seams import Loss, Phase
from tests.engine.parts import mode as build_mode

TOKENS = torch.tensor([1, 2, 2, 3, 1])


class Words:
    """The least that a precision mode asks of a task."""

    def __init__(self, sparse: bool) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(5, 4, sparse=sparse), nn.Linear(4, 2))
        self.modules = self.trainable = {"net": self.net}


def one_step(mode: str, sparse: bool, clip_norm: float | None = None, parts: int = 1) -> Tensor:
    """Return the embedding after one step of SGD under a mode with its dynamic scale."""
    settings = {"mode": mode, "dtype": "float16", "init_scale": 256.0}
    precision = build_mode(settings)
    task: Any = Words(sparse)
    precision.prepare(task)
    optimizer = torch.optim.SGD(precision.parameters(task.net), lr=0.1)
    phase = Phase("net", task.net, optimizer, lambda batch: iter([Loss("loss", batch["x"])]))
    precision.bind([phase])
    for tokens in TOKENS.chunk(parts):
        with precision.forward():
            out = task.net(tokens)
        precision.backward(out.float().square().sum(), phase)
    assert not precision.step(phase, clip_norm).skipped
    return module_state(precision, task.net)["0.weight"].float()  # type: ignore[no-any-return]


@pytest.mark.parametrize("clip_norm", [None, 0.01])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("mode", ["amp", "O1", "O2"])
def test_a_sparse_embedding_learns_as_its_dense_twin_does(
    mode: str, parts: int, clip_norm: float | None
) -> None:
    dense, sparse = (one_step(mode, each, clip_norm, parts) for each in (False, True))
    assert torch.allclose(dense, sparse, rtol=1e-3, atol=1e-6)


# torch 2.11 says so once, of its own product
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_an_uncoalesced_gradient_is_divided_by_the_scale(dtype: torch.dtype) -> None:
    table = nn.Embedding(4, 2, sparse=True).to(dtype)
    table.weight.grad = torch.sparse_coo_tensor(
        [[1, 1, 3]], torch.full((3, 2), 128.0, dtype=dtype), (4, 2), check_invariants=True
    )
    assert LossScaler(64.0).unscale(table.parameters()) is False
    assert torch.equal(
        table.weight.grad.to_dense(),
        torch.tensor([0, 4, 0, 2.0], dtype=dtype)[:, None].expand(4, 2),
    )


def test_a_sum_of_finite_rows_that_overflows_is_an_overflow() -> None:
    table = nn.Embedding(4, 2, sparse=True).half()
    rows = torch.full((2, 2), 60000.0, dtype=torch.float16)
    table.weight.grad = torch.sparse_coo_tensor([[1, 1]], rows, (4, 2), check_invariants=True)
    assert LossScaler(1.0).unscale(table.parameters()) is True


def test_the_norm_of_a_sparse_gradient_counts_repeated_rows_as_their_sum() -> None:
    parameters = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))]
    rows = torch.tensor([[1.0, 2.0], [2.0, 0.0]])
    parameters[0].grad = torch.sparse_coo_tensor([[1, 1]], rows, (4, 2), check_invariants=True)
    parameters[1].grad = torch.tensor([6.0, 0.0, 0.0])
    assert float(clip_gradients(parameters, 3.5)) == 7.0  # of (3, 2) and 6
    norm = torch.cat([g.flatten() for g in stored_gradients(parameters)]).norm()
    assert float(norm) == pytest.approx(3.5, rel=1e-5)


# torch 2.11 says so once, of its own product
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(("limit", "factor"), [(1.0, 1.0), (0.5, 1.0), (0.25, 0.5)])
def test_a_sparse_gradient_is_scaled_down_to_the_limit_and_never_up_to_it(
    limit: float, factor: float
) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    row = torch.tensor([[0.3, 0.4]])  # a norm of 0.5
    table.weight.grad = torch.sparse_coo_tensor([[1]], row.clone(), (4, 2), check_invariants=True)
    assert float(clip_gradients([table.weight], limit)) == pytest.approx(0.5)
    assert torch.allclose(table.weight.grad.to_dense()[1], factor * row[0], rtol=1e-5)
