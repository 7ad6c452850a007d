"""A training script as it stands: executed as `python FILE WORDS...` would, and stopped between its steps.

Nothing in the script need be written for a plan. It runs in a greenlet, which is a second stack in the same thread, and
is let go on until its training begins: that was the build. From there it goes on step by step. A step is over where the
next begins after all optimizers have stepped: a batch is asked for, gradients are cleared or a network is called. So
what a script does after an update (its moving average, a validation) belongs to the step before, and the networks of a
GAN that are updated by turns make one step. Of a script without an optimizer of torch's (it updates its weights itself,
or by a class of its own, as fastai does), a step is over after a backward pass, and `zero_grad` of a network begins the
first.

What it would write is kept apart (`mpt.planner.own.execution.written`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

from mpt.errors import ConfigError
from mpt.planner.answers.edits import edited
from mpt.planner.own.execution.created import Created, noting_what_is_made
from mpt.planner.own.execution.evaluations import Evaluations, is_trained
from mpt.planner.own.execution.source import Made, Source
from mpt.planner.own.execution.surroundings import LAUNCHED, PROCESSES, Surroundings
from mpt.planner.own.execution.written import Tail, Written
from mpt.planner.own.text.batch_size import BatchSize, find_batch_size
from mpt.planner.own.text.command_lines import Parsed, noting_options
from mpt.planner.own.text.names import named_networks
from mpt.planner.own.text.notebooks import (
    is_notebook,
    let_find,
    names_in_notebooks,
    parts_of,
    started_by,
)
from mpt.planner.own.text.places import Standing, is_own, renamed, standing
from mpt.planner.trace.cannot_plan import is_installed, is_outside, line_of

MOST_ALONE = 32
"""Steps of one optimizer after which another that has not stepped is no longer waited for."""
PATIENCE = 240.0
"""Seconds that a script may take to its next step."""
STARTERS = (multiprocessing, torch.multiprocessing)
NEXT = "__next__"
INLINE = ("<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
"""Functions in whose text no statement can be written."""


def beginning_of(source: Source) -> Callable[..., Made]:
    """Return the factory of a script's steps; it takes `batch_size` if the script has one in its words or its text."""
    batch = find_batch_size(source.words, parts_of(source.where))
    if batch is None:
        return lambda: Script(source, None, 0).begin()

    def build(batch_size: int = batch.size) -> Made:
        return Script(source, batch, batch_size).begin()

    return build


class Ended(ConfigError):
    """A script came to its end, and had no further step."""


class Script:
    """A script that is being executed."""

    def __init__(self, source: Source, batch: BatchSize | None, size: int) -> None:
        self.source, self.batch, self.size = source, batch, size
        self.words = source.words if batch is None else batch.words(source.words, size)
        self.module = ModuleType("__main__")
        self._run = greenlet(self._execute)
        self._surroundings = Surroundings()
        self._written = Written(os.getcwd(), str(Path(source.where).parent))
        self._said = Tail()
        self._created = Created()
        self._parsed: list[Parsed] = []
        self._parts = parts_of(source.where)
        self._evaluations = Evaluations()
        self._stepped: Counter[int] = Counter()
        """Optimizer -> its steps in this step."""
        self._updated: set[int] = set()
        """Parameters that were updated in this step."""
        self._backward = 0
        """Its backward passes in this step."""
        self._given_up: set[int] = set()
        self._waited = (0, 0, 0)
        """Steps, optimizers and backward passes when something was waited for last."""
        self._before = set(sys.modules)
        folder = Path(source.where).parent
        self._packages = packages_of(folder)
        above = [str(folder.parents[len(self._packages) - 1])] if self._packages else []
        # the current folder last, for a script that is started by `python -m tools.train`
        self._path = [str(folder), *above, *sys.path[1:], os.getcwd()]
        self._is_begun = False
        self._taken = 0
        """Its training steps that are over."""
        self._since = 0.0

    def begin(self) -> Made:
        """Execute it up to its first step. Raises ConfigError if there is none."""
        try:
            self._continue()
        except BaseException:
            self.stop()
            raise
        variables, places = self._variables()
        return Made(
            self._continue,
            named_networks(variables, self._renamed(places)),
            variables=variables,
            places=places,
            parsed=self._parsed,
            stop=self.stop,
            notes=self.notes,
        )

    def _variables(self) -> tuple[dict[str, Any], dict[str, Standing]]:
        """Return what it has where it stands, by name, and where the functions stand whose variables those are.

        The outermost function counts that has a value: it is called once, and others maybe many times.
        """
        variables: dict[str, Any] = {}
        places: dict[str, Standing] = {}
        seen: set[int] = set()
        for frame in self._frames():
            for name, value in frame.f_locals.items():
                if name not in variables and id(value) not in seen:
                    variables[name] = value
                    seen.add(id(value))
                    places[name] = standing(frame)
        return variables, places

    def _renamed(self, places: Mapping[str, Standing]) -> set[str]:
        """Return the variables that are one network after another: of a list, which names it too."""
        own = ((name, one) for name, one in places.items() if one.is_own)
        return {name for name, one in own if name in renamed(one.file, one.line)}

    def notes(self) -> list[str]:
        """Return what a plan of it assumes."""
        found = [self.batch.note] if self.batch and self.batch.note else []
        if is_notebook(name := Path(self.source.where).name):
            found.append(f"{name}[2] is its second cell of code: they are counted as by `Run All`")
        if self._given_up:
            found.append(
                f"{len(self._given_up)} optimizers did not step in {MOST_ALONE} steps of another: "
                "what they need is not planned"
            )
        if self._evaluations.left_out:
            found.append(
                f"{self._evaluations.left_out} evaluations before the first step were left out: they had the shapes of "
                "others"
            )
        if self._written.count:
            found.append(
                f"the script was executed up to its third step; what it wrote ({self._written.count} files) was "
                "kept apart and is gone"
            )
        return found

    def stop(self) -> None:
        """End it where it stands."""
        with contextlib.suppress(BaseException), self._in_script():
            self._run.throw(GreenletExit)
        self._written.drop()
        for name in set(sys.modules) - self._before:  # of its folder, to be imported anew
            path = getattr(sys.modules[name], "__file__", None)
            if path and is_outside(path) and not is_installed(path):
                del sys.modules[name]

    def _continue(self) -> None:
        """Let it go on to the next step, or to its end after the last. Raises Ended if there was none."""
        self._stepped.clear()
        self._updated.clear()
        self._backward = 0
        self._since = time.monotonic()
        with self._in_script():
            self._run.switch()
        if self._run or (self._is_begun and (self._stepped or self._backward)):
            self._taken += self._is_begun
            self._is_begun = True
            return
        words = self._said.last()
        said = f"It said last: {words}" if words else started_by(self.source.where)
        raise Ended(
            f"{self.source}: it came to its end after {self._taken or 'no'} training step{'s' * (self._taken != 1)}; a "
            f"plan takes two, in each of which its optimizers step{f'. {said}' if said else ''}"
        )

    def _execute(self) -> None:
        path = Path(self.source.where)
        known = names_in_notebooks() if is_notebook(str(path)) else {"__file__": str(path)}
        self.module.__dict__.update(known, __builtins__=__builtins__)
        if self._packages:  # as by `python -m package.train`
            self.module.__package__ = ".".join(self._packages)
        try:
            for name, text in self._parts.items():
                let_find(name, text)
                edits = [one for one in self.source.edits if one.file == name]
                text = edited(text, edits) if edits else text
                text = self.batch.text(name, text, self.size) if self.batch else text
                exec(compile(text, name, "exec"), self.module.__dict__)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise ConfigError(f"{self.source}: {self._last_words(stop.code)}") from None
        except KeyError as error:
            if error.args and error.args[0] in (PROCESSES, *LAUNCHED):
                error.add_note(
                    f"for a script that torchrun starts write {PROCESSES}=2 before the command"
                )
            raise

    def _last_words(self, code: Any) -> str:
        words = code if isinstance(code, str) else self._said.last() or f"exit code {code}"
        return f"it ends the program: {words}"

    @contextmanager
    def _in_script(self) -> Iterator[None]:
        """Let what is executed inside the block find itself in the script's own process."""
        with ExitStack() as stack, open(os.devnull) as nothing:
            changes: list[AbstractContextManager[Any]] = [
                mock.patch.object(sys, "argv", [self.source.where, *self.words]),
                mock.patch.object(sys, "path", self._path),
                mock.patch.object(sys, "stdin", nothing),
                self._as_main(),
                self._surroundings.entered(),
                contextlib.redirect_stdout(self._said),
                contextlib.redirect_stderr(self._said),
                # a script is executed several times in this process, whose signals are its own
                mock.patch.object(signal, "signal"),
                *(mock.patch.object(one, "set_start_method") for one in STARTERS),
                noting_what_is_made(self._created),
                noting_options(self.words, self._parsed, self._parts.values()),
                self._written.elsewhere(),
                mock.patch.object(
                    torch.autograd, "backward", self._counting(torch.autograd.backward)
                ),
                mock.patch.object(nn.Module, "__call__", self._calling(nn.Module.__call__)),
                mock.patch.object(
                    nn.Module, "zero_grad", self._before_call(nn.Module.zero_grad, True)
                ),
                mock.patch.object(Optimizer, "zero_grad", self._before_call(Optimizer.zero_grad)),
                mock.patch.object(GradScaler, "step", self._scaled(GradScaler.step)),
                mock.patch.object(
                    _BaseDataLoaderIter, NEXT, self._before_call(_BaseDataLoaderIter.__next__)
                ),
            ]
            for one in changes:
                stack.enter_context(one)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            yield

    @contextmanager
    def _as_main(self) -> Iterator[None]:
        # not by `mock.patch.dict`, which takes imported modules out again
        before = sys.modules["__main__"]
        sys.modules["__main__"] = self.module
        try:
            yield
        finally:
            sys.modules["__main__"] = before

    def _before_call(
        self, function: Callable[..., Any], without_optimizer: bool = False
    ) -> Callable[..., Any]:
        """Return a function at whose call a step may begin, be it of a script that has no optimizer."""

        @functools.wraps(function)  # Accelerate looks at what `zero_grad` takes
        def call(*args: Any, **kwargs: Any) -> Any:
            if getcurrent() is self._run:
                if torch.is_grad_enabled() and self._is_over(without_optimizer):
                    self._run.parent.switch()
                elif time.monotonic() - self._since > PATIENCE:
                    self._since = math.inf
                    raise ConfigError(
                        f"{self.source}: after {PATIENCE:.0f} s it has not come to its next training step; it is at "
                        f"{line_of(sys._getframe(1))}. If that is an evaluation, shorten it by the script's own options"
                    )
            return function(*args, **kwargs)

        return call

    def _calling(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that calls a network: to learn, when a step may begin, or to be evaluated."""
        learn = self._before_call(function)

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            is_asked = not self._is_begun and getcurrent() is self._run
            if not is_asked or (torch.is_grad_enabled() and is_trained(module, args, kwargs)):
                return learn(module, *args, **kwargs)
            asked = function if torch.is_grad_enabled() else learn
            return self._evaluations.call(asked, module, args, kwargs)

        return call

    def _counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._backward += 1
            return function(*args, **kwargs)

        return call

    def _scaled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function by which a loss scale steps an optimizer, or leaves it out where it overflowed."""

        @functools.wraps(function)
        def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = self._stepped[id(optimizer)]
            found = function(scaler, optimizer, *args, **kwargs)
            if self._stepped[id(optimizer)] == before:
                self._after_step(optimizer, args, kwargs)
            return found

        return step

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._stepped[id(optimizer)] += 1
        self._updated |= parameters_of(optimizer)

    def _is_over(self, without_optimizer: bool) -> bool:
        """Whether everything that is trained was updated, or the script has come to its first step."""
        if torch._C._current_autograd_node() is not None:  # in the middle of a backward pass
            return False
        now = self._stepped.total(), len(self._created.made[Optimizer]), self._backward
        if self._is_begun and now == self._waited and not without_optimizer:
            return False
        self._waited = now
        trained = [
            (one, weights) for one in self._created.optimizers if (weights := parameters_of(one))
        ]
        if not trained:  # it updates its weights itself, or by a class of its own
            return self._backward > 0 or (without_optimizer and not self._is_begun)
        if not self._is_begun or not self._stepped:
            return not self._is_begun
        waiting = {
            id(one) for one, weights in trained if not weights & self._updated
        } - self._given_up
        if waiting and max(self._stepped.values()) >= MOST_ALONE:
            self._given_up |= waiting
            return True
        return not waiting

    def _frames(self) -> list[FrameType]:
        """Return its own functions that are being executed, the outermost first; of libraries where there are none."""
        frame, found = self._run.gr_frame, []
        while frame is not None:
            if is_outside(frame.f_code.co_filename) and frame.f_code.co_name not in INLINE:
                found.append(frame)
            frame = frame.f_back
        return [one for one in found[::-1] if is_own(one.f_code.co_filename)] or found[::-1]


def packages_of(folder: Path) -> list[str]:
    """Return the packages that a folder is in and is, from the outermost on."""
    if not (folder / "__init__.py").is_file():
        return []
    return [*packages_of(folder.parent), folder.name]


def parameters_of(optimizer: Optimizer) -> set[int]:
    """Return the identities of the parameters that an optimizer trains."""
    return {
        id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad
    }
