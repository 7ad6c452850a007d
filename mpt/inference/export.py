"""A run's networks as one small file for other programs: PyTorch, safetensors, ONNX.

Only networks that inference calls are written. Whatever was written is read back and compared bit for bit before the
file gets
its name, so a file that is there is whole. PyTorch and safetensors files hold weights by name; an ONNX file holds one
network's computation too, with float32 inputs and outputs whatever the weights are, and is checked by running it
if a runtime is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from mpt.errors import CheckpointError, ConfigError, InputOutputError
from mpt.inference.exported import KEYS, open_session
from mpt.inference.graphs.files import add_texts, export_graph
from mpt.inference.measurement import stored_tensors
from mpt.precision.shared.float32_modules import Float32Module, cast_floating
from mpt.run.process.files import partial_file, write_atomically
from mpt.weights.weights_file import load_weights_file

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
ONNX_TOLERANCE = 0.05
"""Allowed mean difference between ONNX Runtime and PyTorch in half, as a share of the mean output."""


Proof = Callable[[Path], str]
"""Computes with a file that is not yet under its name; returns a sentence, raises CheckpointError."""


def unproved(path: Path) -> str:
    """Prove nothing."""
    return ""


def write_weights(
    path: Path, modules: Mapping[str, nn.Module], about: Mapping[str, str], prove: Proof = unproved
) -> str:
    """Write weights as `.safetensors` or `.pt`, read them back and prove the file; return the proof's sentence.

    Raises CheckpointError if a weight does not fit its dtype or the file does not hold the files written.
    """
    tensors = {
        name: value.cpu().contiguous().clone() for name, value in stored_tensors(modules).items()
    }
    check_finite(tensors)
    if path.suffix == ".safetensors":
        data = safetensors.torch.save(tensors, metadata={"format": "pt", **about})
    else:
        stream = io.BytesIO()
        torch.save({"state_dict": tensors, **about}, stream)
        data = stream.getvalue()
    with partial_file(path) as partial:
        write_atomically(partial, data)
        compare_tensors(path, tensors, load_weights_file(partial))
        return prove(partial)


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError if a weight is not finite, which a value beyond float16's 65504 becomes."""
    bad = [
        name
        for name, value in tensors.items()
        if value.is_floating_point() and not bool(value.isfinite().all())
    ]
    if bad:
        raise CheckpointError(
            f"{bad[0]} holds values that are not finite in {tensors[bad[0]].dtype}: name its module in "
            "precision.keep_fp32, or use --dtype bfloat16, which has float32's range."
        )


def compare_tensors(path: Path, written: Mapping[str, Tensor], read: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless the tensors read are those written, bit for bit."""
    different = [
        name
        for name in {**written, **read}
        if name not in written
        or name not in read
        or written[name].dtype != read[name].dtype
        or not torch.equal(written[name], read[name])
    ]
    if different:
        raise CheckpointError(
            f"{path} does not read back as it was written: {different[0]} differs; it was not kept."
        )


class Float32Interface(nn.Module):
    """A network in half behind float32 inputs and outputs."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, *inputs: Any) -> Any:
        """Cast down, run, cast up."""
        return cast_floating(self.network(*cast_floating(inputs, self.dtype)), torch.float32)


def as_half_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy in which all but the modules kept in float32 computes in `dtype`, without the need for autocast."""
    network = copy.deepcopy(network).eval().requires_grad_(False)

    def cast(module: nn.Module) -> None:
        if isinstance(module, Float32Module):
            module.float32_casts_back, module.float32_outer_dtype = True, dtype
            return
        for store in (module._parameters, module._buffers):
            for value in store.values():
                if value is not None and value.is_floating_point():
                    value.data = value.data.to(dtype)
        for child in module.children():
            cast(child)

    cast(network)
    return Float32Interface(network, dtype)


def write_onnx(
    path: Path,
    network: nn.Module,
    inputs: tuple[Any, ...],
    dtype: torch.dtype,
    terms: tuple[tuple[str, ...], tuple[str, ...]] = (("inputs",), ("outputs",)),
    about: Mapping[str, str] = MappingProxyType({}),
    prove: Proof = unproved,
    batch_size: int | None = None,
) -> str:
    """Write a network as ONNX and check it; return a sentence on how it was checked.

    `terms` are names for the tensors in and out, `about` is kept in the file's metadata; the batch is free unless a
    size is given. `prove` may write the file anew before it gets its name.
    Raises ConfigError if the exporter is not installed or cannot follow the network.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"--to onnx needs the package {missing[0]}: pip install 'mpt-trainer[onnx]'."
        )
    import onnx

    network = as_half_network(network.cpu(), dtype)
    inputs = tuple(value.detach().cpu() if isinstance(value, Tensor) else value for value in inputs)
    check_finite(network.state_dict())
    if batch_size is not None:
        inputs = in_batches_of(batch_size, inputs)
    with torch.no_grad():
        made = network(*inputs)
    keys = [str(key) for key in made] if isinstance(made, Mapping) else None
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} if isinstance(value, Tensor) else None for value in inputs)
    try:
        with partial_file(path) as partial:
            export_graph(
                network,
                inputs,
                partial,
                dynamo=True,
                dynamic_shapes=(shapes,) if batch_size is None else None,
                input_names=names_for(sum(isinstance(value, Tensor) for value in inputs), terms[0]),
                output_names=list(terms[1]) if isinstance(made, Tensor) else keys,
            )
            add_texts(partial, {**about, **({KEYS: json.dumps(keys)} if keys else {})})
            said = check_onnx(partial, network, inputs)
            if importlib.util.find_spec("onnxruntime") is not None:
                said = "; it ".join(filter(None, (said, prove(partial))))
    except OSError as error:
        raise InputOutputError(f"{path} could not be written: {error.strerror}.") from error
    except (
        torch.onnx.errors.OnnxExporterError,
        onnx.checker.ValidationError,
        RuntimeError,
    ) as error:
        if (interrupt := interrupt_in(error)) is not None:
            raise interrupt from None
        reason = describe_cause(error)
        raise ConfigError(
            f"This network cannot be exported to ONNX: {reason}. --to safetensors always works."
        ) from error
    return said


def in_batches_of(count: int, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return inputs with as many samples: the first ones, or the same again."""

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        return value[torch.arange(count) % len(value)]

    return tuple(map(resized, inputs))


def interrupt_in(error: BaseException | None) -> BaseException | None:
    """Return the interrupt behind an error: handlers of torch fail on modules that it left half imported."""
    while error is not None and isinstance(error, Exception):
        error = error.__cause__ or error.__context__
    return error


def describe_cause(error: BaseException) -> str:
    """Return the first line of an error's cause: the exporter wraps it in advice on reporting it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = ESCAPES.sub("", str(error)).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {said[0].rstrip('.')}"


def names_for(count: int, names: Sequence[str]) -> list[str]:
    """Return as many names: those given, and numbered ones after them."""
    return [
        *names[:count],
        *(f"{names[-1]}_{number}" for number in range(len(names) + 1, count + 1)),
    ]


@torch.no_grad()
def check_onnx(path: Path, network: nn.Module, inputs: tuple[Any, ...]) -> str:
    """Run the file and the network on the same inputs if ONNX Runtime is installed; return their difference as text."""
    if importlib.util.find_spec("onnxruntime") is None:
        return "its structure was checked; install onnxruntime to have its output compared too"
    session = open_session(path)
    values = [value for value in inputs if isinstance(value, Tensor)]
    feeds = {
        slot.name: value.numpy() for slot, value in zip(session.get_inputs(), values, strict=True)
    }
    made = [torch.from_numpy(value) for value in session.run(None, feeds)]
    expected = [leaf for leaf in tree_leaves(network(*inputs)) if isinstance(leaf, Tensor)]
    difference = max(
        float(
            (one.float() - other.float()).abs().mean() / other.float().abs().mean().clamp_min(1e-9)
        )
        for one, other in zip(made, expected, strict=True)
    )
    if not difference <= ONNX_TOLERANCE:
        raise CheckpointError(
            f"{path.name}: ONNX Runtime's output differs from PyTorch's by {difference:.2%} on average; "
            "it was not kept."
        )
    return f"ONNX Runtime's output differs from PyTorch's by {difference:.2%} on average"
