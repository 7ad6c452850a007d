"""Does a part implement only members that its seam names, with their arguments?

A misspelt hook would never be called, without a message; one with other arguments perhaps at the end of an epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from inspect import Parameter, get_annotations, getattr_static, signature, unwrap
from types import CodeType, FunctionType
from typing import Any

from mpt.config.finding.moved import moved_member
from mpt.errors import PartError, with_article
from mpt.outside.own_calls import place_of

LIKENESS = 0.85
"""How like a hook's a name must be to be taken for it (`difflib`'s ratio)."""


def check_members(what: str, part: object, kind: type) -> None:
    """Raise PartError if a part's class has a member that its base class no longer has, misspells one, or has one that
    cannot be called as its base class's is.
    """
    made = type(part)
    own = {
        name: value
        for base in made.__mro__
        if not is_of_mpt(base)
        for name, value in vars(base).items()
    }
    known = {
        name
        for base in made.__mro__
        if is_of_mpt(base)
        for name in (*vars(base), *get_annotations(base))
    }
    for name in (*own, *vars(part)):
        moved = None if name in known else moved_member(made, name, on_object=name not in own)
        if moved is not None:
            raise PartError(
                f"{what} returned {with_article(made.__name__)}, whose {name} has no effect: {moved}"
            )
    for name, meant in misspelt_hooks(made, own, known):
        raise PartError(
            f"{what} returned {with_article(made.__name__)}, whose {name} nothing calls; is "
            f"{kind.__name__}.{meant} meant? A method for yourself may begin with an underscore"
        )
    for refused in refusing_hooks(made, own):
        raise wrong_call(what, part, refused)


def wrong_call(what: str, part: object, refused: tuple[str, str, str]) -> PartError:
    """Return the error that says how a part's method is called, and which parameters it has."""
    place, takes, wanted = refused
    return PartError(
        f"{what} returned {article(part)}, whose {place} takes ({takes}); it is called as {wanted}"
    )


def misspelt_hooks(
    made: type, own: Mapping[str, Any], known: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield public methods that would never be called, each with the hook that is probably meant.

    Neither the class nor its module names them, and they have nearly the name of a hook which is not overridden.
    """
    near = [*own.values(), *vars(sys.modules[made.__module__]).values()]
    mentioned = {name for value in near for code in codes_of(value) for name in code.co_names}
    hooks = [name for name in known if not name.startswith("_") and name not in own]
    for name, value in own.items():
        if (
            name.startswith("_")
            or not isinstance(value, FunctionType)
            or name in known
            or name in mentioned
        ):
            continue
        for meant in get_close_matches(name, hooks, 1, LIKENESS):
            yield name, meant


def refusing_hooks(made: type, own: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield methods that do not take the arguments of those that they override, as `refused_call` describes them."""
    for name in own:
        bases = [base for base in made.__mro__ if is_of_mpt(base) and name in vars(base)]
        above = vars(bases[0])[name] if bases and not name.startswith("_") else None
        refused = refused_call(name, getattr_static(made, name), above)
        if refused is not None:
            yield refused


def refused_call(name: str, method: Any, above: Any) -> tuple[str, str, str] | None:
    """Return a method's name and place, its parameters, and the call that it does not take; None if it does."""
    method = unwrap(method) if isinstance(method, FunctionType) else method
    if not isinstance(above, FunctionType) or not isinstance(method, FunctionType):
        return None
    wanted, takes = signature(above), signature(method)
    needed = [one for one in wanted.parameters.values() if one.default is one.empty]
    positions = [one for one in needed if one.kind is Parameter.POSITIONAL_OR_KEYWORD]
    by_name = [one.name for one in needed if one.kind is Parameter.KEYWORD_ONLY]
    try:
        takes.bind(*positions, **dict.fromkeys(by_name))
    except TypeError:
        call = f"{name}({', '.join(wanted.parameters)})"
        return f"{name} ({place_of(method)})", ", ".join(takes.parameters), call
    return None


def is_of_mpt(kind: type) -> bool:
    """Return whether a class is Python's own or of mpt; `mpt.parts` is the home of parts from outside."""
    first = kind.__module__.split(".")[:2]
    return first[0] == "builtins" or (first[0] == "mpt" and first != ["mpt", "parts"])


def codes_of(member: Any) -> Iterator[CodeType]:
    """Yield the code of a class's member, and of the functions inside."""
    if isinstance(member, property):
        member = member.fget
    member = getattr(member, "__func__", member)
    pending = [member.__code__] if isinstance(member, FunctionType) else []
    while pending:
        code = pending.pop()
        yield code
        pending += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def article(made: Any) -> str:
    """Return an object's type with its article."""
    return "nothing" if made is None else with_article(type(made).__name__)
