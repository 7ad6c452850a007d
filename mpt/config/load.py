"""YAML, patches and command-line overrides to a checked `Config`; every mistake is reported at once.

The sources are laid over one another (`mpt.config.checking.layers`) and the result is checked
(`mpt.config.checking.checker`). Nothing here imports torch or a plugin's module.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpt.config.checking.checker import Checker
from mpt.config.checking.layers import read_layers
from mpt.config.checking.precision_names import resolve_precision_name
from mpt.config.finding.registry import INSTALLED, Registry
from mpt.config.options import Options, setting_of
from mpt.config.schema import Choice, Config
from mpt.config.text.plain_values import plain_tree
from mpt.config.text.yaml_text import Node, Problem, printable
from mpt.errors import ConfigError

PATHS = {"dataset": ("root", "test_root"), "model": ("weights",), "task": ("inception_weights",)}
"""Settings that name a file or folder: relative to the working directory, else to the configuration's folder. A part's
file names further ones of its own in the literal `PATHS`."""


def load_config(
    source: Path | str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    allow: Sequence[str] = (),
    patches: Sequence[Path] = (),
    registry: Registry = INSTALLED,
) -> Config:
    """Read a configuration from a YAML file, YAML text or plain values, and check it.

    Text is distinguished from a path by a line break or a colon followed by a space. `patches` are YAML files laid
    over it,
    `overrides` are `key.path=value` with a YAML value and win over both. `allow` names packages whose models may be
    used.
    Raises `ConfigError` with one line per mistake.
    """
    tree = plain_tree(source) if isinstance(source, Mapping) else None
    if tree is not None:
        with suppress(ConfigError):  # said below, with the lines of the text that it would be
            return _checked(tree, overrides, allow, patches, registry)
    config = _checked(source, overrides, allow, patches, registry)
    return beside_file(config, source) if isinstance(source, Path) else config


def _checked(
    source: Path | str | Mapping[str, Any] | Node,
    overrides: Sequence[str],
    allow: Sequence[str],
    patches: Sequence[Path],
    registry: Registry,
) -> Config:
    tree, problems = read_layers(source, overrides, patches, registry)
    # an empty tree would bring up mistakes that are none
    if any(problem.fatal for problem in problems):
        raise _error(problems)
    checker = Checker(tree, registry, allow)
    config = checker.config()
    problems += [later for later in checker.problems if not any(map(later.follows, problems))]
    if problems or config is None:
        raise _error(problems)
    refuse_impossible_paths(config)
    return config


def refuse_impossible_paths(config: Config) -> None:
    """Raise ConfigError for a path that no file can have, which the system would refuse wherever it is looked at."""
    for section in PATHS:
        choice = getattr(config, section)
        for name in paths_of(section, choice):
            written = setting_of(choice.settings, name)
            if isinstance(written, str) and (reason := impossible_path(written)):
                raise ConfigError(f"{section}.{name}: found {printable(written, 60)!r}, {reason}")


def impossible_path(written: str) -> str | None:
    """Return why no file can have this path, None if one may."""
    if re.match(r"(https?|s3|gs|hf)://", written):
        return "which is an address: nothing is downloaded; fetch the file, and write its path"
    try:
        Path(written).expanduser().lstat()
    except RuntimeError:
        return "which begins with a user that is not known here"
    except ValueError:
        return "which holds a NUL character"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "which is longer than a path may be"
    return None


def beside_file(config: Config, file: Path) -> Config:
    """Return the configuration with files and folders that are not in the working directory taken from next to its
    file.

    Each that is found there is named in the configuration's notes.
    """
    notes = list(config.notes)
    chosen = {"dataset": config.dataset, "model": config.model, "task": config.task}
    for section, choice in chosen.items():
        found = {
            name: beside
            for name in paths_of(section, choice)
            if (beside := path_beside(choice.settings, name, file))
        }
        notes += [
            f"{section}.{name}: there is no {setting_of(choice.settings, name)} in the working directory; "
            f"{beside}, beside the configuration, is taken"
            for name, beside in found.items()
        ]
        if found:
            chosen[section] = replace(choice, settings=choice.settings.model_copy(update=found))
    return replace(
        config,
        dataset=chosen["dataset"],
        model=chosen["model"],
        task=chosen["task"],
        notes=tuple(notes),
    )


def paths_of(section: str, choice: Choice) -> tuple[str, ...]:
    """Return the settings of a section that name a file or folder."""
    return (*PATHS[section], *choice.plugin.literals.get("PATHS", ()))


def path_beside(settings: Options, name: str, file: Path) -> str | None:
    """Return a setting's path in the folder of the configuration; None if it is to stay as it is written."""
    written = setting_of(settings, name)
    if not isinstance(written, str) or written.startswith("~") or Path(written).exists():
        return None
    beside = file.absolute().parent / written
    return None if Path(written).is_absolute() or not beside.exists() else str(beside)


def change_precision(config: Config, mode: str, registry: Registry = INSTALLED) -> Config:
    """Return the same run in another precision mode.

    Settings that the mode decides (`dtype`, `loss_scale`) take the new mode's defaults; the rest of the section stays.
    """
    data = config.to_data()
    kept = {
        key: value
        for key, value in data["precision"].items()
        if key not in ("mode", "dtype", "loss_scale")
    }
    known = registry.find("precision", resolve_precision_name(mode, registry.names("precision"))[0])
    fields = known.settings_class.model_fields if known else {}
    data["precision"] = {
        "mode": mode,
        **{key: value for key, value in kept.items() if key in fields},
    }
    return load_config(data, allow=config.granted, registry=registry)


def _error(problems: Sequence[Problem]) -> ConfigError:
    ordered = sorted(
        problems,
        key=lambda problem: (
            problem.place.source,
            problem.place.line or 0,
            problem.place.column or 0,
        ),
    )
    return ConfigError("\n".join(dict.fromkeys(str(problem) for problem in ordered)))
