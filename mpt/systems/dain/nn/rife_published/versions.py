"""Which of RIFE's published networks there are, how each is built, and which one a file holds.

Files carry no version. Names and shapes tell the networks apart; versions that share both share their forward pass too
(4.0 and 4.1; 4.25 and 4.26), so they share the name of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from mpt.systems.dain.nn.rife_published.eccv import EccvRife
from mpt.systems.dain.nn.rife_published.hd import HdRife
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.practical import Plan4, PracticalRife

Version = Literal[
    "ifnet", "ifnet_m", "hd3", "hd3_older", "4.0", "4.6", "4.25", "4.25.lite", "4.25.heavy", "4.26", "4.26.heavy"
]
FINE, COARSE = (8.0, 4.0, 2.0, 1.0), (16.0, 8.0, 4.0, 2.0, 1.0)


def plan_425(
    widths: tuple[int, ...], encoded: int = 4, scales: tuple[float, ...] = COARSE, multiple: int = 64
) -> Plan4:
    """Return the plan of a network like 4.25."""
    return Plan4(widths, scales, True, 13, True, True, encoded, 16, multiple)


PLAN_425 = plan_425((192, 128, 96, 64, 32))
PLANS: dict[str, Plan4] = {
    "4.0": Plan4((192, 128, 96, 64), FINE, residual_blocks=False, outputs=5),
    "4.6": Plan4((192, 128, 96, 64), FINE),
    "4.25": PLAN_425,
    "4.25.lite": plan_425((192, 128, 96, 64, 24), scales=(32.0, 16.0, 8.0, 4.0, 1.0), multiple=128),
    "4.25.heavy": plan_425((384, 256, 192, 128, 64)),
    "4.26": PLAN_425,
    "4.26.heavy": plan_425((192, 128, 96, 64, 32), encoded=16),
}
BUILDERS: dict[str, Callable[[], PublishedRife]] = {
    "ifnet": lambda: EccvRife(any_time=False),
    "ifnet_m": lambda: EccvRife(any_time=True),
    "hd3": lambda: HdRife(older=False),
    "hd3_older": lambda: HdRife(older=True),
}
WRAPPER = "module."
"""What the files' names begin with; the original loaders drop every name without it."""
TRAINING_ONLY = ("teacher.", "caltime.")
"""Parts that files of 4.x hold and no inference network has."""


def build_version(version: str) -> PublishedRife:
    """Return an untrained network of a version."""
    return BUILDERS[version]() if version in BUILDERS else PracticalRife(PLANS[version])


def unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors under the network's names, without what only training used."""
    found = {name.replace(WRAPPER, ""): value for name, value in tensors.items()}
    return {name: value for name, value in found.items() if not name.startswith(TRAINING_ONLY)}


def version_of(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the version whose names and shapes a file's tensors have; None if there is none."""
    given = {name: value.shape for name, value in unwrapped(tensors).items()}
    return next((version for version in get_args(Version) if shapes_of(version) == given), None)


@functools.cache
def shapes_of(version: str) -> dict[str, torch.Size]:
    """Return the names and shapes of a version's tensors."""
    with torch.device("meta"):
        return {name: value.shape for name, value in build_version(version).state_dict().items()}
