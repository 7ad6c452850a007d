"""How a script reads its command line: its options with their values, noted where they are read.

`argparse` (so do Hugging Face's dataclasses), click and typer, jsonargparse (so does Lightning's LightningCLI), fire
and hydra. The options of each become those of a parser of `argparse`. A library that the script's text does not name is
not imported for that; mpt needs none of them but typer.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, get_args, get_origin
from unittest import mock

COMMANDS = ("click", "typer._click")
"""Modules of click, of which later releases of typer have their own."""
NAMED = {
    "fire": ("fire",),
    "hydra": ("hydra",),
    "jsonargparse": ("jsonargparse", "LightningCLI"),
}
"""A library -> the names by which a script's text tells that it may use it."""


@dataclass(frozen=True)
class Parsed:
    """A parser of a script's command line, and the values that it found."""

    parser: argparse.ArgumentParser
    values: argparse.Namespace
    is_joined: bool = False
    """Words are `name=value`, without hyphens."""

    def spelled(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """Return an option and its value as words of this command line."""
        return ("=".join(words).removeprefix("--"),) if self.is_joined else words

    @classmethod
    def of(cls, values: Mapping[str, Any], *, is_joined: bool = False) -> Parsed:
        """Return options of which only the values are known, by name: of their kinds."""
        parser = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
        for name, value in values.items():
            kind = type(value) if isinstance(value, bool) or value in (0, 1) else None
            parser.add_argument(f"--{name}", dest=name, type=kind, default=value)  # type: ignore[arg-type]
        return cls(parser, argparse.Namespace(**values), is_joined)


@contextmanager
def noting_options(
    words: Iterable[str], found: list[Parsed], texts: Iterable[str] = ()
) -> Iterator[None]:
    """Note the parsers that are given words of a script, or nothing, inside the block; `texts`: the script's own."""
    original, given = argparse.ArgumentParser.parse_known_args, {*words}

    def parse(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else [*args]
        values = original(self, args, namespace)
        if given.issuperset(words):
            # as they are now: scripts divide their batch among processes
            found.append(Parsed(self, argparse.Namespace(**vars(values[0]))))
        return values

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse))
        for command in commands():
            stack.enter_context(_noting_click(command, found))
        for library in named_in("\n".join(texts)):
            stack.enter_context(NOTING[library](found))
        yield


@functools.cache
def commands() -> list[Any]:
    """Return the classes of commands of click: one, and that of typer."""
    return [import_module(one).Command for one in COMMANDS if _is_there(one)]


@functools.lru_cache(maxsize=8)
def named_in(text: str) -> list[str]:
    """Return the libraries that a text names and that are installed."""
    named = (one for one, names in NAMED.items() if any(name in text for name in names))
    return [one for one in named if _is_there(one)]


def _is_there(module: str) -> bool:
    package = module.partition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None


@contextmanager
def _noting_click(command: Any, found: list[Parsed]) -> Iterator[None]:
    original = command.parse_args

    def parse(self: Any, ctx: Any, args: list[str]) -> Any:
        rest = original(self, ctx, args)
        found.append(Parsed(as_parser(self.params), argparse.Namespace(**ctx.params)))
        return rest

    with mock.patch.object(command, "parse_args", parse):
        yield


def as_parser(params: Iterable[Any]) -> argparse.ArgumentParser:
    """Return a parser with the options of a command of click."""
    parser = argparse.ArgumentParser(add_help=False)
    for one in params:
        names = [name for name in one.opts if name.startswith("--")]
        if not names:
            continue
        parser.add_argument(*names, dest=one.name, default=one.default, **_kind_of(one))
    return parser


def _kind_of(option: Any) -> dict[str, Any]:
    """Return what an option of click or typer takes, in the terms of `argparse`."""
    if getattr(option, "is_flag", False):
        return {"action": "store_true"}
    described = getattr(option, "type", None) or option.type_descriptor  # of typer's own click
    choices = getattr(described, "choices", None)
    if choices:
        return {"choices": [getattr(one, "value", one) for one in choices]}
    if type(option.default) is bool:
        return {"type": bool}
    name = getattr(described, "name", "")
    is_number = type(option.default) is int or name == "integer"
    return {"type": bool if name == "boolean" else int if is_number else None}


@contextmanager
def _noting_fire(found: list[Parsed]) -> Iterator[None]:
    core: Any = import_module("fire.core")
    original = core._MakeParseFn

    def make(function: Any, metadata: Any) -> Callable[[Any], Any]:
        parse = original(function, metadata)

        def noted(args: Any) -> Any:
            result = parse(args)
            positional, named = result[0]
            bound = inspect.signature(function).bind_partial(*positional, **named)
            bound.apply_defaults()
            found.append(Parsed.of(bound.arguments))
            return result

        return noted

    with mock.patch.object(core, "_MakeParseFn", make):
        yield


@contextmanager
def _noting_hydra(found: list[Parsed]) -> Iterator[None]:
    owner: Any = import_module("hydra.core.hydra_config").HydraConfig
    original = owner.set_config

    def note(self: Any, config: Any) -> Any:
        own = {name: value for name, value in _as_data(config).items() if name != "hydra"}
        found.append(Parsed.of(dict(_leaves(own)), is_joined=True))
        return original(self, config)

    with mock.patch.object(owner, "set_config", note):
        yield


def _as_data(config: Any) -> dict[str, Any]:
    data: dict[str, Any] = import_module("omegaconf").OmegaConf.to_container(config, resolve=False)
    return data


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping by their paths."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


@contextmanager
def _noting_jsonargparse(found: list[Parsed]) -> Iterator[None]:
    owner: Any = import_module("jsonargparse").ArgumentParser
    original = owner.parse_args
    is_inside = False

    def parse(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        was_inside, is_inside = is_inside, True
        try:
            values = original(self, *args, **kwargs)
        finally:
            is_inside = was_inside
        if not is_inside:
            found.extend(_typed(self, values))
        return values

    with mock.patch.object(owner, "parse_args", parse):
        yield


def _typed(parser: Any, values: Any) -> Iterator[Parsed]:
    """Yield the options of a parser of jsonargparse, and those of the sub-command that was chosen."""
    own = argparse.ArgumentParser(add_help=False)
    flat: dict[str, Any] = {}
    for action in parser._actions:
        parsers = getattr(action, "_name_parser_map", None)
        chosen = values.get(action.dest) if parsers else None
        if parsers and chosen in parsers:
            yield from _typed(parsers[chosen], values.get(chosen))
        hint = getattr(action, "_typehint", None)
        names = [one for one in action.option_strings if one.startswith("--")]
        if not names or hint is None:
            continue
        literals = [*_literals(hint)]
        kind = next((one for one in (bool, int) if hint is one), None)
        choices = None if kind else literals or None
        settings: dict[str, Any] = {"type": kind, "choices": choices, "default": action.default}
        own.add_argument(*names, dest=action.dest, **settings)
        flat[action.dest] = values.get(action.dest)
    yield Parsed(own, argparse.Namespace(**flat))


def _literals(hint: Any) -> Iterator[Any]:
    """Yield the values that a type's literals name."""
    for one in get_args(hint):
        if get_origin(hint) is Literal:
            yield one
        else:
            yield from _literals(one)


NOTING: Mapping[str, Callable[[list[Parsed]], Any]] = {
    "fire": _noting_fire,
    "hydra": _noting_hydra,
    "jsonargparse": _noting_jsonargparse,
}
"""A library -> what notes its options."""
