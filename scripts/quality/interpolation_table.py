"""Frames between by trained networks, by classical flow and by the mean of both frames, on scenes whose truth is known.

    python scripts/quality/interpolation_table.py runs/rife_demo runs/dain_demo --write

Scenes of 192 x 128, a picture of noise at several scales that is panned, zoomed, rotated, or stands still behind a disc
that moves over it, with the largest motion between the frames at 1 to 20 pixels; the true middle frame is drawn, not
interpolated. Classical flow is OpenCV's DIS (medium preset) and Farneback's, in both directions, of grey frames; both
frames are read against it and blended as `flow_warp` does. `--demo` adds the demos' own test set.

Needs OpenCV: pip install 'mpt-trainer[deepfacelab]'.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.engine.state.evaluation import inferring
from mpt.systems.dain.commands.interpolate import network_of
from mpt.systems.dain.data import procedural_triplets
from mpt.systems.dain.inference.published import open_network
from mpt.systems.dain.inference.tiles import whole
from mpt.systems.dain.metrics.shared.image_quality import peak_signal_to_noise, rounded
from mpt.systems.dain.nn.operators.regions import BackwardBlendRegion
from scripts.provenance import made

HEIGHT, WIDTH, SCENES = 128, 192, 3
SPEEDS = (1, 2, 5, 10, 20)
KINDS = ("pan", "zoom", "rotation", "occlusion")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "interpolation.md"
Method = Callable[[Tensor, Tensor], Tensor]
Triplet = tuple[Tensor, Tensor, Tensor]


def draw_picture(numbers: np.random.Generator) -> Tensor:
    """Return a picture (3, 2 h, 2 w) in [0, 1] of noise at scales from a pixel to a third of the frame."""
    size = (2 * HEIGHT, 2 * WIDTH)
    picture = torch.zeros(1, 3, *size)
    for cells in (6, 12, 24, 48, 96, 192):
        grid = torch.from_numpy(
            numbers.standard_normal((1, 3, cells, 3 * cells // 2)).astype(np.float32)
        )
        grid = 0.8 * grid.mean(1, keepdim=True) * 3**0.5 + 0.4 * grid
        picture += cells**-0.5 * F.interpolate(grid, size=size, mode="bicubic", align_corners=False)
    return (0.5 + picture[0] / (5 * float(picture.std()))).clamp(0, 1)


def seen(picture: Tensor, kind: str, amount: float) -> Tensor:
    """Return the frame (1, 3, h, w) after a motion whose largest displacement in the frame is `amount` pixels."""
    y, x = torch.meshgrid(
        torch.arange(HEIGHT) - (HEIGHT - 1) / 2,
        torch.arange(WIDTH) - (WIDTH - 1) / 2,
        indexing="ij",
    )
    radius = math.hypot(HEIGHT / 2, WIDTH / 2)
    if kind == "pan":
        x, y = x + 0.8 * amount, y + 0.6 * amount
    elif kind == "zoom":
        x, y = x * (1 + amount / radius), y * (1 + amount / radius)
    elif kind == "rotation":
        cosine, sine = math.cos(amount / radius), math.sin(amount / radius)
        x, y = cosine * x - sine * y, sine * x + cosine * y
    grid = torch.stack((x / WIDTH, y / HEIGHT), dim=-1)[None].float()
    return F.grid_sample(picture[None], grid, mode="bicubic", align_corners=False).clamp(0, 1)


def draw_triplet(kind: str, speed: float, numbers: np.random.Generator) -> Triplet:
    """Return first, middle and last frame; over the two intervals the motion is `speed` pixels."""
    picture, front = draw_picture(numbers), draw_picture(numbers)
    direction = numbers.uniform(0, 2 * math.pi)
    frames = [seen(picture, kind, amount) for amount in (-speed / 2, 0, speed / 2)]
    if kind == "occlusion":
        frames = [
            with_disc(seen(picture, "still", 0), front, amount, direction)
            for amount in (-speed / 2, 0, speed / 2)
        ]
    first, middle, last = (rounded(frame) for frame in frames)
    return first, middle, last


def with_disc(frame: Tensor, front: Tensor, amount: float, direction: float) -> Tensor:
    """Return the frame with a textured disc in front that has moved by some pixels."""
    dx, dy = amount * math.cos(direction), amount * math.sin(direction)
    y, x = torch.meshgrid(
        torch.arange(HEIGHT) - HEIGHT / 2, torch.arange(WIDTH) - WIDTH / 2, indexing="ij"
    )
    inside = (HEIGHT / 4 + 0.5 - torch.hypot(x - dx, y - dy)).clamp(0, 1)
    grid = torch.stack(((x - dx) / WIDTH, (y - dy) / HEIGHT), dim=-1)[None].float()
    moved = F.grid_sample(front[None], grid, mode="bicubic", align_corners=False).clamp(0, 1)
    return inside * moved + (1 - inside) * frame


def by_flow(estimate: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Method:
    """Return a method that warps and blends by a classical flow."""
    blend = BackwardBlendRegion()

    def between(first: Tensor, last: Tensor) -> Tensor:
        grey = [
            cv2.cvtColor(
                (image[0] * 255).round().byte().permute(1, 2, 0).numpy(), cv2.COLOR_RGB2GRAY
            )
            for image in (first, last)
        ]
        flows = [
            torch.from_numpy(estimate(*pair)).permute(2, 0, 1)[None] for pair in (grey, grey[::-1])
        ]
        made: Tensor = blend(first, last, torch.cat(flows, dim=1), torch.tensor([0.5]))
        return made

    return between


def dis(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return OpenCV's DIS flow."""
    return np.asarray(
        cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM).calc(one, other, None)
    )


def farneback(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return OpenCV's Farneback flow, with the parameters of its documentation but five levels."""
    return np.asarray(cv2.calcOpticalFlowFarneback(one, other, None, 0.5, 5, 15, 3, 5, 1.2, 0))


def by_network(run: str) -> Method:
    """Return a method that uses a run or a published file of weights."""
    trained = open_network(run, Path("runs"), "cpu")
    net = network_of(trained.run)

    def between(first: Tensor, last: Tensor) -> Tensor:
        with inferring(trained.run):
            return whole(net, first, last, torch.tensor([[0.5]]))[:, 0]

    return between


def quality(method: Method, triplets: Sequence[Triplet]) -> float:
    """Return the mean PSNR in dB."""
    figures = [
        peak_signal_to_noise(rounded(method(first, last)), middle)
        for first, middle, last in triplets
    ]
    return float(torch.cat(figures).clamp(max=100).mean())


def demo_triplets() -> list[Triplet]:
    """Return the test set of the demos."""
    data = procedural_triplets.build(procedural_triplets.Settings(), "test", 0)
    batch = data.spec.as_floats(data.fetch(list(range(len(data))), 0))
    return [
        tuple(batch[name][i : i + 1] for name in ("first", "middle", "last"))
        for i in range(len(data))
    ]  # type: ignore[misc]


def main() -> None:
    """Print the table, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    methods: dict[str, Method] = {
        "mean of both frames": lambda first, last: (first + last) / 2,
        "OpenCV DIS": by_flow(dis),
        "OpenCV Farneback": by_flow(farneback),
    }
    methods |= {f"`{Path(run).name}`": by_network(run) for run in arguments.runs}
    lines = [f"| scene | pixels | {' | '.join(methods)} |", "|---|---:|" + "---:|" * len(methods)]
    for kind in KINDS:
        for speed in SPEEDS:
            numbers = np.random.default_rng([KINDS.index(kind), speed])
            triplets = [draw_triplet(kind, speed, numbers) for _ in range(SCENES)]
            figures = [f"{quality(method, triplets):.1f}" for method in methods.values()]
            lines.append(f"| {kind} | {speed} | {' | '.join(figures)} |")
    figures = [f"{quality(method, demo_triplets()):.1f}" for method in methods.values()]
    lines.append(f"| the demos' test set | up to 7 | {' | '.join(figures)} |")
    command = f"python scripts/quality/interpolation_table.py {' '.join(arguments.runs)} --write"
    page = f"""# Frames between: the demos against classical flow

Written by `{command}`, {made()}, on a CPU. PSNR in dB of
the middle frame, mean of {SCENES} scenes of {WIDTH} x {HEIGHT} (the last row: 64 drawn triplets of 64 x 64, the
demos' test set). "pixels" is the largest motion from the first frame to the last. Classical flow is
OpenCV's, in both directions, frames read against it and blended as `flow_warp` does.

{chr(10).join(lines)}
"""
    if arguments.write:
        PAGE.write_text(page)
        print(f"wrote {PAGE}")
    print(page)


if __name__ == "__main__":
    main()
