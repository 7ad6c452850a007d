"""What is wrong with data is said by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpt.doctor.data_checks import examine_data
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec


class Samples(Dataset):
    """Images and labels from lists; an index in `bad` cannot be read."""

    def __init__(self, images: torch.Tensor, labels: Sequence[int], bad: Sequence[int] = ()) -> None:
        self.images, self.labels, self.bad = images, torch.tensor(list(labels)), bad
        shape = tuple(images.shape[1:])
        fields = {"image": FieldSpec(shape, torch.float32, "image"), "label": FieldSpec((), torch.int64)}
        self.spec = DataSpec(fields, len(images), ("cat", "dog"))

    def __len__(self) -> int:
        return len(self.images)

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        if indices[0] in self.bad:
            raise DataError(f"{indices[0]}.png is cut short")
        return {"image": self.images[list(indices)], "label": self.labels[list(indices)]}


def images(count: int, seed: int) -> torch.Tensor:
    return torch.rand(count, 1, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_clean_data_raise_no_alarm() -> None:
    section = examine_data(Samples(images(40, 0), [0, 1] * 20), Samples(images(20, 1), [0, 1] * 10))
    assert section.worst == "ok"
    assert section.tables["fields"][0]["mean"] == 0.5 or abs(section.tables["fields"][0]["mean"] - 0.5) < 0.1


def test_each_kind_of_bad_sample_is_said_with_its_number() -> None:
    train = images(40, 0)
    train[3] = 0.5
    train[5, 0, 0, 0] = float("nan")
    train[7] = train[8]
    test = images(20, 1)
    test[2] = train[9]
    section = examine_data(Samples(train, [0] * 39 + [7], bad=[11]), Samples(test * 255, [0] * 20))
    said = "\n".join(f"{one.level} {one.about}: {one.text}" for one in section.findings)
    assert section.worst == "fault"
    assert "warning train: 1 samples of one colour: 3" in said
    assert "fault train: 1 samples with values that are not finite: 5" in said
    assert "7=8" in said
    assert "fault train: 1 samples unreadable: 11.png is cut short" in said
    assert "fault train: 1 samples have labels outside of the 2 classes: 7" in said
    assert "without any: dog" in said
    assert "pictures are expected in 0 to 1" in said


def test_pictures_in_both_sets_are_said() -> None:
    shared = images(5, 0)
    section = examine_data(Samples(shared, [0, 1, 0, 1, 0]), Samples(shared[:2], [0, 1]))
    assert any(one.about == "leak" and "2 pictures" in one.text for one in section.findings)


class Pairs(Samples):
    """Samples whose target is the picture itself."""

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__(images, [0, 1] * (len(images) // 2))
        self.spec = DataSpec({**self.spec.fields, "target": self.spec.fields["image"]}, len(images), ("cat", "dog"))

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        batch = super().fetch(indices, epoch)
        return {**batch, "target": batch["image"].clone()}


def test_an_input_that_is_its_own_target_is_no_double() -> None:
    section = examine_data(Pairs(images(40, 0)), Pairs(images(20, 1)))
    assert not any("more than once" in one.text for one in section.findings)
