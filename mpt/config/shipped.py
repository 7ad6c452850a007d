"""The configurations that come with mpt: `@dcgan_amp` for their files, wherever mpt is installed.

In a checkout they lie next to the package in `configs/`, in an installation inside it.
"""

from __future__ import annotations

import itertools
import re
from difflib import get_close_matches
from pathlib import Path

from mpt.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
MARK = "@"


def folder() -> Path:
    """Return where the configurations lie."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def shipped_configs() -> dict[str, Path]:
    """Return the files by name, patches left out."""
    files = sorted(folder().glob("*.yaml"))
    return {path.stem: path for path in files if not path.stem.endswith(".plan")}


def shipped_presets() -> dict[str, Path]:
    """Return the patches for usual cards by name, such as `resnet50_imagefolder_8gb` (`mpt plan presets`)."""
    return {path.stem: path for path in sorted((folder() / "presets").glob("*.yaml"))}


def find_shipped(name: str) -> Path:
    """Return the file of a configuration, or of a preset. Raises ConfigError for a name that there is not."""
    known = {**shipped_configs(), **shipped_presets()}
    name = name.removeprefix(MARK).removesuffix(".yaml")
    if name not in known:
        near = [one for one in shipped_configs() if name and one.startswith(f"{name}_")][:5]
        near = near or get_close_matches(name, known, 1)
        if near:
            said = f"did you mean {' or '.join(MARK + one for one in near)}? "
            said += "`mpt list configs` lists all that mpt comes with"
        else:
            said = f"mpt comes with the configurations {', '.join(shipped_configs())}"
            presets = list(shipped_presets())
            said += f", and with presets of some for cards, such as {presets[0]}" if presets else ""
        raise ConfigError(f"{MARK}{name[:60]}: {said}")
    return known[name]


def described() -> dict[str, str]:
    """Return name -> what the file's head says it is."""
    return {name: headline(path) for name, path in shipped_configs().items()}


def headline(path: Path) -> str:
    """Return the first sentence of a file's head, commands left out."""
    head = itertools.takewhile(lambda line: line.startswith("#"), path.read_text("utf-8").splitlines())
    lines = [line.lstrip("# ").strip() for line in head]
    text = " ".join(line for line in lines if line and not line.startswith("mpt "))
    return re.split(r"(?<=[.;:])\s", text, maxsplit=1)[0].rstrip(".:;")
