"""keep_fp32 where weights are shared and where modules are entered by other ways than forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.precision.shared.module_state import module_state
from mpt.seams import Loss, Phase
from tests.engine import parts


class Tied(nn.Module):
    """An embedding and an output layer that share their weight, with a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.body, self.head = (
            nn.Embedding(6, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 6, bias=False),
        )
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.words(tokens)))


class Coder(nn.Module):
    """Entered by `encode` and `decode`, never by forward."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(4, 3), nn.Linear(3, 4)
        self.seen: list[torch.dtype] = []

    def encode(self, x: Tensor) -> Tensor:
        code = self.down(x) @ torch.eye(3, dtype=x.dtype)
        self.seen.append(code.dtype)
        return code

    def decode(self, code: Tensor, *, gain: Tensor) -> Tensor:
        return nn.functional.linear(code, self.up.weight) * gain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.coder, self.last = nn.Linear(4, 4), Coder(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(self.coder.decode(self.coder.encode(h), gain=h.mean()))


def prepared(net: nn.Module, mode: str, keep: str) -> Any:
    settings = {"mode": mode, "dtype": "bfloat16", "keep_fp32": [keep]}
    precision = parts.mode(settings)
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision.prepare(task)
    return precision


@pytest.mark.parametrize("keep", ["net.words", "net.head"])
@pytest.mark.parametrize("mode", ["O2", "O3", "bf16-pure"])
def test_a_weight_that_a_float32_module_shares_stays_one_and_float32(mode: str, keep: str) -> None:
    torch.manual_seed(0)
    net = Tied()
    precision = prepared(net, mode, keep)
    assert net.words.weight is net.head.weight
    assert net.words.weight.dtype == torch.float32
    assert net.body.weight.dtype == torch.bfloat16
    parameters = precision.parameters(net)
    assert len(parameters) == len(set(parameters)) == 3
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    phase = Phase("net", net, optimizer, lambda batch: iter([Loss("loss", batch["x"])]))
    precision.bind([phase])
    before = net.words.weight.detach().clone()
    tokens = torch.arange(6)
    with precision.forward():
        out = net(tokens)
    precision.backward(nn.functional.cross_entropy(out, tokens.flip(0)), phase)
    gradient = net.words.weight.grad.clone()
    precision.step(phase, None)
    assert net.words.weight is net.head.weight
    assert torch.equal(net.words.weight, before - 0.5 * gradient)
    assert torch.equal(module_state(precision, net)["head.weight"], net.words.weight)


@pytest.mark.parametrize("mode", ["amp", "O1", "O2", "O3"])
def test_a_float32_module_holds_by_whichever_method_it_is_entered(mode: str) -> None:
    net = Net()
    precision = prepared(net, mode, "net.coder")
    with precision.forward():
        out = net(torch.rand(2, 4))
    assert net.coder.seen == [torch.float32]
    out.float().sum().backward()
    assert all(
        p.grad is not None for p in (net.first.weight, net.coder.up.weight, net.coder.down.weight)
    )
    assert net.coder.up.weight.dtype == torch.float32
