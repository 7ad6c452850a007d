"""What is said of 512 pixels by card is one thing, which `saehd_presets.py` writes: plan, presets and pages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mpt.config.finding.shipped import find_shipped
from mpt.config.load import load_config
from mpt.config.sizes import describe_bytes
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.verdict import fits_surely
from mpt.report.units import show_seconds

TOP = Path(__file__).parents[3]
SIZES = (6, 8, 10, 12, 16, 24)
FIGURES = r"# (.*?): ([0-9,.]+ [MG]iB) of .*?([0-9.]+ m?s) a step on an (\w+);"


def said_of(name):
    """A patch's words, memory, step time and card."""
    return re.search(FIGURES, find_shipped(name).read_text("utf-8")).groups()


def page(name):
    return (TOP / "docs" / name).read_text("utf-8")


@pytest.mark.parametrize("size", SIZES)
def test_a_preset_says_what_the_pages_say(size):
    words, memory, seconds, gpu = said_of(f"@saehd_512_{size}gb")
    row = f"| {size} | {gpu} | `@saehd_512_{size}gb` | {words} | {memory} | {seconds} |"
    assert row in page("how-to/saehd.md")
    assert row in page("benchmarks/saehd.md")
    batch = (
        yaml.safe_load(find_shipped(f"@saehd_512_{size}gb").read_text("utf-8"))
        .get("train", {})
        .get("batch_size", 8)
    )
    cost = "not bit-equal" if size == 6 else "other settings"
    row = f"| `saehd_512` | {size} | {batch} | {words} | {cost} | {memory} | {seconds}, {gpu} |"
    assert row in page("benchmarks/presets.md")


def test_the_plan_of_6_gb_is_the_preset_and_the_table_of_recipes_has_it():
    plan, preset = (
        find_shipped(name).read_text("utf-8") for name in ("@saehd_512.plan", "@saehd_512_6gb")
    )
    assert yaml.safe_load(plan) == yaml.safe_load(preset)
    assert said_of("@saehd_512.plan") == said_of("@saehd_512_6gb")
    _, memory, seconds, _ = said_of("@saehd_512_6gb")
    row = next(
        line for line in page("benchmarks/saehd.md").splitlines() if "(**the plan**)" in line
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    gib = int(memory.removesuffix(" MiB").replace(",", "")) / 1024
    assert abs(float(cells[-3]) - gib) < 0.01
    assert (cells[-2], f"{cells[-1]} s") == ("yes", seconds)


def test_6_gb_is_planned_today_as_it_is_said():
    gpu = find_gpu("rtx2060")
    config = load_config("@saehd_512", patches=[find_shipped("@saehd_512_6gb")])
    with Session(gpu, Calibration()) as session:
        (answer,) = session.plan([config], budget_bytes=gpu.usable_bytes)
        plan = answer.get()
    assert fits_surely(plan)
    assert said_of("@saehd_512_6gb")[1:3] == (
        describe_bytes(plan.total),
        show_seconds(plan.step_seconds),
    )


@pytest.mark.slow
def test_everything_is_planned_today_as_it_is_said():
    command = [sys.executable, str(TOP / "scripts" / "plans" / "saehd_presets.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
