"""Fill the table of distillation in docs/benchmarks/yolofuse.md: mid fusion taught by other detectors, and alone.

Usage:
    python scripts/quality/distillation_table.py      # CPU: two teachers and nine short trainings, a quarter of an hour
    python scripts/quality/distillation_table.py --seeds 5
    python scripts/quality/distillation_table.py --read     # lay out what is below --work already

Teachers are `mpt train @yolofuse_demo` with another fusion; students are mid fusion, half as long, so that
there is something left to learn, once per seed and teacher.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.quality.generative_table import COMMAND, ROOT, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "yolofuse.md"
CONFIG = "@yolofuse_demo"
TEACHERS = {"early": "early fusion, size n, 300 steps", "ir": "infrared alone, size n, 300 steps"}
STUDENTS = ("none", *TEACHERS)
STEPS = 150
HEAD = (
    "| Teacher | its mAP50 | mAP50 of mid | mAP50-95 of mid | seeds |",
    "|---|---:|---:|---:|---:|",
)


def main() -> None:
    """Train what is not there yet and rewrite the table."""
    parser = described(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs") / "distillation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--read", action="store_true")
    arguments = parser.parse_args()
    for name, words in () if arguments.read else commands(arguments.work, arguments.seeds).items():
        if not (arguments.work / name / "summary.json").is_file():
            print(name, *words, flush=True)
            subprocess.run(
                [*COMMAND, *words, "--runs", str(arguments.work), "--quiet", "--name", name],
                check=True,
            )
    lines = [*HEAD, *(row(arguments.work, teacher) for teacher in STUDENTS)]
    write_between(DOCUMENT, "table:distillation", lines)


def commands(work: Path, seeds: int) -> dict[str, list[str]]:
    """Return the words of `mpt` by the name of the run: both teachers, then students seed by seed."""
    periods = ["train.evaluate_every=0", "train.checkpoint_every=0"]
    found = {
        name: [
            "train",
            CONFIG,
            f"model.fusion={name}",
            *periods,
            *(["dataset.cameras=pair"] if name == "ir" else []),
        ]
        for name in TEACHERS
    }
    for seed in range(seeds):
        for teacher in STUDENTS:
            taught = [] if teacher == "none" else [f"task.teacher={work / teacher}"]
            words = [
                "train",
                CONFIG,
                f"train.steps={STEPS}",
                "--seed",
                str(seed),
                *periods,
                *taught,
            ]
            found[f"mid-{teacher}-seed{seed}"] = words
    return found


def row(work: Path, teacher: str) -> str:
    """Return the row of one teacher: means over the seeds' runs and their deviation."""
    from mpt.report.reading.read_run import read_run

    figures = [
        read_run(path.parent).figures
        for path in sorted(work.glob(f"mid-{teacher}-seed*/summary.json"))
    ]
    cells = [TEACHERS.get(teacher, "none")]
    cells.append(f"{read_run(work / teacher).figures['map50']:.3f}" if teacher in TEACHERS else "")
    for key in ("map50", "map50_95"):
        values = [one[key] for one in figures]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        cells.append(f"{statistics.fmean(values):.3f}{spread}")
    return f"| {' | '.join((*cells, str(len(figures))))} |"


if __name__ == "__main__":
    main()
