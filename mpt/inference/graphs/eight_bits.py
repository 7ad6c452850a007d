"""An ONNX graph in 8 bits: ONNX Runtime's static quantisation (QDQ, per channel, symmetric weights).

Convolutions and matrix products are quantised, calibrated on training data; everything else keeps float32.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from mpt.inference.graphs.watched import Feeds

QUANTISED = ("Conv", "ConvTranspose", "MatMul", "Gemm")


def prepared(model: Any) -> Any:
    """Return a model with the shapes that quantisation needs."""
    import onnx

    process = importlib.import_module("onnxruntime.quantization.shape_inference").quant_pre_process
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.onnx", Path(folder) / "made.onnx"
        onnx.save(model, str(given))
        process(str(given), str(made), skip_symbolic_shape=True, skip_optimization=True)
        return onnx.load(str(made))


def candidates(graph: Any) -> list[str]:
    """Return the nodes that are quantised."""
    return [node.name for node in graph.node if node.op_type in QUANTISED]


def to_eight_bits(model: Any, kept: Collection[str], feeds: Sequence[Feeds]) -> Any:
    """Return a prepared model in 8 bits, calibrated on inputs, whose `kept` nodes compute in float32."""
    import onnx

    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.onnx", Path(folder) / "made.onnx"
        onnx.save(model, str(given))
        quantise_file(given, made, feeds, QUANTISED, kept)
        return onnx.load(str(made))


def quantise_file(
    given: Path,
    made: Path,
    feeds: Iterable[Feeds],
    operators: Sequence[str],
    kept: Collection[str] = (),
) -> None:
    """Write a file in 8 bits: QDQ, weights symmetric per channel, activations of 8 bits without a sign.

    `feeds` are the inputs to calibrate on, by name; `operators` are the types that are quantised, except the nodes
    named in `kept`.
    """
    quantisation = importlib.import_module("onnxruntime.quantization")
    stream = iter(feeds)

    class Reader(quantisation.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def get_next(self) -> Any:
            one = next(stream, None)
            return None if one is None else dict(one)

    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it warns of models that were not prepared
    try:
        quantisation.quantize_static(
            str(given),
            str(made),
            Reader(),
            quant_format=quantisation.QuantFormat.QDQ,
            per_channel=True,
            op_types_to_quantize=list(operators),
            nodes_to_exclude=list(kept),
            activation_type=quantisation.QuantType.QUInt8,
            weight_type=quantisation.QuantType.QInt8,
            extra_options={"ActivationSymmetric": False, "WeightSymmetric": True},
        )
    finally:
        root.setLevel(level)
