"""Kill every rank at every call of a sharded save: is a whole checkpoint left each time?

    python scripts/faults/kill_saves.py                   # 2 and 3 ranks, and the ranks after the first of 4
    python scripts/faults/kill_saves.py --ranks 2 --beat 0.5
    python scripts/faults/kill_saves.py --beside          # saves beside the training
    python scripts/faults/kill_saves.py --beside --whole  # with ddp: the first rank writes all

Ranks on gloo and CPUs save the steps 1, 2 and 3. In the third save one of them is killed (SIGKILL) before its n-th call
that changes files, or after half of a write, for every n. Then the others must end with exit code 9, and one process
must find step 2 or 3, bit for bit as it was saved, with nothing unfinished left beside it. A line per world and rank.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.parallel import watch
from tests.parallel.forked import run_ranks
from tests.parallel.killed_saves import kill_and_look, saving


def rows(sizes: list[int], every: int, is_beside: bool, is_whole: bool) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| ranks | killed rank | kills | step 2 is left | step 3 is left | damaged or lost | others' exit code |"
    yield "|---:|---:|---:|---:|---:|---:|---|"
    total = 0
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            counts = run_ranks(size, saving, Path(name), (1, 2, 3), None, is_beside, is_whole)
        for rank in range(0 if size < 4 or is_whole else 1, size):
            found: Counter[str] = Counter()
            codes: Counter[int] = Counter()
            for call in range(0, counts[rank], every):
                end = killed(size, rank, call, is_beside, is_whole)
                codes.update(code for other, code in enumerate(end["ends"]) if other != rank)
                good = end["whole"] and end["step"] in (2, 3) and not end["left"]
                found[str(end["step"]) if good else "lost"] += 1
                print(f"{size} ranks, rank {rank}, call {call}: {end}", file=sys.stderr, flush=True)
            if not counts[rank]:
                continue  # it writes nothing
            kills = sum(found.values())
            total += kills
            told = ", ".join(f"{code} ({times}x)" for code, times in sorted(codes.items()))
            yield f"| {size} | {rank} | {kills} | {found['2']} | {found['3']} | {found['lost']} | {told} |"
    yield f"\n{total} kills"


def killed(size: int, rank: int, call: int, is_beside: bool, is_whole: bool) -> dict[str, Any]:
    """Return how a kill went; tried again where a busy machine let the ranks lose each other before it."""
    for _ in range(3):
        with tempfile.TemporaryDirectory() as name:
            end = kill_and_look(Path(name), size, rank, call, is_beside, is_whole)
        if end["ends"][rank] == -signal.SIGKILL:
            return end
        print(
            f"{size} ranks, rank {rank}, call {call}: not killed, {end}",
            file=sys.stderr,
            flush=True,
        )
    raise SystemExit("the ranks lose each other before any is killed: is this machine too busy?")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--every", type=int, default=1, help="try only every so many calls")
    parser.add_argument(
        "--beside", action="store_true", help="save beside the training (train.asynchronous_save)"
    )
    parser.add_argument(
        "--whole", action="store_true", help="save as ddp does: the first rank writes all"
    )
    parser.add_argument(
        "--beat", type=float, default=0.1, help="seconds between a rank's signs of life"
    )
    arguments = parser.parse_args()
    watch.BEAT_SECONDS = arguments.beat
    started = time.perf_counter()
    for line in rows(arguments.ranks, arguments.every, arguments.beside, arguments.whole):
        print(line, flush=True)
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
