"""A run's last evaluation and its plots as PNG files, for boards that take pictures (`mpt.boards`).

Boards call these on threads of their own, and matplotlib's settings are the process's: one draws at a time.
"""

from __future__ import annotations

import base64
import io
import math
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from PIL import Image, ImageDraw

from mpt.report.drawing import Plot, kept_plots, save_plot
from mpt.report.reading.read_run import read_run
from mpt.report.run_page.classification import show_classification
from mpt.report.run_page.evaluation_section import show_section
from mpt.report.run_page.plots import draw_run

MOST_NUMBERS = 20
"""Classes up to which a confusion matrix has its counts written into it, and its classes' names next to it."""
TILE, CAPTION, COLUMNS = 128, 28, 6
"""Pixels of a sample's side and of the two lines below it; samples in a row."""
SIDE = 6.4
"""Of a matrix, in inches."""

_drawing = threading.Lock()


def draw_evaluation(details: Mapping[str, Any], folder: Path) -> Mapping[str, Path]:
    """Draw the contents of an `evaluation.json` below a folder: matrix, charts, worst errors and examples.

    Details that pages do not understand give no pictures.
    """
    try:
        return write(folder, evaluation_pictures(details))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def evaluation_pictures(details: Mapping[str, Any]) -> dict[str, bytes]:
    """Return name -> PNG. Raises for malformed details: KeyError, TypeError, ValueError."""
    with _drawing, kept_plots() as plots:
        made: dict[str, bytes] = {}
        if "classes" in details:
            shown = show_classification(details)
            if shown["matrix"]:
                counts = [[cell.count for cell in row] for row in shown["matrix"]]
                made["confusion"] = save_plot(plot_matrix(counts, shown["classes"]), "png")
            made |= {
                kind: sheet
                for kind in ("worst", "examples")
                if (sheet := draw_samples(shown[kind]))
            }
        if "section" in details:
            section = show_section(details["section"], int(details["step"]))
            if section["matrix"]:
                counts = [[cell.count for cell in row] for row in section["matrix"]]
                made["confusion"] = save_plot(plot_matrix(counts, section["names"]), "png")
        titles = [str(one["title"]) for one in details.get("section", {}).get("charts", [])]
        names = (["calibration"] if "classes" in details else []) + titles
        made |= {name: save_plot(plot, "png") for name, plot in zip(names, plots, strict=True)}
    return {f"evaluation/{name}": content for name, content in made.items()}


def draw_plots(run_path: Path, folder: Path) -> Mapping[str, Path]:
    """Draw every plot of a run's report below a folder."""
    with _drawing, kept_plots() as plots:
        names = list(draw_run(read_run(run_path)))
        made = {
            f"plots/{name}": save_plot(plot, "png") for name, plot in zip(names, plots, strict=True)
        }
    return write(folder, made)


def write(folder: Path, pictures: Mapping[str, bytes]) -> Mapping[str, Path]:
    """Write PNG files below a folder; return name -> file."""
    files: dict[str, Path] = {}
    for number, (name, content) in enumerate(pictures.items()):
        files[name] = folder / f"{number:02d}-{re.sub(r'[^A-Za-z0-9]+', '-', name)[:60]}.png"
        files[name].write_bytes(content)
    return files


def plot_matrix(counts: Sequence[Sequence[int]], names: Sequence[str]) -> Plot:
    """Return a confusion matrix: rows are the truth, a cell the darker the larger its share of its row."""
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]

    def build(axes: Axes) -> None:
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        axes.grid(visible=False)
        axes.set_xlabel("found")
        axes.set_ylabel("truth")
        if len(names) > MOST_NUMBERS:
            return
        axes.set_xticks(range(len(names)), names, rotation=90)
        axes.set_yticks(range(len(names)), names)
        for row, column, count in (
            (y, x, count) for y, line in enumerate(counts) for x, count in enumerate(line)
        ):
            if count:
                colour = "white" if shares[row][column] > 0.5 else "black"
                axes.text(
                    column, row, str(count), ha="center", va="center", color=colour, fontsize=7
                )

    return Plot(build, "confusion", SIDE, SIDE)


def draw_samples(samples: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a sheet of test samples with their labels as PNG; nothing if none has a picture."""
    pictured = [one for one in samples if one["picture"]]
    if not pictured:
        return b""
    columns = min(COLUMNS, len(pictured))
    size = (columns * TILE, math.ceil(len(pictured) / columns) * (TILE + CAPTION))
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for place, one in enumerate(pictured):
        left, top = place % columns * TILE, place // columns * (TILE + CAPTION)
        with Image.open(io.BytesIO(base64.b64decode(one["picture"].partition(",")[2]))) as image:
            picture = image.convert("RGB")
        scale = min(TILE / side for side in picture.size)
        sides = [max(1, round(side * scale)) for side in picture.size]
        sheet.paste(picture.resize((sides[0], sides[1]), Image.Resampling.NEAREST), (left, top))
        is_right = one["label"] == one["truth"]
        words = f"{one['label']} {one['probability']:.2f}" + (
            "" if is_right else f"\nin truth {one['truth']}"
        )
        draw.text(
            (left + 2, top + TILE), words.encode("latin-1", "replace").decode("latin-1"), "black"
        )
    target = io.BytesIO()
    sheet.save(target, "PNG")
    return target.getvalue()
