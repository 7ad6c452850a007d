"""The data as the model gets them: samples that are unreadable, doubled, constant, not finite, out of balance or out of
range.

Samples are fetched one by one through the data set itself, spread over all of it. Ranges are those after augmentation;
comparisons between pictures and sets come before it. A network's results for a batch are examined by
`mpt.doctor.data.network_inputs`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from mpt.doctor.data.copies import in_two_classes, shared_pictures
from mpt.doctor.data.samples_seen import Range, Samples, read_samples
from mpt.doctor.findings import Section
from mpt.report.units import counted
from mpt.seams import Dataset

MOST_NAMED = 5
EXPECTED = 5.0
"""Samples of a class that a test set of its size should have, from which on having none is no chance."""
IMBALANCE = 10.0
"""Times the rarest class, from which on the commonest is reported."""
DARK = 0.05
"""Of white: a picture without a brighter spot shows nothing to a network."""
SURE = 6.0
"""Standard errors between the means of two sets that chance does not make."""
SHIFTED = 0.5
"""Of the spread of single pictures' means: a difference of two sets that is worth a look."""


def examine_data(train: Dataset, test: Dataset, augmented: Dataset | None = None) -> Section:
    """Look at samples of both sets; `augmented` is the training set with its augmentation, if it has one."""
    section = Section("data")
    seen = [read_samples("train", train), read_samples("test", test)]
    changed = read_samples("train", augmented) if augmented is not None else seen[0]
    for one, delivered in ((seen[0], changed), (seen[1], seen[1])):
        examine_split(section, one, delivered)
    examine_tested_classes(section, *seen)
    examine_copies(section, *seen)
    examine_channels(section, *seen)
    return section


def examine_split(section: Section, seen: Samples, delivered: Samples) -> None:
    """Say the faults with one set; `delivered` are its samples with their augmentation."""
    data, name = seen.data, seen.name
    count = len(seen.looked_at)
    looked = f"all {count}" if seen.is_whole else f"{count} of {len(data)}"
    fields = ", ".join(f"{key} {show_shape(data, key)}" for key in data.spec.fields)
    section.add("ok", name, f"looked at {looked} samples: {fields}")
    repair = "remove or repair them, or dataset.on_bad_image=skip"
    say(section, "fault", name, seen.unreadable, "unreadable", repair)
    bad_files = [f"{path}: {reason}" for path, reason in data.bad_files.items()]
    finding = "passed over, as in training"
    say(section, "warning", name, bad_files, finding, "remove or repair them", "file")
    broken = [*dict.fromkeys([*seen.broken, *delivered.broken])]
    say(
        section,
        "fault",
        name,
        called(seen, broken),
        "with values that are not finite",
        "remove them",
    )
    say(
        section,
        "warning",
        name,
        called(seen, seen.constant),
        "of one colour",
        "are they meant to be there?",
    )
    say(
        section,
        "warning",
        name,
        called(seen, dark(seen)),
        "nearly black",
        "are they meant to be there?",
    )
    doubled = [indices for indices in seen.digests.values() if len(indices) > 1]
    if doubled:
        shown = ", ".join("=".join(called(seen, indices[:3])) for indices in doubled[:MOST_NAMED])
        pictures = f"{counted(len(doubled), 'picture')} {'is' if len(doubled) == 1 else 'are'}"
        section.add("note", name, f"{pictures} there more than once (samples {shown})")
    examine_labels(section, seen)
    for key, found in delivered.ranges.items():
        section.tables.setdefault("fields", []).append(
            {"set": name, "field": key, **found.to_record()}
        )
        examine_range(section, name, key, found)


def examine_range(section: Section, name: str, key: str, found: Range) -> None:
    """Say the faults with the values of one field."""
    if found.is_odd:
        text = f"{key} is between {found.low:.3g} and {found.high:.3g}, and pictures are expected in 0 to 1"
        section.add("warning", name, text, "divide by the largest value a pixel can have")
    elif 0 < found.high < 0.1:
        text = f"no pixel of {key} is brighter than {found.high:.3g}, where white is 1: {nearly_black(found.high)}"
        section.add(
            "warning",
            name,
            text,
            "save them so that white is the largest value of the file: 255 in 8 bits, 65535 in 16",
        )
    for channel in found.constant_channels():
        assert found.highs is not None
        value = float(found.highs[channel])
        is_opaque = len(found.highs) == 4 and channel == 3
        text = f"channel {channel} of {key} is {value:.3g} in every pixel of every sample"
        advice = "is a plane missing? dataset.channels without it is smaller"
        section.add("note" if is_opaque else "warning", name, text, "" if is_opaque else advice)


def nearly_black(high: float) -> str:
    """Say how a whole set becomes as dark as this."""
    if high <= 1.01 / 255:
        return "divided by 255 twice?"
    for bits in (10, 12):  # decoding keeps the upper 8 of 16
        if high <= (2 ** (bits - 8) + 0.5) / 255:
            return f"{bits} bits in files of 16?"
    return "the whole set is nearly black"


def dark(seen: Samples) -> list[int]:
    """Return the pictures without a bright spot, of a set that has others; () if pixels are not in 0 to 1."""
    if any(found.is_odd or found.high < 0.1 for found in seen.ranges.values()):
        return []
    return [index for index, small in seen.thumbnails.items() if float(small.max()) < DARK]


def called(seen: Samples, indices: Sequence[int]) -> list[str]:
    """Return the names of samples."""
    return [seen.called(index) for index in indices]


def say(
    section: Section,
    level: Any,
    name: str,
    items: Sequence[str],
    finding: str,
    advice: str,
    kind: str = "sample",
) -> None:
    """Note a finding about some samples, or another kind of items, with the names of the first."""
    if items:
        shown = ", ".join(items[:MOST_NAMED]) + (", ..." if len(items) > MOST_NAMED else "")
        if len(items) == 1:
            finding = re.sub(
                "^(are|have) ", lambda verb: {"are": "is ", "have": "has "}[verb[1]], finding
            )
        section.add(level, name, f"{counted(len(items), kind)} {finding}: {shown}", advice)


def show_shape(data: Dataset, key: str) -> str:
    """Return a field's shape in words."""
    return "x".join(map(str, data.spec.fields[key].shape)) or "scalar"


def examine_labels(section: Section, seen: Samples) -> None:
    """Say the faults with the labels of a set with classes."""
    labels, is_complete = seen.count_labels()
    name, classes = seen.name, seen.data.spec.classes
    if not labels or not classes:
        return
    wrong = [str(label) for label in labels if not 0 <= label < len(classes)]
    say(
        section,
        "fault",
        name,
        wrong,
        f"have labels outside of the {len(classes)} classes",
        "mend the labels",
    )
    empty = [classes[index] for index in range(len(classes)) if not labels[index]]
    if empty and is_complete and sum(labels.values()) >= 10 * len(classes):
        say(
            section,
            "warning",
            name,
            empty,
            "are missing: classes without any",
            "add some, or drop the class",
        )
    for index, label in enumerate(classes):
        section.tables.setdefault("classes", []).append(
            {"set": name, "class": label, "samples": labels[index]}
        )
    counts = [labels[index] for index in range(len(classes)) if labels[index]]
    if counts and max(counts) > IMBALANCE * min(counts):
        order = sorted(
            (index for index in range(len(classes)) if labels[index]),
            key=lambda index: labels[index],
        )
        text = (
            f"class {classes[order[-1]]} has {max(counts)} samples and the rarest, {classes[order[0]]}, {min(counts)}: "
            "accuracy says little"
        )
        advice = "task.class_weights=balanced or dataset.sampling=balanced, and look at each class's own figure"
        section.add("warning", name, text, advice)


def examine_tested_classes(section: Section, train: Samples, test: Samples) -> None:
    """Name classes of the training set that the test set has no sample of, if chance would have given it some."""
    (trained, _), (tested, is_complete) = train.count_labels(), test.count_labels()
    count, classes = sum(tested.values()), train.data.spec.classes
    if not is_complete or not count:
        return
    for index, name in enumerate(classes):
        share = trained[index] / max(1, sum(trained.values()))
        if not tested[index] and share * count >= EXPECTED:
            text = f"class {name} is {share:.0%} of {train.name} and has no sample in {test.name}"
            section.add("warning", test.name, text, "the metric says nothing of it: add some")


def examine_copies(section: Section, train: Samples, test: Samples) -> None:
    """Say which pictures are in both sets, and which have two labels."""
    shared = shared_pictures(train, test)
    if shared:
        shown = [
            f"train {train.labelled(one)} = test {test.labelled(other)}"
            for one, other in shared[:MOST_NAMED]
        ]
        pictures = "picture is" if len(shared) == 1 else "pictures are"
        found = f"{len(shared)} {pictures} in the training and in the test set, to the bit or encoded again"
        advice = "remove them from one of the two, or the metric is too good"
        section.add("warning", "leak", f"{found}: {', '.join(shown)}", advice)
    for seen in (train, test):
        pairs = in_two_classes(seen)
        names = [f"{seen.labelled(one)} = {seen.labelled(other)}" for one, other in pairs]
        say(
            section,
            "warning",
            seen.name,
            names,
            "are one picture in two classes",
            "keep the right label",
        )


def examine_channels(section: Section, train: Samples, test: Samples) -> None:
    """Compare the means of each channel in both sets."""
    for key in train.ranges.keys() & test.ranges.keys():
        sides = [side.ranges[key].channel_means for side in (train, test)]
        if min(len(side) for side in sides) < 8:
            continue
        one, other = torch.stack(sides[0]), torch.stack(sides[1])
        means = [
            ", ".join(f"{value:.3f}" for value in side.mean(0).tolist()) for side in (one, other)
        ]
        shown = f"the channels of {key} have means {means[0]} in train and {means[1]} in test"
        order = swapped(one, other)
        if order is not None:
            text = f"{shown}: test's are train's in the order {', '.join(map(str, order))}"
            section.add(
                "warning", "channels", text, "are the test pictures BGR, and the training's RGB?"
            )
        elif is_shifted(one, other):
            section.add("warning", "channels", shown, "were the two sets prepared in the same way?")


def is_shifted(one: Tensor, other: Tensor) -> bool:
    """Return whether two sets' pictures (n, channels) differ in brightness or colour by more than chance."""
    difference = (other.mean(0) - one.mean(0)).abs()
    spread = ((one.var(0) + other.var(0)) / 2).sqrt().clamp_min(0.02)
    error = (one.var(0) / len(one) + other.var(0) / len(other)).sqrt().clamp_min(1e-6)
    return bool(((difference > SHIFTED * spread) & (difference > SURE * error)).any())


def swapped(one: Tensor, other: Tensor) -> tuple[int, ...] | None:
    """Return the order in which the second set's channels are the first's; None if they are in order.

    Colours are compared, each channel against the mean of all: brightness varies far more from picture to picture.
    """
    channels = one.shape[1]
    if channels != 3 or other.shape[1] != 3:
        return None
    colours = [side - side.mean(1, keepdim=True) for side in (one, other)]
    error = sum(side.var(0) / len(side) for side in colours).sqrt().clamp_min(1e-6)  # type: ignore[union-attr]
    means = colours[0].mean(0), colours[1].mean(0)
    as_they_are = float((means[1] - means[0]).norm())
    orders = [order for order in permutations(range(channels)) if order != tuple(range(channels))]
    best = min(orders, key=lambda order: float((means[1] - means[0][list(order)]).norm()))
    distance = float((means[1] - means[0][list(best)]).norm())
    is_sure = bool(((means[1] - means[0]).abs() > SURE * error).any())
    return best if is_sure and distance < as_they_are / 4 else None
