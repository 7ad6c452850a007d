"""Balanced sampling: every class equally often, every sample of a class as often as the others, and resumable."""

from collections import Counter

import pytest
import torch

from mpt.config.load import load_config
from mpt.data.loading.balance import balanced_order
from mpt.data.loading.loader import Loader
from mpt.data.pictures.in_memory import InMemory
from mpt.engine.building.build import build_datasets
from mpt.errors import DataError
from mpt.seams.samples import Dataset, DataSpec, FieldSpec

pytestmark = pytest.mark.tier("fast")


LABELS = [0] * 90 + [1] * 7 + [3] * 5
"""Class 2 has no samples."""


def skewed(augment: tuple[str, ...] = ()) -> InMemory:
    images = torch.rand(len(LABELS), 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return InMemory(images, torch.tensor(LABELS), ("a", "b", "c", "d"), augment=augment, seed=3)


def test_classes_come_equally_often_and_no_sample_much_oftener_than_another_of_its_class() -> None:
    order = balanced_order(LABELS, torch.Generator().manual_seed(1))
    assert Counter(LABELS[number] for number in order) == {0: 34, 1: 34, 3: 34}
    for name in (0, 1, 3):
        members = [number for number, label in enumerate(LABELS) if label == name]
        times = [Counter(order)[number] for number in members]
        assert max(times) - min(times) <= 1
    assert order != sorted(order)


def test_the_batches_of_a_step_depend_on_seed_and_step_alone_and_are_shared_out_whole() -> None:
    whole = Loader(skewed(), 10, seed=4, sampling="balanced")
    steps = [whole.indices(step)[0] for step in range(25)]
    assert Loader(skewed(), 10, seed=4, sampling="balanced").indices(17)[0] == steps[17]
    assert Loader(skewed(), 10, seed=5, sampling="balanced").indices(17)[0] != steps[17]
    halves = [
        Loader(
            skewed(),
            10,
            4,
            sampling="balanced",
            place=lambda count, half=half: (5 * half, 5 * half + 5),
        )
        for half in (0, 1)
    ]
    assert [number for half in halves for number in half.indices(17)[0]] == steps[17]


def test_a_sample_that_comes_again_in_an_epoch_is_augmented_in_another_way() -> None:
    loader = Loader(skewed(), 30, seed=4, sampling="balanced")
    (first, one), (second, other) = (loader.indices(step) for step in (0, 1))
    again = next(number for number in first if number in second and LABELS[number] == 3)
    data = skewed(({"RandomAffine": {"degrees": 90}},))  # type: ignore[arg-type]
    assert not torch.equal(data.fetch([again], one)["image"], data.fetch([again], other)["image"])


def test_a_data_set_without_known_classes_is_refused() -> None:
    class Plain(Dataset):
        spec = DataSpec({"image": FieldSpec((1, 8, 8), torch.float32, "image")}, 40)

    with pytest.raises(DataError, match="no classes that are known"):
        Loader(Plain(), 10, 0, sampling="balanced")


def test_the_digits_say_their_classes() -> None:
    train, _ = build_datasets(load_config({"model": {"name": "small_cnn", "image_size": 8}}))
    labels = train.class_labels()
    assert labels is not None
    assert [labels.count(name) for name in range(10)] == train.spec.extra["class_counts"]
