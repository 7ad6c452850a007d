"""The report that is printed when memory runs out for good, and the patch that it proposes."""

import operator
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import mpt.commands.out_of_memory_report as report
import mpt.report.page
from mpt.commands.arguments import TrainArguments
from mpt.commands.train import run
from mpt.config.load import load_config
from mpt.errors import MemoryBudgetError
from mpt.planner.calibration import Calibration
from mpt.planner.gpus import find_gpu
from mpt.planner.recipe import Recipe
from mpt.planner.search import Search
from mpt.planner.session import Answer
from mpt.seams import Loss
from mpt.tasks.classify import Classify

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 8}
dataset: digits
precision: fp32
optimizer: {name: sgd, lr: 0.05}
train: {steps: 2, batch_size: 32}
name: run
"""
PEAK = {
    "allocated": 7 * 2**30,
    "reserved": 8 * 2**30,
    "context_bytes": 2**28,
    "moment": "phase net, backward (step 2)",
    "by_category": {"parameters": 2**30, "activations": 5 * 2**30, "gradients": 2**20},
    "by_module": [(f"net.layer{number}", 2**30 - number) for number in range(10)],
    "fits": False,
    "tight": False,
    "step_seconds": 1.0,
    "inexact": [],
    "notes": [],
}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration that runs out of memory above 16 samples."""
    original = Classify.losses

    def losses(self: Classify, batch: dict[str, Tensor]) -> Iterator[Loss]:
        if len(batch["image"]) > 16:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB. Of the allocated memory much is")
        yield from original(self, batch)

    monkeypatch.setattr(Classify, "losses", losses)
    monkeypatch.setattr(mpt.report.page, "write_report", lambda path: None)
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def train(config: Path, *overrides: str, **options: Any) -> None:
    runs = str(config.parent / "runs")
    run(TrainArguments(config=config, overrides=overrides, runs=runs, quiet=True, **options))


def fail(config: Path, *overrides: str, **options: Any) -> list[str]:
    with pytest.raises(MemoryBudgetError) as caught:
        train(config, *overrides, **options)
    assert caught.value.exit_code == 7
    return str(caught.value).split("\n")


def answer_with(monkeypatch: pytest.MonkeyPatch, *plans: dict[str, Any] | str) -> list[dict[str, Any]]:
    """Let the planner give these answers in turn, the last one for ever; return what is asked."""
    asked: list[dict[str, Any]] = []

    class Planner:
        def __init__(self, gpu: Any, calibration: Any, allow: Any, workers: int) -> None:
            self.allow = allow

        def __enter__(self) -> "Planner":
            return self

        def __exit__(self, *_: object) -> None: ...

        def kill(self) -> None: ...

        def plan(self, configs: Any, **wish: Any) -> list[Answer]:
            asked.append({**wish, "memory": configs[0].to_data()["memory"]})
            answer = plans[min(len(asked), len(plans)) - 1]
            return [Answer(error=answer) if isinstance(answer, str) else Answer(plan=answer)]

    monkeypatch.setattr(report, "Session", Planner)
    return asked


def test_the_report_says_what_held_the_memory_and_the_patch_it_writes_is_taken(config: Path) -> None:
    """Planned for real, in a process of its own; the command that the report names trains to the end."""
    message, budget, peak, held, modules, advice, command = fail(config, "optimizer.lr=0.01")
    assert "memory.micro_batch=16" in message
    assert "Of the allocated" not in message
    assert budget == "  budget: 2.00 GiB were refused"
    assert "planned peak: " in peak
    assert "phase net, " in peak
    assert "activations " in held
    assert "optimizer" not in held, "plain SGD has no state"
    assert "net.stages.0" in modules
    assert modules.count(" MiB") == 5
    assert "micro batch 16: " in advice
    plan = config.parent / "runs" / "run" / "plan.yaml"
    assert command.split() == [
        *("mpt", "train", str(config), "optimizer.lr=0.01", "--runs", str(config.parent / "runs")),
        *("--with", str(plan), "--resume"),
    ]
    train(config, "optimizer.lr=0.01", patches=(plan,), resume="auto")
    assert (plan.parent / "summary.json").is_file()


def test_a_plan_that_fails_is_one_line_and_the_ladder_still_proposes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_with(monkeypatch, "cannot plan: the step looks at a tensor's value")
    lines = fail(config)
    assert "  what held the memory could not be planned: cannot plan: the step looks at a tensor's value" in lines
    assert load_config(config, patches=[config.parent / "runs/run/plan.yaml"]).to_data()["memory"]["micro_batch"] == {
        "size": 16
    }
    monkeypatch.setattr(report, "Session", lambda *_: (_ for _ in ()).throw(OSError(12, "Cannot allocate memory")))
    assert fail(config)[-1].endswith("could not be planned: [Errno 12] Cannot allocate memory")


def test_planning_that_takes_too_long_is_ended(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real worker is killed in the middle of its work, whatever that is by then."""
    monkeypatch.setattr(report, "SECONDS", 0.2)
    started = time.perf_counter()
    lines = fail(config)
    assert any("could not be planned: not done within 0 s" in line for line in lines)
    assert time.perf_counter() - started < 20
    assert lines[-1].endswith("--resume")


def test_a_move_that_would_not_help_is_passed_over(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer_with(monkeypatch, PEAK, PEAK, "cannot plan: no blocks", {**PEAK, "allocated": 2**30})
    lines = fail(config)
    assert [set(one["memory"]) - {"on_oom"} for one in asked] == [
        set(),
        {"micro_batch"},
        {"micro_batch"},
        {"recompute"},
    ]
    assert any("recompute sqrt: 1,024 MiB planned instead of 7,168 MiB" in line for line in lines)
    assert "  held by: activations 5,120 MiB, parameters 1,024 MiB, gradients 1.00 MiB" in lines


def test_an_adapted_run_proposes_on_top_of_what_it_adapted(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later proposal keeps the settings of an earlier one that is in force."""
    asked = answer_with(monkeypatch, PEAK)
    monkeypatch.setattr(report.ladder, "next_moves", lambda *_, **__: iter(()))
    lines = fail(config, "memory.on_oom=adapt", "train.batch_size=64")
    assert "nothing is left to adapt" in lines[0]
    assert not (config.parent / "runs/run/plan.yaml").exists()
    assert asked[0]["memory"] == {"on_oom": "adapt"}
    earlier = {"memory": {"micro_batch": 32}, "precision": {"mode": "amp"}}
    assert report.merge(earlier, {"memory": {"recompute": "all"}}) == {
        "memory": {"micro_batch": 32, "recompute": "all"},
        "precision": {"mode": "amp"},
    }


def recipe(patch: dict[str, Any], seconds: float, **changes: Any) -> Recipe:
    sizes = {"reserved": 2**30, "reserved_in_budget": 2**30, "budget_bytes": 6 * 2**30}
    plan = {**PEAK, "fits": True, "step_seconds": seconds, **sizes, **changes}
    return Recipe(patch, load_config(CONFIG), Answer(plan=plan))


def test_on_a_gpu_the_smallest_recipe_that_fits_is_proposed(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer changes before a faster recipe, and the arithmetic is changed last; nothing that fits is said too."""
    budget = report.Budget("6,144 MiB", find_gpu("rtx2060"), 6 * 2**30)
    monkeypatch.setattr(report, "find_budget", lambda device, message, earlier_peak: budget)
    asked = answer_with(monkeypatch, PEAK)
    both = {"memory": {"recompute": "all", "cpu_optimizer": True}}
    found = [
        recipe({"precision": {"mode": "amp"}}, 0.5),
        recipe(both, 0.7),
        recipe({"memory": {"recompute": "all"}}, 0.9),
        recipe({"memory": {"low_bit_optimizer": True}}, 0.6, inexact=["low_bit_optimizer"]),
        recipe({"memory": {"offload_activations": True}}, 0.6, tight=True),
        recipe({"memory": {"optimizer_in_backward": True}}, 0.1, reserved=2**33),
        recipe({"memory": {"recompute": "sqrt"}}, 0.8, fits=False, reserved=2**33),
    ]
    monkeypatch.setattr(report, "search", lambda *_: Search(found, [], []))
    lines = fail(config)
    assert asked[0]["budget_bytes"] == 6 * 2**30
    assert any(line.startswith("  try recompute all: fits in 6,144 MiB, exact") for line in lines)
    assert "recompute: all" in (config.parent / "runs/run/plan.yaml").read_text()
    del found[:-1]
    lines = fail(config)
    assert any("nothing fits: the smallest of 1 recipes needs 8,448 MiB (recompute sqrt)" in line for line in lines)
    assert not (config.parent / "runs/run-2/plan.yaml").exists()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Tried to allocate 2.00 GiB. GPU 0", "2.00 GiB were refused"),
        ("can't allocate memory: you tried to allocate 1073741824 bytes.", "1,024 MiB were refused"),
        ("you tried to allocate 512 bytes", "512 bytes were refused"),
        ("no room", "unknown on this device"),
    ],
)
def test_on_a_cpu_the_budget_is_what_was_refused(message: str, words: str) -> None:
    assert report.find_budget(torch.device("cpu"), message).text == words


def test_memory_that_runs_out_elsewhere_says_where(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(report, "add_report", lambda message, training, arguments: message)
    monkeypatch.setattr(Classify, "evaluate_batch", full)
    assert "step 2, outside the update" in fail(config, "memory.micro_batch=16")[0]
    monkeypatch.setattr("mpt.engine.assembly.build_run", full)
    assert "before the first step (no room): the weights alone" in fail(config)[0]


def test_the_budget_on_a_gpu_is_what_others_leave_and_the_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    properties = SimpleNamespace(name="NVIDIA GeForce RTX 2060", total_memory=6 * gib, major=7, minor=5)
    asked: list[int] = []

    def fraction(index: int) -> float:
        asked.append(operator.index(index))  # the true one takes no device without a number
        return 0.5

    for name, function in {
        "get_device_properties": lambda device: properties,
        "mem_get_info": lambda device: (4 * gib, 6 * gib),
        "memory_reserved": lambda device: gib,
        "max_memory_allocated": lambda device: gib,
        "current_device": lambda: 0,
        "get_per_process_memory_fraction": fraction,
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(report, "load_calibration", lambda name: Calibration(context_bytes=gib // 2))
    budget = report.find_budget(torch.device("cuda"), "", 2 * gib)
    assert budget.limit_bytes == 3 * gib + gib // 2
    assert asked == [0]
    assert "measured peak 2,048 MiB" in budget.text
