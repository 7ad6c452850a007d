"""Sides of a comparison: modes, configurations, or one configuration with settings changed, each with a label."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mpt.config.finding.registry import INSTALLED
from mpt.config.load import change_precision, load_config
from mpt.config.schema import Config
from mpt.config.text.yaml_text import write_text
from mpt.errors import ConfigError
from mpt.workflows.comparing.compare_progress import Pace
from mpt.workflows.comparing.sides import is_config, resolve_mode, suggest, vary

DEMO: dict[str, Any] = {
    "model": {"name": "small_cnn", "image_size": 16, "features": 16},
    "dataset": {"name": "digits"},
    "optimizer": {"name": "adam", "lr": 2e-3},
    "train": {"steps": 300, "batch_size": 64, "log_every": 25, "evaluate_every": 100, "threads": 1},
}
"""The default subject of a comparison: a small classifier of the package's digits, which a few seeds decide."""


class Sides:
    """The configurations that are compared, by label, and the name of this comparison."""

    def __init__(
        self, configs: Mapping[str, Config], base: Config, *, by_mode: bool, is_demo: bool = False
    ) -> None:
        self.configs, self.base, self.by_mode, self.is_demo = configs, base, by_mode, is_demo
        self.pace: Pace | None = None
        """How long a run takes, if it was tried."""

    def steps(self, label: str) -> int:
        """Return the steps of a side's run; 0 if they are not known."""
        return self.configs[label].train.steps or (self.pace.steps if self.pace is not None else 0)

    @property
    def identity(self) -> str:
        """Return text that is the same for the same comparison: a folder with another one is not gone on with."""
        if self.by_mode:
            return without_name(self.base).to_yaml()
        return write_text(
            {label: without_name(config).to_data() for label, config in self.configs.items()}
        )

    @property
    def name(self) -> str:
        """Return the comparison's name if the user gives none."""
        if not self.by_mode:
            return f"compare-{'-'.join(map(slug, self.configs))}"[:90]
        subject = self.base.name or self.base.model.name.replace(":", "-")
        return f"compare-{subject}-{'-'.join(self.configs)}"

    def run_name(self, label: str, seed: int) -> str:
        """Return the name of a side's run with a seed."""
        names = [slug(each) for each in self.configs]
        own = names[list(self.configs).index(label)]
        number = f"-{list(self.configs).index(label) + 1}" if names.count(own) > 1 else ""
        return f"{own}{number}-seed-{seed}"

    @property
    def checked(self) -> Sequence[str]:
        """The sides that are built before the first is trained."""
        return list(self.configs)[1:]

    @property
    def granted(self) -> tuple[str, ...]:
        """The packages that the sides' models come from."""
        return tuple({package for config in self.configs.values() for package in config.granted})

    @property
    def models_differ(self) -> bool:
        """Return whether the sides train different models."""
        return len({config.model.name for config in self.configs.values()}) > 1


def without_name(config: Config) -> Config:
    """Return a configuration without the name of its run."""
    return dataclasses.replace(config, name=None)


def slug(label: str) -> str:
    """Return a label as part of a folder's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.")[:60] or "side"


def read_sides(
    words: Sequence[str],
    source: Config | Path | None = None,
    *,
    variants: Sequence[str] = (),
    overrides: Sequence[str] = (),
    device: str | None = None,
    allow: Sequence[str] = (),
    alone: bool = False,
) -> Sides:
    """Return the sides that the words, configurations or modes, and the variants of `source` name.

    `source` is the configuration, by default a small classifier; `alone` allows a single side. Raises ConfigError for
    anything that makes no comparison.
    """
    files = [word for word in words if is_config(word)]
    modes = check_modes([word for word in words if not is_config(word)])
    check_words(files, modes, variants, source, alone=alone)
    options = [f"train.device={device}"] if device else []
    # a plan alongside would take time from the timed step
    options.append("train.plan_memory=false")

    def load(source: Any, more: Sequence[str] = ()) -> Config:
        return load_config(source, [*overrides, *options, *more], allow=allow)

    if len(files) > 1:
        configs = {
            label: load(Path(file)) for label, file in zip(label_files(files), files, strict=True)
        }
        return Sides(configs, next(iter(configs.values())), by_mode=False)
    named = Path(files[0]) if files else source
    trained = named.to_data() if isinstance(named, Config) else named or DEMO
    base = load(trained)
    chosen = {mode: in_mode(base, mode, word, overrides, allow) for mode, word in modes.items()}
    by_mode = not variants and len(modes) > 1
    if alone:
        chosen = chosen or {base.precision.mode: base}
    elif not by_mode and len(modes) < 2:
        chosen = with_base(base, chosen)
    for variant in variants:
        if variant in chosen:
            raise ConfigError(f"--variant: {variant!r} was given twice.")
        chosen[variant] = vary(base, variant, allow, partial(load, trained))
    return Sides(chosen, base, by_mode=by_mode, is_demo=named is None)


def check_words(
    files: Sequence[str],
    modes: Mapping[str, str],
    variants: Sequence[str],
    source: Config | Path | None,
    *,
    alone: bool,
) -> None:
    """Raise ConfigError for words that name no two sides, or sides of several kinds."""
    if files and source is not None:
        raise ConfigError(
            f"mpt compare: {files[0]} and --config name configurations both; give one of the two."
        )
    if len(files) > 1 and (modes or variants):
        raise ConfigError(
            "mpt compare: modes and variants are of one configuration; name one file with them."
        )
    varies_one = alone or (bool(variants) and not modes)
    if len(files) + len(modes) + len(variants) < 2 and not varies_one:
        raise ConfigError(
            "mpt compare: name two precision modes at least, such as `mpt compare fp32 amp`, two configurations, two "
            "runs, or what is changed by --variant KEY=VALUE."
        )


def with_base(base: Config, chosen: Mapping[str, Config]) -> dict[str, Config]:
    """Return the sides with the configuration as it is first. Raises ConfigError if one of them is the same."""
    label = base.precision.mode if chosen else "as it is"
    if label in chosen:
        raise ConfigError(
            f"mpt compare: the configuration is in {label} already; name two precision modes at least."
        )
    return {label: base, **chosen}


def label_files(files: Sequence[str]) -> list[str]:
    """Return a label for each file: its stem, or the whole path if stems are the same. Raises ConfigError."""
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise ConfigError(
            f"mpt compare: {twice} was given twice; a configuration cannot be compared with itself."
        )
    stems = [Path(file).stem for file in files]
    return [
        stem if stems.count(stem) == 1 else file for stem, file in zip(stems, files, strict=True)
    ]


def check_modes(words: Sequence[str]) -> dict[str, str]:
    """Return canonical name -> name as it was written, each mode once. Raises ConfigError."""
    modes = [resolve_mode(word) for word in words]
    unknown = [word for word, mode in zip(words, modes, strict=True) if mode is None]
    if unknown:
        known = INSTALLED.names("precision")
        if unknown[0] == "%":
            raise ConfigError(
                "mpt compare: '%' is no precision mode; a margin is written without a space: --margin 1%"
            )
        raise ConfigError(
            f"mpt compare: {unknown[0]!r} is no precision mode; allowed are {', '.join(known)}, or finished runs "
            f"only (a mode and a run cannot be compared with each other){suggest(unknown[0], known) or '.'}"
        )
    for index, mode in enumerate(modes):
        if mode in modes[:index]:
            earlier = words[modes.index(mode)]
            raise ConfigError(
                f"mpt compare: {mode} was given twice ({earlier}, {words[index]}); give each mode once."
            )
    return {mode: word for mode, word in zip(modes, words, strict=True) if mode is not None}


def in_mode(
    base: Config, mode: str, word: str, overrides: Sequence[str], allow: Sequence[str]
) -> Config:
    """Return the config in another mode. The user's settings of `precision` stay, as far as the mode has them."""
    if any(
        override.split("=")[0].strip() in ("precision", "precision.mode") for override in overrides
    ):
        raise ConfigError(
            "mpt compare: the modes are named as words; leave precision.mode out of the overrides."
        )
    if mode == base.precision.mode and word == mode:
        return base
    # Changing the mode gives dtype and loss scale back to the mode; explicit settings are put on top.
    asked = [override for override in overrides if override.startswith("precision.")]
    changed = change_precision(base, word)
    return load_config(changed.to_data(), asked, allow=allow) if asked else changed
