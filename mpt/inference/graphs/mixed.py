"""An ONNX graph in float16, but for the nodes that do not fit: their tensors stay float32 from node to node.

A node is kept if a tensor of it was seen beyond float16's range, or all of it below float16's normal numbers. A
tensor that two kept nodes share is never rounded on its way, so a product of 1e5 that the next node divides again is
exact. Weights of other nodes are stored in float16; inputs and outputs stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from mpt.inference.graphs.watched import float_tensors

LARGEST = 65504.0
ROOM = 4.0
"""Inputs of other samples may be larger than those that were seen."""
SMALLEST = 2.0**-14
"""Float16's smallest normal number; a tensor all of whose values are less loses its digits."""
ALWAYS_FLOAT32 = frozenset(
    (
        *(
            "Resize",
            "Upsample",
            "GridSample",
            "RoiAlign",
            "NonMaxSuppression",
            "Range",
            "CumSum",
            "TopK",
        ),
        *(
            "LayerNormalization",
            "InstanceNormalization",
            "GroupNormalization",
            "BatchNormalization",
        ),
        *("RMSNormalization", "LpNormalization", "MeanVarianceNormalization"),
        *(
            "RandomNormal",
            "RandomUniform",
            "RandomNormalLike",
            "RandomUniformLike",
            "Multinomial",
            "Bernoulli",
        ),
    )
)
"""Positions, normalisations and operators that are defined for float32 alone."""


SCATTERING = ("ScatterND", "ScatterElements")


def is_float32(node: Any) -> bool:
    """Return whether an operator stays float32: ONNX Runtime sums into places in it alone."""
    sums = any(one.name == "reduction" and one.s != b"none" for one in node.attribute)
    return node.op_type in ALWAYS_FLOAT32 or (sums and node.op_type in SCATTERING)


def beyond_half(graph: Any, sizes: Mapping[str, float]) -> dict[str, str]:
    """Return node -> why it does not fit float16, by the largest values of its tensors."""
    found = {}
    for node in graph.node:
        for name in (*node.input, *node.output):
            size = sizes.get(name, 0.0)
            if size > LARGEST / ROOM:
                found[node.name] = f"{name} reaches {size:.3g}"
            elif 0 < size < SMALLEST:
                found[node.name] = f"{name} is at most {size:.3g}"
    return found


def named_nodes(model: Any) -> Any:
    """Return a copy of a model without local functions, whose nodes have names of their own."""
    import onnx
    from onnx import inliner

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    if copied.functions:
        copied = inliner.inline_local_functions(copied)
    taken: set[str] = set()
    for number, node in enumerate(copied.graph.node):
        if not node.name or node.name in taken:
            node.name = f"{node.op_type}_{number}"
        taken.add(node.name)
    return copied


def of_modules(graph: Any, patterns: Collection[str]) -> dict[str, str]:
    """Return the nodes of modules that a setting names, by the names that the exporter notes on each node."""
    found = {}
    for node in graph.node:
        noted = next(
            (one.value for one in node.metadata_props if one.key == "pkg.torch.onnx.name_scopes"),
            "",
        )
        for pattern in patterns:
            inner = pattern.partition(".")[2] or pattern
            if f"'{inner}'" in noted or f"'{pattern}'" in noted:
                found[node.name] = f"precision.keep_fp32 names {pattern}"
    return found


class HalfGraph:
    """Rewrites a graph node by node; `kept` nodes compute in float32."""

    def __init__(self, graph: Any, kept: Collection[str]) -> None:
        self.graph, self.kept = graph, set(kept)
        self.floats = float_tensors(graph)
        self.weights = {one.name: one for one in graph.initializer}
        self.in_half: set[str] = set()
        self.nodes: list[Any] = []
        self.made: dict[str, str] = {}
        """Name -> the same in the other dtype."""

    def rewrite(self) -> None:
        """Rewrite the graph in place."""
        from onnx import TensorProto, helper

        for node in list(self.graph.node):
            is_kept = node.name in self.kept or is_float32(node) or has_graph(node)
            for place, name in enumerate(node.input):
                if name in self.floats:
                    node.input[place] = self.converted(name, not is_kept)
            if not is_kept:
                to_half_attributes(node)
                self.in_half |= {name for name in node.output if name in self.floats}
            self.nodes.append(node)
        for output in self.graph.output:
            if output.name in self.in_half:
                inner = f"{output.name}_half"
                self.rename(output.name, inner)
                cast = helper.make_node(
                    "Cast", [inner], [output.name], f"{output.name}_cast", to=TensorProto.FLOAT
                )
                self.nodes.append(cast)
                self.in_half.discard(output.name)
        del self.graph.node[:]
        self.graph.node.extend(self.nodes)
        self.finish()

    def converted(self, name: str, half: bool) -> str:
        """Return the name of a tensor in float16 or float32, with a cast if it is not there yet."""
        from onnx import TensorProto, helper, numpy_helper

        if (name in self.in_half) == half:
            return name
        if name not in self.made:
            other = f"{name}_to_{'half' if half else 'float'}"
            if name in self.weights:
                with np.errstate(over="ignore"):
                    array = numpy_helper.to_array(self.weights[name]).astype(np.float16)
                self.graph.initializer.append(numpy_helper.from_array(array, other))
            else:
                kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
                self.nodes.append(
                    helper.make_node("Cast", [name], [other], f"{other}_cast", to=kind)
                )
            self.made[name] = other
        return self.made[name]

    def rename(self, old: str, new: str) -> None:
        """Give a tensor another name in all nodes so far."""
        for node in self.nodes:
            for names in (node.input, node.output):
                for place, name in enumerate(names):
                    if name == old:
                        names[place] = new

    def finish(self) -> None:
        """Drop weights that nothing reads any more, and declare the types of the tensors."""
        from onnx import TensorProto

        read = {name for node in self.graph.node for name in node.input} | {
            one.name for one in self.graph.output
        }
        unread = [one for one in self.graph.initializer if one.name not in read]
        for one in unread:
            self.graph.initializer.remove(one)
        for one in self.graph.value_info:
            if one.name in self.in_half:
                one.type.tensor_type.elem_type = TensorProto.FLOAT16


def has_graph(node: Any) -> bool:
    """Return whether a node (If, Loop, Scan) holds a graph of its own."""
    return any(one.HasField("g") or len(one.graphs) for one in node.attribute)


def to_half_attributes(node: Any) -> None:
    """Change float32 in a node's attributes."""
    from onnx import TensorProto, helper, numpy_helper

    if node.op_type == "ConstantOfShape" and not node.attribute:  # float32 zeros
        node.attribute.append(
            helper.make_attribute("value", numpy_helper.from_array(np.zeros(1, np.float16)))
        )
    for one in node.attribute:
        if one.name in ("to", "dtype") and one.i == TensorProto.FLOAT:
            one.i = TensorProto.FLOAT16
        elif one.HasField("t") and one.t.data_type == TensorProto.FLOAT:
            one.t.CopyFrom(
                numpy_helper.from_array(numpy_helper.to_array(one.t).astype(np.float16), one.t.name)
            )
        elif node.op_type == "Constant" and one.name in ("value_float", "value_floats"):
            values = [one.f] if one.name == "value_float" else list(one.floats)
            array = np.array(values if one.name == "value_floats" else values[0], np.float16)
            one.Clear()
            one.name, one.type = "value", 4
            one.t.CopyFrom(numpy_helper.from_array(array))


def to_half(model: Any, kept: Collection[str]) -> Any:
    """Return a model in float16 whose `kept` nodes compute in float32."""
    import onnx

    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    HalfGraph(copied.graph, kept).rewrite()
    return copied
