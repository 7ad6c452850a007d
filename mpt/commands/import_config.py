"""`mpt import`: another program's configuration or command line as a YAML of ours, each line with its origin."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mpt.commands.cli.arguments import Allow, Output
from mpt.config.load import load_config
from mpt.errors import ConfigError
from mpt.importers.shared.recognising import translate_command, translate_file
from mpt.run.process.files import write_new


@dataclass(frozen=True)
class Command:
    """Translate another program's configuration or command line.

    Of Hugging Face's TrainingArguments, LightningCLI, Ultralytics, timm, torchvision, OneTrainer, kohya's scripts and
    DeepFaceLab. Values come with their units (8 x 4 = 32), and settings without a counterpart are listed as comments.

    Examples:
      mpt import training_args.json -o mine.yaml
      mpt import --command "yolo detect train data=x.yaml batch=16"
    """

    source: Annotated[Path | None, typer.Argument(metavar="FILE", show_default=False)] = None
    """YAML, JSON, TOML, a DeepFaceLab model's data.dat or summary.txt, or a text file with a command line."""
    command: Annotated[str | None, typer.Option(metavar="'COMMAND LINE'")] = None
    """A command line in quotes, in place of a file."""
    model: Annotated[str | None, typer.Option(metavar="NAME")] = None
    """The model to write, if the file names none that mpt has."""
    output: Output = None
    """The file to write, by default FILE-mpt.yaml."""
    allow: Allow = ()


MISSING_MODEL = "model.name: missing"


def run(arguments: Command) -> None:
    """Translate and write. Raises ConfigError for anything that is not recognised, and for a file that is there
    already."""
    if (arguments.source is None) == (arguments.command is None):
        raise ConfigError("name one file, or give --command 'python train.py --lr 0.1'")
    if arguments.command is not None:
        found, program = translate_command(arguments.command)
        stem = "imported"
    else:
        assert arguments.source is not None
        found, program = translate_file(arguments.source)
        stem = arguments.source.stem
    if arguments.model is not None:
        found.put("model.name", arguments.model, "--model")
    text = found.to_yaml(
        program, " ".join(str(arguments.source or arguments.command).split())[:200]
    )
    path = Path(arguments.output or f"{stem}-mpt.yaml")
    write_new(path, text, "name another file with -o")
    print(
        f"wrote {path}: {len(found.settings)} settings of {program}, {len(found.left)} without a counterpart"
    )
    tell_problems(path, arguments)


def tell_problems(path: Path, arguments: Command) -> None:
    """Name the settings that are still to be decided before it trains."""
    try:
        load_config(path, allow=arguments.allow)
    except ConfigError as error:
        for line in str(error).splitlines():
            missing = MISSING_MODEL in line or "model.name" in line
            print(
                "still to do: set model.name (`mpt list models`)"
                if missing
                else f"still to do: {line}",
                file=sys.stderr,
            )
    else:
        print(f"check it with `mpt validate {path}`, train it with `mpt train {path}`")
