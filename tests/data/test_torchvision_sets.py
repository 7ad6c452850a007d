import hashlib
import pickle
import struct

import numpy
import pytest
import torch

from mpt.data import torchvision_sets
from mpt.data.loading.loader import to_device
from mpt.errors import DataError
from mpt.vision_ops import import_torchvision

pytestmark = pytest.mark.tier("fast")


def settings_for(name, **more):
    return torchvision_sets.Settings(**torchvision_sets.NAMES[name], **more)


def write_idx(path, array):
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    path.write_bytes(header + array.astype(numpy.uint8).tobytes())


@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")]
)
def test_the_mnist_kind_is_read_from_the_files_torchvision_keeps(tmp_path, name, folder):
    raw = tmp_path / folder / "raw"
    raw.mkdir(parents=True)
    numbers = numpy.random.default_rng(0)
    images = numbers.integers(0, 256, (6, 28, 28))
    for part in ("train", "t10k"):
        write_idx(raw / f"{part}-images-idx3-ubyte", images if part == "train" else images[:4])
        write_idx(raw / f"{part}-labels-idx1-ubyte", numpy.arange(6 if part == "train" else 4))
    train = torchvision_sets.build(settings_for(name, root=str(tmp_path)), "train", 0)
    test = torchvision_sets.build(
        settings_for(name, root=str(tmp_path), image_size=32, channels=3), "test", 0
    )
    assert (len(train), len(test), len(train.spec.classes)) == (6, 4, 10)
    batch = to_device(train.fetch([5], 0), "cpu", train.spec)
    assert torch.equal(batch["image"][0, 0], torch.from_numpy(images[5]).float() / 255)
    assert batch["label"].tolist() == [5]
    assert test.fetch([0], 0)["image"].shape == (1, 3, 32, 32)


def test_cifar_is_read_and_a_file_with_another_checksum_is_refused(tmp_path, monkeypatch):
    kind = import_torchvision("datasets").CIFAR10
    folder = tmp_path / kind.base_folder
    folder.mkdir()
    pixels = numpy.arange(3 * 1024, dtype=numpy.uint8).reshape(1, 3072)
    stored = {
        "data_batch_1": {"data": pixels, "labels": [7]},
        "batches.meta": {"label_names": list("abcdefghij")},
    }
    sums = {}
    for name, content in stored.items():
        (folder / name).write_bytes(pickle.dumps(content))
        sums[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(kind, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(kind, "test_list", [])
    monkeypatch.setattr(kind, "meta", {**kind.meta, "md5": sums["batches.meta"]})
    data = torchvision_sets.build(settings_for("cifar10", root=str(tmp_path)), "train", 0)
    batch = to_device(data.fetch([0], 0), "cpu", data.spec)
    assert batch["label"].tolist() == [7]
    assert torch.equal(batch["image"][0], torch.from_numpy(pixels.reshape(3, 32, 32)).float() / 255)
    (folder / "data_batch_1").write_bytes(b"not what was published")
    with pytest.raises(DataError, match="incomplete or damaged"):
        torchvision_sets.build(settings_for("cifar10", root=str(tmp_path)), "train", 0)


@pytest.mark.parametrize("name", sorted(torchvision_sets.NAMES))
def test_missing_files_say_where_they_were_sought_and_nothing_is_downloaded(
    tmp_path, name, monkeypatch
):
    def refuse(*arguments, **options):
        raise AssertionError("downloaded")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    with pytest.raises(DataError, match=r"dataset\.download=true") as caught:
        torchvision_sets.build(settings_for(name, root=str(tmp_path)), "train", 0)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.exit_code == 3


def test_truncated_files_are_named_as_damaged(tmp_path):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (raw / name).write_bytes(b"\0\0\x08\x03\0\0\0\x06\0\0\0\x1c\0\0\0\x1c half")
    with pytest.raises(DataError, match="MNIST/raw is incomplete or damaged"):
        torchvision_sets.build(settings_for("mnist", root=str(tmp_path)), "train", 0)
