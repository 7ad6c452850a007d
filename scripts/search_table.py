#!/usr/bin/env python
"""Processor time of searches for recipes, at a commit before and in this checkout, and whether they found the same.

    python scripts/search_table.py --before COMMIT [--only resnet101 ...] -o docs/benchmarks/plan_search.md

Both run `mpt plan CONFIG --vram SIZE --json` in turns, all processes with their starts; COMMIT is unpacked into a
temporary folder. `--with` checks that each fitting recipe, planned again as a patch over its configuration, stays
within the budget.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpt.config.yaml_text import write_text
from mpt.planner.recipes.recipe import describe_patch

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = "mpt/systems"
SEARCHES = {
    "resnet101": "configs/resnet50_imagefolder.yaml model=torchvision:resnet101 train.batch_size=128 --vram 8GiB",
    "vit_large": "configs/resnet50_imagefolder.yaml model=timm:vit_large_patch16_224 optimizer=adamw "
    "train.batch_size=32 --vram 8GiB",
    "sd15_unet": f"{SYSTEMS}/diffusion/configs/sd15_lora.yaml memory.lora=null precision=amp --vram 8GiB --gpu rtx3060",
    "resnet50": "configs/resnet50_imagefolder.yaml train.batch_size=128 --vram 6GiB",
    "dcgan": "configs/dcgan_fp32.yaml --vram 1GiB",
    "vae": "configs/vae.yaml train.batch_size=4096 --vram 1GiB",
    "saehd": f"{SYSTEMS}/deepfacelab/configs/saehd_512.yaml --vram 8GiB",
    "yolofuse": f"{SYSTEMS}/yolofuse/configs/yolofuse_mid.yaml --vram 6GiB",
    "dain": f"{SYSTEMS}/dain/configs/dain_vimeo.yaml --vram 6GiB",
    "sd15_lora": f"{SYSTEMS}/diffusion/configs/sd15_lora.yaml --vram 4GiB",
    "stylegan2": f"{SYSTEMS}/stylegan2/configs/stylegan2_256.yaml --vram 6GiB",
}


@dataclass(frozen=True)
class Found:
    """A search's output and what it took."""

    seconds: float
    plan: dict[str, Any]
    recipes: list[dict[str, Any]]

    @property
    def first(self) -> dict[str, Any] | None:
        """The first recipe, if it fits."""
        return self.recipes[0] if self.recipes and self.recipes[0]["fits"] else None


def main() -> None:
    """Search, compare, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", required=True, metavar="COMMIT")
    parser.add_argument("--only", nargs="*", choices=SEARCHES, default=list(SEARCHES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--with", dest="again", action="store_true", help="plan each fitting recipe again, as a patch")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", options.before], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        rows = [row_of(name, Path(folder), options) for name in options.only]
    text = page(rows, options)
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text, "utf-8")


def row_of(name: str, before: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return a row: times, numbers of recipes, the first one, and what differs."""
    found: dict[Path, list[Found]] = {before: [], ROOT: []}
    for _ in range(options.rounds):
        for tree, one in found.items():
            one.append(search(tree, SEARCHES[name]))
    old, new = found[before][0], found[ROOT][0]
    row = {
        "name": name,
        "before": statistics.median(one.seconds for one in found[before]),
        "after": statistics.median(one.seconds for one in found[ROOT]),
        "recipes": (len(old.recipes), len(new.recipes)),
        "first": "none fits" if new.first is None else describe(new.first),
        "same": describe_difference(old, new),
        "again": plan_again(name, new) if options.again else "",
    }
    print(row, file=sys.stderr, flush=True)
    return row


def search(tree: Path, words: str) -> Found:
    """Return what a search in a checkout found."""
    config, *others = words.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "mpt", "plan", str(tree / config), *others, "--json"]
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 7):
        raise SystemExit(f"{' '.join(command)}: exit {ended.returncode}: {ended.stderr.strip()[-400:]}")
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    data = json.loads(ended.stdout)
    return Found(seconds, data["plan"], data["recipes"])


def describe(recipe: dict[str, Any]) -> str:
    """Return a recipe in words."""
    return f"{describe_patch(recipe['patch'])} ({recipe['cost']}), {recipe['step_seconds'] * 1000:.0f} ms"


def describe_difference(old: Found, new: Found) -> str:
    """Return how the results of two searches differ."""
    was, now = ({json.dumps(one["patch"]): as_compared(one) for one in found.recipes} for found in (old, new))
    changed = [patch for patch in was.keys() & now.keys() if was[patch] != now[patch]]
    if as_compared(old.plan) != as_compared(new.plan) or changed:
        return f"{len(changed)} recipes have other figures"
    if old.first is not None and (new.first is None or old.first["patch"] != new.first["patch"]):
        return "another comes first"
    left, added = len(was.keys() - now.keys()), len(now.keys() - was.keys())
    parts = [f"{left} left out"] * (left > 0) + [f"{added} more"] * (added > 0)
    return ", ".join(parts) or "all the same"


def as_compared(data: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's figures but for the time that it took."""
    return {name: value for name, value in data.items() if name != "planning_seconds"}


def plan_again(name: str, found: Found) -> str:
    """Plan each fitting recipe as a patch; return how many stay within the budget."""
    config, *others = SEARCHES[name].split()
    fitting = [one for one in found.recipes if one["fits"] and one["patch"]]
    held = 0
    for one in fitting:
        with tempfile.TemporaryDirectory() as folder:
            patch = Path(folder) / "recipe.yaml"
            patch.write_text(write_text(one["patch"]), "utf-8")
            command = [sys.executable, "-m", "mpt", "plan", str(ROOT / config), *others, "--with", str(patch)]
            ended = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=folder)
            held += ended.returncode == 0 and json.loads(ended.stdout)["plan"]["fits"] is True
    return f"{held} of {len(fitting)}"


def page(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """Return the page."""
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    words = f"--before {options.before}{' --with' * options.again}"
    lines = [
        "# How long a search for recipes takes",
        "",
        f"Command: `python scripts/search_table.py {words}`, {datetime.date.today()}, commit {commit.stdout.strip()}, "
        f"{platform.machine()} with {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end. No GPU was used.",
        "",
        "Processor seconds of `mpt plan CONFIG --vram SIZE --json`, all processes with their starts, before and after "
        "in turns. A recipe that is left out was proven to be no faster than one that fits and changes no more.",
        "",
        "| Search | Before, s | After, s | Recipes | The first | Compared with before |"
        + " With `--with` within the budget |" * options.again,
        "|---|---:|---:|---:|---|---|" + "---:|" * options.again,
    ]
    for row in rows:
        counts = f"{row['recipes'][0]}, then {row['recipes'][1]}"
        cells = [row["name"], f"{row['before']:.1f}", f"{row['after']:.1f}", counts, row["first"], row["same"]]
        lines.append("| " + " | ".join([*cells, *[row["again"]] * options.again]) + " |")
    lines += ["", "The searches:", "", *(f"- {row['name']}: `mpt plan {SEARCHES[row['name']]}`" for row in rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
