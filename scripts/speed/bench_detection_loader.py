"""Pairs per second of the detection loader: decoded each time or cached, in this process or in workers.

Usage: python scripts/speed/bench_detection_loader.py [--pairs 64] [--workers 0 1 2]

Writes pairs of the size of LLVIP's (1280 x 1024, JPEG) to a temporary folder and reads them as
@yolofuse_mid does: 640 pixels, mosaic of four, HSV, flips.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from mpt.data.loading.loader import Loader
from mpt.systems.yolofuse.data.detection_files import Settings, build

SIZE = (1280, 1024)
BATCH = 8


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=8)
    arguments = parser.parse_args()
    print("| workers | cache | pairs per second |\n|---:|---|---:|")
    with tempfile.TemporaryDirectory() as folder:
        write_pairs(Path(folder), arguments.pairs)
        for workers in arguments.workers:
            for cache in (False, True):
                speed = measure(Path(folder), workers, cache, arguments.batches)
                print(f"| {workers} | {'yes' if cache else 'no'} | {speed:.1f} |", flush=True)


def write_pairs(root: Path, count: int) -> None:
    """Write pairs in YOLOFuse's layout, smooth enough to compress like photographs."""
    numbers = np.random.default_rng(0)
    for folder in ("images", "imagesIR", "labels"):
        (root / folder / "train").mkdir(parents=True)
    for number in range(count):
        for folder, channels in (("images", 3), ("imagesIR", 1)):
            coarse = numbers.integers(0, 255, (40, 50, channels), dtype=np.uint8).squeeze()
            picture = Image.fromarray(coarse).resize(SIZE, Image.Resampling.BICUBIC)
            picture.save(root / folder / "train" / f"{number}.jpg", quality=90)
        (root / "labels" / "train" / f"{number}.txt").write_text("0 0.5 0.5 0.1 0.3\n")


def measure(root: Path, workers: int, cache: bool, batches: int) -> float:
    """Return pairs per second after a first pass that fills the caches."""
    data = build(Settings(root=str(root), image_size=640, cache=cache), "train", 0)
    loader = Loader(data, BATCH, 0, workers)
    stream = loader.batches()
    for _ in range(loader.steps_per_epoch if cache else 2):
        next(stream)
    started = time.perf_counter()
    for _ in range(batches):
        next(stream)
    return batches * BATCH / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
