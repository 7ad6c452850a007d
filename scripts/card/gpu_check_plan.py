"""The planner against the CUDA allocator: what was measured, how far off the plans were, and whether recipes held.

Part of `gpu_check.py`. Workloads are planned and measured by `gpu_check_memory.py`, in processes of their own; this
reads their rows and sums them up. What cuDNN takes inside its kernels no plan knows before one run has shown it
(`mpt plan calibrate`). So each workload is planned for several shares of it; the first workload's measurement chooses
the share of the second column.
"""

from __future__ import annotations

import bisect
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.card.gpu_check_processes import run
from scripts.card.gpu_check_workloads import (
    BUDGETS,
    REHEARSED_BUDGETS,
    WORKLOADS,
    budget_label,
    rehearsed,
)

WORKER = Path(__file__).resolve().parent / "gpu_check_memory.py"
ROWS = "gpu_check_plan.jsonl"
ALLOCATED_WITHIN, RESERVED_WITHIN = 0.03, 0.05
"""The medians that are wanted."""
LATE = ("not reached in time", "the plan was not done in time")
"""Errors of rows that have another turn whenever the check is run again."""
POISONED = 86
"""Exit code of a worker whose CUDA context is broken, after it wrote the row: nothing more can be measured there."""


def check_planner(
    folder: Path, seconds: float, rehearsal: str, limit: int | None = None
) -> dict[str, Any]:
    """Measure what has no row yet within `seconds`, in as many processes as break on the way.

    What crashed has one more turn, behind all the others. `limit`: only so many of the first. Returns rows and sums.
    """
    deadline = time.monotonic() + seconds
    path = folder / ROWS
    keep_whole_rows(path)
    problem = ""
    while labels := waiting(path, rehearsal, limit):
        written = len(read_history(path))
        left = deadline - time.monotonic()
        if left < 20 and written:
            break
        command = [sys.executable, str(WORKER), "--worker", str(path), "--seconds", str(left)]
        command += [f"--rehearsal={rehearsal}"] if rehearsal else []
        try:
            ended = run(command, left + 20, said=json.dumps(labels))
        except subprocess.TimeoutExpired:
            problem = "did not end in its time"
            break
        if ended.returncode == 0:
            if any("crash" in row for row in read_history(path)[written:]):
                continue  # another turn
            break
        problem = f"exit {ended.returncode}: {' | '.join(ended.stderr.strip().splitlines()[-3:])}"
        if ended.returncode == 2:
            break
        done = len(read_history(path)) - written
        under_way = labels[done:][:1]
        if under_way and (ended.returncode != POISONED or not done):
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"label": under_way[0], "crash": problem}) + "\n")
    rows = read_rows(path)
    return {"rows": rows, "problem": problem, **sum_up(rows)}


def waiting(path: Path, rehearsal: str, limit: int | None) -> list[str]:
    """Return the labels of what has no row yet and then of what crashed once, each in its order."""
    labels = [
        workload.label for workload in (rehearsed(WORKLOADS) if rehearsal else WORKLOADS)[:limit]
    ]
    if limit is None:
        labels += [
            budget_label(*budget) for budget in BUDGETS[: REHEARSED_BUDGETS if rehearsal else None]
        ]
    crashes = Counter(row["label"] for row in read_history(path) if "crash" in row)
    rows = {row["label"]: row for row in read_rows(path)}
    return [label for label in labels if label not in rows] + [
        label for label in labels if "crash" in rows.get(label, {}) and crashes[label] < 2
    ]


def forget(folder: Path) -> None:
    """Measure all workloads anew next time."""
    (folder / ROWS).unlink(missing_ok=True)


def keep_whole_rows(path: Path) -> None:
    """Take out the rows that say that time was up, which have another turn, and a line whose writing was cut short."""
    if path.is_file():
        rows = [row for row in read_history(path) if row.get("error") not in LATE]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        unfinished.replace(path)


def faults(results: dict[str, Any]) -> list[str]:
    """Return in words what is wrong: crashes, budgets not kept, medians too far off, what is late."""
    found = [
        f"planner, {row['label']}: {row['crash']}" for row in results["rows"] if "crash" in row
    ]
    budgets = [row for row in results["rows"] if row.get("budget") and "outcome" in row]
    found += [
        f"planner, {row['label']}: {row['outcome']}"
        for row in budgets
        if row["outcome"] == "out of memory"
    ]
    for name, error in results.get("errors", {}).items():
        wanted = ALLOCATED_WITHIN if name.startswith("allocated") else RESERVED_WITHIN
        if error["median"] > wanted:
            found.append(
                f"planner: {name} memory is {error['median']:.1%} off in the median, wanted is {wanted:.0%}"
            )
    late = sum(row.get("error") in LATE for row in results["rows"])
    found += [f"planner: not measured in time: {late}; run this again to go on"] if late else []
    return found


def read_history(path: Path) -> list[dict[str, Any]]:
    """Return every row that was written: a workload that crashed and had another turn has two."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):  # the last line of a check that was killed
            found.append(json.loads(line))
    return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return each workload's last row, in the order of their first ones."""
    return list({row["label"]: row for row in read_history(path)}.values())


def sum_up(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the share that the first workload teaches, errors with and without it, times, and what fitted.

    Memory of a row that emptied the cache is what the card left it, and of one that ran out nothing: neither counts.
    """
    fits = count_fits(rows)
    compared = [
        row for row in rows if row.get("planned") and row.get("allocated") and not row.get("error")
    ]
    if not compared:
        return {"share": 0.0, "errors": {}, "fits": fits}
    whole = [row for row in compared if not row.get("retries")]
    first = compared[0]
    share = learn_share(first["planned"], first["allocated"])
    errors: dict[str, list[float]] = {}
    for row in whole:
        row["off"] = {}
        for name, index in (("allocated", 0), ("reserved", 1)):
            for kind, at in (("", 0.0), (", calibrated", share)):
                planned = between(row["planned"], at)[index]
                if not row.get(name) or planned is None:
                    continue
                row["off"][name + kind] = planned / row[name] - 1
                if row.get("counted", True) and not (kind and row is first):
                    errors.setdefault(name + kind, []).append(abs(row["off"][name + kind]))
    figures = {
        name: {"median": statistics.median(values), "largest": max(values), "count": len(values)}
        for name, values in errors.items()
    }
    times = [
        row["step_seconds"] / row["planned_step_seconds"]
        for row in whole
        if row.get("planned_step_seconds")
    ]
    spread = [statistics.median(times), min(times), max(times)] if times else []
    return {"share": share, "errors": figures, "fits": fits, "times": spread}


def count_fits(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Return how many rows were planned to fit and did, and the other three cases: "yes, no" did not."""
    words = {True: "yes", False: "no"}
    counts = Counter({f"{one}, {other}": 0 for one in words.values() for other in words.values()})
    for row in rows:
        if "planned_to_fit" in row and "did_fit" in row:
            counts[f"{words[row['planned_to_fit']]}, {words[row['did_fit']]}"] += 1
    return dict(counts)


def between(planned: dict[str, list[Any]], share: float) -> list[Any]:
    """Return the planned bytes at a share between those that were replayed."""
    known = sorted((float(key), values) for key, values in planned.items())
    if len(known) == 1:
        return known[0][1]
    index = min(max(1, bisect.bisect_left([at for at, _ in known], share)), len(known) - 1)
    (low, below), (high, above) = known[index - 1], known[index]
    weight = (share - low) / (high - low)
    return [a + weight * (b - a) for a, b in zip(below, above, strict=True)]


def learn_share(planned: dict[str, list[Any]], measured: float) -> float:
    """Return the share at which the plan meets a measurement; 0 where the plan is not below it."""
    known = sorted((float(key), float(values[0])) for key, values in planned.items())
    for (low, below), (high, above) in pairwise(known):
        if below < measured <= above:
            return low + (high - low) * (measured - below) / (above - below)
    return known[-1][0] if measured > known[-1][1] else 0.0


def as_markdown(results: dict[str, Any]) -> list[str]:
    """Return the rows as tables, and what they come to."""
    from mpt.report.units import show_bytes

    def size(value: Any) -> str:
        return show_bytes(value) if value else ""

    def off(row: dict[str, Any], name: str) -> str:
        return f"{row['off'][name]:+.1%}" if name in row.get("off", {}) else ""

    lines = ["## Planner: predicted and measured", ""]
    if results["problem"]:
        lines += [f"A process ended early: {results['problem']}", ""]
    limits = {"allocated": ALLOCATED_WITHIN, "reserved": RESERVED_WITHIN}
    for name, figures in results["errors"].items():
        limit = limits[name.split(",")[0]]
        met = "met" if figures["median"] <= limit else "NOT met"
        lines.append(
            f"- {name}: median {figures['median']:.1%} off, largest {figures['largest']:.1%}, {figures['count']} "
            f"workloads; wanted is a median within {limit:.0%}: {met}"
        )
    if results.get("times"):
        middle, least, most = results["times"]
        lines.append(
            f"- step time: measured is {middle:.2f} times the planned in the median, {least:.2f} to {most:.2f}"
        )
    lines += ["", *fits_table(results.get("fits", {}))]
    lines += [f"Calibrated by the first row: cuDNN's share {results['share']:.3f}.", ""]
    lines += [
        "| workload | batch | planned | measured | off | reserved | measured | off | calibrated | step | planned |"
    ]
    lines += ["|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---:|"]
    for row in results["rows"]:
        if row.get("budget"):
            continue
        wrong = row.get("error") or row.get("crash")
        if wrong:
            lines.append(
                f"| {row['label']} | {row.get('batch_size', '')} | {wrong} | | | | | | | | |"
            )
            continue
        allocated, reserved = between(row["planned"], 0.0)
        calibrated = " / ".join(
            filter(None, (off(row, f"{name}, calibrated") for name in ("allocated", "reserved")))
        )
        cells = [
            row["label"],
            str(row.get("batch_size", "")),
            size(allocated),
            size(row["allocated"]),
            off(row, "allocated"),
        ]
        cells += [size(reserved), size(row.get("reserved")), off(row, "reserved"), calibrated]
        times = [row["step_seconds"], row.get("planned_step_seconds")]
        cells += [f"{1e3 * seconds:.0f} ms" if seconds else "" for seconds in times]
        lines.append(f"| {' | '.join(cells)} |")
    budgets = [row for row in results["rows"] if row.get("budget")]
    if budgets:
        lines += [
            "",
            "| workload under a budget | budget | as it stands | recipe | recipe's run | reserved |",
        ]
        lines += ["|---|---:|---|---|---|---:|"]
    for row in budgets:
        tail = [
            row.get("as_it_stands", ""),
            row.get("recipe", ""),
            row.get("error") or row.get("crash") or row["outcome"],
        ]
        lines.append(
            f"| {row['label']} | {size(row.get('budget_bytes'))} | {' | '.join(tail)} | {size(row.get('reserved'))} |"
        )
    return [*lines, ""]


def fits_table(fits: dict[str, int]) -> list[str]:
    """Return whether what was planned to fit did, and the other way round, as a table of two by two."""
    if not any(fits.values()):
        return []
    return [
        "| | did fit | ran out |",
        "|---|---:|---:|",
        f"| planned to fit | {fits['yes, yes']} | {fits['yes, no']} |",
        f"| planned not to fit | {fits['no, yes']} | {fits['no, no']} |",
        "",
    ]


def is_broken(results: dict[str, Any]) -> bool:
    """Did a workload crash, or a recipe run out of the memory it was chosen for?"""
    return any("crash" in row or row.get("outcome") == "out of memory" for row in results["rows"])
