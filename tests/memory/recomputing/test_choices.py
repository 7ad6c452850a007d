"""Recomputation per tensor: the choice is near the best there is, is carried out, and leaves every bit as it was."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.step.step import update
from mpt.errors import ConfigError
from mpt.memory import offload_activations
from mpt.memory.recomputing import choices as weighing
from mpt.memory.recomputing import keeping, knapsack, replay
from mpt.memory.recomputing.blocks import Unit, find_chains
from mpt.memory.recomputing.choices import choose_outputs, list_choices
from mpt.memory.recomputing.dry_run import FlopCount, measure_calls
from mpt.memory.recomputing.operators import draws_random_numbers, find_rerun
from mpt.memory.recomputing.selective import Kept
from tests.engine import parts
from tests.memory import mechanism

aten = torch.ops.aten


def random_problem(seed: int) -> tuple[list[list[knapsack.Choice]], list[list[knapsack.Call]]]:
    """Return four blocks, each called once in one loss, with up to four choices each."""
    source = random.Random(seed)
    choices = []
    for _ in range(4):
        whole = source.randint(50, 100)
        points = [(whole, 0.0)] + [
            (source.randint(0, whole), source.uniform(1, 10)) for _ in range(3)
        ]
        options = [knapsack.Choice(frozenset(), cost, (size,), (whole,)) for size, cost in points]
        choices.append(knapsack.convex(options))
    calls = [knapsack.Call(block, 0, source.randint(0, 20)) for block in range(4)]
    return choices, [[*calls, knapsack.Call(None, 0, 0)]]


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_the_choice_keeps_the_budget_and_is_near_the_cheapest_of_all(share: float) -> None:
    near = 0
    for seed in range(40):
        choices, losses = random_problem(seed)
        allowed = share * knapsack.Blocks(choices, losses).peak()
        best = None
        for picked in itertools.product(*(range(len(options)) for options in choices)):
            trial = knapsack.Blocks(choices, losses)
            trial.chosen = list(picked)
            if trial.peak() <= allowed and (best is None or trial.seconds < best):
                best = trial.seconds
        blocks = knapsack.Blocks(choices, losses)
        blocks.shrink(allowed)
        if best is None:
            assert blocks.peak() > allowed
            continue
        dearest = max(
            (
                then.seconds - now.seconds
                for options in choices
                for now, then in itertools.pairwise(options)
            ),
            default=0,
        )
        assert blocks.peak() <= allowed
        assert best - 1e-9 <= blocks.seconds <= best + dearest + 1e-9
        near += blocks.seconds <= 1.1 * best + 1e-9
    assert near >= 28


def test_choices_that_no_line_needs_are_left_out() -> None:
    def point(size: int, seconds: float) -> knapsack.Choice:
        return knapsack.Choice(None, seconds, (size,), (size,))

    found = knapsack.convex([point(100, 0), point(90, 5), point(50, 6), point(60, 9), point(0, 20)])
    assert [one.total for one in found] == [100, 50, 0]


class Residual(nn.Module):
    """Two convolutions with their norms; what is added last is kept by the next block anyway."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.conv1, self.norm1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        outer = self.norm2(self.conv2(inner))
        return functional.relu(outer.add_(x) if self.in_place else x + outer)


class Residuals(nn.Module):
    """Blocks as torchvision's ResNet has them: the sum is made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(1, 4, 3), *(Residual(True) for _ in range(3)))
        self.head = nn.Linear(4, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(image).mean((2, 3)))


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.counts[function._schema.name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("in_place", [False, True])
def test_operators_that_lead_to_nothing_wanted_are_not_run_again(in_place: bool) -> None:
    torch.manual_seed(0)
    gradients, sums = [], []
    keep = frozenset(
        {(aten.convolution.default, 0), (aten.convolution.default, 1), (aten.relu.default, 1)}
    )
    for keeps in (None, keep):
        torch.manual_seed(1)
        block = Residual(in_place)
        if keeps is not None:
            replay.wrap_module(block, keeps)
        x = torch.rand(2, 4, 8, 8, requires_grad=True)
        with Seen() as forward:
            loss = block(x).square().sum()
        with Seen() as backward:
            loss.backward()
        assert forward.counts["convolution"] == 2
        sums.append(backward.counts["add_"])
        gradients.append([x.grad, *(p.grad for p in block.parameters()), *block.buffers()])
    assert backward.counts["convolution"] == 0
    assert backward.counts["relu"] == 1
    # the norms count batches in copies of their buffers; the sum is not wanted
    assert sums[1] == sums[0] + 2
    # the first norm's output is wanted, the second's is not
    assert backward.counts["native_batch_norm"] == 1
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class InPlace(nn.Module):
    """Changes what a choice would like to keep, inside the block and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)
        )
        self.head = nn.Linear(6, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = image.flatten(1)[:, :6]
        for block in self.blocks:
            x = functional.leaky_relu(block(x).mul_(2), inplace=True)
        return self.head(x)


class Chain(nn.Module):
    """Blocks that hold little but each other's inputs: one by one they cannot be made much smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(9))
        )
        self.head = nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.blocks(image.flatten(1)[:, :32]))


def chain_run(mode: str = "fp32", memory: Any = None) -> Any:
    data = {
        "model": {"name": "tests.memory.recomputing.test_choices:Chain", "image_size": 16}, "dataset": "digits",
        "precision": mode, "optimizer": {"name": "sgd", "lr": 0.1}, "memory": memory or {},
        "train": {"batch_size": 512},
    }  # fmt: skip
    torch.manual_seed(0)
    return build_run(load_config(data, allow=["tests"]), torch.device("cpu"), parts.DIGITS)


@pytest.mark.parametrize("mode", ["fp32", "amp"])
def test_neighbours_are_joined_where_blocks_alone_cannot_be_brought_to_the_budget(
    mode: str,
) -> None:
    states, joined, kept = [], [], []
    for memory in (
        {},
        *({"recompute": {"budget": budget, "per": "tensor"}} for budget in (1.0, 0.0)),
    ):
        run = chain_run(mode, memory)
        kept.append(mechanism.saved_bytes_of_losses(run, parts.batch(size=512)))
        mechanism.train(run, [parts.batch(0, 512), parts.batch(1, 512)])
        states.append(mechanism.state(run))
        blocks = run.task.modules["net"].blocks
        runs = blocks.recomputed_runs if isinstance(blocks, replay.RecomputedSequence) else ()
        joined.append(max((stop - start for start, stop, _ in runs), default=0))
    assert joined[0] == 0
    assert joined[1] == 0
    assert joined[2] > 1
    assert mode == "amp" or kept[2] < kept[0]  # under autocast casts of weights are kept as well
    assert mechanism.same(states[0], states[1])
    assert mechanism.same(states[0], states[2])


def test_the_shortest_runs_that_reach_a_budget_are_taken_else_those_with_the_lowest_peak() -> None:
    run = chain_run()
    chain = find_chains(run.task.modules["net"], "net")[0]
    partitions = {}
    for length in (1, 3, 9):
        units = [
            Unit("run", chain[0].owner, at, at + length) for at in range(0, len(chain), length)
        ]
        partitions[length] = list_choices(measure_calls(run, units, "here"))
    for share in (1.0, 0.8, 0.5, 0.0):
        peaks: dict[int, int] = {}
        asked: list[int] = []
        chosen = choose_outputs(
            (asked.append(length) or one for length, one in partitions.items()), share
        )
        allowed = None
        for length, (_, choices, calls) in partitions.items():
            blocks = knapsack.Blocks(choices, calls)
            allowed = share * blocks.peak() if allowed is None else allowed
            blocks.shrink(allowed)
            peaks[length] = blocks.peak()
        reaching = [length for length, peak in peaks.items() if peak <= allowed]
        assert asked[-1] == (reaching[0] if reaching else 9)
        best = reaching[0] if reaching else min(peaks, key=peaks.__getitem__)
        assert {unit.stop - unit.start for unit in chosen} <= {best}
    assert not reaching


BUDGETS = [{"budget": budget, "per": "tensor"} for budget in (0.0, 0.6)]
SMALL: dict[str, dict[str, Any]] = {
    "wgan_gp": {},
    "stylegan2": {
        "channels": 1, "latent_size": 4, "style_size": 4, "mapping_layers": 1, "channel_base": 64, "channel_max": 4,
    },
    "vae": {},
}  # fmt: skip


@pytest.mark.parametrize("way", BUDGETS, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_penalties_and_their_second_derivatives_train_bit_equally(name: str, way: Any) -> None:
    model = {"name": name, "image_size": 16, **SMALL[name]}
    plain, trick = parts.gan(model=model), parts.gan(model=model, memory={"recompute": way})
    mechanism.train(plain, [parts.batch()])
    mechanism.train(trick, [parts.batch()])
    assert mechanism.same(mechanism.state(plain), mechanism.state(trick))


def test_on_stylegan2_less_is_kept_and_computed_again_than_with_sqrt() -> None:
    model = {
        "name": "stylegan2",
        "image_size": 16,
        **SMALL["stylegan2"],
        "channel_base": 256,
        "channel_max": 16,
    }
    kept, work = {}, {}
    for way in ("sqrt", BUDGETS[1]):
        run = parts.gan(model=model, memory={"recompute": way})
        torch.manual_seed(0)
        kept[str(way)] = mechanism.saved_bytes_of_losses(run, parts.batch())
        with FlopCount() as counter:
            update(run, run.phases[0], parts.batch())
        work[str(way)] = counter.total
    assert kept[str(BUDGETS[1])] < kept["sqrt"]
    assert work[str(BUDGETS[1])] < work["sqrt"]


class Twofold(nn.Module):
    """Saves what it makes of the linear layer's result, or, called otherwise, what its tanh makes of that."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, twice: bool) -> Tensor:
        y = self.linear(x) * 2
        return y * y if twice else y.tanh()


def test_what_another_loss_saves_is_let_go_when_the_call_is_over() -> None:
    torch.manual_seed(0)
    keep = frozenset({(aten.mul.Tensor, 0), (aten.tanh.default, 0)})
    for twice, used in ((False, {(aten.tanh.default, 0)}), (True, {(aten.mul.Tensor, 0)})):
        block, x = Twofold(), torch.rand(2, 4, requires_grad=True)
        plain = torch.autograd.grad(block(x, twice).sum(), (x, *block.parameters()))
        record = keeping.Record(keep)
        with keeping.KeepChosen(record):
            record.told(block)(x, twice)
        assert record.keeps == used
        assert {key for key, result in record.results.items() if isinstance(result, Kept)} == used
        replay.wrap_module(block, keep)
        again = torch.autograd.grad(block(x, twice).sum(), (x, *block.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *itertools.product(
            ["planner.models:TinyViT", "memory.recomputing.test_choices:InPlace"],
            ["fp32", "amp", "O1"],
        ),
        ("memory.recomputing.test_choices:Residuals", "amp"),
    ],
)
def test_attention_and_changes_in_place_train_bit_equally(model: str, mode: str) -> None:
    states = []
    for memory in ({}, *({"recompute": way} for way in BUDGETS)):
        data = {
            "model": {"name": f"tests.{model}", "image_size": 16, "channels": 1}, "dataset": "digits",
            "precision": mode,
            "optimizer": {"name": "sgd", "lr": 0.1}, "train": {"steps": 2, "batch_size": 8}, "memory": memory,
        }  # fmt: skip
        torch.manual_seed(0)
        run = build_run(load_config(data, allow=["tests"]), torch.device("cpu"), parts.DIGITS)
        mechanism.train(run, [parts.batch(0), parts.batch(1)])
        states.append(mechanism.state(run))
    assert mechanism.same(states[0], states[1])
    assert mechanism.same(states[0], states[2])


def test_what_is_kept_waits_on_the_host_where_saved_tensors_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(offload_activations, "POINTLESS_ON", {})
    sent: list[int] = []
    start = offload_activations.Offloaded.__init__

    def spy(self: Any, tensor: Tensor, *how: Any) -> None:
        sent.append(tensor.nbytes)
        start(self, tensor, *how)

    monkeypatch.setattr(offload_activations.Offloaded, "__init__", spy)
    states, totals = [], []
    for memory in (
        {},
        {"recompute": BUDGETS[1], "offload_activations": {"min_mebibytes": 0}},
        {"recompute": BUDGETS[1], "offload_activations": {"min_mebibytes": 0, "at_most_gib": 2e-5}},
    ):
        sent.clear()
        run = parts.gan(memory=memory)
        mechanism.train(run, [parts.batch()])
        states.append(mechanism.state(run))
        totals.append(sum(sent))
    assert mechanism.same(states[0], states[1])
    assert mechanism.same(states[0], states[2])
    assert totals[0] == 0
    assert 0 < totals[2] <= 3 * 2e-5 * 2**30 < totals[1]  # three losses, each with its own limit


def test_a_smaller_budget_keeps_less_and_computes_more() -> None:
    ways = [{"budget": budget, "per": "tensor"} for budget in (1.0, 0.7, 0.4)]
    runs = [parts.classifier(memory={"recompute": way}) for way in ways]
    kept = [mechanism.saved_bytes_of_losses(run, parts.batch()) for run in runs]
    assert kept[0] >= kept[1] >= kept[2]
    assert kept[0] > kept[2]


def test_a_dry_run_counts_what_a_recomputation_runs() -> None:
    run = parts.classifier()
    units = [unit for chain in find_chains(run.task.modules["net"], "net") for unit in chain]
    losses = measure_calls(run, units, "here")
    call = losses[0].calls[0]
    everything = find_rerun(call.operators, call.saved, frozenset())
    convolution = next(
        one.key
        for one in call.operators
        if one.key is not None and "convolution" in str(one.key[0])
    )
    assert convolution is not None
    less = find_rerun(call.operators, call.saved, frozenset({convolution}))
    assert len(less) == len(everything) - 1
    _, choices, _ = list_choices(losses)
    for options in choices:
        assert options[0].keeps is None
        assert all(then.total < now.total for now, then in itertools.pairwise(options))
        assert all(then.seconds > now.seconds for now, then in itertools.pairwise(options))


def test_blocks_that_are_alike_are_weighed_once_and_get_the_choices_that_each_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = chain_run()
    units = [unit for chain in find_chains(run.task.modules["net"], "net") for unit in chain]
    losses = measure_calls(run, units, "here")
    weighed, weigh = [], weighing._choices

    def count(calls: Any) -> Any:
        weighed.append(calls)
        return weigh(calls)

    monkeypatch.setattr(weighing, "_choices", count)
    _, found, _ = list_choices(losses)
    assert len(weighed) < len(found) == len(units)
    monkeypatch.setattr(weighing, "_form", lambda calls: (id(calls),))
    assert list_choices(losses)[1] == found


def test_a_dry_run_takes_no_weight_outside_of_the_blocks_for_memory_of_the_step() -> None:
    run = parts.classifier()
    net = run.task.modules["net"]
    units = [unit for chain in find_chains(net, "net") for unit in chain]
    saved_elsewhere = [bytes for _, bytes in measure_calls(run, units, "here")[0].elsewhere]
    assert saved_elsewhere
    # autograd saves a transposed view of it, which is a view of its fake twin
    assert net.head[3].weight.nbytes not in saved_elsewhere


def test_attention_with_dropout_is_not_left_out_of_a_recomputation() -> None:
    flash = aten._scaled_dot_product_efficient_attention.default
    query = torch.zeros(1)
    assert not draws_random_numbers(flash, (query, query, query, None, False), {})
    assert draws_random_numbers(flash, (query, query, query, None, False, 0.1), {})
    assert draws_random_numbers(aten.native_dropout.default, (query, 0.5, True), {})
    assert not draws_random_numbers(aten.relu.default, (query,), {})


def test_per_tensor_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match="per: tensor chooses by a budget"):
        parts.classifier(memory={"recompute": {"per": "tensor"}})
