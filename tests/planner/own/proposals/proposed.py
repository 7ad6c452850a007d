"""Run as a program: the changes that are proposed for scripts, written into them and executed.

A line of JSON on standard input is a script, in a folder of its own; the line of its answer says what each change was
found to be. A change's lines are put at their places by `mpt.planner.answers.edits.edited`, the changed script is
planned again, and is executed on real tensors of a CPU. There an autocast of `cuda` does nothing, so one of the CPU is
put in its place to count its bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import runpy
import shutil
import sys
import traceback
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from mpt.planner.answers.edits import Edit, edited
from mpt.planner.answers.own_plan import OwnPlan
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.own import plan
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.edits import without_library
from mpt.planner.own.stand_ins.caches import forget_accelerator
from mpt.planner.own.trace import trace_on_cpu
from mpt.planner.plans.plan import Wish
from mpt.planner.trace.trace import live_peak

NOT_ON_CPU = ("distributed",)
"""Scripts whose wrapper has a stand-in on a card alone."""
WISH = Wish(budget_bytes=None)
ALL, NONE, LAST = slice(None), slice(0), slice(-1, None)


def planned(path: Path, gpu: str, kept: slice = ALL) -> OwnPlan:
    """Plan a script; all changes count, however little they save. `kept`: those that are tried."""
    find = plan.find_changes
    with (
        mock.patch.object(plan, "LEAST_SAVING", 10.0),
        mock.patch.object(plan, "PATIENCE", 1e9),
        mock.patch.object(plan, "find_changes", lambda run: [*find(run)][kept]),
    ):
        return plan.plan_own(source_of(path), {}, find_gpu(gpu), Calibration(), WISH)


def source_of(path: Path) -> Source:
    """Return a script, or the function `build` of a file that has one."""
    function = "build" if "\ndef build(" in path.read_text("utf-8") else ""
    return Source(str(path), function, str(path.parent) if function else "")


def changed(path: Path, edits: list[Edit], name: str) -> Path:
    """Write a script's folder with edits beside it; return the script."""
    folder = path.parent.parent / name
    shutil.copytree(path.parent, folder, dirs_exist_ok=True)
    for file in {edit.file for edit in edits}:
        here = Path(file)
        text = edited(here.read_text("utf-8"), [one for one in edits if one.file == file])
        (folder / here.relative_to(path.parent)).write_text(text, encoding="utf-8")
    return folder / path.name


@contextlib.contextmanager
def in_folder(path: Path) -> Any:
    """Let its modules be imported, and forgotten, inside the block."""
    before = set(sys.modules)
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
            yield
    finally:
        os.chdir(here)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None) or ""
            if file.startswith(str(path.parent)):
                del sys.modules[name]


def gradients(path: Path) -> list[str]:
    """Execute a script; return a hash of all gradients at each of its updates."""
    found: list[str] = []

    def note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        digest = hashlib.sha256()
        for group in optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    digest.update(one.grad.float().contiguous().numpy().tobytes())
        found.append(digest.hexdigest()[:12])

    manager = sys.modules.get("bitsandbytes.optim")
    if manager is not None:  # one of a process, which knows parameters by their identities
        manager.GlobalOptimManager.get_instance().initialize()
    forget_accelerator()
    handle = register_optimizer_step_pre_hook(note)
    try:
        with in_folder(path), mock.patch.object(sys, "argv", [str(path)]):
            source = source_of(path)
            scope = runpy.run_path(str(path), run_name="builds" if source.function else "__main__")
            if source.function:
                step = scope["build"]()
                for _ in range(2):
                    step() if callable(step) else step[3](*step[:3])
    finally:
        handle.remove()
        forget_accelerator()
    return found


def bytes_of(path: Path) -> list[int]:
    """Return the live bytes of a script at its peak on a CPU, planned and on real tensors."""
    if path.parent.parent.name in NOT_ON_CPU:
        return [0, 0]
    with in_folder(path):
        return [live_peak(trace_on_cpu(source_of(path), {}, is_fake)) for is_fake in (True, False)]


def tried(path: Path, gpu: str, together: bool) -> dict[str, Any]:
    """Return what is true of a script's changes; `together`: of all at once alone."""
    found = planned(path, gpu, LAST if together else ALL)
    exact = gradients(path)
    answer: dict[str, Any] = {"bytes": bytes_of(path), "updates": len(exact), "ways": []}
    for number, way in enumerate(found.ways):
        names = [name for name, _ in way.changes]
        if 1 < len(names) < 3:
            continue
        one: dict[str, Any] = {"changes": names, "unplaced": [*way.unplaced]}
        answer["ways"].append(one)
        if way.unplaced:
            continue
        one["lines"] = [[edit.place, *edit.lines] for edit in way.edits]
        try:
            script = changed(path, importable(way.edits), f"changed{number}")
            again = planned(script, gpu, NONE).plan
            one["promised"] = [way.plan.allocated, again.allocated]
            one["reserved"] = [way.plan.reserved, again.reserved]
            if names == ["recompute"]:
                one["equal"] = gradients(script) == exact
            if "optimizer" in names:
                gradients(script)
            elif "autocast" in names:
                gradients(script)
                here = [
                    replace(each, lines=tuple(on_cpu(line) for line in each.lines))
                    for each in way.edits
                ]
                one["bytes"] = bytes_of(changed(path, here, f"cpu{number}"))
            else:
                one["bytes"] = bytes_of(script)
        except BaseException as error:
            one["error"] = "".join(traceback.format_exception(error))[-1500:]
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
    return answer


def importable(edits: list[Edit]) -> list[Edit]:
    """Return edits with what allocates as bitsandbytes in its place where it is not installed."""
    return edits if find_spec("bitsandbytes") else [without_library(one) for one in edits]


def on_cpu(line: str) -> str:
    """Return a line with a CPU's autocast in the place of a card's, and a loss scale at which no step is skipped."""
    return line.replace('GradScaler("cuda")', 'GradScaler("cpu", init_scale=1.0)').replace(
        '"cuda"', '"cpu"'
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        asked = json.loads(line)
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                result = tried(Path(asked["path"]), asked["gpu"], asked["together"])
            except BaseException as error:
                result = {"error": "".join(traceback.format_exception(error))[-1500:]}
        print(json.dumps(result), flush=True)
