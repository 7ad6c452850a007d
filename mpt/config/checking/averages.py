"""`train.ema` as it is written: a number, a mapping over the task's default, or a task's setting of an earlier version.

A task's file says in literals its average's defaults (`EMA`), and under which names it had its settings itself
(`MOVED`, see `mpt.config.options`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mpt.config.finding.registry import Plugin
from mpt.config.text.yaml_text import Node, Problem

OF_DECAY = ("decay", "ramp_steps")
OF_HALF_LIFE = ("half_life_kimg", "rampup")


def moved_settings(
    sections: Mapping[str, Node], task: Plugin | None, problems: list[Problem]
) -> tuple[dict[str, Node], list[str]]:
    """Return the sections with a task's earlier settings in their new places, and a line for each."""
    found, notes = dict(sections), []
    moved: Mapping[str, str] = task.literals.get("MOVED", {}) if task is not None else {}
    node = found.get("task")
    if not moved or node is None or not isinstance(node.value, dict):
        return found, []
    own = dict(node.value)
    for old, new in moved.items():
        if old not in own:
            continue
        child = own.pop(old)
        section, *keys = new.split(".")
        if is_given(found.get(section), keys):
            text = f"task.{old} is {new} now, and both are given; leave task.{old} out"
            problems.append(Problem(child.key_place or child.place, ("task", old), text))
            continue
        notes.append(f"task.{old} is {new} now; it is read as that")
        if child.value is None or child.value == 0:  # as an average was switched off
            keys, child = keys[:-1], replace(child, value=None)
        found[section] = placed(found.get(section, Node({}, child.place)), keys, child)
    return {**found, "task": replace(node, value=own)}, notes


def is_given(node: Node | None, keys: Sequence[str]) -> bool:
    """Return whether a section has a value at a path."""
    for key in keys:
        if node is None or not isinstance(node.value, dict):
            return node is not None and node.value is not None
        node = node.value.get(key)
    return node is not None


def placed(node: Node, keys: Sequence[str], child: Node) -> Node:
    """Return a section with a value at a path."""
    if not keys:
        return child
    members = node.value if isinstance(node.value, dict) else {}
    inner = placed(members.get(keys[0], Node({}, child.place, child.key_place)), keys[1:], child)
    return replace(node, value={**members, keys[0]: inner})


def with_average(node: Node, task: Plugin | None) -> Node:
    """Return the section `train` with its `ema` as a mapping over the task's own, or null."""
    own: Mapping[str, Any] = task.literals.get("EMA", {}) if task is not None else {}
    given = node.members.get("ema")
    if given is None:
        given = Node({}, node.place) if own else None
    elif isinstance(given.value, int | float) and not isinstance(given.value, bool):
        given = replace(given, value={"decay": given})
    if given is None or not isinstance(given.value, dict):
        return node
    written = {key for key, child in given.value.items() if child.value is not None}
    left_out = {
        *(OF_HALF_LIFE if "decay" in written else ()),
        *(OF_DECAY if "half_life_kimg" in written else ()),
    }
    defaults = {key: Node(value, given.place) for key, value in own.items() if key not in left_out}
    return replace(
        node, value={**node.members, "ema": replace(given, value={**defaults, **given.value})}
    )
