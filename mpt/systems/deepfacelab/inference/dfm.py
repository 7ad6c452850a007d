"""A model as one `.dfm` file, which DeepFaceLive reads: ONNX from a face to the swap and both masks.

The input `in_face:0` and the outputs `out_face_mask:0` (the destination's mask), `out_celeb_face:0` (the swap) and
`out_celeb_face_mask:0` are float32 in [0, 1], channels last, BGR, with a free number of faces; names and order are
DeepFaceLab's. Operators are those of opset 12, as DeepFaceLab writes them, since DeepFaceLive brings a runtime of its
time.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mpt.errors import CheckpointError, ConfigError, GateError
from mpt.inference.export import check_finite
from mpt.inference.graphs.files import add_texts, export_graph, open_graph
from mpt.run.process.files import failures_explained, partial_file
from mpt.systems.deepfacelab.tasks.face_swap import Autoencoder

INPUT = "in_face:0"
OUTPUTS = ("out_face_mask:0", "out_celeb_face:0", "out_celeb_face_mask:0")
OPSET = 12
TOLERANCE = 1e-4
"""Allowed difference between ONNX Runtime and PyTorch, of values in [0, 1]."""
HALF_TOLERANCE = 0.05
"""The same for a quantized file, against PyTorch in float32."""
GATE = 40.0
"""The least PSNR in dB of the file's swaps of real faces against PyTorch's in float32."""


@dataclass(frozen=True)
class Checked:
    """The outputs of a written file against PyTorch's in float32."""

    difference: float
    """The largest, of values in [0, 1]."""
    psnr: float
    """Of the swaps, in dB."""
    faces: int
    are_real: bool
    """Whether the faces are of the run's data, and not noise."""


class Swapper(nn.Module):
    """The graph for DeepFaceLive: BGR faces (b h w 3) to the destination's mask, the swap in BGR, and its mask."""

    def __init__(self, autoencoder: nn.Module) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, face_bhwc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        faces: Autoencoder = self.autoencoder  # type: ignore[assignment]
        image = torch.stack((face_bhwc[..., 2], face_bhwc[..., 1], face_bhwc[..., 0]), dim=1)
        swap, swap_mask = faces.draw_swap(faces.encode_swap(image))
        _, dst_mask = faces.draw_dst(faces.encode_dst(image))
        bgr = torch.stack((swap[:, 2], swap[:, 1], swap[:, 0]), dim=-1)
        drawn = (dst_mask.permute(0, 2, 3, 1), bgr, swap_mask.permute(0, 2, 3, 1))
        return drawn[0].float(), drawn[1].float(), drawn[2].float()


def quantized(autoencoder: nn.Module) -> nn.Module:
    """Return a copy whose convolutions, and operators between them, are float16; dense layers stay float32.

    DeepFaceLab's "Export quantized": nearly half the file of convolutional models, and faster on cards.
    """
    copied = copy.deepcopy(autoencoder)
    for module in copied.modules():
        if isinstance(module, nn.Conv2d):
            module.half()
        dtype = torch.float16 if isinstance(module, nn.Conv2d) else torch.float32
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_pre_hook(partial(cast_input, dtype))
    return copied


def cast_input(
    dtype: torch.dtype, module: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Cast a layer's inputs to its own type."""
    return tuple(value.to(dtype) for value in inputs)


def write_dfm(
    path: Path,
    autoencoder: nn.Module,
    size: int,
    *,
    in_half: bool = False,
    faces: Tensor | None = None,
    gate: float = GATE,
    about: Mapping[str, str] | None = None,
) -> Checked | None:
    """Write a model and run it on real faces (b 3 h w) or noise; return how it was checked, None without ONNX Runtime.

    `in_half` writes it quantized, see there. `about` is written into the file.

    Raises ConfigError if the exporter is not installed, CheckpointError for weights that are not finite and for a
    file that draws something else, GateError below the gate.
    """
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            "a .dfm is written with the package onnx: pip install 'mpt-trainer[onnx]'"
        )
    check_finite(dict(autoencoder.state_dict()))
    autoencoder = autoencoder.cpu()
    swapper = Swapper(quantized(autoencoder) if in_half else autoencoder).eval()
    face = torch.rand(2, size, size, 3, generator=torch.Generator().manual_seed(0))
    seen = face if faces is None else faces.flip(1).permute(0, 2, 3, 1).contiguous()
    with failures_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial_file(path) as written:
            export_graph(
                swapper,
                (face,),
                written,
                input_names=[INPUT],
                output_names=list(OUTPUTS),
                opset_version=OPSET,
                dynamic_axes={name: {0: "batch"} for name in (INPUT, *OUTPUTS)},
                dynamo=False,  # the newer exporter has no opset 12
            )
            add_texts(written, about or {})
            tolerance = HALF_TOLERANCE if in_half else TOLERANCE
            checked = compare(
                written, path.name, Swapper(autoencoder).eval(), seen, tolerance, faces is not None
            )
            if checked is not None and checked.are_real and not checked.psnr >= gate:
                raise GateError(
                    f"{path.name}: its swaps of {checked.faces} faces are {checked.psnr:.1f} dB from float32's, and "
                    f"--gate asks for {gate:g}; it was not kept"
                )
    return checked


@torch.no_grad()
def compare(
    path: Path, name: str, swapper: Swapper, face: Tensor, tolerance: float, are_real: bool
) -> Checked | None:
    """Return the difference of outputs; CheckpointError if it is too large."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    session = open_graph(path)
    difference, error = 0.0, 0.0
    for faces in (face, face[:1]):
        made = session.run(None, {INPUT: faces.numpy()})
        for output, array, expected in zip(OUTPUTS, made, swapper(faces), strict=True):
            apart = (torch.from_numpy(array) - expected).abs()
            difference = max(difference, float(apart.max()))
            if output == OUTPUTS[1] and len(faces) == len(face):
                error = float(apart.square().mean())
    if not difference <= tolerance:
        raise CheckpointError(f"{name}: ONNX Runtime draws {difference:.2g} off; it was not kept")
    return Checked(difference, -10 * math.log10(max(error, 1e-20)), len(face), are_real)
