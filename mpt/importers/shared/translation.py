"""What becomes of another program's settings: our settings with their origin, and settings without a counterpart.

An importer takes from `given` what it understands. What is left when it is done has no counterpart and is written
into the YAML as a comment, so that nothing is lost without a word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mpt.config.checking.layers import SECTIONS
from mpt.config.text.yaml_text import printable, write_text

Convert = Callable[[Any], Any]
SAME: Convert = lambda value: value  # noqa: E731


class Importer(Protocol):
    """A file with one of the formats that `mpt import` reads."""

    NAME: str
    """The program, for people."""

    def recognises(self, given: Mapping[str, Any], words: str) -> bool:
        """Return whether these settings are of this program; `words` are the file's name and its command line."""

    def translate(self, into: Translation) -> None:
        """Take what is understood."""


@dataclass
class Translation:
    """Settings of another program on their way to ours."""

    given: dict[str, Any]
    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Our setting's path -> value and what it comes from."""
    left: dict[str, str] = field(default_factory=dict)
    """A setting that has no counterpart -> why, if there is more to say."""
    taken: str = "its settings"
    """The setting that was taken last, and its value: of which an error is."""

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the first of these settings that is given, and note others that say something else; null is not
        given."""
        found = {name: value for name in names if (value := self.given.pop(name, None)) is not None}
        taken = next(iter(found), "")
        if found:
            self.taken = f"{taken}, {show(found[taken])},"
        for name, value in found.items():
            if value != found[taken]:
                self.leave(name, value, f"{taken} goes before it")
        return found.get(taken, default)

    def put(self, path: str, value: Any, origin: str) -> None:
        """Set one of ours."""
        self.settings[path] = (value, origin)

    def move(self, name: str, path: str, convert: Convert = SAME, default: Any = None) -> None:
        """Set ours from one of theirs, or from its default there."""
        given = self.take(name)
        value = default if given is None else given
        if value is None:
            return
        origin = (
            f"{name}: {show(value)}"
            if given is not None
            else f"{name} is {show(value)} there by default"
        )
        try:
            self.put(path, convert(value), origin)
        except (TypeError, ValueError):
            self.leave(name, value, "its value is not understood")

    def move_all(self, names: Mapping[str, str]) -> None:
        """Set several of ours, each from one of theirs."""
        for name, path in names.items():
            self.move(name, path)

    def leave(self, name: str, value: Any, why: str) -> None:
        """Note a setting without a counterpart, with the remedy."""
        self.left[f"{name}: {show(value)}"] = why

    def leave_all(self, names: Iterable[str], why: str) -> None:
        """Note those of some settings that are given."""
        for name in names:
            if (value := self.take(name)) is not None:
                self.leave(name, value, why)

    def batch(self, per_pass: int, passes: int, names: tuple[str, ...], devices: int = 1) -> None:
        """Set the batch that is optimised, from that of one pass, the passes that are accumulated, and the devices."""
        counts = {
            name: count
            for name, count in zip(names[1:], (passes, devices), strict=False)
            if count > 1
        }
        if not counts:
            self.put("train.batch_size", per_pass, f"{names[0]}: {per_pass}")
            return
        whole = per_pass * math.prod(counts.values())
        factors = " x ".join(str(number) for number in (per_pass, *counts.values()))
        self.put(
            "train.batch_size", whole, f"{' x '.join((names[0], *counts))}: {factors} = {whole}"
        )
        self.put(
            "memory.micro_batch",
            per_pass,
            f"{names[0]}: {per_pass}, one pass of the {whole // per_pass}",
        )

    def updates(self, path: str, passes: float, every: int, origin: str) -> None:
        """Set a number of updates from one of passes, `every` of which make an update."""
        count = max(1, round(passes / every))
        self.put(
            path,
            count,
            f"{origin}: {passes:g} / {every} = {count} updates"
            if every > 1
            else f"{origin}: {count}",
        )

    def to_yaml(self, program: str, source: str) -> str:
        """Return the file: our settings by section, each with its origin, then settings without a counterpart."""
        lines = [f"# Translated by `mpt import` from {program}: {source}"]
        if "model.name" not in self.settings:
            lines += ["#", "# Its model is not one of mpt's: set model.name (`mpt list models`)."]
        for section in SECTIONS:
            own = {
                path: value
                for path, value in self.settings.items()
                if path.startswith(f"{section}.")
            }
            if own or section == "model":
                lines += ["", *section_lines(section, own)]
        lines += [""] if any("." not in path for path in self.settings) else []
        lines += [
            line
            for path, value in self.settings.items()
            if "." not in path
            for line in setting_lines(path, value, 0)
        ]
        for name, value in self.given.items():
            self.left.setdefault(f"{name}: {show(value)}", "")
        if self.left:
            lines += ["", "# Without a counterpart:"]
            lines += [
                f"#   {name}" + (f"    ({why})" if why else "") for name, why in self.left.items()
            ]
        return "\n".join(lines) + "\n"


def section_lines(section: str, own: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Return a section's lines. That of the model is there in any case, since it has to be filled in."""
    lines = [f"{section}:"]
    if section == "model" and "model.name" not in own:
        lines.append("  name: null")
    for name, found in within(own).items():
        lines += setting_lines(name, found, 2)
    return lines


def within(own: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Return a section's settings by name; those of a mapping in it (`lora.rank`) are put together."""
    found: dict[str, tuple[Any, str]] = {}
    for path, (value, origin) in own.items():
        name, _, inner = path.partition(".")[2].partition(".")
        before, origins = found.get(name, ({}, ""))
        together = "; ".join(filter(None, (origins, origin)))
        found[name] = ({**before, inner: value}, together) if inner else (value, origin)
    return found


def setting_lines(name: str, found: tuple[Any, str], indent: int) -> list[str]:
    """Return a setting with its origin next to it, or above one of several lines."""
    value, origin = found
    written = write_text({name: value}).rstrip("\n").splitlines()
    space = " " * indent
    if len(written) == 1:
        return [f"{space + written[0]:<32}  # {origin}"]
    return [f"{space}# {origin}", *(space + line for line in written)]


def show(value: Any) -> str:
    """Return a value on one short line."""
    text = (
        " ".join(write_text(value).removesuffix("...\n").split())
        if not isinstance(value, str)
        else value
    )
    text = printable(" ".join(text.split()))
    return text if len(text) <= 60 else text[:57] + "..."


def is_true(value: Any) -> bool:
    """Return whether a switch is on, however it is written."""
    return value is True or str(value).casefold() in ("true", "yes", "1", "on")


def epochs(number: float) -> str:
    """Return a number of epochs as a period."""
    return f"{number:g} epoch" if number == 1 else f"{number:g} epochs"
