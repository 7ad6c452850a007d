"""A resume that is exact is said to be, and one that is not is found: a network that counts without saving it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from mpt.commands import verify_resume
from mpt.commands.verify_resume import Command as VerifyResumeArguments
from mpt.config.load import load_config
from mpt.doctor.partings.hidden_state import Hidden
from mpt.doctor.partings.resume_cause import changed_values, find_cause, module_values
from mpt.errors import GateError
from mpt.workflows.examining import resume_check
from tests.programs import run_mpt

COUNTING = """
from torch import nn

class Counting(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body, self.calls = nn.Sequential(nn.Flatten(), nn.Linear(256, classes)), 0

    def forward(self, images):
        self.calls += 1
        return self.body(images) * (1 + 0.01 * self.calls)

def counting(num_classes): return Counting(num_classes)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "counting_net.py").write_text(COUNTING)
    for name, model in (("honest", "small_cnn"), ("counting", "counting_net:counting")):
        size: dict[str, Any] = {"image_size": 16} | (
            {"channels": 1} if ":" in model else {"features": 4}
        )
        config = {
            "model": {"name": model, **size},
            "dataset": "digits",
            "train": {"batch_size": 16, "epochs": 1},
        }
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train here: starting Python takes longer than these trainings."""

    def train(
        file: Path,
        folder: Path,
        name: str,
        check: resume_check.Check,
        *,
        stop_after: Any = None,
        resumes: Any = False,
    ) -> None:
        resume_check.main(
            resume_check.command(file, folder, name, stop_after, resumes, check.allow)[3:]
        )

    monkeypatch.setattr(resume_check, "train", train)


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("mode", ["fp32", "amp"])
def test_an_exact_resume_is_said_to_be(
    here: Path, capsys: pytest.CaptureFixture[str], mode: str
) -> None:
    verify_resume.run(
        VerifyResumeArguments("honest.yaml", (f"precision={mode}",), steps=4, json=True)
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["same"], told["stops"], told["files"]["common"]) == (True, ["a stop at step 2"], 4)
    assert told["files"]["checkpoints"][-1]["tensors"] > 20


@pytest.mark.usefixtures("in_process")
def test_a_state_that_no_checkpoint_keeps_is_found(here: Path) -> None:
    with pytest.raises(
        GateError,
        match=r"the training is another one: net/loss at step 3.*; because of net\.calls \(2, after a resume 0\), "
        r"which is in no state; carried over, the next step is the same; the batch was the same",
    ):
        verify_resume.run(VerifyResumeArguments("counting.yaml", steps=4, allow=("counting_net",)))


OWN_SET = """
import torch
from mpt.config.options import DatasetOptions
from mpt.seams import Dataset, DataSpec, FieldSpec

class Settings(DatasetOptions):
    pass

class Noise(Dataset):
    def __init__(self):
        self.numbers = torch.Generator().manual_seed(0)
        fields = {"image": FieldSpec((1, 16, 16), torch.float32, "image"), "label": FieldSpec((), torch.int64)}
        self.spec = DataSpec(fields, 64, ("a", "b"))

    def fetch(self, indices, epoch):
        image = torch.rand(len(indices), 1, 16, 16, generator=self.numbers)
        return {"image": image, "label": torch.tensor([index % 2 for index in indices])}

def build(settings, split, seed):
    return Noise()
"""
OWN_OPTIMIZER = """
from pydantic import Field
from mpt.config.options import OptimizerOptions
from mpt.optim.shared.own_update import OwnUpdate

class Settings(OptimizerOptions):
    lr: float = Field(0.1, gt=0)

class Slowing(OwnUpdate):
    elementwise = True
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})
        self.updates = 0

    def update(self):
        self.updates += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.updates)

def build(settings, parameters):
    return Slowing(parameters, settings.lr)
"""


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"dataset": "own_set"},
            "because of data set.numbers (a Generator, after a resume a Generator), which is in no state; carried "
            "over, the next step is the same; the batch differed already (image)",
        ),
        (
            {"optimizer": "own_optimizer"},
            "because of optimizer of net.updates (2, after a resume 0), which is in no state",
        ),
    ],
)
def test_what_a_data_set_or_an_optimizer_loses_is_named_and_was_tried(
    here: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], said: str
) -> None:
    for folder, text in (("data/own_set.py", OWN_SET), ("optim/own_optimizer.py", OWN_OPTIMIZER)):
        (here / "own" / folder).parent.mkdir(parents=True)
        (here / "own" / folder).write_text(text)
    monkeypatch.setenv("MPT_PARTS", str(here / "own"))
    config = yaml.safe_load((here / "honest.yaml").read_text())
    (here / "changed.yaml").write_text(yaml.safe_dump({**config, **changes}))
    with pytest.raises(GateError) as caught:
        verify_resume.run(VerifyResumeArguments("changed.yaml", steps=4))
    assert said in str(caught.value)


def test_a_generator_that_is_made_at_its_first_use_is_carried_over() -> None:
    numbers = torch.Generator().manual_seed(3)
    torch.rand(5, generator=numbers)
    fresh, used = SimpleNamespace(numbers=torch.Generator()), SimpleNamespace(numbers=numbers)
    frozen = Hidden(used, "numbers", numbers).freeze()
    Hidden(fresh, "numbers", fresh.numbers).put(frozen)
    lazy = SimpleNamespace()
    Hidden(lazy, "numbers", None).put(frozen)
    expected = torch.rand(5, generator=numbers)
    assert torch.equal(torch.rand(5, generator=fresh.numbers), expected)
    assert torch.equal(torch.rand(5, generator=lazy.numbers), expected)


def test_a_value_of_a_module_that_training_changes_is_named(here: Path) -> None:
    counted = COUNTING.replace("self.calls += 1", "global CALLS; CALLS += 1").replace(
        "self.calls)", "CALLS)"
    )
    (here / "global_net.py").write_text("CALLS = 0\n" + counted)
    model = {"name": "global_net:counting", "image_size": 16, "channels": 1}
    settings = {"model": model, "dataset": "digits", "train": {"batch_size": 16, "epochs": 1}}
    cause = find_cause(load_config(settings, allow=["global_net"]), 2)
    assert cause.module_values == ["global_net.CALLS (0 at the beginning, then 2)"]


UNSET = """
from torch import nn

class Net(nn.Module):
    {default}

    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(256, classes))

    def forward(self, images):
        self.calls = {before} + 1
        return self.body(images) * (1 + 0.01 * self.calls)

def net(num_classes): return Net(num_classes)
"""


@pytest.mark.parametrize(
    ("name", "default", "before", "then"),
    [
        ("of_class", "calls = 0", "self.calls", "0"),
        ("unset", "pass", "getattr(self, 'calls', 0)", "not there"),
    ],
)
def test_a_value_that_training_sets_first_is_named(
    here: Path, name: str, default: str, before: str, then: str
) -> None:
    """A default in the class, or no attribute at all, until the first step."""
    (here / f"{name}_net.py").write_text(UNSET.format(default=default, before=before))
    model = {"name": f"{name}_net:net", "image_size": 16, "channels": 1}
    settings = {"model": model, "dataset": "digits", "train": {"batch_size": 16, "epochs": 1}}
    cause = find_cause(load_config(settings, allow=[f"{name}_net"]), 2)
    assert cause.causes == [f"net.calls (2, after a resume {then})"]


def test_a_nan_of_a_module_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("with_nan")
    module.LIMIT, module.COUNT = float("nan"), 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "with_nan", module)
    before = {"with_nan": module_values(module)}
    assert list(changed_values(before)) == []
    module.COUNT = 2  # type: ignore[attr-defined]
    assert list(changed_values(before)) == ["with_nan.COUNT (1 at the beginning, then 2)"]


@pytest.mark.slow
def test_kills_leave_no_trace(here: Path) -> None:
    done = run_mpt("verify-resume", "honest.yaml", "--kill", "--steps", 40, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "resume is exact: a kill at step" in done.stdout


@pytest.mark.parametrize(
    ("is_deterministic", "advice"), [(True, "other programs"), (False, "set ")]
)
def test_what_to_do_about_a_training_that_does_not_repeat_itself(
    is_deterministic: bool, advice: str
) -> None:
    """On a GPU that others filled too one was told to set what was set."""
    nothing: Any = SimpleNamespace(checkpoints=[], losses=[], first_loss="")
    found = resume_check.ResumeCheck(False, False, [], nothing, None, is_deterministic)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resume_check, "describe", lambda files: "net/loss at step 1")
        text = found.text
    assert advice in text
    assert ("train.deterministic" in text) is not is_deterministic
