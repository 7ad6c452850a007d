"""Completions of the shell in addition to commands and options: configurations, runs, and settings with their values.

Settings come from the JSON Schema of a configuration; if the words before name a configuration or choose a part
(`model=dcgan`), only the settings of the chosen part are offered. bash takes `key=value` for three words, so a value is
also completed if `=` is before it as a word of its own. Nothing is raised here: a shell shows no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from mpt.config.finding.shipped import MARK, shipped_configs
from mpt.config.json_schema import Schema, config_schema
from mpt.config.text.yaml_text import MAX_BYTES, read_text
from mpt.foreign.files import read_text as read_file_text
from mpt.run.records.layout import is_run

YAML = (".yaml", ".yml")
NAMES = {"precision": "mode"}
"""The key by which a section chooses its part, if it is not `name`."""


def complete_config(incomplete: str) -> list[str]:
    """Return shipped configurations, YAML files and folders that begin so."""
    shipped = [f"{MARK}{name}" for name in shipped_configs()]
    return [*(one for one in shipped if one.startswith(incomplete)), *files(incomplete, YAML)]


def complete_planned(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return the sub-commands of `mpt plan` that begin so, and configurations."""
    above: Any = ctx.parent.command if ctx.parent is not None else None
    names = (
        set(above.commands[ctx.info_name].commands) - {ctx.info_name}
        if above is not None
        else set()
    )
    return [
        *sorted(name for name in names if name.startswith(incomplete)),
        *complete_config(incomplete),
    ]


def complete_run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return runs by name, and the files and folders that begin so."""
    folder = Path(str(ctx.params.get("runs") or "runs"))
    try:
        names = sorted(
            path.name
            for path in folder.iterdir()
            if path.name.startswith(incomplete) and is_run(path)
        )
    except OSError:
        names = []
    return [*names, *files(incomplete, (*YAML, ".onnx", ".safetensors", ".pt"))]


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return settings that begin so, `optimizer.lr=`, or a setting with each value that is known."""
    schema, before = config_schema(), list(ctx.params.get("overrides") or ())
    chosen = chosen_parts(ctx.params.get("config"), before)
    if before[-1:] == ["="] and len(before) > 1:
        return values(schema, before[-2], incomplete, chosen)
    # the typed word is the sign itself, which typer takes away
    if not incomplete and before and "=" not in before[-1]:
        return values(schema, before[-1], "", chosen)
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={one}" for one in values(schema, key, value, chosen)]
    return keys(schema, key, chosen)


def files(incomplete: str, suffixes: Sequence[str]) -> list[str]:
    """Return files with these endings and folders, with a slash, whose paths begin so."""
    start = Path(incomplete + "x").parent  # of "a/" it is a
    try:
        found = sorted(start.iterdir())
    except OSError:
        return []
    texts = [
        str(path) + ("/" if path.is_dir() else "")
        for path in found
        if path.is_dir() or path.suffix in suffixes
    ]
    return [
        text
        for text in texts
        if text.startswith(incomplete) and not Path(text).name.startswith(".")
    ]


def chosen_parts(config: Any, words: Sequence[str]) -> dict[str, str]:
    """Return section -> the name that a configuration or an override chooses; an unreadable one chooses nothing."""
    chosen: dict[str, str] = {}
    try:
        path = shipped_configs().get(str(config).removeprefix(MARK)) or Path(str(config))
        value = read_text(read_file_text(path, MAX_BYTES), str(path))[0].plain() if config else {}
    except (OSError, ValueError):
        value = {}
    for section, part in value.items() if isinstance(value, dict) else ():
        name = part.get(NAMES.get(section, "name")) if isinstance(part, dict) else part
        if isinstance(name, str):
            chosen[section] = name
    for word in words:
        key, _, name = word.partition("=")
        section, _, rest = key.partition(".")
        if name and rest in ("", NAMES.get(section, "name")):
            chosen[section] = name
    return chosen


def keys(schema: Schema, typed: str, chosen: dict[str, str]) -> list[str]:
    """Return the settings that continue the typed word: a dot follows a mapping, an equals sign the others."""
    parent, _, start = typed.rpartition(".")
    found: dict[str, bool] = {}
    for one in at(schema, parent, chosen):
        for name, setting in one.get("properties", {}).items():
            if name.startswith(start):
                holds = any(part.get("properties") for part in alternatives(setting, schema))
                found[name] = found.get(name, False) or holds
    prefix = f"{parent}." if parent else ""
    return [
        f"{prefix}{name}{end}"
        for name, holds in found.items()
        for end in ((".", "=") if holds else ("=",))
    ]


def values(schema: Schema, key: str, start: str, chosen: dict[str, str]) -> list[str]:
    """Return the values of a setting that are known and begin so: names, and true and false."""
    section, _, rest = key.partition(".")
    found: dict[str, None] = {}
    for one in at(schema, key, {} if rest in ("", NAMES.get(section, "name")) else chosen):
        known = ["true", "false"] if one.get("type") == "boolean" else one.get("enum", ())
        found |= dict.fromkeys(str(value) for value in known if value is not None)
    return [value for value in found if value.startswith(start)]


def at(schema: Schema, key: str, chosen: dict[str, str]) -> Iterator[Schema]:
    """Yield all alternatives of the setting with this dotted key, within the parts that are chosen."""
    level = list(alternatives(schema, schema))
    section = key.partition(".")[0]
    for depth, name in enumerate(key.split(".") if key else []):
        inner = [one["properties"][name] for one in level if name in one.get("properties", {})]
        level = [part for one in inner if one is not True for part in alternatives(one, schema)]
        if depth == 0 and section in chosen:
            own = [one for one in level if is_of(one, NAMES.get(section, "name"), chosen[section])]
            level = own or level
    yield from level


def is_of(schema: Schema, key: str, name: str) -> bool:
    """Return whether this is the mapping of the part with this name."""
    named = schema.get("properties", {}).get(key, {})
    return isinstance(named, dict) and (
        name in named.get("enum", ()) or (":" in name and "pattern" in named)
    )


def alternatives(schema: Any, root: Schema) -> Iterator[Schema]:
    """Yield a schema, its target, or its alternatives."""
    if not isinstance(schema, dict):
        return
    if "$ref" in schema:
        yield from alternatives(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    elif "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from alternatives(one, root)
    else:
        yield schema
