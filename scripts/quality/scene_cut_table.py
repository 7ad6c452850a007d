"""Misses and false alarms of the cut detector and of the detector of repeats, on made pictures whose truth is known.

    python scripts/quality/scene_cut_table.py --write

Textures and discs, 160 x 96, with noise, rounded to 8 bits; 40 pairs a row. Beside the detector that is used the one
before it: structural similarity of thumbnails of 32 x 32 below 0.2, as in the programs of RIFE.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.systems.dain.data.shared.duplicates import is_repeat
from mpt.systems.dain.data.shared.scene_cuts import GREY, THRESHOLD, is_cut, thumbnail
from mpt.systems.dain.metrics.shared.image_quality import structural_similarity
from scripts.provenance import made

HEIGHT, WIDTH, PAIRS = 96, 160, 40
DARK = 0.08
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "scene_cuts.md"
Pair = tuple[Tensor, Tensor]


def draw_scene(numbers: np.random.Generator, with_discs: bool) -> Tensor:
    """Return a picture (3, 2 h, 3 w) of octaves of noise, half of them with discs in front."""
    size = (2 * HEIGHT, 3 * WIDTH)
    picture = torch.zeros(3, *size)
    for cells, strength in ((4, 1.0), (8, 0.7), (16, 0.5), (32, 0.35), (64, 0.25)):
        grid = torch.from_numpy(
            numbers.standard_normal((1, 3, cells, 3 * cells // 2)).astype(np.float32)
        )
        # channels are alike, not equal
        grid = 0.8 * grid.mean(1, keepdim=True) * 3**0.5 + 0.4 * grid
        picture += strength * F.interpolate(grid, size=size, mode="bicubic", align_corners=False)[0]
    if with_discs:
        rows, columns = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
        for _ in range(25):
            x, y, radius = numbers.uniform(0, 1, 3) * (size[1], size[0], HEIGHT / 4)
            inside = (columns - x) ** 2 + (rows - y) ** 2 < radius**2
            picture[:, inside] = torch.from_numpy(
                1.5 * numbers.standard_normal((3, 1)).astype(np.float32)
            )
    low, high = picture.flatten().quantile(torch.tensor([0.01, 0.99])).tolist()
    return ((picture - low) / (high - low)).clamp(0, 1)


def window(scene: Tensor, x: float = 0, y: float = 0, zoom: float = 1.0) -> Tensor:
    """Return the frame that a camera sees at an offset from the middle of the scene, in pixels."""
    height, width = scene.shape[-2:]
    rows = (torch.arange(HEIGHT) - HEIGHT / 2 + 0.5) / zoom + height / 2 + y
    columns = (torch.arange(WIDTH) - WIDTH / 2 + 0.5) / zoom + width / 2 + x
    grid = torch.stack(
        torch.meshgrid(2 * rows / height - 1, 2 * columns / width - 1, indexing="ij")[::-1], dim=-1
    )
    return F.grid_sample(scene[None], grid[None].float(), align_corners=False)[0]


def shown(
    frame: Tensor, numbers: np.random.Generator, light: float, noise: float = 0.006
) -> Tensor:
    """Return a frame as it is stored: under some light, with noise, in 8 bits."""
    grain = torch.from_numpy(numbers.standard_normal(frame.shape).astype(np.float32))
    return (frame * light + noise * grain).clamp(0, 1).mul(255).round().to(torch.uint8)


def cut_cases() -> Iterator[tuple[str, bool, Pair]]:
    """Yield name, whether it is a cut, and the frames."""
    numbers = np.random.default_rng(11)
    scenes = [draw_scene(numbers, number % 2 == 1) for number in range(PAIRS + 1)]
    for number in range(PAIRS):
        here, there = scenes[number], scenes[number + 1]
        first, black = window(here), torch.zeros(3, HEIGHT, WIDTH)

        def stored(
            one: Tensor, other: Tensor, light: float = 1.0, after: float | None = None
        ) -> Pair:
            return shown(one, numbers, light), shown(
                other, numbers, light if after is None else after
            )

        for light in (1.0, DARK, 0.04):
            yield f"cut, {light:.0%} brightness", True, stored(first, window(there), light)
        yield "cut from 100 % to 8 % brightness", True, stored(first, window(there), 1.0, DARK)
        yield "cut from black", True, stored(black, window(there))
        for light in (1.0, DARK):
            for share in (0.02, 0.04, 0.08, 0.11, 0.16, 0.25):
                moved = window(here, share * WIDTH, share * WIDTH / 4)
                yield (
                    f"pan by {share:.0%} of the width, {light:.0%} brightness",
                    False,
                    stored(first, moved, light),
                )
        yield "zoom by 10 %", False, stored(first, window(here, zoom=1.1))
        yield "fade by 30 %", False, stored(first, first, 1.0, 0.7)
        yield "flash, 1.8 times as bright", False, stored(first, first, 0.5, 0.9)
        yield "still, 8 % brightness", False, stored(first, first, DARK)
        for before, after in ((0.1, 0.2), (0.25, 0.5)):
            passing = [torch.cat((there[:, :HEIGHT, : int(WIDTH * share)], first[..., int(WIDTH * share) :]), 2)
                       for share in (before, after)]  # fmt: skip
            yield (
                f"an object covers {before:.0%}, then {after:.0%}",
                False,
                stored(passing[0], passing[1]),
            )


def repeat_cases() -> Iterator[tuple[str, bool, Pair]]:
    """Yield name, whether it is a repeat, and the frames."""
    numbers = np.random.default_rng(12)
    scenes = [draw_scene(numbers, number % 2 == 1) for number in range(PAIRS)]
    for light in (1.0, DARK):
        for scene in scenes:
            first = window(scene)
            for noise in (0.0, 0.002):
                pair = (shown(first, numbers, light, noise), shown(first, numbers, light, noise))
                yield (
                    f"repeat, noise of {255 * noise:.1f} levels, {light:.0%} brightness",
                    True,
                    pair,
                )
            for pixels in (0.25, 0.5, 1.0, 2.0):
                pair = (
                    shown(first, numbers, light, 0.0),
                    shown(window(scene, pixels), numbers, light, 0.0),
                )
                yield f"pan by {pixels:g} pixels, {light:.0%} brightness", False, pair
            moved = first.clone()
            moved[:, 40:52, 40:52] = first[:, 40:52, 43:55]
            pair = (shown(first, numbers, light, 0.0), shown(moved, numbers, light, 0.0))
            yield f"a patch of 12 pixels moves by 3, {light:.0%} brightness", False, pair


def shifted(first: Tensor, last: Tensor) -> bool:
    """Return whether the detector that is used calls it a cut."""
    return is_cut(thumbnail(first), thumbnail(last))


def as_rife(first: Tensor, last: Tensor) -> bool:
    """Return whether the detector of RIFE's programs calls it a cut."""
    small = [
        F.interpolate(
            (image.float() / 255 * torch.tensor(GREY)[:, None, None]).sum(0)[None, None],
            (32, 32),
            mode="area",
        )
        for image in (first, last)
    ]
    return float(structural_similarity(small[0], small[1])) < 0.2


def count_wrong(
    cases: Iterator[tuple[str, bool, Pair]], detectors: list[Callable[[Tensor, Tensor], bool]]
) -> dict[str, tuple[bool, list[int]]]:
    """Return the number of wrong answers of each detector by the name of the case."""
    rows: dict[str, tuple[bool, list[int]]] = {}
    for name, truth, pair in cases:
        wrong = rows.setdefault(name, (truth, [0] * len(detectors)))[1]
        for place, detect in enumerate(detectors):
            wrong[place] += detect(*pair) != truth
    return rows


def table(rows: dict[str, tuple[bool, list[int]]], head: tuple[str, ...]) -> str:
    """Return the rows as Markdown."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, (truth, wrong) in rows.items():
        kind = "misses" if truth else "false alarms"
        lines.append(f"| {name} | {' | '.join(f'{count} {kind}' for count in wrong)} |")
    return "\n".join(lines)


def main() -> None:
    """Print both tables, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    torch.set_num_threads(1)
    ours = lambda first, last: is_cut(thumbnail(first), thumbnail(last))  # noqa: E731
    cuts = table(
        count_wrong(cut_cases(), [ours, as_rife]),
        ("pair", "shifted thumbnails", "SSIM of thumbnails below 0.2"),
    )
    repeats = table(count_wrong(repeat_cases(), [is_repeat]), ("pair", "wrong"))
    page = f"""# Cuts and repeated frames: misses and false alarms

Written by `python scripts/quality/scene_cut_table.py --write`, {made()}; on a CPU. Made pictures of {WIDTH} x {HEIGHT}
with noise, {PAIRS} pairs a row, so one wrong answer is 2.5 %. They are no films: the rows say what a detector can tell
apart, not how often it errs on yours. The thresholds were chosen on pictures of the same kind, of other random numbers.

The detector compares thumbnails at every shift up to half of the picture, relative to their contrast; below {THRESHOLD}
it is a cut (`--scene-cut`). The second column is the rule of RIFE's programs.

{cuts}

A repeat is a frame that differs from the one before, in any block of 16 x 16 pixels, by no more than 0.3 grey levels
and what 0.15 pixels of motion would change. What is taken for a repeat by mistake is interpolated over; a repeat that
is missed stays. Motion of half a pixel in the dark is smaller than an encoder's noise there.

{repeats}
"""
    if write:
        PAGE.write_text(page)
        print(f"wrote {PAGE}")
    else:
        print(page)


if __name__ == "__main__":
    main()
