"""The tables of docs/benchmarks/dain.md: how much memory half precision saves in DAIN, and tiles for a small card.

`python scripts/quality/dain_table.py` prints them as Markdown; a few minutes on a CPU. Bytes are those of live tensors,
measured on real passes of the full-size networks at two small sizes; they are linear in the pixels, which the figures
per megapixel and the plans for a 6 GiB card use. Times are CPU seconds of one thread; a training step's are without
its optimizer. Half is bfloat16.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.load import load_config
from mpt.engine.building.build import build_run
from mpt.engine.state.evaluation import inferring
from mpt.engine.state.memory import known_tensors
from mpt.run.process.memory_meter import MemoryMeter
from mpt.seams import DataSpec, FieldSpec, Run
from mpt.seams.phase_losses import draw_batch, losses_of
from mpt.systems.dain.inference.memory import PassMemory, choose_tiles
from mpt.systems.dain.nn.dain import PARTS
from mpt.systems.dain.nn.networks.flow_net import pad_amount
from mpt.systems.dain.nn.operators.interpolation import Interpolator

MODES = {"fp32": {}, "amp": {"dtype": "bfloat16"}, "O1": {"dtype": "bfloat16"}}
TRAINED_AT = ((64, 64), (64, 128))
FRAMES_AT = ((64, 64), (128, 128))
INFERRED = {"dain": ("fp32", "amp", "O1"), "rife": ("fp32", "amp"), "flow_warp": ("fp32", "amp")}
MEBI, GIBI, MEGAPIXEL = 2**20, 2**30, 1e6
SCREENS = {"720p": (720, 1280), "1080p": (1080, 1920), "4K": (2160, 3840)}
CARD_BYTES = 6 * GIBI


def spec_of(height: int, width: int) -> DataSpec:
    """Return the layout of one triplet."""
    image = FieldSpec((3, height, width), torch.float32, "image")
    return DataSpec(
        {"first": image, "middle": image, "last": image, "time": FieldSpec((), torch.float32)}, 1
    )


def build(mode: str, height: int, width: int, model: str = "dain") -> Run:
    """Return a full-size network in a mode."""
    config = load_config({
        "model": {"name": model},
        "dataset": {"name": "procedural_triplets"},
        "optimizer": {"name": "adamax"},
        "precision": {"mode": mode, **MODES[mode]},
        "train": {"steps": 1, "batch_size": 1},
    })  # fmt: skip
    torch.manual_seed(0)
    return build_run(config, torch.device("cpu"), spec_of(height, width))


def perform(run: Run) -> None:
    """Run forward and backward on random frames."""
    torch.manual_seed(0)
    batch = {
        name: torch.rand(1, *spec.shape) if spec.shape else torch.full((1,), 0.5)
        for name, spec in run.data.fields.items()
    }
    for (loss,) in losses_of(run, run.phases[0], draw_batch(run, run.phases[0], batch)):
        loss.value.backward()  # type: ignore[no-untyped-call]


def part_of(name: str) -> str:
    """Return which part a direct child of the network belongs to."""
    return next((part for part, prefixes in PARTS.items() if name in prefixes), "float32 regions")


@contextlib.contextmanager
def saved_by_part(net: nn.Module) -> Iterator[Counter[tuple[str, torch.dtype]]]:
    """Count the bytes that are kept for the backward pass by part and dtype; a storage counts once.

    Weights do not count, nor autocast's half copies of them, which do not grow with the pixels.
    """
    found: Counter[tuple[str, torch.dtype]] = Counter()
    seen: set[int] = {p.untyped_storage()._cdata for p in net.parameters()}
    shapes = {p.shape for p in net.parameters()}
    kept: list[Tensor] = []
    current = ["between the parts"]

    def save(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage()._cdata
        is_cast = tensor.dtype != torch.float32 and tensor.shape in shapes
        if address not in seen and not is_cast:
            seen.add(address)
            kept.append(tensor)
            found[current[-1], tensor.dtype] += tensor.untyped_storage().nbytes()
        return tensor

    handles = []
    for name, child in net.named_children():
        part = part_of(name)
        handles.append(child.register_forward_pre_hook(lambda *_, part=part: current.append(part)))  # type: ignore[misc]
        handles.append(child.register_forward_hook(lambda *_: current.pop() and None))
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        yield found
    for handle in handles:
        handle.remove()


def training_tables() -> None:
    """Print the peak of a training step per mode, and what each part keeps for its backward pass."""
    print(
        "| Mode | Weights and gradients, MiB | Beyond them, GiB per megapixel | CPU s per megapixel |"
    )
    print("|---|---:|---:|---:|")
    kept: dict[str, Counter[tuple[str, torch.dtype]]] = {}
    for mode in MODES:
        peaks, fixed = [], 0
        for height, width in TRAINED_AT:
            run = build(mode, height, width)
            with MemoryMeter(lambda run=run: known_tensors(run)) as meter:  # type: ignore[misc]
                perform(run)
            fixed = meter.split.parameters + meter.split.gradients
            peaks.append(meter.split.peak_bytes)
        begun = time.process_time()
        perform(run)
        seconds = time.process_time() - begun
        with saved_by_part(run.task.modules["net"]) as kept[mode]:
            perform(run)
        pixels = [height * width for height, width in TRAINED_AT]
        slope = (peaks[1] - peaks[0]) / (pixels[1] - pixels[0]) * MEGAPIXEL
        seconds *= MEGAPIXEL / pixels[1]
        print(f"| {mode} | {fixed / MEBI:.0f} | {slope / GIBI:.1f} | {seconds:.0f} |", flush=True)
    scale = MEGAPIXEL / (TRAINED_AT[1][0] * TRAINED_AT[1][1]) / GIBI
    print(
        "\n| Part | Parameters | Kept for backward, fp32, GiB per megapixel | amp | still float32 under amp |"
    )
    print("|---|---|---|---|---|")
    net = run.task.modules["net"]
    for part in (*PARTS, "float32 regions", "between the parts"):
        count = sum(
            p.numel()
            for prefix in PARTS.get(part, ())
            for p in net.get_submodule(prefix).parameters()
        )
        full = sum(size for (where, _), size in kept["fp32"].items() if where == part)
        half = sum(size for (where, _), size in kept["amp"].items() if where == part)
        single = kept["amp"][part, torch.float32]
        share = f"{single / half:.0%}" if half else "-"
        print(f"| {part} | {count:,} | {full * scale:.2f} | {half * scale:.2f} | {share} |")
    total, halved = (sum(kept[mode].values()) for mode in ("fp32", "amp"))
    print(f"| together | | {total * scale:.2f} | {halved * scale:.2f} ({halved / total:.0%}) | |\n")


def measured_frame(run: Run, height: int, width: int) -> tuple[int, float]:
    """Return the peak bytes and the CPU seconds of one frame between two others, by real tensors."""
    frames, moment = torch.rand(2, 1, 3, height, width), torch.full((1, 1), 0.5)
    with inferring(run), MemoryMeter(lambda: known_tensors(run)) as meter:
        run.task.modules["net"](*frames, moment)
    begun = time.process_time()
    with inferring(run):
        run.task.modules["net"](*frames, moment)
    return meter.split.peak_bytes, time.process_time() - begun


def frame_cost(run: Run) -> tuple[PassMemory, float]:
    """Return a frame's memory as a line over its pixels, and the CPU seconds of a megapixel."""
    (small, _), (large, seconds) = (measured_frame(run, *size) for size in FRAMES_AT)
    pixels = [height * width for height, width in FRAMES_AT]
    per_pixel = (large - small) / (pixels[1] - pixels[0])
    return PassMemory(small - per_pixel * pixels[0], per_pixel), seconds * MEGAPIXEL / pixels[1]


def inference_table() -> None:
    """Print memory and time of one frame between, and the tiles with which it fits a 6 GiB card."""
    header = "".join(f" {name} |" for name in SCREENS)
    print(f"| Network | Mode | GiB per megapixel | CPU s per megapixel |{header}")
    print("|---|---|---:|---:|" + "---|" * len(SCREENS))
    for name, modes in INFERRED.items():
        for mode in modes:
            run = build(mode, 64, 64, name)
            net: Any = run.task.modules["net"]
            memory, seconds = frame_cost(run)
            cells = "".join(f" {say_tiles(net, memory, *size)} |" for size in SCREENS.values())
            print(
                f"| `{name}` | {mode} | {memory.per_pixel * MEGAPIXEL / GIBI:.2f} | {seconds:.0f} |{cells}",
                flush=True,
            )


def say_tiles(net: Interpolator, memory: PassMemory, height: int, width: int) -> str:
    """Return what a whole frame takes, and the tiles that fit with the share of pixels that their overlap adds."""
    whole = memory.peak_bytes(
        height + pad_amount(height, net.multiple), width + pad_amount(width, net.multiple)
    )
    grid = choose_tiles(net, height, width, memory, CARD_BYTES)
    if grid.count == 1:
        return f"{whole / GIBI:.1f} GiB; whole"
    more = grid.count * grid.size[0] * grid.size[1] / (height * width) - 1
    return f"{whole / GIBI:.1f} GiB; {grid.count} tiles of {grid.size[1]} x {grid.size[0]}, {more:+.0%} pixels"


def main() -> None:
    """Print all tables."""
    torch.set_num_threads(1)
    training_tables()
    inference_table()


if __name__ == "__main__":
    main()
