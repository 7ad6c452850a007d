"""The tables of docs/dain.md: what half precision saves of DAIN, part by part, and the tiles of a small card.

`python scripts/dain_table.py` prints them as Markdown; a few minutes on a CPU. Bytes are those of live tensors,
measured on real passes of the full-size network at two small sizes (training) and on fake tensors (inference); they
are linear in the pixels, which the figures per megapixel use. Times are CPU seconds of one thread.
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
from mpt.engine.build import build_run
from mpt.engine.memory import known_tensors
from mpt.phase_losses import draw_batch, losses_of
from mpt.run.memory_meter import MemoryMeter
from mpt.seams import DataSpec, FieldSpec, Run
from mpt.systems.dain.inference.memory import choose_tiles, pass_memory
from mpt.systems.dain.nn.dain import PARTS, Dain
from mpt.systems.dain.nn.interpolation import Interpolator

MODES = {"fp32": {}, "amp": {"dtype": "bfloat16"}, "O1": {"dtype": "bfloat16"}}
TRAINED_AT = ((64, 64), (64, 128))
TIMED_AT = (128, 128)
MEBI, GIBI, MEGAPIXEL = 2**20, 2**30, 1e6
SCREENS = {"720p": (720, 1280), "1080p": (1080, 1920), "4K": (2160, 3840)}
CARD_BYTES = 6 * GIBI


def spec_of(height: int, width: int) -> DataSpec:
    """Return the layout of one triplet."""
    image = FieldSpec((3, height, width), torch.float32, "image")
    return DataSpec({"first": image, "middle": image, "last": image, "time": FieldSpec((), torch.float32)}, 1)


def build(mode: str, height: int, width: int) -> Run:
    """Return the full-size network in a mode."""
    config = load_config({
        "model": {"name": "dain"},
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
    for loss in losses_of(run, run.phases[0], draw_batch(run, run.phases[0], batch)):
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
    print("| Mode | Weights and gradients, MiB | Beyond them, GiB per megapixel |\n|---|---|---|")
    kept: dict[str, Counter[tuple[str, torch.dtype]]] = {}
    for mode in MODES:
        peaks, fixed = [], 0
        for height, width in TRAINED_AT:
            run = build(mode, height, width)
            with MemoryMeter(lambda run=run: known_tensors(run)) as meter:  # type: ignore[misc]
                perform(run)
            fixed = meter.split.parameters + meter.split.gradients
            peaks.append(meter.split.peak_bytes)
        with saved_by_part(run.task.modules["net"]) as kept[mode]:
            perform(run)
        pixels = [height * width for height, width in TRAINED_AT]
        slope = (peaks[1] - peaks[0]) / (pixels[1] - pixels[0]) * MEGAPIXEL
        print(f"| {mode} | {fixed / MEBI:.0f} | {slope / GIBI:.1f} |", flush=True)
    scale = MEGAPIXEL / (TRAINED_AT[1][0] * TRAINED_AT[1][1]) / GIBI
    print("\n| Part | Parameters | Kept for backward, fp32, GiB per megapixel | amp | still float32 under amp |")
    print("|---|---|---|---|---|")
    net = run.task.modules["net"]
    for part in (*PARTS, "float32 regions", "between the parts"):
        count = sum(p.numel() for prefix in PARTS.get(part, ()) for p in net.get_submodule(prefix).parameters())
        full = sum(size for (where, _), size in kept["fp32"].items() if where == part)
        half = sum(size for (where, _), size in kept["amp"].items() if where == part)
        single = kept["amp"][part, torch.float32]
        share = f"{single / half:.0%}" if half else "-"
        print(f"| {part} | {count:,} | {full * scale:.2f} | {half * scale:.2f} | {share} |")
    total, halved = (sum(kept[mode].values()) for mode in ("fp32", "amp"))
    print(f"| together | | {total * scale:.2f} | {halved * scale:.2f} ({halved / total:.0%}) | |\n")


def inference_table(nets: dict[str, Interpolator]) -> None:
    """Print the memory of one frame between, and how many tiles a 6 GiB card needs."""
    header = "".join(f" {name} |" for name in SCREENS)
    print(f"| Network | Precision | GiB per megapixel |{header}\n|---|---|---|" + "---|" * len(SCREENS))
    for name, net in nets.items():
        for label, dtype in (("fp32", None), ("half (autocast)", torch.bfloat16)):
            memory = pass_memory(net, dtype)
            cells = []
            for height, width in SCREENS.values():
                grid = choose_tiles(net, height, width, memory, CARD_BYTES)
                whole = memory.peak_bytes(-(-height // 64) * 64, -(-width // 64) * 64)
                tiles = "whole" if grid.count == 1 else f"{grid.count} tiles of {grid.size[1]} x {grid.size[0]}"
                cells.append(f" {whole / GIBI:.1f} GiB; {tiles} |")
            print(f"| {name} | {label} | {memory.per_pixel * MEGAPIXEL / GIBI:.2f} |{''.join(cells)}", flush=True)


def time_table(nets: dict[str, Interpolator]) -> None:
    """Print CPU seconds of making one frame."""
    print("| Network | fp32, CPU s per megapixel | bfloat16 |\n|---|---|---|")
    frames = torch.rand(2, 1, 3, *TIMED_AT)
    moment = torch.full((1,), 0.5)
    for name, net in nets.items():
        cells = []
        for dtype in (None, torch.bfloat16):
            context = torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()
            with torch.no_grad(), context:
                net.eval()(*frames, moment)
                started = time.process_time()
                net(*frames, moment)
                cells.append((time.process_time() - started) * MEGAPIXEL / (TIMED_AT[0] * TIMED_AT[1]))
        print(f"| {name} | {cells[0]:.0f} | {cells[1]:.0f} |", flush=True)
    print()


def main() -> None:
    """Print all tables."""
    from mpt.systems.dain.nn import flow_warp, rife

    torch.set_num_threads(1)
    data: Any = spec_of(64, 64)
    nets: dict[str, Any] = {
        "dain": Dain(),
        "rife": rife.build(rife.Settings(), data)["net"],
        "flow_warp": flow_warp.build(flow_warp.Settings(), data)["net"],
    }
    training_tables()
    time_table(nets)
    inference_table(nets)


if __name__ == "__main__":
    main()
