"""Functions changed in a process that has imported them already, for `scripts/mutations/mutations.py`.

To import mpt costs more processor time than most tests that notice something. So a process imports the tests of a file
once, unchanged, and a fork of it for each mutation gives every function of the mutated source its new code: whoever
holds the function calls the new code. That is only done where nothing but code inside of functions differs; a
constant, a default or a class's attribute may have been copied by those who imported it, and needs a new import.
What a mutated function had computed while modules were imported stays as it was: a mutation that survives here is tried
with a new import before it counts as a survivor.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from inspect import CO_NEWLOCALS
from types import CodeType, FunctionType


def changed_functions(before: str, after: str, file: str) -> dict[CodeType, CodeType] | None:
    """Return old -> new code of the functions that differ, or None if something outside of functions does."""
    found: dict[CodeType, CodeType] = {}
    old, new = (compile(text, file, "exec", dont_inherit=True) for text in (before, after))
    return found if match(old, new, found) else None


def match(old: CodeType, new: CodeType, found: dict[CodeType, CodeType]) -> bool:
    """Note the functions below a module's or class's code; return whether that itself is the same."""
    ours, theirs = list(inner_codes(old)), list(inner_codes(new))
    if outline(old) != outline(new) or len(ours) != len(theirs):
        return False
    for one, other in zip(ours, theirs):
        if not is_function(one):
            if not match(one, other, found):
                return False
        elif one != other:
            if one.co_freevars != other.co_freevars:
                return False
            found[one] = other
            note_inner(one, other, found)
    return True


def note_inner(old: CodeType, new: CodeType, found: dict[CodeType, CodeType]) -> None:
    """Note functions inside of functions: some were made while modules were imported, and are held somewhere."""
    ours, theirs = list(inner_codes(old)), list(inner_codes(new))
    if [one.co_qualname for one in ours] != [one.co_qualname for one in theirs]:
        return
    for one, other in zip(ours, theirs):
        if one != other and one.co_freevars == other.co_freevars:
            found[one] = other
            note_inner(one, other, found)


def inner_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects among the constants of another."""
    return (one for one in code.co_consts if isinstance(one, CodeType))


def is_function(code: CodeType) -> bool:
    """Return whether code is a function's, and not a class body's."""
    return bool(code.co_flags & CO_NEWLOCALS)


def outline(code: CodeType) -> tuple[object, ...]:
    """Return what a module's or class's code does, without lines and without the functions in it."""
    constants = tuple((type(one), one) for one in code.co_consts if not isinstance(one, CodeType))
    return code.co_code, code.co_names, code.co_varnames, repr(constants)


def swap(changes: dict[CodeType, CodeType]) -> int:
    """Give all functions of this process that have an old code the new one; return how many there were."""
    count = 0
    for one in gc.get_objects():
        if type(one) is FunctionType and (new := changes.get(one.__code__)) is not None:
            one.__code__ = new
            count += 1
    return count
