"""`mpt schema`: the JSON Schema of a configuration file, for editors, or of a plan. Torch is not imported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from mpt.commands.cli.arguments import Output
from mpt.config.json_schema import config_schema
from mpt.planner.recipes.printed import plan_schema
from mpt.run.process.files import write_atomically


@dataclass(frozen=True)
class Command:
    """Print the JSON Schema of CONFIG, or with --plan of a plan.

    Examples:
      mpt schema -o mpt.schema.json
    """

    output: Output = None
    """The file to write, in place of the standard output."""
    plan: bool = False
    """The schema of the output of `mpt plan CONFIG --json`."""


def run(arguments: Command) -> None:
    """Print the schema, or write it. Raises InputOutputError if the file cannot be written."""
    output = arguments.output
    text = json.dumps(plan_schema() if arguments.plan else config_schema(), indent=2) + "\n"
    if output is None:
        print(text, end="")
        return
    write_atomically(Path(output), text)
    hint = f"; in VS Code, begin a config with `# yaml-language-server: $schema={output}`"
    print(f"wrote {output}{'' if arguments.plan else hint}")
