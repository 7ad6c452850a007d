"""A split's samples read one by one, and summarised: ranges per channel, digests, thumbnails, labels."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mpt.errors import DataError
from mpt.seams import Batch, Dataset

MOST_SAMPLES = 2000
THUMBNAIL = 16
"""Side in pixels."""


class Range:
    """Lowest, highest, mean and standard deviation of all values of a field, and of each of its channels."""

    def __init__(self) -> None:
        self.low, self.high, self.total, self.squares, self.count = (
            float("inf"),
            float("-inf"),
            0.0,
            0.0,
            0,
        )
        self.lows: Tensor | None = None
        self.highs: Tensor | None = None
        self.channel_means: list[Tensor] = []
        """Of each sample (channels,)."""

    def add(self, value: Tensor) -> None:
        """Take one sample in; its channels come first, (c, h, w)."""
        known = value[torch.isfinite(value)].double()
        if not known.numel():
            return
        self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))
        self.total += float(known.sum())
        self.squares += float(known.square().sum())
        self.count += known.numel()
        if value.dim() != 3 or known.numel() != value.numel():
            return
        planes = value.flatten(1)
        lows, highs = planes.amin(1), planes.amax(1)
        self.lows = lows if self.lows is None else torch.minimum(self.lows, lows)
        self.highs = highs if self.highs is None else torch.maximum(self.highs, highs)
        self.channel_means.append(planes.double().mean(1))

    @property
    def is_odd(self) -> bool:
        """Whether these can be no pictures in [0, 1]."""
        return self.count > 0 and (self.low < -0.01 or self.high > 1.01)

    @property
    def deviation(self) -> float:
        """Standard deviation of all values; NaN if there is none."""
        if not self.count:
            return float("nan")
        return math.sqrt(max(self.squares / self.count - (self.total / self.count) ** 2, 0.0))

    def constant_channels(self) -> list[int]:
        """Return the channels that have one value in all samples, unless all have."""
        if self.lows is None or self.highs is None:
            return []
        is_constant = self.lows == self.highs
        return (
            [] if bool(is_constant.all()) else [int(one) for one in is_constant.nonzero().flatten()]
        )

    def to_record(self) -> dict[str, float]:
        """Return the figures."""
        mean = self.total / self.count if self.count else float("nan")
        return {
            "low": self.low,
            "high": self.high,
            "mean": round(mean, 4),
            "deviation": round(self.deviation, 4),
        }


@dataclass
class Samples:
    """A summary of one split. Lists hold indices of the data set."""

    name: str
    data: Dataset
    looked_at: list[int]
    unreadable: list[str] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)
    """With values that are not finite."""
    constant: list[int] = field(default_factory=list)
    ranges: dict[str, Range] = field(default_factory=lambda: defaultdict(Range))
    digests: dict[bytes, list[int]] = field(default_factory=lambda: defaultdict(list))
    thumbnails: dict[int, Tensor] = field(default_factory=dict)
    """Index -> the first picture of the sample at 16 x 16 pixels (c, 16, 16)."""
    labels: dict[int, int] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether all samples were looked at."""
        return len(self.looked_at) == len(self.data)

    def called(self, index: int) -> str:
        """Return a sample's file, or its number if it has none."""
        name = self.data.name_of(index)
        return str(index) if name == f"sample {index}" else name

    def labelled(self, index: int) -> str:
        """Return a sample's name with its class, as far as it is known."""
        label, classes = self.labels.get(index), self.data.spec.classes
        return self.called(index) + (
            f" ({classes[label]})" if label is not None and label < len(classes) else ""
        )

    def count_labels(self) -> tuple[Counter[int], bool]:
        """Return label -> samples, and whether all samples were counted: without decoding if the set knows them."""
        known = self.data.class_labels()
        if known is not None:
            return Counter(known), True
        counts = self.data.spec.extra.get("class_counts")
        if counts:
            return Counter(dict(enumerate(counts))), True
        return Counter(self.labels.values()), self.is_whole

    def note(self, index: int, sample: Batch) -> None:
        """Take one sample in."""
        for key, spec in self.data.spec.fields.items():
            if key not in sample or spec.kind != "image":
                continue
            value = sample[key][0]
            image = value.float() / (255 if value.dtype == torch.uint8 else 1)
            self.ranges[key].add(image)
            if not bool(torch.isfinite(image).all()):
                self.broken.append(index)
                continue
            if float(image.max() - image.min()) == 0:
                self.constant.append(index)
            elif image.dim() == 3 and index not in self.thumbnails:
                self.thumbnails[index] = functional.adaptive_avg_pool2d(image, THUMBNAIL)
            holders = self.digests[hashlib.sha256(value.contiguous().numpy().tobytes()).digest()]
            if index not in holders[-1:]:  # an input and its target may be one picture
                holders.append(index)
        if "label" in sample:
            self.labels[index] = int(sample["label"][0])


def read_samples(name: str, data: Dataset) -> Samples:
    """Read up to `MOST_SAMPLES` samples, spread over the whole set."""
    size = len(data)
    count = min(size, MOST_SAMPLES)
    seen = Samples(name, data, [index * size // count for index in range(count)])
    for index in seen.looked_at:
        try:
            sample = data.fetch([index], 0)
            if not data.is_left_out(index):  # else it is another one's
                seen.note(index, sample)
        except DataError as error:
            # the remedy is reported once
            seen.unreadable.append(str(error).splitlines()[0].partition(". ")[0])
    return seen
