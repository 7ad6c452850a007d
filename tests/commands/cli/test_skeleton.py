"""`mpt init --part` writes parts that work from outside of the package, with every command."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mpt
from mpt.cli import main
from mpt.commands.cli.skeleton import SUBPACKAGE_OF
from mpt.config.finding.part_packages import KINDS, use_parts
from mpt.config.finding.registry import INSTALLED
from mpt.config.load import load_config
from mpt.memory.relieving.relief import reliefs

ALL_AT_ONCE = """
model: my_model
dataset: my_dataset
task: {loss: my_loss, metrics: [my_metric]}
precision: my_precision
memory: {my_trick: true, micro_batch: 4}
optimizer: my_optimizer
train: {steps: 2, batch_size: 8}
name: outside
"""


def run(*words: object) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    return caught.value.code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a part of every kind, as `mpt init` writes them."""
    folder = tmp_path_factory.mktemp("stranger") / "my parts"
    for kind in SUBPACKAGE_OF:
        assert run("init", "--part", kind, f"my_{kind}", "--into", folder) == 0
    return folder


@pytest.fixture(autouse=True)
def known(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Know no other parts, and be in an empty folder."""
    monkeypatch.setenv("MPT_PARTS", "")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("mpt.parts.")]:
        monkeypatch.delitem(sys.modules, name)


def test_help_names_the_folder_of_commands_in_whole_however_long_its_path_is(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--help", "--parts", folder) == 0
    assert "Commands of your parts in 'my parts'." in capsys.readouterr().out


def test_there_is_a_skeleton_for_every_kind_of_part() -> None:
    assert set(SUBPACKAGE_OF.values()) == set(KINDS)


def test_what_only_looks_sees_the_parts(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "all.yaml").write_text(ALL_AT_ONCE)
    assert run("validate", "all.yaml") == 2
    assert run("validate", "all.yaml", "--parts", folder) == 0
    capsys.readouterr()
    assert run("list", "--json", "--parts", folder) == 0
    listed = json.loads(capsys.readouterr().out)
    names = {name for table in listed.values() for name in table}
    assert {f"my_{kind}" for kind in SUBPACKAGE_OF if kind != "command"} <= names
    assert str(folder) in listed["models"]["my_model"]
    assert run("schema") == 0  # MPT_PARTS still has what --parts said
    assert "my_trick" in capsys.readouterr().out
    assert run("my_parts", "my-command", "--help") == 0


def test_one_configuration_of_parts_from_outside_goes_all_the_way(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "all.yaml").write_text(ALL_AT_ONCE)
    assert run("train", "all.yaml", "--parts", folder, "--quiet") == 0
    assert run("train", "all.yaml", "--resume", "train.steps=4", "--exact", "--quiet") == 0
    assert run("infer", "outside") == 0
    assert run("my_parts", "my-command", "outside") == 0
    assert "outside: 4 steps" in capsys.readouterr().out
    record = json.loads((tmp_path / "runs" / "outside" / "parts.json").read_text("utf-8"))
    subpackages = {Path(file).parent.name for file in record[0]["files"]}
    assert subpackages == {"nn", "data", "losses", "metrics", "precision", "memory", "optim"}
    planned = mpt.plan(load_config(tmp_path / "all.yaml"), gpu="rtx2060")  # in a process of its own
    assert planned.plan.allocated > 0
    os.environ["MPT_PARTS"] = ""
    assert run("infer", "outside") == 2
    assert f"add --parts {folder}" in capsys.readouterr().err


def test_a_task_from_outside_trains_a_model_of_the_package(folder: Path, tmp_path: Path) -> None:
    config = mpt.load(
        folder / "configs" / "my_task.yaml", "train.steps=1", "train.batch_size=8", parts=[folder]
    )
    trained = mpt.train(config, runs=tmp_path)
    assert 0 <= trained.figures["accuracy"] <= 1


def test_a_trick_from_outside_is_exact_and_proposed_by_the_planner(folder: Path) -> None:
    use_parts([folder])
    assert (True,) in [one.proposals for one in reliefs("activations") if one.name == "my_trick"]
    weights = []
    for trick in ("true", "false"):
        config = mpt.load(
            folder / "configs" / "my_trick.yaml", f"memory.my_trick={trick}", "train.batch_size=8"
        )
        built = mpt.build(config)
        mpt.update(built, next(built.batches()), 0)
        weights.append(list(built.modules["net"].parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_the_emulated_float8_rounds_operands_and_passes_gradients(folder: Path) -> None:
    use_parts([folder])
    plugin = INSTALLED.find("precision", "my_precision")
    assert plugin
    module = plugin.load()
    values = torch.randn(64, requires_grad=True)
    rounded = module.round_to_float8(values, 1.0)
    assert 0 < (rounded - values).abs().max() < 0.07 * values.abs().max()
    rounded.sum().backward()
    assert torch.equal(values.grad, torch.ones(64))
    policy = module.build("my_precision", module.Settings(), torch.device("cpu"))
    layer = torch.nn.Linear(64, 8)
    with policy.forward():
        inside = layer(values)
        with policy.float32():
            assert torch.equal(
                layer(values), torch.nn.functional.linear(values, layer.weight, layer.bias)
            )
    assert not torch.equal(inside, layer(values))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--part", "taks", "x"], "did you mean 'task'"),
        (["--part", "task", "my-task"], "found the name 'my-task'"),
        (["--part", "task", "class"], "found the name 'class'"),
        (["--part", "task"], "NAME is missing"),
    ],
)
def test_a_wrong_wish_is_explained(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("init", *words) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten_and_the_default_folder_is_parts(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run("init", "--part", "loss", "mine") == 0
    assert (tmp_path / "parts" / "losses" / "mine.py").is_file()
    (tmp_path / "parts" / "losses" / "mine.py").unlink()
    assert run("init", "--part", "loss", "mine") == 2  # its configuration is there
    assert not (tmp_path / "parts" / "losses" / "mine.py").exists()
    assert run("init", "--part", "loss", "another", "--parts", folder) == 0
    assert (folder / "losses" / "another.py").is_file()


def test_the_skeletons_keep_the_style_of_the_house(folder: Path) -> None:
    for words in (["check", "--select", "E,F,UP,B,SIM,C4"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--line-length", "120", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_skeleton_s_own_test_of_its_plan_passes(folder: Path) -> None:
    """It asked the plan for a key, which was refused, and only the slow test below saw it."""
    tests = runpy.run_path(str(folder / "tests" / "test_my_task.py"))
    tests["test_its_memory_is_planned"]()


@pytest.mark.slow
def test_the_tests_that_come_with_the_skeletons_pass(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_precision_mode_from_outside_is_compared(folder: Path, tmp_path: Path) -> None:
    config = mpt.load(
        folder / "configs" / "my_precision.yaml", "train.steps=3", "precision=null", parts=[folder]
    )
    comparison = mpt.compare(config, "fp32", "my_precision", seeds=1, runs=tmp_path)
    assert [row.group.label for row in comparison.rows] == ["fp32", "my_precision"]
