"""Fill docs/benchmarks/pruning.md: what pruning with training on costs generators, RIFE and DAIN, and what it gains.

Usage:
    nice -n 15 python scripts/quality/pruning_table.py              # CPU, half an hour on one core
    python scripts/quality/pruning_table.py --only lsgan dain

Each run is trained by `mpt train` and pruned and trained on by `mpt prune`, whose own figures stand in the table. A run
that is trained on by as many steps without being pruned says how much of a difference is the further training's. The
second table is planned: a step of each configuration at its published size on a card, whole and pruned. Runs stay below
--work; what is there is not made again.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.provenance import made
from scripts.quality.generative_table import COMMAND, ROOT, stamp, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "pruning.md"
SHARES = (0.75, 0.5)
QUIET = ("train.sample_every=0", "train.checkpoint_every=0", "train.threads=1", "train.device=cpu")
GPU = "rtx2060"
MEBI = 2**20


@dataclass(frozen=True)
class Entry:
    """A training that is pruned, the steps that it is trained on for, and what is changed for them."""

    config: str
    metric: str
    changes: tuple[str, ...]
    steps: int
    further: tuple[str, ...] = ()


FURTHER = ("task.flow_steps=0", "optimizer.lr=1.5e-3", "train.batch_size=2")
PLAN = {
    "dcgan": Entry("dcgan_fp32", "frechet_distance", ("train.steps=400",), 100),
    "lsgan": Entry("lsgan", "frechet_distance", ("train.steps=2000", "precision=fp32"), 500),
    "dain": Entry(
        "dain_demo",
        "psnr",
        ("train.steps=350", "task.flow_steps=250", "precision=fp32"),
        40,
        FURTHER,
    ),
    "rife": Entry(
        "rife_demo",
        "psnr",
        ("train.steps=200", "task.flow_steps=150", "precision=fp32", "train.batch_size=4"),
        40,
        FURTHER,
    ),
}
PUBLISHED = {"`@dain_vimeo`": ("dain_vimeo", ())}


def main() -> None:
    """Train and prune what is missing, plan, and write both tables."""
    parser = described(__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs") / "pruning")
    parser.add_argument("--only", nargs="*", default=list(PLAN), choices=list(PLAN))
    parser.add_argument("--measured", action="store_true", help="leave the table of plans as it is")
    arguments = parser.parse_args()
    head = ["Run", "Kept", "Parameters", "Figure", "Pruned", "Trained on", "Not pruned, trained on"]
    head += ["Evaluation, CPU s", "Training step, MiB"]
    only = "" if arguments.only == list(PLAN) else f" --only {' '.join(arguments.only)}"
    lines = [stamp(f"python scripts/quality/pruning_table.py{only}"), ""]
    lines += ["| " + " | ".join(head) + " |", "|---|---:|---:|---|" + "---:|" * (len(head) - 4)]
    for name in PLAN:
        if name in arguments.only:
            lines += rows(arguments.work, name)
            write_between(DOCUMENT, "table:pruning", lines)
    if not arguments.measured:
        write_between(DOCUMENT, "table:planned", planned())


def rows(work: Path, name: str) -> list[str]:
    """Return the rows of a training: whole, and at each share."""
    from mpt.report.reading.read_run import read_run

    entry, folder = PLAN[name], work / name
    if not (folder / "summary.json").is_file():
        typed(
            "train",
            f"@{entry.config}",
            "train.epochs=null",
            *entry.changes,
            *QUIET,
            "--name",
            name,
            "--runs",
            str(work),
        )
    further = [
        f"train.steps={entry.steps}",
        f"train.evaluate_every={entry.steps}",
        "train.epochs=null",
        *entry.further,
    ]
    unpruned = work / f"{name}-further"
    if not (unpruned / "summary.json").is_file():
        start = [str(folder / "config.yaml"), f"model.weights={folder}", *further]
        typed("train", *start, "--name", unpruned.name, "--runs", str(work))
    same = read_run(unpruned)  # with the batch and the phases of the pruned ones
    alone = f"{same.figures[entry.metric]:.4g}"
    whole_peak = f"{same.step_peak_bytes / MEBI:.1f}"
    found = []
    for share in SHARES:
        kept = work / f"{name}-{share}.md"
        if not kept.is_file():
            words = [
                "prune",
                str(folder),
                "--share",
                str(share),
                "--steps",
                str(entry.steps),
                "--name",
                kept.stem,
            ]
            text = typed(*words, *entry.further, "--runs", str(work), "--device", "cpu")
            kept.write_text(text, "utf-8")
        stages = read_table(kept.read_text("utf-8"))
        measured = [stages[row] for row in ("parameters", entry.metric, "evaluation, processor s")]
        if share == SHARES[0]:
            count, figure, seconds = (one[0] for one in measured)
            found.append(
                row(
                    name,
                    "all",
                    count,
                    f"{entry.metric} {figure}",
                    "",
                    "",
                    alone,
                    seconds,
                    whole_peak,
                )
            )
        peak = stages["training step, peak"][-1].removesuffix(" MiB")
        pruned_figure, after = stages[entry.metric][1:]
        found.append(
            row(
                "",
                f"{share:.0%}",
                measured[0][-1],
                "",
                pruned_figure,
                after,
                "",
                measured[2][-1],
                peak,
            )
        )
    return found


def row(*cells: str) -> str:
    """Return a row of a table."""
    return "| " + " | ".join(cells) + " |"


def read_table(text: str) -> dict[str, list[str]]:
    """Return the rows of the table that `mpt prune` prints: before, pruned, trained on."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return {
        cells[0]: cells[1:]
        for cells in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    }


def typed(*words: str) -> str:
    """Run a command and return what it prints."""
    print("mpt", *words, flush=True)
    done = subprocess.run([*COMMAND, *words], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout


def planned() -> list[str]:
    """Return the table of planned steps."""
    from mpt.config.finding.shipped import find_shipped
    from mpt.config.load import load_config
    from mpt.planner.client.session import Session
    from mpt.planner.facts.calibration import load_calibration
    from mpt.planner.facts.gpus import find_gpu

    lines = [f"Planned for one training step on an {GPU} ({made()}), with the CUDA context."]
    lines += ["", "| Configuration | Kept | Memory, MiB | Step, ms |", "|---|---:|---:|---:|"]
    with Session(find_gpu(GPU), load_calibration(GPU)) as session:
        for label, (config, changes) in PUBLISHED.items():
            for share in (None, *SHARES):
                trick = (
                    ()
                    if share is None
                    else (f"memory.prune.share={share}", f"memory.prune.networks={pruned(config)}")
                )
                plan = session.plan([load_config(find_shipped(config), [*changes, *trick])])[
                    0
                ].get()
                total = (plan.reserved + plan.context_bytes) / MEBI
                kept = "all" if share is None else f"{share:.0%}"
                lines.append(
                    f"| {label if share is None else ''} | {kept} | {total:,.0f} | {1e3 * plan.step_seconds:.0f} |"
                )
                print(lines[-1], flush=True)
    return lines


def pruned(config: str) -> str:
    """Return the networks that `mpt prune` prunes of a configuration."""
    return "[gen]" if config.startswith("dcgan") else '["*"]'


if __name__ == "__main__":
    main()
