"""`mpt plan calibrate RUN`: learn what tensors do not show, and a card's speed, from a run that trained on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Runs
from mpt.commands.cli.completion import complete_run
from mpt.config.load import load_config
from mpt.config.sizes import describe_bytes
from mpt.planner.facts.calibration import ALLOWED, read_measurement, save_calibration
from mpt.planner.recipes.planned import plan_measured
from mpt.report.units import show_seconds
from mpt.run.records.layout import find_run
from mpt.run.records.used_parts import missing_parts_explained


@dataclass(frozen=True)
class Command:
    """Improve later plans for a card by a run's measured peak and time.

    Examples:
      mpt plan calibrate RUN
    """

    run: Annotated[
        str, typer.Argument(metavar="RUN", show_default=False, autocompletion=complete_run)
    ]
    """A run that trained on the card."""
    allow: Allow = ()
    runs: Runs = "runs"


UNEXPLAINED = 0.01
"""A share of the measured peak beyond the planned one that is worth a word."""


def run(arguments: Command) -> None:
    """Learn the unseen parts of a card from a finished run on it. Raises ConfigError for a run that teaches nothing."""
    directory, _ = find_run(arguments.run, Path(arguments.runs))
    measured = read_measurement(directory.path)
    with missing_parts_explained(directory.path):
        config = load_config(directory.config_path, allow=arguments.allow)
    plan, found = plan_measured(config, measured, str(directory.path))
    gpu = measured.gpu
    path = save_calibration(gpu.name, found)
    error = plan.allocated / measured.allocated - 1
    planned, seen = describe_bytes(plan.allocated), describe_bytes(measured.allocated)
    print(f"{gpu.name}: planned {planned}, measured {seen} ({error:+.1%})")
    print(
        f"context {describe_bytes(found.context_bytes)}, cuDNN share {found.cudnn_share}, time x{found.time_factor}"
    )
    factor, (low, high) = measured.step_seconds / plan.step_seconds, ALLOWED["time_factor"]
    if not low <= factor <= high:
        print(
            f"the step took {show_seconds(measured.step_seconds)} where the roofline has "
            f"{show_seconds(plan.step_seconds)}: times x{factor:.3g} say nothing of the card, and are not taken"
        )
    elif measured.waits_for_others:
        print(
            f"the card was busy for {measured.busy:.0%} of the time and waited for data or the host for the rest: the "
            f"step's {show_seconds(measured.step_seconds)} are not taken"
        )
    left = measured.allocated / plan.allocated - 1
    if left > UNEXPLAINED and found.cudnn_share == 0:
        print(
            f"{left:.1%} more than planned, and no convolution whose scratch could be it: that is not taken either"
        )
    print(path)
