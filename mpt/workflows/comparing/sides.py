"""Subjects that a user compares: configurations, runs, precision modes, changes of one of them."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpt.config.checking.precision_names import meant_by, resolve_precision_name
from mpt.config.finding.registry import INSTALLED
from mpt.config.load import change_precision, load_config
from mpt.config.schema import Config
from mpt.config.text.messages import nearest
from mpt.errors import CheckpointError, ConfigError
from mpt.run.records.layout import RunDirectory, find_run

YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class Side:
    """One of them. `run` and `checkpoint` are set if a run or one of its checkpoints was named."""

    label: str
    config: Config
    run: RunDirectory | None = None
    checkpoint: Path | None = None


def resolve_mode(word: str) -> str | None:
    """Return the canonical name of a precision mode, None if the word is none."""
    known = INSTALLED.names("precision")
    name = resolve_precision_name(word, known)[0]
    return name if name in known else None


def suggest(word: str, known: Sequence[str]) -> str:
    """Return a hint at the known word that was probably meant."""
    guess = meant_by(word) or nearest(word, known)
    return f"; did you mean {guess}?" if guess else ""


def is_config(word: str) -> bool:
    """Return whether a word names a YAML file, a shipped configuration, or one on standard input."""
    return word.endswith(YAML) or word.startswith("@") or word == "-"


def read_side(word: str, overrides: Sequence[str], runs: Path, allow: Sequence[str]) -> Side:
    """Return the configuration or the run that a word names. Raises MptError for one that there is not."""
    if is_config(word):
        return Side(word, load_config(Path(word), overrides, allow=allow))
    try:
        directory, chosen = find_run(word, runs)
    except CheckpointError as error:
        if resolve_mode(word):
            raise ConfigError(
                f"{word} is a precision mode: name a configuration or a run before it"
            ) from error
        raise CheckpointError(
            f"{error} A configuration is named by its file, which ends in .yaml."
        ) from error
    if not directory.config_path.is_file():
        raise CheckpointError(
            f"{directory.path} has no config.yaml, so it cannot be trained again."
        )
    return Side(word, load_config(directory.config_path, overrides, allow=allow), directory, chosen)


def vary(
    base: Config, variant: str, allow: Sequence[str], again: Callable[[Sequence[str]], Config]
) -> Config:
    """Return a configuration with settings changed, written `KEY=VALUE KEY=VALUE`, or in a precision mode by name.

    `again` reads the configuration anew with further overrides: applied after the user's own, another optimizer takes
    its own defaults and not those of the one before. Settings of precision are applied last.
    """
    try:
        words = shlex.split(variant)
    except ValueError as error:
        raise ConfigError(f"--variant: found {variant!r}, whose quotes do not close") from error
    if not words:
        raise ConfigError("--variant: found nothing; write KEY=VALUE, several in quotes")
    for word in words:
        if "=" not in word:
            raise ConfigError(f"--variant: found {word!r}; write KEY=VALUE, several in quotes")
    mode: str | None = None
    precise: list[str] = []
    others: list[str] = []
    for word in words:
        key, _, value = (part.strip() for part in word.partition("="))
        if key in ("precision", "precision.mode") and resolve_mode(value):
            mode = value
        else:
            (precise if key.startswith("precision.") else others).append(word)
    config = again(others) if others else base
    if mode is not None:
        config = change_precision(config, mode)
    return (
        load_config(config.to_data(), precise, allow=[*allow, *config.granted])
        if precise
        else config
    )
