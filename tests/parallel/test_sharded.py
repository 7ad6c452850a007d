"""Sharded networks (FSDP2) train what one process trains, and a checkpoint knows nothing of the shards."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.building.initial_weights import load_initial_weights
from mpt.engine.state.evaluation import evaluate
from mpt.engine.state.moving_averages import follow_step
from mpt.engine.state.state import restore
from mpt.errors import ConfigError
from mpt.memory import offload_activations
from mpt.parallel.shard import refuse
from mpt.parallel.world import World
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.run.records.recorder import read_lines
from tests.engine.parts import DIGITS

from .forked import run_ranks
from .test_equality import F16, compare, settings
from .test_resume import trained, weights

FSDP = {"parallel": {"strategy": "fsdp"}}


OFFLOADED = {"parallel": {"strategy": "fsdp", "offload": True}}


@pytest.mark.parametrize(
    ("task", "precision", "rounding"),
    [
        ("classifier", "fp32", 2e-6),
        pytest.param("wgan_gp", "fp32", 2e-6, marks=pytest.mark.slow),
        ("wgan_gp", F16, 2e-3),
        ("lsgan", {**F16, "mode": "O1"}, 2e-3),
        ("lsgan", "bf16", 1e-2),
        pytest.param("lsgan", "bf16-pure", 1e-2, marks=pytest.mark.slow),
        ("lsgan", {**F16, "mode": "O2"}, 2e-3),
    ],
    ids=lambda value: value["mode"] if isinstance(value, dict) else None,
)
def test_sharded_ranks_train_what_one_process_trains(
    task: str, precision: Any, rounding: float
) -> None:
    optimizer = {"name": "sgd", "lr": 0.01, "clip_grad_norm": 0.5}
    is_offloaded = precision not in ("fp32", "bf16")
    asked = settings(task, precision, optimizer=optimizer, **(OFFLOADED if is_offloaded else FSDP))
    alone, ranks, difference = compare({**asked, "task": {"ema": 0.9 if is_offloaded else None}})
    assert ranks[0]["skipped"] == ranks[1]["skipped"] == alone["skipped"]
    assert ranks[0]["scales"] == alone["scales"]
    assert difference < rounding


@pytest.mark.parametrize(
    ("shard", "size"),
    [
        ({"shard": "grad"}, 2),
        pytest.param({"shard": "hybrid", "shard_ranks": 2}, 4, marks=pytest.mark.slow),
    ],
    ids=["grad", "hybrid"],
)
def test_other_ways_of_sharding_train_the_same(shard: dict[str, Any], size: int) -> None:
    """Two networks, each frozen while the other trains: weights that stay gathered would be old ones."""
    parallel = {"parallel": {**FSDP["parallel"], **shard}}
    alone, ranks, difference = compare(
        settings("lsgan", "fp32", train={"steps": 5, "batch_size": 12}, **parallel), size
    )
    assert ranks[0]["skipped"] == alone["skipped"]
    assert difference < 2e-6


def test_activations_wait_on_the_host_and_gathered_weights_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside recomputation, and with host memory standing in for a GPU's."""
    original, rows = offload_activations.Offloaded.__init__, []

    def offload(self: Any, tensor: torch.Tensor, *how: Any) -> None:
        rows.append(len(tensor))
        assert rows[-1] <= 10, "a weight, or its transpose: no sample's"
        original(self, tensor, *how)

    monkeypatch.setattr(offload_activations, "POINTLESS_ON", {})
    monkeypatch.setattr(offload_activations.Offloaded, "__init__", offload)
    memory = {"offload_activations": {"min_mebibytes": 0}, "recompute": "sqrt"}
    _, _, difference = compare(settings("lsgan", "fp32", memory=memory, **FSDP))
    assert difference < 2e-6
    assert rows


@pytest.mark.parametrize(
    ("parallel", "words"),
    [({"shard": "grad"}, "Set strategy: fsdp"), ({"offload": True}, "memory.cpu_optimizer")],
)
def test_a_way_of_sharding_without_shards_is_refused(parallel: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config({**settings("lsgan", "fp32"), "parallel": parallel})


def test_a_checkpoint_of_shards_is_one_process_s(tmp_path: Path) -> None:
    """Written sharded, gone on with sharded bit by bit, and by one process and by whole copies within rounding."""
    alone = ("model.dropout=0", "train.batch_size=16")
    sharded = (*alone, "parallel.strategy=fsdp")
    assert trained(tmp_path, 2, "whole", 6, *sharded, "train.asynchronous_save=true") == [
        "done",
        "done",
    ]
    assert trained(tmp_path, 2, "parts", 3, *sharded, "parallel.offload=true") == ["done", "done"]
    shutil.copytree(tmp_path / "runs" / "parts", tmp_path / "runs" / "changed")
    assert trained(tmp_path, 2, "parts", 6, *sharded, resume="auto") == ["done", "done"]
    assert torch.equal(weights(tmp_path, "whole"), weights(tmp_path, "parts"))
    check_evaluation(tmp_path / "runs" / "whole")
    check_start(tmp_path / "runs" / "whole")

    trained(tmp_path, 1, "changed", 6, *alone, resume="auto")
    torch.testing.assert_close(
        weights(tmp_path, "changed"), weights(tmp_path, "whole"), rtol=1e-3, atol=1e-4
    )


def check_evaluation(folder: Path) -> None:
    """The ranks have shared out 23 batches; one process that evaluates their checkpoint has their figure."""
    figures = [
        line["metrics"] for line in read_lines(folder / "metrics.jsonl") if "metrics" in line
    ]
    config = load_config(folder / "config.yaml")
    _, test = build_datasets(config)
    run = build_run(config, torch.device("cpu"), test.spec)
    restore(run, checkpoint.load(open_run(folder)).state)
    assert evaluate(run, test, config.train.batch_size) == figures[-1]


def check_start(folder: Path) -> None:
    """Sharded weights start another training, whichever of their files is named."""
    newest, saved = (
        folder / "checkpoints" / "step-00000006",
        weights(folder.parent.parent, folder.name),
    )
    names = ("shard-00001-of-00002.safetensors", "state.safetensors")
    for path in (folder, newest, *(newest / name for name in names)):
        run = build_run(load_config(folder / "config.yaml"), torch.device("cpu"), DIGITS)
        said = load_initial_weights(run.task.modules, path).message
        assert f"loaded all 20 tensors from {newest}" in said
        own = torch.cat(
            [value.float().flatten() for value in run.task.modules["net"].state_dict().values()]
        )
        assert torch.equal(own, saved)


def test_each_rank_holds_its_part_of_weights_gradients_and_averages() -> None:
    data = {
        **settings("lsgan", "fp32", optimizer={"name": "adam", "lr": 1e-3}, **FSDP),
        "task": {"ema": 0.9},
    }
    for rank, told in enumerate(run_ranks(2, held_bytes, data)):
        for name, (own, whole) in told.items():
            # A weight of one row is on rank 0 alone.
            assert own < 0.55 * whole, (rank, name)


def held_bytes(rank: int, data: dict[str, Any]) -> dict[str, tuple[int, int]]:
    from mpt.engine.step.step import update
    from mpt.parallel.local import local
    from mpt.parallel.start import joined
    from tests.engine.parts import batch

    config = load_config(data)
    with joined(config) as world:
        run = build_run(config, torch.device("cpu"), DIGITS, world=world)
        for phase in run.phases:
            update(run, phase, batch(0, 10))
        follow_step(run, 0)
        kinds = {
            "weights": [p for m in run.task.trainable.values() for p in m.parameters()],
            "gradients": [
                p.grad
                for m in run.task.trainable.values()
                for p in m.parameters()
                if p.grad is not None
            ],
            "averages": list(run.task.modules["gen_ema"].parameters()),
            "optimizer": [s["exp_avg"] for o in run.optimizers.values() for s in o.state.values()],
        }
        assert all(kinds.values())
        return {
            name: (sum(local(one).numel() for one in tensors), sum(one.numel() for one in tensors))
            for name, tensors in kinds.items()
        }


def test_what_a_penalty_leaves_after_a_unit_s_backward_is_summed_also_of_a_single_number() -> None:
    """No unit of a critic that is linear hears of the backward of a gradient that is differentiated again."""
    alone = critic()
    for rank in (0, 1):
        penalise(alone, rank)
    for told in run_ranks(2, penalised):
        for own, whole in zip(told, alone.parameters(), strict=True):
            torch.testing.assert_close(torch.tensor(own), whole.grad)


SHAPES = ((4, 6), (2, 4), ())


def critic() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False), Strength())


class Strength(nn.Module):
    """A factor that is a single number, as StyleGAN2's noise has."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.strength


def penalise(net: nn.Module, rank: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    sample = torch.randn(5, 6, generator=generator, requires_grad=True)
    (slope,) = torch.autograd.grad(net(sample).sum(), sample, create_graph=True)
    slope.square().sum().backward()


def penalised(rank: int) -> list[Any]:
    from mpt.parallel.local import full
    from mpt.parallel.shard import settle, shard
    from mpt.parallel.start import joined

    config = load_config(settings("lsgan", "fp32", **FSDP))
    with joined(config) as world:
        net = critic()
        sharded = shard(
            [net], "cpu", world, config.parallel, (), torch.float32, stays_gathered=True
        )
        penalise(net, rank)
        settle(sharded)
        return [
            full(weight.grad).reshape(own).tolist()
            for weight, own in zip(net.parameters(), SHAPES, strict=True)
        ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"precision": "bf16-sr"}, "precision bf16-sr is not for sharded weights; use one of O0"),
        (
            {"parallel": {**FSDP["parallel"], "shard": "hybrid", "shard_ranks": 4}},
            "over 4 processes does not divide",
        ),
        ({"memory": {"cpu_optimizer": True}}, "memory.cpu_optimizer does not go with it"),
        (
            {"memory": {"lora": 4, "low_bit_base": "nf4"}},
            "memory.lora, low_bit_base do not go with it; leave them out. Or use ddp, which sums the gradients of the "
            "adapters alone; for smaller frozen weights add memory.stream_weights",
        ),
        ({"memory": {"on_oom": "adapt"}}, "use stop"),
        (
            {"train": {"batch_size": 8, "recent_states": 2}},
            "train.recent_states keeps whole states",
        ),
        ({"train": {"batch_size": 9}}, "cannot be shared out evenly"),
        (
            {"optimizer": "muon"},
            "muon was not tried on shards; use one of adam, adamax, adamw, rmsprop, sgd",
        ),
    ],
)
def test_what_is_not_trained_sharded_is_refused_with_the_way_out(
    change: dict[str, Any], words: str
) -> None:
    data = {
        "model": {"name": "lsgan"},
        "dataset": "digits",
        "train": {"batch_size": 8},
        "precision": "fp32",
        **change,
    }
    with pytest.raises(ConfigError, match="Or use ddp") as refused:
        refuse(load_config(data), two_ranks())
    assert words in str(refused.value)


def test_a_trick_says_of_itself_that_it_works_on_shards() -> None:
    """So that one from outside the package is trained sharded without being named anywhere."""
    data = {
        "model": "lsgan",
        "train": {"batch_size": 8},
        "precision": "fp32",
        "memory": {"channels_last": True},
    }
    config = load_config(data)
    name, plugin = next(iter(config.memory.plugins.items()))
    willing = dataclasses.replace(plugin, literals={**plugin.literals, "SHARDED": True})
    refuse(
        dataclasses.replace(
            config, memory=dataclasses.replace(config.memory, plugins={name: willing})
        ),
        two_ranks(),
    )


def two_ranks() -> World:
    world = World()
    world.size = 2
    return world
