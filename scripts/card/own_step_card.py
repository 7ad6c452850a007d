#!/usr/bin/env python
"""Steps that know nothing of mpt: planned without a GPU, then measured on one, side by side.

    python scripts/card/own_step_card.py plan PLANS.json --gpu h100              # anywhere; no GPU is looked at
    python scripts/card/own_step_card.py measure PLANS.json ROWS.jsonl           # on the card
    python scripts/card/own_step_card.py page PLANS.json ROWS.jsonl -o docs/benchmarks/own_steps_card.md

The cases are those of `own_step_card_models.py`, or with `--cases held_out` of `own_step_card_held_out.py`. Measured
are `max_memory_allocated` and `max_memory_reserved` of eight steps in one process, whose cache and cuBLAS workspaces
are given back between the cases, and the median time of the last five. Planned are the same two without the assumed
workspace of cuDNN, and that. Plans have to be made with the torch that the card's machine has.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.planner.facts.calibration import CONTEXT_BYTES
from mpt.planner.facts.verdict import sure_share
from scripts.card import own_step_card_held_out, own_step_card_models
from scripts.card.gpu_check_memory import append, clear
from scripts.card.gpu_check_plan import read_history
from scripts.plans.check_timm_times import ranks
from scripts.provenance import made

STEPS, TIMED = 8, 5
FIRST = "models"
SETS: dict[str, Any] = {FIRST: own_step_card_models, "held_out": own_step_card_held_out}
"""Name of the cases -> the script that has them."""
MIB = 2**20


def plan_all(path: Path, gpu_name: str, only: str, cases: str) -> None:
    """Plan each case, and write the file anew after each."""
    import torch

    from mpt.planner.facts.calibration import Calibration
    from mpt.planner.facts.gpus import find_gpu
    from mpt.planner.own.execution.source import Source
    from mpt.planner.own.proposals.changes import Changes
    from mpt.planner.own.trace import trace_own
    from mpt.planner.plans.plan import Wish, describe
    from mpt.planner.trace.unseen import unseen_on

    gpu, calibration = find_gpu(gpu_name), Calibration()
    source = Source(SETS[cases].__name__, "build", str(Path.cwd()))
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    found["about"] = {
        "gpu": gpu.name,
        "torch": torch.__version__,
        "made": made(),
        "cases": cases,
    }
    rows = found.setdefault("plans", {})
    for case in SETS[cases].CASES:
        if only not in case.name or "reserved" in rows.get(case.name, {}):
            continue
        started = time.perf_counter()
        try:
            unseen = unseen_on(gpu, calibration)
            run = trace_own(source, {"case": case.name}, gpu, unseen, Changes()).fake
            plan = describe(run, case.batch, gpu, calibration, Wish(), 0, False, None)
            rows[case.name] = {
                "allocated": plan.allocated,
                "reserved": plan.reserved,
                "assumed_workspace": plan.assumed_workspace,
                "seconds": plan.step_seconds,
                "band": plan.time_band,
                "kernels": round(run.work.kernels(gpu)),
                "notes": list(plan.notes),
            }
        except Exception as error:
            rows[case.name] = {"error": f"{type(error).__name__}: {error}"}
        rows[case.name]["planning"] = round(time.perf_counter() - started, 1)
        print(case.name, rows[case.name], flush=True)
        path.write_text(json.dumps(found, indent=1))


def measure_all(plans: Path, path: Path, seconds: float) -> None:
    """Take true steps of each planned case that has no row yet, and append a row for each."""
    import torch

    deadline = time.monotonic() + seconds
    known = json.loads(plans.read_text())
    chosen = SETS[known["about"].get("cases", FIRST)]
    done = {row["case"] for row in read_history(path)}
    card = torch.device("cuda", 0)
    about = about_card()
    for case in chosen.CASES:
        if case.name not in known["plans"] or case.name in done or time.monotonic() > deadline:
            continue
        row = {"case": case.name, "about": about}
        try:
            row |= measure(chosen.build, case.name, card)
        except Exception as error:
            row["error"] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
        clear(card)
        append(path, row)
        print(json.dumps({k: v for k, v in row.items() if k != "about"}), flush=True)


def about_card() -> dict[str, Any]:
    """Return the card, its libraries, and the date and commit of the measurement."""
    import torch

    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "driver": torch.version.cuda,
        "made": made(),
    }


def measure(build: Callable[[str], Any], case: str, card: Any) -> dict[str, Any]:
    """Build and step; return the peaks in bytes and the median time of a step in seconds."""
    import torch

    clear(card)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    started = time.perf_counter()
    step = build(case)
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    stats = torch.cuda.memory_stats()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before[0],
        "reserved": torch.cuda.max_memory_reserved() - before[1],
        "seconds": statistics.median(times[-TIMED:]),
        "first_seconds": times[0],
        "retries": stats.get("num_alloc_retries", 0),
        "whole_seconds": round(time.perf_counter() - started, 2),
        "before": before,
    }


def page(plans: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return the table as a page, and what it says in sum."""
    card, about = rows[0]["about"], plans["about"]
    rows = [{**row, "planned": plans["plans"].get(row["case"], {})} for row in rows]
    measured = [row for row in rows if "reserved" in row and "reserved" in row["planned"]]
    planned = [row["planned"]["seconds"] for row in measured]
    taken = [row["seconds"] for row in measured]
    times = [of_plan / own for of_plan, own in zip(planned, taken)]
    needed = [
        (row["reserved"] + CONTEXT_BYTES) / (row["planned"]["reserved"] + CONTEXT_BYTES)
        for row in measured
    ]
    most = 1 / sure_share()
    cases = about.get("cases", FIRST)
    which = "" if cases == FIRST else f" --cases {cases}"
    left = len(plans["plans"]) - len(rows)
    not_reached = f" ({left} more were planned and not reached)" if left else ""
    lines = [
        "# Steps that know nothing of mpt, on a card",
        "",
        f"Planned by `python scripts/card/own_step_card.py plan PLANS.json --gpu {about['gpu']}{which}` "
        f"without looking at a GPU, {about['made']}, torch {about['torch']}; measured by "
        f"`python scripts/card/own_step_card.py measure PLANS.json ROWS.jsonl` on one {card['card']}, "
        f"torch {card['torch']}, cuDNN {card['cudnn']}, {card['made']}. Unmodified models of their libraries with "
        f"random weights{not_reached}, eight steps each, in the modes of a script: `-amp` float16 with GradScaler, "
        "`-nhwc` channels "
        "last, `-pure` bfloat16 weights, `-recompute` the library's own. No constant was fitted to these rows.",
        "",
        "| | Median error | Lowest | Highest | Rows |",
        "|---|---:|---:|---:|---:|",
        summed("Reserved, without cuDNN's workspace", measured, "reserved", False),
        summed("Reserved, with the assumed workspace", measured, "reserved", True),
        summed("Allocated, without cuDNN's workspace", measured, "allocated", False),
        "",
        f"Of {len(measured)} steps {sum(one <= most for one in needed)} needed no more than {most:.3f} times their "
        'plan, which is the margin of the class "fits" '
        f"({CONTEXT_BYTES // MIB} MiB of context in both); the most was {max(needed):.3f} times.",
        "",
        f"Planned over measured step time: median {statistics.median(times):.2f}, from {min(times):.2f} to "
        f"{max(times):.2f}; rank correlation "
        f"{statistics.correlation(*map(ranks, (planned, taken))):.2f}.",
        "",
        "| Step | Planned, MiB | Assumed workspace | Measured | Error | With the workspace | Allocated: planned "
        "| Measured | Time: planned, ms | Measured |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in measured:
        planned = row["planned"]
        figures = [
            mib(planned["reserved"]),
            mib(planned["assumed_workspace"]),
            mib(row["reserved"]),
            f"{off(row, 'reserved', False):+.1%}",
            f"{off(row, 'reserved', True):+.1%}",
            mib(planned["allocated"]),
            mib(row["allocated"]),
            f"{1000 * planned['seconds']:.1f}",
            f"{1000 * row['seconds']:.1f}",
        ]
        lines.append(f"| {row['case']} | {' | '.join(figures)} |")
    others = [row for row in rows if row not in measured]
    lines += [
        "",
        *(f"- {row['case']}: {row.get('error') or row['planned'].get('error')}" for row in others),
    ]
    return "\n".join(lines).rstrip() + "\n"


def off(row: dict[str, Any], what: str, with_workspace: bool) -> float:
    """Return planned over measured, less one."""
    planned = row["planned"]
    return (planned[what] + (planned["assumed_workspace"] if with_workspace else 0)) / row[what] - 1


def summed(name: str, rows: list[dict[str, Any]], what: str, with_workspace: bool) -> str:
    """Return a row of the summary."""
    errors = [off(row, what, with_workspace) for row in rows]
    median = statistics.median(abs(one) for one in errors)
    return f"| {name} | {median:.1%} | {min(errors):+.1%} | {max(errors):+.1%} | {len(errors)} |"


def mib(size: float) -> str:
    """Return bytes as MiB."""
    return f"{size / MIB:,.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    planning = commands.add_parser("plan")
    planning.add_argument("plans", type=Path)
    planning.add_argument("--gpu", required=True)
    planning.add_argument("--cases", choices=SETS, default=FIRST)
    planning.add_argument("--only", default="", help="cases with this in their name")
    measuring = commands.add_parser("measure")
    measuring.add_argument("plans", type=Path)
    measuring.add_argument("rows", type=Path)
    measuring.add_argument("--seconds", type=float, default=600.0)
    writing = commands.add_parser("page")
    writing.add_argument("plans", type=Path)
    writing.add_argument("rows", type=Path)
    writing.add_argument("-o", type=Path, required=True)
    options = parser.parse_args()
    if options.command == "plan":
        plan_all(options.plans, options.gpu, options.only, options.cases)
    elif options.command == "measure":
        measure_all(options.plans, options.rows, options.seconds)
    else:
        text = page(json.loads(options.plans.read_text()), read_history(options.rows))
        options.o.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
