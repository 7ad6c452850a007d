"""The data seam: layouts that are recorded and read back, and images that cross as bytes."""

import pytest
import torch

from mpt.data.loading.loader import Loader
from mpt.seams import Batch, DataSpec, FieldSpec
from mpt.seams.samples import Adopted

pytestmark = pytest.mark.tier("fast")


SPEC = DataSpec(
    {
        "rgb": FieldSpec((3, 4, 6), torch.uint8, "image"),
        "ir": FieldSpec((1, 2, 3), torch.float32, "image"),
        "level": FieldSpec((5,), torch.uint8),
        "boxes": FieldSpec((7, 4), torch.float32, "boxes"),
    },
    12,
    ("a", "b"),
)


def test_a_layout_is_the_same_after_its_record():
    assert DataSpec.from_record(SPEC.to_record()) == SPEC


def test_a_record_of_an_earlier_version_has_no_kinds():
    record = {
        "fields": {
            "image": {"shape": [1, 8, 8], "dtype": "float32"},
            "label": {"shape": [], "dtype": "int64"},
        }
    }
    spec = DataSpec.from_record({**record, "size": 3, "classes": ["x"], "extra": {}})
    assert spec.fields == {
        "image": FieldSpec((1, 8, 8), torch.float32, "image"),
        "label": FieldSpec((), torch.int64, "target"),
    }
    record["fields"]["image"]["kind"] = "sound"
    with pytest.raises(ValueError, match="'sound' is no kind"):
        DataSpec.from_record({**record, "size": 3, "classes": ["x"], "extra": {}})


def test_bytes_become_floats_for_images_alone_and_every_value_is_exact():
    batch = {
        "rgb": torch.arange(72, dtype=torch.uint8).view(1, 3, 4, 6),
        "ir": torch.rand(1, 1, 2, 3),
        "level": torch.arange(5, dtype=torch.uint8)[None],
    }
    seen = SPEC.as_floats(batch)
    assert torch.equal(seen["rgb"], batch["rgb"].float() / 255)
    assert seen["rgb"].dtype == torch.float32
    assert seen["ir"] is batch["ir"]
    assert seen["level"] is batch["level"]
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    exact = (every.double() / 255).float()
    assert torch.equal(SPEC.as_floats({"rgb": every})["rgb"], exact)


def test_zeros_are_what_a_task_sees_or_what_is_delivered():
    assert SPEC.zeros(2, "cpu")["rgb"].dtype == torch.float32
    stored = SPEC.zeros(2, "cpu", stored=True)
    assert stored["rgb"].dtype == torch.uint8
    assert stored["boxes"].shape == (2, 7, 4)


def test_a_data_set_that_derives_from_nothing_is_adopted_with_what_it_lacks() -> None:
    labels = DataSpec({"label": FieldSpec((), torch.int64)}, 3)

    class Foreign:
        spec = labels

        def __len__(self) -> int:
            return 3

        def fetch(self, indices: list[int], epoch: int) -> Batch:
            return {"label": torch.tensor(indices) % 2}

    data = Adopted(Foreign())
    assert len(data) == 3
    assert data.spec is labels
    assert dict(data.bad_files) == {}
    data.pass_over({"a.png": "cut short"})
    assert data.bad_files == {"a.png": "cut short"}
    assert dict(Adopted(Foreign()).bad_files) == {}, "notes are the object's own"
    assert next(iter(Loader(data, 3, 0, workers=1).batches()))["label"].sort().values.tolist() == [
        0,
        0,
        1,
    ]
