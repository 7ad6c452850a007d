"""Write configs/reference.yaml: every setting once, by topic, with type, default and one line of explanation.

The file is a valid configuration: all but a small classifier is a comment, to be uncommented. `mpt init --from
reference mine.yaml` copies it. `python scripts/documents/config_reference.py` writes it with the other generated pages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mpt.config.finding.part_source import read_notes
from mpt.config.finding.registry import PACKAGE_FOLDER, Plugin, Registry
from mpt.config.json_schema import read_notes_of_schema
from mpt.config.options import (
    DatasetOptions,
    OptimizerOptions,
    Options,
    PrecisionOptions,
    options_within,
)
from mpt.config.schema import GeneralOptions, MemoryOptions, Parallel, Train

PAGE = Path(__file__).resolve().parents[2] / "configs" / "reference.yaml"
HEAD = """# mpt train @reference
# Every setting of mpt by topic, with type, default and meaning: uncomment the lines that you need. As it stands it
# trains a small classifier of handwritten digits to an accuracy of 0.99 in six seconds of one CPU core.
# Written by `python scripts/documents/config_reference.py`; copy it with `mpt init --from reference mine.yaml`.

model: small_cnn
train: {epochs: 8}
"""
TOPICS: tuple[tuple[str, str, type[Options] | None], ...] = (
    ("nn", "model", None),
    ("tasks", "task", None),
    ("data", "dataset", DatasetOptions),
    ("precision", "precision", PrecisionOptions),
    ("optim", "optimizer", OptimizerOptions),
    ("memory", "memory", MemoryOptions),
)
SELECTOR = {"precision": "mode"}
WIDTH = 118

Kind = Callable[[Mapping[str, Any], Mapping[str, Any]], str]
Scalar = Callable[[Any], str]


def write_yaml(kind: Kind, scalar: Scalar, registry: Registry | None = None) -> str:
    """Make the file's text. `kind` writes a setting's type in words, `scalar` a default as YAML."""
    registry = registry or Registry()
    notes = read_notes_of_schema()
    lines = [HEAD]
    lines += [heading("top level"), *settings_of(GeneralOptions, notes, "", kind, scalar)]
    for name, settings in (("train", Train), ("parallel", Parallel)):
        lines += [
            "",
            heading(name),
            f"# {name}:",
            *settings_of(settings, notes, "  ", kind, scalar),
        ]
    for subpackage, section, common in TOPICS:
        lines += ["", heading(section), f"# {section}:"]
        if common is not None:
            source = (
                notes
                if common is MemoryOptions
                else read_notes(PACKAGE_FOLDER / "config" / "options.py")
            )
            lines += settings_of(common, source, "  ", kind, scalar)
        for plugin, names in files_of(registry, subpackage):
            lines += part_lines(plugin, names, section, common, kind, scalar)
    return "\n".join(lines) + "\n"


def heading(title: str) -> str:
    return f"# ---- {title} " + "-" * (WIDTH - 8 - len(title))


def files_of(registry: Registry, subpackage: str) -> Iterator[tuple[Plugin, list[str]]]:
    grouped: dict[Path, list[Plugin]] = {}
    for name in registry.names(subpackage):
        plugin = registry.find(subpackage, name)
        assert plugin
        grouped.setdefault(plugin.path, []).append(plugin)
    for plugins in grouped.values():
        yield plugins[0], [plugin.name for plugin in plugins]


def part_lines(
    plugin: Plugin,
    names: list[str],
    section: str,
    common: type[Options] | None,
    kind: Kind,
    scalar: Scalar,
) -> Iterator[str]:
    """Yield the lines of one part: its name and its own settings."""
    trick = section == "memory"
    yield "#"
    yield from wrapped(first_sentence(plugin.description), "#   # ")
    selector = SELECTOR.get(section, "name")
    yield f"#   {names[0]}:" if trick else f"#   {selector}: {' | '.join(names)}"
    shared = common.model_fields if common and not trick else {}
    own = {
        key
        for key, field in plugin.settings_class.model_fields.items()
        if not same(field, shared.get(key))
    }
    yield from settings_of(
        plugin.settings_class, plugin.notes, "    " if trick else "  ", kind, scalar, own
    )


def same(field: Any, shared: Any) -> bool:
    return shared is not None and (field.annotation, field.default) == (
        shared.annotation,
        shared.default,
    )


def settings_of(
    settings: type[Options],
    notes: Mapping[str, str],
    indent: str,
    kind: Kind,
    scalar: Scalar,
    only: set[str] | None = None,
) -> Iterator[str]:
    """Yield two kinds of lines for each setting: its default with its type, and its meaning above."""
    schema = settings.model_json_schema()
    for name, field in schema.get("properties", {}).items():
        if only is not None and name not in only:
            continue
        own = settings.model_fields[name]
        yield from wrapped(first_sentence(notes.get(name, "")), f"# {indent}# ")
        inner = options_within(own.annotation)
        words = kind(field, schema.get("$defs", {}))
        if inner is not None and inner.__module__ == Train.__module__:
            yield f"# {indent}{name}:  # {words}"
            inner_notes = read_notes(PACKAGE_FOLDER / "config" / "schema.py", inner.__name__)
            yield from settings_of(inner, inner_notes, f"{indent}  ", kind, scalar)
            continue
        default = (
            "REQUIRED" if own.is_required() else scalar(own.get_default(call_default_factory=True))
        )
        yield f"# {indent}{name}: {default}  # {re.sub('`', '', words)}"


def first_sentence(text: str) -> str:
    """Cut a note after its first sentence; docs/reference/settings.md has all of it."""
    return re.split(r"(?<=[a-z)`])[.;:] (?=[A-Z`a-z])", " ".join(text.split()), maxsplit=1)[
        0
    ].rstrip(".")


def wrapped(text: str, start: str) -> Iterator[str]:
    """Yield a note in lines that fit the file."""
    line = start
    for word in text.split():
        if len(line) + len(word) > WIDTH and line != start:
            yield line.rstrip()
            line = start
        line += f"{word} "
    if line != start:
        yield line.rstrip()
