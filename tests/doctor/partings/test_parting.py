"""`mpt diff` finds where two trainings part, says why, and takes rounding for what it is."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from mpt.commands import diff, train
from mpt.commands.diff import Command as DiffArguments
from mpt.commands.train import Command as TrainArguments
from mpt.errors import CheckpointError, ConfigError, GateError, NonFiniteError

BASE: dict[str, Any] = {
    "model": {"name": "small_cnn", "image_size": 16, "features": 8},
    "dataset": "digits",
    "precision": "fp32",
    "train": {
        "steps": 6,
        "batch_size": 32,
        "checkpoint_every": 3,
        "keep_last": 5,
        "log_every": 1,
        "plan_memory": False,
    },
}
NETS = """
from torch import nn

def net(eps=1e-5, activation=nn.ReLU):
    return lambda classes: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, eps=eps), activation(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(64, classes))

def plain(num_classes): return net()(num_classes)
def other_eps(num_classes): return net(eps=1e-1)(num_classes)
def gelu(num_classes): return net(activation=nn.GELU)(num_classes)
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "base.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return path


@pytest.fixture
def ask(base: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    def ask(*what: str, code: int = 0, **options: Any) -> dict[str, Any]:
        arguments = DiffArguments(what or (str(base),), json=True, **{"steps": 3, **options})
        if code:
            with pytest.raises(GateError):
                diff.run(arguments)
        else:
            diff.run(arguments)
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]

    return ask


def test_a_configuration_and_itself_and_an_exact_trick_are_the_same_to_the_bit(
    ask: Ask, base: Path
) -> None:
    for told in (ask(str(base), str(base)), ask(variant="memory.recompute=all")):
        assert told["verdict"] == "same"
        assert told["replay"]["bits"] is None
        assert len(told["replay"]["rows"]) == 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_healthy_lower_precision_differs_by_rounding_first_in_a_product(
    ask: Ask, base: Path, dtype: str
) -> None:
    told = ask(str(base), "amp", dtype=dtype)
    assert told["verdict"] == "rounding"
    first = told["replay"]["bits"]
    assert first["where"].startswith("net.stages.0.0: convolution in float32 (small_cnn.py:")
    assert (first["first"], first["second"]) == ("float32", dtype)
    assert first["reason"] == "dtype: precision fp32 against amp"
    assert told["replay"]["beyond"] is None


@pytest.mark.parametrize(
    ("variant", "kind", "reason"),
    [
        ("optimizer.lr=1.1e-3", "update", "the update: optimizer.lr 0.001 -> 0.0011"),
        ("memory.micro_batch=8", "gradient", "BatchNorm's batch: 32 samples at a time against 8"),
        ("seed=1", "weights", "other random numbers: seed 0 against 1"),
        ("model.features=4", "network", "other networks: model.features 8 -> 4"),
        ("train.batch_size=16", "batch", "other data: train.batch_size 32 -> 16"),
    ],
)
def test_what_is_more_than_rounding_is_told_with_its_reason(
    ask: Ask, variant: str, kind: str, reason: str
) -> None:
    told = ask(variant=variant, code=8)
    assert told["verdict"] == "apart"
    assert told["replay"]["beyond"]["step"] == 0
    assert (told["replay"]["beyond"]["kind"], told["replay"]["beyond"]["reason"]) == (kind, reason)


def test_the_operator_that_loses_precision_is_named_behind_those_that_only_round(
    ask: Ask, tmp_path: Path
) -> None:
    model = {
        "name": "scripts.doctor.planted_faults:plant_covariance",
        "image_size": 16,
        "channels": 1,
    }
    path = tmp_path / "planted.yaml"
    path.write_text(yaml.safe_dump({**BASE, "model": model}))
    told = ask(str(path), "amp", dtype="float16", allow=("scripts",), code=8)
    assert "addmm" in told["replay"]["bits"]["where"]
    assert told["replay"]["beyond"]["where"].startswith(
        "net.planted: sub in float32 (planted_faults.py:"
    )


@pytest.mark.parametrize(
    ("name", "where", "reason"),
    [
        ("other_eps", "net.1: native_batch_norm", "another setting of it"),
        ("gelu", "net.2: ", "another operator runs"),
    ],
)
def test_another_setting_of_an_operator_and_another_operator_are_told(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str, reason: str
) -> None:
    (tmp_path / "parted_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)
    paths = []
    for chosen in ("plain", name):
        model = {"name": f"parted_nets:{chosen}", "image_size": 16, "channels": 1}
        paths.append(tmp_path / f"{chosen}.yaml")
        paths[-1].write_text(yaml.safe_dump({**BASE, "model": model}))
    told = ask(*map(str, paths), allow=("parted_nets",), code=8)
    assert told["replay"]["beyond"]["where"].startswith(where)
    assert told["replay"]["beyond"]["reason"].startswith(reason)


def test_runs_are_compared_by_their_files_and_then_from_the_state_they_share(
    ask: Ask, base: Path
) -> None:
    def run(name: str, *overrides: str, resume: str | None = None) -> None:
        train.run(TrainArguments(base, overrides, name=name, quiet=True, resume=resume))

    run("one")
    shutil.copytree("runs/one", "runs/other")
    shutil.copytree("runs/one", "runs/twin")
    shutil.rmtree("runs/other/checkpoints/step-00000006")
    run("other", "optimizer.lr=3e-3", resume="runs/other/checkpoints/step-00000003")
    told = ask("one", "twin")
    assert told["verdict"] == "same"
    assert told["replay"] is None
    told = ask("one", "other", code=8)
    assert told["files"]["logged"]["step"] == 5
    assert told["files"]["common"] == 3
    assert [row["differing"] > 0 for row in told["files"]["checkpoints"]] == [False, False, True]
    assert told["replay"]["beyond"]["step"] == 3
    assert told["replay"]["beyond"]["reason"] == "the update: optimizer.lr 0.001 -> 0.003"
    assert ask("one", "other", only_files=True, code=8)["replay"] is None


def test_a_decay_that_rounding_takes_whole_is_the_reason_why_another_one_changes_nothing(
    ask: Ask, base: Path
) -> None:
    lost = ("precision=bf16-pure", "optimizer={name: adamw, lr: 0.001, weight_decay: 0.1}")
    found = ask(str(base), *lost, variant="optimizer.weight_decay=0")["replay"]
    assert found["bits"] is None
    assert [note[:57] for note in found["notes"]] == [
        "A: net: weight_decay 0.1 at optimizer.lr 0.001 is lost: i"
    ]


def test_what_cannot_be_compared_is_refused_in_words(base: Path) -> None:
    with pytest.raises(ConfigError, match="found 1 of 2 to compare"):
        diff.run(DiffArguments((str(base),)))
    with pytest.raises(ConfigError, match="write KEY=VALUE"):
        diff.run(DiffArguments((str(base),), variant="amp"))
    with pytest.raises(CheckpointError, match="A configuration is named by its file"):
        diff.run(DiffArguments((str(base), "nothing")))


def test_two_that_are_both_not_finite_are_not_called_the_same(
    base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = {**BASE, "optimizer": {"name": "sgd", "lr": 1e30}, "precision": {"mode": "fp32"}}
    base.write_text(yaml.safe_dump(content))
    with pytest.raises(
        NonFiniteError,
        match=r"loss of both .* is not finite at step \d, so whether they are the same",
    ):
        diff.run(DiffArguments((str(base),), variant="train.keep_last=2", steps=4))
    said = capsys.readouterr().out
    assert "no difference was seen up to the first loss that is not finite" in said
    assert "the same to the bit" not in said


def test_logs_that_are_both_not_finite_are_not_called_the_same(base: Path) -> None:
    """As two runs leave them that were told to skip what is not finite."""
    train.run(TrainArguments(base, name="one", quiet=True))
    shutil.copytree("runs/one", "runs/other")
    for name in ("one", "other"):
        path = Path("runs", name, "metrics.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines[3:]:
            if "losses" in line:
                line["losses"] = dict.fromkeys(line["losses"])  # NaN is null in these files
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(NonFiniteError, match="is not finite at step 4"):
        diff.run(DiffArguments(("one", "other"), only_files=True))


def test_runs_that_kept_nothing_of_one_step_are_not_called_the_same(base: Path) -> None:
    """As those of a training that logs at other intervals and keeps other checkpoints."""
    train.run(TrainArguments(base, ("train.steps=1",), name="one", quiet=True))
    shutil.copytree("runs/one", "runs/other")
    Path("runs/other/metrics.jsonl").write_text("")
    for checkpoint in Path("runs/other/checkpoints").glob("step-*"):
        shutil.rmtree(checkpoint)
    with pytest.raises(
        ConfigError, match="kept no log line, evaluation or checkpoint of the same step; leave out"
    ):
        diff.run(DiffArguments(("one", "other"), only_files=True))


def test_a_model_that_raises_in_half_alone_parts_there(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = Path(__file__).parents[3] / "scripts" / "doctor" / "planted_faults.py"
    (tmp_path / "halves.py").write_text(package.read_text().replace('"""Small', '"""My small', 1))
    path = tmp_path / "c.yaml"
    model = {"name": "halves:plant_masked_beyond_half", "image_size": 16, "channels": 1}
    path.write_text(yaml.safe_dump({**BASE, "model": model}))
    told = ask(
        str(path), variant="precision=fp16-pure optimizer.eps=1e-4", allow=("halves",), code=8
    )
    parting = told["replay"]["beyond"]
    assert parting["step"] == 0
    assert parting["where"].startswith("halves.py:")
    assert parting["first"] == "a result"
    assert parting["second"].startswith("raises RuntimeError: value cannot be converted")


OWN_NET = """
from torch import nn
from mpt.config.options import Options
from ..losses.factor import FACTOR

TASK = "classify"

class Settings(Options):
    image_size: int = 16

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.Tanh())
        self.head = nn.Linear(16, classes)

    def forward(self, image):
        return self.head(FACTOR * self.body(image))

def build(settings, data):
    return {"net": Net(len(data.classes))}
"""


def test_runs_with_an_own_part_that_was_edited_are_each_trained_again_with_their_own(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPT_PARTS", str(tmp_path / "own"))
    for folder in ("nn", "losses"):
        (tmp_path / "own" / folder).mkdir(parents=True)
    (tmp_path / "own/nn/own_net.py").write_text(OWN_NET)
    config = tmp_path / "own.yaml"
    config.write_text(yaml.safe_dump({**BASE, "model": "own_net"}))
    for name, factor in (("a", "1.0"), ("b", "2.0"), ("c", "2.0")):
        (tmp_path / "own/losses/factor.py").write_text(f"FACTOR = {factor}\n")
        for module in [module for module in sys.modules if module.startswith("mpt.parts.own")]:
            del sys.modules[module]
        train.run(TrainArguments(config, name=name, quiet=True, overrides=("train.steps=2",)))
    told = ask("a", "b", code=8)
    assert told["files"]["environment"] == ["another own/losses/factor.py"]
    assert told["replay"]["notes"] == [
        "A: trained again with its own own/losses/factor.py, as the run kept it"
    ]
    assert told["replay"]["beyond"]["where"].startswith("net: mul in float32 (own_net.py:")
    assert told["replay"]["beyond"]["reason"].startswith(
        "another setting of it: (1.0) against (2.0)"
    )
    assert ask("b", "c")["verdict"] == "same"
    shutil.rmtree(tmp_path / "runs/a/parts")
    told = ask("a", "b", code=8)
    assert told["replay"]["notes"] == [
        "A: made with another own/losses/factor.py, which is not kept: trained with the one that is here"
    ]


def test_trainings_of_two_systems_are_refused_in_a_line(base: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"@saehd_demo trains task \w+, which have nothing in common"
    ):
        diff.run(DiffArguments((str(base), "@saehd_demo")))
    with pytest.raises(ConfigError, match="have no network in common"):
        diff.run(DiffArguments((str(base), "@lsgan"), steps=1))


MORE_CALLS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes, added, factor):
        super().__init__()
        self.first, self.second = nn.Linear(256, 16), nn.Linear(16, classes)
        self.added, self.factor = added, factor

    def forward(self, image):
        value = image.flatten(1) * 2.0
        if self.added:
            value = value * 1.0
        hidden = (self.first(value) * 0.5).tanh() * 3.0
        return self.second(hidden * self.factor)

def few(num_classes): return Net(num_classes, False, 0.25)
def more(num_classes): return Net(num_classes, True, 0.25)
def other(num_classes): return Net(num_classes, True, 0.75)
"""


def test_an_added_call_does_not_shift_those_behind_it(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "added_nets.py").write_text(MORE_CALLS)
    monkeypatch.syspath_prepend(tmp_path)
    paths = {}
    for chosen in ("few", "more", "other"):
        paths[chosen] = str(tmp_path / f"{chosen}.yaml")
        model = {"name": f"added_nets:{chosen}", "image_size": 16, "channels": 1}
        Path(paths[chosen]).write_text(yaml.safe_dump({**BASE, "model": model}))
    assert ask(paths["few"], paths["more"], allow=("added_nets",))["verdict"] == "same"
    beyond = ask(paths["few"], paths["other"], allow=("added_nets",), code=8)["replay"]["beyond"]
    assert beyond["where"] == "net: mul in float32 (added_nets.py:15)"
    assert beyond["reason"].startswith("another setting of it: (0.25) against (0.75)")


BIASED = """
from torch import nn
def biased(num_classes):
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
        nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, num_classes))
"""


@pytest.mark.parametrize(
    "variant", ["memory.channels_last=true", "precision=bf16", "precision=amp"]
)
def test_a_bias_in_front_of_batch_norm_is_no_finding(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    (tmp_path / "biased_nets.py").write_text(BIASED)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "biased.yaml"
    model = {"name": "biased_nets:biased", "image_size": 16, "channels": 1}
    path.write_text(
        yaml.safe_dump({**BASE, "model": model, "optimizer": {"name": "sgd", "lr": 0.01}})
    )
    dtype = "float16" if variant == "precision=amp" else None
    told = ask(str(path), variant=variant, allow=("biased_nets",), steps=4, dtype=dtype)
    assert told["replay"]["beyond"] is None, told["replay"]["beyond"]
    assert told["verdict"] in ("same", "rounding")
