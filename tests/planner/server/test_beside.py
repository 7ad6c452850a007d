"""Plans made beside a run: in a process of their own, told in the run's folder, and never in the run's way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mpt.config.load import load_config
from mpt.engine.state.memory import AllocatorPeaks
from mpt.parallel.world import World
from mpt.planner.facts.calibration import Calibration, save_calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.plans.plan import Wish, plan_config
from mpt.planner.server.beside import PlanBeside, launch, plan_beside, request
from mpt.planner.trace.trace import live_peak
from mpt.report.reading.read_run import read_run
from mpt.report.run_page.page import write_report
from tests.planner.configs import DIGITS, make
from tests.planner.cpu_truth import trace_real
from tests.programs import run_mpt

CUDA = torch.device("cuda")
MIB = 2**20


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A card that torch tells of without there being one."""
    properties = SimpleNamespace(
        name="NVIDIA GeForce RTX 2060", total_memory=6 * 2**30, major=7, minor=5
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def planned(wish: dict[str, Any], path: Path) -> dict[str, Any]:
    plan = PlanBeside(path, launch(wish))
    plan.wait(120)
    assert plan.process is None
    answer: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return answer


@pytest.mark.usefixtures("card")
def test_a_run_on_a_gpu_is_planned_for_that_card_as_it_was_calibrated(tmp_path: Path) -> None:
    save_calibration("rtx2060", Calibration(context_bytes=123 * MIB, source="runs/before"))
    path = tmp_path / "plan.json"
    answer = planned(request(make("small_cnn", "amp", 64), DIGITS, CUDA, path), path)
    assert (answer["kind"], answer["gpu"], answer["calibrated_by"]) == (
        "cuda",
        "rtx2060",
        "runs/before",
    )
    assert answer["context_bytes"] == 123 * MIB
    assert (
        0 < sum(answer["by_category"].values()) <= answer["peak_bytes"] <= answer["reserved_bytes"]
    )


@pytest.mark.usefixtures("card")
def test_a_run_of_several_ranks_is_planned_as_one_of_them_with_its_own_samples(
    tmp_path: Path,
) -> None:
    config, path = make("small_cnn", "amp", 64), tmp_path / "plan.json"
    two = cast(World, SimpleNamespace(size=2, on_machine=2))
    wish = request(config, DIGITS, CUDA, path, world=two)
    rank = Wish(placement=Placement(2, per_machine=2).as_data())
    expected = [
        plan_config(config, DIGITS, find_gpu("rtx2060"), Calibration(), one).allocated
        for one in (rank, Wish())
    ]
    assert expected[0] != expected[1]
    assert planned(wish, path)["peak_bytes"] == expected[0]
    config = load_config(
        {**config.to_data(), "train": {**config.to_data()["train"], "plan_memory": True}}
    )
    plan_beside(config, DIGITS, torch.device("cpu"), path, world=two).wait(0)
    assert "on CUDA devices alone" in json.loads(path.read_text("utf-8"))["error"]


def test_a_run_on_a_cpu_is_planned_with_the_optimizer_that_a_cpu_gets(tmp_path: Path) -> None:
    data = make("dcgan").to_data()
    # foreach is left open
    config = load_config({**data, "optimizer": {"name": "adam"}, "precision": {"mode": "fp32"}})
    path = tmp_path / "plan.json"
    answer = planned(request(config, DIGITS, torch.device("cpu"), path), path)
    assert answer["kind"] == "live tensors"
    assert answer["peak_bytes"] == live_peak(
        trace_real(config, DIGITS, config.train.batch_size, batch_ahead=False)
    )


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        pytest.param(
            "classify_digits",
            ["train.epochs=null", "train.steps=3", "train.batch_size=512", "memory.micro_batch=64"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "wgan_gp",
            # the generator's 2nd step is 6th
            ["train.steps=7", "model.hidden=1024", "task.metric_samples=64"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_on_a_cpu_needs_what_was_planned(
    file: str, settings: list[str], tmp_path: Path
) -> None:
    """Through the loop itself, whose batches are a good part of what a small model holds."""
    words = ("train", f"@{file}", "train.plan_memory=true", "name=run", *settings)
    run_mpt(*words, "--device", "cpu", "--quiet", cwd=tmp_path, check=True, timeout=None)
    plan, summary = (
        json.loads((tmp_path / "runs/run" / name).read_text())
        for name in ("plan.json", "summary.json")
    )
    assert plan["peak_bytes"] == pytest.approx(summary["peak_memory"]["peak_bytes"], rel=0.001)


@pytest.mark.usefixtures("card")
def test_the_report_puts_the_measured_steps_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: run\n", "utf-8")
    (tmp_path / "plan.json").write_text(
        json.dumps(
            {
                "kind": "cuda",
                "peak_bytes": 95 * MIB,
                "reserved_bytes": 110 * MIB,
                "by_category": {"batch": 7},
            }
        )
    )
    memory = {"kind": "cuda", "peak_bytes": 500 * MIB, "reserved_bytes": 600 * MIB}
    memory |= {"steps_peak_bytes": 100 * MIB, "steps_reserved_bytes": 100 * MIB}
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 2, "total_steps": 2, "peak_memory": memory}), "utf-8"
    )
    write_report(tmp_path)
    assert "| allocated | 95.0 MiB | 100.0 MiB | -5.0 % |" in (tmp_path / "report.md").read_text(
        "utf-8"
    )
    assert "| reserved | 110.0 MiB | 100.0 MiB | +10.0 % |" in (tmp_path / "report.md").read_text(
        "utf-8"
    )
    assert "Memory, planned and measured" in (tmp_path / "report.html").read_text("utf-8")
    compared = json.loads((tmp_path / "report.json").read_text("utf-8"))["plan"]["compared"]
    assert [round(row["error"], 3) for row in compared] == [-0.05, 0.1]


def test_a_plan_of_something_else_is_not_compared(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: run\n", "utf-8")
    (tmp_path / "plan.json").write_text(
        json.dumps({"kind": "cuda", "peak_bytes": 1, "reserved_bytes": 1}), "utf-8"
    )
    memory = {"kind": "live tensors", "peak_bytes": 1}
    (tmp_path / "summary.json").write_text(json.dumps({"steps": 2, "peak_memory": memory}))
    assert read_run(tmp_path).planned == []


def test_a_run_of_one_step_is_not_compared_with_a_plan_of_two(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: run\n", "utf-8")
    (tmp_path / "plan.json").write_text(
        json.dumps({"kind": "cuda", "peak_bytes": 2, "reserved_bytes": 2}), "utf-8"
    )
    for steps, compared in ((1, 0), (2, 2)):
        memory = {"kind": "cuda", "peak_bytes": 1, "reserved_bytes": 1}
        (tmp_path / "summary.json").write_text(json.dumps({"steps": steps, "peak_memory": memory}))
        assert len(read_run(tmp_path).planned) == compared


@pytest.mark.parametrize(
    ("adapted", "phase", "why"),
    [
        ({"micro_batch": 64}, "net", "since then memory.micro_batch=64"),
        ({}, "late", "its peak is in phase late, which has not begun"),
    ],
)
def test_a_plan_of_other_steps_than_were_taken_is_not_compared(
    adapted: dict[str, int], phase: str, why: str, tmp_path: Path
) -> None:
    """A batch that was halved for want of memory was said to be planned 105 % too high."""
    (tmp_path / "config.yaml").write_text("name: run\n", "utf-8")
    plan = {"kind": "cuda", "peak_bytes": 2, "reserved_bytes": 2}
    plan["moment"] = f"phase {phase}, backward (step 2)"
    (tmp_path / "plan.json").write_text(json.dumps(plan), "utf-8")
    (tmp_path / "metrics.jsonl").write_text('{"kind":"train","step":2,"losses":{"net/loss":1.0}}\n')
    memory = {"kind": "cuda", "peak_bytes": 1, "reserved_bytes": 1}
    summary = {"steps": 2, "peak_memory": memory, "adapted": adapted}
    (tmp_path / "summary.json").write_text(json.dumps(summary), "utf-8")
    assert read_run(tmp_path).planned == []
    write_report(tmp_path)
    for page in ("report.md", "report.html"):
        assert why in (tmp_path / page).read_text("utf-8").replace("\\", "")


def test_a_model_that_cannot_be_planned_leaves_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    wish = request(
        make("tests.planner.models:LooksAtValues"), DIGITS, torch.device("cpu"), path, ["tests"]
    )
    assert "looks at a tensor's value" in planned(wish, path)["error"]


def test_a_plan_that_is_late_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    started = time.monotonic()
    PlanBeside(path, process).wait(0.2)
    assert time.monotonic() - started < 20
    assert process.returncode != 0
    assert "not done" in json.loads(path.read_text("utf-8"))["error"]


def test_a_planning_process_that_dies_leaves_its_exit_code(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PlanBeside(path, subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])).wait(60)
    assert "ended with 3" in json.loads(path.read_text("utf-8"))["error"]


def test_a_run_that_fails_takes_its_plan_with_it(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(ZeroDivisionError), PlanBeside(tmp_path / "plan.json", process):
        raise ZeroDivisionError
    assert process.returncode is not None


def test_a_resumed_run_forgets_the_plan_before(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("{}", "utf-8")
    config = make("small_cnn")
    settings = config.train.model_copy(update={"plan_memory": True})
    config = type(config)(**{**vars(config), "train": settings})
    with plan_beside(config, DIGITS, torch.device("cpu"), path):
        assert not path.exists()


def test_evaluation_and_saving_are_kept_out_of_the_steps_peaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peak = {"allocated": 0, "reserved": 0, "count": 0}
    monkeypatch.setattr(
        torch.accelerator,
        "memory_stats",
        lambda device: {"allocation.all.allocated": peak["count"]},
    )
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: peak["allocated"])
    monkeypatch.setattr(torch.accelerator, "max_memory_reserved", lambda device: peak["reserved"])
    monkeypatch.setattr(
        torch.accelerator, "reset_peak_memory_stats", lambda device: peak.update(allocated=10)
    )
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, raising=False)
    peaks = AllocatorPeaks()
    peak.update(allocated=100, reserved=200, count=1)
    with peaks.beside_steps(CUDA):
        peak.update(allocated=300, reserved=400, count=2)
    peaks.count_steps(CUDA)  # no step since: what the evaluation left is not the steps'
    peak.update(allocated=120, count=3)
    peaks.count_steps(CUDA)
    assert peaks.to_record(CUDA) == {
        "kind": "cuda",
        "peak_bytes": 300,
        "reserved_bytes": 400,
        "steps_peak_bytes": 120,
        "steps_reserved_bytes": 200,
    }
