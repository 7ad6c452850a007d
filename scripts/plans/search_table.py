#!/usr/bin/env python
"""Processor time of searches for recipes, at a commit before and in this checkout, and whether they found the same.

    python scripts/plans/search_table.py --before COMMIT [--only resnet101 ...] [--with resnet101] [--results FOLDER]
        -o docs/benchmarks/plan_search.md

Both run `mpt plan CONFIG --vram SIZE --json`, one after the other, all processes with their starts; COMMIT is unpacked
into a temporary folder. `--with NAME` checks that each fitting recipe of a search, planned again as a patch over its
configuration, stays within the budget. With `--results` each search's result is kept as a file, and not searched again.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpt.config.load import load_config
from mpt.config.text.yaml_text import write_text
from mpt.planner.client.processes import count_workers
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import load_calibration
from mpt.planner.facts.gpus import DEFAULT, find_gpu
from mpt.planner.recipes.recipe import describe_patch

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS = "mpt/systems"
AGAINST = """The aim of 15 s for each of the first three was set on another machine, by figures of a commit of
22 November (c789bdee): ResNet-101 22 s, ViT-L 41, SD 1.5's UNet 68. Here that commit took 44.3, 57.8 and 61.7 s for
ResNet-101 and 83.2, 91.8 and 99.3 s for ViT-L (load 2 to 3), on 2026-11-26: 2.5 and 2.2 times as much on average. So
15 s there are some 33 to 37 s here. The UNet cannot be compared so, since its configuration came two days after that
commit."""
NOT_COMPARED = frozenset({"planning_seconds", "chance", "verdict", "cost"})
SEARCHES = {
    "resnet101": "configs/resnet50_imagefolder.yaml model=torchvision:resnet101 train.batch_size=128 --vram 8GiB",
    "vit_large": "configs/resnet50_imagefolder.yaml model=timm:vit_large_patch16_224 optimizer=null "
    "optimizer=adamw train.batch_size=32 --vram 8GiB",
    "sd15_unet": f"{SYSTEMS}/diffusion/configs/sd15_lora.yaml memory.lora=null precision=amp --vram 8GiB --gpu rtx3060",
    "resnet50": "configs/resnet50_imagefolder.yaml train.batch_size=128 --vram 6GiB",
    "dcgan": "configs/dcgan_fp32.yaml train.batch_size=8192 --vram 1GiB",
    "vae": "configs/vae.yaml train.batch_size=65536 --vram 1GiB",
    "saehd": f"{SYSTEMS}/deepfacelab/configs/saehd_512.yaml --vram 6GiB",
    "yolofuse": f"{SYSTEMS}/yolofuse/configs/yolofuse_mid.yaml --vram 6GiB",
    "dain": f"{SYSTEMS}/dain/configs/dain_vimeo.yaml --vram 6GiB",
    "sd15_lora": f"{SYSTEMS}/diffusion/configs/sd15_lora.yaml --vram 2560MiB",
    "stylegan2": f"{SYSTEMS}/stylegan2/configs/stylegan2_256.yaml --vram 6GiB",
}


@dataclass(frozen=True)
class Found:
    """A search's output and what it took."""

    seconds: float
    """Processor time."""
    load: float
    """Of the machine, when it was done."""
    plan: dict[str, Any]
    recipes: list[dict[str, Any]]
    commit: str = ""
    """If it is another one than the page's."""

    @property
    def took(self) -> str:
        """The time, with the machine's load, and the commit if it is another one."""
        return f"{self.seconds:.1f} ({self.load:.0f}{f', at {self.commit}' * bool(self.commit)})"

    @property
    def first(self) -> dict[str, Any] | None:
        """The first recipe, if it fits."""
        return self.recipes[0] if self.recipes and self.recipes[0]["fits"] else None


def main() -> None:
    """Search, compare, and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, metavar="COMMIT")
    parser.add_argument("--only", nargs="*", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--with", dest="again", nargs="*", choices=SEARCHES, default=[])
    parser.add_argument("--results", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = options.results or Path(folder) / "results"
        results.mkdir(exist_ok=True)
        archive = subprocess.run(
            ["git", "archive", options.before], cwd=ROOT, capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        rows = [row_of(name, Path(folder), results, name in options.again) for name in options.only]
    text = page(rows, options)
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text, "utf-8")


def row_of(name: str, before: Path, results: Path, again: bool) -> dict[str, Any]:
    """Return a row: times, numbers of recipes, the first one, and what differs."""
    old, new = (
        kept(results / f"{name}-{age}.json", tree, SEARCHES[name])
        for age, tree in (("before", before), ("after", ROOT))
    )
    row = {
        "name": name,
        "before": old.took,
        "after": new.took,
        "recipes": (len(old.recipes), len(new.recipes)),
        "first": "none fits" if new.first is None else describe(new.first),
        "same": describe_difference(old, new),
        "again": plan_again(name, new) if again else "",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def kept(path: Path, tree: Path, words: str) -> Found:
    """Return the result of a search that is kept at `path`, searched now if it is not there."""
    if not path.is_file():
        path.write_text(json.dumps(vars(search(tree, words))), "utf-8")
    return Found(**json.loads(path.read_text("utf-8")))


def search(tree: Path, words: str) -> Found:
    """Return the rows of a search in a checkout."""
    config, *others = words.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "mpt", "plan", str(tree / config), *others, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 7):
        raise SystemExit(
            f"{' '.join(command)}: exit {ended.returncode}: {ended.stderr.strip()[-400:]}"
        )
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    data = json.loads(ended.stdout)
    return Found(seconds, os.getloadavg()[0], data["plan"], data["recipes"])


def describe(recipe: dict[str, Any]) -> str:
    """Return a recipe in words."""
    return f"{describe_patch(recipe['patch'])} ({recipe['cost']}), {recipe['step_seconds'] * 1000:.0f} ms"


def describe_difference(old: Found, new: Found) -> str:
    """Return how the results of two searches differ."""
    was, now = (
        {json.dumps(one["patch"]): as_compared(one) for one in found.recipes}
        for found in (old, new)
    )
    changed = [patch for patch in was.keys() & now.keys() if was[patch] != now[patch]]
    if as_compared(old.plan) != as_compared(new.plan) or changed:
        return f"{len(changed)} recipes have other figures"
    if old.first is not None and (new.first is None or old.first["patch"] != new.first["patch"]):
        is_better = (
            new.first is not None
            and new.first["cost"] == old.first["cost"]
            and new.first["step_seconds"] < old.first["step_seconds"]
        )
        return (
            f"a faster one comes first, before {describe(old.first)}"
            if is_better
            else "another comes first"
        )
    left, added = len(was.keys() - now.keys()), len(now.keys() - was.keys())
    parts = [f"{left} left out"] * (left > 0) + [f"{added} more"] * (added > 0)
    return ", ".join(parts) or "all the same"


def as_compared(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's figures but for the time that it took, and its chance, which new measurements change."""
    return {name: value for name, value in data.items() if name not in NOT_COMPARED}


def plan_again(name: str, found: Found) -> str:
    """Plan each fitting recipe as `--with` has it; return how many stay within the budget."""
    config, *others = SEARCHES[name].split()
    overrides = list(itertools.takewhile(lambda word: not word.startswith("--"), others))
    card = find_gpu(others[others.index("--gpu") + 1] if "--gpu" in others else DEFAULT)
    configs = []
    for one in found.recipes:
        if one["fits"] and one["patch"]:
            with tempfile.TemporaryDirectory() as folder:
                patch = Path(folder) / "recipe.yaml"
                patch.write_text(write_text(one["patch"]), "utf-8")
                configs.append(load_config(ROOT / config, overrides, patches=[patch]))
    with Session(card, load_calibration(card.name, None), workers=count_workers()) as session:
        answers = session.plan(configs, budget_bytes=found.plan["budget_bytes"])
    held = sum(answer.found is not None and answer.found.fits is True for answer in answers)
    return f"{held} of {len(configs)}"


def page(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the page."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    lines = [
        "# How long a search for recipes takes",
        "",
        f"Command: `python scripts/plans/search_table.py --before {options.before}`, {datetime.date.today()}, commit "
        f"{commit.stdout.strip()}, {platform.machine()} with {os.cpu_count()} cores. No GPU was used.",
        "",
        "Processor seconds of `mpt plan CONFIG --vram SIZE --json`, all processes with their starts; in brackets the "
        "load of the machine's two threads, by which seconds differ too: one and the same plan took 12 to 24. Recipes "
        "that are left out cannot come first: something fits that changes no more, and takes no longer than a part of "
        "them, or that changes nothing, and takes no longer than the ranking allows it beside them. The last column: "
        "how many of the fitting recipes stay within the budget when they are planned again.",
        "",
        "| Search | Before, s | After, s | Recipes | The first | Compared with before | `--with` |",
        "|---|---:|---:|---:|---|---|---:|",
    ]
    for row in rows:
        counts = f"{row['recipes'][0]}, then {row['recipes'][1]}"
        cells = [
            row["name"],
            row["before"],
            row["after"],
            counts,
            row["first"],
            row["same"],
            row["again"],
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        AGAINST.replace("\n", " "),
        "",
        "The searches:",
        "",
        *(f"- {row['name']}: `mpt plan {SEARCHES[row['name']]}`" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
