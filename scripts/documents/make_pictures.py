"""Draw the pictures of the documentation into docs/pictures/: architecture, an allocator's timeline, a loss scale.

    python scripts/documents/make_pictures.py                 # all three, about 30 seconds of one CPU core
    python scripts/documents/make_pictures.py --pages FOLDER  # verdict.png and doctor.png: pages of mpt, by chromium

The timeline is that of a plan of configs/classify_digits.yaml. The loss scale is of 300 steps of configs/lsgan.yaml in
float16 on a CPU. `--pages` takes a folder with verdict.html and doctor.html (`mpt compare`, `mpt doctor --page`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

import mpt
from mpt.planner.trace.timeline import COLOURS

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
ROOMS = (
    ("commands, api", "words of the user in, messages and exit codes out"),
    ("workflows", "a training with its plan and report; a comparison of many runs"),
    (
        "planner, doctor, report, inference",
        "the same step on fake tensors, under instruments; pages; results",
    ),
    ("engine", "the one step, the loop, evaluation, recovery, checkpoints"),
    (
        "nn, tasks, data, losses, metrics, optim, precision, memory",
        "parts: one file each, found by name",
    ),
    ("seams", "the base classes that parts derive from"),
    ("config, run, errors", "settings, the run's folder, messages"),
)
"""Rooms from the top; each imports only from those below."""
BATCH = (
    "data set",
    "loader",
    "device",
    "task",
    "tricks",
    "precision",
    "losses",
    "backward",
    "optimizer",
)
"""The way of a batch through one step."""


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def draw_architecture(path: Path) -> None:
    """Write the rooms and the way of a batch as SVG."""
    width, row, top = 820, 46, 40
    height = top + row * len(ROOMS) + 120
    shapes = ['<text x="20" y="24" class="h">Rooms: each imports only from those below</text>']
    for number, (name, text) in enumerate(ROOMS):
        y = top + row * number
        shapes.append(
            f'<rect x="20" y="{y}" width="{width - 40}" height="{row - 8}" rx="6" class="room"/>'
        )
        shapes.append(f'<text x="34" y="{y + 24}"><tspan class="n">{escape(name)}</tspan>')
        shapes.append(
            f'<tspan x="{width - 34}" text-anchor="end" class="t">{escape(text)}</tspan></text>'
        )
    y = top + row * len(ROOMS) + 28
    shapes.append(
        f'<text x="20" y="{y}" class="h">The way of a batch: one step for training, planning and examining</text>'
    )
    step = (width - 40) / len(BATCH)
    for number, name in enumerate(BATCH):
        x = 20 + number * step
        shapes.append(
            f'<rect x="{x:.0f}" y="{y + 16}" width="{step - 12:.0f}" height="34" rx="6" class="step"/>'
        )
        shapes.append(
            f'<text x="{x + (step - 12) / 2:.0f}" y="{y + 37}" text-anchor="middle" class="s">{name}</text>'
        )
        if number:
            shapes.append(f'<path d="M{x - 11:.0f} {y + 33}h8m-3 -3l3 3l-3 3" class="a"/>')
    style = (
        "text{font-family:system-ui,sans-serif;font-size:14px;fill:#222}.h{font-weight:600}.n{font-weight:600}"
        ".t{font-size:12px;fill:#555}.s{font-size:11px}.room{fill:#eef3fb;stroke:#4c72b0}.step{fill:#fdf1e6;"
        "stroke:#dd8452}.a{fill:none;stroke:#555;stroke-width:1.3}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    back = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    path.write_text(
        "\n".join([head, f"<style>{style}</style>", back, *shapes, "</svg>"]) + "\n", "utf-8"
    )


def draw_timeline(path: Path) -> None:
    """Plan a small classifier and write its memory over building and two steps, by category."""
    lines = mpt.plan(mpt.load("@classify_digits"), vram="6GiB", gpu="rtx2060").plan.timeline
    names = [name for name in COLOURS if name in lines and name != "workspace"]
    figure, axes = pyplot.subplots(figsize=(8.2, 3.2), layout="constrained")
    count = len(next(iter(lines.values())))
    values = [[value / 2**20 for value in lines[name]] for name in names]
    axes.stackplot(range(count), values, labels=names, colors=[COLOURS[name] for name in names])
    axes.set(
        xlim=(0, count - 1), xticks=[], ylabel="MiB", xlabel="allocations and releases, in order"
    )
    axes.set_title(
        "Tensors of a planned training, without cuBLAS's workspace: building, then two steps",
        loc="left",
        fontsize=11,
    )
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    save(figure, path)


def draw_loss_scale(path: Path) -> None:
    """Train a small GAN in float16 and write the scales of both its phases."""
    with tempfile.TemporaryDirectory() as folder:
        changes = (
            "name=scale",
            "precision.mode=O1",
            "precision.dtype=float16",
            "precision.growth_interval=50",
        )
        changes += (
            "train.steps=300",
            "train.evaluate_every=0",
            "train.sample_every=0",
            "train.log_every=1",
        )
        run = mpt.train(mpt.load("@lsgan", *changes), runs=folder)
        text = (run.path / "metrics.jsonl").read_text("utf-8")
    rows = [row for row in map(json.loads, text.splitlines()) if row["kind"] == "train"]
    figure, axes = pyplot.subplots(figsize=(8.2, 2.8), layout="constrained")
    for phase, style in (("disc", "-"), ("gen", "--")):
        scales = [row["scale"][phase] for row in rows]
        axes.step(
            [row["step"] for row in rows], scales, style, where="post", label=f"phase {phase}"
        )
    axes.set_yscale("log", base=2)
    axes.set(xlabel="step", ylabel="loss scale")
    axes.set_title(
        "Halved at an overflow, doubled after 50 steps without one", loc="left", fontsize=11
    )
    axes.legend(fontsize=8)
    save(figure, path)


def save(figure: pyplot.Figure, path: Path) -> None:
    """Write an SVG that is the same in every run."""
    matplotlib.rcParams["svg.hashsalt"] = path.stem
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def photograph(page: Path, picture: Path, width: int, height: int) -> None:
    """Write a picture of the top of a page with chromium."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("--pages needs chromium")
    words = [
        browser,
        "--headless",
        "--no-sandbox",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ]
    subprocess.run(
        [*words, f"--screenshot={picture}", page.resolve().as_uri()],
        check=True,
        capture_output=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=Path, help="a folder with verdict.html and doctor.html")
    arguments = parser.parse_args()
    if arguments.pages:
        for name in ("verdict", "doctor"):
            photograph(arguments.pages / f"{name}.html", PICTURES / f"{name}.png", 1000, 560)
        return
    draw_architecture(PICTURES / "architecture.svg")
    draw_timeline(PICTURES / "allocator_timeline.png")
    draw_loss_scale(PICTURES / "loss_scale.svg")
    print(f"wrote three pictures into {PICTURES}", file=sys.stderr)


if __name__ == "__main__":
    main()
