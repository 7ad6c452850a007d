"""Fill docs/benchmarks/shipped.md: what demos reach, and what the cookbook's recipes are planned at.

    OMP_NUM_THREADS=1 python scripts/quality/shipped_table.py --plans                # a plan of every row, seconds each
    OMP_NUM_THREADS=1 python scripts/quality/shipped_table.py --demos vae wgan_gp    # trains these, in runs/shipped

A row that is not made again stays, with the day on which it was made. Processor time is that of all threads and child
processes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from scripts.command_line import described
from scripts.provenance import made
from scripts.quality.generative_table import COMMAND, ROOT, between, write_between

PAGE = ROOT / "docs" / "benchmarks" / "shipped.md"
PLANS = (
    "@resnet50_imagefolder --gpu gtx1650 model=torchvision:resnet18 train.batch_size=64",
    "@dcgan_amp --gpu gtx1650 model.image_size=64 model.features=64",
    "@resnet50_imagefolder --gpu rtx2060 train.batch_size=64",
    "@resnet50_imagefolder --gpu rtx2060 model=timm:vit_base_patch16_224 train.batch_size=60 memory.lora=16",
    "@resnet50_imagefolder --gpu rtx2060 memory.micro_batch=64",
    "@stylegan2_256 --gpu rtx2060",
    "@saehd_512 --gpu rtx2060 --with @saehd_512_6gb",
    "@resnet50_imagefolder --gpu rtx3070 train.batch_size=128",
    "@resnet50_imagefolder --gpu rtx3060 model=timm:vit_base_patch16_224 train.batch_size=128",
    "@resnet50_imagefolder --gpu rtx3060 model=timm:vit_base_patch16_224 train.batch_size=64",
    "@resnet50_imagefolder --gpu rtx3090",
    "@resnet50_imagefolder --with @resnet50_imagefolder_6gb --gpu rtx2060",
    "@resnet50_imagefolder --with @resnet50_imagefolder_8gb --gpu rtx3070",
    "@resnet50_imagefolder --with @resnet50_imagefolder_10gb --gpu rtx3080",
    "@resnet50_imagefolder --with @resnet50_imagefolder_12gb --gpu rtx3060",
    "@yolofuse_mid --with @yolofuse_mid_6gb --gpu rtx2060",
    "@yolofuse_mid --with @yolofuse_mid_8gb --gpu rtx3070",
    "@yolofuse_mid --gpu rtx3070 memory.recompute=all",
    "@yolofuse_mid --gpu rtx3070 memory.micro_batch=32",
    "@yolofuse_mid --with @yolofuse_mid_10gb --gpu rtx3080",
    "@dain_vimeo --gpu rtx2060",
)
NEEDS = re.compile(
    r"(does not fit|may fit|fits) in ([\d.,]+ [MG]iB).*?needs ([\d.,]+ [MG]iB)", re.S
)


def rows_of(marker: str) -> dict[str, str]:
    """Return a table's rows by their first cell."""
    rows = [line for line in between(PAGE, marker)[1].splitlines() if line.startswith("| `")]
    return {row.split("|")[1].strip(): row for row in rows}


def plan(words: str) -> str:
    """Plan one row."""
    command = [*COMMAND, "plan", *shlex.split(words)]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "runs").stdout
    found = NEEDS.search(printed)
    verdict, budget, needs = found.groups() if found else ("not planned", "", "")
    return f"| {needs} | {budget} | {verdict} | `mpt plan {words}` | {made()} |"


def train(name: str, changes: list[str]) -> str:
    """Train one demo from its beginning."""
    before = os.times()
    options = ["--runs", "runs/shipped", "--name", name, "--quiet"]
    subprocess.run([*COMMAND, "train", f"@{name}", *options, *changes], check=True, cwd=ROOT)
    after = os.times()
    seconds = sum(after[2:4]) - sum(before[2:4])
    newest = max(
        (ROOT / "runs" / "shipped").glob(f"{name}*/results.csv"),
        key=lambda path: path.stat().st_mtime,
    )
    head, *_, last = newest.read_text("utf-8").splitlines()
    figures = dict(zip(head.split(","), last.split(","), strict=True))
    config = json.loads((newest.parent / "summary.json").read_text("utf-8"))
    metric = str(
        config.get("metric")
        or next(key for key in figures if key not in ("step", "seconds", "time"))
    )
    words, figure = " ".join([f"@{name}", *changes]), f"{metric} {float(figures[metric]):.3f}"
    return f"| `mpt train {words}` | {figures['step']} | {figure} | {seconds:.0f} | {made()} |"


def main() -> None:
    """Make the tables that are asked for and write the page."""
    parser = described(__doc__)
    parser.add_argument("--plans", action="store_true")
    parser.add_argument("--demos", nargs="*", default=[], metavar="NAME")
    parser.add_argument(
        "--changes", nargs="*", default=[], metavar="KEY=VALUE", help="settings of these trainings"
    )
    arguments = parser.parse_args()
    (ROOT / "runs").mkdir(exist_ok=True)
    for name in arguments.demos:
        row = train(name, arguments.changes)
        rows = {**rows_of("table:demos"), row.split("|")[1].strip(): row}
        write_between(PAGE, "table:demos", [*DEMO_HEAD, *(rows[key] for key in sorted(rows))])
    if arguments.plans:
        write_between(PAGE, "table:plans", [*PLAN_HEAD, *map(plan, PLANS)])


DEMO_HEAD = ("| command | steps | figure | CPU s | made |", "|---|---:|---|---:|---|")
PLAN_HEAD = ("| needs | of | verdict | command | made |", "|---:|---:|---|---|---|")

if __name__ == "__main__":
    main()
