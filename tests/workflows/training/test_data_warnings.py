"""What is said of a data set of somebody's own before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mpt.seams import Batch, Dataset, DataSpec, FieldSpec
from mpt.workflows.training.data_warnings import look_first

pytestmark = pytest.mark.tier("fast")


class Pictures(Dataset):
    """Pictures of one value, whose making draws a random number."""

    def __init__(self, value: float, dtype: torch.dtype = torch.float32) -> None:
        self.value, self.dtype = value, dtype
        self.spec = DataSpec({"image": FieldSpec((1, 2, 2), dtype, "image")}, 3)

    def __len__(self) -> int:
        return self.spec.size

    def fetch(self, indices: Any, epoch: int) -> Batch:
        torch.rand(3)
        picture = torch.full((len(indices), 1, 2, 2), self.value).to(self.dtype)
        picture[:, :, 0] = 0
        return {"image": picture}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Pictures(255.0), "'image' of the first sample lies between 0 and 255, and pictures"),
        (Pictures(-1.0), "lies between -1 and 0"),
        (Pictures(1.2), ""),
        (Pictures(255, torch.uint8), ""),
    ],
)
def test_pictures_beyond_0_to_1_are_warned_of_and_no_random_number_is_used_up(
    data: Pictures, said: str
) -> None:
    before = torch.get_rng_state()
    notes = look_first(data, Pictures(0.5))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(notes) == bool(said)
    assert said in "".join(notes)


def test_a_sample_that_cannot_be_read_is_left_to_the_loader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Pictures, "fetch", lambda self, indices, epoch: 1 / 0)
    assert look_first(Pictures(1.0), Pictures(0.5)) == []


def test_a_test_split_that_is_the_training_split_is_warned_of() -> None:
    assert (
        "evaluations may be of samples that are trained on"
        in look_first(Pictures(1.0), Pictures(1.0))[0]
    )
