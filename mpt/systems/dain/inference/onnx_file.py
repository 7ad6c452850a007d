"""An interpolating network as an ONNX file for frames of one size: float32, float16 or 8 bits, behind a gate.

The gate is the PSNR of the file's frame, made by ONNX Runtime, against the network's own in float32: on the given
footage, or on a drawn scene. 8 bits are ONNX Runtime's static quantisation (QDQ, per channel, symmetric weights) of the
convolutions; positions, flows and the warp keep float32.

In a file DAIN's operators are written out in what ONNX has: its projection adds by `ScatterElements`, holes are filled
by maxima over doubled distances, and pixels are gathered tap by tap.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.checking.precision_names import FLOAT32
from mpt.errors import ConfigError, GateError
from mpt.inference.export import as_half_network
from mpt.inference.graphs.eight_bits import quantise_file
from mpt.inference.graphs.files import export_graph, open_graph
from mpt.inference.half import rebuild
from mpt.run.process.files import partial_file
from mpt.systems.dain.data.procedural_triplets import draw_scene, render
from mpt.systems.dain.inference.interpolate import kind_of
from mpt.systems.dain.inference.published import adjust, open_network
from mpt.systems.dain.inference.source import open_source
from mpt.systems.dain.metrics.shared.image_quality import peak_signal_to_noise
from mpt.systems.dain.nn.dain import Dain
from mpt.systems.dain.nn.operators.interpolation import Interpolator
from mpt.systems.dain.nn.rife_published.networks import PublishedRife

OPSET = 20
NAMES = ("first", "last", "time")
MOST_PAIRS = 16
"""Pairs of the footage that calibrate, spread over it."""
MEBI = 2**20


@dataclass(frozen=True)
class Wishes:
    """How a file is to be."""

    size: str
    scale: float
    half: bool
    int8: Path | None
    gate: float
    overwrite: bool


class Middle(nn.Module):
    """The network with its padding inside: frames of the exported size in and out."""

    def __init__(self, net: Interpolator) -> None:
        super().__init__()
        self.net = net

    def forward(self, first_bchw: Tensor, last_bchw: Tensor, time_b: Tensor) -> Tensor:
        """Return the frame between, in [0, 1]."""
        height, width = first_bchw.shape[-2:]
        made = self.net.between(self.net.padded(first_bchw), self.net.padded(last_bchw), time_b)
        return made.image[..., :height, :width].clamp(0, 1)


def export_file(wanted: str, output: Path, wishes: Wishes, runs: Path) -> None:
    """Write, run and judge the file. Raises ConfigError for anything that cannot be exported, GateError below the
    gate."""
    for module in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(
                f"{module} is needed to write and run the file: pip install 'mpt-trainer[onnx]' onnxruntime"
            )
    if output.suffix != ".onnx":
        raise ConfigError(f"OUT: {output} does not end in .onnx")
    if output.exists() and not wishes.overwrite:
        raise ConfigError(f"OUT: {output} is there already; write elsewhere, or add --overwrite")
    if wishes.half and wishes.int8 is not None:
        raise ConfigError("--half and --int8: choose one")
    width, height = read_size(wishes.size)
    trained = open_network(wanted, runs, "cpu")
    modules = rebuild(trained, FLOAT32).task.modules
    net = modules.get("net_ema", modules.get("net"))
    if not isinstance(net, PublishedRife | Dain):
        raise ConfigError(
            f"RUN: {trained.config.model.name} is not exported; DAIN and RIFE with a version are"
        )
    adjust(net, wishes.scale, None, False)
    network = Middle(net.eval().requires_grad_(False))
    pairs = footage(wishes.int8, height, width) if wishes.int8 else [drawn_pair(height, width)]
    time = torch.tensor([0.5])
    with partial_file(output) as partial:
        half = as_half_network(network, torch.float16) if wishes.half else network
        export_graph(
            half,
            (*pairs[0], time),
            partial,
            dynamo=True,
            opset_version=OPSET,
            input_names=NAMES,
            output_names=["middle"],
        )
        if wishes.int8 is not None:
            quantise(partial, pairs)
        with torch.no_grad():
            wanted_frames = [network(*pair, time) for pair in pairs]
        judge(partial, pairs, wanted_frames, wishes.gate)
        size = partial.stat().st_size
    print(f"wrote {output}: {size / MEBI:.1f} MiB, {width} x {height}, inputs {', '.join(NAMES)}")


def read_size(text: str) -> tuple[int, int]:
    """Return width and height. Raises ConfigError."""
    found = re.fullmatch(r"(\d{2,5})x(\d{2,5})", text)
    if found is None:
        raise ConfigError(f"--size: found {text!r}; write WIDTHxHEIGHT, such as 1280x720")
    return int(found[1]), int(found[2])


def drawn_pair(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return two frames of a drawn scene whose surfaces move."""
    side = max(height, width)
    scene = draw_scene(1, side, 2, 7.0, 0)
    first, last = (
        render(scene, side, time)[0][..., :height, :width].clamp(0, 1) for time in (0.0, 1.0)
    )
    return first, last


def footage(path: Path, height: int, width: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of successive frames, cut to the size. Raises ConfigError for smaller frames."""
    source = open_source([path])
    if source.height < height or source.width < width:
        raise ConfigError(
            f"--int8: {path} is {source.width} x {source.height}, smaller than --size"
        )
    frames = [
        frame.image[None, :, :height, :width].float() / kind_of(frame.image)[1]
        for frame in source.frames()
    ]
    step = max(1, (len(frames) - 1) // MOST_PAIRS)
    return [(frames[place], frames[place + 1]) for place in range(0, len(frames) - 1, step)][
        :MOST_PAIRS
    ]


def quantise(path: Path, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Replace a file by its 8-bit version, calibrated on the pairs at three times."""

    def feeds() -> Iterator[dict[str, Any]]:
        for first, last in pairs:
            for time in (0.25, 0.5, 0.75):
                yield dict(
                    zip(
                        NAMES,
                        (first.numpy(), last.numpy(), torch.tensor([time]).numpy()),
                        strict=True,
                    )
                )

    finished = path.with_name(f"{path.name}.int8")
    try:
        quantise_file(path, finished, feeds(), ["Conv"])
        os.replace(finished, path)
    finally:
        finished.unlink(missing_ok=True)


def judge(
    path: Path, pairs: list[tuple[Tensor, Tensor]], wanted: list[Tensor], gate: float
) -> None:
    """Print how far the file's frames are from float32's. Raises GateError below the gate."""
    opened = open_graph(path)
    figures = []
    for (first, last), frame in zip(pairs, wanted, strict=True):
        feeds = dict(
            zip(NAMES, (first.numpy(), last.numpy(), torch.tensor([0.5]).numpy()), strict=True)
        )
        made = torch.from_numpy(opened.run(None, feeds)[0])
        figures.append(float(peak_signal_to_noise(made, frame)[0].clamp(max=200)))
    worst = min(figures)
    print(f"against float32, worst of {len(figures)} frames: PSNR {worst:.1f} dB (gate {gate:g})")
    if worst < gate:
        raise GateError(
            f"the file's frames are {worst:.1f} dB from float32's, and --gate asks for {gate:g}; it was not kept"
        )
