"""Which of RIFE's published networks there are, how each is built, and which one a file holds.

Files carry no version. Names and shapes tell the networks apart; versions that share both share their forward pass too
(`ALIKE`), so a file is known by the name of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn

from mpt.systems.dain.nn.rife_published.blocks import Head, encoder_in_a_row, encoder_of_two
from mpt.systems.dain.nn.rife_published.eccv import EccvRife
from mpt.systems.dain.nn.rife_published.hd import HdRife
from mpt.systems.dain.nn.rife_published.networks import PublishedRife
from mpt.systems.dain.nn.rife_published.practical import Plan4, PracticalRife
from mpt.systems.dain.nn.rife_published.version_settings import Version

COARSE = (16.0, 8.0, 4.0, 2.0, 1.0)


def plan_425(
    widths: tuple[int, ...],
    encoded: int = 4,
    scales: tuple[float, ...] = COARSE,
    multiple: int = 64,
) -> Plan4:
    """Return the plan of a network like 4.25."""
    return Plan4(
        widths,
        scales,
        outputs=13,
        passes_features=True,
        replaces_mask=True,
        encoded=encoded,
        multiple=multiple,
    )


def plan_encoded(
    widths: tuple[int, ...],
    encoder: Callable[[int, int], nn.Module] = Head,
    encoder_width: int = 32,
    encoded: int = 8,
    **further: Any,
) -> Plan4:
    """Return the plan of a network from 4.7 to 4.24, whose blocks see features of both frames too."""
    return Plan4(
        widths,
        replaces_mask=True,
        encoder=encoder,
        encoder_width=encoder_width,
        encoded=encoded,
        **further,
    )


USUAL, LITE = (192, 128, 96, 64), (128, 96, 64, 48)
PLANS: dict[str, Plan4] = {
    "4.0": Plan4(USUAL, residual_blocks=False, is_first=True, outputs=5),
    "4.2": Plan4(USUAL, residual_blocks=False, outputs=5),
    "4.5": Plan4(USUAL, outputs=5),
    "4.6": Plan4(USUAL),
    "4.7": plan_encoded(USUAL, encoder_of_two, 16, 4),
    "4.10": plan_encoded(USUAL, encoder_in_a_row),
    "4.12.lite": plan_encoded(LITE, encoder_in_a_row, encoded=4),
    "4.13": plan_encoded(USUAL),
    "4.14.lite": plan_encoded(USUAL, groups=2),
    "4.15.lite": plan_encoded(LITE, encoder_width=16, encoded=4),
    "4.20": plan_encoded((384, 192, 96, 48)),
    "4.21": plan_encoded((256, 192, 96, 48), outputs=13, passes_features=True),
    "4.22.lite": plan_encoded(
        (192, 128, 64, 32), encoder_width=16, encoded=4, outputs=13, passes_features=True
    ),
    "4.25": plan_425((192, 128, 96, 64, 32)),
    "4.25.lite": plan_425((192, 128, 96, 64, 24), scales=(32.0, 16.0, 8.0, 4.0, 1.0), multiple=128),
    "4.25.heavy": plan_425((384, 256, 192, 128, 64)),
    "4.26.heavy": plan_425((192, 128, 96, 64, 32), encoded=16),
}
ALIKE: dict[str, tuple[str, ...]] = {
    "4.0": ("4.1",),
    "4.2": ("4.3", "4.4"),
    "4.7": ("4.8", "4.9"),
    "4.10": ("4.11", "4.12"),
    "4.12.lite": ("4.13.lite",),
    "4.13": ("4.14", "4.15", "4.17", "4.18", "4.19", "4.24"),
    "4.15.lite": ("4.16.lite", "4.17.lite"),
    "4.21": ("4.22", "4.23"),
    "4.25": ("4.26",),
}
"""Versions that are the same network with other weights, under the first one's name."""
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
    network = next((first for first, others in ALIKE.items() if version in others), version)
    return BUILDERS[network]() if network in BUILDERS else PracticalRife(PLANS[network])


def described(version: str) -> str:
    """Return a version's name with those that are the same network."""
    others = ALIKE.get(version, ())
    return f"{version} (also {', '.join(others)})" if others else version


def unwrapped(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a file's tensors under the network's names, without what only training used."""
    found = {name.replace(WRAPPER, ""): value for name, value in tensors.items()}
    return {name: value for name, value in found.items() if not name.startswith(TRAINING_ONLY)}


def version_of(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the version, of some that are alike the first, whose names and shapes a file's tensors have, or None."""
    given = {name: value.shape for name, value in unwrapped(tensors).items()}
    return next((version for version in get_args(Version) if shapes_of(version) == given), None)


@functools.cache
def shapes_of(version: str) -> dict[str, torch.Size]:
    """Return the names and shapes of a version's tensors."""
    with torch.device("meta"):
        return {name: value.shape for name, value in build_version(version).state_dict().items()}
