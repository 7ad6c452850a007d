import pytest
import torch

from mpt.data.loading.loader import Loader, to_device
from mpt.data.pictures import in_memory
from mpt.data.pictures.in_memory import InMemory
from mpt.errors import DataError

pytestmark = pytest.mark.tier("fast")


def bytes_set(**settings):
    images = torch.randint(
        0, 256, (10, 3, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    return InMemory(images, torch.arange(10), tuple("abcdefghij"), **settings)


def test_bytes_become_floats_in_the_unit_range_and_rows_stay_with_their_labels():
    data = bytes_set()
    delivered = data.fetch([4, 2], 0)
    assert delivered["image"].dtype == torch.uint8 == data.spec.fields["image"].dtype
    batch = to_device(delivered, "cpu", data.spec)
    assert torch.equal(batch["image"], data.images[[4, 2]].float() / 255)
    assert batch["label"].tolist() == [4, 2]


def test_sets_too_large_to_prepare_are_converted_on_the_way_to_the_same_picture(monkeypatch):
    prepared = bytes_set(image_size=16, channels=1)
    monkeypatch.setattr(in_memory, "LARGEST_PREPARED_BYTES", 10)
    lazy = bytes_set(image_size=16, channels=1)
    assert prepared.images.shape == (10, 1, 16, 16)
    assert lazy.images.shape == (10, 3, 8, 8)
    one, other = (
        to_device(data.fetch([1, 2], 0), "cpu", data.spec)["image"] for data in (prepared, lazy)
    )
    assert (one - other).abs().max() <= 0.5 / 255 + 1e-6  # the prepared ones are rounded to bytes


def test_grey_from_colour_is_the_luminance():
    images = torch.zeros(1, 3, 2, 2)
    images[:, 1] = 1.0
    data = InMemory(images, torch.zeros(1), ("x",), channels=1)
    assert torch.allclose(data.fetch([0], 0)["image"], torch.full((1, 1, 2, 2), 0.587))


def test_images_and_labels_that_do_not_go_together_are_refused_in_words():
    images, labels = torch.zeros(3, 1, 8, 8), torch.zeros(3)
    with pytest.raises(DataError, match="found 2 for 3 images"):
        InMemory(images, labels[1:], ("a",))
    with pytest.raises(DataError, match=r"found float64 of shape \(3, 1, 8, 8\)"):
        InMemory(images.double(), labels, ("a",))
    with pytest.raises(DataError, match=r"found uint8 of shape \(3, 8, 8\)"):
        InMemory(images[:, 0].byte(), labels, ("a",))


def test_a_set_says_that_its_samples_need_no_look_only_if_they_do_not():
    assert bytes_set().is_sound
    pictures, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 1, 0])
    assert InMemory(pictures, labels, ("a", "b")).is_sound
    for wrong in (2, -1, -100):  # left out, the last one: looked at as any other
        assert not InMemory(pictures, torch.tensor([0, wrong, 1, 0]), ("a", "b")).is_sound
    pictures[2, 0, 3, 3] = float("nan")
    data = InMemory(pictures, labels, ("a", "b"))
    assert not data.is_sound
    with pytest.raises(DataError, match="sample 2: its 'image' holds NaN"):
        next(Loader(data, 4, seed=0).batches())


def test_a_set_of_somebodys_own_that_derives_from_it_is_looked_at():
    class Noisy(InMemory):
        def fetch(self, indices, epoch):
            batch = super().fetch(indices, epoch)
            return {**batch, "image": batch["image"] / 0 * 0}

    data = Noisy(torch.rand(4, 1, 8, 8), torch.zeros(4), ("a",))
    with pytest.raises(DataError, match="sample 0: its 'image' holds NaN"):
        next(Loader(data, 4, seed=0, shuffle=False).batches())
