"""Two finished runs compared by their files: environment, logged losses, evaluations, checkpoints. No training.

Their logs tell the first step at which they were seen to differ; the checkpoints they share tell the last state
that was the same to the bit, from which a replay can set out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mpt.errors import CheckpointError
from mpt.report.reading.log_values import number
from mpt.report.reading.run_record import RunRecord
from mpt.run.checkpoints import checkpoint
from mpt.run.checkpoints.checkpoint import LoadedCheckpoint
from mpt.run.checkpoints.retention import list_steps
from mpt.run.checkpoints.state import pack
from mpt.run.records.layout import RunDirectory
from mpt.run.records.used_parts import read_used_parts

ENVIRONMENT = (
    "mpt",
    "torch",
    "python",
    "cuda",
    "cudnn",
    "processor",
    "devices",
    "threads",
    "commit",
)


@dataclass
class RunDifference:
    """Contents of the files of two runs."""

    environment: list[str] = field(default_factory=list)
    """Differences of settings and environment."""
    logged: dict[str, Any] = field(default_factory=dict)
    """The first logged step whose losses differ: step, name, both values; empty if none does."""
    evaluated: dict[str, Any] = field(default_factory=dict)
    shared: dict[str, int] = field(default_factory=dict)
    """How many steps both have: `logged`, `evaluated`."""
    not_finite: dict[str, Any] = field(default_factory=dict)
    """The first logged step at which a loss is NaN or infinite in both: step, name; empty if none is."""
    last_equal_log: int | None = None
    """The last logged step up to which everything is the same."""
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    """Shared checkpoints: step, how many tensors differ, the first of them and how far it is apart."""
    common: LoadedCheckpoint | None = None
    """The newest checkpoint whose state both have to the bit."""
    notes: list[str] = field(default_factory=list)

    @property
    def can_tell(self) -> bool:
        """Whether both runs kept anything of one step."""
        return bool(self.checkpoints) or any(self.shared.values())

    @property
    def differs(self) -> bool:
        """Whether the files show any difference of the training."""
        return bool(
            self.logged or self.evaluated or any(row["differing"] for row in self.checkpoints)
        )

    def lines(self) -> Iterator[str]:
        """Yield the differences in words, a line each."""
        for line in self.environment:
            yield f"made with {line}"
        both = (
            ("logged losses", "logged", self.logged),
            ("evaluations", "evaluated", self.evaluated),
        )
        for name, kind, found in both:
            if found:
                values = f"{found['first']} against {found['second']}"
                yield f"{name} differ first at step {found['step']}: {found['name']} {values}"
            elif self.shared.get(kind):
                yield f"{name}: the same at the {self.shared[kind]} steps that both have"
            else:
                yield f"{name}: none of a step that both have"
        for row in self.checkpoints:
            said = "the same to the bit"
            if row["differing"]:
                said = f"{row['differing']} of {row['tensors']} tensors differ"
            if (largest := row["largest"]) is not None:
                said += f", most {largest['name']} by {largest['apart']:.2%}"
            yield f"checkpoint {row['step']}: {said}"
        for note in self.notes:
            yield f"note: {note}"

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        kept = {name: value for name, value in vars(self).items() if name != "common"}
        return asdict(RunDifference(**kept)) | {
            "common": self.common.step if self.common is not None else None
        }


def compare_runs(one: RunRecord, other: RunRecord) -> RunDifference:
    """Compare two runs by their files."""
    found = RunDifference()
    for name in sorted({*one.environment, *other.environment} & {*ENVIRONMENT}):
        values = one.environment.get(name), other.environment.get(name)
        if values[0] != values[1]:
            found.environment.append(f"{name}: {values[0]} against {values[1]}")
    if one.test_set and other.test_set and one.test_set != other.test_set:
        found.environment.append("a test set with other samples")
    found.environment += different_parts(RunDirectory(one.path), RunDirectory(other.path))
    rows = {int(number(line.get("step"))): line for line in other.train}
    found.shared["logged"] = sum(int(number(line.get("step"))) in rows for line in one.train)
    for line in one.train:
        step = int(number(line.get("step")))
        if step not in rows:  # logged at other intervals
            continue
        difference = first_difference(line.get("losses"), rows[step].get("losses"))
        if difference is not None:
            found.logged = {"step": step, **difference}
            break
        bad = first_not_finite(line.get("losses"), rows[step].get("losses"))
        if bad is not None:
            found.not_finite = {"step": step, "name": bad}
            break
        found.last_equal_log = step
    rows = {int(number(line.get("step"))): line for line in other.evaluations}
    found.shared["evaluated"] = sum(
        int(number(line.get("step"))) in rows for line in one.evaluations
    )
    for line in one.evaluations:
        step = int(number(line.get("step")))
        difference = (
            first_difference(line.get("metrics"), rows.get(step, {}).get("metrics"))
            if step in rows
            else None
        )
        if difference is not None:
            found.evaluated = {"step": step, **difference}
            break
    compare_checkpoints(RunDirectory(one.path), RunDirectory(other.path), found)
    return found


def different_parts(one: RunDirectory, other: RunDirectory) -> list[str]:
    """Return the files of parts from outside that both runs used and that were not the same."""
    files = [
        {f"{package['name']}/{file}": digest for package in read_used_parts(side.parts_path)
         for file, digest in package["files"].items()}
        for side in (one, other)
    ]  # fmt: skip
    return [
        f"another {name}"
        for name, digest in files[0].items()
        if files[1].get(name, digest) != digest
    ]


def first_difference(one: Any, other: Any) -> dict[str, Any] | None:
    """Return the first figure that differs between two mappings."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return None
    for name, value in one.items():
        values = number(value), number(other.get(name))
        if values[0] != values[1] and not all(math.isnan(each) for each in values):
            return {"name": name, "first": value, "second": other.get(name)}
    return None


def first_not_finite(one: Any, other: Any) -> str | None:
    """Return the first figure that is not finite on both sides."""
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return None
    names = (name for name in one if name in other)
    return next(
        (
            name
            for name in names
            if not any(math.isfinite(number(side[name])) for side in (one, other))
        ),
        None,
    )


def compare_checkpoints(one: RunDirectory, other: RunDirectory, found: RunDifference) -> None:
    """Compare the checkpoints of the steps that both runs kept, oldest first."""
    for step in sorted(set(list_steps(one)) & set(list_steps(other))):
        try:
            loaded = [checkpoint.load(side.checkpoint_path(step)) for side in (one, other)]
        except CheckpointError as error:
            found.notes.append(str(error))
            continue
        first, second = ({**side.state, "loop": {}} for side in loaded)
        packed = [pack(side) for side in (first, second)]
        tensors = [one_of[1] for one_of in packed]
        weights = [name for name in tensors[0] if name.startswith("modules")]
        missing = sorted(tensors[0].keys() ^ tensors[1].keys())
        differing = [
            name
            for name in sorted(
                tensors[0].keys() & tensors[1].keys(), key=lambda name: (name not in weights, name)
            )
            if tensors[0][name].shape != tensors[1][name].shape
            or not bool((tensors[0][name] == tensors[1][name]).all())
        ] + missing
        row: dict[str, Any] = {
            "step": step,
            "tensors": len(tensors[0]),
            "differing": len(differing),
            "largest": None,
        }
        apart = {}
        for name in differing:
            if (
                name in weights
                and name in tensors[1]
                and tensors[0][name].shape == tensors[1][name].shape
            ):
                value, now = tensors[0][name].float(), tensors[1][name].float()
                scale = float(value.norm())
                apart[name] = float((now - value).norm()) / scale if scale else math.inf
        if apart:
            worst = max(apart, key=lambda name: apart[name])
            row["largest"] = {"name": worst, "apart": apart[worst]}
        found.checkpoints.append(row)
        if not differing and in_order(packed[0][0]) == in_order(packed[1][0]):
            found.common = loaded[0]


def in_order(structure: Any) -> Any:
    """Return a packed state (`mpt.run.checkpoints.state`) with pairs of numbered keys in their order.

    An optimizer that steps in the backward makes the states of its weights in another order than it reads them back.
    """
    if isinstance(structure, list):
        return [in_order(item) for item in structure]
    if not isinstance(structure, dict):
        return structure
    if "dict" in structure:
        return {"dict": {key: in_order(value) for key, value in structure["dict"].items()}}
    if "items" in structure:
        return {"items": sorted(map(in_order, structure["items"]), key=repr)}
    return {"tuple": in_order(structure["tuple"])} if "tuple" in structure else structure
