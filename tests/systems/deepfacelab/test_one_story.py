"""What is said of 512 pixels in 6 GB is one thing: the plan's file, the preset and both pages."""

import re
from pathlib import Path

import yaml

from mpt.config.shipped import find_shipped

TOP = Path(__file__).parents[3]
FIGURES = r"([0-9,]+ MiB) of .*?([0-9.]+) s a step"


def test_plan_preset_and_pages_say_the_same_of_512_pixels_in_6_gb():
    plan, preset = (find_shipped(name).read_text("utf-8") for name in ("@saehd_512.plan", "@saehd_512_6gb"))
    assert yaml.safe_load(plan) == yaml.safe_load(preset)
    (memory, seconds), again = (re.search(FIGURES, text, re.DOTALL).groups() for text in (plan, preset))
    assert again == (memory, seconds)
    row = next(
        line
        for line in (TOP / "docs" / "benchmarks" / "presets.md").read_text().splitlines()
        if line.startswith("| `saehd_512` | 6 |")
    )
    assert f"| {memory} | {seconds} s |" in row
    table = next(
        line for line in (TOP / "docs" / "benchmarks" / "saehd.md").read_text().splitlines() if "(**the plan**)" in line
    )
    cells = [cell.strip() for cell in table.strip("|").split("|")]
    gib = int(memory.removesuffix(" MiB").replace(",", "")) / 1024
    assert abs(float(cells[-3]) - gib) < 0.01
    assert (cells[-2], cells[-1]) == ("yes", seconds)
