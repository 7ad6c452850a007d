"""A detector as an ONNX file: fused, decoded, optionally with suppression inside and in 8 bits; every file is run.

8 bits are ONNX Runtime's static quantisation (QDQ, per channel, symmetric weights), of the convolutions only: decoding
keeps float32, where a quarter of a pixel counts. The file's mAP is measured on the run's test set beside the float32
one's.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpt.data.absent import AbsentDataset
from mpt.data.loader import to_device
from mpt.errors import CheckpointError, ConfigError, DataError
from mpt.inference.trained import Trained
from mpt.seams import Batch, Dataset, Run
from mpt.systems.yolofuse.metrics.suppression import Suppression, suppress_batch
from mpt.systems.yolofuse.nn.yolo_head import decode
from mpt.systems.yolofuse.nn.yolofuse import fuse
from mpt.systems.yolofuse.tasks.detect import Detect

OPSET = 18
TOLERANCE_PIXELS, TOLERANCE_SCORE = 0.5, 5e-3
CHECKED_PLACES = 400
"""Places that the check of suppression starts from."""
UNEQUAL_SHARE = 0.02
"""Of boxes that may be kept by one and not by the other: an overlap at the limit to the last bit."""
TEST_BATCH = 8


class Decoded(nn.Module):
    """A detector whose output is boxes (b, p, 4) in pixels and scores (b, classes, p)."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = fuse(network).requires_grad_(False)

    def forward(self, *pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Return boxes and scores."""
        boxes, scores = decode(self.network(*pictures), self.network.strides)  # type: ignore[arg-type]
        return boxes, scores.transpose(1, 2)


def example(run: Run, task: Detect) -> list[Tensor]:
    """Return two random samples of the run's layout."""
    numbers = torch.Generator().manual_seed(0)
    return [torch.rand(2, *run.data.fields[camera].shape, generator=numbers) for camera in task.cameras]


def write_plain(path: Path, network: nn.Module, cameras: tuple[str, ...], pictures: list[Tensor]) -> None:
    """Export the decoded network with a free batch dimension."""
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own parts
        try:
            torch.onnx.export(
                network.eval(),
                tuple(pictures),
                str(path),
                input_names=list(cameras),
                output_names=["boxes", "scores"],
                dynamo=True,
                external_data=False,
                verbose=False,
                opset_version=OPSET,
                dynamic_shapes=(tuple({0: batch} for _ in pictures),),
            )
        except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
            raise ConfigError(f"this network cannot be exported to ONNX: {str(error).splitlines()[0]}") from error


def session(file: Path | bytes) -> Any:
    """Open a file or its content in ONNX Runtime, on the CPU."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    return runtime.InferenceSession(
        str(file) if isinstance(file, Path) else file, options, providers=["CPUExecutionProvider"]
    )


def call(opened: Any, cameras: tuple[str, ...], pictures: list[Tensor]) -> list[np.ndarray[Any, Any]]:
    """Return a file's outputs."""
    feeds = {name: picture.numpy() for name, picture in zip(cameras, pictures, strict=True)}
    return list(opened.run(None, feeds))


def check_plain(path: Path, network: nn.Module, cameras: tuple[str, ...], pictures: list[Tensor]) -> str:
    """Compare boxes and scores with the network's, at another batch size too. Raises CheckpointError."""
    opened = session(path)
    worst = [0.0, 0.0]
    for count in (2, 1):
        chosen = [picture[:count] for picture in pictures]
        with torch.no_grad():
            expected = network.eval()(*chosen)
        for place, (made, wanted) in enumerate(zip(call(opened, cameras, chosen), expected, strict=True)):
            worst[place] = max(worst[place], float(np.abs(made - wanted.numpy()).max()))
    if worst[0] > TOLERANCE_PIXELS or worst[1] > TOLERANCE_SCORE:
        raise CheckpointError(
            f"ONNX Runtime's boxes differ by up to {worst[0]:.3g} pixels and its scores by {worst[1]:.3g}; not kept"
        )
    return f"ONNX Runtime: boxes within {worst[0]:.2g} pixels, scores within {worst[1]:.2g} of PyTorch's"


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
    graph.initializer.extend(onnx.numpy_helper.from_array(value, f"nms_{key}") for key, value in constants.items())
    node = helper.make_node
    graph.node.extend(
        [
            node("NonMaxSuppression", ["boxes", "scores", "nms_most", "nms_iou", "nms_least"], ["nms_chosen"]),
            node("Gather", ["nms_chosen", "nms_sample_and_place"], ["nms_box_index"], axis=1),
            node("GatherND", ["boxes", "nms_box_index"], ["nms_boxes"]),
            node("GatherND", ["scores", "nms_chosen"], ["nms_scores"]),
            node("Unsqueeze", ["nms_scores", "nms_last_axis"], ["nms_score_column"]),
            node("Cast", ["nms_chosen"], ["nms_numbers"], to=TensorProto.FLOAT),
            node("Gather", ["nms_numbers", "nms_first"], ["nms_sample"], axis=1),
            node("Gather", ["nms_numbers", "nms_second"], ["nms_class"], axis=1),
            node("Concat", ["nms_sample", "nms_boxes", "nms_score_column", "nms_class"], ["detections"], axis=1),
        ]
    )
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("detections", TensorProto.FLOAT, ["n", 7]))
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def check_suppression(path: Path, task: Detect, pictures: list[Tensor]) -> str:
    """Compare the file's detections with this program's. Raises CheckpointError where they are others.

    Random pictures show no objects: the file is run with a score so low that some hundred places reach it.
    """
    import onnx

    settings = task.settings
    with torch.no_grad():
        boxes, scores = Decoded(task.inference_net).eval()(*pictures)
    ordered = scores.flatten().sort(descending=True).values
    place = min(CHECKED_PLACES, len(ordered) - 1)
    least = float(ordered[place - 1 : place + 1].mean())
    how = Suppression(least, settings.iou, False, True, settings.most_detections)
    expected = suppress_batch(boxes, scores.transpose(1, 2), how)
    model = onnx.load(str(path))
    limit = next(one for one in model.graph.initializer if one.name == "nms_least")
    limit.CopyFrom(onnx.numpy_helper.from_array(np.array([least], np.float32), "nms_least"))
    made = torch.from_numpy(call(session(model.SerializeToString()), task.cameras, pictures)[0])
    total = lost = 0
    for sample, rows in enumerate(expected):
        rows, own = rows[rows[:, 4] > 0], made[made[:, 0] == sample][:, 1:]
        total += len(rows)
        lost += without_partner(rows, own) + without_partner(own, rows)
    if lost > UNEQUAL_SHARE * total:
        raise CheckpointError(f"ONNX Runtime keeps other boxes: {lost} of {total} have no partner; not kept")
    return f"ONNX Runtime keeps the same boxes: {total - lost} of {total} in {len(expected)} random samples"


def without_partner(rows: Tensor, others: Tensor) -> int:
    """Return how many of (n, 6) corners, score, class are not among the others, but for rounding."""
    if not len(rows) or not len(others):
        return len(rows)
    apart = (rows[:, None] - others[None]).abs()
    limits = apart.new_tensor([TOLERANCE_PIXELS] * 4 + [TOLERANCE_SCORE, 0.5])
    return int((~(apart < limits).all(2).any(1)).sum())


def quantise(path: Path, trained: Trained, run: Run, task: Detect, count: int) -> None:
    """Replace a file by its 8-bit version and say what that costs. Raises DataError without data to calibrate on."""
    for data in (trained.train_data, trained.test_data):
        if isinstance(data, AbsentDataset):
            raise DataError("--int8 needs the run's data set, to calibrate and to measure; it is not here")
    quantisation = importlib.import_module("onnxruntime.quantization")
    import logging

    logging.getLogger().setLevel(logging.ERROR)
    plain = session(path)
    before = measure_file(plain, run, task, trained.test_data)
    size_before = path.stat().st_size
    prepared, finished = path.with_name(f"{path.name}.prepared"), path.with_name(f"{path.name}.int8")
    try:
        importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process(
            str(path), str(prepared), skip_symbolic_shape=True
        )
        quantisation.quantize_static(
            str(prepared),
            str(finished),
            Calibration(quantisation.CalibrationDataReader, run, task, trained.train_data, count).reader,
            quant_format=quantisation.QuantFormat.QDQ,
            per_channel=True,
            op_types_to_quantize=["Conv"],
            activation_type=quantisation.QuantType.QUInt8,
            weight_type=quantisation.QuantType.QInt8,
            extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
        )
        os.replace(finished, path)
    finally:
        for leftover in (prepared, finished):
            leftover.unlink(missing_ok=True)
    after = measure_file(session(path), run, task, trained.test_data)
    print(
        f"calibrated on {min(count, len(trained.train_data))} training samples; {len(trained.test_data)} test samples:"
    )
    print("| | float32 | int8 |\n|---|---:|---:|")
    print(f"| file, MiB | {size_before / 2**20:.2f} | {path.stat().st_size / 2**20:.2f} |")
    for name, label in (("map50", "mAP50"), ("map50_95", "mAP50-95"), ("milliseconds", "ms per sample, CPU")):
        print(f"| {label} | {before[name]:.4f} | {after[name]:.4f} |")


class Calibration:
    """Training samples, letterboxed and unchanged, one at a time, as ONNX Runtime asks for them."""

    def __init__(self, base: Any, run: Run, task: Detect, data: Dataset, count: int) -> None:
        stream = batches(run, data, min(count, len(data)), 1)

        class Reader(base):  # type: ignore[misc]
            def get_next(self) -> dict[str, Any] | None:
                batch = next(stream, None)
                return None if batch is None else {camera: batch[camera].numpy() for camera in task.cameras}

        self.reader = Reader()


def batches(run: Run, data: Dataset, count: int, size: int) -> Iterator[Batch]:
    """Yield `count` samples without changes by chance, spread over the data set."""
    changes = getattr(data, "changes", None)
    step = max(1, len(data) // count)
    try:
        if changes is not None:
            data.changes = None  # type: ignore[attr-defined]
        for start in range(0, count, size):
            indices = [number * step for number in range(start, min(start + size, count))]
            yield to_device(data.fetch(indices, 0), torch.device("cpu"), run.data)
    finally:
        if changes is not None:
            data.changes = changes  # type: ignore[attr-defined]


def measure_file(opened: Any, run: Run, task: Detect, data: Dataset) -> dict[str, float]:
    """Return mAP of a file on a data set and the milliseconds per sample."""
    import time

    how = Suppression(0.001, 0.7, task.settings.agnostic, True, task.settings.most_detections)
    evidence, spent = [], 0.0
    for batch in batches(run, data, len(data), TEST_BATCH):
        started = time.perf_counter()
        boxes, scores = call(opened, task.cameras, [batch[camera] for camera in task.cameras])
        spent += time.perf_counter() - started
        found = suppress_batch(torch.from_numpy(boxes), torch.from_numpy(scores).transpose(1, 2), how)
        evidence.append({"found": found, **{name: batch[name] for name in ("boxes", "classes", "box_mask")}})
    return {**task.conclude(evidence), "milliseconds": spent / len(data) * 1e3}
