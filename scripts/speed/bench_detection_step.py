"""Compare the processor time of a detector's training step with Ultralytics' on the same machine, weights and batch.

Usage:
    pip install ultralytics                      # the other side; nothing of it is part of mpt
    python scripts/speed/bench_detection_step.py       # YOLOv8, YOLO11 and YOLO26 n, fp32 and bf16, 320 pixels, batch 4
    python scripts/speed/bench_detection_step.py --families yolo26 --modes fp32 --rounds 9

Both sides make whole steps in turn: forward, loss, backward, clipping, SGD and the moving average. mpt runs its own
`update`, Ultralytics its model, criterion and `ModelEMA` as its trainer calls them. A row's ratio is the median over
the rounds, of processor time, so that other programs matter little. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from mpt.vision_ops import import_torchvision

import_torchvision()

BOXES_PER_PICTURE = 6
CLASSES = 8


def main() -> None:
    """Measure what is asked for and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="*", default=["yolov8", "yolo11", "yolo26"])
    parser.add_argument("--modes", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--side", type=int, default=320)
    parser.add_argument("--batch", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| Network | Mode | mpt, s of processor time | Ultralytics, s | ratio | least and most |",
        flush=True,
    )
    print("|---|---|---:|---:|---:|---:|")
    for family in arguments.families:
        for mode in arguments.modes:
            pictures, truth = samples(arguments.batch, arguments.side)
            ours = our_step(family, mode, arguments.side, pictures, truth)
            theirs = their_step(family, mode, pictures, truth)
            print(row(f"{family}n", mode, ours, theirs, arguments.rounds), flush=True)


def samples(batch: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pictures, uint8, and rows of picture, class, centre and size, relative."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8, generator=generator)
    count = batch * BOXES_PER_PICTURE
    rows = torch.empty(count, 6)
    rows[:, 0] = torch.arange(batch).repeat_interleave(BOXES_PER_PICTURE)
    rows[:, 1] = torch.randint(0, CLASSES, (count,), generator=generator)
    rows[:, 4:] = 0.1 + 0.3 * torch.rand(count, 2, generator=generator)
    rows[:, 2:4] = rows[:, 4:] / 2 + (1 - rows[:, 4:]) * torch.rand(count, 2, generator=generator)
    return pictures, rows


def our_step(
    family: str, mode: str, side: int, pictures: torch.Tensor, truth: torch.Tensor
) -> Callable[[], None]:
    """Return a function that makes one step of mpt's."""
    from mpt.config.load import load_config
    from mpt.engine.building.build import build_run
    from mpt.engine.state.moving_averages import follow_step
    from mpt.engine.step.step import update
    from mpt.systems.yolofuse.data.shared.scene_dataset import Layout

    config = load_config(
        {
            "model": {"name": "yolofuse", "fusion": "rgb", "family": family, "image_size": side},
            "dataset": {
                "name": "detection_files",
                "cameras": "rgb",
                "classes": [str(n) for n in range(CLASSES)],
            },
            "task": {"small_boxes": True},
            "precision": mode,
            "optimizer": {"name": "sgd_warmup", "warmup": 0, "lr": 1e-4, "momentum": 0.9},
            "train": {"steps": 1000, "batch_size": len(pictures), "threads": 1},
        }
    )
    layout = Layout(
        ("rgb",), side, side, BOXES_PER_PICTURE, tuple(str(n) for n in range(CLASSES))
    ).spec(1000)
    run = build_run(config, torch.device("cpu"), layout)
    boxes = (
        torch.cat((truth[:, 2:4] - truth[:, 4:] / 2, truth[:, 2:4] + truth[:, 4:] / 2), 1) * side
    )
    batch = {
        "rgb": pictures,
        "boxes": boxes.view(len(pictures), BOXES_PER_PICTURE, 4),
        "classes": truth[:, 1].long().view(len(pictures), BOXES_PER_PICTURE),
        "box_mask": torch.ones(len(pictures), BOXES_PER_PICTURE, dtype=torch.bool),
    }
    steps = iter(range(10**9))

    def step() -> None:
        number = next(steps)
        floats = layout.as_floats(batch)
        for phase in run.phases:
            update(run, phase, floats)
        follow_step(run, number)

    return step


def their_step(
    family: str, mode: str, pictures: torch.Tensor, truth: torch.Tensor
) -> Callable[[], None]:
    """Return a function that makes one step as Ultralytics' trainer does."""
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel
    from ultralytics.utils.torch_utils import ModelEMA

    model: Any = DetectionModel(f"{family}n.yaml", nc=CLASSES, verbose=False)
    model.args = get_cfg()
    model.train()
    decayed = [weight for weight in model.parameters() if weight.dim() > 1 and weight.requires_grad]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 5e-4}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=1e-4, momentum=0.9, nesterov=True)
    average = ModelEMA(model)

    def step() -> None:
        batch = {
            "img": pictures.float() / 255,
            "batch_idx": truth[:, 0],
            "cls": truth[:, 1:2],
            "bboxes": truth[:, 2:],
        }
        with torch.autocast("cpu", torch.bfloat16, enabled=mode != "fp32"):
            loss, _ = model(batch)
        loss.sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)

    return step


def row(
    name: str, mode: str, ours: Callable[[], None], theirs: Callable[[], None], rounds: int
) -> str:
    """Return a line: medians of both sides' seconds and of the ratios of neighbouring steps."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, step in enumerate((ours, theirs)):
            begun = time.process_time()
            step()
            if number:  # the first makes buffers
                seconds[side].append(time.process_time() - begun)
    ratios = [mine / other for mine, other in zip(*seconds, strict=True)]
    mine, other = (statistics.median(side) for side in seconds)
    bounds = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return f"| {name} | {mode} | {mine:.3f} | {other:.3f} | {statistics.median(ratios):.3f} | {bounds} |"


if __name__ == "__main__":
    main()
