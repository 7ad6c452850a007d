import hashlib
from importlib import resources

import pytest
import torch

from mpt.data.digits import read_digits
from mpt.data.pictures.fitting import fit_images
from mpt.data.shapes import draw_shapes
from mpt.metrics.distances.digit_features import DigitFeatures
from mpt.metrics.distances.feature_space import choose_feature_space, explain_distance
from mpt.metrics.distances.frechet import frechet_distance
from mpt.metrics.distances.random_conv_features import RandomConvFeatures
from mpt.seams import DataSpec, FieldSpec

pytestmark = pytest.mark.tier("fast")


WEIGHTS = "7a817248d82c026f456c12ca7f020aee42a83790ed845c36c648861109ca9cb0"
FIRST = [-0.10587757577996192, 0.09029611234353134, 0.013011278655681321]
LAST = -0.4486371614087625


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("size", [8, 28, 32, 64])
def test_digits_at_any_size_are_recognised_and_ranked_by_how_far_they_are_from_real(size):
    train, _ = read_digits("train")
    test, labels = read_digits("test")
    train, test = fit_images(train, size, 1), fit_images(test, size, 1)
    space = DigitFeatures()
    assert (space.logits(test).argmax(1) == labels).double().mean() > 0.95
    pixel_noise = torch.randn(test.shape, generator=generator())
    gaussian = (train.mean(0) + train.std(0) * pixel_noise).clamp(0, 1)
    real = space.features(train)
    distances = [
        frechet_distance(real, space.features(images))
        for images in (test, 0.5 * (test + gaussian), gaussian)
    ]
    assert distances[0] < 2
    assert 15 < distances[1] < 40 < distances[2]


def test_the_digit_weights_are_the_committed_ones():
    content = (resources.files("mpt.metrics") / "digit_features.npz").read_bytes()
    assert hashlib.sha256(content).hexdigest() == WEIGHTS


def test_the_random_network_ranks_shapes_by_how_far_they_are_from_real():
    real, more = (draw_shapes(300, 32, seed)[0].float() / 255 for seed in (1, 2))
    space = RandomConvFeatures()
    blurred = torch.nn.functional.avg_pool2d(more, 4)
    noise = torch.rand(more.shape, generator=generator())
    versions = (more, blurred, more.mean(1, keepdim=True), noise)
    distances = [
        frechet_distance(space.features(real), space.features(images)) for images in versions
    ]
    assert distances == sorted(distances)
    assert distances[0] < 6
    assert distances[-1] > 100


def test_the_random_weights_never_change():
    space = RandomConvFeatures()
    assert space.kernels[0].flatten()[:3].tolist() == pytest.approx(FIRST, abs=1e-15)
    assert space.projection.flatten()[-1].item() == pytest.approx(LAST, abs=1e-15)


@pytest.mark.parametrize(
    ("classes", "channels", "name"),
    [
        (tuple("0123456789"), 1, "digit-classifier-32"),
        (("0 - zero", "1 - one", "2 - two", "3 - three", *"456789"), 1, "digit-classifier-32"),
        (tuple("0123456789"), 3, "random-conv-48"),
        (("T-shirt/top", "Trouser", *"23456789"), 1, "random-conv-48"),
        ((), 1, "random-conv-48"),
    ],
)
def test_only_grey_digits_are_judged_by_the_digit_classifier(classes, channels, name):
    data = DataSpec({"image": FieldSpec((channels, 8, 8), torch.float32)}, 4, tuple(classes))
    assert choose_feature_space(data).name == name
    assert name in explain_distance(data)


@pytest.mark.parametrize(
    "space", [DigitFeatures(), RandomConvFeatures()], ids=lambda space: space.name
)
def test_features_are_the_same_under_autocast_for_half_images_of_the_same_values_and_one_by_one(
    space,
):
    # exact in bfloat16
    images = (torch.rand(6, 3, 20, 20, generator=generator()) * 16).round() / 16
    features = space.features(images)
    assert features.dtype == torch.float64
    assert not features.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(space.features(images.requires_grad_()), features)
    assert torch.equal(space.features(images.detach().bfloat16()), features)
    assert torch.allclose(
        torch.cat([space.features(image[None]) for image in images]), features, rtol=1e-12
    )
