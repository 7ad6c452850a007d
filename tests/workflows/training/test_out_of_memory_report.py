"""The report that is printed when memory runs out for good, and the patch that it proposes.

Runs here are real, and so are the processes that plan: only a CPU's memory does not run out when a test wants it to, so
a task refuses more samples than a limit, in torch's words. A limit that an allocator keeps is rehearsed on a pretended
card: `tests/cuda_rehearsal/test_out_of_memory_report.py`.
"""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import mpt
import mpt.workflows.training.out_of_memory_report as report
from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run
from mpt.config.load import load_config
from mpt.errors import MemoryBudgetError
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes.recipe import Recipe
from mpt.seams import Loss
from mpt.tasks.classify import Classify
from tests.planner.made_plans import make_plan
from tests.planner.test_command import Shared

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 8}
dataset: digits
precision: fp32
optimizer: {name: sgd, lr: 0.05}
train: {steps: 2, batch_size: 32}
name: run
"""
REFUSED = "Tried to allocate 2.00 GiB. Of the allocated memory much is"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture(scope="module")
def opened() -> Iterator[Session]:
    with Session(find_gpu("rtx3060"), Calibration()) as session:
        yield session


@pytest.fixture
def one_planner(opened: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one planning process serve the tests that do not ask how it is started or ended."""
    monkeypatch.setattr(report, "Session", Shared(opened))


@pytest.fixture
def refuse_above(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let memory run out above so many samples at once."""
    original = Classify.losses

    def set_limit(samples: int) -> None:
        def losses(self: Classify, batch: dict[str, Tensor]) -> Iterator[Loss]:
            if len(batch["image"]) > samples:
                raise torch.OutOfMemoryError(REFUSED)
            yield from original(self, batch)

        monkeypatch.setattr(Classify, "losses", losses)

    return set_limit


def train(config: Path, *overrides: str, **options: Any) -> None:
    runs = str(config.parent / "runs")
    run(TrainArguments(config=config, overrides=overrides, runs=runs, quiet=True, **options))


def fail(config: Path, *overrides: str, **options: Any) -> list[str]:
    with pytest.raises(MemoryBudgetError) as caught:
        train(config, *overrides, **options)
    assert caught.value.exit_code == 7
    return str(caught.value).split("\n")


@pytest.mark.usefixtures("one_planner")
def test_the_report_says_what_held_the_memory_and_the_patch_it_writes_is_taken(
    config: Path, refuse_above: Callable[[int], None]
) -> None:
    refuse_above(16)
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
    assert shlex.split(command) == [
        *("mpt", "train", str(config), "optimizer.lr=0.01", "--runs", str(config.parent / "runs")),
        *("--with", str(plan), "--resume"),
    ]
    train(config, "optimizer.lr=0.01", patches=(plan,), resume="auto")
    assert (plan.parent / "summary.json").is_file()


@pytest.mark.usefixtures("one_planner")
def test_python_is_told_what_to_call(config: Path, refuse_above: Callable[[int], None]) -> None:
    refuse_above(16)
    runs = config.parent / "runs"
    with pytest.raises(MemoryBudgetError) as caught:
        mpt.train(mpt.load(config), runs=runs)
    call = str(caught.value).split("\n")[-1].strip()
    assert call.startswith(f"mpt.train(mpt.load('{runs / 'run' / 'config.yaml'}', patches=[")
    again = eval(call, {"mpt": mpt})
    assert again.path == runs / "run"
    assert again.is_finished


@pytest.mark.parametrize(
    ("program", "reason"), [("/bin/false", "ended"), ("/no/python", "No such file")]
)
def test_planning_that_fails_is_one_line_and_the_reason_why_training_stopped_is_kept(
    config: Path,
    refuse_above: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    reason: str,
) -> None:
    """Planning processes end at once, or cannot be started."""
    refuse_above(16)
    monkeypatch.setattr(sys, "executable", program)
    lines = fail(config)
    assert lines[0].startswith("out of memory")
    (line,) = [line for line in lines if "could not be planned" in line]
    assert reason in line
    if program == "/bin/false":  # the ladder's next move needs no plan
        patched = load_config(config, patches=[config.parent / "runs/run/plan.yaml"]).to_data()
        assert patched["memory"]["micro_batch"] == {"size": 16}


def test_planning_that_takes_too_long_is_ended(
    config: Path, refuse_above: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is killed in the middle of its work, whatever that is by then."""
    refuse_above(16)
    monkeypatch.setattr(report, "SECONDS", 0.2)
    started = time.perf_counter()
    lines = fail(config)
    assert any("could not be planned: not done within 0 s" in line for line in lines)
    assert time.perf_counter() - started < 20
    assert lines[-1].endswith("--resume")


@pytest.mark.usefixtures("one_planner")
def test_a_move_that_would_not_help_is_passed_over(
    config: Path, refuse_above: Callable[[int], None]
) -> None:
    """Wide layers on few samples: the peak is in the optimizer, and smaller micro-batches do not lower it."""
    refuse_above(1)
    lines = fail(
        config,
        "model.features=64",
        "train.batch_size=4",
        "optimizer.name=adam",
        "memory.on_oom=stop",
    )
    peak = next(line for line in lines if "planned peak" in line)
    assert "phase net, step" in peak
    assert not any("try " in line for line in lines[1:]), lines
    assert not (config.parent / "runs/run/plan.yaml").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_planner")
def test_an_adapted_run_is_planned_as_it_was_adapted(
    config: Path, refuse_above: Callable[[int], None]
) -> None:
    refuse_above(0)
    lines = fail(config, "memory.on_oom=adapt")
    assert "a micro-batch of 1 is too much already" in lines[0]
    assert any("planned peak: " in line for line in lines)
    assert not any("micro batch" in line for line in lines[1:]), "it is as small as can be"


def test_a_proposal_keeps_the_settings_of_an_earlier_one() -> None:
    earlier = {"memory": {"micro_batch": 32}, "precision": {"mode": "amp"}}
    assert report.merge(earlier, {"memory": {"recompute": "all"}}) == {
        "memory": {"micro_batch": 32, "recompute": "all"},
        "precision": {"mode": "amp"},
    }


def recipe(patch: dict[str, Any], seconds: float, **changes: Any) -> Recipe:
    figures: dict[str, Any] = {
        "reserved": 2**30,
        "reserved_in_budget": 2**30,
        "allocated": 7 * 2**30,
        "budget_bytes": 6 * 2**30,
        "context_bytes": 2**28,
        "fits": True,
    }
    return Recipe(
        patch, load_config(CONFIG), make_plan(**{**figures, "step_seconds": seconds, **changes})
    )


def test_the_smallest_change_that_fits_is_chosen_and_that_nothing_fits_is_said() -> None:
    """Fewer changes before a faster recipe, and the arithmetic is changed last."""
    found = [
        recipe({"precision": {"mode": "amp"}}, 0.5),
        recipe({"memory": {"recompute": "all", "cpu_optimizer": True}}, 0.7),
        recipe({"memory": {"recompute": "all"}}, 0.9),
        recipe({"memory": {"low_bit_optimizer": True}}, 0.6, inexact=["low_bit_optimizer"]),
        recipe({"memory": {"offload_activations": True}}, 0.6, tight=True),
        recipe({"memory": {"optimizer_in_backward": True}}, 0.1, reserved=2**33),
        recipe({"memory": {"recompute": "sqrt"}}, 0.8, fits=False, reserved=2**33),
    ]
    stood = make_plan(allocated=7 * 2**30, reserved=2**33)
    findings = report.Findings(plan=stood)
    report.choose_recipe(findings, stood, found, 6 * 2**30)
    assert findings.patch == {"memory": {"recompute": "all"}}
    assert findings.verdict.startswith("recompute all: fits in 6,144 MiB, exact")
    nothing = report.Findings(plan=stood)
    report.choose_recipe(nothing, stood, found[-1:], 6 * 2**30)
    assert nothing.verdict.startswith(
        "nothing fits: the smallest of 1 recipes needs 8,448 MiB (recompute sqrt)"
    )
    assert not nothing.patch


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("Tried to allocate 2.00 GiB. GPU 0", "2.00 GiB were refused"),
        (
            "can't allocate memory: you tried to allocate 1073741824 bytes.",
            "1,024 MiB were refused",
        ),
        ("you tried to allocate 512 bytes", "512 bytes were refused"),
        ("no room", "unknown on this device"),
    ],
)
def test_on_a_cpu_the_budget_is_what_was_refused(message: str, words: str) -> None:
    assert report.find_budget(torch.device("cpu"), message).text == words


@pytest.mark.usefixtures("one_planner")
def test_memory_that_runs_out_elsewhere_says_where(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Classify, "evaluate_batch", full)
    lines = fail(config, "memory.micro_batch=16")
    assert "step 2, outside the update" in lines[0]
    assert any("planned peak: " in line for line in lines)
