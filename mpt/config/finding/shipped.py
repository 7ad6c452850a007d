"""The configurations that come with mpt: `@dcgan_amp` for their files, wherever mpt is installed.

Those of mpt's own models lie next to the package in `configs/` in a checkout, and inside it in an installation; a part
package, one of mpt's or one from outside, has its own in its folder `configs`. Presets lie in `presets` below these.
"""

from __future__ import annotations

import itertools
import re
from difflib import get_close_matches
from pathlib import Path

from mpt.config.finding.part_packages import outside_packages, packages_below
from mpt.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2]
MARK = "@"
PLAN = ".plan"
"""How the name of a plan's recipe for a configuration ends."""


def folders() -> list[Path]:
    """Return the folders of configurations, mpt's own first."""
    inside = PACKAGE / "configs"
    own, *systems = packages_below(PACKAGE, PACKAGE.name)
    others = [package.folder / "configs" for package in (*systems, *outside_packages())]
    return [inside if inside.is_dir() else own.folder.parent / "configs", *others]


def _files(pattern: str) -> dict[str, Path]:
    """Return the files of all folders by name, sorted; of two with one name the first folder's."""
    found = {path.stem: path for folder in reversed(folders()) for path in folder.glob(pattern)}
    return dict(sorted(found.items()))


def shipped_configs() -> dict[str, Path]:
    """Return the files by name, patches left out."""
    return {name: path for name, path in _files("*.yaml").items() if not name.endswith(PLAN)}


def shipped_presets() -> dict[str, Path]:
    """Return the patches for usual cards by name, such as `resnet50_imagefolder_8gb` (`mpt plan presets`)."""
    return _files("presets/*.yaml")


def shipped_files() -> dict[str, Path]:
    """Return all that `@NAME` may mean: configurations, presets, and plans' recipes as `NAME.plan`."""
    return {**_files("*.yaml"), **shipped_presets()}


def find_shipped(name: str) -> Path:
    """Return the file of a configuration, or of a preset. Raises ConfigError for a name that there is not."""
    known = shipped_files()
    name = name.removeprefix(MARK).removesuffix(".yaml")
    if name not in known:
        near = near_names(name)
        if near:
            said = f"did you mean {' or '.join(MARK + one for one in near)}? "
            said += "`mpt list configs` lists all that mpt comes with"
        else:
            said = f"mpt comes with the configurations {', '.join(shipped_configs())}"
            presets = list(shipped_presets())
            said += f", and with presets of some for cards, such as {presets[0]}" if presets else ""
        raise ConfigError(f"{MARK}{name[:60]}: {said}")
    return known[name]


def near_names(name: str) -> list[str]:
    """Return the likely meanings of a wrong name: the configurations of that model, or the name most like it."""
    of_model = [one for one in shipped_configs() if name and one.startswith(f"{name}_")][:5]
    return of_model or get_close_matches(name, shipped_files(), 1)


def described() -> dict[str, str]:
    """Return name -> the first sentence of the file's head."""
    return {name: headline(path) for name, path in shipped_configs().items()}


def headline(path: Path) -> str:
    """Return the first sentence of a file's head, commands left out."""
    head = itertools.takewhile(
        lambda line: line.startswith("#"), path.read_text("utf-8").splitlines()
    )
    lines = [line.lstrip("# ").strip() for line in head]
    text = " ".join(line for line in lines if line and not line.startswith("mpt "))
    return re.split(r"(?<=[.;:])\s", text, maxsplit=1)[0].rstrip(".:;")
