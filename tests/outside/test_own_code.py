"""Errors in a part of the user's own: which part, which line, and no one else's frames."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mpt import cli
from mpt.config.finding import part_packages
from mpt.config.load import load_config
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu

NET = """
import torch
from torch import nn

class MyNet(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.fc = nn.Linear(256, num_classes)

    def mix(self, x):
        {mix}

    def forward(self, x):
        return self.mix(x)
"""
DATA = '''
"""Noise."""
import torch
from mpt.config.options import DatasetOptions
from mpt.seams import Dataset, DataSpec, FieldSpec

class Settings(DatasetOptions):
    """Nothing."""

class Noise(Dataset):
    spec = DataSpec({"image": FieldSpec((1, 16, 16), torch.float32), "label": FieldSpec((), torch.int64)}, 64, ("a",))

    def __len__(self):
        return 64

    def fetch(self, indices, epoch):
        raise IndexError("no such sample")

def build(settings, split, seed):
    return Noise()
'''
CONFIG = """
model: {name: '%s', image_size: 16}
dataset: {name: %s, channels: 1}
train: {steps: 2, batch_size: 8}
precision: fp32
"""


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(part_packages.VARIABLE, "")

    def run(*words: str) -> tuple[Any, str]:
        with pytest.raises(SystemExit) as stopped:
            cli.main(list(words))
        return stopped.value.code, capsys.readouterr().err

    yield run
    sys.modules.pop("own_net", None)


def write_net(mix: str, folder: Path) -> None:
    (folder / "own_net.py").write_text(NET.replace("{mix}", mix))
    (folder / "c.yaml").write_text(CONFIG % ("own_net:MyNet", "digits"))


def test_a_model_that_raises_is_named_with_its_own_lines_alone(go: Any, tmp_path: Path) -> None:
    write_net("return torch.cat([x.flatten(1)], y)", tmp_path)
    code, said = go("train", "c.yaml", "--allow", "own_net")
    assert code == 1
    assert (
        "your model MyNet raised in mix (own_net.py:11): NameError: name 'y' is not defined" in said
    )
    assert "own_net.py:14 in forward: return self.mix(x)" in said
    assert "torch/nn" not in said
    assert "mpt/engine" not in said
    with pytest.raises(NameError):
        cli.main(["--debug", "train", "c.yaml", "--allow", "own_net"])


def test_a_model_that_leaves_python_does_not_end_a_training_well(go: Any, tmp_path: Path) -> None:
    write_net("raise SystemExit(0)", tmp_path)
    code, said = go("train", "c.yaml", "--device", "cpu", "--allow", "own_net")
    assert code == 1
    assert "your model MyNet raised in mix (own_net.py:11): SystemExit: 0" in said


def test_a_refusal_of_half_names_the_doctor(go: Any, tmp_path: Path) -> None:
    write_net(
        "return self.fc(x.flatten(1).half()).masked_fill(x.flatten(1)[:, :1] < 2, -1e9)", tmp_path
    )
    code, said = go(
        "train", "c.yaml", "--allow", "own_net", "precision=amp", "precision.dtype=float16"
    )
    assert code == 1
    assert "cannot be converted to type c10::Half" in said
    assert "(half may be the cause: `mpt doctor CONFIG` tries float32 and a cure)" in said


SIZES = "model.options={depth: 1, embed_dim: 12, num_heads: 2, patch_size: 8}"
VIT = "model.name=timm:vit_tiny_patch16_224", SIZES, "model.channels=1"


def test_a_model_of_timm_is_made_for_the_image_size(go: Any, tmp_path: Path) -> None:
    write_net("", tmp_path)
    code, _ = go("train", "c.yaml", *VIT)
    assert code == 0


def test_the_refusal_of_a_librarys_model_is_one_line_without_frames(
    go: Any, tmp_path: Path
) -> None:
    write_net("", tmp_path)
    code, said = go("train", "c.yaml", VIT[0], VIT[2], VIT[1].replace("{", "{img_size: 24, "))
    assert code == 1
    assert "error: PatchEmbed of timm raised in forward (timm/layers/patch_embed.py:" in said
    assert "Input height (16) doesn't match model (24)" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("mix", "found"),
    [
        ("return self.fc(x.flatten(1)), x", "returned a tuple"),
        ("return self.fc(x.flatten(1))[:, :3]", r"returned a tensor of shape (8, 3)"),
    ],
)
def test_what_a_classifier_must_return_is_said(
    go: Any, tmp_path: Path, mix: str, found: str
) -> None:
    write_net(mix, tmp_path)
    code, said = go("train", "c.yaml", "--allow", "own_net")
    assert found in said
    assert code == 2
    assert "expects a tensor of logits of shape (batch, 10)" in said


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_data_set_that_raises_is_named_in_a_worker_too(
    go: Any, tmp_path: Path, workers: str
) -> None:
    (tmp_path / f"own{workers}" / "data").mkdir(parents=True)
    (tmp_path / f"own{workers}" / "data" / "noise.py").write_text(DATA)
    (tmp_path / "c.yaml").write_text(CONFIG % ("small_cnn", "noise"))
    code, said = go("train", "c.yaml", f"dataset.workers={workers}")
    assert code == 2
    assert f"own{workers}/data/noise.py is there: add --parts own{workers}" in said
    code, said = go("train", "c.yaml", f"dataset.workers={workers}", "--parts", f"own{workers}")
    assert code == (1 if workers == "0" else 3)
    assert "your data set Noise raised in fetch (noise.py:17): IndexError: no such sample" in said
    assert "mpt/data" not in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            [("fetch(self, indices, epoch)", "fetch(self, indices)"), ("Noise(Dataset)", "Noise")],
            "the data set's build returned a Noise, whose fetch (noise.py:16) takes (self, indices); it is called as "
            "fetch(self, indices, epoch)",
        ),
        (
            [
                (
                    "raise IndexError",
                    "return self.read(indices)\n\n    def read(self):\n        raise IndexError",
                )
            ],
            "your data set Noise raised in fetch (noise.py:17): TypeError: Noise.read() takes 1 positional argument",
        ),
        (
            [("build(settings, split, seed)", "build(settings)")],
            "your data set build (noise.py:19) does not take the arguments that it is called with: "
            "build() takes 1 positional argument but 3 were given; expected build(settings, split, seed)",
        ),
        (
            [('raise IndexError("no such sample")', 'raise OSError("the disk is gone")')],
            "your data set Noise raised in fetch (noise.py:17): OSError: the disk is gone",
        ),
    ],
    ids=["a method", "its own call", "build", "an OSError"],
)
def test_a_call_that_a_part_cannot_take_is_named_with_what_it_should(
    go: Any, tmp_path: Path, changes: list[tuple[str, str]], said: str
) -> None:
    data = DATA
    for old, new in changes:
        data = data.replace(old, new)
    (tmp_path / "called" / "data").mkdir(parents=True)
    (tmp_path / "called" / "data" / "noise.py").write_text(data)
    (tmp_path / "c.yaml").write_text(CONFIG % ("small_cnn", "noise"))
    for name in [name for name in sys.modules if name.startswith("mpt.parts.called")]:
        del sys.modules[name]
    code, found = go("train", "c.yaml", "--parts", "called")
    assert code == (2 if "it is called as" in said else 1)
    assert said in found


def test_a_plan_names_the_part_that_does_not_take_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(part_packages.VARIABLE, str(tmp_path / "planned"))
    forward = "class Net(nn.Linear):\n    def forward(self, x, mask):\n        pass\n\ndef build"
    made = MODEL.format(width=256, ends='return {"net": Net(256, 10)}').replace(
        "def build", forward
    )
    files = {
        "nn/mine.py": made,
        "data/noise.py": DATA.replace("(settings, split, seed)", "(settings)"),
        "data/gone.py": DATA.replace("    return Noise()", "    raise ValueError('no noise')"),
    }
    for name, text in files.items():
        (tmp_path / "planned" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "planned" / name).write_text(text)
    chosen = (("mine", "digits"), ("small_cnn", "noise"), ("small_cnn", "gone"))
    configs = [load_config(CONFIG % names) for names in chosen]
    with Session(find_gpu("h100"), Calibration()) as session:
        model, data, gone = [answer.error for answer in session.plan(configs)]
    assert model == (
        "your model Net.forward (mine.py:12) does not take the arguments that it is called with: Net.forward() missing "
        "1 required positional argument: 'mask'"
    )
    assert data.startswith("your data set build (noise.py:19) does not take the arguments that it")
    assert (
        "cannot plan: your data set gone raised in build (gone.py:20): ValueError: no noi" in gone
    )


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["precision=fp16"], "did you mean amp (mixed) or fp16-pure (weights in half too)?"),
        (["memory=recompute"], "memory.recompute=true"),
        (["--lr", "0.1"], "optimizer.lr=0.1"),
        (["--batch-size=4"], "train.batch_size=4"),
        (["--epochs", "--quiet"], "train.epochs=VALUE"),
        (["--fp16"], "precision=amp"),
        (["model=null", "model=nowhere"], "found with --parts DIR (a folder with nn/nowhere.py)"),
    ],
)
def test_words_of_other_programs_are_answered_with_ours(
    go: Any, tmp_path: Path, words: list[str], hint: str
) -> None:
    (tmp_path / "c.yaml").write_text(CONFIG % ("small_cnn", "digits"))
    code, said = go("train", "c.yaml", *words)
    assert code == 2
    assert hint in said


def test_models_of_torchvision_and_timm_are_named_without_importing_them(
    go: Any, tmp_path: Path
) -> None:
    if find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed; its models are looked for")
    (tmp_path / "c.yaml").write_text(CONFIG % ("resnet50", "digits"))
    said = go("validate", "c.yaml")[1]
    assert "found 'resnet50'; did you mean torchvision:resnet50" in said
    assert "; `mpt list models` lists all" in said
    assert "retinanet" not in said
    (tmp_path / "c.yaml").write_text(CONFIG % ("resnet5", "digits"))
    assert "found 'resnet5'; the nearest are torchvision:resnet50, " in go("validate", "c.yaml")[1]


MODEL = """
from torch import nn
from mpt.config.options import ModelOptions

TASK = "classify"

class Settings(ModelOptions):
    image_size: int = 16
    channels: int = 1

def build(settings, data):
    net = nn.Sequential(nn.Flatten(), nn.Linear({width}, 10))
    {ends}
"""
MODE = """
from mpt.config.options import PrecisionOptions

NAMES = {"forgetful": {}}

class Settings(PrecisionOptions):
    pass

def build(name, settings, device):
    pass
"""


@pytest.mark.parametrize(
    ("number", "width", "ends", "expected", "words"),
    [
        (
            1,
            255,
            'return {"net": net}',
            1,
            "your model raised in forward, in Linear(in_features=255, out_features=10, ",
        ),
        (
            2,
            256,
            "return net",
            2,
            "build returned a Sequential; expected a dict of networks by name",
        ),
        (3, 256, "return", 2, "model bare: its build returned nothing; expected a dict"),
        (4, 256, 'return {"net": 3}', 2, "returned a dict whose 'net' is an int"),
        (
            5,
            256,
            'return {"network": net}',
            2,
            "wants a network called 'net'; the model's build returned 'network'",
        ),
        (
            6,
            256,
            'return {"net": net}',
            2,
            "precision forgetful: its build returned nothing; expected an object of mpt.seams",
        ),
    ],
)
def test_what_a_part_must_build_is_said_in_one_line(
    go: Any, tmp_path: Path, number: int, width: int, ends: str, expected: int, words: str
) -> None:
    own = tmp_path / f"bare{number}"
    for kind, text in (("nn/bare.py", MODEL), ("precision/forgetful.py", MODE)):
        (own / kind).parent.mkdir(parents=True)
        (own / kind).write_text(text.replace("{width}", str(width)).replace("{ends}", ends))
    (tmp_path / "c.yaml").write_text(CONFIG % ("bare", "digits"))
    mode = ["precision=forgetful"] if number == 6 else []
    code, said = go("train", "c.yaml", "--parts", str(own), *mode)
    assert words in said
    assert code == expected
    assert "Traceback" not in said
    assert "mpt/engine" not in said
