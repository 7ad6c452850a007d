"""What is wrong with data is said by name."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from mpt.data.image_folder import Settings, build
from mpt.doctor.data.data_checks import examine_data
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec


class Samples(Dataset):
    """Images and labels from lists; an index in `bad` cannot be read."""

    def __init__(
        self, images: torch.Tensor, labels: Sequence[int], bad: Sequence[int] = ()
    ) -> None:
        self.images, self.labels, self.bad = images, torch.tensor(list(labels)), bad
        shape = tuple(images.shape[1:])
        fields = {
            "image": FieldSpec(shape, torch.float32, "image"),
            "label": FieldSpec((), torch.int64),
        }
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
    assert (
        section.tables["fields"][0]["mean"] == 0.5
        or abs(section.tables["fields"][0]["mean"] - 0.5) < 0.1
    )


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
    assert "warning train: 1 sample of one colour: 3" in said
    assert "fault train: 1 sample with values that are not finite: 5" in said
    assert "(samples 7=8)" in said
    assert "fault train: 1 sample unreadable: 11.png is cut short" in said
    assert "fault train: 1 sample has labels outside of the 2 classes: 7" in said
    assert "without any: dog" in said
    assert "pictures are expected in 0 to 1" in said


def test_files_that_the_training_passes_over_are_no_fault_and_their_substitutes_no_copies(
    tmp_path: Path,
) -> None:
    for number, split in enumerate(("train", "test")):
        for index, image in enumerate(images(24, number)):
            path = tmp_path / split / ("cat" if index < 12 else "dog") / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image[0] * 255).byte().numpy()).save(path)
    for index in (3, 4, 5, 6, 7, 11):  # after the last cat comes a dog
        (tmp_path / "train" / "cat" / f"{index}.png").write_bytes(b"junk")
    (tmp_path / "train" / "dog" / "loop").symlink_to(tmp_path / "train")
    settings = Settings(root=str(tmp_path), image_size=4, channels=1, on_bad_image="skip")
    section = examine_data(build(settings, "train", 0), build(settings, "test", 0))
    said = [f"{one.level} {one.about}: {one.text}" for one in section.findings]
    assert section.worst == "warning"
    assert not [one for one in said if "more than once" in one or "two classes" in one]
    (passed_over,) = [one for one in said if "passed over" in one]
    assert passed_over.startswith("warning train: 7 files passed over, as in training: ")


def test_pictures_in_both_sets_are_said() -> None:
    shared = images(5, 0)
    section = examine_data(Samples(shared, [0, 1, 0, 1, 0]), Samples(shared[:2], [0, 1]))
    assert any(one.about == "leak" and "2 pictures" in one.text for one in section.findings)


class Pairs(Samples):
    """Samples whose target is the picture itself."""

    def __init__(self, images: torch.Tensor) -> None:
        super().__init__(images, [0, 1] * (len(images) // 2))
        self.spec = DataSpec(
            {**self.spec.fields, "target": self.spec.fields["image"]}, len(images), ("cat", "dog")
        )

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        batch = super().fetch(indices, epoch)
        return {**batch, "target": batch["image"].clone()}


def test_an_input_that_is_its_own_target_is_no_double() -> None:
    section = examine_data(Pairs(images(40, 0)), Pairs(images(20, 1)))
    assert not any("more than once" in one.text for one in section.findings)


class Coloured(Samples):
    """Smooth pictures in three channels with `classes`, whose samples are files."""

    def __init__(
        self, images: torch.Tensor, labels: Sequence[int], classes: Sequence[str] = ("cat", "dog")
    ) -> None:
        super().__init__(images, labels)
        self.spec = DataSpec(self.spec.fields, len(images), tuple(classes))

    def name_of(self, index: int) -> str:
        return f"{index:04d}.png"


def pictures(count: int, seed: int, size: int = 32) -> torch.Tensor:
    """Blurred noise that is reddish: channel means of about 0.6, 0.5 and 0.4."""
    noise = torch.rand(count, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(
        noise, size=size, mode="bicubic", align_corners=True
    ).clamp(0, 1)
    return (smooth * 0.8 + torch.tensor([0.2, 0.1, 0.0]).view(3, 1, 1)).clamp(0, 1)


def halves(count: int) -> list[int]:
    return [index % 2 for index in range(count)]


def encoded_again(image: torch.Tensor, quality: int) -> torch.Tensor:
    """As a JPEG of Pillow's."""
    file = io.BytesIO()
    pixels = (image * 255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return torch.from_numpy(numpy.array(Image.open(file))).permute(2, 0, 1) / 255


def found_in(train: Dataset, test: Dataset) -> str:
    return "\n".join(
        f"{one.level} {one.about}: {one.text}" for one in examine_data(train, test).findings
    )


def test_sound_pictures_in_colour_raise_no_alarm() -> None:
    section = examine_data(
        Coloured(pictures(60, 0), halves(60)), Coloured(pictures(30, 1), halves(30))
    )
    assert section.worst == "ok", section.findings


def test_test_pictures_that_were_encoded_again_are_found_in_the_training_set_by_their_files() -> (
    None
):
    train, test = pictures(60, 0), pictures(30, 1)
    test[3], test[17] = encoded_again(train[40], 50), encoded_again(train[5], 80)
    said = found_in(Coloured(train, halves(60)), Coloured(test, halves(30)))
    assert (
        "warning leak: 2 pictures are in the training and in the test set, to the bit or encoded again"
        in said
    )
    assert (
        "train 0040.png (cat) = test 0003.png (dog), train 0005.png (dog) = test 0017.png (dog)"
        in said
    )


def test_one_picture_in_two_classes_is_named_to_the_bit_and_encoded_again() -> None:
    train = pictures(60, 0)
    train[7], train[9] = train[10], encoded_again(train[20], 60)
    said = found_in(Coloured(train, halves(60)), Coloured(pictures(30, 1), halves(30)))
    assert (
        "warning train: 2 samples are one picture in two classes: 0007.png (dog) = 0010.png (cat), "
        in said
    )
    assert "0009.png (dog) = 0020.png (cat)" in said


def test_channels_that_are_swapped_in_the_test_set_are_named_in_their_order() -> None:
    said = found_in(
        Coloured(pictures(200, 0), halves(200)), Coloured(pictures(100, 1).flip(1), halves(100))
    )
    assert "test's are train's in the order 2, 1, 0" in said


def test_test_pictures_that_are_darker_than_the_training_s_are_named() -> None:
    said = found_in(
        Coloured(pictures(100, 0), halves(100)), Coloured(pictures(50, 1) * 0.6, halves(50))
    )
    assert "warning channels: the channels of image have means" in said


def test_a_channel_that_says_nothing_is_named_and_an_opaque_alpha_plane_is_only_noted() -> None:
    without_green = pictures(40, 0)
    without_green[:, 1] = 0.25
    said = found_in(Coloured(without_green, halves(40)), Coloured(pictures(30, 1), halves(30)))
    assert "warning train: channel 1 of image is 0.25 in every pixel of every sample" in said
    opaque = [torch.cat([pictures(40, seed), torch.ones(40, 1, 32, 32)], 1) for seed in (0, 1)]
    said = found_in(Coloured(opaque[0], halves(40)), Coloured(opaque[1], halves(40)))
    assert "note train: channel 3 of image is 1 in every pixel" in said
    assert "warning" not in said


def test_pictures_that_are_nearly_black_are_named() -> None:
    train = pictures(40, 0)
    train[12] *= 0.03
    said = found_in(Coloured(train, halves(40)), Coloured(pictures(30, 1), halves(30)))
    assert "warning train: 1 sample nearly black: 0012.png" in said


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (15 / 255, "12 bits in files of 16?"),
        (3 / 255, "10 bits in files of 16?"),
        (1 / 255, "divided by 255 twice?"),
    ],
)
def test_a_set_that_is_black_as_a_whole_is_named_with_its_likely_cause(
    share: float, words: str
) -> None:
    said = found_in(
        Coloured(pictures(40, 0) * share, halves(40)), Coloured(pictures(30, 1) * share, halves(30))
    )
    assert words in said
    assert "nearly black:" not in said  # not each picture too


class Counted(Coloured):
    """Knows its labels without reading, and counts what is read."""

    def __init__(self, images: torch.Tensor, labels: Sequence[int]) -> None:
        super().__init__(images[:1].expand(len(labels), -1, -1, -1), labels)
        self.read: list[int] = []

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        self.read += indices
        batch = super().fetch(indices, epoch)
        return {**batch, "image": batch["image"] * (0.5 + 0.5 * indices[0] / len(self))}

    def class_labels(self) -> list[int]:
        return self.labels.tolist()


def test_a_sorted_set_is_looked_at_all_over_and_its_labels_are_counted_without_reading_it() -> None:
    data = Counted(pictures(1, 0, size=4), [0] * 3003 + [1] * 3)
    said = found_in(data, Coloured(pictures(30, 1, size=4), halves(30)))
    assert (min(data.read), max(data.read), len(data.read)) == (0, 3004, 2000)
    assert "looked at 2000 of 3006 samples" in said
    assert "class cat has 3003 samples and the rarest, dog, 3" in said
    assert "without any" not in said


def test_labels_of_a_sample_of_a_sorted_set_say_nothing_of_classes_that_were_not_met() -> None:
    class Uncounted(Counted):
        def class_labels(self) -> None:  # type: ignore[override]
            return None

    said = found_in(
        Uncounted(pictures(1, 0, size=4), [0] * 5003 + [1]), Coloured(pictures(30, 1), halves(30))
    )
    assert "without any" not in said


def test_a_class_of_the_training_set_that_chance_does_not_keep_from_the_test_set_is_named() -> None:
    train = Samples(images(40, 0), halves(40))
    assert "class dog is 50% of train and has no sample in test" in found_in(
        train, Samples(images(12, 1), [0] * 12)
    )
    assert "no sample in test" not in found_in(train, Samples(images(6, 1), [0] * 6))
    rare = Samples(images(40, 0), [0] * 38 + [1] * 2)
    assert "no sample in test" not in found_in(rare, Samples(images(30, 1), [0] * 30))
