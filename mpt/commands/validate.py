"""`mpt validate`: read a configuration as `mpt train` would, and say every mistake at once. Torch is not imported."""

from __future__ import annotations

from mpt.commands.cli.arguments import ValidateArguments
from mpt.config.load import load_config


def run(arguments: ValidateArguments) -> None:
    """Check a configuration. Raises ConfigError with one line per mistake."""
    config = arguments.config
    read = load_config(config, arguments.overrides, allow=arguments.allow, patches=arguments.patches)
    if arguments.quiet:
        return
    length = f"{read.train.steps} steps" if read.train.steps else f"{read.train.epochs:g} epochs"
    tricks = f", {', '.join(read.memory.tricks)}" if read.memory.tricks else ""
    print(f"{config}: valid: {read.model.name} on {read.dataset.name}, {read.precision.mode}{tricks}, {length}")
