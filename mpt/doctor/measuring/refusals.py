"""A step that float32 takes and the mode does not: torch, or the model, raises in it.

Such are a mask value beyond float16 (`masked_fill(-1e9)`), a matrix decomposition without a half kernel, two dtypes
that meet in one operator. It is a finding like a wrong number, with the line and the module to keep in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
from torch import nn

from mpt.nn.shared.named_modules import named_modules
from mpt.outside.own_code import first_line, is_module, is_own_file, library_of


@dataclass(frozen=True)
class Refusal:
    """An exception, and the place where it was raised."""

    text: str
    place: str
    """File, line and function; "" if neither the user's code nor a module was running."""
    module: str
    """Dotted name of the innermost module of the run that was running; "" if none was."""

    @classmethod
    def of(cls, error: Exception, modules: Mapping[str, nn.Module]) -> Refusal:
        """Read an exception; `modules` are the run's networks by name. Raises it again if memory ran out."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        frames = list(walk_tb(error.__traceback__))
        names = {id(module): name for name, module in named_modules(modules)}
        inside = [
            names[id(owner)]
            for frame, _ in frames
            if id(owner := frame.f_locals.get("self")) in names
        ]
        lines = [(frame, line) for frame, line in frames if is_own_file(frame.f_code.co_filename)]
        lines = lines or [(frame, line) for frame, line in frames if is_model(frame)]
        place = ""
        if lines:
            frame, line = lines[-1]
            place = f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
        return cls(first_line(error), place, inside[-1] if inside else "")

    def describe(self) -> str:
        """Return file, line and module, in words."""
        module = f"module {self.module}" if self.module else ""
        return ", ".join(filter(None, (self.place, module)))


def is_model(frame: FrameType) -> bool:
    """Return whether a frame is of a module's method and not of torch's own code."""
    return is_module(frame.f_locals.get("self")) and library_of(frame) != "torch"
