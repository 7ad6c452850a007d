#!/usr/bin/env python
"""Memory that single operators ask a card for and give back before they end, compared with what a plan counts.

    python scripts/card/operator_scratch.py measure FOLDER --part 0/3 --seconds 270        # on the card
    python scripts/card/operator_scratch.py compare FOLDER PLANNED.jsonl --gpu h100 --part 0/2   # anywhere
    python scripts/card/operator_scratch.py page FOLDER PLANNED.jsonl -o docs/benchmarks/kernel_scratch.md

The steps are those of `own_step_card.py`, of both of its lists. Three are taken of each under the allocator's own
history; before each operator of the third an allocation of a size of its own is a mark, so that what is allocated and
freed between two marks is an operator's scratch. FOLDER gets history-N.jsonl.gz. A plan is made with the torch of the
card's machine.
"""

from __future__ import annotations

import argparse
import collections
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.card.gpu_check_memory import append, clear
from scripts.card.gpu_check_plan import read_history
from scripts.card.own_step_card import SETS, about_card
from scripts.provenance import made

MARK = 512 * 1999
"""Bytes of a mark: from the pool of small blocks, and nothing else has this size."""
ACTIONS = {"alloc": 1, "free_completed": 2, "segment_alloc": 3, "segment_free": 4}
WITH_FORMS = ("conv", "rnn", "attention")
"""Operators whose arguments are noted."""
MIB = 2**20
SMALL = MIB // 4
"""Scratch below is not counted."""
WORKSPACES = ("convolution", "convolution_backward", "_cudnn_rnn", "_cudnn_rnn_backward", "cuBLAS")
"""Operators whose libraries choose a workspace."""
CASES = [(name, case.name) for name, one in SETS.items() for case in one.CASES]


class Marked(TorchDispatchMode):
    """Marks the allocator's history before each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        with_forms = any(one in name for one in WITH_FORMS)
        allocate = torch.cuda.caching_allocator_alloc
        torch.cuda.caching_allocator_delete(allocate(MARK))
        self.operators.append((name, told(list(args)[:12]) if with_forms else None))
        return func(*args, **(kwargs or {}))


def told(value: Any) -> Any:
    """Return a value as JSON: a tensor as its dtype, shape and layout (contiguous, last or strided)."""
    if isinstance(value, torch.Tensor):
        last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(value.dim())
        is_last = last is not None and value.is_contiguous(memory_format=last)
        layout = "contiguous" if value.is_contiguous() else "last" if is_last else "strided"
        return [str(value.dtype).removeprefix("torch."), list(value.shape), layout]
    if isinstance(value, (list, tuple)):
        return [told(one) for one in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)


def measure_all(folder: Path, part: str, seconds: float) -> None:
    """Write the history of each case of a part."""
    index, parts = map(int, part.split("/"))
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / f"history-{index}.jsonl.gz", "wt") as file:
        for cases, case in CASES[index::parts]:
            if time.monotonic() > deadline:
                break
            row: dict[str, Any] = {"case": case, "about": about_card()}
            try:
                row |= history(cases, case)
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(case, row.get("reserved"), row.get("error", ""), flush=True)


def history(cases: str, case: str) -> dict[str, Any]:
    """Return the peaks of two steps in bytes, the third's operators, and all events as action, block and size."""
    clear(torch.device("cuda", 0))
    memory = torch.cuda.memory
    memory._record_memory_history(context=None, max_entries=2_000_000)
    try:
        step = SETS[cases].build(case)
        for _ in range(2):
            step()
            torch.cuda.synchronize()
        peaks = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
        with Marked() as marked:
            step()
        torch.cuda.synchronize()
        events = memory._snapshot()["device_traces"][0]
    finally:
        memory._record_memory_history(enabled=None)
    numbers: dict[int, int] = {}
    kept: list[int] = []
    for event in events:
        if event["action"] in ACTIONS:
            number = numbers.setdefault(event["addr"], len(numbers))
            kept += [ACTIONS[event["action"]], number, event["size"]]
    found = {"reserved": peaks[0], "allocated": peaks[1], "events": kept}
    return {**found, "ops": marked.operators}


def histories(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of all parts; a file that was cut off ends early."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt") as file:
            try:
                yield from (row for row in map(json.loads, file) if "error" not in row)
            except EOFError:
                continue


def scratch_of(row: dict[str, Any]) -> Iterator[tuple[str, Any, list[int]]]:
    """Yield each operator of the third step with its arguments' forms and the sizes that it gave back."""
    numbers = row["events"]
    events = list(zip(numbers[::3], numbers[1::3], numbers[2::3]))
    marks = [at for at, (action, _, size) in enumerate(events) if (action, size) == (1, MARK)]
    marks = marks[-len(row["ops"]) :]
    for (name, forms), start, end in zip(row["ops"], marks, [*marks[1:], len(events)]):
        alive, freed = {}, []
        for action, block, size in events[start + 1 : end]:
            if action == 1 and size != MARK:
                alive[block] = size
            elif action == 2 and block in alive:
                freed.append(alive.pop(block))
        yield name.split(".")[1], forms, freed


def compare_all(folder: Path, path: Path, gpu_name: str, part: str) -> None:
    """Plan each case that has a history and no row yet, and append a row for each."""
    from mpt.planner.facts.gpus import find_gpu
    from mpt.planner.own.execution.source import Source
    from mpt.planner.own.proposals.changes import Changes
    from mpt.planner.own.trace import trace_own
    from mpt.planner.trace.replay import replay
    from mpt.planner.trace.unseen import unseen_on

    gpu, done = find_gpu(gpu_name), {row["case"] for row in read_history(path)}
    index, parts = map(int, part.split("/"))
    sets = {case: cases for cases, case in CASES}
    for number, row in enumerate(histories(folder)):
        case = row["case"]
        if number % parts != index or case in done:
            continue
        source = Source(SETS[sets[case]].__name__, "build", os.getcwd())
        try:
            trace = trace_own(source, {"case": case}, gpu, unseen_on(gpu), Changes()).fake.trace
        except Exception as error:
            print(case, f"{type(error).__name__}: {error}", flush=True)
            continue
        measured: collections.Counter[str] = collections.Counter()
        for name, _, freed in scratch_of(row):
            measured[name] += sum(freed) if sum(freed) > SMALL else 0
        planned: collections.Counter[str] = collections.Counter()
        for one in trace.storages:
            if one.category == "workspace" and one.size > SMALL:
                planned[one.operator.removeprefix("aten::")] += one.size // 2  # of two steps
        free = replay(trace)
        found = {
            "case": case,
            "made": made(),
            "measured": dict(measured),
            "planned": dict(planned),
            "allocated": [free.allocated, row["allocated"]],
            "reserved": [free.reserved, row["reserved"]],
        }
        append(path, found)
        print(case, *(f"{a / b - 1:+.1%}" for a, b in (found["allocated"], found["reserved"])))


def page(folder: Path, rows: list[dict[str, Any]]) -> str:
    """Return the table of operators as a page."""
    about = next(histories(folder)).get("about", {})
    steps = collections.Counter(name for row in rows for name in row["measured"])
    sums = {
        kind: collections.Counter({k: sum(row[kind].get(k, 0) for row in rows) for k in steps})
        for kind in ("measured", "planned")
    }
    lines = [
        "# Scratch of operators, on a card and in plans",
        "",
        f"Written by `python scripts/card/operator_scratch.py page FOLDER PLANNED.jsonl`; planned {rows[0]['made']}, "
        f"measured on one {about.get('card', 'NVIDIA H100 80GB HBM3')}, torch {about.get('torch', '2.11.0+cu130')}, "
        f"{about.get('made', '2026-11-27')}. {len(rows)} steps of [two](own_steps_card.md) "
        "[lists](own_steps_held_out.md): memory that an operator allocates and frees before it ends, over one "
        "step of each, without calls of less than a quarter of a MiB. Workspaces that cuDNN chooses are not "
        "in the peak of a plan; all others follow from torch's source. Attention is planned by the kernels of cards "
        "below capability 9.0, flash and memory-efficient ones, where this card took cuDNN's.",
        "",
        "| Operator | Steps | Measured, MiB | Planned, MiB |",
        "|---|---:|---:|---:|",
    ]
    shown = [name for name, size in sums["measured"].most_common() if size > 16 * MIB]
    for name in shown:
        library = " (its library's)" if name in WORKSPACES else ""
        count = sum(row["measured"].get(name, 0) > 0 for row in rows)
        figures = [f"{sums[kind][name] / MIB:,.0f}" for kind in ("measured", "planned")]
        lines.append(f"| {name}{library} | {count} | {' | '.join(figures)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, comparing = commands.add_parser("measure"), commands.add_parser("compare")
    writing = commands.add_parser("page")
    for one in (measuring, comparing, writing):
        one.add_argument("folder", type=Path)
    for one in (comparing, writing):
        one.add_argument("planned", type=Path)
    for one in (measuring, comparing):
        one.add_argument("--part", default="0/1", help="of the cases: the first of four is 0/4")
    measuring.add_argument("--seconds", type=float, default=600.0)
    comparing.add_argument("--gpu", required=True)
    writing.add_argument("-o", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "measure":
        measure_all(options.folder, options.part, options.seconds)
    elif options.command == "compare":
        compare_all(options.folder, options.planned, options.gpu, options.part)
    else:
        options.o.write_text(page(options.folder, read_history(options.planned)), "utf-8")


if __name__ == "__main__":
    main()
