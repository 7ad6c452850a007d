"""Recomputation: bit-equal training, fewer saved bytes, more arithmetic, and nothing else changed."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.memory import recompute
from mpt.memory.recomputing import blocks, replay, selective
from mpt.memory.recomputing.dry_run import UnitCost, count_losses, measure_units
from mpt.precision import o1
from mpt.seams import Batch, Loss
from mpt.tasks.classify import Classify
from tests.engine import parts
from tests.memory import mechanism

WAYS: list[Any] = [
    "sqrt",
    "all",
    "selective",
    {"every": 2},
    {"modules": ["*.0"]},
    {"budget": 0.5},
    {"budget": 0.0},
]
WAYS += [{"budget": budget, "per": "tensor"} for budget in (0.0, 0.3, 0.7)]
HALF = {"dtype": "float16", "init_scale": 256.0}
MODES: list[Any] = [
    "fp32",
    "amp",
    {"mode": "amp", **HALF},
    {"mode": "O1", **HALF},
    {"mode": "O2", **HALF},
    "bf16-pure",
]


def classifier(precision: Any = "fp32", way: Any = None, dropout: float = 0.3) -> Any:
    model = {"name": "small_cnn", "features": 4, "image_size": 16, "dropout": dropout}
    return parts.classifier(
        precision, model=model, memory={} if way is None else {"recompute": way}
    )


def gan(precision: Any = "fp32", way: Any = None, **sections: Any) -> Any:
    return parts.gan(precision, memory={} if way is None else {"recompute": way}, **sections)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("make", [classifier, gan])
def test_training_is_bit_equal_with_dropout_and_batchnorm(make: Any, way: Any) -> None:
    batches = [parts.batch(seed) for seed in range(2)]
    plain, trick = make(), make(way=way)
    mechanism.train(plain, batches)
    mechanism.train(trick, batches)
    assert mechanism.same(mechanism.state(plain), mechanism.state(trick))


@pytest.mark.parametrize("way", ["sqrt", "selective"])
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_recomputation_runs_in_the_same_dtypes(mode: Any, way: str) -> None:
    plain, trick = classifier(mode), classifier(mode, way)
    mechanism.train(plain, [parts.batch()])
    mechanism.train(trick, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(trick))


def test_it_saves_bytes_and_costs_arithmetic() -> None:
    batch = parts.batch()
    plain = {
        "bytes": mechanism.saved_bytes_of_losses(classifier(), batch),
        "flops": mechanism.step_flops(classifier(), batch),
    }
    figures = {}
    for way in ("all", "selective", "sqrt"):
        run = classifier(way=way)
        figures[way] = (
            mechanism.saved_bytes_of_losses(run, batch),
            mechanism.step_flops(classifier(way=way), batch),
        )
    for saved, _ in figures.values():
        assert saved < plain["bytes"]
    assert figures["all"][1] > plain["flops"]
    assert figures["sqrt"][1] > plain["flops"]
    assert figures["selective"][1] == plain["flops"]  # convolutions and products are kept


def test_selective_keeps_the_outputs_of_convolutions_and_products_and_nothing_else() -> None:
    kept = selective.KeepOutputs()
    convolution, batch = nn.Conv2d(1, 2, 3, padding=1), torch.rand(2, 1, 4, 4)
    with kept:
        (convolution(batch).exp().flatten(1) @ torch.ones(32, 3)).relu()
    names = {
        function.name(): [held.tensor.shape for held in outputs]
        for function, outputs in kept.kept.items()
    }
    assert names == {"aten::convolution": [(2, 2, 4, 4)], "aten::mm": [(2, 3)]}


def test_the_forward_of_recomputed_blocks_is_done_exactly_twice() -> None:
    batch = parts.batch()
    calls: list[str] = []
    run = classifier(way="all")
    for index, stage in enumerate(run.task.net.stages):
        stage[0].register_forward_hook(lambda *_, index=index: calls.append(index))
    update(run, run.phases[0], batch)
    assert sorted(calls) == [0, 0, 1, 1, 2, 2]
    calls.clear()
    with torch.no_grad():
        run.task.net(batch["image"])
    assert sorted(calls) == [0, 1, 2]


def test_batchnorm_counts_once() -> None:
    run = classifier(way="all")
    update(run, run.phases[0], parts.batch())
    assert all(
        int(m.num_batches_tracked) == 1
        for m in run.task.net.modules()
        if isinstance(m, nn.BatchNorm2d)
    )


class Spectral(nn.Module):
    """Two blocks with a spectral norm, whose vector moves at every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.block() for _ in range(3)))

    def block(self) -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
            nn.LeakyReLU(0.2, inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return]


def test_a_spectral_norm_replays_from_its_earlier_vector() -> None:
    torch.manual_seed(0)
    plain = Spectral()
    trick = copy.deepcopy(plain)
    replay.wrap_runs(trick.blocks, [(0, 1, False), (1, 2, False)])
    x = torch.rand(3, 4)
    for _ in range(2):
        for model in (plain, trick):
            loss = model(x).sum() + model(x * 2).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
    assert all(
        torch.equal(a, b) for a, b in zip(plain.state_dict().values(), trick.state_dict().values())
    )
    for a, b in zip(plain.parameters(), trick.parameters()):
        assert a.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_state_dict_keys_stay_and_deep_copies_own_their_blocks() -> None:
    plain, trick = classifier(), classifier(way="all")
    assert list(plain.task.net.state_dict()) == list(trick.task.net.state_dict())
    twin = copy.deepcopy(trick.task.net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    x = parts.batch()["image"]
    twin(x).sum().backward()
    assert all(p.grad is None for p in trick.task.net.parameters())
    assert any(p.grad is not None for p in twin.parameters())
    assert not torch.equal(trick.task.net(x), twin(x))


def test_a_second_derivative_goes_through() -> None:
    torch.manual_seed(0)
    plain = Spectral()
    trick = copy.deepcopy(plain)
    replay.wrap_runs(trick.blocks, [(0, 2, False)])
    gradients = []
    for model in (plain, trick):
        x = torch.ones(2, 4, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


class Overwrites(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2).tanh()


def test_a_block_that_changes_its_input_is_refused() -> None:
    block = Overwrites()
    replay.wrap_module(block, keeps=False)
    with pytest.raises(ConfigError, match="Overwrites changes its input in place"):
        block(torch.ones(2, requires_grad=True) * 1)


@pytest.mark.parametrize(
    ("mode", "way"),
    [
        *(
            (mode, "sqrt")
            for mode in ("fp32", "amp", {"mode": "O1", **HALF}, {"mode": "O2", **HALF})
        ),
        ("amp", "selective"),
        ({"mode": "O1", **HALF}, {"budget": 0.3}),
        ({"mode": "O2", **HALF}, "selective"),
    ],
    ids=str,
)
def test_the_step_runs_on_fake_tensors(mode: Any, way: Any) -> None:
    model = {"name": "dcgan", "features": 4, "image_size": 16}
    config = load_config({"model": model, "precision": mode, "memory": {"recompute": way}})
    with FakeTensorMode():
        run = build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        for phase in run.phases:
            update(run, phase, parts.DIGITS.zeros(4, "cpu"))


def test_measuring_changes_nothing() -> None:
    run, other = gan(), gan()
    units = [unit for chain in blocks.find_chains(run.task.gen, "gen") for unit in chain]
    before, random = mechanism.state(run), torch.get_rng_state()
    notes = {
        name: value
        for name, value in vars(run.task).items()
        if isinstance(value, int | float | Tensor)
    }
    costs = measure_units(run, units, "here")
    assert all(cost.saved_bytes > 0 and cost.flops > 0 for cost in costs.values())
    assert count_losses(run, "here") == {"disc": 2, "gen": 1}
    assert mechanism.same(before, mechanism.state(run))
    assert torch.equal(random, torch.get_rng_state())
    assert all(vars(run.task)[name] is value for name, value in notes.items())
    mechanism.train(run, [parts.batch()])
    mechanism.train(other, [parts.batch()])
    assert mechanism.same(mechanism.state(run), mechanism.state(other))


def test_a_planner_does_not_see_the_measuring() -> None:
    model = {"name": "dcgan", "features": 4, "image_size": 16}
    births = {}
    for memory in ({}, {"recompute": {"budget": 1.0}}, {"optimizer_in_backward": True}):
        config = load_config({"model": model, "memory": memory})
        seen: list[str] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                seen.append(str(func))  # noqa: B023
                return func(*args, **(kwargs or {}))

        with FakeTensorMode(), Watch():
            build_run(config, torch.device("cpu"), parts.DIGITS, fake=True)
        births[str(memory)] = sum("convolution" in name for name in seen)
    assert set(births.values()) == {0}


def test_measured_bytes_are_what_a_real_forward_saves() -> None:
    run = classifier()
    units = [blocks.Unit("net", run.task.net)]
    cost = measure_units(run, units, "here")[units[0]]
    parameters = list(run.task.net.parameters())
    x = run.task.standardize(parts.DIGITS.zeros(8, "cpu")["image"])
    assert cost.saved_bytes == mechanism.saved_bytes(lambda: run.task.net(x), parameters)


def test_a_budget_recomputes_as_little_as_it_must() -> None:
    dear, cheap, small = (blocks.Unit(name, nn.Identity()) for name in ("dear", "cheap", "small"))
    costs = {dear: UnitCost(100, 10_000), cheap: UnitCost(100, 100), small: UnitCost(10, 100)}
    assert recompute.choose_by_budget(costs, 1.0) == []
    assert recompute.choose_by_budget(costs, 0.6) == [cheap]
    assert recompute.choose_by_budget(costs, 0.5) == [cheap, small]
    assert set(recompute.choose_by_budget(costs, 0.0)) == {dear, cheap, small}


@pytest.mark.parametrize("way", ["all", "selective", {"budget": 0.3}], ids=str)
@pytest.mark.parametrize("name", ["wgan_gp", "stylegan2", "vae"])
def test_penalties_and_their_second_derivatives_train_bit_equally(name: str, way: Any) -> None:
    small = {
        "channels": 1,
        "latent_size": 4,
        "style_size": 4,
        "mapping_layers": 2,
        "channel_base": 64,
        "channel_max": 4,
    }
    model = {"name": name, "image_size": 16, **(small if name == "stylegan2" else {})}
    plain, trick = parts.gan(model=model), parts.gan(model=model, memory={"recompute": way})
    mechanism.train(plain, [parts.batch()])
    mechanism.train(trick, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(trick))


def test_a_smaller_budget_keeps_less() -> None:
    kept = [
        mechanism.saved_bytes_of_losses(classifier(way={"budget": b}), parts.batch())
        for b in (1.0, 0.6, 0.1)
    ]
    assert kept[0] > kept[1] > kept[2]


def test_blocks_are_found_in_sequentials_lists_and_repeated_classes() -> None:
    def names(network: nn.Module) -> list[list[str]]:
        return [[unit.name for unit in chain] for chain in blocks.find_chains(network, "n")]

    flat = nn.Sequential(
        nn.Flatten(), nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU()
    )
    assert names(flat) == [["n.0", "n.4"]]
    assert [(u.start, u.stop) for u in blocks.find_chains(flat, "n")[0]] == [(0, 4), (4, 6)]
    listed = nn.Module()
    listed.layers = nn.ModuleList(nn.TransformerEncoderLayer(2, 1, 2) for _ in range(3))
    assert names(listed) == [["n.layers.0", "n.layers.1", "n.layers.2"]]
    repeated = nn.Module()
    repeated.up, repeated.head, repeated.down = Spectral(), nn.Linear(2, 2), Spectral()
    assert names(repeated) == [["n.up", "n.down"]]
    assert names(nn.Linear(2, 2)) == []


def test_sqrt_joins_neighbours_and_leaves_the_last_segment() -> None:
    chain = [blocks.Unit(f"n.{i}", nn.Sequential(), i, i + 1) for i in range(9)]
    trick = recompute.build(recompute.Settings())
    trick.chains = [chain]
    assert [[unit.start for unit in run] for run in trick.choose()] == [[0, 1, 2], [3, 4, 5]]


def test_wrong_settings_are_explained() -> None:
    with pytest.raises(
        ConfigError, match="give one of every, modules and budget, not every and budget"
    ):
        classifier(way={"every": 2, "budget": 0.5})
    with pytest.raises(
        ConfigError, match=r"no module matches 'nope\.\*'; there are net, net\.stages"
    ):
        classifier(way={"modules": ["nope.*"]})
    with pytest.raises(ConfigError, match="cannot be combined with compile"):
        parts.classifier(memory={"recompute": "all", "compile": True})


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("cast", ["amp", "O1", "fp32"])
def test_a_block_that_runs_twice_in_one_forward_finds_its_cast_weights_cached(
    cast: str, keeps: bool
) -> None:
    gradients = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        if wrapped:
            replay.wrap_module(block, keeps)
        x = torch.rand(3, 4)
        context: Any = {
            "amp": lambda: torch.autocast("cpu", torch.bfloat16),
            "O1": o1.casts,
            "fp32": contextlib.nullcontext,
        }[cast]
        with context():
            loss = block(block(x)).float().square().sum()
        loss.backward()
        gradients.append([p.grad for p in block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


class ChangesProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).mul_(2).sin()


def test_a_kept_output_that_is_changed_in_place_is_refused() -> None:
    block = ChangesProduct()
    replay.wrap_module(block, keeps=True)
    out = block(torch.ones(2, 2)).sum()
    with pytest.raises(RuntimeError, match="changed in place"):
        out.backward()


class _Named(nn.Module):
    """A block that returns its result and what it skips, as U-Nets of diffusers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.drop = nn.Dropout(0.5)

    def forward(
        self, hidden: Tensor, skipped: tuple[Tensor, ...] = ()
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        result = self.drop(self.conv(hidden))
        return result + sum(skipped), (*skipped, result)


@pytest.mark.parametrize("keeps", [False, True])
def test_a_block_that_is_called_with_named_arguments_alone_is_recomputed_under_autocast(
    keeps: bool,
) -> None:
    def gradients(wrapped: bool) -> list[Tensor]:
        torch.manual_seed(0)
        block = _Named()
        if wrapped:
            replay.wrap_module(block, keeps)
        picture = torch.randn(2, 3, 4, 4, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            first, skipped = block(hidden=picture)
            last, _ = block(hidden=first, skipped=skipped)
        last.square().sum().backward()
        return [parameter.grad for parameter in block.parameters() if parameter.grad is not None]

    pairs = list(zip(gradients(False), gradients(True), strict=True))
    assert len(pairs) == 2
    assert all(torch.equal(plain, again) for plain, again in pairs)


def test_torch_reads_the_device_from_named_arguments_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.utils.checkpoint takes the device, whose autocast it replays, from positional arguments, else "cuda"."""
    devices: list[str] = []

    def spy(function: Any, *args: Any, **options: Any) -> Any:
        devices.append(torch.utils.checkpoint._infer_device_type(*args))
        return torch.utils.checkpoint.checkpoint(function, *args, **options)

    monkeypatch.setattr(replay, "checkpoint", spy)
    block = _Named().to("meta")
    replay.wrap_module(block, keeps=False)
    block(hidden=torch.ones(1, 3, 4, 4, device="meta"), skipped=())
    assert devices == ["meta"]


def test_a_block_that_changes_a_named_input_is_refused() -> None:
    class Overwrites(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.mul_(2)

    block = Overwrites()
    replay.wrap_module(block, keeps=False)
    with pytest.raises(ConfigError, match="Overwrites changes its input in place"):
        block(hidden=torch.ones(2, requires_grad=True) * 1)


def test_the_hook_of_o1_is_the_one_used() -> None:
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    replay.wrap_runs(model, [(0, 2, False)])
    model[0].register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    with o1.casts(torch.float16):
        out = model(torch.rand(2, 4))
    out.float().sum().backward()
    assert seen == [torch.float16, torch.float16]


@pytest.mark.parametrize(
    ("memory", "setting"),
    [
        ({"optimizer_in_backward": True}, r"memory\.optimizer_in_backward"),
        ({"recompute": {"budget": 0.5}}, r"memory\.recompute\.budget"),
    ],
)
def test_a_loss_that_looks_at_values_is_named_with_its_line(
    memory: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losses(self: Classify, batch: Batch) -> Iterator[Loss]:
        value = self.net(batch["image"]).square().mean()
        if value.item() > 0:
            yield Loss("loss", value)

    monkeypatch.setattr(Classify, "losses", losses)
    with pytest.raises(
        ConfigError, match=rf"{setting}: .*test_recompute\.py:\d+ \(if value\.item\(\) > 0:\)"
    ):
        parts.classifier(memory=memory)
