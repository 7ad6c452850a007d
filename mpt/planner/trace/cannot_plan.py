"""Why something cannot be planned, in one line: the operation, in which module, on which line."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from textwrap import shorten
from types import FrameType
from urllib.error import URLError

from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from mpt.errors import MptError, PartError
from mpt.outside.own_calls import explain_call
from mpt.outside.own_code import is_in
from mpt.planner.device import fake_device
from mpt.planner.device.device_guard import lost_error
from mpt.planner.trace.recorder import Recorder

DEVICES_MEET = ("found at least two devices", "found two different devices")
"""Words of torch from 2.12 on, and before."""
NO_CARD = ("compiled with cuda", "linked with support for cuda", "nvidia", "no cuda gpus")
"""Words of torch where a card is used that is not there."""
OWN_FOLDER = f"{Path(__file__).parents[2]}{os.sep}"
INSTALLED = ("site-packages", "dist-packages")
"""Folders of installed libraries."""
LONGEST = 220
"""Letters of an error that are shown."""
COLOURS = re.compile(r"\x1b\[[\d;]*m")
LOOKS_AT_VALUES = (
    "the step looks at a tensor's value (.item(), .numpy(), float(tensor) or `if tensor:`)"
)

STRIDED_NESTED = "_nested_tensor_from_tensor_list"
"""The operator that makes a nested tensor whose layout is not jagged."""
NESTED = (
    "nested tensors are planned in the layout torch.jagged alone, with attention on a card: make them with "
    "layout=torch.jagged, or plan the step with a padded batch"
)


class CannotPlan(MptError):
    """The model does something that has no answer without values, or without a real GPU."""

    exit_code = 2


@contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Turn any error inside into one line with the reason, the module and the line."""
    lost_error()
    try:
        yield
    except Exception as seen:
        error = lost_error() or seen
        if isinstance(error, MptError):
            raise error from None
        if (wrong_call := explain_call(error)) is not None:
            raise PartError(wrong_call) from error
        raise CannotPlan(
            f"cannot plan: {reason_of(error)}, at {place_of([seen, error], recorder)}"
        ) from error


def reason_of(error: BaseException) -> str:
    """Return in plain words a question of an operator that a fake tensor cannot answer."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    text = shorten(said.strip().split("\n")[0], LONGEST, placeholder=" …")
    if isinstance(error, DataDependentOutputException):
        operator = str(error.func)
        if "_local_scalar_dense" in operator or "is_nonzero" in operator or "equal" in operator:
            return LOOKS_AT_VALUES
        return f"{operator} depends on tensor values"
    if STRIDED_NESTED in str(getattr(error, "func", "")):
        return NESTED
    if ".numpy()" in text or "FakeTensor.__format__" in text:
        return LOOKS_AT_VALUES
    if isinstance(error, DynamicOutputShapeException):
        return f"the shape of {error.func}'s result depends on tensor values"
    if isinstance(error, UnsupportedOperatorException):
        return f"{error.func} has no shape rule"
    meet = any(words in text for words in DEVICES_MEET)
    if meet and "cuda" not in text:
        return (
            "tensors of the CPU and of the GPU meet: the model makes one on a device of its own choice "
            "instead of its input's (device=x.device)"
        )
    # a build of torch with CUDA makes a fake tensor on a card that is not there
    if meet or any(words in text.lower() for words in NO_CARD):
        moves = "the model moves itself to a GPU (.cuda() or a fixed device) instead of following its inputs"
        return f"{moves} ({plain(text)})"
    if operator_without_kernel := re.match(r"Could not run '([^']+)'", text):
        return (
            f"{operator_without_kernel[1]}, which it calls, has no rule for a GPU that is not there"
        )
    if takes_functions := re.match(r"There was no rule registered for \w*Operator (\w+)", text):
        return f"{takes_functions[1]}, which takes functions, is not followed: write it as an if or a loop of Python"
    if isinstance(error, URLError):
        return f"it downloads a file, which failed ({error.reason}): a file that is in its cache is not fetched again"
    text = text or asserted_by(error)
    words = f"{type(error).__name__}: {plain(text)}" if text else type(error).__name__
    return "; ".join([words, *getattr(error, "__notes__", ())])


def asserted_by(error: BaseException) -> str:
    """Return the line of an assertion that has no words; nothing for other errors."""
    if not isinstance(error, AssertionError):
        return ""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    line = linecache.getline(frames[-1][0].f_code.co_filename, frames[-1][1])
    return shorten(line, LONGEST, placeholder=" …")


def plain(text: str) -> str:
    """Return torch's words without the name of our device and without colours."""
    return COLOURS.sub("", text).replace(fake_device.DEVICE, "the stand-in for a GPU")


def place_of(errors: list[BaseException], recorder: Recorder) -> str:
    """Return the innermost module of the tracebacks, outer ones first, and the innermost line outside torch.

    One in an installed library is followed by the line of the script from which it was called.
    """
    module, line, of_script = "", "an unknown line", ""
    for frame, number in chain.from_iterable(
        traceback.walk_tb(error.__traceback__) for error in errors
    ):
        path = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            module = recorder.module_names.get(id(owner), type(owner).__name__)
        if is_outside(path):
            line = f"{path}:{number}"
            of_script = of_script if is_installed(path) else line
    for error in errors:
        if isinstance(error, SyntaxError) and error.filename:
            line = of_script = f"{error.filename}:{error.lineno}"
    if of_script not in ("", line):
        line = f"{line}, called at {of_script}"
    return f"{module} ({line})" if module else line


def outer_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside torch, of a frame and its callers."""
    while frame is not None and not is_outside(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def line_of(frame: FrameType | None) -> str | None:
    """Return the innermost line outside torch, of a frame and its callers.

    None within torch's data loader, which reads a seed, and as it draws weights, some of them again.
    """
    while frame is not None and not is_outside(frame.f_code.co_filename):
        if frame.f_globals.get("__name__", "").startswith(("torch.utils.data", "torch.nn.init")):
            return None
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


def is_installed(path: str) -> bool:
    """Return whether a file is of an installed library or of mpt, and no script's."""
    return any(folder in path for folder in INSTALLED) or path.startswith(OWN_FOLDER)


@functools.cache
def is_outside(path: str) -> bool:
    """Return whether a file is none of torch, numpy, the planner, Python and its wrappers, which no script can change.

    Code that has no file is not either.
    """
    is_python = path.startswith(sysconfig.get_path("stdlib")) and "site-packages" not in path
    is_file = not path.startswith("<") and Path(path).name != "typing_extensions.py"
    return is_file and not is_python and not is_in(path, "torch", "numpy", "mpt.planner")
