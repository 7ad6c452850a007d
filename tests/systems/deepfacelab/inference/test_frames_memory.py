"""Faces are redrawn in halves where a batch does not fit, and what a failed attempt held is gone before the next."""

import weakref

import pytest
import torch

from mpt.errors import MemoryBudgetError
from mpt.systems.deepfacelab.inference.frames import draw_within_memory


@pytest.mark.parametrize("refusal", ["CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_a_batch_that_finds_no_memory_is_halved_without_holding_on_to_it(refusal):
    held = []
    kind = torch.OutOfMemoryError if refusal == "CUDA out of memory" else RuntimeError

    def draw(batch):
        assert not any(one() is not None for one in held), "the attempt before this one still holds its memory"
        activation = batch / 2 + 0.05
        held.append(weakref.ref(activation))
        if len(batch) > 2:
            raise kind(refusal)
        held.clear()
        return dict.fromkeys(("swap", "swap_mask", "dst_mask"), activation)

    drawn = draw_within_memory(torch.arange(5.0)[:, None, None, None] / 10, draw)
    assert [float(one.swap[0, 0, 0]) for one in drawn] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.25])


def test_a_single_face_that_does_not_fit_is_said_and_another_error_is_left_alone():
    def refuse(batch):
        raise RuntimeError("CUDA error: out of memory")

    def fail(batch):
        raise RuntimeError("shapes differ")

    with pytest.raises(MemoryBudgetError, match="single face"):
        draw_within_memory(torch.zeros(3, 1, 1, 1), refuse)
    with pytest.raises(RuntimeError, match="shapes differ"):
        draw_within_memory(torch.zeros(3, 1, 1, 1), fail)
