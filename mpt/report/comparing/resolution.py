"""The effect of a single test sample, or labelled object, on a metric: a test set shows no smaller difference.

A share of the samples (an accuracy) moves in steps of one sample. A mean over classes (mAP, F1, recall) moves by about
1 / (objects of a class) / (classes) if one object is found or lost, the most for the rarest class. Any other metric
that is the same to the last digit for every seed although the trainings differ moves in steps of an unknown size. A
metric without steps (a loss, PSNR) has no resolution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mpt.report.reading.run_record import RunRecord
from mpt.run.records.ending import read_json_object

OVER_CLASSES = ("f1", "macro_f1", "precision", "recall", "roc_auc")
"""Metrics of classifiers that are means over classes (`mpt/metrics`)."""


@dataclass(frozen=True)
class Resolution:
    """The step of a metric, in its unit."""

    step: float = 0.0
    """0 for a metric without steps, infinite for steps of an unknown size."""
    cause: str = ""
    """The sample or object that makes a step."""
    classes: int = 0
    """Classes over which the metric is a mean; 0 for a share of the samples."""

    def wanted(self, distance: float) -> str:
        """Say which test set has steps smaller than `distance`."""
        if not self.step or math.isinf(self.step) or distance <= 1e-9:
            return ""
        count = math.floor(1 / (distance * max(1, self.classes))) + 1
        return (
            f"at least {count} test samples would do"
            if not self.classes
            else f"{count} of each class would do"
        )


CONTINUOUS = Resolution()
UNKNOWN = Resolution(math.inf)


def of_samples(values: Sequence[float], samples: int) -> Resolution:
    """Return one sample's share if every value is a whole number of test samples' shares, else no resolution."""
    finite = [value * samples for value in values if math.isfinite(value)]
    counts = (
        bool(finite) and samples > 0 and all(abs(count - round(count)) < 1e-4 for count in finite)
    )
    if not (counts and all(0 <= count <= samples + 1e-4 for count in finite)):
        return CONTINUOUS
    return Resolution(1 / samples, f"one of its {samples} samples")


def of_classes(objects: Mapping[str, int]) -> Resolution:
    """Return the resolution of a mean over classes, which has these numbers of objects."""
    present = {name: count for name, count in objects.items() if count > 0}
    if not present:
        return CONTINUOUS
    rarest = min(present, key=lambda name: present[name])
    count, classes = present[rarest], len(present)
    return Resolution(
        1 / (count * classes), f"one object of class {rarest}, of which it has {count},", classes
    )


def resolution_of(baseline: Mapping[int, RunRecord], other: Mapping[int, RunRecord]) -> Resolution:
    """Return the resolution of the metric of two groups' runs (seed -> run), which have one test set."""
    records = [*baseline.values(), *other.values()]
    finite = [record for record in records if math.isfinite(record.final)]
    if not finite:
        return CONTINUOUS
    example = max(finite, key=lambda record: record.test_samples)
    known = of_classes(objects_of(example))
    counted = (
        known
        if known.step
        else of_samples([record.final for record in finite], example.test_samples)
    )
    if counted.step:
        return counted
    pairs = [(baseline[seed], other[seed]) for seed in baseline.keys() & other.keys()]
    is_tied = bool(pairs) and all(one.final == two.final and differ(one, two) for one, two in pairs)
    return UNKNOWN if is_tied else CONTINUOUS


def objects_of(record: RunRecord) -> dict[str, int]:
    """Return the labelled test objects by class of a run whose metric is a mean over classes."""
    details = read_json_object(record.path / "evaluation.json")
    given: Any = details.get("objects")
    if (
        given is None
        and record.metric in OVER_CLASSES
        and isinstance(details.get("per_class"), list)
    ):
        given = {
            str(one.get("name")): one.get("samples")
            for one in details["per_class"]
            if isinstance(one, dict)
        }
    if not isinstance(given, dict):
        return {}
    return {str(name): count for name, count in given.items() if isinstance(count, int)}


def differ(one: RunRecord, two: RunRecord) -> bool:
    """Return whether two trainings came to other losses in a step that both logged."""
    losses = {line.get("step"): line.get("losses") for line in one.train}
    return any(
        line.get("step") in losses and line.get("losses") != losses[line.get("step")]
        for line in two.train
    )
