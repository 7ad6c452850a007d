"""A first look at a data set of somebody's own, before the first step: mistakes that train, only worse."""

from __future__ import annotations

import torch

from mpt.engine.state.state import capture_random, restore_random
from mpt.seams import Batch, Dataset, DataSpec

LENIENCE = 0.5
"""How far beyond 0 and 1 a pixel may lie without a word: resampling and noise overshoot."""


def look_first(train: Dataset, test: Dataset) -> list[str]:
    """Return warnings about the first and last samples of both splits.

    Random numbers are left as they were, and a sample that cannot be read is left to the loader.
    """
    before = capture_random(torch.device("cpu"))
    try:
        ends = [data.fetch(sorted({0, data.spec.size - 1}), 0) for data in (train, test)]
        return [
            *strange_pictures(train.spec, ends[0]),
            *tested_on_training(train.spec, test.spec, *ends),
        ]
    except Exception:
        return []
    finally:
        restore_random(before, torch.device("cpu"))


def strange_pictures(spec: DataSpec, batch: Batch) -> list[str]:
    """Return a warning if pictures are far from 0 to 1, which a task maps to its range."""
    ranges = {
        name: (float(batch[name][0].min()), float(batch[name][0].max()))
        for name, field in spec.fields.items()
        if (field.kind == "image" or name == "image") and batch[name].is_floating_point()
    }
    return [
        f"'{name}' of the first sample lies between {least:g} and {most:g}, and pictures are expected from 0 to 1: "
        "the task maps them to the range that its network wants"
        for name, (least, most) in ranges.items()
        if least < -LENIENCE or most > 1 + LENIENCE
    ]


def tested_on_training(train: DataSpec, test: DataSpec, *ends: Batch) -> list[str]:
    """Return a warning if both splits are of one size and have the same first and last sample."""
    seen, tested = ends
    if train.size != test.size or any(not torch.equal(seen[one], tested[one]) for one in seen):
        return []
    return [
        f"both splits have {train.size} samples, and the same first and last one: evaluations may be of samples that "
        "are trained on; build(settings, split, seed) is called with the splits 'train' and 'test'"
    ]
