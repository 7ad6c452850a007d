"""Everything that can break around a run, in one table.

Kills, errors and signals at every file operation, damage to every file, links and pipes, hostile inputs, outputs that
nobody reads, several commands at once.

    python scripts/faults/fault_battery.py                  # all of it, on all cores
    python scripts/faults/fault_battery.py --scale 0.01     # an even sample
    python scripts/faults/fault_battery.py --only kills errors  # some kinds
    python scripts/faults/fault_battery.py --only planted --matching "pipe.*extend"  # some cases, by their names
    python scripts/faults/fault_battery.py --log battery.jsonl --minutes 5  # a part; the same again goes on

With `--log` each case's outcome is a line of a file, and cases that have one are not tried again, whatever kinds the
next command names: the table is of all outcomes in the file. It belongs to one state of the source, and another is
refused.

Each case is a command of `mpt` in a process of its own, compared with a run that was never disturbed: *lost* means that
something which had been there is gone, or that a resumed run differs from one never stopped by a bit; *silent* that a
command ended well with a wrong result; *traceback* that a user meets a mistake of ours; *hang* that nothing came at
all. All four are to be zero; the exit status is 1 where they are not, and each failed case is shown.
Plots are left out of the reports: they touch no file, and take most of a report's time. Everything that a process
reads before its work is read once and forked with: modules, templates, the command line, the YAML of the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.faults.fault_battery_process import begin_with_library, clean_up_when_told_to_end

if __name__ == "__main__":  # before the imports below, which take seconds
    clean_up_when_told_to_end()
    begin_with_library()

from mpt.run.records.recorder import drop_half_line, read_lines
from scripts.faults import fault_battery_inputs as inputs
from scripts.faults import fault_battery_pickles as pickles
from scripts.faults import fault_battery_power as power
from scripts.faults import fault_battery_power_ranks as power_ranks
from scripts.faults import fault_battery_ranks as ranks
from scripts.faults import fault_battery_runs as runs
from scripts.faults.fault_battery_process import Running, end_all, make_folder, start
from scripts.faults.fault_battery_warm import import_again, import_everything, parse_beforehand

Case = tuple[object, ...]
BAD = ("lost", "silent", "traceback", "hang")
KINDS: dict[str, tuple[str, int, Callable[[runs.Battery], list[Case]]]] = {
    "kills": ("SIGKILL before, or in the middle of, a file operation", 1, runs.kill_cases),
    "errors": ("a file operation fails, once or from there on", 1, runs.error_cases),
    "signals": (
        "SIGTERM, SIGINT, SIGHUP, SIGUSR1 at a file operation of a training",
        1,
        runs.signal_cases,
    ),
    "power": (
        "a state that a power loss at a file operation of a training leaves",
        1,
        power.power_cases,
    ),
    "shards": (
        "such a state of two ranks that write a sharded checkpoint",
        1,
        power_ranks.rank_power_cases,
    ),
    "files": (
        "a file of a run flipped, cut, emptied, grown, replaced or removed",
        1,
        runs.file_cases,
    ),
    "checkpoints": (
        "a checkpoint's file flipped, cut, grown or with a hole",
        inputs.PER_CASE,
        inputs.checkpoint_cases,
    ),
    "planted": ("a link, pipe, folder or full device in a file's place", 1, runs.planted_cases),
    "weights": (
        "a weights file of others, bytes changed, removed or added",
        inputs.PER_CASE,
        inputs.weights_cases,
    ),
    "pickles": (
        "a generated program of pickle operations in a .pt file",
        pickles.PER_CASE,
        pickles.pickle_cases,
    ),
    "configs": (
        "a configuration with one to three mistakes, read",
        inputs.PER_CASE,
        inputs.config_cases,
    ),
    "smokes": ("such a configuration that was taken, trained for two steps", 1, inputs.smoke_cases),
    "outputs": ("output closed, full or unread", 1, runs.output_cases),
    "together": (
        "two starts, two resumes; infer, report, convert while training",
        1,
        runs.together_cases,
    ),
    "ranks": (
        "one of two processes that train together is killed or told to stop",
        1,
        ranks.rank_cases,
    ),
}
"""Kind -> what is broken, how many faults a case holds, and the cases."""


@dataclass
class Row:
    """A kind's outcome so far."""

    cases: int = 0
    """Faults that were tried."""
    all_cases: int = 0
    seconds: float = 0.0
    """Of all workers together."""
    processor_seconds: float = 0.0
    """Of all commands together."""
    bad: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these kinds of fault")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the cases, evenly chosen"
    )
    parser.add_argument(
        "--matching", type=expression, default="", help="cases whose name fits a regular expression"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="processes that try cases"
    )
    parser.add_argument("--seed", type=int, default=0, help="which cases a share holds")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--log", type=Path, help="file of outcomes to go on with")
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    if options.log:
        begin_log(options.log)
    try:
        with prepared() as battery:
            rows = try_kinds(
                battery,
                options.only or list(KINDS),
                options.scale,
                options.workers,
                options.seed,
                options.log,
                until,
                options.matching,
            )
    except KeyboardInterrupt:
        goes_on = f"; the same command goes on with {options.log}" if options.log else ""
        print(f"interrupted{goes_on}", file=sys.stderr)
        sys.exit(130)
    text = describe(rows)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", "utf-8")
    sys.exit(any(row.bad for row in rows.values()))


def expression(text: str) -> re.Pattern[str]:
    """Compile a regular expression of the command line."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def begin_log(log: Path) -> None:
    """Note the source in a new log, or end where a log is of another one: its outcomes would be mixed with others."""
    drop_half_line(log)
    root = Path(__file__).resolve().parents[2]
    files = sorted(path for folder in ("mpt", "scripts") for path in (root / folder).rglob("*.py"))
    source = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    if not log.exists():
        log.write_text(json.dumps({"source": source}) + "\n", "utf-8")
    elif next(iter(read_log(log)), {}).get("source") != source:
        sys.exit(f"{log} is of another state of the source; name a new file")


def read_log(log: Path) -> list[dict[str, Any]]:
    """Return a log's lines."""
    return list(read_lines(log))


@contextlib.contextmanager
def prepared() -> Iterator[runs.Battery]:
    """Import everything, train what is compared with, and remove it at the end."""
    import_everything()
    memory = Path("/dev/shm")  # where syncing costs nothing
    folder = make_folder(memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir()))
    try:
        battery = runs.prepare(folder, import_again)
        parse_beforehand(path.read_text("utf-8") for path in sorted(folder.rglob("*.yaml")))
        yield battery
    finally:
        gc.unfreeze()
        shutil.rmtree(folder, ignore_errors=True)


def try_kinds(
    battery: runs.Battery,
    kinds: Sequence[str],
    scale: float,
    workers: int,
    seed: int = 0,
    log: Path | None = None,
    until: float = float("inf"),
    matching: str | re.Pattern[str] = "",
) -> dict[str, Row]:
    """Try a share of the cases of each kind until a moment; return what came out, earlier outcomes in the log too."""
    log = log or battery.folder / "log.jsonl"
    sizes: dict[str, int] = {}
    running: dict[str, list[Running]] = {}

    def conclude(kind: str) -> None:
        await_workers(kind, running[kind], log)
        row = make_rows(read_log(log), sizes)[kind]
        outcome = dict(row.bad) or "all well"
        print(f"{kind}: {row.cases} in {row.seconds:.0f} s, {outcome}", file=sys.stderr, flush=True)
        for shown in row.shown:
            print(f"  {shown}", file=sys.stderr, flush=True)

    try:
        # which mostly waits, so others go beside it
        for kind in sorted(kinds, key=lambda kind: kind != "ranks"):
            if time.monotonic() > until:
                break
            found = [case for case in KINDS[kind][2](battery) if re.search(matching, name_of(case))]
            cases = sample(found, scale, seed)
            sizes[kind] = len(cases)
            if cases:
                running[kind] = spread(battery, kind, cases, workers, log, until)
            if cases and kind != "ranks":
                conclude(kind)
        for kind in [kind for kind, left in running.items() if left]:
            conclude(kind)
    except BaseException:
        end_all([one for several in running.values() for one in several])
        raise
    return make_rows(read_log(log), sizes)


def make_rows(outcomes: Iterable[dict[str, Any]], sizes: dict[str, int]) -> dict[str, Row]:
    """Return the outcomes by kind, in the order of `KINDS`. `sizes` has the cases of a kind, where they are known."""
    rows: dict[str, Row] = {}
    for outcome in outcomes:
        kind = outcome.get("kind")
        if kind not in KINDS:
            continue
        row, faults = rows.setdefault(kind, Row()), KINDS[kind][1]
        row.cases += faults * ("case" in outcome)
        row.all_cases = faults * max(sizes.get(kind, 0), outcome.get("of", 0))
        row.seconds += outcome["seconds"]
        row.processor_seconds += outcome.get("processor_seconds", 0.0)
        if outcome["bad"]:
            row.bad[outcome["bad"]] += 1
            row.shown.append(
                f"{outcome['bad']}: {outcome.get('case', 'a worker')}: {outcome['seen']!r}"
            )
    return {kind: rows[kind] for kind in KINDS if kind in rows}


def sample(cases: list[Case], scale: float, seed: int) -> list[Case]:
    """Return a share of the cases, at least one, evenly spread over their order."""
    if scale >= 1 or not cases:
        return cases
    wanted = max(1, round(len(cases) * scale))
    offset = random.Random(seed).random()
    return [cases[int((index + offset) * len(cases) / wanted)] for index in range(wanted)]


def spread(
    battery: runs.Battery, kind: str, cases: list[Case], workers: int, log: Path, until: float
) -> list[Running]:
    """Begin, in several processes, the cases whose outcome is not in the log; they add it."""
    known = {outcome.get("case") for outcome in read_log(log) if outcome.get("kind") == kind}
    left = [(number, case) for number, case in enumerate(cases) if name_of(case) not in known]
    workers *= ranks.AT_A_TIME if kind == "ranks" else 1
    shares = [left[number::workers] for number in range(workers)]
    return [
        start(
            lambda share=share: try_cases(battery, kind, share, log, until, len(cases)),
            battery.folder / "workers.log",
        )
        for share in shares
    ]


def await_workers(kind: str, running: list[Running], log: Path) -> None:
    """Wait until the cases of a kind are tried; what has ended leaves the list."""
    while running:
        ended = running[0].wait(seconds=86400)
        del running[0]
        if ended.code:
            seen = f"a worker of the battery ended with {ended.code}: {ended.text[-1000:]}"
            append(log, {"kind": kind, "bad": "traceback", "seen": seen, "seconds": 0.0})


def name_of(case: Case) -> str:
    """Return what tells a case from the others of its kind."""
    function, *arguments = case
    assert callable(function)
    return f"{function.__name__}{tuple(arguments)}"


def append(log: Path, line: dict[str, Any]) -> None:
    """Add a line to a log that several processes write."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)


def try_cases(
    battery: runs.Battery,
    kind: str,
    share: list[tuple[int, Case]],
    log: Path,
    until: float,
    count: int,
) -> None:
    """Try some of `count` cases until a moment, and write the outcome of each."""
    for number, case in share:
        if time.monotonic() > until:
            return
        function, *arguments = case
        place = battery.folder / "cases" / f"{kind}-{number}"
        place.mkdir(parents=True)
        assert callable(function)
        started, processor = time.monotonic(), processor_seconds()
        try:
            verdict = function(battery, place, *arguments)
        except Exception:
            verdict = ("traceback", f"in the battery: {traceback.format_exc()}")
        bad, seen = verdict or ("", "")
        took = {
            "seconds": round(time.monotonic() - started, 2),
            "processor_seconds": round(processor_seconds() - processor, 3),
        }
        append(
            log,
            {"kind": kind, "case": name_of(case), "of": count, "bad": bad, "seen": seen, **took},
        )
        shutil.rmtree(place, ignore_errors=True)


def processor_seconds() -> float:
    """Return the processor time of this process and of the commands it has waited for."""
    return sum(
        sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def describe(rows: dict[str, Row]) -> str:
    """Return the table. Seconds, of the clock and of processors, are those of all workers together."""
    words = [word for word in sys.argv[1:] if word]
    lines = [
        " ".join(["`python scripts/faults/fault_battery.py", *words]) + "`",
        "",
        f"| faults | of | what is broken | {' | '.join(BAD)} | seconds | CPU s |",
        "|---:|---:|---|" + "---:|" * (len(BAD) + 2),
    ]
    for kind, row in rows.items():
        counts = " | ".join(str(row.bad[bad]) for bad in BAD)
        took = f"{row.seconds:.0f} | {row.processor_seconds:.0f}"
        lines.append(
            f"| {row.cases:,} | {row.all_cases:,} | {KINDS[kind][0]} | {counts} | {took} |"
        )
    totals = " | ".join(str(sum(row.bad[bad] for row in rows.values())) for bad in BAD)
    faults, every = (
        sum(row.cases for row in rows.values()),
        sum(row.all_cases for row in rows.values()),
    )
    seconds = sum(row.seconds for row in rows.values())
    processor = sum(row.processor_seconds for row in rows.values())
    lines.append(
        f"| {faults:,} | {every:,} | **all** | {totals} | {seconds:.0f} | {processor:.0f} |"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
