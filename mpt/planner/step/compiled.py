"""`memory.compile` on fake tensors: torch's own tracing and partition, and the memory that its compiler would write.

`nn.Module.compile` is replaced while planning. At its first call a compiled network is traced by AOTAutograd, with the
backend's own decompositions, and cut into forward and backward by the partitioner that the backend uses
(`min_cut_rematerialization_partition`, which follows `torch._functorch.config.activation_memory_budget`), so what is
kept between the two is torch's own choice. Both graphs then run operator by operator on fake tensors, and are recorded
like eager ones.

With `aot_eager` that is what a real run does. Inductor also fuses. Its rules, as far as memory goes, are here: a result
of an elementwise operator that only elementwise operators and reductions read is computed at each reader and never
written, unless it is read several times and much has to be read for it (`realize_reads_threshold`); an elementwise
result is written over a tensor of its size that is not needed any more, unless a scatter wrote into that one
(`SchedulerNode.decide_inplace_update`); weights and inputs of convolutions are copied to channels last, and the copies
kept for backward, if torch's own rule says so (`decide_layout_opt`). Not here: Inductor's order of operators, its
pattern replacements, kernels that write several results at once and graph breaks (a network is one graph).

In the modes that record CUDA graphs, the graphs' allocations come from a pool of their own, which all networks share
and which gives nothing back (`torch/_inductor/cudagraph_trees.py`), and each graph copies what is neither a parameter,
a buffer nor another graph's result into memory that it keeps: the batch, and the gradients that come from the loss.

A network that cannot be traced is planned as the eager one, with a note.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from mpt.memory.compile import GRAPHED
from mpt.planner.device import fake_device
from mpt.planner.trace.allocator import GRAPHS
from mpt.planner.trace.recorder import Recorder

_aten = torch.ops.aten
VIEWS = frozenset({_aten.unsqueeze.default, _aten._unsafe_view.default, _aten.reshape.default})
SCATTERS = frozenset(
    {_aten.scatter_add.default, _aten.index_put.default, _aten._unsafe_index_put.default}
)
"""They write into their first operand, and compute the rest as they read it."""

MANY_OPERATORS = 30
"""Inductor writes a result that is read more than once if more operators than these would be repeated."""


@contextmanager
def compiling_on_fake(recorder: Recorder) -> Iterator[list[str]]:
    """Inside the block `nn.Module.compile` plans compiled networks; yields notes about those that stay eager."""
    notes: list[str] = []
    original = nn.Module.compile

    def compile_planned(
        module: nn.Module,
        *args: Any,
        backend: str = "inductor",
        mode: str | None = None,
        **options: Any,
    ) -> None:
        import_compiler(recorder)
        fuses = backend == "inductor"
        module._compiled_call_impl = PlannedNetwork(
            module, recorder, fuses, fuses and mode in GRAPHED, notes
        )

    nn.Module.compile = compile_planned  # type: ignore[assignment, method-assign]
    try:
        yield notes
    finally:
        nn.Module.compile = original  # type: ignore[method-assign]


def import_compiler(recorder: Recorder) -> None:
    """Import the tracer's modules before the first step: an import within one would keep that one's batch."""
    before, recorder.is_paused = recorder.is_paused, True
    try:
        with warnings.catch_warnings():  # of torch about itself
            warnings.simplefilter("ignore", DeprecationWarning)
            import torch._functorch.aot_autograd
            import torch._inductor.decomposition
            import torch._inductor.lowering  # noqa: F401 - the table of decompositions wants it imported
    finally:
        recorder.is_paused = before


class PlannedNetwork:
    """Calls a network as its compiled graphs would run; they are made once for each setting of its inputs."""

    def __init__(
        self,
        module: nn.Module,
        recorder: Recorder,
        fuses: bool,
        is_recorded: bool,
        notes: list[str],
    ) -> None:
        self.module, self.recorder, self.fuses, self.notes = module, recorder, fuses, notes
        self.is_recorded = is_recorded
        self._graphs: dict[Any, Callable[..., Any]] = {}
        self._stays_eager = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = dict(self.module.named_parameters(remove_duplicate=False))
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        key = (
            self.module.training,
            _situation(),
            *map(_describe, tree_leaves((weights, buffers, args, kwargs))),
        )
        found = self._graphs.get(key)
        if found is not None:
            return found(weights, buffers, *args, **kwargs)
        if self._stays_eager:
            return self.module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.module._compiled_call_impl, self.recorder.is_paused = None, True
        try:
            found = self._traced(len(weights) + len(buffers))
            # AOTAutograd keeps its example inputs
            examples = tree_map_only(Tensor, _example, (args, kwargs))
            found(weights, buffers, *examples[0], **examples[1])
            self._graphs[key] = found
        except Exception as error:
            self._stays_eager = True
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            self.notes.append(
                f"memory.compile: {type(self.module).__name__} is planned as the eager network: {reason}"
            )
        finally:
            self.module._compiled_call_impl, self.recorder.is_paused = self, False
        return self(*args, **kwargs)

    def _traced(self, weights: int) -> Callable[..., Any]:
        """Return a backend that traces the network at its first call."""
        from torch._functorch.aot_autograd import aot_function
        from torch._inductor.decomposition import select_decomp_table

        def called(weights: Any, buffers: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self.module, {**weights, **buffers}, args, kwargs)

        # AOTAutograd's own names
        def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
            run = GraphRun(gm, self.recorder, self.fuses)
            return RecordedGraph(run) if self.is_recorded else run

        return aot_function(
            called,
            fw_compiler=compiler,
            bw_compiler=compiler,
            partition_fn=self.cut,
            decompositions=select_decomp_table() if self.fuses else None,
            num_params_buffers=weights,
            keep_inference_input_mutations=True,
        )

    def cut(
        self, joint: fx.GraphModule, inputs: Any, **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return forward and backward of a traced network: the kept part between the two is torch's choice."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.graph import GraphLowering

        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        if self.fuses and GraphLowering.decide_layout_opt(forward, is_inference=False):
            copy_for_convolutions(forward)
        return forward, backward


class GraphRun:
    """One graph of a compiled network: runs its operators in order and releases each value after its last use."""

    _boxed_call = True
    """Tells AOTAutograd that it may be given a list to empty."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder, fuses: bool) -> None:
        self.graph, self.recorder, self.fuses = graph, recorder, fuses
        self.nodes: list[fx.Node] = list(graph.graph.nodes)
        self.fused = find_fused(self.nodes) if fuses else set[fx.Node]()
        self.freed = self._find_ends()
        self.in_place = self._find_in_place() if fuses else set[fx.Node]()

    def _find_ends(self) -> list[list[fx.Node]]:
        """Return the values released after each node; inputs of a fused one are needed by its readers."""
        order = {node: place for place, node in enumerate(self.nodes)}
        ends: dict[fx.Node, int] = {}
        freed: list[list[fx.Node]] = [[] for _ in self.nodes]
        for node in reversed(self.nodes):
            carried = [ends[user] if user in self.fused else order[user] for user in node.users]
            ends[node] = max([order[node], *carried])
            freed[ends[node]].append(node)
        return freed

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph; `args` is emptied, as compiled code empties it."""
        values: dict[fx.Node, Any] = {}
        given = list(reversed(args))
        args.clear()
        before = self.recorder.is_paused
        outside, self.recorder.in_written_kernels = self.recorder.in_written_kernels, self.fuses
        try:
            for node, freed in zip(self.nodes, self.freed, strict=True):
                self.recorder.is_paused = before or node in self.fused or node in self.in_place
                if node.op == "placeholder":
                    values[node] = given.pop()
                elif node.op == "get_attr":
                    values[node] = operator.attrgetter(str(node.target))(self.graph)
                elif node.op == "output":
                    return fx.map_arg(node.args[0], values.__getitem__)
                else:
                    values[node] = self._compute(node, values)
                for done in freed:
                    del values[done]
                if node in self.in_place and not before:
                    self.recorder.born(values[node], str(node.target))
            raise AssertionError("a graph ends with its output")
        finally:
            self.recorder.is_paused, self.recorder.in_written_kernels = before, outside

    def _compute(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        reads, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        return node.target(*reads, **named)  # type: ignore[operator]

    def _find_in_place(self) -> set[fx.Node]:
        """Return elementwise nodes whose result takes the memory of an input of the same size that ends there."""
        kinds, found = _kinds(), set[fx.Node]()
        for node, freed in zip(self.nodes, self.freed, strict=True):
            if node.target in SCATTERS or (
                node.op == "call_function"
                and _is_pointwise(kinds, node)
                and not _reduces(node)
                and not kinds.is_view(node)
                and any(
                    _bytes(done) == _bytes(node)
                    for done in freed
                    if done is not node and self._is_writable(done)
                )
            ):
                found.add(node)
        return found

    def _is_writable(self, node: fx.Node) -> bool:
        """Return whether Inductor writes another result over this one: it exists, and no scatter wrote into it."""
        kinds = _kinds()
        while kinds.is_view(node) or node.target in VIEWS:
            node = node.all_input_nodes[0]
        return node not in self.fused and node.target not in SCATTERS


class RecordedGraph:
    """A graph that is replayed as a CUDA graph: it allocates in the graphs' pool, and copies its inputs there."""

    _boxed_call = True

    def __init__(self, run: GraphRun) -> None:
        self.run = run
        self.copies: dict[int, Tensor] = {}
        """By place among the inputs; kept for as long as the graph."""

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph in the pool; `args` is emptied."""
        recorder = self.run.recorder
        before, recorder.stream = recorder.stream, GRAPHS
        try:
            if not recorder.is_paused:
                for place, given in enumerate(args):
                    if place in self.copies:
                        args[place] = self.copies[place]
                    elif isinstance(given, Tensor) and recorder.comes_from_outside(given):
                        args[place] = self.copies[place] = torch.clone(given)
            return self.run(args)
        finally:
            recorder.stream = before


def copy_for_convolutions(forward: fx.GraphModule) -> None:
    """Copy the weights and inputs that convolutions take as they are, as Inductor does for channels last."""
    graph = forward.graph
    for given in [node for node in graph.nodes if node.op == "placeholder"]:
        readers = [
            user
            for user in given.users
            if user.target is _aten.convolution.default and given in user.args[:2]
        ]
        value = given.meta.get("val")
        if not readers or not isinstance(value, Tensor) or value.dim() != 4:
            continue
        if value.is_contiguous(memory_format=torch.channels_last):
            continue
        with graph.inserting_before(readers[0]):
            copy = graph.call_function(
                _aten.clone.default, (given,), {"memory_format": torch.contiguous_format}
            )
        copy.meta["val"] = value
        given.replace_all_uses_with(
            copy, delete_user_cb=lambda user, keep=readers: user in keep or user.op == "output"
        )
    forward.recompile()


def _bytes(node: fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def find_fused(nodes: list[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose results are computed by their readers, and views of these."""
    from torch._inductor import config

    kinds = _kinds()

    def is_view(node: fx.Node) -> bool:
        return kinds.is_view(node) or node.target in VIEWS

    def reads_elementwise(user: fx.Node) -> bool:
        """Whether a reader is part of a fused kernel, through views too."""
        if is_view(user):
            return all(map(reads_elementwise, user.users))
        return user.op == "call_function" and (
            _is_pointwise(kinds, user) or user.target in SCATTERS
        )

    fused: set[fx.Node] = set()
    reads: dict[fx.Node, set[fx.Node]] = {}
    operators: dict[fx.Node, int] = {}
    for node in nodes:
        sources = node.all_input_nodes
        reads[node] = set[fx.Node]().union(
            *(reads[one] if one in fused else {one} for one in sources)
        )
        operators[node] = 1 + sum(operators[one] for one in sources if one in fused)
        if node.op != "call_function":
            continue
        if is_view(node):
            if sources[0] in fused:
                fused.add(node)
        elif (
            _is_pointwise(kinds, node)
            and not _reduces(node)
            and all(map(reads_elementwise, node.users))
        ):
            costly = (
                len(reads[node]) > config.realize_reads_threshold
                or operators[node] > MANY_OPERATORS
            )
            if len(node.users) <= 1 or not costly:
                fused.add(node)
    return fused


def _kinds() -> Any:
    from torch._functorch.partitioners import get_default_op_list

    return get_default_op_list()


def _is_pointwise(kinds: Any, node: fx.Node) -> bool:
    """Whether Inductor may compute a result in its reader: the partitioner's list lacks the results of
    decompositions."""
    return bool(kinds.is_fusible(node)) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def _reduces(node: fx.Node) -> bool:
    return (
        torch.Tag.reduction in getattr(node.target, "tags", ()) or node.target is operator.getitem
    )


def _situation() -> tuple[Any, ...]:
    kinds = ("cpu", fake_device.DEVICE)
    modes = ((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
    return torch.is_grad_enabled(), *modes


def _example(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor.detach()).requires_grad_(tensor.requires_grad)


def _describe(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    return type(value), str(value)
