"""Workloads planned elsewhere (`gpu_check_planning.py`) and measured here, a row of a file for each.

Part of `gpu_check.py`. Every workload takes a few true steps, all in one process, with the allocator emptied between
them: `max_memory_allocated` and `max_memory_reserved` beside what was planned without looking at the GPU. Then budgets:
the process may have only a part of what a configuration would like, a recipe is searched for it, and the recipe must
train within it. On a CPU (a rehearsal) live tensor bytes are compared instead.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.card.gpu_check_plan import POISONED  # noqa: E402
from scripts.card.gpu_check_planning import Planners  # noqa: E402

CLEAN_STEPS, MOST_STEPS = 3, 12
LAST_PLAN_SECONDS = 5
"""How long a plan is waited for when the time of the measurements is over."""
BUDGET_PART = 0.35
"""Of the time, at least, for the budgets."""
REHEARSED_PART = 0.9
FILLED = 0.9
"""Of the card's room: a batch that is planned to take more is halved."""


def append(path: Path, row: dict[str, Any]) -> None:
    """Write one row, so that whatever happens next leaves it."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def work(path: Path, seconds: float, labels: list[str], rehearsal: str) -> None:
    """Measure the workloads, then the budgets, that have these labels, and append a row for each."""
    import torch

    from mpt.planner.client.session import Session
    from mpt.planner.facts.calibration import Calibration
    from scripts.card.gpu_check_workloads import ALLOW, BUDGETS, WORKLOADS, budget_label, scale_for

    deadline = time.monotonic() + seconds
    device = torch.device("cpu") if rehearsal == "cpu" else torch.device("cuda", 0)
    known = {workload.label: workload for workload in WORKLOADS}
    rows = [known[label] for label in labels if label in known]
    budgets = [budget for budget in BUDGETS if budget_label(*budget) in labels]
    end = deadline - (BUDGET_PART * seconds if budgets else 0)
    pool = ThreadPoolExecutor(planners(rehearsal))
    elsewhere = Planners()
    try:
        room = room_bytes(device)
        prepared = [prepare(row, rehearsal, scale_for(room)) for row in rows]
        until = end + LAST_PLAN_SECONDS
        plans = [pool.submit(fit, elsewhere, *one, device, room, until) for one in prepared]
        for row, plan in zip(rows, plans, strict=True):
            left = end - time.monotonic()
            entry = {"label": row.label, "counted": row.is_counted}
            if left < 2:
                plan.cancel()
                append(path, {**entry, "error": "not reached in time"})
                continue
            append_measured(path, entry, plan, left, device)
    finally:
        # where the context broke, the next process plans anew
        pool.shutdown(wait=False, cancel_futures=True)
        elsewhere.close()
        pool.shutdown()
    if not budgets:
        return
    with Session(card(device), Calibration(), ALLOW, planners(rehearsal)) as session:
        for workload, part in budgets:
            entry = {"label": budget_label(workload, part), "budget": True}
            if deadline - time.monotonic() < 15:
                append(path, {**entry, "error": "not reached in time"})
                continue
            with written(path, entry):
                entry |= try_budget(session, workload, part, device, rehearsal)


def card(device: Any) -> Any:
    """Return the GPU to plan for: the installed one, or in a rehearsal a common one."""
    from mpt.planner.facts.gpus import find_gpu
    from mpt.workflows.training.out_of_memory_report import find_budget

    return find_budget(device, "").gpu if device.type == "cuda" else find_gpu("rtx3060")


def planners(rehearsal: str) -> int:
    """Return how many processes plan at once: enough to keep ahead, few enough to leave the measuring one a core."""
    return max(1, min(12, (os.cpu_count() or 2) - (1 if rehearsal else 4)))


def room_bytes(device: Any) -> float:
    """Return what a card gives to this process; on a CPU no end."""
    import torch

    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else math.inf


def fit(
    elsewhere: Planners, config: Any, data: Any, device: Any, room: float, until: float
) -> tuple[Any, Any, dict[str, Any]]:
    """Return a configuration with the largest batch, halved until it is planned to fit, its data, and the plan.

    Raises what `Planners.plan` raises.
    """
    while True:
        plan = elsewhere.plan(config, data, device, until)
        wanted = plan["planned"]["0.0" if "0.0" in plan["planned"] else "0"]
        size = wanted[1] or wanted[0]
        batch = config.train.batch_size
        if size <= FILLED * room or batch == 1:
            return config, data, {**plan, "batch_size": batch, "planned_to_fit": size <= room}
        config = with_batch(config, batch // 2)


def with_batch(config: Any, batch_size: int) -> Any:
    """Return a configuration with another batch; micro-batches of a quarter stay one."""
    from mpt.config.load import load_config
    from scripts.card.gpu_check_workloads import ALLOW

    data = config.to_data()
    data["train"]["batch_size"] = batch_size
    if isinstance(data["memory"].get("micro_batch"), int):
        data["memory"]["micro_batch"] = max(1, batch_size // 4)
    return load_config(data, allow=ALLOW)


def append_measured(
    path: Path, entry: dict[str, Any], plan: Future[Any], left: float, device: Any
) -> None:
    """Wait for the plan, measure what was planned, and write the row whatever came of it."""
    with written(path, entry):
        config, data, planned = plan.result(max(left, LAST_PLAN_SECONDS))
        entry |= planned
        entry |= measure(config, data, device)
        entry["did_fit"] = True


@contextlib.contextmanager
def written(path: Path, entry: dict[str, Any]) -> Iterator[None]:
    """Write the row that the block fills, whatever came of it. Ends the process where CUDA itself is broken."""
    from mpt.engine.step.faults import is_out_of_memory
    from mpt.errors import MptError

    poisoned = False
    try:
        yield
    except MptError as error:
        entry["error"] = str(error).splitlines()[0]
    except TimeoutError:
        entry["error"] = "the plan was not done in time"
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ran_out = is_out_of_memory(error)
        entry |= {"error": text, "did_fit": False} if ran_out else {"crash": text}
        poisoned = "CUDA error" in str(error)
    append(path, entry)
    print(json.dumps(entry), file=sys.stderr, flush=True)
    if poisoned:
        sys.exit(POISONED)


_specs: dict[int, Any] = {}


def prepare(workload: Any, rehearsal: str, scale: float = 1.0) -> tuple[Any, Any]:
    """Return a workload's configuration, its batch scaled, and the layout of its data."""
    from mpt.engine.building.build import build_datasets

    config = workload.config(rehearsal, scale)
    key = id(workload.network)
    if key not in _specs:
        _specs[key] = build_datasets(config)[0].spec
    return config, _specs[key]


def measure(config: Any, data: Any, device: Any) -> dict[str, Any]:
    """Take a few true steps and return the peaks in bytes: the CUDA allocator's, or the live tensors' on a CPU."""
    import torch

    from mpt.planner.trace.recorder import Recorder
    from mpt.planner.trace.trace import live_peak

    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = (
        config.train.deterministic,
        not config.train.deterministic,
    )
    # as a process begins
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = False, True
    if device.type == "cpu":
        recorder = Recorder("cpu")
        with torch.autograd.set_multithreading_enabled(False), recorder.recording():
            taken = take_steps(config, data, device)
        return {"allocated": live_peak(recorder.trace), **taken}
    clear(device)
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    retries = torch.cuda.memory_stats(device).get("num_alloc_retries", 0)
    try:
        taken = take_steps(config, data, device)
        taken["retries"] = torch.cuda.memory_stats(device).get("num_alloc_retries", 0) - retries
        peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    finally:
        if "expandable_segments" in config.memory.tricks:
            # for the workloads after this
            torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        clear(device)
    return {
        "allocated": peaks[0] - before[0],
        "reserved": peaks[1] - before[1],
        "left_over": before[0],
        **taken,
    }


def clear(device: Any) -> None:
    """Give everything back to the driver, cuBLAS's workspaces too, and begin the peaks anew."""
    import torch

    gc.collect()
    torch.cuda.synchronize(device)
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


@contextlib.contextmanager
def limited(limit: int | None, device: Any) -> Iterator[None]:
    """Let this process reserve so many bytes more of a card inside the block; None is no limit."""
    import torch

    clear(device)
    whole = torch.cuda.get_device_properties(device).total_memory
    if limit is not None:
        share = min(1.0, (limit + torch.cuda.memory_reserved(device)) / whole)
        torch.cuda.set_per_process_memory_fraction(share, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def take_steps(config: Any, data: Any, device: Any) -> dict[str, Any]:
    """Build and step as the loop does, every phase in each step, until the optimizers have stepped often enough."""
    import torch

    from mpt.data.loading.loader import pin, prefetch
    from mpt.engine.building.build import build_run
    from mpt.engine.state.moving_averages import follow_step
    from mpt.engine.step.step import update

    def batches() -> Iterator[dict[str, Any]]:
        numbers = torch.Generator().manual_seed(0)
        while True:
            batch = {
                name: draw(spec, config.train.batch_size, len(data.classes), numbers)
                for name, spec in fields
            }
            yield pin(batch) if device.type == "cuda" else batch

    fields = list(data.fields.items())
    run = build_run(config, device, data)
    updates: dict[str, Any] = {}
    clean, seconds = 0, 0.0
    stream = prefetch(batches(), device, data)
    batch: dict[str, Any] = {}
    for step in range(MOST_STEPS):
        batch = next(stream)
        started = time.perf_counter()
        for phase in run.phases:
            updates[phase.name] = update(run, phase, batch)
        follow_step(run, step)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        clean += all(done.finite and not done.stats.skipped for done in updates.values())
        if clean == CLEAN_STEPS:
            break
    return {"step_seconds": seconds, "clean_steps": clean}


def draw(spec: Any, count: int, classes: int, numbers: Any) -> Any:
    """Return random samples of one field: images and masks in [0, 1], labels below the number of classes."""
    import torch

    if spec.dtype.is_floating_point:
        return torch.rand(count, *spec.shape, generator=numbers, dtype=spec.dtype)
    return torch.randint(max(1, classes), (count, *spec.shape), generator=numbers, dtype=spec.dtype)


def try_budget(
    session: Any, workload: Any, part: float, device: Any, rehearsal: str
) -> dict[str, Any]:
    """Allow the process a part of what a workload would reserve; find a recipe for that and train it there."""
    import torch

    from mpt.planner.recipes.recipe import describe_patch
    from mpt.planner.recipes.search import search
    from mpt.workflows.training.out_of_memory_report import find_budget
    from scripts.card.gpu_check_workloads import CARD_ALONE

    config, data = prepare(workload, rehearsal)
    on_cuda, context = device.type == "cuda", session.calibration.context_bytes
    wanted = session.plan([config])[0].get().reserved
    limit = int((REHEARSED_PART if rehearsal else part) * wanted)
    try:
        if on_cuda:
            clear(device)
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(limit / total, device)
            # as the report of a run that ran out would
            found = find_budget(torch.device("cuda"), "")
            limit = (found.limit_bytes or 0) - context
        recipes = search(session, config, session.gpu, limit + context).recipes
        runs_low_bit = not rehearsal and any(
            find_spec(name) for name in ("bitsandbytes", "torchao")
        )
        fitting = [
            r
            for r in recipes
            if r.fits and (runs_low_bit or CARD_ALONE not in r.config.memory.tricks)
        ]
        row: dict[str, Any] = {"budget_bytes": limit, "planned_bytes": wanted}
        row["as_it_stands"] = attempt(config, data, device)[0]
        row |= {"planned_to_fit": wanted <= limit, "did_fit": row["as_it_stands"] == "trains"}
        if not fitting:
            return {**row, "recipe": "none", "outcome": "nothing fits"}
        outcome, figures = attempt(fitting[0].config, data, device)
        planned = fitting[0].plan.reserved_in_budget
        names = {
            "recipe": describe_patch(fitting[0].patch),
            "recipe_bytes": planned,
            "outcome": outcome,
        }
        return {**row, **names, **figures}
    finally:
        if on_cuda:
            torch.cuda.set_per_process_memory_fraction(1.0, device)


def attempt(config: Any, data: Any, device: Any) -> tuple[str, dict[str, Any]]:
    """Return whether a configuration trains or runs out of memory, and its figures."""
    from mpt.engine.step.faults import is_out_of_memory

    try:
        return "trains", measure(config, data, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    return "out of memory", {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--worker", type=Path, help="append rows to this file, of the labels in standard input"
    )
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--rehearsal", choices=("cpu", "cuda"), default="")
    options = parser.parse_args()
    if options.worker is not None:
        # what `mpt train` sets for deterministic runs
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        work(options.worker, options.seconds, json.load(sys.stdin), options.rehearsal)
    else:
        parser.error("run scripts/gpu_check.py")


if __name__ == "__main__":
    main()
