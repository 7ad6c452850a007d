"""The data as the model gets them: what is unreadable, doubled, constant, not finite, out of balance or out of range.

Samples are fetched one by one through the data set itself, augmentation and all, so what is said is what training sees.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from typing import Any

import torch
from torch import Tensor

from mpt.doctor.findings import Section
from mpt.errors import DataError
from mpt.seams import Dataset

MOST_SAMPLES = 2000
MOST_NAMED = 5
IMBALANCE = 10.0
"""Times the rarest class, from which on the commonest is said."""


def examine_data(train: Dataset, test: Dataset) -> Section:
    """Look at up to `MOST_SAMPLES` samples of both sets."""
    section = Section("data")
    seen: dict[str, dict[bytes, list[int]]] = {}
    for name, data in (("train", train), ("test", test)):
        seen[name] = _examine_split(section, name, data)
    shared = [digest for digest in seen["train"] if digest in seen["test"]]
    if shared:
        pairs = ", ".join(f"train {seen['train'][d][0]} = test {seen['test'][d][0]}" for d in shared[:MOST_NAMED])
        text = f"{len(shared)} pictures are in the training and in the test set: {pairs}"
        section.add("warning", "leak", text, "remove them from one of the two, or the metric is too good")
    return section


def _examine_split(section: Section, name: str, data: Dataset) -> dict[bytes, list[int]]:
    digests: dict[bytes, list[int]] = defaultdict(list)
    labels: Counter[int] = Counter()
    ranges: dict[str, Range] = defaultdict(Range)
    count = min(len(data), MOST_SAMPLES)
    unreadable: list[str] = []
    constant: list[int] = []
    broken: list[int] = []
    for index in range(count):
        try:
            sample = data.fetch([index], 0)
        except DataError as error:
            unreadable.append(str(error).splitlines()[0].partition(". ")[0])  # what to do about it is said once
            continue
        for key, value in sample.items():
            spec = data.spec.fields.get(key)
            if spec is None or spec.kind != "image":
                continue
            image = value.float() / (255 if value.dtype == torch.uint8 else 1)
            ranges[key].add(image)
            if not bool(torch.isfinite(image).all()):
                broken.append(index)
            elif float(image.max() - image.min()) == 0:
                constant.append(index)
            holders = digests[hashlib.sha256(value.contiguous().numpy().tobytes()).digest()]
            if index not in holders[-1:]:  # an input and its target may be one picture
                holders.append(index)
        if "label" in sample:
            labels[int(sample["label"][0])] += 1
    looked = f"{count} of {len(data)}" if count < len(data) else f"all {count}"
    section.add(
        "ok", name, f"looked at {looked} samples: {', '.join(f'{k} {_shape(data, k)}' for k in data.spec.fields)}"
    )
    for path, reason in list(data.bad_files.items())[:MOST_NAMED]:
        unreadable.append(f"{path}: {reason}")
    _say(section, "fault", name, unreadable, "unreadable", "remove or repair them, or dataset.on_bad_image=skip")
    _say(section, "fault", name, broken, "with values that are not finite", "remove them")
    _say(section, "warning", name, constant, "of one colour", "are they meant to be there?")
    doubled = [indices for indices in digests.values() if len(indices) > 1]
    if doubled:
        shown = ", ".join("=".join(map(str, indices[:3])) for indices in doubled[:MOST_NAMED])
        section.add("note", name, f"{len(doubled)} pictures stand there more than once (samples {shown})")
    _examine_labels(section, name, data, labels)
    for key, found in ranges.items():
        section.tables.setdefault("fields", []).append({"set": name, "field": key, **found.to_record()})
        if found.is_odd:
            text = f"{key} lies in {found.low:.3g} to {found.high:.3g}, and pictures are expected in 0 to 1"
            section.add("warning", name, text, "divide by the largest value a pixel can have")
    return digests


def _say(section: Section, level: Any, name: str, items: list[Any], what: str, advice: str) -> None:
    if items:
        shown = ", ".join(map(str, items[:MOST_NAMED])) + (", ..." if len(items) > MOST_NAMED else "")
        section.add(level, name, f"{len(items)} samples {what}: {shown}", advice)


def _shape(data: Dataset, key: str) -> str:
    return "x".join(map(str, data.spec.fields[key].shape)) or "scalar"


def _examine_labels(section: Section, name: str, data: Dataset, labels: Counter[int]) -> None:
    classes = data.spec.classes
    if not labels or not classes:
        return
    wrong = [label for label in labels if not 0 <= label < len(classes)]
    _say(section, "fault", name, wrong, f"have labels outside of the {len(classes)} classes", "mend the labels")
    empty = [classes[index] for index in range(len(classes)) if not labels[index]]
    if empty and sum(labels.values()) >= 10 * len(classes):
        _say(section, "warning", name, empty, "are missing: classes without any", "add some, or drop the class")
    counts = [labels[index] for index in range(len(classes)) if labels[index]]
    for index, label in enumerate(classes):
        section.tables.setdefault("classes", []).append({"set": name, "class": label, "samples": labels[index]})
    if counts and max(counts) > IMBALANCE * min(counts):
        most = classes[max(range(len(classes)), key=lambda index: labels[index])]
        text = f"class {most} has {max(counts)} samples and the rarest {min(counts)}: accuracy says little"
        section.add("warning", name, text, "weigh the classes, or look at each class's own figure")


class Range:
    """Lowest, highest, mean and standard deviation of all values."""

    def __init__(self) -> None:
        self.low, self.high, self.total, self.squares, self.count = float("inf"), float("-inf"), 0.0, 0.0, 0

    def add(self, value: Tensor) -> None:
        """Take a tensor in."""
        known = value[torch.isfinite(value)].double()
        if known.numel():
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))
            self.total += float(known.sum())
            self.squares += float(known.square().sum())
            self.count += known.numel()

    @property
    def is_odd(self) -> bool:
        """Whether these can be no pictures in [0, 1]."""
        return self.count > 0 and (self.low < -0.01 or self.high > 1.01)

    def to_record(self) -> dict[str, float]:
        """Return the figures."""
        mean = self.total / self.count if self.count else float("nan")
        deviation = max(self.squares / self.count - mean * mean, 0.0) ** 0.5 if self.count else float("nan")
        return {"low": self.low, "high": self.high, "mean": round(mean, 4), "deviation": round(deviation, 4)}
