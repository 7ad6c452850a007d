"""Decoded images in memory: the same batches, each file read once by all workers, refused where they do not fit."""

import pytest
import torch

from mpt.data import image_folder
from mpt.data.loading.loader import Loader
from mpt.data.pictures import decoding, ram_cache
from mpt.errors import ConfigError, DataError
from tests.data.test_image_folder import build, classes_folder

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_equal_and_no_file_is_read_twice(tmp_path, workers):
    classes_folder(tmp_path / "train", 5)
    classes_folder(tmp_path / "test", 1)
    (tmp_path / "train" / "cat" / "02.png").write_bytes(b"no image")
    settings = {
        "workers": workers,
        "augment": [{"RandomAffine": {"degrees": 20}}],
        "on_bad_image": "skip",
    }
    plain, cached = build(tmp_path, **settings), build(tmp_path, cache="ram", **settings)
    expected = Loader(plain, 5, seed=1, workers=workers).batches()
    stream = Loader(cached, 5, seed=1, workers=workers).batches()
    for _ in range(2):  # an epoch
        assert all(
            torch.equal(value, next_value)
            for value, next_value in zip(next(expected).values(), next(stream).values())
        )
    for path in cached.paths:
        path.unlink()
    again = [next(stream) for _ in range(2)]
    assert {label for batch in again for label in batch["label"].tolist()} == {0, 1}
    assert cached.cache.filled.tolist() == [1, 1, 0] + [1] * 7
    for one in (expected, stream):
        if workers:
            one.close()


def test_augmented_images_leave_the_kept_ones_as_they_were(tmp_path):
    classes_folder(tmp_path / "train", 2)
    classes_folder(tmp_path / "test", 1)
    data = build(tmp_path, cache="ram", augment=["RandomInvert"])
    for epoch in range(3):
        data.fetch([0, 1, 2, 3], epoch)
    assert torch.equal(
        data.cache.samples[1], decoding.decode_bytes(data.paths[1], 3, (8, 8), 10**6)
    )


def test_what_does_not_fit_or_cannot_be_kept_is_refused_in_words(tmp_path, monkeypatch):
    classes_folder(tmp_path / "train", 2)
    classes_folder(tmp_path / "test", 1)
    with pytest.raises(
        DataError,
        match=r"4 decoded samples of 3 x 8 x 8 take .* more than dataset\.cache_gib=1e-09",
    ):
        build(tmp_path, cache="ram", cache_gib=1e-9)
    with pytest.raises(ConfigError, match="RandomResizedCrop as the first augmentation"):
        build(tmp_path, cache="ram", augment=["RandomResizedCrop"])
    monkeypatch.setattr(ram_cache, "free_bytes", lambda shared: 100)
    with pytest.raises(DataError, match="GiB of memory are free; leave the cache out"):
        build(tmp_path, cache="ram")
    monkeypatch.undo()
    assert image_folder.Settings().cache is None
