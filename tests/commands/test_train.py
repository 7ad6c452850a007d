"""`mpt train` as a user meets it: options, resumes that are refused or warned about, checkpoints that are damaged."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from PIL import Image

from mpt.commands.train import Command as TrainArguments
from mpt.commands.train import run
from mpt.config.load import load_config
from mpt.engine.loop.training import Training
from mpt.errors import CheckpointError, ConfigError, DataError, Interrupted
from mpt.planner.server.beside import PlanBeside
from mpt.report.reading.read_run import read_run
from mpt.run.checkpoints import checkpoint
from mpt.run.records.layout import create_run, open_run
from mpt.workflows.training.train import closing_line
from tests.programs import run_mpt

CONFIG = """
model: {name: small_cnn, features: 4, image_size: 8}
dataset: digits
precision: fp32
optimizer: {name: sgd, lr: 0.05}
train: {steps: 6, batch_size: 64, log_every: 2, checkpoint_every: 2}
name: run
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def trained(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what `train(config)` leaves, trained once for all tests that begin with it."""
    first = tmp_path_factory.getbasetemp() / "trained"
    if not first.exists():
        shutil.copytree(train(config), first)
        return config.parent / "runs" / "run"
    return Path(shutil.copytree(first, config.parent / "runs" / "run"))


def train(config: Path, *overrides: str, **options: Any) -> Path:
    runs = config.parent / "runs"
    run(
        TrainArguments(
            config=config, overrides=overrides, runs=str(runs), **{"quiet": True, **options}
        )
    )
    return runs / "run"


def state_of(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = checkpoint.load(open_run(path)).state["modules"]["net"]
    return state


def test_a_run_writes_everything_its_directory_promises(config: Path, trained: Path) -> None:
    written = {file.name for file in trained.iterdir()}
    assert {
        "config.yaml",
        "data.json",
        "env.json",
        "metrics.jsonl",
        "checkpoints",
        "summary.json",
    } <= written
    assert {"report.md", "report.html", "report.json"} <= written
    again = load_config(trained / "config.yaml")
    assert again.to_yaml() == load_config(config).to_yaml()


def test_samples_begin_before_training_and_what_the_distance_is_measured_in_is_said(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = (
        "model: {name: vae, image_size: 8, hidden: 16}",
        "task: {metric_samples: 64}",
        "name: run",
    )
    config.write_text("\n".join([*sections, "train: {steps: 2, batch_size: 8}"]))
    path = train(config, "train.sample_every=1", quiet=False)
    assert [file.name for file in sorted((path / "samples").iterdir())] == [
        f"step-0000000{n}.png" for n in range(3)
    ]
    events = [json.loads(line) for line in (path / "events.jsonl").read_text("utf-8").splitlines()]
    (note,) = [event["message"] for event in events if event["kind"] == "note"]
    assert "digit-classifier-32" in note
    captured = capsys.readouterr()
    assert " ".join((captured.out + captured.err).split()).count(note) == 1


def test_a_run_s_memory_is_planned_beside_it_when_asked(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The planning process gives way to every other; on a busy machine it may need more than a user would wait for.
    monkeypatch.setattr(PlanBeside, "wait", partialmethod(PlanBeside.wait, 500.0))
    path = train(config, "train.plan_memory=true", quiet=False)
    told = json.loads((path / "report.json").read_text("utf-8"))["plan"]["compared"]
    assert [row["name"] for row in told] == ["allocated"]
    assert abs(told[0]["error"]) < 0.05
    assert "memory allocated: planned" in capsys.readouterr().err


def test_nothing_is_planned_beside_a_run_on_a_cpu_unless_asked(config: Path) -> None:
    assert not (train(config) / "plan.json").exists()


def test_a_plan_that_fails_is_a_note_and_the_run_goes_on(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpt.planner.server.beside.sys.executable", "/nowhere/python")
    path = train(config, "train.plan_memory=true")
    assert "/nowhere/python" in json.loads((path / "plan.json").read_text("utf-8"))["error"]
    assert "There is no plan" in (path / "report.md").read_text("utf-8")


def test_a_second_run_of_the_same_name_gets_its_own_directory(config: Path) -> None:
    train(config)
    train(config)
    assert (config.parent / "runs" / "run-2" / "summary.json").is_file()


def test_print_config_prints_a_file_that_means_the_same(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, "optimizer.lr=1e-4", print_config=True)
    printed = capsys.readouterr().out
    assert load_config(printed).optimizer.settings.lr == 1e-4
    assert not (config.parent / "runs").exists()


def test_a_dry_run_writes_nothing(config: Path) -> None:
    train(config, dry_run=True)
    assert not (config.parent / "runs").exists()


def test_smoke_trains_resumes_and_infers_and_leaves_nothing(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, smoke=4, quiet=False)
    assert (
        "smoke: 4 steps trained, saved, resumed, evaluated and inferred; nothing"
        in capsys.readouterr().out
    )
    train(config, smoke=1, quiet=False)
    assert (
        "smoke: 1 step trained, saved, evaluated and inferred; nothing" in capsys.readouterr().out
    )
    assert not (config.parent / "runs").exists()


def test_a_dry_run_of_a_smoke_run_is_a_dry_run(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, smoke=4, dry_run=True, quiet=False)
    assert "dry run: everything builds" in capsys.readouterr().err


def test_a_smoke_run_that_is_to_print_json_prints_nothing_else(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, smoke=2, json=True, quiet=False)
    assert all(json.loads(line) for line in capsys.readouterr().out.splitlines())


def test_json_prints_one_object_per_line(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(config, json=True, quiet=False)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [2, 4, 6]
    assert rows[-1]["kind"] == "evaluate"


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_both_are_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(config, name="whole")
    expected = state_of(config.parent / "runs" / "whole")
    del whole
    path = train(config)
    damaged = path / "checkpoints" / "step-00000006"
    largest = max(damaged.iterdir(), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(bytes(data))
    capsys.readouterr()
    train(config, resume="auto", quiet=False)
    said = capsys.readouterr().err
    assert "step-00000006 is refused" in said
    assert "step-00000004 is used instead" in said
    assert all(torch.equal(value, expected[key]) for key, value in state_of(path).items())


def test_a_run_that_is_named_is_resumed_by_its_own_configuration(
    config: Path, trained: Path
) -> None:
    steps = yaml.safe_load(open_run(trained).config_path.read_text("utf-8"))["train"]["steps"]
    run(
        TrainArguments(
            f"train.steps={steps + 1}", resume=str(trained), runs=str(trained.parent), quiet=True
        )
    )
    assert checkpoint.load(trained).step == steps + 1
    assert load_config(trained / "config.yaml").model == load_config(config).model
    with pytest.raises(
        ConfigError,
        match=r"newest run of a configuration, and none is named: mpt train CONFIG --resume",
    ):
        run(TrainArguments(resume="auto"))
    with pytest.raises(ConfigError, match="a setting, where a configuration is expected"):
        run(TrainArguments("train.steps=3"))


def test_a_run_whose_checkpoints_are_all_bad_is_refused_and_never_restarted(
    config: Path, trained: Path
) -> None:
    for folder in (trained / "checkpoints").glob("step-*"):
        for file in folder.iterdir():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="no whole checkpoint") as caught:
        train(config, resume="auto")
    assert caught.value.exit_code == 4


def test_a_checkpoint_of_another_architecture_is_refused_with_a_list(
    config: Path, trained: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"of another shape: net\.stages\.0\.0\.weight"):
        train(config, "model.features=6", resume="auto")


def test_changed_conditions_are_named_and_refused_under_exact(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointError, match="precision fp32 -> bf16"):
        train(config, "precision=bf16", "train.steps=8", resume="auto", exact=True)
    capsys.readouterr()
    train(config, "precision=bf16", "train.steps=8", resume="auto", quiet=False)
    assert "not bit-exact: precision fp32 -> bf16" in capsys.readouterr().err


def test_resuming_a_named_checkpoint_goes_on_from_there(config: Path, trained: Path) -> None:
    expected = state_of(trained)
    train(config, resume=str(trained / "checkpoints" / "step-00000004"))
    assert all(torch.equal(value, expected[key]) for key, value in state_of(trained).items())
    steps = [
        json.loads(line)["step"] for line in (trained / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [2, 4, 6, 6]


def test_resuming_a_finished_run_changes_nothing_and_says_so(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "summary.json").read_text()
    train(config, resume="auto", quiet=False)
    assert "complete already" in capsys.readouterr().err
    assert (trained / "summary.json").read_text() == before


def test_the_last_line_of_a_run_that_was_never_evaluated_says_so() -> None:
    page = Path("runs/demo/report.html")
    assert closing_line({}, 4.2, page, 7) == f"done: not evaluated yet  (4 s)  report {page}"
    said = closing_line({"psnr": 30.0, "ssim": 0.5}, 9, page, 7)
    assert said == f"done: psnr 30  ssim 0.5  on 7 test samples (9 s)  report {page}"


def snapshot(path: Path) -> dict[str, bytes]:
    """Return every file of a run, but for its lock."""
    return {
        str(f.relative_to(path)): f.read_bytes()
        for f in path.rglob("*")
        if f.is_file() and f.name != "lock"
    }


def test_resuming_a_finished_run_leaves_no_trace_whatever_was_asked_for(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(trained)
    train(config, "optimizer.lr=0.5", "train.steps=4", resume="auto", quiet=False)
    assert "it has 6 steps and 4 were asked for" in capsys.readouterr().err
    assert snapshot(trained) == before


def test_a_run_that_stopped_gets_no_summary_of_fewer_steps_than_it_has(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("summary.json", "report.json"):
        (trained / name).unlink()
    before = snapshot(trained)
    train(config, "train.steps=4", resume="auto", quiet=False)
    assert "it has 6 steps and 4 were asked for" in capsys.readouterr().err
    assert snapshot(trained) == before


def test_a_run_killed_between_its_last_checkpoint_and_its_report_gets_both_at_a_resume(
    config: Path, trained: Path
) -> None:
    expected = json.loads((trained / "summary.json").read_text())
    for name in ("summary.json", "report.html", "report.md", "report.json"):
        (trained / name).unlink()
    train(config, resume="auto")
    assert (trained / "report.html").is_file()
    written = json.loads((trained / "summary.json").read_text())
    assert {key: written[key] for key in ("final", "best", "steps")} == {
        key: expected[key] for key in ("final", "best", "steps")
    }


@pytest.mark.parametrize(
    "damage", ["earlier summary", "torn summary", "earlier report", "another future"]
)
def test_an_extended_run_that_is_killed_before_its_report_does_not_keep_the_earlier_end(
    config: Path, trained: Path, damage: str
) -> None:
    ends = ("summary.json", "report.html", "report.md", "report.json")
    earlier = {name: (trained / name).read_bytes() for name in ends}
    start = str(trained / "checkpoints" / "step-00000004") if damage == "another future" else "auto"
    steps = 6 if damage == "another future" else 10
    with pytest.MonkeyPatch.context() as patch:  # a kill after the last checkpoint
        patch.setattr(Training, "save", kill_at(steps, Training.save))
        with pytest.raises(KeyboardInterrupt):
            train(config, f"train.steps={steps}", resume=start)
    record = read_run(trained)
    assert (record.is_finished, record.steps) == (False, steps)
    assert json.loads((trained / "report.json").read_text())["finished"] is False
    if damage in ("earlier summary", "earlier report"):  # as before resumes rewrote them
        for name in ends:
            (trained / name).write_bytes(earlier[name])
    if damage == "torn summary":
        (trained / "summary.json").write_bytes(earlier["summary.json"][:100])
    assert not read_run(trained).is_finished
    train(config, f"train.steps={steps}", resume="auto")
    record, report = read_run(trained), json.loads((trained / "report.json").read_text())
    assert (record.is_finished, record.summary["steps"], report["steps"], report["finished"]) == (
        True,
        steps,
        steps,
        True,
    )
    assert record.step_seconds > 0
    before = snapshot(trained)
    train(config, f"train.steps={steps}", resume="auto")
    assert snapshot(trained) == before


def kill_at(step: int, save: Callable[[Training], str | None]) -> Callable[[Training], str | None]:
    """Return a save that ends the process after this step's."""

    def save_and_die(self: Training) -> str | None:
        bad = save(self)
        if self.progress.step == step:
            raise KeyboardInterrupt
        return bad

    return save_and_die


def test_what_is_removed_while_a_run_goes_on_is_said(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Training.save

    def removing(self: Training) -> str | None:
        if self.progress.step == 4:
            self.saver.finish()
            shutil.rmtree(self.directory.checkpoints)
            self.directory.metrics_path.unlink()
        return save(self)

    monkeypatch.setattr(Training, "save", removing)
    path = train(config)
    said = [
        json.loads(line).get("message", "")
        for line in (path / "events.jsonl").read_text().splitlines()
    ]
    assert any(
        "removed while the run goes on: metrics.jsonl, the checkpoint of step 2" in line
        for line in said
    )
    assert [
        json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()
    ] == [6, 6]


def test_an_interrupted_smoke_run_does_not_say_that_it_can_be_gone_on_with(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = Training.save

    def interrupted(self: Training) -> str | None:
        os.kill(os.getpid(), signal.SIGTERM)
        return save(self)

    monkeypatch.setattr(Training, "save", interrupted)
    with pytest.raises(Interrupted, match=r"smoke: interrupted; nothing of it is kept") as caught:
        run(TrainArguments(config=config, smoke=4, quiet=True))
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_a_changed_setting_is_said_and_kept_beside_the_one_before(
    config: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    train(config, "optimizer.lr=0.01", "train.steps=8", resume="auto", quiet=False)
    assert (
        "settings changed since: optimizer.lr 0.05 -> 0.01, train.steps 6 -> 8"
        in capsys.readouterr().err
    )
    assert load_config(trained / "config.yaml").optimizer.settings.lr == 0.01
    assert load_config(trained / "config-until-00000006.yaml").optimizer.settings.lr == 0.05
    events = [json.loads(line) for line in (trained / "events.jsonl").read_text().splitlines()]
    assert [event["message"] for event in events if event["kind"] == "settings"] == [
        "changed: optimizer.lr 0.05 -> 0.01, train.steps 6 -> 8"
    ]
    assert "optimizer.lr 0.05 -&gt; 0.01" in (trained / "report.html").read_text()


def test_a_resume_from_before_a_change_takes_the_history_back(config: Path, trained: Path) -> None:
    train(config, "optimizer.lr=0.01", "train.steps=8", resume="auto")
    train(config, resume=str(trained / "checkpoints" / "step-00000004"))
    assert load_config(trained / "config.yaml").optimizer.settings.lr == 0.05
    assert not list(trained.glob("config-until-*"))
    assert '"settings"' not in (trained / "events.jsonl").read_text()


def test_changed_settings_are_refused_under_exact_if_they_change_the_numbers(
    config: Path, trained: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"--exact: not bit-exact.*optimizer\.lr 0\.05 -> 0\.1"
    ):
        train(config, "optimizer.lr=0.1", "train.steps=8", resume="auto", exact=True)
    path = train(config, "train.log_every=1", "train.steps=8", resume="auto", exact=True)
    assert load_config(path / "config.yaml").train.steps == 8
    cosine = ("optimizer.schedule=cosine", "name=cosine")
    train(config, *cosine)
    with pytest.raises(CheckpointError, match=r"train\.steps 6 -> 8"):
        train(config, *cosine, "train.steps=8", resume="auto", exact=True)


def test_a_resume_under_another_name_keeps_the_run_s_own(config: Path, trained: Path) -> None:
    train(config, "train.steps=8", name="other", resume=str(trained))
    assert load_config(trained / "config.yaml").name == "run"


def test_a_run_stopped_before_its_first_checkpoint_begins_anew_in_its_folder(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = config.parent / "runs"
    stopped = create_run(runs, "run")
    stopped.metrics_path.write_text('{"kind": "train", "step": 1, "losses": {}}\n')
    train(config, resume="auto", quiet=False)
    assert "stopped before its first checkpoint; it begins anew" in capsys.readouterr().err
    assert [run.name for run in runs.iterdir()] == ["run"]
    steps = [json.loads(line)["step"] for line in stopped.metrics_path.read_text().splitlines()]
    assert steps == [2, 4, 6, 6]


def test_a_run_whose_checkpoints_were_removed_is_not_begun_anew(
    config: Path, trained: Path
) -> None:
    for folder in (trained / "checkpoints").glob("step-*"):
        shutil.rmtree(folder)
    (trained / "checkpoints" / "index.json").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        train(config, resume="auto")
    assert (trained / "summary.json").is_file()


def test_tensorboard_that_is_not_installed_is_missed_before_a_folder_is_made(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpt.boards.boards.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"train\.boards: TensorBoard is not installed: `pip install tensorboard`"
    ):
        train(config, "train.tensorboard=true")
    assert not (config.parent / "runs").exists()


def test_resuming_nothing_starts_a_run_and_says_so(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config, resume="auto", quiet=False)
    assert "nothing to resume" in capsys.readouterr().err


def test_files_that_were_skipped_are_counted_and_named(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for index in range(8):
        folder = config.parent / "pictures" / ("train" if index < 6 else "test") / "x"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(folder / f"{index}.png")
    (config.parent / "pictures" / "train" / "x" / "3.png").write_bytes(b"no image")
    root = f"dataset={{name: image_folder, root: {config.parent / 'pictures'}, on_bad_image: skip}}"
    path = train(config, root, "train.batch_size=6", "train.steps=1")
    said = f"1 bad file was skipped, see {path / 'skipped_files.csv'}"
    assert said in capsys.readouterr().err
    assert said in (path / "events.jsonl").read_text()
    (config.parent / "pictures" / "test" / "x" / "7.png").write_bytes(b"no image either")
    # a resume keeps what was found before it
    (config.parent / "pictures" / "train" / "x" / "3.png").unlink()
    train(config, root, "train.batch_size=5", "train.steps=2", resume="auto")
    rows = (path / "skipped_files.csv").read_text().splitlines()
    assert rows[0] == "path,reason"
    assert [row.split(",")[0].rsplit("/", 2)[1:] for row in rows[1:]] == [
        ["x", "7.png"],
        ["x", "3.png"],
    ]
    assert json.loads((path / "summary.json").read_text())["skipped_files"] == 2
    assert "2 (skipped_files.csv)" in (path / "report.md").read_text().replace("\\", "")


def test_a_run_whose_first_batch_cannot_be_read_leaves_no_folder(config: Path) -> None:
    for number in range(12):
        folder = config.parent / "pictures" / ("train" if number < 8 else "test") / "xy"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(folder / f"{number}.png")
    bad = config.parent / "pictures" / "train" / "x" / "2.png"
    root = f"dataset={{name: image_folder, root: {config.parent / 'pictures'}}}"
    whole = bad.read_bytes()
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match="not an image"):
        train(config, root, "train.batch_size=8", "train.steps=3")
    assert not list((config.parent / "runs").iterdir())
    bad.write_bytes(whole)
    path = train(config, root, "train.batch_size=8", "train.steps=1")
    bad.write_bytes(b"no image")
    with pytest.raises(DataError, match="not an image"):
        train(config, root, "train.batch_size=8", "train.steps=3", resume="auto")
    assert checkpoint.load(open_run(path)).step == 1  # what is trained stays


def test_two_processes_cannot_write_one_run(config: Path, trained: Path) -> None:
    with open_run(trained).hold():
        done = run_mpt("train", config, "--resume", trained, "--quiet")
    assert done.returncode == 5
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_an_external_model_needs_its_package_granted(config: Path) -> None:
    done = run_mpt("train", config, "model={name: 'os.path:join'}", "--dry-run")
    assert done.returncode == 2
    assert "--allow" in done.stderr


def test_tensorboard_gets_the_log_lines_when_asked(config: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra mpt[tensorboard] is not installed")
    path = train(config, "train.tensorboard=true")
    (file,) = (path / "tensorboard").iterdir()
    written = file.read_bytes()
    assert b"losses/net/loss" in written
    assert b"evaluate/accuracy" in written
