"""Everything that can break around a run, in one table.

Kills, errors and signals at every file operation, damage to every file, links and pipes, hostile inputs, outputs that
nobody reads, several commands at once.

    python scripts/fault_battery.py                        # all of it, on all cores
    python scripts/fault_battery.py --scale 0.01           # an even sample
    python scripts/fault_battery.py --only kills errors    # some kinds

Each case is a command of `mpt` in a process of its own, compared with a run that was never disturbed: *lost* means that
something which had been there is gone, or that a resumed run differs from one never stopped by a bit; *silent* that a
command ended well with a wrong result; *traceback* that a user meets a mistake of ours; *hang* that nothing came at
all. All four are to be zero; the exit status is 1 where they are not, and each failed case is shown.
Plots are left out of the reports: they touch no file, and take most of a report's time.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import fault_battery_inputs as inputs
from scripts import fault_battery_runs as runs
from scripts.fault_battery_process import LIBRARY, build_library, start

Case = tuple[object, ...]
BAD = ("lost", "silent", "traceback", "hang")
KINDS: dict[str, tuple[str, int, Callable[[runs.Battery], list[Case]]]] = {
    "kills": ("SIGKILL before, or in the middle of, a file operation", 1, runs.kill_cases),
    "errors": ("a file operation fails, once or from there on", 1, runs.error_cases),
    "signals": ("SIGTERM, SIGINT, SIGHUP, SIGUSR1 at a file operation of a training", 1, runs.signal_cases),
    "files": ("a file of a run flipped, cut, emptied, grown, replaced or removed", 1, runs.file_cases),
    "checkpoints": ("a checkpoint's file flipped, cut, grown or with a hole", inputs.PER_CASE, inputs.checkpoint_cases),
    "planted": ("a link, pipe, folder or full device in a file's place", 1, runs.planted_cases),
    "weights": ("a weights file of others, bytes changed, removed or added", inputs.PER_CASE, inputs.weights_cases),
    "configs": ("a configuration with one to three mistakes, read", inputs.PER_CASE, inputs.config_cases),
    "smokes": ("such a configuration that was taken, trained for two steps", 1, inputs.smoke_cases),
    "outputs": ("output closed, full or unread", 1, runs.output_cases),
    "together": ("two starts, two resumes; infer, report, convert while training", 1, runs.together_cases),
}
"""Kind -> what is broken, how many faults a case holds, and the cases."""


@dataclass
class Row:
    """A kind's outcome."""

    cases: int = 0
    seconds: float = 0.0
    bad: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=KINDS, help="these kinds of fault")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases, evenly chosen")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that try cases")
    parser.add_argument("--seed", type=int, default=0, help="which cases a share holds")
    parser.add_argument("--output", type=Path, help="file for the table")
    options = parser.parse_args()
    if LIBRARY not in os.environ:
        begin_with_library()
    with prepared() as battery:
        rows = try_kinds(battery, options.only or list(KINDS), options.scale, options.workers, options.seed)
    text = describe(rows, options.scale)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", "utf-8")
    sys.exit(any(row.bad for row in rows.values()))


def begin_with_library() -> None:
    """Start this program again with the library that sees every write, where it can be built."""
    folder = Path(tempfile.mkdtemp(prefix="mpt-faults-"))
    library = build_library(folder)
    environment = {**os.environ, LIBRARY: str(library or ""), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    if library is None:
        print("no C compiler: faults are injected into Python's os alone", file=sys.stderr)
    else:
        environment["LD_PRELOAD"] = str(library)
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def import_everything() -> None:
    """Import what commands import, so that their forks need not."""
    import torch
    import torch._dynamo
    import yaml

    import mpt.cli
    import mpt.commands.convert
    import mpt.commands.infer
    import mpt.commands.report
    import mpt.commands.train
    import mpt.engine.assembly
    import mpt.engine.loop
    import mpt.memory.dry_run
    import mpt.nn.small_cnn
    import mpt.optim.adam
    import mpt.planner.beside
    import mpt.report.page
    from mpt.config.load import load_config

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mpt.report.page.draw_run = lambda record: {}
    # What a process reads once is read here: the parts' sources, the templates, the declared commands.
    load_config(yaml.safe_load(runs.CONFIG))
    mpt.report.page.environment = functools.cache(mpt.report.page.environment)
    for name in ("run.md.j2", "run.html.j2"):
        mpt.report.page.environment().get_template(name)
    mpt.cli.make_app = functools.cache(mpt.cli.make_app)
    mpt.cli.make_app()
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page it marks


@contextlib.contextmanager
def prepared() -> Iterator[runs.Battery]:
    """Import everything, train what is compared with, and remove it at the end."""
    import_everything()
    memory = Path("/dev/shm")  # where syncing costs nothing
    folder = Path(tempfile.mkdtemp(prefix="mpt-faults-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield runs.prepare(folder)
    finally:
        gc.unfreeze()
        shutil.rmtree(folder, ignore_errors=True)


def try_kinds(battery: runs.Battery, kinds: Sequence[str], scale: float, workers: int, seed: int = 0) -> dict[str, Row]:
    """Try a share of the cases of each kind; return what came out."""
    rows = {}
    for kind in kinds:
        cases = sample(KINDS[kind][2](battery), scale, seed)
        started = time.monotonic()
        rows[kind] = row = spread(battery, kind, cases, workers)
        row.seconds = time.monotonic() - started
        row.cases = len(cases) * KINDS[kind][1]
        outcome = dict(row.bad) or "all well"
        print(f"{kind}: {row.cases} in {row.seconds:.0f} s, {outcome}", file=sys.stderr, flush=True)
        for shown in row.shown:
            print(f"  {shown}", file=sys.stderr, flush=True)
    return rows


def sample(cases: list[Case], scale: float, seed: int) -> list[Case]:
    """Return a share of the cases, at least one, evenly spread over their order."""
    if scale >= 1:
        return cases
    wanted = max(1, round(len(cases) * scale))
    offset = random.Random(seed).random()
    return [cases[int((index + offset) * len(cases) / wanted)] for index in range(wanted)]


def spread(battery: runs.Battery, kind: str, cases: list[Case], workers: int) -> Row:
    """Try cases in several processes."""
    row = Row()
    shares = [list(itertools.islice(enumerate(cases), number, None, workers)) for number in range(workers)]
    logs = [battery.folder / f"{kind}-{number}.log" for number in range(workers)]
    running = [
        start(lambda share=share, log=log: try_cases(battery, kind, share, log), battery.folder / "workers.log")
        for share, log in zip(shares, logs, strict=True)
    ]
    for one, log in zip(running, logs, strict=True):
        ended = one.wait(seconds=86400)
        for line in log.read_text("utf-8").splitlines() if log.is_file() else ():
            bad, _, what = line.partition(" ")
            row.bad[bad] += 1
            row.shown.append(what)
        if ended.code:
            row.bad["traceback"] += 1
            row.shown.append(f"a worker of the battery ended with {ended.code}: {ended.text[-1000:]}")
    return row


def try_cases(battery: runs.Battery, kind: str, share: list[tuple[int, Case]], log: Path) -> None:
    """Try some cases and write the failed ones, a line each."""
    with log.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for number, (function, *arguments) in share:
            place = battery.folder / "cases" / f"{kind}-{number}"
            place.mkdir(parents=True)
            assert callable(function)
            try:
                verdict = function(battery, place, *arguments)
            except Exception:
                verdict = ("traceback", f"in the battery: {traceback.format_exc()}")
            if verdict is not None:
                bad, seen = verdict
                file.write(f"{bad} {bad}: {function.__name__}{tuple(arguments)}: {seen!r}\n")
                file.flush()
            shutil.rmtree(place, ignore_errors=True)


def describe(rows: dict[str, Row], scale: float) -> str:
    """Return the table."""
    lines = [
        f"`python scripts/fault_battery.py{'' if scale >= 1 else f' --scale {scale:g}'}`",
        "",
        f"| faults | what is broken | {' | '.join(BAD)} | seconds |",
        "|---:|---|" + "---:|" * (len(BAD) + 1),
    ]
    for kind, row in rows.items():
        counts = " | ".join(str(row.bad[bad]) for bad in BAD)
        lines.append(f"| {row.cases:,} | {KINDS[kind][0]} | {counts} | {row.seconds:.0f} |")
    totals = " | ".join(str(sum(row.bad[bad] for row in rows.values())) for bad in BAD)
    faults = sum(row.cases for row in rows.values())
    lines.append(f"| {faults:,} | **all** | {totals} | {sum(row.seconds for row in rows.values()):.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
