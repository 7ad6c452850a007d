"""What the doctor looks at of a training step that knows nothing of mpt: the machine, the numerics, the speed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpt.config.finding.registry import place
from mpt.errors import ConfigError, MptError
from mpt.outside.own_code import explain, first_line
from mpt.workflows.examining.examination import check_dtype, timed

if TYPE_CHECKING:
    from mpt.doctor.findings import Section
    from mpt.doctor.own.step import OwnSubject

PARTS = ("environment", "numerics", "speed")


@dataclass(frozen=True)
class OwnWish:
    """A step and how it is examined."""

    subject: str
    source: Mapping[str, Any]
    """The fields of `mpt.planner.own.execution.source.Source`."""
    arguments: Mapping[str, Any]
    dtype: str | None = None
    """Of its autocast, in place of its own."""
    device: str = "auto"
    runs: Path = Path("runs")
    tell: Callable[[str], None] = lambda doing: None
    """Called with what is done now, which may take a while."""


def examine_own(wish: OwnWish, only: Sequence[str] = ()) -> list[Section]:
    """Examine a step. Raises ConfigError for a part that there is not, and what the step itself raises."""
    for part in only:
        if part not in PARTS:
            raise ConfigError(
                f"--only: found {part!r}; of a training step of your own there are {', '.join(PARTS)}"
            )
    check_dtype(wish.dtype)
    wanted = only or PARTS
    subject = find_subject(wish)
    return [timed(lambda part=part: examine_part(part, wish, subject)) for part in wanted]  # type: ignore[misc]


def find_subject(wish: OwnWish) -> OwnSubject:
    """Import the factory. Raises ConfigError."""
    from mpt.doctor.own.step import OwnSubject
    from mpt.engine.building.devices import choose_device
    from mpt.planner.facts.gpus import DEFAULT, find_gpu
    from mpt.planner.own.execution.factory import find_factory
    from mpt.planner.own.execution.source import Source

    source = Source.of(wish.source)
    find_factory(source)
    device = choose_device(wish.device)
    return OwnSubject(source, wish.arguments, device, find_gpu(DEFAULT), tell=wish.tell)


def examine_part(part: str, wish: OwnWish, subject: OwnSubject) -> Section:
    """Return the findings of one part. A step that needs a card is not timed without one."""
    import torch

    from mpt.doctor.findings import Section
    from mpt.doctor.machine.environment import examine_environment
    from mpt.doctor.own.numerics import describe_own
    from mpt.doctor.own.speed import own_speed

    wish.tell(part)
    if part == "environment":
        return examine_environment(subject.batch_size or 8, wish.runs)
    if part == "numerics":
        return explained(
            lambda: describe_own(subject, getattr(torch, wish.dtype) if wish.dtype else None), wish
        )
    try:
        return explained(lambda: own_speed(subject), wish)
    except (ConfigError, AssertionError, RuntimeError) as error:
        if torch.cuda.is_available() or not re.search("cuda|nvidia", str(error), re.IGNORECASE):
            raise
    section = Section("speed")
    section.add(
        "note", "step", 'not timed: it puts tensors on "cuda", and there is no such device here'
    )
    return section


def explained(examine: Callable[[], Section], wish: OwnWish) -> Section:
    """Return a section; what the user's code raises becomes a ConfigError with its lines."""
    try:
        return examine()
    except MptError:
        raise
    except Exception as error:
        reason = explain(error)
        where = Path(wish.source["where"])
        if reason is None and not wish.source.get("function"):
            reason = f"{first_line(error)}, at {place(error, where)}"
        if reason is None:
            raise
        raise ConfigError(f"{wish.subject}: {reason}") from error
