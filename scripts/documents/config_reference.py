"""Write docs/reference/settings.md: every setting with its type, default and meaning, from what the parts declare.

`python scripts/documents/config_reference.py` writes the page; `tests/test_config_reference.py` fails while it is out
of date. Torch is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpt.config.checking.precision_names import ALIASES
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
from mpt.config.text.yaml_text import write_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"
INTRODUCTION = """# Every setting

Written by `python scripts/documents/config_reference.py` from the declarations of the plugins; do not edit. `mpt init`
writes the same as a commented file to start from, `mpt schema` as a JSON Schema for editors, `mpt list` the names
alone.

```yaml
model: dcgan              # a bare name takes all defaults; the same as `model: {name: dcgan}`
dataset: digits           # this is the default
precision: amp            # so is this
memory: {recompute: true}
optimizer: {name: adam, lr: 2e-4}
train: {steps: 1500}
```

On the command line any setting can be changed behind the file: `mpt train FILE optimizer.lr=1e-4 precision=bf16`. An
unknown key, a wrong type or a value out of range is an error that names line and column; nothing is ignored.
"""
SUBPACKAGES: tuple[tuple[str, str, str, type[Options] | None], ...] = (
    ("nn", "model", "Models: `model.name`", None),
    ("tasks", "task", "Tasks: `task.name` (each model has its own by default)", None),
    ("data", "dataset", "Data sets: `dataset.name`", DatasetOptions),
    ("precision", "precision", "Precision modes: `precision.mode`", PrecisionOptions),
    ("memory", "memory", "Memory tricks: `memory.TRICK`", None),
    ("optim", "optimizer", "Optimizers: `optimizer.name`", OptimizerOptions),
)
EXTERNAL_NAMES = "torchvision:NAME`, `timm:NAME`, `package.module:Name"


def write_page(registry: Registry | None = None) -> str:
    """Return the page's text. By default parts from outside of the package are left out of it."""
    registry = registry or Registry()
    notes = read_notes_of_schema()
    parts = [INTRODUCTION, "## Top level: `seed` and `name`\n", table(GeneralOptions, {}, notes)]
    parts += ["## `train`\n", table(Train, {}, notes)]
    parts += [
        "## `parallel` ([several processes](../how-to/parallel.md))\n",
        table(Parallel, {}, notes),
    ]
    for subpackage, section, heading, common in SUBPACKAGES:
        parts += list(subpackage_parts(subpackage, section, heading, common, registry))
    return "\n".join(parts).rstrip("\n") + "\n"


def subpackage_parts(
    subpackage: str, section: str, heading: str, common: type[Options] | None, registry: Registry
) -> Iterator[str]:
    """Yield a subpackage's heading, what all its plugins share, and each file's own settings."""
    yield f"## {heading}\n"
    if common is not None:
        yield f"Every one of them has these under `{section}`:\n"
        yield table(common, {}, read_notes(PACKAGE_FOLDER / "config" / "options.py"))
    if subpackage == "memory":
        yield "Beside the tricks, `memory` holds:\n"
        yield table(MemoryOptions, {}, read_notes_of_schema())
    if subpackage == "precision":
        aliases = ", ".join(f"`{name}` = `{mode}`" for name, (mode, _) in ALIASES.items())
        yield f"Names of Lightning and Keras are understood too: {aliases}.\n"
    for names, plugin in files_of(subpackage, registry).items():
        yield f"### `{names}`\n"
        yield plugin.description + "\n"
        changed = [
            f"`{name}`: {changes(registry, subpackage, name)}" for name in names.split("`, `")
        ]
        if any(not line.endswith(": ") for line in changed):
            yield (
                "What the names change: "
                + "; ".join(line for line in changed if not line.endswith(": "))
                + ".\n"
            )
        if plugin.conflicts:
            yield (
                "Not together with "
                + "; ".join(f"`{k}` ({v})" for k, v in plugin.conflicts.items())
                + ".\n"
            )
        yield table(plugin.settings_class, common.model_fields if common else {}, plugin.notes)


def files_of(subpackage: str, registry: Registry) -> dict[str, Plugin]:
    """Return one plugin per file, under all names of that file."""
    grouped: dict[Path, list[Plugin]] = {}
    for name in registry.names(subpackage):
        plugin = registry.find(subpackage, name)
        assert plugin
        grouped.setdefault(plugin.path, []).append(plugin)
    found = {
        "`, `".join(plugin.name for plugin in plugins): plugins[0] for plugins in grouped.values()
    }
    external = registry.find("nn", "torchvision:any") if subpackage == "nn" else None
    return {**found, EXTERNAL_NAMES: external} if external else found


def changes(registry: Registry, subpackage: str, name: str) -> str:
    """Return which defaults a name changes, as YAML."""
    plugin = registry.find(subpackage, name)
    defaults = plugin.defaults if plugin else {}
    return ", ".join(f"`{key}: {scalar(value)}`" for key, value in defaults.items())


def table(settings: type[Options], without: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Return a Markdown table of the fields that are not in `without`, or are there with another default or kind."""
    schema = settings.model_json_schema()
    rows = []
    for name, field in schema.get("properties", {}).items():
        shared = without.get(name)
        own = settings.model_fields[name]
        if shared is not None and (own.annotation, own.default) == (
            shared.annotation,
            shared.default,
        ):
            continue
        default = (
            "required" if own.is_required() else scalar(own.get_default(call_default_factory=True))
        )
        rows.append(
            f"| `{name}` | {cell(kind(field, schema.get('$defs', {})))} | `{default}` | {cell(notes.get(name, ''))} |"
        )
        inner = options_within(own.annotation)
        if inner is not None and inner.__module__ == Train.__module__:
            own_notes = read_notes(PACKAGE_FOLDER / "config" / "schema.py", inner.__name__)
            rows += [
                line.replace("| `", f"| `{name}.", 1)
                for line in table(inner, {}, own_notes).splitlines()[2:]
            ]
    if not rows:
        return "Nothing of its own.\n"
    return (
        "\n".join(["| key | what it may be | default | meaning |", "|---|---|---|---|", *rows])
        + "\n"
    )


def scalar(value: Any) -> str:
    """Return a value as YAML in one line; of a section within a section nothing, as its settings are listed."""
    if isinstance(value, Options):
        return "{}"
    return (
        write_text({"v": value}).removeprefix("v:").strip()
        if not isinstance(value, list | tuple | dict)
        else flow(value)
    )


def flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(part)}" for key, part in value.items()) + "}"
    return (
        "[" + ", ".join(flow(part) for part in value) + "]"
        if isinstance(value, list | tuple)
        else scalar(value)
    )


def cell(text: str) -> str:
    """Return text that stays within its cell."""
    return text.replace("|", "\\|")


def kind(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return in words what a field of a JSON Schema accepts."""
    if "$ref" in field:
        return kind(definitions[field["$ref"].rsplit("/", 1)[1]], definitions)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(kind(part, definitions) for part in field["anyOf"]))
    if "enum" in field:
        return ", ".join(f"`{scalar(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{scalar(field['const'])}`"
    if field.get("type") == "array":
        if "prefixItems" in field:
            return "a list of " + ", ".join(
                kind(part, definitions) for part in field["prefixItems"]
            )
        return f"a list: {kind(field.get('items', {}), definitions)}"
    if field.get("type") == "object":
        inner = field.get("additionalProperties")
        return (
            f"a mapping to {kind(inner, definitions)}"
            if isinstance(inner, Mapping)
            else "a mapping"
        )
    words = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
    }
    return words.get(
        field.get("type", ""), "null" if field.get("type") == "null" else "anything"
    ) + limits(field)


def limits(field: Mapping[str, Any]) -> str:
    """Return the limits of a number in words."""
    signs = (
        ("minimum", "≥"),
        ("exclusiveMinimum", ">"),
        ("maximum", "≤"),
        ("exclusiveMaximum", "<"),
    )
    said = [
        f"{sign} {field[key]:g}" for key, sign in signs if key in field and abs(field[key]) < 2**63
    ]
    return " " + " and ".join(said) if said else ""


def write_all() -> dict[Path, str]:
    """Make the text of every generated page: settings, cards, commands, signatures, exit codes, reference.yaml."""
    sys.path.insert(0, str(PAGE.parents[2]))
    from scripts.documents import command_reference, part_cards, reference_yaml

    pages = {PAGE: write_page(), reference_yaml.PAGE: reference_yaml.write_yaml(kind, scalar)}
    return {**pages, **part_cards.write_cards(), **command_reference.write_pages()}


if __name__ == "__main__":
    for path, text in write_all().items():
        path.write_text(text, "utf-8")
        print(f"wrote {path.relative_to(PAGE.parents[2])}")
