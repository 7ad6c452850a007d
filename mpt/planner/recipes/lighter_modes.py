"""Which precision modes the planner may propose in place of the configured one: read from the modes' own files.

A file says it in literals, so that a new mode is planned and proposed without being named anywhere else:

- `HOLDS_FLOAT32 = True`: weights and activations are float32, so that whatever is proposed holds less.
- `PROPOSALS`: names that may be proposed, of which the first that the GPU computes with is.
- `NEEDS_BFLOAT16`: those of its names that need a GPU with bfloat16.
- `SCALED`: those of its names that have a loss scale, which some tricks refuse.
- `LOSSY = True`: it changes the learned result; proposed only if that is allowed.
- `RANK`: the order in which files are asked.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpt.config.finding.registry import INSTALLED, Plugin
from mpt.memory.relieving.relief import LAST_RANK


@dataclass(frozen=True)
class Lighter:
    """A file's modes as the planner may propose them."""

    names: tuple[str, ...]
    needs_bfloat16: tuple[str, ...]
    scaled: tuple[str, ...]
    is_lossy: bool
    rank: int

    def usable(self, has_bfloat16: bool, *, unscaled: bool = False) -> str | None:
        """Return the first of its modes that a GPU computes with; None if there is none."""
        names = (name for name in self.names if not (unscaled and name in self.scaled))
        return next(
            (name for name in names if has_bfloat16 or name not in self.needs_bfloat16), None
        )


def read_lighter(plugin: Plugin) -> Lighter:
    """Return the declarations of a mode's file."""
    literals = plugin.literals
    return Lighter(
        names=tuple(literals.get("PROPOSALS", ())),
        needs_bfloat16=tuple(literals.get("NEEDS_BFLOAT16", ())),
        scaled=tuple(literals.get("SCALED", ())),
        is_lossy=literals.get("LOSSY", False),
        rank=literals.get("RANK", LAST_RANK),
    )


def lighter_modes(*, lossy: bool) -> list[Lighter]:
    """Return the files with modes to propose, those that change the learned result or the others, in their order."""
    plugins = {plugin.path: plugin for plugin in map(find_mode, INSTALLED.names("precision"))}
    found = [read_lighter(plugin) for plugin in plugins.values()]
    return sorted(
        (one for one in found if one.names and one.is_lossy == lossy), key=lambda one: one.rank
    )


def find_mode(name: str) -> Plugin:
    """Return the plugin of a mode that there is."""
    plugin = INSTALLED.find("precision", name)
    assert plugin is not None, name
    return plugin


def is_lossy(mode: str | None) -> bool:
    """Return whether a mode, if one is named, changes the learned result."""
    return mode is not None and read_lighter(find_mode(mode)).is_lossy


def is_scaled(mode: str) -> bool:
    """Return whether a mode has a loss scale that a lighter one does without."""
    return mode in read_lighter(find_mode(mode)).scaled


def holds_float32(mode: str) -> bool:
    """Return whether a mode holds weights and activations in float32."""
    return bool(find_mode(mode).literals.get("HOLDS_FLOAT32", False))
