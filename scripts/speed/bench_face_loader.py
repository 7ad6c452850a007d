"""Time reading and warping a batch of faces, to compare with a training step: for docs/benchmarks/saehd.md.

    python scripts/speed/bench_face_loader.py

Aligned JPGs of 512 pixels with DeepFaceLab's metadata are written to a temporary folder and fetched as `mpt train`
would, by one worker with one thread; drawn faces of 64 pixels are fetched as in the demo, beside the demo's own step.
"""

from __future__ import annotations

import io
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image

from mpt.config.load import load_config
from mpt.engine.building.build import build_datasets, build_run
from mpt.engine.step.step import update
from mpt.systems.deepfacelab.data import faceset, procedural_faces
from mpt.systems.deepfacelab.data.faces.face_warp import NUMBERS, draw_warps, warp
from mpt.systems.deepfacelab.data.leras.leras_pickle import write_plain

BATCH = 8
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Print milliseconds per batch of eight pairs."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        for side in ("src", "dst"):
            write_faces(Path(name) / side)
        settings = faceset.Settings(
            src=f"{name}/src", dst=f"{name}/dst", image_size=512, hold_out_every=10
        )
        data = faceset.build(settings, "train", 0)
        whole = milliseconds(lambda epoch: data.fetch(range(BATCH), epoch))
        plain = faceset.build(settings, "test", 0)
        reading = milliseconds(lambda epoch: plain.fetch(range(BATCH), epoch))
    images, masks = torch.rand(BATCH, 3, 512, 512), torch.rand(BATCH, 2, 512, 512)
    numbers = torch.rand(BATCH, NUMBERS, dtype=torch.float64)
    warps = draw_warps(numbers, 512, transform=True, flip_chance=0.4)
    bending = milliseconds(lambda epoch: warp(images, masks, warps, bend=True))
    print(
        f"512 pixels, {BATCH} pairs: {whole:.0f} ms (reading {reading:.0f}, moving and bending {2 * bending:.0f})"
    )
    config = load_config("@saehd_demo")
    drawn, _ = build_datasets(config)
    run = build_run(config, torch.device("cpu"), drawn.spec)
    batch = drawn.fetch(range(BATCH), 0)
    fetching = milliseconds(lambda epoch: drawn.fetch(range(BATCH), epoch))
    stepping = milliseconds(lambda epoch: [update(run, phase, batch) for phase in run.phases])
    ratio = stepping / fetching
    print(
        f"64 pixels, {BATCH} pairs: {fetching:.1f} ms beside a step of {stepping:.0f} ms ({ratio:.0f} times)"
    )


def milliseconds(call: Callable[[int], object], times: int = 5) -> float:
    """Return the median time of a call."""
    call(0)
    seconds = []
    for number in range(times):
        started = time.perf_counter()
        call(number)
        seconds.append(time.perf_counter() - started)
    return sorted(seconds)[times // 2] * 1000


def write_faces(folder: Path, count: int = 12) -> None:
    """Write drawn faces as DeepFaceLab's aligned JPGs, with landmarks on an ellipse."""
    folder.mkdir()
    expressions = procedural_faces.draw_expressions(count, 0)
    faces = procedural_faces.render(procedural_faces.SOURCE, expressions, 512).image
    turn = torch.linspace(0, 6.283, 68)
    points = torch.stack((256 + 150 * turn.cos(), 256 + 200 * turn.sin()), dim=1).tolist()
    metadata = write_plain({"face_type": "whole_face", "landmarks": points})
    segment = b"\xff\xef" + struct.pack(">H", len(metadata) + 2) + metadata
    for index, face in enumerate(faces):
        file = io.BytesIO()
        # skin is not as smooth as drawings
        noisy = (face + torch.rand(3, 512, 512) * 0.05).clamp(0, 1)
        Image.fromarray((noisy * 255).byte().permute(1, 2, 0).numpy()).save(
            file, "JPEG", quality=95
        )
        data = file.getvalue()
        (folder / f"{index:05d}.jpg").write_bytes(data[:2] + segment + data[2:])


if __name__ == "__main__":
    main()
