"""The JSON Schema (draft 2020-12) of a configuration, made from the declarations of the parts.

A section that chooses a plugin is one alternative per name, so that an editor completes and checks the keys of the
chosen one. The schema says less than `mpt.config.checking.checker` checks: values that a mode or alias fixes are left
to it. What it refuses, loading refuses too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.config.checking.precision_names import ALIASES
from mpt.config.finding.part_source import read_notes
from mpt.config.finding.registry import INSTALLED, Plugin, Registry
from mpt.config.options import Options
from mpt.config.schema import NAMED_SECTIONS, GeneralOptions, MemoryOptions, Parallel, Train

Schema = dict[str, Any]

SECTIONS = {
    "model": "The networks, by name, and their settings.",
    "task": "The purpose of the training; null takes the model's own task.",
    "dataset": "The source of the samples, and their preparation.",
    "optimizer": "The optimizer, its settings and the learning rate's schedule.",
    "precision": "The precision mode: in which dtypes weights are kept and products computed.",
    "memory": "The memory tricks that are on, and the answer when memory runs out.",
    "train": "How long to train, and how often to log, evaluate, sample and save.",
    "parallel": "How several processes train together.",
}
"""The purpose of each section of a file."""

EXTERNAL_MODEL: Schema = {
    "type": "string",
    "pattern": "^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.-]*$",
}


def config_schema(registry: Registry = INSTALLED) -> Schema:
    """Return the schema of a whole configuration file."""
    definitions: Schema = {}
    properties: Schema = {}
    for section, subpackage in NAMED_SECTIONS.items():
        properties[section] = _choice_schema(section, subpackage, "name", registry, definitions)
    properties["precision"] = _choice_schema(
        "precision", "precision", "mode", registry, definitions
    )
    properties["memory"] = _memory_schema(registry, definitions)
    notes = read_notes_of_schema()
    schema_file = Path(__file__).with_name("schema.py")
    train = _settings_schema(Train, {}, notes, "train", definitions, schema_file)
    train["properties"]["ema"]["anyOf"].append(
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
    )
    properties["train"] = _or_empty(train)
    properties["parallel"] = _or_empty(
        _settings_schema(Parallel, {}, notes, "parallel", definitions)
    )
    for section, text in SECTIONS.items():
        properties[section]["description"] = text
    properties |= _settings_schema(GeneralOptions, {}, notes, "general", definitions)["properties"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mpt configuration",
        "type": "object",
        "properties": properties,
        "required": ["model"],
        "additionalProperties": False,
        "$defs": definitions,
    }


def read_notes_of_schema() -> Mapping[str, str]:
    """Return the notes of `mpt.config.schema` on its settings, by field name."""
    return read_notes(Path(__file__).with_name("schema.py"))


def _settings_schema(
    settings: type[Options],
    defaults: Mapping[str, Any],
    notes: Mapping[str, str],
    prefix: str,
    definitions: Schema,
    source: Path | None = None,
) -> Schema:
    """Return the schema of one mapping; the definitions it refers to are moved to the top.

    `source` is the file that declares the settings, and may declare the classes of mappings in them.
    """
    schema = settings.model_json_schema(
        ref_template=f"#/$defs/{prefix}.{{model}}", mode="validation"
    )
    for name, definition in schema.pop("$defs", {}).items():
        own_notes = dict(read_notes(Path(__file__).with_name("options.py"), name))
        own_notes |= read_notes(source, name) if source is not None else {}
        for key, field in definition.get("properties", {}).items():
            field.pop("title", None)
            if key in own_notes:
                field["description"] = own_notes[key]
        definitions[f"{prefix}.{name}"] = definition
    schema.pop("title", None)
    schema.setdefault("properties", {})
    for name, field in schema["properties"].items():
        field.pop("title", None)
        if name in notes:
            field["description"] = notes[name]
        if name in defaults:
            field["default"] = defaults[name]
    schema["required"] = [name for name in schema.get("required", []) if name not in defaults]
    return schema


def _plugin_schema(plugin: Plugin, prefix: str, definitions: Schema) -> Schema:
    schema = _settings_schema(
        plugin.settings_class, plugin.defaults, plugin.notes, prefix, definitions, plugin.path
    )
    schema["description"] = plugin.description
    return schema


def _choice_schema(
    section: str, subpackage: str, key: str, registry: Registry, definitions: Schema
) -> Schema:
    """Return the alternatives of a section that chooses a plugin by `key`, or by its bare name."""
    names = registry.names(subpackage)
    spelt = {name: [name] for name in names}
    if subpackage == "precision":
        for alias, (mode, _) in ALIASES.items():
            spelt.get(mode, []).append(alias)
    alternatives: list[Schema] = []
    for name in names:
        plugin = registry.find(subpackage, name)
        assert plugin
        schema = _plugin_schema(plugin, f"{section}.{name}", definitions)
        alternatives.append(_named(schema, key, {"enum": spelt[name]}))
    bare: list[Schema] = [{"enum": [word for words in spelt.values() for word in words]}]
    if subpackage == "nn" and (external := registry.find("nn", "torchvision:any")):
        schema = _plugin_schema(external, f"{section}.external", definitions)
        alternatives.append(_named(schema, key, EXTERNAL_MODEL))
        bare.append(EXTERNAL_MODEL)
    if section != "model":
        alternatives.append(_unnamed(alternatives, key))
    return (
        {"anyOf": [*bare, *alternatives]}
        if section == "model"
        else {"anyOf": [*bare, *alternatives, {"type": "null"}]}
    )


def _named(schema: Schema, key: str, name: Schema) -> Schema:
    properties = {key: {"description": "The choice.", **name}, **schema["properties"]}
    return {**schema, "properties": properties, "required": [key, *schema["required"]]}


def _unnamed(alternatives: list[Schema], key: str) -> Schema:
    """Return the mapping without a name, which takes the default plugin: any key that some plugin has."""
    keys = {name: True for schema in alternatives for name in schema["properties"] if name != key}
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _memory_schema(registry: Registry, definitions: Schema) -> Schema:
    schema = _settings_schema(MemoryOptions, {}, read_notes_of_schema(), "memory", definitions)
    for name in registry.names("memory"):
        plugin = registry.find("memory", name)
        assert plugin
        alternatives = [{"type": "boolean"}, _plugin_schema(plugin, f"memory.{name}", definitions)]
        shorthand = plugin.settings_class.shorthand
        if shorthand:
            alternatives.append(json.loads(json.dumps(alternatives[1]["properties"][shorthand])))
        alternatives.append({"type": "null"})
        schema["properties"][name] = {"description": plugin.description, "anyOf": alternatives}
        for other, reason in plugin.conflicts.items():
            clash = {one: {"not": {"enum": [False, None]}} for one in (name, other)}
            words = f"memory.{name} cannot be combined with {other}: {reason}"
            schema.setdefault("allOf", []).append(
                {"description": words, "not": {"properties": clash, "required": [name, other]}}
            )
    return _or_empty(schema)


def _or_empty(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}
