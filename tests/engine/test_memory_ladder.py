"""Memory that runs out in a running training: what is done, and that the result is as if done from the start."""

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import train
from mpt.config.load import load_config
from mpt.engine.recovery import ladder
from mpt.engine.step.step import update
from mpt.errors import ConfigError, MemoryBudgetError, PartError
from mpt.memory.recomputing.replay import Recomputed, RecomputedSequence
from mpt.planner.recipes.patches import combinations
from mpt.precision.shared.float32_modules import Float32Module
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import open_run
from mpt.seams import Loss, Run
from mpt.tasks.classify import Classify
from mpt.tasks.gan import Gan
from tests.engine import parts

CLASSIFIER: dict[str, Any] = {
    "model": {"name": "small_cnn", "features": 4, "image_size": 8, "dropout": 0.2},
    "dataset": "digits",
    "precision": "fp32",
    "optimizer": {"name": "adam", "lr": 0.01},
    "train": {"steps": 2, "batch_size": 32, "log_every": 1, "checkpoint_every": 1},
    "memory": {"on_oom": "adapt"},
    "name": "run",
}
GAN: dict[str, Any] = {
    **CLASSIFIER,
    "model": {"name": "dcgan", "features": 4, "image_size": 16, "latent_size": 8},
    "task": {"ema": 0.9, "metric_samples": 64},
    "train": {**CLASSIFIER["train"], "steps": 2},
}
MODES: dict[str, Any] = {
    "fp32": "fp32",
    "amp": {"mode": "amp", "dtype": "float16"},
    "O1": {"mode": "O1", "dtype": "float16"},
    "O2 with a float32 module": {"mode": "O2", "dtype": "float16", "keep_fp32": ["net.stages.1"]},
    "bf16-pure": {"mode": "bf16-pure", "keep_fp32": ["net.head"]},
}


def start(
    runs: Path, base: dict[str, Any] = CLASSIFIER, stop: int | None = None, **sections: Any
) -> Path:
    options = {"resume": sections.pop("resume", None)}
    arguments = TrainArguments(config=Path("config.yaml"), runs=str(runs), quiet=True, **options)
    path = train(load_config({**base, **sections}), arguments, stop_after=stop)
    assert path is not None
    return path


def state(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint.load(open_run(path)).state
    return {key: found[key] for key in ("modules", "optimizers", "precision", "random", "task")}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def moves(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "out_of_memory"]


def recomputes(module: nn.Module) -> bool:
    return any(isinstance(inner, Recomputed | RecomputedSequence) for inner in module.modules())


def refuse(monkeypatch: pytest.MonkeyPatch, size: int, unless_recomputed: bool = False) -> None:
    """Raise OutOfMemoryError in the middle of a forward above a micro-batch size, or without recomputation."""
    original = Classify.losses

    def losses(self: Classify, batch: dict[str, Tensor]) -> Iterator[Loss]:
        # random numbers are drawn and statistics counted before memory runs out
        (loss,) = original(self, batch)
        real = not isinstance(batch["image"], FakeTensor)
        if real and (
            len(batch["image"]) > size or (unless_recomputed and not recomputes(self.net))
        ):
            raise torch.OutOfMemoryError(f"Tried to allocate {len(batch['image'])} MiB")
        yield loss

    monkeypatch.setattr(Classify, "losses", losses)


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, id=name, marks=pytest.mark.slow if name in ("fp32", "bf16-pure") else ())
        for name, mode in MODES.items()
    ],
)
def test_an_adapted_run_equals_one_configured_so_from_the_start(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, optimizer, scale and random numbers, bit for bit, though memory runs out after they were touched."""
    wanted = {"micro_batch": 8, "recompute": "sqrt"}
    expected = start(tmp_path / "configured", precision=mode, memory=wanted)
    refuse(monkeypatch, 8, unless_recomputed=True)
    path = start(tmp_path / "adapted", precision=mode)
    assert [move["adapted"] for move in moves(path)] == [
        {"micro_batch": 16},
        {"micro_batch": 8},
        wanted,
    ]
    assert {move["step"] for move in moves(path)} == {0}
    assert same(state(path), state(expected))


def test_a_gan_that_runs_out_in_its_second_phase_equals_one_configured_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The discriminator's update stands when the generator's is repeated."""
    expected = start(
        tmp_path / "configured", GAN, precision=MODES["amp"], memory={"recompute": "sqrt"}
    )
    original = Gan.gen_losses

    def gen_losses(self: Gan, batch: dict[str, Tensor]) -> Iterator[list[Loss]]:
        together = original(self, batch)
        if not recomputes(self.gen):
            raise torch.OutOfMemoryError("no room")
        yield together

    monkeypatch.setattr(Gan, "gen_losses", gen_losses)
    # recompute before any split: BatchNorm would see other batches
    monkeypatch.setattr(ladder, "FLOOR", 32)
    path = start(tmp_path / "adapted", GAN, precision=MODES["amp"])
    assert [(move["phase"], move["adapted"]) for move in moves(path)] == [
        ("gen", {"recompute": "sqrt"})
    ]
    assert same(state(path), state(expected))


@pytest.mark.parametrize(
    "mode", [MODES["fp32"], MODES["O2 with a float32 module"]], ids=["fp32", "O2"]
)
def test_a_resume_of_an_adapted_run_starts_adapted(
    mode: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = start(
        tmp_path / "configured", precision=mode, memory={"micro_batch": 8, "recompute": "sqrt"}
    )
    refuse(monkeypatch, 8, unless_recomputed=True)
    start(tmp_path / "adapted", precision=mode, stop=1)
    path = start(tmp_path / "adapted", precision=mode, resume="auto")
    assert len(moves(path)) == 3, "memory did not run out again"
    kinds = [json.loads(line)["kind"] for line in (path / "events.jsonl").read_text().splitlines()]
    assert "adapted" in kinds
    assert same(state(path), state(expected))


def test_a_resume_that_may_not_adapt_takes_the_configuration_at_its_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patches:
        refuse(patches, 8)
        start(tmp_path, stop=1)
    expected = start(tmp_path, resume="auto", memory={"on_oom": "stop", "micro_batch": 16})
    assert checkpoint.load(open_run(expected)).state["loop"]["adapted"] == {}


def test_the_ladder_goes_to_the_floor_then_recomputes_then_goes_to_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU offloading has nowhere to go, which is said; what cannot be done is tried once."""
    refuse(monkeypatch, 0)
    with pytest.raises(
        MemoryBudgetError, match=r"micro-batch of 1 is too much already: try a half"
    ) as caught:
        start(tmp_path)
    assert caught.value.exit_code == 7
    story = [
        (move["micro_batch"], "recompute" in move["adapted"]) for move in moves(tmp_path / "run")
    ]
    assert story[:3] == [(16, False), (8, False), (8, True)]
    assert [size for size, _ in story[3:]] == [8, 4, 2, 1, 1]
    assert (
        "offload_activations cannot be used here (activations are in host"
        in moves(tmp_path / "run")[3]["message"]
    )
    assert "BatchNorm sees 8 samples" in moves(tmp_path / "run")[1]["message"]


def test_micro_batch_auto_alone_only_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, 0)
    with pytest.raises(MemoryBudgetError, match=r"micro-batch of 1.*try memory\.recompute"):
        start(tmp_path, memory={"micro_batch": "auto"})
    assert [move["micro_batch"] for move in moves(tmp_path / "run")] == [16, 8, 4, 2, 1, 1]


def test_recomputation_that_does_not_suit_the_model_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that changes its input in place is met only when it runs: the ladder goes on without it."""
    from mpt.nn.small_cnn import SmallCnn

    original = SmallCnn.forward

    def forward(self: SmallCnn, image: Tensor) -> Tensor:
        handle = self.stages[0].register_forward_pre_hook(lambda module, args: args[0].mul_(1.0))
        try:
            return original(self, image)
        finally:
            handle.remove()

    monkeypatch.setattr(SmallCnn, "forward", forward)
    expected = start(tmp_path / "configured", memory={"micro_batch": 4})
    refuse(monkeypatch, 4)
    path = start(tmp_path / "adapted")
    assert any("changes its input in place" in move["message"] for move in moves(path))
    assert moves(path)[-1]["adapted"] == {"micro_batch": 4}
    assert same(state(path), state(expected))


def test_an_update_in_which_the_optimizer_had_begun_to_step_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.optim import adam

    def no_room(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("no room for averages")

    monkeypatch.setattr(adam, "adam", no_room)
    with pytest.raises(MemoryBudgetError, match=r"had begun to step.*memory\.cpu_optimizer"):
        start(tmp_path)
    assert len(moves(tmp_path / "run")) == 1


def test_stepping_in_backward_skips_the_micro_batch_and_recomputes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parameter has stepped while the first forward runs, so that update may be repeated."""
    memory = {"optimizer_in_backward": True}
    expected = start(tmp_path / "configured", memory={**memory, "recompute": "sqrt"})
    refuse(monkeypatch, 32, unless_recomputed=True)
    path = start(tmp_path / "adapted", memory={**memory, "on_oom": "adapt"})
    assert [move["adapted"] for move in moves(path)] == [{"recompute": "sqrt"}]
    assert same(state(path), state(expected))
    refuse(monkeypatch, 1)
    with pytest.raises(
        MemoryBudgetError,
        match="nothing is left to adapt at a micro-batch of 32; offload_activations",
    ):
        start(tmp_path / "exhausted", memory={**memory, "on_oom": "adapt"})


def test_a_trick_added_under_casts_ends_inside_them() -> None:
    """As in a run built with it: the casts of precision outside, recomputation inside, the same keys."""
    mode = MODES["O2 with a float32 module"]
    configured, run = parts.classifier(mode, memory={"recompute": "sqrt"}), parts.classifier(mode)
    keys, parameters = (
        list(run.task.modules["net"].state_dict()),
        list(map(id, run.task.modules["net"].parameters())),
    )
    ladder.move(run, "recompute", "sqrt")

    def classes(one: Run) -> list[list[str]]:
        return [
            [kind.__name__ for kind in type(m).__mro__] for m in one.task.modules["net"].modules()
        ]

    assert classes(run) == classes(configured)
    assert any(isinstance(module, Float32Module) for module in run.task.modules["net"].modules())
    assert list(run.task.modules["net"].state_dict()) == keys
    assert list(map(id, run.task.modules["net"].parameters())) == parameters
    update(run, run.phases[0], parts.batch())


def test_taking_a_trick_back_leaves_no_trace() -> None:
    run = parts.classifier("bf16-pure")
    net = run.task.modules["net"]
    before = [(type(m), getattr(m, "inplace", None)) for m in net.modules()]
    take_back = ladder.move(run, "recompute", "sqrt")
    assert recomputes(net)
    take_back()
    assert [(type(m), getattr(m, "inplace", None)) for m in net.modules()] == before
    assert run.adaptation.changes == {}
    assert run.tricks == []


def test_offloading_is_added_where_there_is_somewhere_to_go() -> None:
    run = replace(parts.classifier(), device=torch.device("meta"))
    ladder.move(run, "offload_activations", 1.0)
    assert [trick.name for trick in run.tricks] == ["offload_activations"]
    with pytest.raises(ConfigError, match="cannot be combined with compile"):
        ladder.move(
            parts.classifier(memory={"compile": {"backend": "aot_eager"}}), "recompute", "sqrt"
        )


def test_sizes_leave_no_last_sample_alone_where_one_is_too_few() -> None:
    assert ladder.smaller_size(33, 33, least=2) == 15
    assert ladder.smaller_size(33, 33, least=1) == 16
    assert ladder.smaller_size(3, 33, least=2) is None
    assert ladder.smaller_size(1, 8, least=1) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_that_is_too_small_for_the_batch_gets_smaller_micro_batches(tmp_path: Path) -> None:
    model = {"name": "small_cnn", "features": 256, "image_size": 16}
    settings = {**CLASSIFIER["train"], "batch_size": 1400, "device": "cuda", "plan_memory": False}
    path = start(tmp_path / "whole", model=model, train=settings)
    # The run begins the allocator's peaks anew after each evaluation, so it has to say what its steps took.
    wanted = json.loads((path / "summary.json").read_text())["peak_memory"]["steps_peak_bytes"]
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    # Where memory is short cuDNN does with smaller workspaces: on an H100 the batch ran in 0.6 of what it had taken.
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_reserved() + wanted * 0.25) / total
    )
    try:
        path = start(tmp_path / "small", model=model, train=settings)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    found = checkpoint.load(open_run(path))
    assert found.step == settings["steps"]
    adapted = found.state["loop"]["adapted"]
    assert adapted.get("micro_batch", 1400) < 1400, adapted


STRANGER = '''
"""Recompute every module by the folder's own code: for the test, it only counts."""

from __future__ import annotations

from mpt.config.options import Options
from mpt.seams import MemoryTrick, Precision, Task

RELIEVES = "activations"
PROPOSALS = (True,)
LADDER = True
RANK = 0


class Settings(Options):
    """Nothing to set."""


class Strange(MemoryTrick):
    """Counts where it was applied."""

    name = "strange"
    applied = 0

    def apply(self, task: Task, precision: Precision) -> None:
        Strange.applied += 1


def build(settings: Settings) -> Strange:
    return Strange()
'''


def test_a_trick_from_outside_is_proposed_and_used_when_memory_runs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "strange.py").write_text(STRANGER, "utf-8")
    monkeypatch.setenv("MPT_PARTS", str(tmp_path))
    assert {"strange": True} in combinations().single
    assert {"strange": True, "cpu_optimizer": True} in combinations().pairs
    assert {"strange": True} in combinations().split
    run = parts.classifier(memory={"on_oom": "adapt"})
    moves = list(ladder.next_moves(run.config, whole_ladder=True))
    assert moves.index(("strange", True)) < moves.index(("recompute", "sqrt"))
    ladder.move(run, "strange", True)
    assert [trick.name for trick in run.tricks] == ["strange"]
    assert run.adaptation.changes == {"strange": True}


def test_an_unknown_kind_of_relief_is_refused_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "strange.py").write_text(
        STRANGER.replace('"activations"', '"time"'), "utf-8"
    )
    monkeypatch.setenv("MPT_PARTS", str(tmp_path))
    with pytest.raises(
        PartError, match=r"strange\.py: RELIEVES is 'time'; allowed are activations"
    ):
        combinations()
