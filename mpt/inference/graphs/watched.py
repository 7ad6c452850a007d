"""The values of every tensor of an ONNX graph while ONNX Runtime computes real inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpt.inference.graphs.files import open_graph

Feeds = Mapping[str, np.ndarray[Any, Any]]
"""Input's name -> values of one call."""
MOST_AT_ONCE = 200
"""Tensors that are asked for in one pass over the inputs: their values are in memory together."""


def float_tensors(graph: Any) -> set[str]:
    """Return the names of all float32 tensors of a graph, weights among them."""
    from onnx import TensorProto

    values = (*graph.input, *graph.output, *graph.value_info)
    found = {one.name for one in values if one.type.tensor_type.elem_type == TensorProto.FLOAT}
    return found | {one.name for one in graph.initializer if one.data_type == TensorProto.FLOAT}


def computed_floats(graph: Any) -> list[str]:
    """Return the float32 tensors that the graph's nodes compute, in their order."""
    known = float_tensors(graph)
    return [name for node in graph.node for name in node.output if name in known]


def watch(
    model: Any, feeds: Sequence[Feeds], names: Sequence[str]
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    """Yield the values of some tensors, a part of them at a time, for each of the inputs."""
    import onnx

    there = {one.name: one for one in (*model.graph.output, *model.graph.value_info)}
    for start in range(0, len(names), MOST_AT_ONCE):
        part = names[start : start + MOST_AT_ONCE]
        copied = onnx.ModelProto()
        copied.CopyFrom(model)
        del copied.graph.output[:]
        copied.graph.output.extend(
            there.get(name) or onnx.ValueInfoProto(name=name) for name in part
        )
        opened = open_graph(copied.SerializeToString())
        for one in feeds:
            yield dict(zip(part, opened.run(list(part), dict(one)), strict=True))


def magnitudes(model: Any, feeds: Sequence[Feeds]) -> dict[str, float]:
    """Return the largest absolute value of every float32 tensor, weights among them; infinite if it is not finite."""
    from onnx import numpy_helper

    known = float_tensors(model.graph)
    found = {
        one.name: largest(numpy_helper.to_array(one))
        for one in model.graph.initializer
        if one.name in known
    }
    for call in feeds:
        for name, value in call.items():
            if name in known:
                found[name] = max(found.get(name, 0.0), largest(value))
    for values in watch(model, feeds, computed_floats(model.graph)):
        for name, value in values.items():
            found[name] = max(found.get(name, 0.0), largest(value))
    return found


def largest(value: np.ndarray[Any, Any]) -> float:
    """Return the largest absolute value, 0 of none, infinity if one is not finite."""
    if not value.size:
        return 0.0
    size = float(np.abs(value.astype(np.float32, copy=False)).max())
    return size if np.isfinite(size) else float("inf")


def errors(reference: Any, changed: Any, feeds: Sequence[Feeds]) -> dict[str, float]:
    """Return tensor -> mean difference of a changed model's as a share of the mean size, if both compute it."""
    there = {name for node in changed.graph.node for name in node.output}
    names = [name for name in computed_floats(reference.graph) if name in there]
    found: dict[str, float] = {}
    pairs = zip(watch(reference, feeds, names), watch(changed, feeds, names), strict=True)
    for expected, made in pairs:
        for name, value in expected.items():
            size = max(float(np.abs(value).mean()), 1e-12) if value.size else 1.0
            apart = (
                float(np.abs(made[name].astype(np.float32) - value).mean()) / size
                if value.size
                else 0.0
            )
            found[name] = max(found.get(name, 0.0), apart if np.isfinite(apart) else float("inf"))
    return found


def added_errors(graph: Any, of_tensors: Mapping[str, float]) -> dict[str, float]:
    """Return node -> by how much its outputs are worse than its inputs, the worst first."""
    found = {}
    for node in graph.node:
        made = [of_tensors[name] for name in node.output if name in of_tensors]
        given = [of_tensors[name] for name in node.input if name in of_tensors]
        if made:
            found[node.name] = max(made) - max(given, default=0.0)
    return dict(sorted(found.items(), key=lambda one: -one[1]))
