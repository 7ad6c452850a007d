"""Processor time of merging one frame of 1920 x 1080 with one face of 256 pixels, drawing aside, on one thread.

    python scripts/speed/bench_merge.py                           # mpt's, with the picture's reading and writing
    DFL_PYTHON scripts/speed/bench_merge.py --deepfacelab DIR     # DeepFaceLab's own, by the Python that it runs with

Frame, landmarks and drawing are the tests' fixture, enlarged.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "systems" / "deepfacelab" / "fixtures"
SIDE, TIMES = 256, 7
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "overlay, rct": ({}, {}),
    "no colours": ({"colours": "none"}, {"color_transfer_mode": 0}),
    "erode 30, blur 60": (
        {"erode": 30, "blur": 60},
        {"erode_mask_modifier": 30, "blur_mask_modifier": 60},
    ),
    "seamless": ({"mode": "seamless"}, {"mode": "seamless"}),
    "sharpen 3": ({"sharpen": 3}, {"sharpen_mode": 2, "blursharpen_amount": 3}),
}
"""Our settings, and DeepFaceLab's of the same meaning."""


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deepfacelab", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    cv2.setNumThreads(1)
    with np.load(FIXTURES / "pixels" / "merger_inputs.npz") as stored:
        frame = np.zeros((1080, 1920, 3), np.uint8)
        frame[:1024, :1024] = cv2.resize(
            stored["one_frame_u8"], (1024, 1024), interpolation=cv2.INTER_CUBIC
        )
        noise = np.random.default_rng(0).integers(-4, 5, frame.shape)
        frame = (frame + noise).clip(0, 255).astype(np.uint8)
        landmarks = stored["one_landmarks"][0] * 4.0
        drawn = [
            enlarge(stored[f"one_face0_predicted{name}_u8"]) for name in ("", "_mask", "_dst_mask")
        ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "00001.png"
        cv2.imwrite(str(path), frame)
        given = (path, landmarks, drawn)
        made = theirs(arguments.deepfacelab, *given) if arguments.deepfacelab else ours(*given)
        for name, merge in made.items():
            print(f"{name}: {fastest(merge) * 1000:.0f} ms", flush=True)


def enlarge(picture: Any) -> Any:
    """Return a drawing at the measured resolution."""
    return cv2.resize(
        picture.astype(np.float32) / 255, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC
    ).clip(0, 1)


def fastest(merge: Callable[[], object]) -> float:
    """Return the least processor time of some runs, in seconds."""
    merge()
    times = []
    for _ in range(TIMES):
        start = time.process_time()
        merge()
        times.append(time.process_time() - start)
    return min(times)


def ours(path: Path, landmarks: Any, drawn: list[Any]) -> dict[str, Callable[[], object]]:
    """Return what mpt does in each case."""
    import dataclasses

    import torch

    from mpt.systems.deepfacelab.data.faces.face_files import describe
    from mpt.systems.deepfacelab.inference.frames import Frames, Merging, merge_frames, write_frame
    from mpt.systems.deepfacelab.inference.merge_options import MergeSettings

    torch.set_num_threads(1)
    face = dataclasses.replace(describe(FIXTURES / "full.jpg"), source_landmarks=landmarks)
    swap, *masks = drawn
    planes = [swap[..., ::-1].transpose(2, 0, 1), *(mask[None] for mask in masks)]
    tensors = [torch.from_numpy(np.ascontiguousarray(plane))[None] for plane in planes]
    outputs = dict(zip(("swap", "swap_mask", "dst_mask"), tensors))
    frames = Frames(path.parent, [path.stem], [path])

    def merge(settings: dict[str, Any]) -> None:
        merging = Merging(lambda _: outputs, SIDE, "f", MergeSettings(**settings), 1)
        for _, frame, _ in merge_frames(frames, {0: [face]}, {0}, merging):
            write_frame(path.with_name("out.png"), frame)

    return {name: lambda own=own: merge(own) for name, (own, _) in CASES.items()}  # type: ignore[misc]


def theirs(
    folder: Path, path: Path, landmarks: Any, drawn: list[Any]
) -> dict[str, Callable[[], object]]:
    """Return what DeepFaceLab does in each case."""
    sys.path.insert(0, str(folder))
    for name, kind in (("int", int), ("float", float), ("bool", bool)):  # which NumPy has no more
        setattr(np, name, kind)
    from facelib import FaceType  # type: ignore[import-not-found]
    from merger.FrameInfo import FrameInfo  # type: ignore[import-not-found]
    from merger.MergeMasked import MergeMasked  # type: ignore[import-not-found]
    from merger.MergerConfig import MergerConfigMasked  # type: ignore[import-not-found]

    info = FrameInfo(filepath=path, landmarks_list=[landmarks])
    swap, *masks = drawn
    outputs = (swap, *(mask[..., None] for mask in masks))

    def merge(options: dict[str, Any]) -> None:
        config = MergerConfigMasked(face_type=FaceType.FULL, default_mode="overlay")
        for name, value in options.items():
            setattr(config, name, value)
        result = MergeMasked(lambda _: outputs, (SIDE, SIDE, 3), None, None, config, info)
        cv2.imwrite(str(path.with_name("out.png")), result[..., :3])

    return {name: lambda own=own: merge(own) for name, (_, own) in CASES.items()}  # type: ignore[misc]


if __name__ == "__main__":
    main()
