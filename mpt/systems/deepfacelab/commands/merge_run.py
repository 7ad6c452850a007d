"""What `mpt deepfacelab merge` does: open the run, match faces to frames, draw, write, and make the video."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpt.data.video import VideoWriter, describe_video, is_video
from mpt.engine.evaluation import inferring
from mpt.errors import ConfigError
from mpt.inference.half import choose_half, rebuild, rebuild_half
from mpt.inference.trained import open_trained
from mpt.planner.budget import describe_bytes, parse_budget
from mpt.seams import Run
from mpt.systems.deepfacelab.data.face_files import check_face_types, list_faces
from mpt.systems.deepfacelab.inference.frames import (
    Frames,
    begin_output,
    match_faces,
    merge_frames,
    open_frames,
    record_of,
    write_frame,
)
from mpt.systems.deepfacelab.inference.merging import MergeSettings
from mpt.systems.deepfacelab.inference.planning import largest_batch

if TYPE_CHECKING:
    from mpt.systems.deepfacelab.commands.merge import Command

BATCH_SIZE = 8
SECONDS_BETWEEN_LINES = 5.0


def merge(command: Command) -> None:
    """Write the merged frames, and the video where one is asked for.

    Raises ConfigError, DataError and InputOutputError; an interrupt leaves what is written, and the same command goes
    on from there.
    """
    trained = open_trained(command.run, Path(command.runs), command.device or "auto")
    if trained.config.task.name != "face_swap":
        raise ConfigError(f"{trained.directory.path}: its task is {trained.config.task.name}; a face_swap is needed")
    face_type = command.face_type or trained.train_data.spec.extra.get("face_type") or "f"
    frames = open_frames(command.frames)
    listed = list_faces(command.aligned, "dst")
    check_face_types({"dst": listed}, face_type)
    faces = match_faces(frames, listed, command.aligned)
    settings = MergeSettings(command.mask, command.erode, command.blur, command.colours, command.scale, command.raw)
    to_video = is_video(command.output)
    folder = command.output.with_name(f"{command.output.stem}-frames") if to_video else command.output
    half = choose_half(None, trained.run.device) if command.half else None
    if half:
        print(half.statement)
    record = record_of(
        settings,
        run=str(trained.directory.path.resolve()),
        step=trained.loaded.step,
        face_type=face_type,
        dtype=half.dtype if half else "float32",
        frames=str(command.frames.resolve()),
    )
    begin_output(folder, record, command.overwrite)
    batch_size = command.batch_size or BATCH_SIZE
    if command.vram:
        batch_size, planned = largest_batch(trained, half.dtype if half else None, parse_budget(command.vram))
        print(f"planned: {batch_size} faces at once, at most {describe_bytes(planned)} on the device")
    built = rebuild_half(trained, half.dtype) if half else rebuild(trained, "fp32")
    names = output_names(frames)
    wanted = {index for index, name in enumerate(names) if not (folder / name).is_file()}
    count = sum(len(found) for found in faces.values())
    print(f"{len(frames.names)} frames, {count} faces in {len(faces)} of them; {len(wanted)} frames to do")
    if count < len(listed):
        print(f"{len(listed) - count} of the {len(listed)} faces in {command.aligned} are from other frames: left out")
    size = trained.config.model.settings.image_size
    merged = merge_frames(frames, faces, wanted, drawing(built), size, face_type, settings, batch_size)
    started = told = time.perf_counter()
    for done, (index, frame) in enumerate(merged, start=1):
        write_frame(folder / names[index], frame)
        if time.perf_counter() - told > SECONDS_BETWEEN_LINES or done == len(wanted):
            told = time.perf_counter()
            print(f"{done}/{len(wanted)} frames, {done / (told - started):.2f} frames/s", flush=True)
    print(f"wrote {len(names)} frames to {folder}")
    if to_video:
        write_video(command, frames, [folder / name for name in names])


def output_names(frames: Frames) -> list[str]:
    """Return the files of the merged frames."""
    return [f"{name}.png" for name in frames.names]


def drawing(built: Run) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """Return a function that redraws faces on the run's device."""

    def draw(faces: Tensor) -> Mapping[str, Tensor]:
        with inferring(built):
            drawn: Mapping[str, Tensor] = built.task.redraw({"dst_warped": faces.to(built.device)})  # type: ignore[attr-defined]
            return drawn

    return draw


def write_video(command: Command, frames: Frames, files: list[Path]) -> None:
    """Make a video of the merged frames, with the sound of the video they came from."""
    from PIL import Image

    source = None if frames.paths else frames.source
    rate = command.fps or (describe_video(source).frame_rate if source else 25)
    with VideoWriter(command.output, rate, audio_from=source) as writer:
        for path in files:
            with Image.open(path) as picture:
                data = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
                writer.write(data.view(picture.height, picture.width, 3).permute(2, 0, 1))
    print(f"wrote {command.output}: {len(files)} frames at {float(rate):g} per second")
