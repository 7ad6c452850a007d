"""`mpt validate` refuses what `mpt train` refuses from settings alone: both build the same run."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.commands.validate import CARD, refuse
from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.errors import ConfigError
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.precision.low_bit_products import check_device

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


def test_fp8_is_planned_for_a_card_that_is_not_here() -> None:
    """The planner's stand-in for a card has another device type than cuda."""
    with FakeTensorMode():
        assert check_device("fp8", torch.device("meta"), emulate=False) == (0, 0)
    with pytest.raises(
        ConfigError, match=r"fp8 needs a GPU of compute capability 8\.9 or later, not cpu"
    ):
        check_device("fp8", torch.device("cpu"), emulate=False)
