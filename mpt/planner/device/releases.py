"""What earlier releases of torch kept in memory that the installed one does not: `mpt plan CONFIG --torch 1.12`.

A table of routes. Each says since which release torch no longer takes it, and where that can be read; the planner asks
`takes` where it would go another way, and `taken` then holds what made a difference to the plan at hand. What is not
in the table is planned as the installed torch does it. Torch is not imported here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version

from mpt.errors import ConfigError

Release = tuple[int, int]

OLDEST: Release = (1, 10)
LAST_OF_1 = 13
"""After 1.13 came 2.0."""


@dataclass(frozen=True)
class Route:
    """Something that torch did until a release."""

    name: str
    until: Release
    """The first release that does not."""
    words: str
    source: str


ROUTES = (
    Route(
        "softmax keeps its input",
        (1, 11),
        "softmax and log_softmax keep their input for backward beside the output",
        "https://github.com/pytorch/pytorch/pull/65242",
    ),
    Route(
        "gradients are kept",
        (2, 0),
        "zero_grad fills gradients with zeros instead of releasing them",
        "https://github.com/pytorch/pytorch/pull/92731",
    ),
    Route(
        "a tensor at a time",
        (2, 0),
        "torch's optimizers update one tensor after the other unless optimizer.foreach is set",
        "torch/optim/adam.py of 1.13.1 (foreach = False) and _default_to_fused_or_foreach in torch/optim/optimizer.py "
        "of 2.0.1",
    ),
    Route(
        "plain attention",
        (2, 0),
        "attention is two matrix products with softmax and dropout between them",
        "_scaled_dot_product_attention in torch/nn/functional.py of 1.13.1, as nn.MultiheadAttention called it",
    ),
    Route(
        "sums of gradients",
        (2, 0),
        "gradients of a tensor that is used twice are added up into a third tensor",
        "https://github.com/pytorch/pytorch/pull/90217, in the release notes of 2.0",
    ),
    Route(
        "second temporary of Adam",
        (2, 1),
        "the foreach step of Adam and AdamW makes a second temporary of the size of the weights",
        "https://github.com/pytorch/pytorch/pull/104780 and https://github.com/pytorch/pytorch/pull/104898",
    ),
    Route(
        "composite RMSNorm",
        (2, 9),
        "RMSNorm is pow, mean, add, rsqrt and products, each of which keeps its own",
        "https://github.com/pytorch/pytorch/pull/153666",
    ),
    Route(
        "RMSNorm outside of autocast",
        (2, 12),
        "autocast leaves RMSNorm's input as it is; in half, beside a float32 weight, it is composite",
        "https://github.com/pytorch/pytorch/pull/174824, in 2.12 by https://github.com/pytorch/pytorch/issues/188955",
    ),
)
NAMES = {route.name: route for route in ROUTES}


def installed_release() -> Release:
    """Return the installed torch's release."""
    major, minor = version("torch").split(".")[:2]
    return int(major), int(minor)


def parse_release(text: str) -> Release:
    """Return (1, 12) of "1.12" or "1.12.1". Raises ConfigError for one before 1.10 or after the installed one."""
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?", text)
    newest = installed_release()
    if found is not None:
        release = int(found[1]), int(found[2])
        if OLDEST <= release <= newest and not (release[0] == 1 and release[1] > LAST_OF_1):
            return release
    raise ConfigError(
        f"--torch: {text!r} is no release that can be planned; there are {show(OLDEST)} to 1.{LAST_OF_1} and 2.0 to "
        f"{show(newest)}, the installed one"
    )


def show(release: Release) -> str:
    """Return "1.12"."""
    return f"{release[0]}.{release[1]}"


@dataclass
class _Planned:
    release: Release | None = None
    taken: dict[str, None] | None = None


_planned = _Planned()


@contextmanager
def planning_as(release: Release | None) -> Iterator[None]:
    """Plan as a release does, inside the block; None is the installed one. What was taken before is forgotten."""
    before = _planned.release
    _planned.release, _planned.taken = release, {}
    try:
        yield
    finally:
        _planned.release = before


def is_before(name: str) -> bool:
    """Return whether the release that is planned takes a route, without saying that it made a difference."""
    return _planned.release is not None and _planned.release < NAMES[name].until


def takes(name: str) -> bool:
    """Return whether the release that is planned takes a route, where that makes a difference."""
    if not is_before(name):
        return False
    assert _planned.taken is not None
    _planned.taken[name] = None
    return True


def taken_routes() -> list[Route]:
    """Return the routes that made a difference to what was planned last, in the table's order."""
    return [route for route in ROUTES if route.name in (_planned.taken or {})]
