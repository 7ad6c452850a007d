import pytest
import torch
from pydantic import ValidationError

from mpt.config.options import AUGMENTATIONS, DatasetOptions
from mpt.data.pictures.augment import Augmentation, preserved_generator
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


ARGUMENTS = {
    "RandomAffine": {"degrees": 10},
    "RandomRotation": {"degrees": 10},
    "RandomPosterize": {"bits": 4},
}
ARGUMENTS |= {
    "RandomSolarize": {"threshold": 0.5},
    "RandomAdjustSharpness": {"sharpness_factor": 2.0},
}
ARGUMENTS |= {
    "Pad": {"padding": 2},
    "GaussianBlur": {"kernel_size": 3},
    "ColorJitter": {"brightness": 0.5},
}
ARGUMENTS |= {"ElasticTransform": {"sigma": 1.0}}


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_every_allowed_name_keeps_shape_dtype_and_range_and_leaves_the_generator_alone(name):
    augmentation = Augmentation([{name: ARGUMENTS.get(name, {})}], 16, 3, seed=1)
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    changed = augmentation.apply_all(images, 2, [5, 6, 7, 8])
    assert torch.equal(torch.get_rng_state(), before)
    assert changed.shape == images.shape
    assert changed.dtype == torch.float32
    assert changed.min() >= 0
    assert changed.max() <= 1
    again = augmentation.apply_all(images.flip(0), 2, [8, 7, 6, 5]).flip(0)
    assert torch.equal(again, changed)


def test_draws_differ_by_seed_epoch_and_index_and_by_nothing_else():
    image = torch.rand(1, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    entries = [{"RandomCrop": {"padding": 8}}]

    def draw(seed, epoch, index):
        return Augmentation(entries, 16, 1, seed).apply_all(image, epoch, [index])

    assert torch.equal(draw(0, 0, 0), draw(0, 0, 0))
    outcomes = [draw(*numbers) for numbers in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]]
    assert all(not torch.equal(a, b) for n, a in enumerate(outcomes) for b in outcomes[:n])


def test_the_generator_is_put_back_after_an_error_too():
    before = torch.get_rng_state()

    def fail_within():
        with preserved_generator():
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_crop_without_a_size_takes_the_image_size():
    assert Augmentation(["RandomCrop"], 12, 3, 0).transforms[0].size == (12, 12)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"RandomCrop": {"pading": 4}},
            "RandomCrop has no argument 'pading'; it has size, padding",
        ),
        ("RandomAffine", "RandomAffine needs 'degrees'"),
        ({"RandomCrop": {"size": 99}}, "RandomCrop fails on images of 3 x 16 x 16"),
        ({"RandomHorizontalFlip": {"p": 3.0}}, "RandomHorizontalFlip refuses its arguments"),
        (
            {"RandomRotation": {"degrees": 5, "interpolation": "sharp"}},
            "RandomRotation refuses its arguments",
        ),
        ("Lambda", "no augmentation 'Lambda'"),
    ],
)
def test_impossible_arguments_are_a_config_error_that_says_which(entry, message):
    with pytest.raises(ConfigError, match=message):
        Augmentation([entry], 16, 3, 0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["RandomHorizontalFlipp"], "did you mean RandomHorizontalFlip"),
        (["os.system"], "no augmentation 'os.system'"),
        (["randaugment"], "did you mean RandAugment"),
        (["random_crop"], "did you mean RandomCrop"),
        (["cutmix"], r"a classifier has task\.cutmix=1\.0"),
        (["mix_up"], r"a classifier has task\.mixup=1\.0"),
        ([{"RandomCrop": {}, "RandomErasing": {}}], "its own list item"),
    ],
)
def test_names_are_checked_with_the_config_before_torch_is_needed(entries, message):
    with pytest.raises(ValidationError, match=message):
        DatasetOptions(augment=entries)
