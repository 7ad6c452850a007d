"""Frames with faces in, frames with swapped faces out: matching, batches across frames, continuing a stopped merge.

A frame is a picture of a folder or of a video. A face belongs to the frame that its metadata name (`source_filename`),
compared by the name without its suffix, or by number: DeepFaceLab calls a video's first frame 00001. Each written frame
appears under its name when it is whole, so that it need not be made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpt import accelerator
from mpt.data.video.video import is_video, read_frames
from mpt.engine.step.faults import is_out_of_memory
from mpt.errors import ConfigError, DataError, InputOutputError, MemoryBudgetError
from mpt.foreign.files import LARGEST_PICTURE_BYTES, LARGEST_RECORD_BYTES, read_bytes, read_text
from mpt.run.process.files import failures_explained, write_atomically
from mpt.systems.deepfacelab.data.faces.face_files import FaceFile, open_image
from mpt.systems.deepfacelab.data.faces.opencv import opencv
from mpt.systems.deepfacelab.inference.filters import to_levels
from mpt.systems.deepfacelab.inference.masks import Enhance, Picture, Segment
from mpt.systems.deepfacelab.inference.merge_options import Drawn, MergeSettings
from mpt.systems.deepfacelab.inference.merging import (
    STILL,
    Motion,
    frame_landmarks,
    lay_together,
    merge_face,
    motion_between,
    show_face,
)

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
MOST_PIXELS = 8192 * 8192
"""Of a frame."""
RECORD = "merge.json"
MOST_THREADS = 4
"""Frames that are merged at once; each takes some ten times its picture in memory."""
Draw = Callable[[Tensor], Mapping[str, Tensor]]
"""Redraw faces (b 3 s s): `swap`, `swap_mask`, `dst_mask`, on any device."""
DRAWN = ("swap", "swap_mask", "dst_mask")
Levels = np.ndarray[Any, np.dtype[np.uint8]]
"""Grey levels of a picture."""


@dataclass(frozen=True)
class Frames:
    """A folder of pictures or a video, in order. `names` has a frame's name without suffix; a video's are numbers."""

    source: Path
    names: Sequence[str]
    paths: Sequence[Path] = ()

    def read(self, wanted: set[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield (index, uint8 RGB (3, h, w)) of the wanted frames."""
        if self.paths:
            for index in sorted(wanted):
                path = self.paths[index]
                with failures_explained(path):
                    picture = open_image(
                        read_bytes(path, LARGEST_PICTURE_BYTES), str(path), MOST_PIXELS
                    ).convert("RGB")
                yield index, torch.from_numpy(np.array(picture)).permute(2, 0, 1)
        elif wanted:
            for index, frame in enumerate(read_frames(self.source, 0, max(wanted) + 1)):
                if index in wanted:
                    yield index, frame


def open_frames(source: Path) -> Frames:
    """Return the frames of a folder or a video. Raises DataError if there are none."""
    if source.is_dir():
        paths = sorted(path for path in source.iterdir() if path.suffix.lower() in PICTURES)
        if not paths:
            raise DataError(f"--frames: {source} holds no pictures")
        first = {path.stem: path for path in reversed(paths)}
        twice = next((path for path in paths if path is not first[path.stem]), None)
        if twice is not None:
            raise DataError(
                f"--frames: {source} holds {first[twice.stem].name} and {twice.name}, whose results would have one "
                "name; remove or rename one"
            )
        return Frames(source, [path.stem for path in paths], paths)
    if not source.exists():
        raise DataError(f"--frames: {source} does not exist; name a folder of frames or a video")
    if not is_video(source):
        raise DataError(f"--frames: {source} is neither a folder of frames nor a video")
    count = sum(1 for _ in read_frames(source))
    return Frames(source, [f"{index + 1:05d}" for index in range(count)])


def match_faces(
    frames: Frames, faces: Sequence[FaceFile], place: Path
) -> dict[int, list[FaceFile]]:
    """Return the faces of each frame by its index. Raises DataError if none belongs to any."""
    places = {key: index for index, name in enumerate(frames.names) for key in keys_of(name)}
    if not frames.paths and any(
        "#0" in keys_of(Path(str(face.source_filename)).stem) for face in faces
    ):
        # extracted by a tool that counts from zero
        places = {f"#{index}": index for index in range(len(frames.names))}
    matched: dict[int, list[FaceFile]] = {}
    without = [face.name for face in faces if face.source_filename is None or not has_place(face)]
    if without:
        raise DataError(
            f"--aligned: {len(without)} of {len(faces)} faces in {place} do not say where in which frame they are, "
            f"the first being {without[0]}; extract them again"
        )
    for face in faces:
        stem = Path(str(face.source_filename)).stem
        index = next((places[key] for key in keys_of(stem) if key in places), None)
        if index is not None:
            matched.setdefault(index, []).append(face)
    if not matched:
        raise DataError(
            f"--aligned: none of the {len(faces)} faces in {place} is from a frame of {frames.source}: the first "
            f"is from {faces[0].source_filename}, the first frame is {frames.names[0]}"
        )
    return matched


def has_place(face: FaceFile) -> bool:
    """Does a face record its place in its frame?"""
    return face.landmarks is not None and (
        face.source_landmarks is not None or face.source_matrix is not None
    )


def keys_of(stem: str) -> list[str]:
    """Return the names of a frame: its name, and its number if it is one."""
    return [stem, f"#{int(stem)}"] if stem.isdecimal() else [stem]


def begin_output(folder: Path, settings: Mapping[str, Any], overwrite: bool) -> None:
    """Make the folder of merged frames, or continue one that was begun with the same settings.

    Raises ConfigError for one that was begun otherwise, InputOutputError for a folder of something else.
    """
    record = folder / RECORD
    text = json.dumps(settings, indent=1, sort_keys=True) + "\n"
    if folder.is_dir() and not record.exists() and any(folder.iterdir()):
        raise InputOutputError(f"--output: {folder} holds other things; name a new folder")
    if record.exists() and read_text(record, LARGEST_RECORD_BYTES) != text:
        if not overwrite:
            raise ConfigError(
                f"--output: {folder} was begun with other settings ({record}); name another folder, or --overwrite it"
            )
        for path in folder.glob("*.png"):
            path.unlink()
    with failures_explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomically(record, text)


@dataclass(frozen=True)
class Merging:
    """How frames are merged: who draws faces of which size and type, how they are put back, how many are drawn at once.

    `motions` has a frame's motion by its index, `segment` draws XSeg masks if one is asked for, `enhance` larger faces.
    """

    draw: Draw
    size: int
    face_type: str
    settings: MergeSettings
    batch_size: int
    motions: Mapping[int, Motion] = field(default_factory=dict)
    segment: Segment | None = None
    enhance: Enhance | None = None


def merge_frames(
    frames: Frames, faces: Mapping[int, Sequence[FaceFile]], wanted: set[int], merging: Merging
) -> Iterator[tuple[int, Levels, Levels]]:
    """Yield (index, frame, mask) of each wanted frame, swapped: uint8 B, G, R (h, w, 3) and (h, w).

    Faces of several frames are drawn in one batch.
    """
    waiting: list[tuple[int, Levels]] = []
    for index, frame in frames.read(wanted):
        waiting.append((index, np.ascontiguousarray(frame.permute(1, 2, 0).numpy()[..., ::-1])))
        if sum(len(faces.get(number, ())) for number, _ in waiting) >= merging.batch_size:
            yield from merge_some(waiting, faces, merging)
            waiting = []
    yield from merge_some(waiting, faces, merging)


def merge_some(
    waiting: Sequence[tuple[int, Levels]], faces: Mapping[int, Sequence[FaceFile]], merging: Merging
) -> Iterator[tuple[int, Levels, Levels]]:
    """Yield some frames with their faces swapped."""
    pictures = {index: frame.astype(np.float32) / 255 for index, frame in waiting if index in faces}
    cuts = [
        show_face(
            picture,
            frame_landmarks(face),
            merging.size,
            merging.face_type,
            merging.settings.super_resolution,
        )
        for index, picture in pictures.items()
        for face in faces[index]
    ]
    drawn: list[Drawn] = []
    for start in range(0, len(cuts), merging.batch_size):
        batch = np.stack([cut[..., ::-1] for cut in cuts[start : start + merging.batch_size]])
        drawn += draw_within_memory(
            torch.from_numpy(np.ascontiguousarray(batch.transpose(0, 3, 1, 2))), merging.draw
        )
    following = iter(drawn)
    jobs = [
        (index, frame, [next(following) for _ in faces.get(index, ())]) for index, frame in waiting
    ]

    def merge(job: tuple[int, Levels, list[Drawn]]) -> tuple[int, Levels, Levels]:
        index, frame, own = job
        if index not in faces:
            return index, frame, np.zeros(frame.shape[:2], np.uint8)
        return index, *merge_one(index, pictures[index], faces[index], own, merging)

    # OpenCV and NumPy let other threads run meanwhile. A frame's random numbers follow from its index alone.
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        yield from pool.map(merge, jobs)


def merge_one(
    index: int,
    picture: Picture,
    faces: Sequence[FaceFile],
    drawn: Sequence[Drawn],
    merging: Merging,
) -> tuple[Levels, Levels]:
    """Return one frame with all its faces swapped, and its mask."""
    merged = [
        merge_face(
            picture,
            face,
            one,
            merging.face_type,
            merging.settings,
            numbers=np.random.default_rng([index, number]),
            motion=merging.motions.get(index, STILL),
            segment=merging.segment,
            enhance=merging.enhance,
        )
        for number, (face, one) in enumerate(zip(faces, drawn, strict=True))
    ]
    result, mask = lay_together(merged)
    return to_levels(result), to_levels(mask[..., 0])


def motions_of(faces: Mapping[int, Sequence[FaceFile]], count: int) -> dict[int, Motion]:
    """Return the motion of each frame's first face, for frames that have one between two that have one.

    The first and the last frame take themselves for the neighbour that they lack. If any frame has several faces
    there is none, as in DeepFaceLab: nothing says which is which in the next frame.
    """
    found: dict[int, Motion] = {}
    if any(len(own) > 1 for own in faces.values()):
        return found
    for index in faces:
        before, after = (
            faces.get(place) for place in (max(index - 1, 0), min(index + 1, count - 1))
        )
        if before and after:
            found[index] = motion_between(*(frame_landmarks(one[0]) for one in (before, after)))
    return found


def draw_within_memory(batch: Tensor, draw: Draw) -> list[Drawn]:
    """Redraw a batch of faces, in halves if it does not fit. Raises MemoryBudgetError if one face does not."""
    found: dict[str, Tensor] | None = None
    try:
        found = {name: value.float().cpu() for name, value in draw(batch).items()}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if len(batch) == 1:
            raise MemoryBudgetError(
                "there is no memory to draw a single face; use --half or --device cpu"
            ) from error
    if found is not None:
        swap, *masks = (found[name].clamp(0, 1).permute(0, 2, 3, 1).numpy() for name in DRAWN)
        swap = np.ascontiguousarray(swap[..., ::-1])
        return [Drawn(*rows) for rows in zip(swap, *masks)]
    # Past the except block: a traceback would go on holding the tensors that filled the memory.
    if accelerator.available():
        torch.accelerator.empty_cache()
    middle = len(batch) // 2
    return draw_within_memory(batch[:middle], draw) + draw_within_memory(batch[middle:], draw)


def write_frame(path: Path, frame: Levels) -> None:
    """Write a frame (h, w, 3), or a mask (h, w), as PNG under a temporary name, then give it its own."""
    temporary = path.with_name(f".{path.name}.tmp")
    with failures_explained(path):
        done, data = opencv().imencode(".png", frame)  # a fifth of Pillow's time
        assert done, "a picture in memory can be encoded"
        temporary.write_bytes(data.tobytes())
        os.replace(temporary, path)


def record_of(settings: MergeSettings, **more: Any) -> dict[str, Any]:
    """Return the settings of a folder of merged frames."""
    return {**asdict(settings), **more}
