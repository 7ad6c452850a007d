"""Frames to aligned faces: the work of `mpt deepfacelab extract`, with a record by which a stopped one continues."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from mpt.engine.building.devices import choose_device
from mpt.errors import ConfigError, InputOutputError
from mpt.run.process.files import failures_explained, write_atomically
from mpt.systems.deepfacelab.data.faces.face_writing import encode_face, fits_its_box, write_face
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.inference.extraction import load_detectors
from mpt.systems.deepfacelab.inference.frames import Frames, open_frames

RECORD, WITHOUT = "extract.json", "no_faces.txt"
SECONDS_BETWEEN_LINES = 5.0


def extract_faces(
    frames_path: Path,
    output: Path,
    facelib: Path,
    *,
    face_type: str,
    size: int,
    quality: int,
    most: int,
    device: str | None,
) -> None:
    """Write the faces of frames, and say which have none.

    Raises DataError for frames that are none, CheckpointError if the networks are not there, ConfigError for a
    folder that was begun otherwise, InputOutputError for a folder of something else.
    """
    opencv()  # said before anything is loaded
    frames = open_frames(frames_path)
    settings = {
        "frames": str(frames_path.resolve()),
        "face_type": face_type,
        "size": size,
        "quality": quality,
    }
    done = begin(output, {**settings, "most": most})
    detectors = load_detectors(facelib, choose_device(device or "auto"))
    wanted = {index for index, name in enumerate(frames.names) if name not in done}
    print(f"{len(frames.names)} frames, {len(wanted)} to do")
    started = told = time.perf_counter()
    for number, (index, frame) in enumerate(frames.read(wanted), start=1):
        picture = np.ascontiguousarray(frame.permute(1, 2, 0).numpy()[..., ::-1])
        source = source_name(frames, index)
        faces = [
            face
            for face in detectors.find_faces(picture, most)
            if fits_its_box(face, size, face_type)
        ]
        for place, face in enumerate(faces):
            data = encode_face(picture, face, source, face_type, size, quality)
            write_face(output / f"{frames.names[index]}_{place}.jpg", data)
        done[frames.names[index]] = len(faces)
        if time.perf_counter() - told > SECONDS_BETWEEN_LINES or number == len(wanted):
            told = time.perf_counter()
            note(output, {**settings, "most": most}, done)
            print(
                f"{number}/{len(wanted)} frames, {number / (told - started):.2f} frames/s",
                flush=True,
            )
    note(output, {**settings, "most": most}, done)
    conclude(output, frames, done)


def source_name(frames: Frames, index: int) -> str:
    """Return the file that a frame is, or would be were the video taken apart."""
    return frames.paths[index].name if frames.paths else f"{frames.names[index]}.png"


def begin(output: Path, settings: dict[str, Any]) -> dict[str, int]:
    """Make the folder, or return how many faces were found in which frames of one that was begun alike."""
    record = output / RECORD
    if not record.is_file():
        if output.is_dir() and any(output.iterdir()):
            raise InputOutputError(f"{output} holds other things; name a new folder")
        with failures_explained(output):
            output.mkdir(parents=True, exist_ok=True)
        note(output, settings, {})
        return {}
    try:
        before = json.loads(record.read_text("utf-8"))
        found = {str(name): int(count) for name, count in before.pop("found").items()}
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputOutputError(
            f"{record} is damaged; remove the folder, or name another"
        ) from error
    if before != settings:
        raise ConfigError(f"{output} was begun with other settings ({record}); name another folder")
    return found


def note(output: Path, settings: dict[str, Any], done: dict[str, int]) -> None:
    """Write down which frames are done, after their faces are written."""
    write_atomically(output / RECORD, json.dumps({**settings, "found": done}, indent=0) + "\n")


def conclude(output: Path, frames: Frames, done: dict[str, int]) -> None:
    """List the frames without faces, and say how many faces there are."""
    without = [name for name in frames.names if not done.get(name)]
    write_atomically(output / WITHOUT, "".join(f"{name}\n" for name in without))
    print(f"wrote {sum(done.values())} faces of {len(done)} frames to {output}")
    if without:
        print(
            f"no face was found in {len(without)} frames, listed in {output / WITHOUT}: {', '.join(without[:5])} ..."
        )
