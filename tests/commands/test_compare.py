"""Runs are interleaved, resumed where they stopped, and never trained twice; a stand-in trains in no time."""

import json
import re
import signal
from pathlib import Path

import pytest
import yaml

from mpt.commands import compare
from mpt.commands.compare import Command as CompareArguments
from mpt.errors import (
    CheckpointError,
    ConfigError,
    GateError,
    InputOutputError,
    Interrupted,
    MptError,
)
from mpt.workflows.comparing import compare_progress

FINALS = {"fp32": 0.950, "amp": 0.951, "O2": 0.90}


class Trainer:
    """Writes the run that a training would leave. `stop_at` interrupts that run, `codes` fail others."""

    def __init__(self, stop_at=None, codes=None):
        self.stop_at, self.codes, self.calls = stop_at, codes or {}, []

    def __call__(self, file, folder, name, resumes):
        self.calls.append((name, resumes))
        config = yaml.safe_load(file.read_text())
        (folder / name / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / name / "config.yaml").write_text(file.read_text())
        if name == self.stop_at:
            (folder / name / "checkpoints" / "step-00000001").mkdir()
            return 128 + signal.SIGINT, ""
        if name in self.codes:
            return self.codes[name], "the discriminator was not finite"
        mode, seed = config["precision"]["mode"], config["seed"]
        steps = config["train"]["steps"] or 10
        write_summary(folder / name, mode, self.final(config, mode, seed), steps)
        return 0, ""

    def final(self, config, mode, seed):
        return FINALS[mode] + 0.001 * (seed % 2)


def write_summary(path, mode, final, steps):
    summary = {
        "metric": "accuracy",
        "higher_is_better": True,
        "final": final,
        "best": final,
        "steps": steps,
        "total_steps": steps,
        "median_step_seconds": 0.01,
        "samples_per_second": 100,
        "peak_memory": {"kind": "tracked", "peak_bytes": 1000},
        "skipped": {"gen": 0},
        "precision": {"mode": mode, "dtype": "float32", "reason": "asked for"},
    }
    (path / "summary.json").write_text(json.dumps(summary))


def go(tmp_path, *what, train=None, check=lambda file: (0, ""), **changes):
    trainer = train or Trainer()
    seeds = {} if any(Path(word).is_dir() for word in what) else {"seeds": 3}
    compare.run(
        CompareArguments(what=what, runs=str(tmp_path), **{**seeds, **changes}), trainer, check
    )
    return trainer


def test_modes_take_turns_and_every_other_seed_turns_them_round(tmp_path, capsys):
    trainer = go(tmp_path, "fp32", "amp", seeds=3)
    names = [name for name, _ in trainer.calls]
    assert names == [
        "fp32-seed-0",
        "amp-seed-0",
        "amp-seed-1",
        "fp32-seed-1",
        "fp32-seed-2",
        "amp-seed-2",
    ]
    said = capsys.readouterr().out
    assert "[6/6] amp, seed 2: accuracy 0.951" in said
    assert "amp against fp32, accuracy, 3 paired seeds: within the margin" in " ".join(said.split())
    assert "of memory, step and samples/s: medians over seeds" in " ".join(said.split())
    folder = tmp_path / "compare-small_cnn-fp32-amp"
    assert "one-sided tests at 5 % each, so a 90 % interval" in (
        folder / "comparison.html"
    ).read_text("utf-8")
    assert {path.name for path in folder.glob("comparison.*")} == {
        f"comparison.{k}" for k in ("md", "json", "html", "png")
    }


def test_every_run_has_its_seed_and_mode_and_else_the_same_config(tmp_path):
    go(tmp_path, "fp32", "amp", "train.steps=7", "seed=5", seeds=2)
    configs = [
        yaml.safe_load((tmp_path / "compare-small_cnn-fp32-amp" / name / "config.yaml").read_text())
        for name in ("fp32-seed-5", "amp-seed-5", "fp32-seed-6", "amp-seed-6")
    ]
    assert [config["seed"] for config in configs] == [5, 5, 6, 6]
    assert [config["precision"]["mode"] for config in configs] == ["fp32", "amp", "fp32", "amp"]
    for config in configs:
        assert config["train"]["steps"] == 7
        assert {k: v for k, v in config.items() if k not in ("seed", "name", "precision")} == {
            k: v for k, v in configs[0].items() if k not in ("seed", "name", "precision")
        }


def test_side_by_side_the_first_seed_is_alone_and_the_rest_says_and_compares_the_same(
    tmp_path, capsys
):
    alone = go(tmp_path / "alone", "fp32", "amp")
    capsys.readouterr()
    beside = go(tmp_path / "beside", "fp32", "amp", jobs=3)
    said = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\[\d/6\]", line)]
    assert [line[:5] for line in said] == [f"[{number}/6]" for number in range(1, 7)]
    assert beside.calls[:2] == alone.calls[:2]
    assert sorted(beside.calls) == sorted(alone.calls)
    results = [
        json.loads((tmp_path / way / "compare-small_cnn-fp32-amp" / "comparison.json").read_text())
        for way in ("alone", "beside")
    ]
    finals = [[mode["final"] for mode in result["modes"]] for result in results]
    assert finals[0] == finals[1]


def test_a_run_that_fails_beside_others_ends_the_comparison_and_no_other_begins(tmp_path):
    trainer = Trainer(codes={"amp-seed-1": 3})
    with pytest.raises(
        MptError, match="amp-seed-1 failed: the discriminator was not finite"
    ) as caught:
        go(tmp_path, "fp32", "amp", train=trainer, jobs=2, seeds=5)
    assert caught.value.exit_code == 3
    assert len(trainer.calls) < 10


def test_what_the_user_set_in_precision_is_kept_in_every_mode(tmp_path):
    go(tmp_path, "fp32", "amp", "precision.dtype=float16", "precision.growth_interval=7", seeds=1)
    for name in ("fp32-seed-0", "amp-seed-0"):
        config = yaml.safe_load(
            (tmp_path / "compare-small_cnn-fp32-amp" / name / "config.yaml").read_text()
        )
        assert (config["precision"]["dtype"], config["precision"]["growth_interval"]) == (
            "float16",
            7,
        )
    with pytest.raises(ConfigError, match="named as words"):
        go(tmp_path, "fp32", "amp", "precision.mode=bf16")


def test_a_file_s_own_dtype_is_kept_for_its_own_mode(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("model: {name: dcgan}\nprecision: {mode: amp, dtype: float16}\n")
    go(tmp_path, "fp32", "amp", config=file, seeds=1)
    config = yaml.safe_load(
        (tmp_path / "compare-dcgan-fp32-amp" / "amp-seed-0" / "config.yaml").read_text()
    )
    assert config["precision"]["dtype"] == "float16"


def test_an_interrupted_comparison_goes_on_where_it_was(tmp_path):
    first = Trainer(stop_at="amp-seed-1")
    with pytest.raises(Interrupted) as caught:
        go(tmp_path, "fp32", "amp", seeds=2, train=first)
    assert caught.value.exit_code == 130
    second = go(tmp_path, "fp32", "amp", seeds=2)
    assert second.calls == [("amp-seed-1", True), ("fp32-seed-1", False)]
    assert go(tmp_path, "fp32", "amp", seeds=2).calls == []


def test_more_seeds_are_added_to_those_that_were_trained(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=1)
    assert [name for name, _ in go(tmp_path, "fp32", "amp", seeds=2).calls] == [
        "amp-seed-1",
        "fp32-seed-1",
    ]


def test_a_run_stopped_before_its_first_checkpoint_starts_anew(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=1)
    (tmp_path / "compare-small_cnn-fp32-amp" / "amp-seed-0" / "summary.json").unlink()
    assert go(tmp_path, "fp32", "amp", seeds=1).calls == [("amp-seed-0", False)]


def test_another_config_gets_another_folder(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=1)
    go(tmp_path, "fp32", "amp", "train.steps=9", seeds=1)
    assert (tmp_path / "compare-small_cnn-fp32-amp-2" / "comparison.html").is_file()
    with pytest.raises(ConfigError, match="another config"):
        go(
            tmp_path,
            "fp32",
            "amp",
            "train.steps=8",
            seeds=1,
            output=str(tmp_path / "compare-small_cnn-fp32-amp"),
        )


@pytest.mark.parametrize("code", [6, 7])
def test_a_run_that_diverged_or_ran_out_of_memory_counts_and_is_not_tried_again(
    tmp_path, capsys, code
):
    go(tmp_path, "fp32", "amp", seeds=2, train=Trainer(codes={"amp-seed-1": code}))
    said = " ".join(capsys.readouterr().out.split())
    assert "outside the margin (worse)" in said
    assert "the discriminator was not finite" in said
    assert go(tmp_path, "fp32", "amp", seeds=2).calls == []


def test_a_user_s_mistake_in_a_run_ends_the_comparison_with_its_exit_code(tmp_path):
    with pytest.raises(MptError, match="fp32-seed-0 failed") as caught:
        go(tmp_path, "fp32", "amp", train=Trainer(codes={"fp32-seed-0": 3}))
    assert caught.value.exit_code == 3


def test_a_mode_that_cannot_be_built_is_met_before_anything_is_trained(tmp_path):
    trainer, checked = Trainer(), []

    def check(file):
        checked.append(file.stem)
        return (
            (2, "native is for models with a half precision of their own")
            if "native" in file.stem
            else (0, "")
        )

    with pytest.raises(MptError, match="native-seed-0 failed: native is for models") as caught:
        go(tmp_path, "fp32", "amp", "native", train=trainer, check=check)
    assert caught.value.exit_code == 2
    # the first mode is trained at once and needs no check
    assert checked == ["amp-seed-0", "native-seed-0"]
    assert trainer.calls == []
    assert not list(tmp_path.glob("**/compare-*"))


def test_a_mode_that_runs_out_of_memory_when_built_is_a_result_and_what_is_trained_is_not_checked(
    tmp_path,
):
    go(tmp_path, "fp32", "amp", seeds=1, check=lambda file: (7, "out of memory"))

    def check(file):
        raise AssertionError(file)

    go(tmp_path, "fp32", "amp", seeds=2, check=check)


def test_the_gate_lets_pass_what_is_within_the_margin_only(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=3, gate=True)
    with pytest.raises(GateError, match="outside the margin") as caught:
        go(tmp_path, "fp32", "amp", "O2", seeds=3, gate=True)
    assert caught.value.exit_code == 8
    with pytest.raises(GateError, match="not decidable"):
        go(tmp_path, "fp32", "amp", seeds=1, gate=True)
    go(tmp_path, "fp32", "O2", seeds=3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("amp", "amp"), "given twice"),
        (("amp", "16-mixed"), "given twice"),
        (("fp32", "fp23"), "'fp23' is no precision mode; .*; did you mean fp32"),
        (("fp32", "amp", "some.yaml"), "some.yaml"),
        (("fp32",), "two precision modes"),
        ((), "two precision modes"),
    ],
)
def test_words_that_make_no_comparison_are_refused(tmp_path, words, message):
    with pytest.raises(ConfigError, match=message):
        go(tmp_path, *words)


def test_other_arguments_that_make_no_comparison_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--seeds"):
        go(tmp_path, "fp32", "amp", seeds=0)
    with pytest.raises(ConfigError, match="--margin"):
        go(tmp_path, "fp32", "amp", margin="none")
    with pytest.raises(ConfigError, match="name"):
        go(tmp_path, "fp32", "amp", name="../up")
    with pytest.raises(ConfigError, match="steps"):
        go(tmp_path, "fp32", "amp", "train.steps=-1")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputOutputError):
        go(tmp_path, "fp32", "amp", output=str(tmp_path / "file" / "below"))


def test_finished_runs_are_compared_by_their_folders(tmp_path, capsys):
    go(tmp_path, "fp32", "amp", seeds=1)
    folder = tmp_path / "compare-small_cnn-fp32-amp"
    capsys.readouterr()
    go(
        tmp_path,
        str(folder / "amp-seed-0"),
        str(folder / "fp32-seed-0"),
        output=str(tmp_path / "out"),
        json=True,
    )
    content = json.loads(capsys.readouterr().out)
    assert [mode["mode"] for mode in content["modes"]] == ["fp32", "amp"]
    assert content["modes"][1]["verdict"]["outcome"] == "undecided"
    assert (tmp_path / "out" / "comparison.md").is_file()


def test_finished_runs_of_two_models_are_compared_as_their_configurations_would_be(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=1)
    runs = [tmp_path / "compare-small_cnn-fp32-amp" / f"{mode}-seed-0" for mode in ("fp32", "amp")]
    text = (runs[1] / "config.yaml").read_text().replace("small_cnn", "torchvision:resnet18")
    (runs[1] / "config.yaml").write_text(text)
    go(tmp_path, *map(str, runs), output=str(tmp_path / "out"))
    modes = json.loads((tmp_path / "out" / "comparison.json").read_text())["modes"]
    assert [mode["mode"] for mode in modes] == ["small_cnn fp32", "torchvision:resnet18 amp"]


def test_a_comparison_of_other_finished_runs_leaves_an_earlier_one(tmp_path):
    go(tmp_path, "fp32", "amp", "O2", seeds=1)
    folder = tmp_path / "compare-small_cnn-fp32-amp-O2"
    first, second, third = (str(folder / f"{mode}-seed-0") for mode in ("fp32", "amp", "O2"))
    for runs in ((first, second), (first, third), (first, second)):
        go(tmp_path, *runs)
    found = sorted(path.parent for path in folder.glob("compare-*/comparison.json"))
    assert [path.name for path in found] == ["compare-fp32-seed-0", "compare-fp32-seed-0-2"]
    modes = [
        json.loads((path / "comparison.json").read_text())["modes"][1]["mode"] for path in found
    ]
    assert modes == ["amp", "O2"], "the same runs again are written where they were"


def test_a_comparison_of_finished_runs_has_the_name_that_was_given(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=1)
    runs = [tmp_path / "compare-small_cnn-fp32-amp" / f"{mode}-seed-0" for mode in ("fp32", "amp")]
    go(tmp_path, *map(str, runs), name="mine")
    assert (tmp_path / "mine" / "comparison.html").is_file()
    with pytest.raises(ConfigError, match="cannot be a run's name"):
        go(tmp_path, *map(str, runs), name="a/b")


def test_a_run_that_is_not_there_or_given_twice_is_refused(tmp_path):
    go(tmp_path, "fp32", "amp", seeds=1)
    folder = tmp_path / "compare-small_cnn-fp32-amp"
    with pytest.raises(ConfigError, match="given twice"):
        go(tmp_path, str(folder / "amp-seed-0"), str(folder / "amp-seed-0"))
    with pytest.raises((CheckpointError, ConfigError)):
        go(tmp_path, str(folder / "amp-seed-0"), str(folder / "absent"))
    with pytest.raises(ConfigError, match="no precision mode"):
        go(tmp_path, str(folder / "amp-seed-0"), "amp")
    with pytest.raises(
        CheckpointError,
        match=r"no run or checkpoint 'apm'.*Nor is it a precision mode; did you mean amp",
    ):
        go(tmp_path, "apm", "fp23")


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("train.steps=3", {}),
        ("--config", {"config": Path("x.yaml")}),
        ("--device", {"device": "cpu"}),
        ("--seeds", {"seeds": 3}),
        ("--until-decided", {"until_decided": True}),
    ],
)
def test_settings_for_finished_runs_are_refused_and_not_ignored(tmp_path, word, options):
    go(tmp_path, "fp32", "amp", seeds=1)
    runs = [
        str(tmp_path / "compare-small_cnn-fp32-amp" / f"{mode}-seed-0") for mode in ("fp32", "amp")
    ]
    with pytest.raises(ConfigError, match=f"{word} changes nothing about finished runs"):
        go(tmp_path, *runs, *([word] if "=" in word else []), **options)


def write_config(path, **changes):
    path.write_text(
        yaml.safe_dump(
            {"model": "small_cnn", "dataset": "digits", "train": {"steps": 5}, **changes}
        )
    )
    return path


def test_any_configurations_are_compared_with_the_first_one_s_seeds(tmp_path, capsys):
    first = write_config(tmp_path / "plain.yaml", precision="fp32", seed=4)
    second = write_config(tmp_path / "fast.yaml", precision="O2", optimizer="sgd")
    trainer = go(tmp_path, str(first), str(second), "train.batch_size=16", seeds=2)
    names = ["plain-seed-4", "fast-seed-4", "fast-seed-5", "plain-seed-5"]
    assert [name for name, _ in trainer.calls] == names
    folder = tmp_path / "compare-plain-fast"
    configs = [yaml.safe_load((folder / name / "config.yaml").read_text()) for name in names]
    assert [config["seed"] for config in configs] == [4, 4, 5, 5]
    assert [config["optimizer"]["name"] for config in configs] == ["adam", "sgd", "sgd", "adam"]
    assert {config["train"]["batch_size"] for config in configs} == {16}
    said = " ".join(capsys.readouterr().out.split())
    assert "fast against plain, accuracy, 2 paired seeds" in said
    assert "The configs also differ in optimizer.name: adam, sgd" in said
    # a file that changed is another comparison
    write_config(second, optimizer="adamw", precision="fp32")
    go(tmp_path, str(first), str(second), "train.batch_size=16", seeds=1)
    assert (tmp_path / "compare-plain-fast-2").is_dir()


def test_variants_and_modes_of_one_configuration_are_compared(tmp_path):
    file = write_config(tmp_path / "own.yaml", precision="fp32")
    trainer = go(
        tmp_path,
        config=file,
        variant=("memory.recompute=all", "optimizer.lr=0.01 train.steps=7"),
        seeds=1,
    )
    names = [name for name, _ in trainer.calls]
    assert names == [
        "as-it-is-seed-0",
        "memory.recompute-all-seed-0",
        "optimizer.lr-0.01-train.steps-7-seed-0",
    ]
    last = yaml.safe_load(next(tmp_path.glob("compare-*/optimizer*/config.yaml")).read_text())
    assert (last["optimizer"]["lr"], last["train"]["steps"]) == (0.01, 7)
    trainer = go(tmp_path, str(file), "amp", seeds=1)
    assert [name for name, _ in trainer.calls] == ["fp32-seed-0", "amp-seed-0"]
    go(
        tmp_path,
        str(file),
        variant=("precision=amp precision.growth_interval=7 optimizer.name=lion",),
        seeds=1,
    )
    lion = yaml.safe_load(next(tmp_path.glob("compare-*/precision-amp*/config.yaml")).read_text())
    # its own, not those that the file's Adam has by default
    assert lion["optimizer"]["betas"] == [0.9, 0.99]
    assert lion["precision"]["growth_interval"] == 7
    trainer = go(tmp_path, str(file), "fp32", "O2", seeds=1)
    assert (tmp_path / "compare-small_cnn-fp32-O2").is_dir()
    for words, options in (
        ((str(file), "fp32"), {}),
        ((str(file), str(file)), {}),
        ((str(file),), {}),
    ):
        with pytest.raises(ConfigError):
            go(tmp_path, *words, **options)
    with pytest.raises(ConfigError, match="given twice"):
        go(tmp_path, str(file), variant=("seed=1", "seed=1"))


class Spread(Trainer):
    """Trains modes whose seeds lie apart, so that three do not decide."""

    def final(self, config, mode, seed):
        return 0.95 + (0.006 if seed % 2 else -0.006) * (mode == "amp")


def test_seeds_are_added_until_they_decide_and_no_run_is_told_twice(tmp_path, capsys):
    trainer = go(tmp_path, "fp32", "amp", seeds=None, until_decided=True, train=Spread())
    assert 6 < len(trainer.calls) <= 32
    assert len(set(trainer.calls)) == len(trainer.calls)
    said = " ".join(capsys.readouterr().out.split())
    assert "within the margin" in said
    assert "of 16 at most, with 5 % error on each side altogether" in said
    assert said.count("fp32, seed 0: accuracy") == 1
    content = json.loads((tmp_path / "compare-small_cnn-fp32-amp" / "comparison.json").read_text())
    assert content["modes"][1]["verdict"]["outcome"] == "within"
    page = (tmp_path / "compare-small_cnn-fp32-amp" / "comparison.html").read_text("utf-8")
    assert "repeated as seeds were added (16 at most)" in page
    assert "90 % interval" not in page


def test_a_test_that_ends_undecided_says_what_it_would_take(tmp_path, capsys):
    go(tmp_path, "fp32", "amp", seeds=None, until_decided=True, max_seeds=4, train=Spread())
    said = " ".join(capsys.readouterr().out.split())
    assert "not decidable" in said
    assert re.search(r"These 4 seeds are all that were allowed; about \d+ would decide it", said)
    with pytest.raises(ConfigError, match="--max-seeds"):
        go(tmp_path, "fp32", "amp", until_decided=True, max_seeds=2)


def test_without_a_configuration_and_seeds_it_goes_on_until_decided(tmp_path):
    assert len(go(tmp_path, "fp32", "amp", seeds=None, train=Spread()).calls) > 6
    assert len(go(tmp_path, "fp32", "amp", "train.steps=9", seeds=3, train=Spread()).calls) == 6


def test_how_far_the_runs_are_is_read_from_their_files(tmp_path):
    paths = {tmp_path / name: 100 for name in ("a", "b", "c")}
    for path in paths:
        path.mkdir()
    first = compare_progress.Expected(paths).done()
    (tmp_path / "a" / "summary.json").write_text("{}")
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 25}\n{"step": 50}\n{"st')
    done = compare_progress.Expected(paths).done()
    told = compare_progress.describe(compare_progress.Expected(paths), first, done, 30.0)
    assert told == "1 of 3 runs done; b step 50 of 100, about 30 s left"
    ended = dict.fromkeys(paths, 100)
    told = compare_progress.describe(compare_progress.Expected(paths), first, ended, 30.0)
    assert told == "3 of 3 runs done; evaluating"
    said = compare_progress.announce(6, 32, compare_progress.Pace(300, 0.02))
    assert said.startswith(
        "6 runs of 300 steps, up to 32 if these do not decide. A step takes 20 ms, a run about 6 s"
    )
