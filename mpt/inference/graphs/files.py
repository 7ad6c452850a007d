"""ONNX files: exported without the exporter's warnings of its own parts, opened in ONNX Runtime, described by texts."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn


def export_graph(network: nn.Module, inputs: tuple[Any, ...], path: Path, **options: Any) -> None:
    """Export a network with the weights inside the file; `options` are those of `torch.onnx.export`."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, inputs, str(path), external_data=False, verbose=False, **options)


def open_graph(graph: Path | bytes) -> Any:
    """Return an ONNX Runtime session of a file or its content, on the CPU, which logs errors alone."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    content = graph if isinstance(graph, bytes) else str(graph)
    return runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def add_texts(path: Path, texts: Mapping[str, str]) -> None:
    """Keep texts in a file's metadata, alone, and check the file. Raises the checker's errors."""
    import onnx

    save_graph(onnx.load(str(path)), texts, path)


def save_graph(model: Any, texts: Mapping[str, str], path: Path) -> None:
    """Write a graph with texts as its only metadata, and check the file. Raises the checker's errors."""
    import onnx

    onnx.helper.set_model_props(model, dict(texts))
    onnx.save(model, str(path))
    onnx.checker.check_model(str(path))
