"""What `mpt plan --json` prints, as a JSON Schema: `mpt schema --plan`. Torch is not imported.

Nothing is left open: a field that is not here is refused, so that a test finds what was added without a word.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Bytes = int
Patch = dict[str, Any]


class Closed(BaseModel):
    """An object with these fields and no others."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class GpuData(Closed):
    """The card that is planned for: TFLOP/s, GB/s and GiB (`mpt.planner.gpus.Gpu`)."""

    name: str
    memory_gib: float
    """As it is sold, or what programs can have where `is_installed`."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    float32: float
    half: float
    tf32: float
    """0 where there is none."""
    bandwidth: float
    host_link: float
    peer_link: float
    """To the other cards of a machine as sold with eight, in one direction; 0 is PCI Express."""
    aliases: list[str]
    """Other names."""
    is_installed: bool


class CalibrationData(Closed):
    """What was learnt from a run on such a card (`mpt plan --calibrate`), or the defaults."""

    context_bytes: Bytes
    cudnn_share: float
    """Workspace as a share of a dense convolution's input and output."""
    time_factor: float
    """Measured over predicted seconds of a step."""
    source: str
    """The run; empty when uncalibrated."""
    time_from: str
    """The other card that the factor was measured on, moved by rooflines; else empty."""


class Growing(Closed):
    """A plan's figures with `memory.expandable_segments`."""

    reserved: Bytes
    reserved_in_budget: Bytes
    fits: bool
    tight: bool


class Empty(Closed):
    """Nothing."""


class TakenRoute(Closed):
    """What a release of torch does otherwise than the installed one."""

    words: str
    source: str
    """Where that can be read."""


class AsTorch(Closed):
    """The release of torch that was planned for."""

    release: str
    routes: list[TakenRoute]
    """What made a difference to this plan."""


class PlannedMoment(Closed):
    """What the run does beside its steps: an evaluation, samples, saving."""

    allocated: Bytes | None = None
    reserved: Bytes | None = None
    grown: Bytes | None = None
    """What the allocator reserves for it beyond the steps."""
    fits: bool | None = None
    reads_values: bool = False
    """Planned with values of 0, since it looks at them."""
    problem: str | None = None
    """Why it could not be planned."""


class PlanData(Closed):
    """A configuration's plan."""

    batch_size: int
    allocated: Bytes
    """Tensors and scratch at the peak."""
    reserved: Bytes
    """By the caching allocator, where there is room."""
    context_bytes: Bytes
    """CUDA's context, and communicators' buffers; outside of the allocator."""
    budget_bytes: Bytes | None
    """What the card, or --vram, gives to programs; null for neither."""
    fits: bool | None
    """null without a budget."""
    tight: bool
    """It fits only by handing cached memory back in the middle of a step."""
    reserved_in_budget: Bytes
    held_throughout: Bytes
    """The most that weights, gradients, optimizer state and buffers take together at any moment."""
    growing: Growing | Empty
    """Empty without a budget, and where it fits without emptying the cache."""
    by_category: dict[str, Bytes]
    """What holds the peak."""
    by_module: list[tuple[str, Bytes]]
    moment: str
    """The phase and moment of the peak."""
    largest_batch: int | None
    """With --largest: the largest that fits or may fit."""
    largest_surely: int | None
    """The largest of those that fit with a chance of nine in ten or more."""
    largest_is_bound: bool
    """There may be a larger one that was not tried."""
    step_seconds: float
    time_band: float
    """Give or take this share."""
    notes: list[str]
    inexact: list[str]
    """Memory tricks whose gradients are not bit-equal to the run without them."""
    moments: dict[str, PlannedMoment]
    planning_seconds: float
    ranks: dict[str, Any]
    """With several processes: which of them this is, and the parts of the step's time."""
    as_torch: AsTorch | Empty
    """Empty without --torch."""
    at_budgets: dict[str, dict[str, Any]]
    verdict: Literal["fits", "may fit", "does not fit"] | None
    """null without a budget."""
    chance: float | None
    """That the run stays within the budget, by the errors of published runs."""


class RecipeData(PlanData):
    """A patch over the configuration, and its plan. The first that fits is the one recommended."""

    patch: Patch
    cost: str
    """"exact", or what it changes."""
    lossy: bool
    """It changes what is learnt, beyond rounding; with --allow-lossy only."""
    total_bytes: Bytes
    """Taken from the card."""
    traced: bool
    """false where another recipe's trace was replayed."""


class Refused(Closed):
    """A patch that the configuration or the planner refuses."""

    patch: Patch
    reason: str


class PlanOutput(Closed):
    """What `mpt plan CONFIG --json` prints: bytes and seconds throughout."""

    gpu: GpuData
    calibration: CalibrationData
    plan: PlanData
    """The configuration as it stands."""
    recipes: list[RecipeData]
    """With --vram, in the order of recommendation."""
    refused: list[Refused]
    hopeless: list[Patch]
    """Patches proven too large by what other recipes hold."""
    written: list[str]
    """Files."""


def plan_schema() -> dict[str, Any]:
    """Return the JSON Schema."""
    schema = PlanOutput.model_json_schema() | {"title": "mpt plan --json"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
