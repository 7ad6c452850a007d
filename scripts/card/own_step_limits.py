#!/usr/bin/env python
"""The least memory that steps without mpt run in and the time of their kernels, compared with their plans.

    python scripts/card/own_step_card.py plan PLANS.json --gpu h100                # anywhere; no GPU is looked at
    python scripts/card/own_step_limits.py measure PLANS.json ROWS.jsonl           # on the card; in shells: --part 0/4
    python scripts/card/workload_limits.py WORKLOADS.jsonl                         # on the card, mpt's own
    python scripts/card/own_step_limits.py page PLANS.json ROWS.jsonl [WORKLOADS.jsonl] \\
        -o docs/benchmarks/own_steps_limits.md

The cases are those that the plans are of. For each the process's limit of memory is halved between a limit that
four steps ran in and one that they ran out at, until the two are 1.5 % of the plan apart; a run without a limit shows
that what it reserved is enough. One step under torch's profiler then says how long kernels ran, whatever the host
needed to launch them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.planner.facts.calibration import CONTEXT_BYTES
from mpt.planner.facts.time_band import range_of
from mpt.planner.facts.verdict import sure_share
from scripts.card import workload_limits
from scripts.card.gpu_check_memory import append, clear, limited
from scripts.card.gpu_check_plan import read_history
from scripts.card.own_step_card import FIRST, SETS, about_card, mib
from scripts.plans.check_timm_times import ranks

Build = Callable[[str], Callable[[], Any]]
"""From a case's name to its step."""
STEPS = 4
LEAST_SHARE = 0.72
"""Of the plan, below which no limit is tried."""
APART = 0.015
"""Of the plan: limits closer than this are not told apart."""


def measure_all(plans: Path, path: Path, seconds: float, part: str) -> None:
    """Measure each planned case of a part that has no row yet, and append a row for each."""
    deadline = time.monotonic() + seconds
    found = json.loads(plans.read_text())
    build = SETS[found["about"].get("cases", FIRST)].build
    done = {row["case"] for row in read_history(path)}
    index, parts = map(int, part.split("/"))
    known = {case: one for case, one in found["plans"].items() if "reserved" in one}
    for case in sorted(known, key=lambda case: known[case]["reserved"])[index::parts]:
        if case not in done and time.monotonic() < deadline:
            row = {"case": case, "about": about_card()}
            try:
                row |= measure(build, case, known[case]["reserved"])
            except Exception as error:
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            append(path, row)
            print(json.dumps({k: v for k, v in row.items() if k != "about"}), flush=True)


def measure(build: Build, case: str, planned: int) -> dict[str, Any]:
    """Return the largest limit that the steps ran out at, the smallest that they ran in, and a step's times."""
    import torch

    free = attempt(build, case, None)
    failed, low, ran = 0, int(LEAST_SHARE * planned), free["reserved"]
    while ran - low > APART * planned:
        limit = (low + ran) // 2
        try:
            attempt(build, case, limit)
            ran = limit
        except torch.OutOfMemoryError:
            failed = low = limit
    return {**free, "failed": failed, "ran": ran, **profile(build, case)}


def attempt(build: Build, case: str, limit: int | None) -> dict[str, int]:
    """Build and step within a limit; return the peaks in bytes. Raises OutOfMemoryError."""
    import torch

    with limited(limit, torch.device("cuda", 0)):
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        step = build(case)
        for _ in range(STEPS):
            step()
            torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before[0],
        "reserved": torch.cuda.max_memory_reserved() - before[1],
    }


def profile(build: Build, case: str) -> dict[str, Any]:
    """Return the seconds of a step, of its kernels, and how many there are."""
    import torch
    from torch.profiler import ProfilerActivity

    clear(torch.device("cuda", 0))
    step, times = build(case), []
    for _ in range(STEPS + 2):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]
    ) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = [
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]
    busy = covered(kernels) / 1e6
    return {"seconds": statistics.median(times[2:]), "busy": busy, "kernels": len(kernels)}


def covered(stretches: Iterable[tuple[float, float]]) -> float:
    """Return the time that at least one of the stretches takes."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(stretches):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def page(
    plans: dict[str, Any],
    rows: list[dict[str, Any]],
    workloads: list[dict[str, Any]],
    with_times: bool = True,
) -> str:
    """Return the tables as a page; without times, of steps that shared the card."""
    about, card = plans["about"], rows[0]["about"]
    known = plans["plans"]
    rows = [row for row in rows if "ran" in row and "reserved" in known.get(row["case"], {})]
    cases = about.get("cases", FIRST)
    which = "" if cases == FIRST else f" --cases {cases}"
    peaks = "own_steps_card.md" if cases == FIRST else f"own_steps_{cases}.md"
    timed = [row for row in rows if "busy" in row]
    planned = [known[row["case"]]["seconds"] for row in timed]
    busy, whole = [row["busy"] for row in timed], [row["seconds"] for row in timed]
    ratios = [one / other for one, other in zip(planned, busy)]
    ranges = [range_of(known[row["case"]]["band"]) for row in timed]
    held = [least <= 1 / ratio <= most for (least, most), ratio in zip(ranges, ratios)]
    inside = sum(held) / len(held)
    least = [row["ran"] / known[row["case"]]["reserved"] for row in rows]
    most = 1 / sure_share()

    def share(row: dict[str, Any], what: str) -> float:
        """Of the plan, both with the context of a process."""
        return float((row[what] + CONTEXT_BYTES) / (known[row["case"]]["reserved"] + CONTEXT_BYTES))

    proved = sum(share(row, "ran") <= most for row in rows)
    refuted = [row["case"] for row in rows if share(row, "failed") > most]
    lines = [
        "# How little memory a step runs in",
        "",
        f"Planned by `python scripts/card/own_step_card.py plan PLANS.json --gpu {about['gpu']}{which}` without "
        f"looking at a GPU, {about['made']}, torch {about['torch']}; measured by "
        f"`python scripts/card/own_step_limits.py measure PLANS.json ROWS.jsonl` on one {card['card']}, torch "
        f"{card['torch']}, cuDNN {card['cudnn']}, {card['made']}. The steps are those of "
        f"[the table of peaks]({peaks}). A limit is what the process may reserve; between the two that are "
        f"given, far apart where time was up, nothing was tried, nor below {LEAST_SHARE} of the plan. Plans are "
        "without cuDNN's workspace, which is given up where memory is short.",
        "",
        f"A plan counts as fitting with {most:.3f} times its memory ({CONTEXT_BYTES // 2**20} MiB of context in both). "
        f"Of {len(rows)} steps {proved} ran in no more than that, and {len(refuted)} ran out at more"
        + (f" ({', '.join(refuted)})" if refuted else "")
        + f". The smallest limit that was enough is {statistics.median(least):.2f} times the plan in the "
        f"median, {min(least):.2f} to {max(least):.2f}.",
        "",
    ]
    if with_times:
        lines += [
            f"Planned over the time that the card was busy, {len(timed)} steps: median "
            f"{statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f}; in the printed range "
            f"{inside:.0%}; rank correlation "
            f"{statistics.correlation(*map(ranks, (planned, busy))):.2f}. The whole step took "
            f"{statistics.median(one / other for one, other in zip(whole, busy)):.2f} times as long in the "
            "median: the rest is the host's.",
            "",
        ]
    titles = [
        "Step",
        "Planned, MiB",
        "Ran out at",
        "Ran in",
        "Of the plan",
        "Reserved without a limit",
    ]
    titles += ["Time: planned, ms", "Card busy", "Step"] * with_times
    lines += [f"| {' | '.join(titles)} |", f"|---{'|---:' * (len(titles) - 1)}|"]
    for row in rows:
        plan = known[row["case"]]
        spread = f"{row['failed'] / plan['reserved']:.2f} .. {row['ran'] / plan['reserved']:.2f}"
        times = [f"{1000 * row[name]:.1f}" if name in row else "" for name in ("busy", "seconds")]
        figures = [mib(plan["reserved"]), mib(row["failed"]), mib(row["ran"]), spread]
        figures += [mib(row["reserved"])]
        figures += [f"{1000 * plan['seconds']:.1f}", *times] * with_times
        lines.append(f"| {row['case']} | {' | '.join(figures)} |")
    if not workloads:
        return "\n".join([*lines, ""])
    lines += [
        "",
        "mpt's own workloads in the batches of a card of 12 GB, measured by "
        "`python scripts/card/workload_limits.py WORKLOADS.jsonl` on that card:",
    ]
    return "\n".join([*lines, "", *workload_limits.table(workloads), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    writing = commands.add_parser("page")
    for one in (measuring, writing):
        one.add_argument("plans", type=Path)
        one.add_argument("rows", type=Path)
    writing.add_argument("workloads", type=Path, nargs="?")
    measuring.add_argument("--seconds", type=float, default=600.0)
    measuring.add_argument("--part", default="0/1", help="of the cases: the first of four is 0/4")
    writing.add_argument("-o", type=Path, required=True)
    writing.add_argument(
        "--without-times", action="store_true", help="several shells measured at once"
    )
    options = parser.parse_args()
    if options.command == "measure":
        measure_all(options.plans, options.rows, options.seconds, options.part)
    else:
        plans = json.loads(options.plans.read_text())
        workloads = read_history(options.workloads) if options.workloads else []
        text = page(plans, read_history(options.rows), workloads, not options.without_times)
        options.o.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
