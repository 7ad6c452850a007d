"""An export proved by its results: the run's networks and the file's, on the same inputs.

The run's networks are those that were trained, in float32, with adapters alongside their weights; the file is read back
as `mpt infer FILE` reads it. The allowed distance is measured: the effect of rounding the run's own weights to the
file's dtype on their outputs, and of a graph in half that of rounding the results of its operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mpt.errors import CheckpointError
from mpt.inference.exported import open_exported, open_session
from mpt.inference.half import halve, networks
from mpt.precision.shared.choice import DTYPES
from mpt.seams import NOTHING, MemoryTrick
from mpt.seams.trick_kinds import fold

FLOAT32_ROUNDING = 1e-3
"""Of outputs in float32, relative: folding an adapter and other kernels change the last bits of a sum. Measured on five
networks with adapters as large as their weights (two ResNets, ViT, ConvNeXt, a small CNN): 1.3e-7 to 5.3e-5."""
ROUNDINGS = 4.0
"""How many times the distance that rounding makes is still rounding: other kernels round in other places."""

Calls = Mapping[str, tuple[nn.Module, tuple[Any, ...], Any]]
"""Network's name -> module, arguments of a call, result (`mpt.inference.half.watch_calls`)."""


@dataclass(frozen=True)
class Expected:
    """The outputs of one network of the run, and how far rounding its weights may take them from there."""

    inputs: tuple[Any, ...]
    outputs: list[Tensor]
    allowed: float


def expect(
    called: Calls, dtype: str, tricks: Iterable[MemoryTrick] = (), computes: bool = False
) -> dict[str, Expected]:
    """Return the outputs of a run's networks for the inputs they were called with.

    Their weights are those of a file after it: without what `tricks` have put into them, and rounded. A file that
    `computes` rounds the results of operators too.
    """
    found = {name: outputs_of(network, inputs) for name, (network, inputs, _) in called.items()}
    allowed = dict.fromkeys(called, FLOAT32_ROUNDING)
    if dtype in DTYPES:
        fold(tricks, {name: network for name, (network, _, _) in called.items()})
        for name, (network, inputs, _) in called.items():
            plain = outputs_of(network, inputs)
            halve(network, DTYPES[dtype])
            network.float()
            with RoundedResults(DTYPES[dtype]) if computes else NOTHING:
                rounded = outputs_of(network, inputs)
            allowed[name] += ROUNDINGS * distance(rounded, plain)
    return {name: Expected(called[name][1], found[name], allowed[name]) for name in called}


class RoundedResults(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the result of every operator to a half dtype, as a graph in it does.

    What does not fit its range stays, for such nodes are kept in float32.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator; a view and a change in place are left as they are."""
        made = func(*args, **(kwargs or {}))
        if any(one.alias_info is not None for one in func._schema.returns):
            return made
        return tree_map_only(Tensor, self.rounded, made)

    def rounded(self, value: Tensor) -> Tensor:
        """Return a float32 result rounded, anything else as it is."""
        if value.dtype != torch.float32:
            return value
        half = value.to(self.dtype).float()
        return torch.where(half.isfinite() & ((half != 0) | (value == 0)), half, value)


def prove(file: Path, name: str, expected: Mapping[str, Expected], allow: tuple[str, ...]) -> str:
    """Repeat the run's computation with a written file; return a sentence on how far apart they are.

    `name` is the file's in messages. Raises CheckpointError if the distance is more than rounding.
    """
    found = dict(networks(open_exported(file, "cpu", (), allow).run.task.modules))
    apart = {
        network: refuse_beyond(
            one, outputs_of(found[network], one.inputs), f"{name}: its network {network}"
        )
        for network, one in expected.items()
    }
    return computes_alike(max(apart.values(), default=0.0))


def prove_session(file: Path, name: str, expected: Expected) -> str:
    """Do the same for an ONNX file that holds more than the network, by ONNX Runtime alone."""
    session = open_session(file)
    values = [value for value in expected.inputs if isinstance(value, Tensor)]
    feeds = {
        slot.name: value.numpy() for slot, value in zip(session.get_inputs(), values, strict=True)
    }
    made = [torch.from_numpy(value) for value in session.run(None, feeds)]
    outputs = [value.double() for value in made if value.is_floating_point()]
    return computes_alike(refuse_beyond(expected, outputs, f"{name}: its network"))


def prove_folding(unfolded: Calls, modules: Mapping[str, nn.Module]) -> None:
    """Compare networks into whose weights adapters were folded with those that were trained.

    Raises CheckpointError if the distance is more than rounding.
    """
    found = dict(networks(modules))
    for network, one in expect(unfolded, "float32").items():
        outputs = outputs_of(found[network], one.inputs)
        refuse_beyond(
            one, outputs, f"the network {network} with its adapters folded", "nothing was inferred"
        )


def refuse_beyond(
    expected: Expected, outputs: list[Tensor], name: str, end: str = "it was not kept"
) -> float:
    """Return how far outputs are from the run's. Raises CheckpointError if that is more than rounding."""
    if not all(bool(one.isfinite().all()) for one in expected.outputs):
        raise CheckpointError(
            f"{name} cannot be compared with the run's, whose own outputs are not finite (NaN or infinity); {end}. "
            "`mpt doctor RUN` looks for the cause; --step takes an earlier checkpoint"
        )
    apart = distance(outputs, expected.outputs)
    if not apart <= expected.allowed:
        raise CheckpointError(
            f"{name} computes something else than the run's: outputs differ by {apart:.2g} of their size, and rounding "
            f"accounts for {expected.allowed:.2g}; {end}. This is a mistake of mpt's or of a part's own: "
            "please report it with the run's config.yaml"
        )
    return apart


def computes_alike(apart: float) -> str:
    """Return a sentence about a distance that is rounding."""
    return f"computes the same as the run (outputs differ by {apart:.2g} of their size)"


@torch.no_grad()
def outputs_of(network: nn.Module, inputs: tuple[Any, ...]) -> list[Tensor]:
    """Return the floating-point tensors that a network makes, in evaluation, of inputs and a fixed seed."""
    was_training = network.training
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = network.eval()(
            *(value.clone() if isinstance(value, Tensor) else value for value in inputs)
        )
    network.train(was_training)
    return [
        leaf.double()
        for leaf in tree_leaves(made)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest mean difference of an output, as a share of its mean size; infinite for other shapes."""
    if [one.shape for one in found] != [one.shape for one in expected]:
        return float("inf")
    shares = [
        float((one - other).abs().mean() / other.abs().mean().clamp_min(1e-12))
        for one, other in zip(found, expected, strict=True)
        if other.numel()
    ]
    return max(shares, default=0.0)
