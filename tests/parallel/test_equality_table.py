"""The table of equality, in part: float32 within 1e-5 of an update, and float64 within its own rounding.

What differs in float32 by the order of sums alone falls by orders of magnitude in float64; a mistake stays as it is.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mpt.parallel.world import ALONE
from scripts.quality import parallel_table as table

from .forked import run_ranks

STEPS = 2
"""The first has StyleGAN2's path lengths, compared with a mean that the training before has moved."""


def distances(task: str, way: str, ranks: int, folder: Path, trained: int = 2) -> list[float]:
    """Return the update distance of a row of the table, in float32 and in float64."""
    torch.set_num_threads(1)
    batch = table.BATCHES.get(task, 8)
    start = folder / "start.pt"
    table.train_before(table.make_config(task, "fp32", "ddp", batch, 1), trained, start)
    more = (STEPS, start, "fsdp" not in way)
    alone = table.perform_both(
        ALONE,
        table.make_config(task, "fp32", "ddp", batch, 1, *table.with_sgd(task)),
        "fp32",
        *more,
    )
    words = (task, "fp32", way, batch, ranks, *table.with_sgd(task))
    if ranks == 1:
        others = [table.perform_both(ALONE, table.make_config(*words), "fp32", *more)]
    else:
        others = run_ranks(ranks, table.on_rank, words, *more)
    assert all(isinstance(one, list) for one in others), others
    return [max(table.distance(one, rank[n]) for rank in others) for n, one in enumerate(alone)]


@pytest.mark.parametrize(
    ("task", "way", "ranks"),
    [
        ("path lengths", "micro-batches", 1),
        ("path lengths", "ddp", 2),
        pytest.param("bigan", "ddp", 2, marks=pytest.mark.slow),
        ("acgan", "fsdp full", 2),
        ("ebgan", "micro-batches", 1),
        pytest.param("aae", "ddp", 2, marks=pytest.mark.slow),
    ],
)
def test_a_row_of_the_table_is_equal_but_for_the_order_of_sums(
    task: str, way: str, ranks: int, tmp_path: Path
) -> None:
    float32, float64 = distances(task, way, ranks, tmp_path)
    assert 0 < float32 < 1e-5
    assert float64 < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(("way", "ranks"), [("micro-batches", 1), ("ddp", 2), ("fsdp full", 2)])
def test_what_dain_differs_by_is_the_order_of_sums(way: str, ranks: int, tmp_path: Path) -> None:
    float32, float64 = distances("dain", way, ranks, tmp_path, trained=20)
    assert 0 < float32 < 1e-4
    assert float64 < 1e-12
