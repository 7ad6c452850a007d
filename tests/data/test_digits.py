import hashlib

import pytest
import torch

from mpt.data import digits

pytestmark = pytest.mark.tier("fast")


HASH = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"
TEST_HASH = "f69addbf22dc647e04c6c2493649447e4cd4b82787f6f609ff1e0882ee3b7593"


def test_the_shipped_digits_are_the_published_1797():
    images, labels = digits.read_digits("all")
    assert images.shape == (1797, 1, 8, 8)
    assert torch.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert labels[:10].tolist() == list(range(10))
    levels = (images * 16).round().to(torch.uint8)
    assert torch.equal(levels.float() / 16, images)
    assert levels[0, 0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0]
    content = levels.numpy().tobytes() + labels.to(torch.uint8).numpy().tobytes()
    assert hashlib.sha256(content).hexdigest() == HASH


def test_the_split_is_fixed_stratified_and_without_overlap():
    train, train_labels = digits.read_digits("train")
    test, test_labels = digits.read_digits("test")
    everything, _ = digits.read_digits("all")
    assert (len(train), len(test)) == (1437, 360)
    assert torch.bincount(test_labels).tolist() == [36] * 10
    assert len(train_labels) == 1437
    assert sorted(map(tuple, torch.cat([train, test]).flatten(1).tolist())) == sorted(
        map(tuple, everything.flatten(1).tolist())
    )
    assert hashlib.sha256((test * 16).to(torch.uint8).numpy().tobytes()).hexdigest() == TEST_HASH


@pytest.mark.parametrize(("image_size", "channels"), [(8, 1), (32, 1), (32, 3)])
def test_size_and_channels_are_what_the_settings_say(image_size, channels):
    data = digits.build(digits.Settings(image_size=image_size, channels=channels), "test", 0)
    batch = data.fetch([3, 1, 3], 0)
    assert (
        batch["image"].shape
        == (3, channels, image_size, image_size)
        == (3, *data.spec.fields["image"].shape)
    )
    assert batch["image"].dtype == torch.float32
    assert batch["label"].dtype == torch.int64
    assert batch["image"].min() >= 0
    assert batch["image"].max() <= 1
    assert torch.equal(batch["image"][0], batch["image"][2])
    assert data.spec.size == len(data) == 360
    assert data.spec.classes == tuple("0123456789")


def test_augmentation_changes_training_images_and_never_test_images():
    augmented = digits.Settings(augment=["RandomInvert", {"RandomCrop": {"padding": 2}}])
    plain = digits.Settings()
    indices = list(range(20))
    for split, same in (("test", True), ("train", False)):
        one = digits.build(augmented, split, 0).fetch(indices, 0)["image"]
        other = digits.build(plain, split, 0).fetch(indices, 0)["image"]
        assert torch.equal(one, other) is same
