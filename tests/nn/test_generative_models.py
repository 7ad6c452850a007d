"""The small generative networks: sizes of the source, shapes at any size, and refusals that say what is possible."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from mpt.errors import ConfigError, DataError, MptError
from mpt.nn import dcgan
from mpt.nn.shared.generative_bodies import conv_plan, one_hot
from mpt.seams import DataSpec, FieldSpec

pytestmark = pytest.mark.tier("fast")


def spec(size: int = 28, channels: int = 1, classes: int = 10) -> DataSpec:
    fields = {"image": FieldSpec((channels, size, size), torch.float32)}
    if classes:
        fields["label"] = FieldSpec((), torch.int64)
    return DataSpec(fields, 100, tuple(map(str, range(classes))))


def build(name: str, data: DataSpec, **changes: Any) -> tuple[Any, dict[str, nn.Module]]:
    for file in ("generative_mlp", "vae", "adversarial_autoencoder"):
        module = importlib.import_module(f"mpt.nn.{file}")
        if name in module.NAMES:
            settings = module.Settings(**{**module.NAMES[name], **changes})
            return settings, module.build(settings, data)
    raise AssertionError(name)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_default_sizes_are_those_of_the_source() -> None:
    _, gan = build("vanilla_gan", spec())
    assert count(gan["gen"]) == 100 * 128 + 128 + 128 * 784 + 784
    assert count(gan["disc"]) == 784 * 128 + 128 + 128 + 1
    _, vae = build("vae", spec())
    assert count(vae["encoder"]) == 784 * 128 + 128 + 2 * (128 * 100 + 100)


@pytest.mark.parametrize(
    "name",
    ["vanilla_gan", "lsgan", "wgan", "wgan_gp", "cgan", "acgan", "infogan", "began", "ebgan"],
)
@pytest.mark.parametrize(("body", "size", "channels"), [("mlp", 9, 3), ("conv", 12, 2)])
def test_every_adversarial_model_makes_and_judges_images_of_the_size_asked(
    name: str, body: str, size: int, channels: int
) -> None:
    settings, modules = build(
        name, spec(size, channels), image_size=size, channels=channels, body=body, hidden=16
    )
    latent = torch.randn(3, settings.latent_size)
    label = torch.tensor([0, 3, 9])
    condition = modules["condition"](label) if "condition" in modules else None
    image = modules["gen"](latent, condition)
    assert image.shape == (3, channels, size, size)
    assert 0 <= image.min() <= image.max() <= 1
    verdict = modules["disc"](image, condition if settings.labels == "condition" else None)
    assert verdict.score.shape == (3,)
    assert (verdict.classes is not None) == (name == "acgan")
    assert (verdict.code is not None) == (name in ("began", "ebgan"))
    assert ("recognition" in modules) == (name == "infogan")


@pytest.mark.parametrize("name", ["vae", "cvae", "dvae"])
@pytest.mark.parametrize("body", ["mlp", "conv"])
def test_every_variational_model_goes_there_and_back(name: str, body: str) -> None:
    settings, modules = build(name, spec(8), image_size=8, body=body, hidden=16, latent_size=4)
    label = torch.tensor([1, 2])
    image = torch.rand(2, 1, 8, 8)
    mean, log_variance = modules["encoder"](image, label)
    assert mean.shape == log_variance.shape == (2, 4)
    assert modules["decoder"](mean, label).shape == image.shape
    assert (settings.noise > 0) == (name == "dvae")


@pytest.mark.parametrize("name", ["aae", "bigan"])
def test_adversarial_autoencoders_judge_codes_or_pairs(name: str) -> None:
    settings, modules = build(name, spec(8), image_size=8, hidden=16)
    image = torch.rand(2, 1, 8, 8)
    code = modules["encoder"](image)
    assert code.shape == (2, settings.latent_size)
    seen = (code,) if name == "aae" else (image, code)
    assert modules["disc"](*seen).shape == (2,)
    assert modules["gen"](code).shape == image.shape


@pytest.mark.parametrize(
    ("size", "start", "doublings"), [(28, 7, 2), (8, 4, 1), (32, 4, 3), (4, 4, 0), (10, 5, 1)]
)
def test_conv_bodies_grow_from_four_to_seven_pixels(size: int, start: int, doublings: int) -> None:
    assert conv_plan(size) == (start, doublings)


@pytest.mark.parametrize("size", [1, 9, 11, 30, 100])
def test_a_size_that_convolutions_cannot_make_names_those_they_can(size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"cannot make {size} pixels.*nearest sizes.*mlp"
    ) as caught:
        build("vae", spec(size), image_size=size, body="conv")
    proposed = str(caught.value).split("can make are ")[1].split(" (")[0]
    for nearest in proposed.split(", "):
        conv_plan(int(nearest))


@pytest.mark.parametrize("name", ["cgan", "acgan", "cvae"])
def test_class_conditional_models_refuse_data_without_labels(name: str) -> None:
    with pytest.raises(DataError, match="no labels"):
        build(name, spec(classes=0))


def test_dcgan_refuses_images_of_another_size() -> None:
    with pytest.raises(DataError, match=r"32x32.*1x20x20"):
        dcgan.build(dcgan.Settings(image_size=32), spec(20))


@pytest.mark.parametrize("name", ["vanilla_gan", "vae", "aae"])
def test_images_of_another_size_are_refused_with_both_sizes(name: str) -> None:
    with pytest.raises(MptError, match=r"28x28.*1x8x8"):
        build(name, spec(8))


def test_a_zero_critic_count_is_refused() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        build("wgan", spec(), critic_steps=0)


def test_energies_of_large_colour_images_do_not_overflow_half_precision() -> None:
    _, modules = build("ebgan", spec(320, 3), image_size=320, channels=3, hidden=8)
    critic = modules["disc"].half()
    score = critic(torch.zeros(1, 3, 320, 320, dtype=torch.float16)).score
    assert score.dtype == torch.float32
    assert torch.isfinite(score).all()


def test_labels_are_encoded_without_reading_them() -> None:
    assert torch.equal(one_hot(torch.tensor([2, 0]), 3), torch.tensor([[0.0, 0, 1], [1, 0, 0]]))
    assert one_hot(torch.empty(4, dtype=torch.int64, device="meta"), 3).shape == (4, 3)
