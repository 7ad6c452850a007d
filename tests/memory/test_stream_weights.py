"""Weights that travel: exact with everything around them, at most two blocks here, and refused by name where not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.recovery.ladder import with_memory
from mpt.engine.state.state import capture, restore
from mpt.errors import ConfigError
from mpt.memory import stream_weights
from mpt.memory.stream_weights import Settings, StreamWeights, spread
from mpt.memory.travelling.streaming import make_streamed
from mpt.memory.travelling.weight_traffic import Copies, Stream, Traffic
from mpt.run.checkpoints.state import pack, unpack
from mpt.seams import Run
from tests.engine import parts
from tests.memory import mechanism

ALL = {"stream_weights": {"min_kibibytes": 0}}
HALF = {"stream_weights": {"fraction": 0.5, "min_kibibytes": 0}}
VIT = "tests.planner.models:TinyViT"


def vit(precision: Any = "fp32", memory: Any = None, **sections: Any) -> Run:
    data = {
        "model": {"name": VIT, "image_size": 16, "channels": 1},
        "dataset": {"name": "digits", "image_size": 16},
        "precision": precision,
        "optimizer": {"name": "adam", "lr": 0.01},
        "train": {"steps": 4, "batch_size": 8, **sections.pop("train", {})},
        "memory": memory or {},
        **sections,
    }
    return build_run(load_config(data, allow=("tests",)), torch.device("cpu"), parts.DIGITS)


@pytest.mark.parametrize(
    ("precision", "beside"),
    [
        ("bf16", {}),
        ("O2", {"recompute": "all"}),
        ("bf16", {"recompute": {"budget": 0.3, "per": "tensor"}}),
    ],
)
def test_a_transformer_with_its_average_trains_to_the_same_bits(
    precision: str, beside: dict[str, Any]
) -> None:
    plain, run = (vit(precision, {**beside, **more}, task={"ema": 0.9}) for more in ({}, ALL))
    for one in plain, run:
        mechanism.train(one, [parts.batch(seed) for seed in range(2)])
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))
    evidence = [one.task.evaluate_batch(parts.batch(3)) for one in (plain, run)]
    assert all(torch.equal(evidence[0][name], evidence[1][name]) for name in evidence[0])


def test_at_most_two_blocks_have_copies_and_the_next_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = vit("bf16", ALL)
    mechanism.train(run, [parts.batch()])  # blocks are known from now on
    here: list[tuple[bool, int, list[int]]] = []
    alive: list[Tensor] = []
    bring, send = Stream.bring, Traffic.send

    def spy(self: Stream, block: Any) -> Copies:
        copies = bring(self, block)
        here.append((torch._C._current_graph_task_id() >= 0, block.stream_order, sorted(self.here)))
        return copies

    def count(self: Traffic, parameters: list[nn.Parameter]) -> Any:
        copies, arrived = send(self, parameters)
        alive.extend(copies.values())
        return copies, arrived

    monkeypatch.setattr(Stream, "bring", spy)
    monkeypatch.setattr(Traffic, "send", count)
    mechanism.train(run, [parts.batch()])
    last = max(order for _, order, _ in here)
    assert last > 0
    forward = [(order, held) for backward, order, held in here if not backward]
    assert forward == [
        (order, [order, order + 1][: 1 + (order < last)]) for order in range(last + 1)
    ]
    backward = {(order, tuple(held)) for walks_back, order, held in here if walks_back}
    assert backward == {(order, (order - 1, order)[order == 0 :]) for order in range(last + 1)}
    trick = run.tricks[0]
    assert isinstance(trick, StreamWeights)
    assert trick.traffic is not None
    assert len(alive) == (2 * last + 1) * len(trick.chosen[0].travelling()), (
        "each block goes twice, the last one once"
    )
    assert not any(stream.here for stream in trick.traffic.streams)


def test_no_copy_is_kept_from_forward_to_backward() -> None:
    parameters = list(vit().task.modules["net"].parameters())
    plain, run = (
        mechanism.saved_bytes_of_losses(vit("bf16", memory), parts.batch()) for memory in ({}, ALL)
    )
    halves = sum(2 * p.numel() for p in parameters if p.dim() > 1)
    assert plain - run > 0.5 * halves, "casts of weights are kept too"


def test_a_run_goes_on_from_a_checkpoint_with_or_without() -> None:
    batches = [parts.batch(seed) for seed in range(4)]
    through, first, second = vit("bf16"), vit("bf16", ALL), vit("bf16", HALF)
    mechanism.train(through, batches[:2])
    mechanism.train(first, batches[:2])
    restore(second, unpack(*pack(capture(first))))
    mechanism.train(through, batches[2:])
    mechanism.train(second, batches[2:])
    assert mechanism.same(mechanism.state(through), mechanism.state(second))


def test_frozen_blocks_travel_in_ways_that_trained_ones_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trained weights travel, .*leave out memory.optimizer_in_backward"
    ):
        vit(memory={**ALL, "optimizer_in_backward": True})
    run = vit(memory=ALL)
    beside = replace(run, config=with_memory(run.config, {"low_bit_optimizer": True}))
    with pytest.raises(
        ConfigError, match=r"8-bit states are on the device; use memory.cpu_optimizer"
    ):
        run.tricks[0].attach(beside)
    with pytest.raises(ConfigError, match="bf16-sr takes the optimizer's steps"):
        vit("bf16-sr", ALL)
    with pytest.raises(
        ConfigError,
        match=r"a Block travels as a whole here, and memory.recompute .* part mlp again",
    ):
        vit(memory={**ALL, "recompute": {"modules": ["net.blocks.0.mlp"]}})
    frozen = {
        "train": {"freeze": ["net.blocks.*"]},
        "memory": {**ALL, "optimizer_in_backward": True},
    }
    plain, run = vit(**{**frozen, "memory": {}}), vit(**frozen)
    for one in plain, run:
        mechanism.train(one, [parts.batch()])
    assert run.tricks[0].exact
    assert mechanism.same(mechanism.state(plain), mechanism.state(run))


class Halves(nn.Module):
    """A network whose block casts its weight in two parts, as attention does that reads queries elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Split(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)  # type: ignore[no-any-return]


class Split(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([functional.linear(input, part) for part in self.weight.chunk(2)], -1)


class Twice(nn.Module):
    """A network that runs one block twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        once: Tensor = self.block(x)
        return self.block(once)  # type: ignore[no-any-return]


def test_a_block_that_runs_twice_is_exact_in_float32_and_refused_where_gradients_add_up_in_half() -> (
    None
):
    torch.manual_seed(0)
    plain, net, x = Twice(), Twice(), torch.randn(4, 8)
    net.load_state_dict(plain.state_dict())
    net.block.travelling_names = ("weight",)  # type: ignore[assignment]
    make_streamed(net.block, Stream(Traffic(torch.device("cpu"))), 0)
    for one in plain, net:
        one(x).square().sum().backward()
    assert plain.block.weight.grad is not None
    assert net.block.weight.grad is not None
    assert torch.equal(plain.block.weight.grad, net.block.weight.grad)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ConfigError, match="a Linear runs more than once"),
    ):
        net(x)


def test_a_weight_that_is_cast_in_parts_is_none_that_runs_twice() -> None:
    torch.manual_seed(0)
    plain, net, x = Halves(), Halves(), torch.randn(4, 8)
    net.load_state_dict(plain.state_dict())
    net.block.travelling_names = ("weight",)  # type: ignore[assignment]
    make_streamed(net.block, Stream(Traffic(torch.device("cpu"))), 0)
    for one in plain, net, net:
        one.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = one(x).float().square().sum()
        loss.backward()
    assert plain.block.weight.grad is not None
    assert net.block.weight.grad is not None
    assert torch.equal(plain.block.weight.grad, net.block.weight.grad)


def test_weights_come_back_for_good_and_names_stay() -> None:
    run = vit(memory=ALL)
    before = mechanism.state(run)
    for trick in run.tricks:
        trick.fold(run.task.modules)
    assert mechanism.same(before, mechanism.state(run))
    assert not any(
        hasattr(module, "travelling_names") for module in run.task.modules["net"].modules()
    )


def test_blocks_are_counted_and_spread() -> None:
    blocks: list[nn.Module] = [nn.Identity() for _ in range(8)]
    assert [blocks.index(one) for one in spread(blocks, Settings(fraction=0.25).count(8))] == [3, 7]
    assert Settings(blocks=20).count(8) == Settings().count(8) == 8
    with pytest.raises(ValueError, match="give one of fraction and blocks"):
        Settings(fraction=0.5, blocks=2)


def test_a_network_without_blocks_or_with_light_ones_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"found no blocks .* of 64 KiB or more in net"):
        vit(memory={"stream_weights": True})
    assert stream_weights.RELIEVES == "weights"


def test_a_weight_that_two_layers_share_stays_on_the_device() -> None:
    """Only one of them would look for it on the host, and a layer outside of the blocks never would."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(4)))
    head = nn.Linear(8, 8, bias=False)
    net[1][0].weight = net[2][0].weight
    net[3][0].weight = head.weight
    trick = StreamWeights(Settings(min_kibibytes=0))
    trick.host({"net": net, "head": nn.Sequential(head)}, torch.device("cpu"))
    travelling = {id(weight) for block in trick.chosen for weight in block.travelling()}
    assert travelling == {id(net[0][0].weight)}
