#!/usr/bin/env python
"""Networks of mmaction2 that recognise actions, planned from its own code, against the memory it publishes.

    git clone --branch v1.0.0rc1 https://github.com/open-mmlab/mmaction2 CLONE
    pip install mmengine 'mmcv-lite==2.0.1' addict yapf termcolor
    python scripts/plans/video_memory.py CLONE ROWS.json -o docs/benchmarks/plan_video.md

Published is the most of `torch.cuda.max_memory_allocated()` of the cards that trained, in MiB, in the pages of the
clone's `configs/recognition`. Each run is planned with its own configuration: the network, the preprocessing on the
card, the optimizer and its wrapper as they stand. Around them is what the training did at that time: gradients filled
with zeros, and buckets of DistributedDataParallel as large as the weights that train.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from mpt.errors import MptError
from scripts.plans.published_steps import clone_and_rows, error, import_from, plan_of, summary
from scripts.plans.segmentation_models import SoftmaxOf2020
from scripts.provenance import made

MIB = 2**20
CARD = "a100-80gb"
"""Not named by the pages; the largest runs fit no other card of that year."""
MISPRINT = "slowonly_r50-in1k-pre-nl-embedded-gaussian_8xb16-8x8x1-steplr-150e"
"""A row with the figure of the same network without its non-local blocks, 11,089 MiB: shown, not counted."""
NEWER = "swin-"
"""Networks that this release added, and whose runs are newer than 1.11."""
NOTES = (
    "Which torch a run had is not published. Runs of networks that earlier releases have are counted with the softmax "
    "of before 1.11, the five of Swin, which this release added, with today's; the tables have both. One row is not "
    "counted: slowonly with non-local blocks, 8x8x1, has the figure of the network without them, 11,089 MiB. "
    "TANet's dense run has the memory of its validation, others do not (the last table). TPN on TSM, TimeSformer "
    "with divided attention and TSM with Gaussian blocks are off by more than 3 %; why was not found."
)
WEIGHTS = ("pretrained", "pretrained2d", "init_cfg")
"""Settings that would load weights."""
TODAYS = {
    (torch, "softmax"): torch.softmax,
    (torch.Tensor, "softmax"): torch.Tensor.softmax,
}
"""Softmax of torch 1.11 and later."""


@dataclass
class Row:
    """A published run, and what was planned for it."""

    config: str
    published: int
    """MiB."""
    planned: int = 0
    """Bytes, with a softmax that keeps its input."""
    today: int = 0
    """Bytes, with that of today."""
    validated: int = 0
    """Bytes, with a batch of validation, where it takes more frames of a video than the training."""
    error: str = ""

    @property
    def name(self) -> str:
        """The configuration without what all have in common."""
        return Path(self.config).stem.replace("_kinetics400-rgb", "")


def keep_inputs(kept: bool) -> None:
    """Let softmax keep its input, or not."""
    for (owner, name), todays in TODAYS.items():
        keeping = lambda values, dim, dtype=None: SoftmaxOf2020.apply(values, dim, False)  # noqa: E731
        setattr(owner, name, keeping if kept else todays)


def without_weights(settings: Any) -> None:
    """Take out of a configuration what would load weights."""
    for name, value in list(settings.items()):
        if name in WEIGHTS and value:
            settings[name] = False if name == "pretrained2d" else None
        elif isinstance(value, dict):
            without_weights(value)


def places_of(frames: Any) -> int:
    """Return the places of each video that a sampler takes clips from."""
    dense = frames["type"] == "DenseSampleFrames" and frames.get("test_mode")
    return int(frames.get("num_sample_positions", 10)) if dense else 1


def shape_of(pipeline: Sequence[Any], flow: bool) -> tuple[int, ...]:
    """Return the shape of one video as transforms leave it. Raises ValueError for other layouts."""
    of = {step["type"]: step for step in pipeline}
    frames: Any = next(of[name] for name in of if "SampleFrames" in name)
    clip, clips = frames.get("clip_len", 1), frames.get("num_clips", 1)
    clips *= places_of(frames)
    crop = of.get("RandomCrop") or of.get("CenterCrop")
    size = (crop.get("size", crop.get("crop_size")),) * 2 if crop else of["Resize"]["scale"]
    layout = of["FormatShape"]["input_format"]
    if layout == "NCTHW":
        return (clips, 2 if flow else 3, clip, *size)
    if layout == "NCHW":
        return (clips * clip, 3, *size)
    raise ValueError(f"{layout} is not known here")


def build(
    clone: str, config: str, keeps: bool = True, validates: bool = False
) -> Callable[[], None]:
    """Return a training step of one card, or one and a batch of validation."""
    os.chdir(clone)
    from mmengine.config import Config
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import init_default_scope
    from mmengine.structures import LabelData

    init_default_scope("mmaction")
    importlib.import_module("mmaction.models")
    from mmaction.registry import MODELS
    from mmaction.structures import ActionDataSample

    keep_inputs(keeps)
    settings = Config.fromfile(config)
    without_weights(settings.model)
    network = MODELS.build(settings.model).cuda().train()
    wrapper = build_optim_wrapper(network, settings.optim_wrapper)
    flow = "flow" in config
    training, held_out = (
        (loader.batch_size, shape_of(loader.dataset.pipeline, flow))
        for loader in (settings.train_dataloader, settings.val_dataloader)
    )
    count = sum(weight.numel() for weight in network.parameters() if weight.requires_grad)
    buckets = torch.empty(count, device="cuda")

    def batch_of(videos: int, shape: tuple[int, ...]) -> Any:
        inputs = [torch.randint(0, 255, shape, dtype=torch.uint8) for _ in range(videos)]
        samples = []
        for _ in inputs:
            samples.append(ActionDataSample())
            samples[-1].gt_labels = LabelData(item=torch.zeros(1, dtype=torch.int64))
        batch = {"inputs": inputs, "data_samples": samples}
        return network.data_preprocessor(batch, network.training)

    def train() -> None:
        batch = batch_of(*training)
        with wrapper.optim_context(network):
            losses = network(**batch, mode="loss")
        loss, _ = network.parse_losses(losses)
        wrapper.backward(loss)
        assert buckets.numel() == count
        wrapper.step()
        wrapper.optimizer.zero_grad(set_to_none=False)

    def step() -> None:
        train()
        if validates:
            network.eval()
            with torch.no_grad():
                network(**batch_of(*held_out), mode="predict")
            network.train()

    return step


def rows_of(clone: Path) -> Iterator[Row]:
    """Yield the published runs of single configurations, each once."""
    seen = set()
    for page in sorted(clone.glob("configs/recognition/*/README.md")):
        place = None
        for line in page.read_text("utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            if "gpu_mem(M)" in cells:
                place = cells.index("gpu_mem(M)")
                continue
            named = re.search(r"\(/(configs/[^)]+\.py)\)", line)
            if place is None or named is None or not cells[place].isdigit():
                place = place if line.startswith("|") else None
                continue
            row = Row(named[1], int(cells[place]))
            if (row.config, row.published) not in seen:
                seen.add((row.config, row.published))
                yield row


def takes_more(config: Path) -> bool:
    """Return whether a validation takes more frames of a video than the training."""
    from mmengine.config import Config

    pipeline = Config.fromfile(str(config)).val_dataloader.dataset.pipeline
    return any("SampleFrames" in step.type and places_of(step) > 1 for step in pipeline)


def plan_row(clone: Path, row: Row) -> None:
    """Fill in what is not planned yet."""
    arguments = {"clone": str(clone.resolve()), "config": row.config}
    try:
        asked: dict[str, dict[str, Any]] = {"planned": {}, "today": {"keeps": False}}
        if takes_more(clone / row.config):
            asked["validated"] = {"validates": True}
        for name, more in asked.items():
            if not getattr(row, name):
                setattr(row, name, plan_of(build, arguments | more, CARD).allocated)
    except (MptError, FileNotFoundError) as refused:
        row.error = str(refused).partition("\n")[0].replace(f"{clone.resolve()}/", "")


def off(row: Row, name: str = "planned") -> float:
    """Return by how much more was planned than published."""
    return error(getattr(row, name) / MIB, row.published)


def softmax_of(row: Row) -> str:
    """Return which of the two plans a run is counted with."""
    return "today" if row.name.startswith(NEWER) else "planned"


def page(rows: Sequence[Row]) -> str:
    """Return the page."""
    ran = [row for row in rows if row.planned and row.today]
    twice = [row for row in ran if row.planned != row.today]
    once = [row for row in ran if row.planned == row.today]
    refused = [f"- {row.name}: {re.split(', at |; a', row.error)[0]}" for row in rows if row.error]
    return "\n".join(
        [
            "# Recognising actions in videos, planned from mmaction2's code",
            "",
            "Written by `python scripts/plans/video_memory.py CLONE ROWS.json -o docs/benchmarks/plan_video.md`"
            f", {made()}, torch {torch.__version__}, on a CPU. Nothing is fitted. Published is the most of "
            "`torch.cuda.max_memory_allocated()` of the cards of a training, in MiB, in the pages of "
            "[mmaction2](https://github.com/open-mmlab/mmaction2) 1.0.0rc1. Planned are the same bytes with the code "
            "and the configurations of that release, as a step of one's own of one card; gradients are filled with "
            "zeros, and DistributedDataParallel's buckets are as large as the weights that train. Until torch 1.11 "
            "softmax kept its input for its gradient: networks with one are planned in both ways, and counted with "
            "that of then.",
            "",
            "| Runs | Count | Median error | Nine in ten within | Lowest | Highest |",
            "|---|---:|---:|---:|---:|---:|",
            f"| all | {summary([off(row, softmax_of(row)) for row in ran if row.name != MISPRINT])} |",
            f"| without a softmax over activations | {summary([off(row) for row in once])} |",
            "",
            NOTES,
            "",
            "| Run | Published MiB | Planned | Error |",
            "|---|---:|---:|---:|",
            *(
                f"| {row.name} | {row.published:,} | {row.planned // MIB:,} | {off(row):+.1%} |"
                for row in once
            ),
            "",
            "| Run with a softmax | Published MiB | Planned | Error | With today's softmax | Error |",
            "|---|---:|---:|---:|---:|---:|",
            *(
                f"| {row.name} | {row.published:,} | {row.planned // MIB:,} | {off(row):+.1%} | "
                f"{row.today // MIB:,} | {off(row, 'today'):+.1%} |"
                for row in twice
            ),
            "",
            "Validation takes ten times as many frames of each of a batch's videos in these, and a program's largest "
            "figure has it in it if it is read off after one:",
            "",
            "| Run | Published MiB | A step | A step and a batch of validation |",
            "|---|---:|---:|---:|",
            *(
                f"| {row.name} | {row.published:,} | {row.planned // MIB:,} | {row.validated // MIB:,} |"
                for row in rows
                if row.validated
            ),
            "",
            "Not planned:",
            "",
            *refused,
            "",
        ]
    )


def main() -> None:
    """Plan the rows of mmaction2's tables."""
    options = clone_and_rows(__doc__).parse_args()
    clone, file = options.clone.resolve(), options.rows.resolve()
    output = options.output and options.output.resolve()
    kept = json.loads(file.read_text("utf-8")) if file.is_file() else []
    known = {(one["config"], one["published"]): one for one in kept if not one["error"]}
    rows = [
        Row(**(asdict(row) | known.get((row.config, row.published), {}))) for row in rows_of(clone)
    ]
    import_from(clone)
    for row in rows:
        plan_row(clone, row)
        print(row.name, row.published, row.planned // MIB, row.today // MIB, row.error, flush=True)
        file.write_text(json.dumps([asdict(one) for one in rows]), "utf-8")
    if output:
        output.write_text(page(rows), "utf-8")


if __name__ == "__main__":
    main()
