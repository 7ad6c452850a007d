"""`mpt init`: write a commented configuration to start from. Every setting is there at its default, with its effect.

The file comes from the declarations of the parts, so it cannot fall behind them. Torch is not imported, no file
overwritten.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mpt.commands.cli.skeleton import write_part
from mpt.config.finding.registry import INSTALLED, Registry
from mpt.config.finding.shipped import find_shipped
from mpt.config.json_schema import read_notes_of_schema
from mpt.config.load import load_config
from mpt.config.schema import Choice, Config
from mpt.config.text.yaml_text import write_text
from mpt.errors import ConfigError
from mpt.run.process.files import write_new


@dataclass(frozen=True)
class Command:
    """Write a CONFIG or a part to start from.

    CONFIG is written with every setting and its effect. With --part it is the skeleton of a part: a file that works,
    its configuration and its test.

    Examples:
      mpt init mine.yaml --model small_cnn
      mpt init mine.yaml --from classify_digits
      mpt init --part model my_model
    """

    path: Annotated[Path | None, typer.Argument(metavar="PATH|NAME", show_default=False)] = None
    """The file to write, by default config.yaml; with --part the part's name."""
    model: str = "dcgan"
    """The model to start from; see `mpt list models`."""
    source: Annotated[str | None, typer.Option("--from", metavar="NAME")] = None
    """Copy a configuration that comes with mpt instead; see `mpt list configs`."""
    part: Annotated[str | None, typer.Option(metavar="KIND")] = None
    """model, task, dataset, loss, metric, optimizer, precision, trick or command."""
    into: Annotated[str | None, typer.Option(metavar="DIR")] = None
    """With --part: the folder of parts, by default the one of --parts, else `parts`."""


WIDTH = 100
SHORT = 40
"""A note that fits alongside its key is there; a longer one is above it."""


def run(arguments: Command, registry: Registry = INSTALLED) -> None:
    """Write the configuration of a model.

    Raises ConfigError for an unknown model or a file that is there already, InputOutputError if it cannot be written.
    """
    if arguments.part is not None:
        init_part(arguments)
        return
    if arguments.into is not None:
        raise ConfigError("mpt init: --into is of a part: add --part KIND, or leave it out")
    path = arguments.path or Path("config.yaml")
    if arguments.source is not None:
        text = find_shipped(arguments.source).read_text("utf-8")
    else:
        text = write_commented(path, arguments.model, registry)
    write_new(path, text)
    print(f"wrote {path}; train it with `mpt train {path}`")


def init_part(arguments: Command) -> None:
    """Write the skeleton of a part, and say how to use it."""
    if arguments.path is None:
        raise ConfigError(f"mpt init --part {arguments.part}: the part's NAME is missing")
    written = write_part(str(arguments.part), str(arguments.path), arguments.into)
    print(f"wrote {', '.join(map(str, written))}")
    folder = shlex.quote(str(written[0].parent.parent))
    config = next((str(path) for path in written if path.suffix == ".yaml"), None)
    if config:
        print(
            f"train it with `mpt train {shlex.quote(config)} --parts {folder}`, test it with `pytest {folder}`"
        )
    else:
        print(f"see `mpt --parts {folder} --help`, test it with `pytest {folder}`")


def write_commented(path: Path, model: str, registry: Registry) -> str:
    """Return the text of the file."""
    try:
        config = load_config({"model": {"name": model}}, registry=registry)
        own = config.task.plugin.literals.get("DATASET")
        if own is not None:
            dataset = {"name": own}
            config = load_config({"model": {"name": model}, "dataset": dataset}, registry=registry)
    except ConfigError as error:
        raise ConfigError(str(error).replace("configuration:2:9: model.name", "--model")) from None
    notes = section_notes(config)
    data = config.to_data()
    but = f" but dataset.name, without which {model} cannot learn" if own is not None else ""
    blocks = [
        f"# mpt train {path}\n#\n# Every setting below stands at its default{but}; delete what you do not change."
    ]
    for section, value in data.items():
        if isinstance(value, dict):
            lines = [f"{section}:", *comment(title(config, section), 2)]
            lines += [
                line
                for key, part in value.items()
                for line in entry(key, part, notes[section].get(key, ""), 2)
            ]
            if section == "memory":
                lines += memory_menu(registry)
            blocks.append("\n".join(lines))
        else:
            blocks.append("\n".join(entry(section, value, notes["general"].get(section, ""), 0)))
    return "\n\n".join(blocks) + "\n"


def section_notes(config: Config) -> dict[str, Mapping[str, str]]:
    own = read_notes_of_schema()
    chosen = {
        name: getattr(config, name).plugin.notes
        for name in ("model", "task", "dataset", "precision", "optimizer")
    }
    return {**chosen, "memory": own, "train": own, "parallel": own, "general": own}


def title(config: Config, section: str) -> str:
    """Return the chosen part's description; nothing for a section without a choice."""
    choice = getattr(config, section)
    return choice.plugin.description if isinstance(choice, Choice) else ""


def entry(key: str, value: Any, note: str, indent: int) -> list[str]:
    """Return the lines of one key, its note alongside or above it."""
    text = textwrap.indent(write_text({key: value}).rstrip("\n"), " " * indent)
    if note and len(note) <= SHORT and "\n" not in text:
        return [f"{text:<{26 + indent}}  # {note}"]
    return [*comment(note, indent), text]


def comment(note: str, indent: int) -> list[str]:
    return [" " * indent + "# " + line for line in textwrap.wrap(note, WIDTH - indent)]


def memory_menu(registry: Registry) -> list[str]:
    """Return the tricks there are as lines to uncomment."""
    lines: list[str] = []
    for name in registry.names("memory"):
        plugin = registry.find("memory", name)
        if plugin:
            lines += [*comment(plugin.description, 2), f"  # {name}: true"]
    return lines
