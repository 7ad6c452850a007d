"""O2, O3 and the pure modes cast a network's inputs and outputs, by whichever method it is entered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpt.errors import ConfigError
from tests.engine import parts

MODES = ["O2", "O3", "bf16-pure", "bf16-sr"]


class Coder(nn.Module):
    """A network of several entries: forward, its halves, and one without floating inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.names = nn.Linear(4, 3), nn.Linear(3, 4), nn.Embedding(5, 4)
        self.inside: list[torch.dtype] = []

    def encode(self, x: Tensor) -> Tensor:
        self.inside.append(x.dtype)
        code: Tensor = self.down(x)
        return code

    def decode(self, code: Tensor) -> dict[str, Tensor]:
        return {"image": self.up(code)}

    def named(self, name: Tensor) -> Tensor:
        return self.encode(self.names(name))

    def wide(self, x: Tensor) -> Tensor:
        return self(x) + 1

    def forward(self, x: Tensor) -> Tensor:
        code = checkpoint(self.encode, x, use_reentrant=False)
        return self.decode(code)["image"]


def prepared(mode: str) -> Any:
    torch.manual_seed(0)
    net: Any = Coder()
    precision = parts.mode({"mode": mode, "dtype": "bfloat16"})
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision.prepare(task)
    return net


@pytest.mark.parametrize("mode", MODES)
def test_every_method_takes_and_returns_float32_and_computes_in_half(mode: str) -> None:
    net, x = prepared(mode), torch.rand(2, 4)
    code = net.encode(x)
    image = net.decode(code)["image"]
    assert (code.dtype, image.dtype) == (torch.float32, torch.float32)
    assert torch.equal(image, net(x))
    assert torch.equal(net.wide(x), (net(x).bfloat16() + 1).float())
    assert net.named(torch.tensor([1])).dtype == torch.float32
    assert set(net.inside) == {torch.bfloat16}
    image.sum().backward()
    assert net.down.weight.grad is not None


@pytest.mark.parametrize("mode", MODES)
def test_a_method_that_the_network_calls_itself_is_left_alone_also_when_recomputed(
    mode: str,
) -> None:
    net = prepared(mode)
    net(torch.rand(2, 4)).sum().backward()
    assert net.inside == [torch.bfloat16, torch.bfloat16]
    assert net.down.weight.grad is not None


class Tied(nn.Module):
    """A head that takes the embedding's weight without owning it."""

    def __init__(self, casts: bool = False) -> None:
        super().__init__()
        self.levels, self.body, self.casts = nn.Embedding(9, 4), nn.Linear(4, 4), casts

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        hidden = self.body(self.levels(index))
        weight = self.levels.weight.to(hidden.dtype) if self.casts else self.levels.weight
        return nn.functional.linear(hidden, weight)


def tied(mode: str, kept: str, casts: bool = False) -> torch.Tensor:
    net = Tied(casts)
    precision = parts.mode({"mode": mode, "dtype": "bfloat16", "keep_fp32": [kept]})
    precision.prepare(type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}}))
    return net(torch.tensor([1, 2]))


@pytest.mark.parametrize("mode", MODES)
def test_a_float32_weight_that_half_meets_elsewhere_is_named_with_the_way_out(mode: str) -> None:
    with pytest.raises(
        ConfigError, match=r"precision.keep_fp32: levels of Tied stay in float32.* same dtype"
    ):
        tied(mode, "net.levels")
    assert tied(mode, "*").dtype == torch.float32
    assert tied(mode, "net.levels", casts=True).dtype == torch.float32


@pytest.mark.parametrize("mode", ["O3", "bf16-pure", "bf16-sr"])
def test_a_network_that_is_not_trained_keeps_the_bits_it_was_loaded_with(mode: str) -> None:
    torch.manual_seed(0)
    networks: dict[str, nn.Module] = {"net": nn.Linear(4, 4), "teacher": nn.Linear(4, 4)}
    before = {key: value.clone() for key, value in networks["teacher"].state_dict().items()}
    assert not torch.equal(before["weight"], before["weight"].bfloat16().float()), (
        "no number that half cannot hold"
    )
    precision = parts.mode({"mode": mode, "dtype": "bfloat16"})
    precision.convert(networks)
    task: Any = type("Task", (), {"modules": networks, "trainable": {"net": networks["net"]}})
    precision.prepare(task)
    assert networks["net"].weight.dtype == torch.bfloat16
    after = networks["teacher"].state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_frozen_weights_of_a_trained_network_have_no_masters() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].requires_grad_(False)
    precision = parts.mode({"mode": "O2", "dtype": "bfloat16"})
    task: Any = type("Task", (), {"modules": {"net": net}, "trainable": {"net": net}})
    precision.prepare(task)
    assert set(precision.masters) == set(net[1].parameters())
