"""Swap the faces in frames or a video: a trained model redraws each aligned face, which goes back to its place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from mpt.commands.arguments import Runs
from mpt.config.precision_names import FLOAT32
from mpt.data.video import describe_video, is_video
from mpt.data.video_writer import VideoWriter
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

BATCH_SIZE = 8
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Command:
    """Swap the faces in frames or in a video.

    The same command goes on with an output that was begun.
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A trained run or a checkpoint."""
    frames: Annotated[Path, typer.Option(metavar="DIR|VIDEO", show_default=False)]
    """The frames, or the video, with the destination's faces."""
    aligned: Annotated[Path, typer.Option(metavar="DIR|PAK", show_default=False)]
    """The faces that were extracted from these frames, with their metadata."""
    output: Annotated[Path, typer.Option(metavar="DIR|VIDEO", show_default=False)]
    """Folder of the merged frames, or a video, whose sound is that of --frames."""
    mask: Literal["full", "dst", "learned-prd", "learned-dst", "learned", "learned-sum", "xseg", "learned-xseg"] = (
        "learned"
    )
    """What is replaced: learned is where both drawn masks agree, dst the landmarks' hull, xseg what was painted."""
    erode: int = 0
    """Make the mask smaller by so many quarter pixels of the drawing; negative makes it larger."""
    blur: Annotated[int, typer.Option(min=0)] = 0
    """Fade its edge over so many quarter pixels of the drawing."""
    colours: Literal["none", "rct", "lct", "mkl", "idt", "sot"] = "rct"
    """How the drawing takes the frame's colours."""
    scale: Annotated[float, typer.Option(min=0.5, max=1.5)] = 1.0
    """Size of the face that is put back against the one that was drawn."""
    raw: bool = False
    """Put back the whole drawn square, without mask and colours."""
    sharpen: Annotated[int, typer.Option(min=0, max=100)] = 0
    """Sharpen the face in the frame, as DeepFaceLab's Gaussian sharpening of this amount; 2 to 5 is visible."""
    face_type: Literal["h", "mf", "f", "wf", "head"] | None = None
    """The model's type of face; by default the run's."""
    half: bool = False
    """Draw in half precision."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Faces drawn at once; by default 8, or what fits --vram."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """Draw as many faces at once as are planned to fit into this memory, such as 6GiB."""
    fps: Annotated[float | None, typer.Option(min=1)] = None
    """Frames per second of a video made from a folder; 25 by default."""
    overwrite: bool = False
    """Make frames anew that were merged with other settings."""
    device: str | None = None
    """cpu, cuda, ...; by default the best there is."""
    runs: Runs = "runs"


def from_infer(task: str | None, inputs: Sequence[tuple[str | None, Path]]) -> dict[str, Any] | None:
    """Return this command's fields for `mpt infer RUN --input frames=DIR --input aligned=DIR`."""
    given = dict(inputs)
    if task != "face_swap" or set(given) != {"frames", "aligned"}:
        return None
    return {"frames": given["frames"], "aligned": given["aligned"]}


def run(command: Command) -> None:
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
    settings = MergeSettings(
        command.mask, command.erode, command.blur, command.colours, command.scale, command.raw, command.sharpen
    )
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
    built = rebuild_half(trained, half.dtype) if half else rebuild(trained, FLOAT32)
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
