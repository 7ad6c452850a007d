"""`mpt plan tune CONFIG`: which kernels are fastest for this step on this device, written as a patch."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mpt.commands.cli.arguments import Output, PlannedConfig
from mpt.commands.planning.plan_config import choose_output, common_words, load_planned, write_patch
from mpt.config.schema import Config
from mpt.report.units import show_seconds

if TYPE_CHECKING:
    from mpt.workflows.training.tuning import Trial, Tuning


@dataclass(frozen=True)
class Command(PlannedConfig):
    """Measure here which kernels are fastest, and write the settings that gain.

    Optimizer kernels and the order of channels are tried on this device.

    Examples:
      mpt plan tune mine.yaml
    """

    output: Output = None
    """The file to write, by default tuned.yaml."""


def run(arguments: Command) -> None:
    """Measure which kernels are fastest for CONFIG's step on this device."""
    path = choose_output(arguments, arguments.output, "tuned")
    words = ["mpt", "train", *common_words(arguments, arguments.overrides)]
    show_tuning(load_planned(arguments), arguments, path, words)


def show_tuning(config: Config, arguments: Command, path: Path, words: list[str]) -> None:
    """Measure, print a row for each candidate as it comes, and write the settings that gain to `path`.

    `words` is the command that trains the configuration.
    """
    from mpt.engine.building.torch_settings import prepare_torch

    prepare_torch(config)
    from mpt.workflows.training.tuning import tune

    def tell(trial: Trial) -> None:
        if not arguments.json:
            print(describe(trial), flush=True)

    tuning = tune(config, on_trial=tell)
    written = []
    if tuning.chosen is not None:
        command = shlex.join([*words, "--with", str(path)])
        write_patch(path, tuning.chosen.patch, heading_of(tuning, tuning.chosen, config, command))
        written.append(str(path))
    if arguments.json:
        print(json.dumps(tuning.as_data(written), indent=1))
    elif tuning.chosen is not None:
        print(f"wrote {path}; train with\n  {shlex.join([*words, '--with', str(path)])}")
    else:
        tried = (
            "nothing gains beyond what the times vary by"
            if tuning.trials
            else "there is nothing to choose"
        )
        print(
            f"{tried}; a step takes {show_seconds(tuning.step_seconds)} as it stands on {tuning.device_name}"
        )


def describe(trial: Trial) -> str:
    name = " ".join(f"{key}={json.dumps(value)}" for key, value in trial.settings.items())
    name += ", again" if trial.again else ""
    if trial.reason:
        return f"{name:32s} not possible: {trial.reason}"
    return f"{name:32s} {trial.interval} of the time of a step{'' if trial.gains else ': left as it is'}"


def heading_of(tuning: Tuning, chosen: Trial, config: Config, command: str) -> list[str]:
    """Return the machine and method of a patch's measurement."""
    import torch

    subject = f"{config.model.name}, batch {config.train.batch_size}, {config.precision.mode}"
    return [
        command,
        "",
        f"measured by mpt plan tune on {tuning.device_name} with torch {torch.__version__}: {subject}",
        f"{chosen.interval} of the time of a step, {show_seconds(tuning.step_seconds)} without;",
        "results differ from those without it by rounding",
    ]
