"""The sources of a configuration as trees that remember places, and how they are laid over one another.

The file, then patches, then overrides: mappings are united, anything else is replaced. A shorthand (`precision: amp`,
`micro_batch: 4`) is written out first, so `precision=bf16` changes the mode and keeps the other keys. Only the form is
checked here; `mpt.config.checking.checker` checks the result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpt.config.finding.registry import Registry
from mpt.config.schema import NAMED_SECTIONS
from mpt.config.text.messages import describe
from mpt.config.text.yaml_text import (
    Node,
    Place,
    Problem,
    printable,
    read_file,
    read_text,
    write_text,
)

SECTIONS = ("model", "task", "dataset", "precision", "memory", "optimizer", "train", "parallel")


def read_layers(
    source: Path | str | Mapping[str, Any] | Node,
    overrides: Sequence[str],
    patches: Sequence[Path],
    registry: Registry,
) -> tuple[Node, list[Problem]]:
    """Read every source and lay them over one another."""
    base, problems = _read_source(source)
    tree = _expand(base, problems, registry)
    for patch in patches:
        node, found = read_file(patch)
        problems += found
        tree = _merge(tree, _expand(node, problems, registry))
    for override in overrides:
        node, found = read_override(override)
        problems += found
        tree = _merge(tree, _expand(node, problems, registry))
    return tree, problems


def read_override(text: str) -> tuple[Node, list[Problem]]:
    """Parse `key.path=value` to a tree of one branch."""
    place = Place(f"override '{printable(text)}'")
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        return Node({}, place), [
            Problem(place, (), "an override is written key.path=value, such as optimizer.lr=3e-4")
        ]
    if not value.strip():  # YAML reads nothing as null, which a slip of the shell should not set
        return Node({}, place), [
            Problem(place, tuple(parts), "the value is missing; write null to mean none")
        ]
    node, found = read_text(value, place.source, located=False)
    problems = [replace(one, path=(*parts, *one.path)) for one in found]
    quoted = value.lstrip().startswith(("'", '"'))
    # YAML would drop the rest without a word
    if not problems and not quoted and re.search(r"(^|\s)#", value):
        problems = [Problem(place, tuple(parts), "a # begins a comment; put the value in quotes")]
    for part in reversed(parts):
        node = Node({part: replace(node, key_place=place)}, place)
    return node, problems


def write_override(key: str, value: object) -> str:
    """Return `key=value` so that `read_override` reads exactly this plain value."""
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def write_overrides(values: Mapping[str, object]) -> list[str]:
    """Return the overrides of those values that are given; None is not."""
    return [write_override(key, value) for key, value in values.items() if value is not None]


def _read_source(source: Path | str | Mapping[str, Any] | Node) -> tuple[Node, list[Problem]]:
    if isinstance(source, Node):
        return source, []
    if isinstance(source, Mapping):
        return read_text(write_text(dict(source)), "configuration")
    if isinstance(source, str) and ("\n" in source or ": " in source):
        return read_text(source, "configuration")
    return read_file(Path(source))


def _merge(base: Node, over: Node) -> Node:
    """Lay one tree over another: mappings are united, anything else is replaced."""
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    children = dict(base.value)
    for key, child in over.value.items():
        children[key] = _merge(children[key], child) if key in children else child
    return replace(base, value=children)


def _expand(root: Node, problems: list[Problem], registry: Registry) -> Node:
    """Write out the shorthands of a tree."""
    if root.value is None:
        return replace(root, value={})
    if not isinstance(root.value, dict):
        keys = ", ".join(SECTIONS)
        problems.append(
            Problem(
                root.place,
                (),
                f"found {describe(root)}; allowed: a mapping with the keys {keys}",
                fatal=True,
            )
        )
        return replace(root, value={})
    sections = dict(root.value)
    for section, node in root.value.items():
        scalar = not isinstance(node.value, dict | list)
        if scalar and node.value is None and section in SECTIONS:
            # `memory:` alone in a file is an empty section; the override `memory=null` clears the layers below it
            sections[section] = replace(node, value={} if node.place.line else None)
        elif scalar and section in (*NAMED_SECTIONS, "precision"):
            key = "mode" if section == "precision" else "name"
            sections[section] = replace(node, value={key: node})
        elif section == "memory" and isinstance(node.value, dict):
            tricks = {
                name: _expand_trick(name, child, registry) for name, child in node.value.items()
            }
            sections[section] = replace(node, value=tricks)
    return replace(root, value=sections)


def _expand_trick(name: str, node: Node, registry: Registry) -> Node:
    if node.value is None or isinstance(node.value, dict):
        return node
    plugin = registry.find("memory", name)
    shorthand = None if plugin is None else plugin.settings_class.shorthand
    # `set_to_none: false` is a setting of that trick; elsewhere true and false switch the trick itself.
    is_switch = (
        plugin is None
        or shorthand is None
        or plugin.settings_class.model_fields[shorthand].annotation is not bool
    )
    if isinstance(node.value, bool) and is_switch:
        return replace(node, value={}) if node.value else node
    return node if shorthand is None else replace(node, value={shorthand: node})
