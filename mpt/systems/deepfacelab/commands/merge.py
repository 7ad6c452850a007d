"""Swap the faces in frames or a video: a trained model redraws each aligned face, which goes back to its place."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from mpt.commands.cli.arguments import Runs
from mpt.config.checking.precision_names import FLOAT32
from mpt.config.sizes import describe_bytes, parse_budget
from mpt.data.video.video import describe_video, is_video
from mpt.data.video.video_writer import VideoWriter
from mpt.engine.state.evaluation import inferring
from mpt.errors import ConfigError
from mpt.foreign.files import open_foreign
from mpt.inference.half import choose_half, rebuild, rebuild_half
from mpt.inference.trained import Trained, open_trained
from mpt.seams import Run
from mpt.systems.deepfacelab.data.faces.face_files import check_face_types, list_faces
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.inference.frames import (
    Frames,
    Merging,
    begin_output,
    match_faces,
    merge_frames,
    motions_of,
    open_frames,
    record_of,
    write_frame,
)
from mpt.systems.deepfacelab.inference.masks import Enhance, Segment, load_enhancer, load_segment
from mpt.systems.deepfacelab.inference.merge_options import NETWORK_MASKS, MergeSettings
from mpt.systems.deepfacelab.inference.planning import largest_batch

BATCH_SIZE = 8
SECONDS_BETWEEN_LINES = 5.0


@dataclass(frozen=True)
class Command:
    """Swap the faces in frames or in a video.

    The same command continues with an output that was begun.

    Examples:
      mpt deepfacelab merge RUN --frames clip.mp4 --aligned faces --output swapped.mp4
    """

    run: Annotated[str, typer.Argument(metavar="RUN", show_default=False)]
    """A trained run or a checkpoint."""
    frames: Annotated[Path, typer.Option(metavar="DIR|VIDEO", show_default=False)]
    """The frames, or the video, with the destination's faces."""
    aligned: Annotated[Path, typer.Option(metavar="DIR|PAK", show_default=False)]
    """The faces that were extracted from these frames, with their metadata."""
    output: Annotated[Path, typer.Option(metavar="DIR|VIDEO", show_default=False)]
    """Folder of the merged frames, or a video, whose sound is that of --frames."""
    mask: Literal[
        "full",
        "dst",
        "learned-prd",
        "learned-dst",
        "learned",
        "learned-sum",
        "xseg",
        "learned-xseg",
        "xseg-prd",
        "xseg-dst",
        "xseg-both",
        "all",
    ] = "learned"
    """The replaced area: learned is the intersection of both drawn masks, dst the landmarks' hull, xseg masks painted
    or applied. Masks that --xseg finds in the drawing (prd), the frame's face (dst), in both, in both and learned
    (all)."""
    xseg: Annotated[Path | None, typer.Option(metavar="RUN|FILE|DIR")] = None
    """A trained XSeg (a run, or XSeg_256.npy, or its folder), for masks that it draws."""
    erode: int = 0
    """Make the mask smaller by that many quarter pixels of the drawing; negative makes it larger."""
    blur: Annotated[int, typer.Option(min=0)] = 0
    """Fade its edge over that many quarter pixels of the drawing."""
    colours: Literal[
        "none", "rct", "lct", "mkl", "mkl-m", "idt", "idt-m", "sot", "sot-m", "mix-m"
    ] = "rct"
    """How the drawing takes the frame's colours; -m looks at the mask alone, sot is the same as sot-m."""
    scale: Annotated[float, typer.Option(min=0.5, max=1.5)] = 1.0
    """DeepFaceLab's output face scale, 1 for 0 %: above 1 the face is put back smaller, below 1 larger."""
    mode: Literal[
        "overlay",
        "hist-match",
        "seamless",
        "seamless-hist-match",
        "original",
        "raw-rgb",
        "raw-predict",
    ] = "overlay"
    """How the face is put in: laid over, with the frame's histogram, by seamless cloning, or raw, without a mask."""
    raw: bool = False
    """The same as --mode raw-rgb: put back the whole drawn square, without mask and colours."""
    sharpen: Annotated[int, typer.Option(min=-100, max=100)] = 0
    """Sharpen the face by this amount; 2 to 5 is visible. Negative smooths it."""
    sharpen_mode: Literal["none", "box", "gaussian"] = "gaussian"
    """How it is sharpened."""
    hist_threshold: Annotated[int, typer.Option(min=0, max=255)] = 238
    """How far through the frame's histogram the hist-match modes go, of 255."""
    hist_masked: Annotated[bool, typer.Option("--hist-masked/--no-hist-masked")] = True
    """Match histograms under the mask alone."""
    motion_blur: Annotated[int, typer.Option(min=0, max=100)] = 0
    """Percent of its motion in the video over which a face is blurred."""
    denoise: Annotated[int, typer.Option(min=0, max=500)] = 0
    """Strength of a median filter on the frame around the face; 100 is a whole one."""
    bicubic_degrade: Annotated[int, typer.Option(min=0, max=100)] = 0
    """Percent by which the frame around the face is shrunk and enlarged again."""
    color_degrade: Annotated[int, typer.Option(min=0, max=100)] = 0
    """Percent of a palette of 256 colours in the result."""
    super_resolution: Annotated[int, typer.Option(min=0, max=100)] = 0
    """Percent of the face as DeepFaceLab's enhancer draws it, at four times the resolution; needs --facelib."""
    facelib: Annotated[Path | None, typer.Option(metavar="DIR", show_default=False)] = None
    """Your DeepFaceLab, or its folder facelib, with FaceEnhancer.npy."""
    mask_output: Annotated[Path | None, typer.Option(metavar="DIR|VIDEO")] = None
    """Folder for the masks of the merged frames."""
    face_type: Literal["h", "mf", "f", "wf", "head"] | None = None
    """The model's type of face; by default the run's."""
    half: bool = False
    """Draw in half precision."""
    batch_size: Annotated[int | None, typer.Option(min=1)] = None
    """Faces drawn at once; by default 8, or as many as fit --vram."""
    vram: Annotated[str | None, typer.Option(metavar="SIZE")] = None
    """Draw as many faces at once as are planned to fit into this memory, such as 6GiB."""
    fps: Annotated[float | None, typer.Option(min=1)] = None
    """Frames per second of a video made from a folder; 25 by default."""
    overwrite: bool = False
    """Make frames anew that were merged with other settings."""
    device: str | None = None
    """cpu, cuda, ...; by default the best there is."""
    runs: Runs = "runs"


def from_infer(
    task: str | None, inputs: Sequence[tuple[str | None, Path]]
) -> dict[str, Any] | None:
    """Return this command's fields for `mpt infer RUN --input frames=DIR --input aligned=DIR`."""
    given = dict(inputs)
    if task != "face_swap" or set(given) != {"frames", "aligned"}:
        return None
    return {"frames": given["frames"], "aligned": given["aligned"]}


@dataclass(frozen=True)
class Target:
    """The folders of merged frames and their masks, and the frames that are still to be made."""

    folders: list[Path]
    """That of the frames, and that of the masks if they are kept."""
    names: list[str]
    wanted: set[int]


def run(command: Command) -> None:
    """Write the merged frames, and the video if one is asked for.

    Raises ConfigError, DataError and InputOutputError; an interrupt keeps written frames, and the same command goes
    on from there.
    """
    opencv()  # said before anything is loaded
    trained = open_swapper(command)
    face_type = command.face_type or trained.train_data.spec.extra.get("face_type") or "f"
    frames = open_frames(command.frames)
    listed = list_faces(command.aligned, "dst")
    check_face_types({"dst": listed}, face_type)
    faces = match_faces(frames, listed, command.aligned)
    settings = settings_of(command)
    segment = open_segment(command, settings, trained.run.device)
    enhance = open_enhancer(command, trained.run.device)
    dtype = choose_dtype(command, trained.run.device)
    target = begin(
        command,
        frames,
        record_of(
            settings,
            run=str(trained.directory.path.resolve()),
            step=trained.loaded.step,
            face_type=face_type,
            dtype=dtype or "float32",
            frames=str(command.frames.resolve()),
            aligned=str(command.aligned.resolve()),
            xseg=None if segment is None else str(command.xseg),
        ),
    )
    batch_size = choose_batch(command, trained, dtype)
    built = rebuild_half(trained, dtype) if dtype else rebuild(trained, FLOAT32)
    count = sum(len(found) for found in faces.values())
    print(
        f"{len(frames.names)} frames, {count} faces in {len(faces)} of them; {len(target.wanted)} frames to do"
    )
    if count < len(listed):
        print(
            f"{len(listed) - count} of the {len(listed)} faces in {command.aligned} are from other frames: left out"
        )
    size = trained.config.model.settings.image_size
    motions = motions_of(faces, len(target.names)) if settings.motion_blur else {}
    if settings.motion_blur and count > len(faces):
        print("a frame has several faces: no motion blur, as in DeepFaceLab")
    merging = Merging(
        drawing(built), size, face_type, settings, batch_size, motions, segment, enhance
    )
    write_frames(merge_frames(frames, faces, target.wanted, merging), target)
    for output, place in zip((command.output, command.mask_output), target.folders):
        if output is not None and is_video(output):
            write_video(output, command.fps, frames, [place / name for name in target.names])


def open_swapper(command: Command) -> Trained:
    """Open the run. Raises ConfigError for one of another task."""
    trained = open_trained(
        command.run, Path(command.runs), command.device or "auto", which="newest"
    )
    if trained.config.task.name != "face_swap":
        raise ConfigError(
            f"{trained.directory.path}: its task is {trained.config.task.name}; a face_swap is needed"
        )
    return trained


def open_segment(command: Command, settings: MergeSettings, device: torch.device) -> Segment | None:
    """Open the XSeg network of masks that one draws. Raises ConfigError if none is named."""
    if settings.mask not in NETWORK_MASKS:
        return None
    if command.xseg is None:
        raise ConfigError(f"--mask {settings.mask}: an XSeg network draws it: name one with --xseg")
    return load_segment(command.xseg, device, Path(command.runs)).segment


def open_enhancer(command: Command, device: torch.device) -> Enhance | None:
    """Open the enhancer if one is asked for. Raises ConfigError if its folder is not named."""
    if not command.super_resolution:
        return None
    if command.facelib is None:
        raise ConfigError(
            "--super-resolution: DeepFaceLab's FaceEnhancer.npy draws it: name its folder with --facelib"
        )
    return load_enhancer(command.facelib, device)


def choose_dtype(command: Command, device: torch.device) -> str | None:
    """Return the half precision to draw in, which is printed with its reason; None for float32."""
    if not command.half:
        return None
    half = choose_half(None, device)
    print(half.statement)
    return half.dtype


def begin(command: Command, frames: Frames, record: dict[str, Any]) -> Target:
    """Make the folders, or find the frames of a merge with the same settings. Raises ConfigError for another's."""
    folders = [folder_of(command.output)]
    if command.mask_output:
        folders.append(folder_of(command.mask_output))
        if folders[0] == folders[1]:
            raise ConfigError(f"--mask-output: {folders[1]} is where the frames go; name another")
    for place in folders:
        begin_output(place, record, command.overwrite)
    names = [f"{name}.png" for name in frames.names]
    wanted = {
        index
        for index, name in enumerate(names)
        if not all((place / name).is_file() for place in folders)
    }
    return Target(folders, names, wanted)


def choose_batch(command: Command, trained: Trained, dtype: str | None) -> int:
    """Return how many faces are drawn at once: as many as are planned to fit --vram if that is given."""
    if not command.vram:
        return command.batch_size or BATCH_SIZE
    batch_size, planned = largest_batch(trained, dtype, parse_budget(command.vram))
    print(f"planned: {batch_size} faces at once, at most {describe_bytes(planned)} on the device")
    return batch_size


def write_frames(merged: Iterable[tuple[Any, ...]], target: Target) -> None:
    """Write merged frames as they come: index, frame, and mask if masks are kept."""
    count = len(target.wanted)
    started = told = time.perf_counter()
    for done, (index, *pictures) in enumerate(merged, start=1):
        for place, picture in zip(target.folders, pictures):
            write_frame(place / target.names[index], picture)
        if time.perf_counter() - told > SECONDS_BETWEEN_LINES or done == count:
            told = time.perf_counter()
            print(f"{done}/{count} frames, {done / (told - started):.2f} frames/s", flush=True)
    print(f"wrote {len(target.names)} frames to {target.folders[0]}")


def settings_of(command: Command) -> MergeSettings:
    """Return the merger's settings from the arguments."""
    named = {
        field.name: getattr(command, field.name) for field in dataclasses.fields(MergeSettings)
    }
    return MergeSettings(**{**named, "mode": "raw-rgb" if command.raw else command.mode})


def folder_of(output: Path) -> Path:
    """Return the writer of frames for a folder or a video."""
    return output.with_name(f"{output.stem}-frames") if is_video(output) else output


def drawing(built: Run) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """Return a function that redraws faces on the run's device."""

    def draw(faces: Tensor) -> Mapping[str, Tensor]:
        with inferring(built):
            drawn: Mapping[str, Tensor] = built.task.redraw({"dst_warped": faces.to(built.device)})  # type: ignore[attr-defined]
            return drawn

    return draw


def write_video(output: Path, fps: float | None, frames: Frames, files: list[Path]) -> None:
    """Make a video of the merged frames, with the sound of the video they came from."""
    from PIL import Image

    source = None if frames.paths else frames.source
    rate = fps or (describe_video(source).frame_rate if source else 25)
    with VideoWriter(output, rate, audio_from=source) as writer:
        for path in files:
            with open_foreign(path) as file, Image.open(file) as picture:
                data = torch.frombuffer(
                    bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8
                )
                writer.write(data.view(picture.height, picture.width, 3).permute(2, 0, 1))
    print(f"wrote {output}: {len(files)} frames at {float(rate):g} per second")
