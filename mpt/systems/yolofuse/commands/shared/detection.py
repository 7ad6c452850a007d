"""The work of `mpt yolofuse detect`: sources in, boxes in the pictures' own pixels out.

Pictures are letterboxed as in training's tests; batches keep the network busy, videos are read frame by frame side by
side. With `--half` everything is detected twice, in float32 and with half weights, and the two lists are matched box
by box.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mpt.accelerator import synchronize
from mpt.data.loading.loader import to_device
from mpt.data.pictures.decoding import EXTENSIONS
from mpt.data.video.video import is_video, read_frames
from mpt.engine.state.evaluation import inferring
from mpt.errors import ConfigError, DataError
from mpt.inference.inputs import Given, Sample, match_files, named
from mpt.inference.trained import Trained
from mpt.run.process.files import failures_explained
from mpt.seams import Run
from mpt.systems.yolofuse.data.shared.given_files import (
    frame_picture,
    in_own_pixels,
    read_given,
    scene_of,
)
from mpt.systems.yolofuse.data.shared.scene_augmentation import Scene, as_arrays, letterbox
from mpt.systems.yolofuse.data.shared.scene_dataset import canvas_of, levels_of
from mpt.systems.yolofuse.metrics.shared.average_precision import overlaps
from mpt.systems.yolofuse.tasks.detect import Detect
from mpt.systems.yolofuse.tasks.shared.drawing import draw_boxes

SAME = 0.5
"""IoU from which two boxes of one class are the same object, seen in two precisions."""

Rows = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Detected:
    """One sample: its name, its pictures' size, and rows (corners in its pixels, score, class)."""

    name: str
    size: tuple[int, int]
    rows: Rows


def detector(run: Run) -> Detect:
    """Return a run's detection task. Raises ConfigError for a run of another task."""
    if not isinstance(run.task, Detect):
        raise ConfigError(
            f"RUN: it trained {run.config.model.name}, which is no detector of yolofuse"
        )
    return run.task


def yolo_detector(run: Run) -> Detect:
    """Return a run's task if its network is one of yolofuse's own. Raises ConfigError for another detector."""
    task = detector(run)
    if task.gives_losses:
        raise ConfigError(
            f"RUN: it trained {run.config.model.name}; `mpt yolofuse export` knows model yolofuse only"
        )
    return task


def find_inputs(wanted: Sequence[str]) -> list[Given]:
    """Return the files of each `--input`: pictures of a folder, one picture, or one video."""
    if not wanted:
        raise ConfigError(
            "--input: name a picture, a folder or a video for each camera: --input rgb=PATH --input ir=PATH"
        )
    found = []
    for text in wanted:
        field, path = named(text)
        if not path.exists():
            raise DataError(f"--input: there is no file or folder {path}")
        files = (
            [path]
            if path.is_file()
            else [file for file in sorted(path.rglob("*")) if is_picture(file)]
        )
        if not files:
            raise DataError(f"--input: no pictures in {path}; looked for {', '.join(EXTENSIONS)}")
        root = path if path.is_dir() else path.parent
        found.append(Given(text, tuple(files), root, field))
    return found


def is_picture(path: Path) -> bool:
    """Does the name end like a picture's?"""
    return path.suffix.lower() in EXTENSIONS


def samples(trained: Trained, inputs: Sequence[Given]) -> Iterator[tuple[str, Scene]]:
    """Yield names and scenes. Raises DataError for files without a partner and pictures of two sizes."""
    task, levels = detector(trained.run), levels_of(trained.config.dataset.settings)
    matched: list[Sample] = match_files(task, trained.config.model.name, inputs)
    for sample in matched:
        first = sample[task.cameras[0]]
        if is_video(first):
            streams = [read_frames(sample[camera]) for camera in task.cameras]
            for number, frames in enumerate(zip_longest(*streams)):
                if None in frames:
                    ended = [
                        str(sample[c])
                        for c, frame in zip(task.cameras, frames, strict=True)
                        if frame is None
                    ]
                    print(
                        f"warning: {' and '.join(ended)} ended after {number} frames; the frames that another camera "
                        "has after that have no partner and were left out",
                        file=sys.stderr,
                    )
                    break
                pictures = [
                    frame_picture(sample[camera], frame, camera, levels)
                    for frame, camera in zip(frames, task.cameras, strict=True)
                ]
                yield f"{first.stem}-{number:06d}", scene_of(str(first), pictures)
            continue
        yield (
            sample_name(first, inputs),
            read_given({camera: sample[camera] for camera in task.cameras}, levels),
        )


def sample_name(file: Path, inputs: Sequence[Given]) -> str:
    """Return a file's name in its folder, without the suffix, so that sub-folders stay apart."""
    for given in inputs:
        if file in given.files:
            return file.relative_to(given.root).with_suffix("").as_posix()
    return file.stem


def detect(
    run: Run, scenes: Iterator[tuple[str, Scene]], batch_size: int
) -> Iterator[tuple[Detected, Scene, float]]:
    """Yield the detections of each scene, the scene, and the seconds per sample of its batch."""
    task = detector(run)
    height, width = run.data.fields[task.cameras[0]].shape[1:]
    width, height, most = canvas_of(run.config.dataset.settings, width, height)
    while chosen := list(islice(scenes, batch_size)):
        arrays = [as_arrays(letterbox(scene, width, height, most)) for _, scene in chosen]
        batch = {
            camera: torch.from_numpy(np.stack([one[number] for one in arrays]))
            for number, camera in enumerate(task.cameras)
        }
        started = time.perf_counter()
        with inferring(run):
            found = task.detections(to_device(batch, run.device, run.data)).cpu().numpy()
        synchronize(run.device)
        spent = (time.perf_counter() - started) / len(chosen)
        for (name, scene), rows in zip(chosen, found, strict=True):
            yield (
                Detected(name, scene.size, in_own_pixels(rows, scene.size, (width, height), most)),
                scene,
                spent,
            )


def write_labels(output: Path, one: Detected) -> None:
    """Write YOLO labels with scores: class, centre and size relative, score."""
    width, height = one.size
    lines = [
        f"{int(kind)} {(left + right) / 2 / width:.6f} {(top + bottom) / 2 / height:.6f} "
        f"{(right - left) / width:.6f} {(bottom - top) / height:.6f} {score:.4f}"
        for left, top, right, bottom, score, kind in one.rows.tolist()
    ]
    path = output / "labels" / f"{one.name}.txt"
    with failures_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")


def write_picture(output: Path, one: Detected, scene: Scene, classes: Sequence[str]) -> None:
    """Write the cameras side by side with the detected boxes."""
    drawn = [
        np.asarray(draw_boxes(picture.convert("RGB"), one.rows, classes))
        for picture in scene.pictures
    ]
    path = output / "pictures" / f"{one.name}.png"
    with failures_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.concatenate(drawn, 1)).save(path)


def as_json(found: Sequence[Detected], classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return all detections as plain data."""
    return [
        {
            "name": one.name,
            "width": one.size[0],
            "height": one.size[1],
            "detections": [
                {
                    "class": classes[int(kind)],
                    "score": round(score, 4),
                    "box": [round(side, 2) for side in box],
                }
                for *box, score, kind in one.rows.tolist()
            ],
        }
        for one in found
    ]


def compare(reference: Sequence[Detected], found: Sequence[Detected]) -> list[str]:
    """Return sentences on how detections in half agree with those in float32, matched box by box."""
    matched, scores, shared = 0, [], []
    for first, second in zip(reference, found, strict=True):
        iou = overlaps(first.rows, second.rows) * (
            first.rows[:, None, 5] == second.rows[None, :, 5]
        )
        for place in np.argsort(-iou, axis=None, kind="stable") if iou.size else ():
            n, m = np.unravel_index(place, iou.shape)
            if iou[n, m] < SAME:
                break
            matched += 1
            shared.append(float(iou[n, m]))
            scores.append(abs(float(first.rows[n, 4] - second.rows[m, 4])))
            iou[n, :], iou[:, m] = -1, -1
    wanted, given = (sum(len(one.rows) for one in many) for many in (reference, found))
    said = [
        f"half against float32: {matched} of {wanted} boxes found again, {given - matched} more"
    ]
    if shared:
        said.append(
            f"matched boxes: IoU {statistics.mean(shared):.4f} on average, {min(shared):.4f} at least; scores differ "
            f"by {statistics.mean(scores):.4f} on average, {max(scores):.4f} at most"
        )
    return said
