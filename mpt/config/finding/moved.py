"""New places of modules and members of mpt, for parts from outside that use the old ones.

A module keeps its name when it is moved, into a room of its package or, if none there is called so, elsewhere, so its
place is found by that name. Members of the base classes at the seams are listed in `moved_members.yaml`. Only asked
when such a part cannot be imported, is built or fails: nothing answers to an old name.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml

PACKAGE = Path(__file__).resolve().parents[2]


@functools.cache
def members_before() -> dict[str, Any]:
    """Return `members`, base class -> its earlier members -> their replacements, and `set_on_objects`, names."""
    text = Path(__file__).with_name("moved_members.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def moved_to(module: str) -> str | None:
    """Return the present name of a module of mpt that was moved, None for any other."""
    if not module.startswith(f"{PACKAGE.name}."):
        return None
    first, *folders, name = module.split(".")
    if PACKAGE.joinpath(name, "__init__.py").is_file():  # a room that is a package now
        return f"{first}.{name}"
    folder = PACKAGE.joinpath(*folders)
    found = (
        sorted(folder.glob(f"{name}/{name}.py"))  # its package is a room of it now
        or sorted(folder.glob(f"*/{name}.py"))
        or sorted(PACKAGE.rglob(f"{name}.py"))
    )
    return (
        ".".join((first, *found[0].relative_to(PACKAGE).with_suffix("").parts))
        if len(found) == 1
        else None
    )


def explain_import(error: BaseException) -> str | None:
    """Return one sentence on an import error that a moved module caused, None for any other exception."""
    old = error.name if isinstance(error, ImportError) else None
    new = moved_to(old) if old else None
    return f"{old} is {new} now: change the import" if new else None


def moved_member(owner: type, name: str, on_object: bool = False) -> str | None:
    """Return one sentence on a member that a base class at the seams had, None for any other.

    `on_object`: it is an attribute of an object, on which the name of a method of before may be the part's own.
    """
    if on_object and name not in members_before()["set_on_objects"]:
        return None
    for base in owner.__mro__:
        new = (
            members_before()["members"].get(base.__name__, {}).get(name)
            if base.__module__.startswith("mpt.seams")
            else None
        )
        if new is not None:
            return f"{base.__name__}.{name} is now {new}"
    return None


def explain_attribute(error: BaseException) -> str | None:
    """Return one sentence on an attribute error that a moved member caused, None for any other exception."""
    return (
        moved_member(type(error.obj), error.name)
        if isinstance(error, AttributeError) and error.name
        else None
    )
