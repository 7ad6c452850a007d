"""A plan as data: the one declaration that the planning process fills, commands read and the JSON Schema follows from.

`as_data` and `from_data` are its form in JSON. Fields that a plan of an earlier version lacks have defaults, and fields
that it had in addition are passed over, so that files written then are still read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BeforeValidator, ConfigDict, PlainSerializer, TypeAdapter

Bytes = int
READ = ConfigDict(extra="ignore", use_attribute_docstrings=True)
"""How pydantic takes the dataclasses here; the texts below their fields are the schema's."""


@dataclass(frozen=True)
class Empty:
    """Nothing."""


T = TypeVar("T")
Reading = BeforeValidator(lambda value: value or None)
"""{} is None."""


def or_empty(value: T | None) -> T | Empty:
    """Return JSON's value for None."""
    return Empty() if value is None else value


@dataclass(frozen=True)
class Growing:
    """A plan's figures with `memory.expandable_segments`."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    reserved: Bytes
    reserved_in_budget: Bytes
    fits: bool
    tight: bool


MaybeGrowing = Annotated[
    Growing | None, Reading, PlainSerializer(or_empty, return_type=Growing | Empty)
]
"""Is {} in JSON if there is none."""


@dataclass(frozen=True)
class WithinBudget:
    """A plan's verdict on one budget."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    budget_bytes: Bytes | None
    fits: bool | None
    tight: bool
    reserved_in_budget: Bytes
    growing: MaybeGrowing = None


RESUME = "resume"
"""The moment's name in plans."""


@dataclass(frozen=True)
class PlannedMoment:
    """A part of the run other than its steps: an evaluation, samples, saving, a resume."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    allocated: Bytes = 0
    reserved: Bytes = 0
    grown: Bytes = 0
    """Bytes that the allocator reserves for it beyond the steps'."""
    fits: bool | None = None
    reads_values: bool = False
    """Planned with values of 0, since it looks at them."""
    problem: str = ""
    """Why it could not be planned; then there are no figures."""
    host_bytes: Bytes = 0
    """Of a resume: host memory that the checkpoint is read into."""


@dataclass(frozen=True)
class StepSeconds:
    """The parts of a step's time on a rank of several."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    total: float
    computing: float
    communication: float
    overlapped: float
    exposed: float
    """Communication that does not overlap with computation."""
    sent_bytes: Bytes


@dataclass(frozen=True)
class PlannedRanks:
    """The rank that is planned, the number of ranks, and the cost of their communication."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    nproc: int
    strategy: str
    network: str
    """Between machines."""
    per_machine: int
    rank: int
    words: str
    samples: int
    host_bytes: Bytes
    communicator_bytes: Bytes
    """In `context_bytes`."""
    link: str
    """Within a machine."""
    seconds: StepSeconds
    last_samples: int | None = None
    """Of the last rank, if it has fewer."""
    last_total: Bytes | None = None

    @property
    def slowest_link(self) -> str:
        """The link between its cards: that of a machine, or the network of several."""
        return self.link if self.nproc <= self.per_machine else "network"


MaybePlannedRanks = Annotated[
    PlannedRanks | None, Reading, PlainSerializer(or_empty, return_type=PlannedRanks | Empty)
]
"""Is {} in JSON if there is none."""


@dataclass(frozen=True)
class Plan:
    """Bytes throughout; `reserved` is the allocator's, the card also holds `context_bytes`."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    batch_size: int
    allocated: Bytes
    """Tensors and scratch at the peak."""
    reserved: Bytes
    """By the caching allocator, if there is room."""
    context_bytes: Bytes
    """CUDA's context, and communicators' buffers; outside of the allocator."""
    budget_bytes: Bytes | None
    """Bytes that the card, or --vram, gives to programs; null for neither."""
    fits: bool | None
    """null without a budget."""
    tight: bool
    """It fits only by giving cached memory back to the driver in the middle of a step."""
    reserved_in_budget: Bytes
    """Bytes that the allocator reserves when the budget holds it back; `reserved` without a budget."""
    held_throughout: Bytes
    """The most that weights, gradients, optimizer state and buffers take together at any moment."""
    growing: MaybeGrowing
    """Empty without a budget, and if the plan fits without emptying the cache or has growing segments already."""
    by_category: dict[str, Bytes]
    """The largest tensors at the peak."""
    by_module: list[tuple[str, Bytes]]
    moment: str
    """The phase and moment of the peak."""
    largest_batch: int | None
    """With --largest: the largest that fits or may fit."""
    largest_surely: int | None
    """The largest of those that fit with a chance of nine in ten or more."""
    largest_is_bound: bool
    """The search stopped before it found a batch that does not fit."""
    step_seconds: float
    time_band: float
    """Give or take this share."""
    notes: list[str] = field(default_factory=list)
    inexact: list[str] = field(default_factory=list)
    """Memory tricks whose gradients are not bit-equal to the run without them."""
    timeline: dict[str, list[int]] = field(default_factory=dict)
    moments: dict[str, PlannedMoment] = field(default_factory=dict)
    planning_seconds: float = 0.0
    ranks: MaybePlannedRanks = None
    """With several processes."""
    host_bytes: Bytes = 0
    """Host memory for tensors that wait there: weights, gradients, optimizer states, activations; pinned blocks are
    rounded up to powers of two."""
    assumed_workspace: Bytes = 0
    """An assumed workspace of cuDNN; in the totals, not in the reserved bytes. 0 for a card that is
    calibrated."""
    at_budgets: dict[str, WithinBudget] = field(default_factory=dict)
    """Answers for other budgets from the same trace; the keys are bytes as text."""

    @property
    def budget(self) -> Bytes:
        """The budget, of a plan that has one."""
        assert self.budget_bytes is not None
        return self.budget_bytes

    @property
    def with_room(self) -> Bytes:
        """Bytes that it would take from the card if there is room."""
        return self.reserved + self.context_bytes + self.assumed_workspace

    @property
    def without_assumed(self) -> Bytes:
        """The total without an assumed workspace: held back by the budget if it fits, else the whole."""
        return (self.reserved_in_budget if self.fits else self.reserved) + self.context_bytes

    @property
    def total(self) -> Bytes:
        """Bytes that it takes from the card; if it fits, cuDNN's workspace is cut to the room."""
        if not self.fits:
            return self.without_assumed + self.assumed_workspace
        return min(
            self.without_assumed + self.assumed_workspace, max(self.without_assumed, self.budget)
        )

    def at_budget(self, budget_bytes: int | None) -> Plan:
        """Return the plan as it is within another of the budgets that it was judged by."""
        return replace(self, **vars(self.at_budgets[str(budget_bytes)]))

    def as_data(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return without_absent(_adapter(Plan).dump_python(self))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Plan:
        """Return the plan of a result of `as_data`, here or in an earlier version. Raises ValueError."""
        plan: Plan = _adapter(Plan).validate_python(data)
        return plan


@dataclass(frozen=True)
class InferencePlan:
    """Bytes throughout; `reserved` is the allocator's, the card also holds `context_bytes`."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    batch_size: int
    mode: str
    allocated: Bytes
    reserved: Bytes
    context_bytes: Bytes
    budget_bytes: Bytes | None
    fits: bool | None
    """None without a budget."""
    weight_bytes: Bytes
    by_category: dict[str, Bytes]
    by_module: list[tuple[str, Bytes]]
    tight: bool
    """It fits only by giving cached memory back to the driver."""
    reserved_in_budget: Bytes
    """Bytes that the allocator reserves when the budget holds it back; `reserved` without a budget."""
    largest_batch: int | None
    """Of the class that fits (`mpt.planner.facts.verdict`), else `largest_at_all`; None without a budget."""
    largest_at_all: int | None
    """The largest that fits or may fit; 0 if not even one sample does."""
    tile: tuple[int, int] | None
    """Height and width of the largest tile of the wished frame that fits, or else may fit; None if there is none, or
    no wish.
    """
    batch_seconds: float
    time_band: float
    notes: list[str] = field(default_factory=list)
    planning_seconds: float = 0.0

    @property
    def budget(self) -> Bytes:
        """The budget, of a plan that has one."""
        assert self.budget_bytes is not None
        return self.budget_bytes

    @property
    def with_room(self) -> Bytes:
        """Bytes that it would take from the card if there is room."""
        return self.reserved + self.context_bytes

    def as_data(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return dict(_adapter(InferencePlan).dump_python(self))

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> InferencePlan:
        """Return the plan of a result of `as_data`. Raises ValueError."""
        plan: InferencePlan = _adapter(InferencePlan).validate_python(data)
        return plan


def without_absent(data: dict[str, Any]) -> dict[str, Any]:
    """Remove the entries that only some plans have from a plan's JSON, in place; return it."""
    for name, moment in data["moments"].items():
        if moment["problem"]:
            data["moments"][name] = {"problem": moment["problem"]}
            continue
        del moment["problem"]
        for figure in ("reads_values", "host_bytes"):
            if not moment[figure]:
                del moment[figure]
    if data["ranks"] and data["ranks"]["last_samples"] is None:
        del data["ranks"]["last_samples"], data["ranks"]["last_total"]
    return data


@cache
def _adapter(kind: type[T]) -> TypeAdapter[T]:
    return TypeAdapter(kind)
