"""A detector as an ONNX file: fused, decoded, optionally with suppression inside; every file is run.

Batch and sides are free, as far as the exporter can follow the network. The file's metadata is read by `mpt
infer` and `mpt yolofuse detect` (the run's configuration, its letterbox and ranges with it) and by programs of
Ultralytics (classes, stride, size, channels).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from mpt.engine.state.moving_averages import evaluated_module
from mpt.errors import CheckpointError, ConfigError
from mpt.inference.export import interrupt_in
from mpt.inference.exported import description
from mpt.inference.graphs.files import export_graph, open_graph
from mpt.inference.trained import Trained
from mpt.seams import Run
from mpt.systems.yolofuse.data.shared.scene_dataset import CHANNELS
from mpt.systems.yolofuse.metrics.shared.suppression import Suppression, best_batch, suppress_batch
from mpt.systems.yolofuse.nn.layers.yolo_head import decode
from mpt.systems.yolofuse.nn.yolofuse import fuse
from mpt.systems.yolofuse.tasks.detect import Detect
from mpt.systems.yolofuse.tasks.shared.decoded import ROW, decoded_outputs

OPSET = 18
STRIDE = 32
ENGINE_BATCH = 16
"""Largest batch of the TensorRT engine whose command is printed."""
TOLERANCE_PIXELS, TOLERANCE_SCORE = 0.5, 5e-3
CHECKED_PLACES = 400
"""Places that the check of suppression starts from."""
SAME_SCORE = 1e-5
UNEQUAL_SHARE = 0.02
"""Of boxes that may be kept by one and not by the other: an overlap at the limit to the last bit."""


class Decoded(nn.Module):
    """A detector whose output is boxes (b, p, 4) in pixels and scores (b, classes, p)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = fuse(network).requires_grad_(False)

    def forward(self, *pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes and scores."""
        network: Any = self.network
        boxes, scores = decode(network(*pictures), network.strides, network.bins)
        return boxes, scores.transpose(1, 2)


class Stacked(nn.Module):
    """The same with one input, the cameras' channels behind each other, and one output (b, 4 + classes, p).

    This is the layout of Ultralytics' exports: centre, width and height in pixels, then a score for each class. With
    `best` the output is instead that of its exports that need no suppression, (b, best, 6): corners, score and class,
    best first.
    """

    def __init__(self, decoded: Decoded, channels: Sequence[int], best: int | None = None) -> None:
        super().__init__()
        self.decoded, self.channels, self.best = decoded, list(channels), best

    def forward(self, *stacked: Tensor) -> Tensor:
        """Return boxes and scores of pictures (b, all channels, h, w), the one argument."""
        (images,) = stacked
        boxes, scores = self.decoded(*torch.split(images, self.channels, 1))
        if self.best is not None:
            return best_batch(
                boxes, scores.transpose(1, 2), Suppression(confidence=0.0, limit=self.best)
            )
        first, second = boxes[..., :2], boxes[..., 2:]
        return torch.cat(
            (((first + second) / 2).transpose(1, 2), (second - first).transpose(1, 2), scores), 1
        )


@dataclass(frozen=True)
class Interface:
    """Names of a file's inputs and outputs."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


STACKED = Interface(("images",), ("output0",))


def interface_of(task: Detect, is_stacked: bool) -> Interface:
    """Return the interface of a file with an input for each camera, or of one as Ultralytics writes them."""
    return STACKED if is_stacked else Interface(task.cameras, ("boxes", "scores"))


def example(run: Run, task: Detect) -> list[Tensor]:
    """Return two random samples of the run's layout."""
    numbers = torch.Generator().manual_seed(0)
    return [
        torch.rand(2, *run.data.fields[camera].shape, generator=numbers) for camera in task.cameras
    ]


def write_plain(path: Path, network: nn.Module, names: Interface, pictures: list[Tensor]) -> bool:
    """Export the decoded network with free batch and sides; return whether the sides are free.

    They stay fixed for a network whose computation depends on them (DEYOLO's pyramid at 640 pixels).
    """
    batch, rows, columns = (torch.export.Dim(name) for name in ("batch", "rows", "columns"))
    free = {0: batch, 2: STRIDE * rows, 3: STRIDE * columns}
    for shape in (free, {0: batch}):
        try:
            _write(path, network, names, pictures, shape)
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            if (interrupt := interrupt_in(error)) is not None:
                raise interrupt from None
            if shape is free:
                continue
            raise ConfigError(
                f"this network cannot be exported to ONNX: {str(error).splitlines()[0]}"
            ) from error
        return shape is free
    raise AssertionError("unreachable")


def _write(
    path: Path,
    network: nn.Module,
    names: Interface,
    pictures: list[Tensor],
    shape: Mapping[int, Any],
) -> None:
    export_graph(
        network.eval(),
        tuple(pictures),
        path,
        input_names=list(names.inputs),
        output_names=list(names.outputs),
        dynamo=True,
        opset_version=OPSET,
        dynamic_shapes=(tuple(dict(shape) for _ in pictures),),
    )


def texts_of(
    trained: Trained, task: Detect, dtype: str, outputs: Sequence[str], is_free: bool
) -> dict[str, str]:
    """Return a file's metadata: for mpt, and in the keys that Ultralytics' programs read."""
    network = evaluated_module(task, "net")
    networks = [name for name, module in task.modules.items() if module is network]
    height, width = trained.run.data.fields[task.cameras[0]].shape[1:]
    settings = trained.config.dataset.settings.model_dump()
    return {
        **description(trained, task, networks, dtype),
        "mpt_inside": "true",
        "mpt_outputs": " ".join(outputs),
        "mpt_ranges": json.dumps(
            {
                camera: settings.get("ir_range") if camera == "ir" else None
                for camera in task.cameras
            }
        ),
        "task": "detect",
        "names": str(dict(enumerate(task.classes))),
        "stride": str(STRIDE),
        "imgsz": str([height, width]),
        "batch": "1",
        "channels": str(sum(CHANNELS[camera] for camera in task.cameras)),
        "end2end": str(task.answers_once),
        "args": str({"batch": 1, "dynamic": is_free, "nms": False, "half": False}),
    }


def trtexec_line(path: Path, names: Interface, pictures: list[Tensor], is_free: bool) -> str:
    """Return the command that builds a TensorRT engine of a file. It has not been run here."""
    if not is_free:
        return f"trtexec --onnx={path} --fp16 --saveEngine={path.with_suffix('.engine')}"
    sizes = {
        name: "x".join(map(str, one.shape[1:]))
        for name, one in zip(names.inputs, pictures, strict=True)
    }
    shapes = (
        f"--{bound}Shapes={','.join(f'{name}:{count}x{size}' for name, size in sizes.items())}"
        for bound, count in (("min", 1), ("opt", 1), ("max", ENGINE_BATCH))
    )
    return f"trtexec --onnx={path} {' '.join(shapes)} --fp16 --saveEngine={path.with_suffix('.engine')}"


def call(opened: Any, names: Sequence[str], pictures: list[Tensor]) -> list[np.ndarray[Any, Any]]:
    """Return a file's outputs."""
    feeds = {name: picture.numpy() for name, picture in zip(names, pictures, strict=True)}
    return list(opened.run(None, feeds))


def check_plain(
    path: Path, network: nn.Module, names: Interface, pictures: list[Tensor], is_free: bool
) -> str:
    """Compare boxes and scores with the network's, at other batches and sides too. Raises CheckpointError."""
    opened = open_graph(path)
    pixels = score = 0.0
    samples = [pictures, [picture[:1] for picture in pictures]]
    if is_free:
        samples.append(
            [functional.pad(picture[:1], (0, STRIDE, 0, 2 * STRIDE)) for picture in pictures]
        )
    for chosen in samples:
        with torch.no_grad():
            expected = network.eval()(*chosen)
        found = [torch.from_numpy(one) for one in call(opened, names.inputs, chosen)]
        if isinstance(expected, Tensor) and expected.shape[2] == ROW:
            check_rows(expected, found[0])
            continue
        wanted, made = (
            decoded_outputs([expected] if isinstance(expected, Tensor) else expected),
            decoded_outputs(found),
        )
        pixels = max(pixels, float((made.boxes - wanted.boxes).abs().max()))
        score = max(score, float((made.scores - wanted.scores).abs().max()))
    if pixels > TOLERANCE_PIXELS or score > TOLERANCE_SCORE:
        raise CheckpointError(
            f"ONNX Runtime's boxes differ by up to {pixels:.3g} pixels and its scores by {score:.3g}; not kept"
        )
    if isinstance(expected, Tensor) and expected.shape[2] == ROW:
        return "ONNX Runtime: the same detections as PyTorch's"
    return f"ONNX Runtime: boxes within {pixels:.2g} pixels, scores within {score:.2g} of PyTorch's"


def check_rows(expected: Tensor, found: Tensor) -> None:
    """Compare detections (b, n, 6), best first. Raises CheckpointError if they are others.

    Which of those that score as the last one does are among the n is left to chance.
    """
    lost = total = 0
    for rows, own in zip(expected, found, strict=True):
        sure = rows[rows[:, 4] > rows[-1, 4] + SAME_SCORE]
        total, lost = total + len(sure), lost + without_partner(sure, own)
    if lost > UNEQUAL_SHARE * total:
        raise CheckpointError(
            f"ONNX Runtime finds other boxes: {lost} of {total} have no partner; not kept"
        )


def add_suppression(path: Path, task: Detect) -> None:
    """Put suppression and the gathering of its results behind a file's boxes and scores."""
    import onnx
    from onnx import TensorProto, helper

    model = onnx.load(str(path))
    graph, settings = model.graph, task.settings
    constants: dict[str, np.ndarray[Any, Any]] = {
        "most": np.array([settings.most_detections], np.int64),
        "iou": np.array([settings.iou], np.float32),
        "least": np.array([settings.confidence], np.float32),
        "sample_and_place": np.array([0, 2], np.int64),
        "sample_class_place": np.array([0, 1, 2], np.int64),
        "first": np.array([0], np.int64),
        "second": np.array([1], np.int64),
        "last_axis": np.array([1], np.int64),
    }
    graph.initializer.extend(
        onnx.numpy_helper.from_array(value, f"nms_{key}") for key, value in constants.items()
    )
    node = helper.make_node
    graph.node.extend(
        [
            node(
                "NonMaxSuppression",
                ["boxes", "scores", "nms_most", "nms_iou", "nms_least"],
                ["nms_chosen"],
            ),
            node("Gather", ["nms_chosen", "nms_sample_and_place"], ["nms_box_index"], axis=1),
            node("GatherND", ["boxes", "nms_box_index"], ["nms_boxes"]),
            node("GatherND", ["scores", "nms_chosen"], ["nms_scores"]),
            node("Unsqueeze", ["nms_scores", "nms_last_axis"], ["nms_score_column"]),
            node("Cast", ["nms_chosen"], ["nms_numbers"], to=TensorProto.FLOAT),
            node("Gather", ["nms_numbers", "nms_first"], ["nms_sample"], axis=1),
            node("Gather", ["nms_numbers", "nms_second"], ["nms_class"], axis=1),
            node(
                "Concat",
                ["nms_sample", "nms_boxes", "nms_score_column", "nms_class"],
                ["detections"],
                axis=1,
            ),
        ]
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("detections", TensorProto.FLOAT, ["n", 7]))
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def check_suppression(path: Path, task: Detect, pictures: list[Tensor]) -> str:
    """Compare the file's detections with this program's. Raises CheckpointError if they are others.

    Random pictures show no objects: the file is run with a score so low that some hundred places reach it.
    """
    import onnx

    settings = task.settings
    with torch.no_grad():
        boxes, scores = Decoded(evaluated_module(task, "net")).eval()(*pictures)
    ordered = scores.flatten().sort(descending=True).values
    place = min(CHECKED_PLACES, len(ordered) - 1)
    least = float(ordered[place - 1 : place + 1].mean())
    how = Suppression(least, settings.iou, False, True, settings.most_detections)
    expected = suppress_batch(boxes, scores.transpose(1, 2), how)
    model = onnx.load(str(path))
    limit = next(one for one in model.graph.initializer if one.name == "nms_least")
    limit.CopyFrom(onnx.numpy_helper.from_array(np.array([least], np.float32), "nms_least"))
    made = torch.from_numpy(call(open_graph(model.SerializeToString()), task.cameras, pictures)[0])
    total = lost = 0
    for sample, rows in enumerate(expected):
        rows, own = rows[rows[:, 4] > 0], made[made[:, 0] == sample][:, 1:]
        total += len(rows)
        lost += without_partner(rows, own) + without_partner(own, rows)
    if lost > UNEQUAL_SHARE * total:
        raise CheckpointError(
            f"ONNX Runtime keeps other boxes: {lost} of {total} have no partner; not kept"
        )
    return f"ONNX Runtime keeps the same boxes: {total - lost} of {total} in {len(expected)} random samples"


def without_partner(rows: Tensor, others: Tensor) -> int:
    """Return how many of (n, 6) corners, score, class are not among the others, but for rounding."""
    if not len(rows) or not len(others):
        return len(rows)
    apart = (rows[:, None] - others[None]).abs()
    limits = apart.new_tensor([TOLERANCE_PIXELS] * 4 + [TOLERANCE_SCORE, 0.5])
    return int((~(apart < limits).all(2).any(1)).sum())
