"""`mpt plan` as a user types it: output, patch, picture and exit codes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import yaml

from mpt.commands import plan
from mpt.commands.plan import Command as PlanArguments
from mpt.commands.planning import plan_calibrate
from mpt.commands.planning.plan_calibrate import Command as PlanCalibrateArguments
from mpt.config.finding.shipped import shipped_configs
from mpt.config.load import load_config
from mpt.errors import ConfigError, InputOutputError, MayFitError, MemoryBudgetError
from mpt.planner.answers.plan import Plan
from mpt.planner.client.session import Session
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.recipes import planned
from mpt.planner.recipes.patches import Combinations
from mpt.planner.recipes.printed import plan_schema
from mpt.planner.recipes.recipe import Recipe
from mpt.planner.recipes.search import Search
from mpt.planner.recipes.words import describe_counts, headline
from tests.config.test_json_schema import accepts
from tests.planner.made_plans import make_plan

CONFIG = """
model: {name: tests.planner.models:UNet, image_size: 16, channels: 1}
dataset: {name: digits, image_size: 16}
precision: fp32
optimizer: {name: adam}
train: {batch_size: 256}
"""
FEW_TRICKS = ({}, {"recompute": "all"}, {"micro_batch": 64, "optimizer_in_backward": True})
"""The last clashes: it must be left out and counted."""


class Shared:
    """Stands for the command's session: one planning process serves all tests, since importing torch is most of it."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def __call__(self, *given: Any, **named: Any) -> Self:
        asked = inspect.signature(Session).bind(*given, **named)
        asked.apply_defaults()
        wanted, session = asked.arguments, self.session
        session.placement = {} if wanted["placement"] is None else asdict(wanted["placement"])
        session.gpu, session.calibration, session.allow = (
            wanted["gpu"],
            wanted["calibration"],
            list(wanted["allow"]),
        )
        session.judge_by(wanted["budgets"])
        return self

    def __enter__(self) -> Session:
        return self.session

    def __exit__(self, *exception: object) -> None:
        pass


@pytest.fixture
def arguments(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[PlanArguments]:
    before = session.gpu, session.calibration, session.allow
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(planned, "Session", Shared(session))
    few = Combinations(single=FEW_TRICKS, pairs=(), split=({},))
    monkeypatch.setattr("mpt.planner.recipes.search.combinations", lambda allow_lossy: few)
    path = tmp_path / "unet.yaml"
    path.write_text(CONFIG)
    yield PlanArguments(
        config=path, gpu="rtx2060", allow=("tests",), output=str(tmp_path / "plan.yaml")
    )
    session.gpu, session.calibration, session.allow = before
    session.placement, session.torch = {}, None


def with_vram(arguments: PlanArguments, vram: str | None, **more: object) -> PlanArguments:
    output = arguments.output if vram else None
    return PlanArguments(**{**vars(arguments), "vram": vram, "output": output, **more})  # type: ignore[arg-type]


def test_without_a_budget_the_plan_is_printed_against_the_whole_card(
    arguments: PlanArguments, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.run(with_vram(arguments, None, largest=True, verbose=True))
    printed = capsys.readouterr().out
    # the answer first
    assert printed.startswith("tests.planner.models-UNet-fp32, batch 256, on rtx2060: fits in")
    for words in (
        "allocated",
        "reserved",
        "fits in 5,929 MiB",
        "largest batch",
        "activations",
        "net.first",
        "phase net",
    ):
        assert words in printed


def read(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what was printed as JSON, which is as its schema says."""
    text = capsys.readouterr().out
    found: dict[str, Any] = json.loads(text)
    schema = plan_schema()
    assert accepts(schema, found, schema)
    return found


def test_a_heading_names_the_model_that_an_override_chose() -> None:
    def heading(*overrides: str) -> str:
        return load_config(
            shipped_configs()["resnet50_imagefolder"], overrides=list(overrides)
        ).heading

    assert heading() == "resnet50"
    assert heading("model=torchvision:resnet18") == "resnet50 (torchvision:resnet18)"


def test_a_budget_gives_a_patch_that_fits_and_a_picture(
    arguments: PlanArguments, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.run(with_vram(arguments, None, json=True))
    whole = read(capsys)["plan"]
    budget = (whole["context_bytes"] + int(0.7 * whole["reserved"])) // 2**20
    plan.run(with_vram(arguments, f"{budget}MiB", json=True, largest=True))
    told = read(capsys)
    assert told["recipes"][0]["largest_batch"] >= told["recipes"][0]["batch_size"]
    assert all(one["largest_batch"] is None for one in told["recipes"][1:])
    assert told["plan"]["fits"] is False
    assert any("optimizer_in_backward" in one["reason"] for one in told["refused"])
    best = told["recipes"][0]
    assert best["fits"]
    assert best["total_bytes"] <= budget * 2**20
    assert all(recipe["cost"] for recipe in told["recipes"])
    patch, picture = (Path(path) for path in told["written"])
    assert yaml.safe_load(patch.read_text()) == best["patch"]
    assert picture.stat().st_size > 10_000
    # The patch is one that `mpt train --with` accepts, and planning with it gives the promised figure.
    assert load_config(arguments.config, patches=[patch], allow=["tests"])
    plan.run(with_vram(arguments, None, patches=(patch,), json=True))
    again = json.loads(capsys.readouterr().out)["plan"]
    assert again["reserved"] == best["reserved"]


def test_recipes_are_told_with_their_costs_and_the_command_that_trains_the_first(
    arguments: PlanArguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan.run(
        with_vram(arguments, "500MiB", overrides=("train.batch_size=512", "memory.micro_batch=256"))
    )
    printed = capsys.readouterr().out
    assert "fastest that fit in 500 MiB" in printed
    assert "recompute all" in printed
    assert "refused: " in printed
    command = f"  mpt train {arguments.config} train.batch_size=512 memory.micro_batch=256 --allow tests --with"
    assert any(line.startswith(command) for line in printed.splitlines())
    assert all(len(line) <= 80 for line in printed.splitlines() if "mpt train" not in line)
    assert Path(arguments.output or "").read_text().startswith(f"# {command.strip()}")


def test_a_patch_names_the_command_with_all_that_was_planned_for(arguments: PlanArguments) -> None:
    asked = replace(
        arguments, vram="6GiB", nproc=4, per_machine=2, patches=(Path("a.yaml"),), json=True
    )
    said = plan.plan_command(asked)
    assert "--with a.yaml --allow tests --vram 6GiB" in said
    assert said.endswith("--nproc 4 --per-machine 2")


def test_when_nothing_fits_the_smallest_is_named_and_the_exit_code_is_7(
    arguments: PlanArguments,
) -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"the smallest of \d+ recipes found needs .* MiB \("
    ) as refused:
        plan.run(with_vram(arguments, "453MiB", overrides=("train.batch_size=2",)))
    assert refused.value.exit_code == 7
    assert not Path(arguments.output or "").exists()


def test_a_budget_below_the_context_is_refused_at_once(arguments: PlanArguments) -> None:
    with pytest.raises(MemoryBudgetError, match="the CUDA context"):
        plan.run(with_vram(arguments, "300MiB"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gpu": "rtx2061", "output": None}, "nearest: "),
        ({"vram": "six"}, "6GiB"),
        ({}, "--output: .* add --vram"),
    ],
)
def test_bad_arguments_are_answered_before_any_planning(
    arguments: PlanArguments, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan.run(PlanArguments(**{**vars(arguments), **changes}))  # type: ignore[arg-type]


def test_a_patch_that_is_planned_with_is_not_written_over(
    arguments: PlanArguments,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = tmp_path / "plan.yaml"
    given.write_text("train: {log_every: 7}\n")
    plan.run(
        with_vram(
            arguments,
            "500MiB",
            output=None,
            patches=(Path("plan.yaml"),),
            overrides=("train.batch_size=512",),
        )
    )
    assert given.read_text() == "train: {log_every: 7}\n"
    assert "plan-2.yaml" in capsys.readouterr().out
    assert (tmp_path / "plan-2.yaml").is_file()
    with pytest.raises(ConfigError, match="name another file"):
        plan.run(with_vram(arguments, "6GiB", output=str(given), patches=(Path("plan.yaml"),)))


@pytest.mark.parametrize("output", [".", "missing/plan.yaml"])
def test_a_patch_that_cannot_be_written_is_told_before_any_planning(
    arguments: PlanArguments, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    monkeypatch.setattr(plan, "load_planned", lambda *args, **kwargs: pytest.fail("planned"))
    with pytest.raises(InputOutputError, match="cannot be written"):
        plan.run(with_vram(arguments, "6GiB", output=output))


def test_auto_needs_a_gpu_in_this_machine(
    arguments: PlanArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        plan.run(with_vram(arguments, None, gpu="auto"))


def test_calibrating_with_a_run_on_a_cpu_is_refused(
    arguments: PlanArguments, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "env.json").write_text('{"devices": []}')
    (run / "summary.json").write_text('{"peak_memory": {"kind": "tracked"}}')
    with pytest.raises(ConfigError, match="no measured peak of a GPU"):
        plan_calibrate.run(PlanCalibrateArguments(str(run), runs=str(tmp_path / "runs")))


def test_calibrating_with_a_run_on_a_gpu_keeps_what_it_teaches(
    arguments: PlanArguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(CONFIG)
    (run / "env.json").write_text('{"devices": [{"name": "NVIDIA GeForce RTX 2060"}]}')
    peak = {"kind": "cuda", "peak_bytes": 2**30, "reserved_bytes": 2**30 + 2**27}
    (run / "summary.json").write_text(
        json.dumps({"peak_memory": peak, "median_step_seconds": 0.02})
    )
    plan_calibrate.run(
        PlanCalibrateArguments(str(run), runs=str(tmp_path / "runs"), allow=("tests",))
    )
    assert "rtx2060: planned" in capsys.readouterr().out
    plan.run(with_vram(arguments, None, json=True))
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"]["source"] == str(run)
    assert told["calibration"]["time_factor"] > 1


def test_what_fits_as_it_stands_is_not_changed(
    arguments: PlanArguments, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.run(with_vram(arguments, "5GiB"))
    assert "nothing to change" in capsys.readouterr().out
    assert not Path(arguments.output or "").exists()


def test_a_patch_that_is_there_is_not_written_over(
    arguments: PlanArguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.yaml").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        plan.run(with_vram(arguments, "500MiB"))
    monkeypatch.chdir(tmp_path)
    assert plan.choose_output(arguments, None, "plan") == Path("plan-2.yaml")


def test_a_lossy_recipe_is_marked_in_the_answer_the_patch_and_the_picture(
    arguments: PlanArguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(
        plan, "write_timeline", lambda path, panels, *rest: drawn.extend(name for name, _ in panels)
    )
    figures: dict[str, Any] = {"batch_size": 256, "reserved": 2**31, "reserved_in_budget": 2**30}
    figures |= {"budget_bytes": 2**30, "inexact": ["low_bit_optimizer"], "fits": True}
    config, gpu = load_config(yaml.safe_load(CONFIG), allow=["tests"]), find_gpu("rtx2060")
    recipe = Recipe({"memory": {"low_bit_optimizer": True}}, config, make_plan(**figures))
    whole = make_plan(**{**figures, "fits": False})
    asked = with_vram(arguments, "1GiB", allow_lossy=True, desktop="16MiB")
    planned: Any = SimpleNamespace(
        config=config, gpu=gpu, plan=whole, found=Search([recipe], [], []), budget=2**30
    )
    plan.write_results(Path(asked.output or ""), asked, planned)
    assert drawn == [
        "as it stands: 2,048 MiB",
        "low bit optimizer (lossy, not bit-equal, close): 1,024 MiB",
    ]
    patch = Path(asked.output or "").read_text()
    assert "# lossy: the learned result changes" in patch
    # the command that predicted it predicts it again
    assert "--desktop 16MiB --allow-lossy" in patch
    assert headline(config, gpu, whole, [recipe]).endswith("; 1 way that may fit, 1 of them lossy:")
    assert describe_counts(Search([recipe], [], [])) == "1 recipe traced; 0 fit, 1 more may"


def test_the_gate_is_an_exit_code(
    arguments: PlanArguments, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="--gate: there is nothing to fit into"):
        plan.run(with_vram(arguments, None, gpu=None, gate=True))
    plan.run(with_vram(arguments, None, gate=True, json=True))
    told = json.loads(capsys.readouterr().out)["plan"]
    assert told["verdict"] == "fits"
    assert told["chance"] > 0.99
    planned = Plan.from_data(told)
    exact = (told["context_bytes"] + told["reserved"]) * 101 // 100 // 2**20
    with pytest.raises(MayFitError, match=r"may fit in .* MiB: \d+ % likely"):
        plan.pass_gate(replace(planned, budget_bytes=exact * 2**20))
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        plan.pass_gate(replace(planned, fits=False, budget_bytes=2**20))


def test_a_patch_for_another_batch_is_noticed(
    arguments: PlanArguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.run(with_vram(arguments, "500MiB", overrides=("train.batch_size=512",)))
    capsys.readouterr()
    plan.run(with_vram(arguments, None, patches=(tmp_path / "plan.yaml",)))
    assert "planned for batch_size 512, not 256" in capsys.readouterr().err
