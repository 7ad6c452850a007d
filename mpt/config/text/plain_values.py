"""Plain values as the tree that their YAML would be read to, without writing and reading it.

A search for a recipe checks dozens of configurations that differ in one setting, and reading YAML is nine tenths of
that. Values that YAML would change or refuse (numbers beyond 64 bits, control characters, keys that are no text, too
many values) have no tree here and go by way of the text, as does a configuration with mistakes, whose lines are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mpt.config.text.yaml_text import INTEGER_LIMIT, Node, Place

MOST = 1000
"""Values; a configuration has some hundred. Far below the limit of text."""
DEEPEST = 20


class Uncommon(Exception):
    """A value that only text can answer for."""


def plain_tree(values: Mapping[str, object]) -> Node | None:
    """Return the tree of plain values with no lines in its places; None for a value that YAML would change or
    refuse."""
    try:
        return _Builder(Place("configuration")).node(values, 0)
    except Uncommon:
        return None


class _Builder:
    def __init__(self, place: Place) -> None:
        self.place, self.count = place, 0

    def node(self, value: object, depth: int) -> Node:
        self.count += 1
        if self.count > MOST or depth > DEEPEST:
            raise Uncommon
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) and key.isprintable() for key in value):
                raise Uncommon
            children = {key: self.node(child, depth + 1) for key, child in value.items()}
            return Node(
                {key: replace(child, key_place=self.place) for key, child in children.items()},
                self.place,
            )
        if isinstance(value, list | tuple):
            return Node([self.node(child, depth + 1) for child in value], self.place)
        if isinstance(value, bool | float) or value is None:
            return Node(value, self.place)
        if isinstance(value, int) and -INTEGER_LIMIT <= value < INTEGER_LIMIT:
            return Node(value, self.place)
        if isinstance(value, str) and value.isprintable():
            return Node(value, self.place)
        raise Uncommon
