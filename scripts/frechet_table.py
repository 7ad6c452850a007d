"""Fill the table of Frechet distances in docs/how-to/generative.md: every VAE and GAN over seeds in several modes.

Usage:
    nice -n 19 python scripts/frechet_table.py                          # all models of generative_table.py; hours
    python scripts/frechet_table.py --only vae lsgan --seeds 1 --modes fp32 amp --set train.steps=200

A cell is the mean of the last evaluation's distance over seeds, with the standard deviation from two seeds on. The last
column is the doctor's: what of a first step does not survive float16, by its findings on numerics. Runs stay below
--work and are gone on with after an interruption; the table has the rows of this call, the others stay.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from generative_table import COMMAND, DOCUMENT, PLAN, Entry, between, write_between

MODES = ("fp32", "amp", "O1", "O2", "bf16-pure")
MARKER = "table:frechet"


def main() -> None:
    """Run the plan and rewrite the table's rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, default=Path("runs") / "frechet")
    parser.add_argument("--only", nargs="*", default=[entry.name for entry in PLAN])
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], dest="changes")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    rows = old_rows(arguments.document)
    for entry in PLAN:
        if entry.name in arguments.only:
            print(f"{entry.name}: {', '.join(arguments.modes)}, {arguments.seeds} seed(s)", flush=True)
            compare(entry, arguments)
            rows[entry.name] = row_of(entry, arguments)
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True, text=True
    )
    given = [one for one in sys.argv[1:] if one not in ("--work", str(arguments.work))]
    command = "python scripts/frechet_table.py " + " ".join(given)
    lines = [
        f"`{command.strip()}`, {date.today()}, {arguments.device}, {platform.machine()}, torch {torch.stdout.strip()}.",
        "",
        "| Model | Steps | " + " | ".join(MODES) + " | Not in float16, by the doctor |",
        "|---|---:|" + "---:|" * len(MODES) + "---|",
        *(rows[entry.name] for entry in PLAN if entry.name in rows),
    ]
    write_between(arguments.document, MARKER, lines)


def old_rows(document: Path) -> dict[str, str]:
    """Return the rows that stand in the document, by model."""
    lines = between(document, MARKER)[1].strip().splitlines()
    body = [line for line in lines if line.startswith("| ")][1:]
    return {line.split("|")[1].strip(): line for line in body}


def compare(entry: Entry, arguments: Any) -> None:
    """Train one model in all modes and seeds; what fails is printed."""
    words = [*COMMAND, "compare", *arguments.modes, "--config", f"@{entry.config}"]
    words += ["--seeds", str(arguments.seeds), "--runs", str(arguments.work), "--name", entry.name]
    words += ["--device", arguments.device, "--quiet", *entry.changes, *arguments.changes]
    if arguments.device == "cpu":
        words.append("train.threads=1")
    finished = subprocess.run(words, capture_output=True, text=True)
    if finished.returncode:
        print(f"{entry.name}: exit {finished.returncode}: {finished.stderr.strip()[-400:]}", flush=True)


def row_of(entry: Entry, arguments: Any) -> str:
    """Return a model's row."""
    cells, steps = [], 0
    for mode in MODES:
        found = [last_evaluation(path) for path in sorted(arguments.work.glob(f"**/{entry.name}/{mode}-seed-*"))]
        steps = max([steps, *(one["step"] for one in found if one)])
        cells.append(show([one["metrics"]["frechet_distance"] for one in found if one]))
    return f"| {entry.name} | {steps:,} | " + " | ".join(cells) + f" | {doctor(entry, arguments)} |"


def last_evaluation(run: Path) -> dict[str, Any] | None:
    """Return a run's last evaluation."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.is_file() else []
    evaluated = [line for line in lines if line["kind"] == "evaluate" and "frechet_distance" in line["metrics"]]
    return evaluated[-1] if evaluated else None


def show(values: list[float]) -> str:
    """Return mean and deviation, or a dash."""
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def doctor(entry: Entry, arguments: Any) -> str:
    """Return the doctor's findings on float16, in short."""
    words = [*COMMAND, "doctor", f"@{entry.config}", *entry.changes, "--only", "numerics"]
    finished = subprocess.run([*words, "--json", "--device", arguments.device], capture_output=True, text=True)
    try:
        sections = json.loads(finished.stdout)["sections"]
    except (ValueError, KeyError):
        return f"not examined (exit {finished.returncode})"
    found = [one for section in sections for one in section["findings"] if one["level"] != "ok"]
    said = [f"{one['about']}: {one['text']}".replace("|", "/") for one in found if one["level"] != "note"]
    notes = len(found) - len(said)
    return "; ".join(said[:3]) or (f"nothing fails ({notes} notes)" if notes else "nothing")


if __name__ == "__main__":
    main()
