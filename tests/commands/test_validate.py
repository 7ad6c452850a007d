"""`mpt validate` refuses what `mpt train` refuses from settings alone: both build the same run."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.commands.validate import CARD, Command, refuse, run
from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.engine.building.build import build_networks
from mpt.errors import ConfigError
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.precision.low_bit_products import check_device
from mpt.seams import DataSpec, FieldSpec

REFUSED = [
    (
        "@classify_digits precision=native",
        "precision.mode: native is for models with a half precision of their own",
    ),
    (
        "@stylegan2_16 model.image_size=100",
        "model.image_size: stylegan2 cannot make 100 pixels; it can make 16, 32",
    ),
    (
        "@classify_digits precision.keep_fp32=[nowhere.*]",
        "precision.keep_fp32: no module matches 'nowhere.*'",
    ),
    (
        "@classify_digits train.freeze=[nothing.*]",
        "train.freeze: 'nothing.*' matches no trained parameter",
    ),
    (
        "@vae dataset.image_size=7",
        "model of the VAE family: it makes 8x8 images with 1 channels, but the data set delivers 1x7x7",
    ),
    (
        "@sd15_lora dataset.assumed.text=[1,2]",
        "model: the network is given 'text' of 768 features, and the data's is of shape [1, 2]",
    ),
    (
        "@sd3_lora dataset.assumed.pooled=[7]",
        "model: the network is given 'pooled' of 2048 features",
    ),
    ("@sdxl_lora dataset.assumed.sizes=[4]", "model: the network is given 'sizes' of 6 features"),
    (
        "@classify_digits dataset.image_size=7",
        "model small_cnn: its stages halve images three times",
    ),
    (
        "@classify_digits dataset.channels=2",
        "images of 1 channels cannot become 2; set dataset.channels to 1, 3 or 4",
    ),
    (
        "@classify_digits train.batch_size=2000",
        "the data set has 1437 samples, fewer than one batch",
    ),
    (
        "@yolofuse_demo dataset.sampling=balanced",
        "dataset.sampling=balanced: this data set has no classes",
    ),
    (
        "@saehd_demo dataset.image_size=80",
        "model: it swaps faces of 64 pixels, and the data set delivers 80",
    ),
    ("@classify_digits task.mean=[0.5,0.5]", "task.mean: give 1 or 1 numbers, one per channel"),
]


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(find_gpu(CARD), Calibration()) as opened:
        yield opened


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[words for words, _ in REFUSED])
def test_what_only_the_built_run_shows_is_refused_with_the_words_of_training(
    session: Session, words: str, said: str
) -> None:
    name, *overrides = words.split()
    if name.endswith("_lora"):
        pytest.importorskip("diffusers")
    config = load_config(find_shipped(name), overrides)
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        refuse(session.plan([config], whole_run=True, draws=True)[0])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("@classify_digits model.weights=nothing.pt", "model.weights: there is no file nothing.pt"),
        ("@classify_digits model.weights=text.pt", "text.pt is refused as a weights file"),
        (
            "@classify_digits model.weights=other.safetensors",
            "model.weights: only 0 of the model's 20",
        ),
        ("@diffusion_digits memory.lora.rank=2 memory.lora.weights=no.pt", "memory.lora.weights: "),
    ],
)
def test_a_file_of_weights_that_training_would_refuse_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.pt").write_text("no weights")
    save_file({"other.weight": torch.zeros(3)}, "other.safetensors")
    name, *overrides = words.split()
    config = load_config(find_shipped(name), overrides)
    with (
        Session(find_gpu(CARD), Calibration()) as session,
        pytest.raises(ConfigError, match=f"^{re.escape(said)}"),
    ):
        refuse(session.plan([config], whole_run=True, draws=True)[0])


def test_weights_that_fit_and_data_that_are_not_here_are_valid_and_the_data_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["dataset=image_folder", "dataset.root=nowhere", "dataset.channels=1"]
    config = load_config(find_shipped("@classify_digits"), words)
    spec = DataSpec({"image": FieldSpec((1, 16, 16), torch.float32, "image")}, 0, tuple("ab"))
    weights = build_networks(config, spec, fake=False)["net"].state_dict()
    save_file({f"net.{name}": one for name, one in weights.items()}, "w.safetensors")
    run(Command(find_shipped("@classify_digits"), (*words, "model.weights=w.safetensors")))
    said = capsys.readouterr()
    assert said.out.endswith("valid: small_cnn on image_folder, amp, 20 epochs\n")
    assert said.err.startswith("the data set is not here (no folder nowhere)")


def test_fp8_is_planned_for_a_card_that_is_not_here() -> None:
    """The planner's stand-in for a card has another device type than cuda."""
    with FakeTensorMode():
        assert check_device("fp8", torch.device("meta"), emulate=False) == (0, 0)
    with pytest.raises(
        ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or later, not cpu"
    ):
        check_device("fp8", torch.device("cpu"), emulate=False)
