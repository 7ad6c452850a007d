"""Run as a program: what the fake device does under autocast, as JSON on the last line.

Operators of the header's lists are called under autocast with tensors of the fake GPU, and the dtype of the result is
noted. A program of its own, since the device is registered for good.
"""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.planner.device import (
    direct_results,
    fake_device,
    fake_mode,
    outcomes,
    routes,
)
from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step import run_fake
from mpt.planner.trace.recorder import Recorder
from tests.planner.configs import DIGITS, VIT, make
from tests.planner.torch_fake_mode import TorchFakeMode

HALF, FULL = torch.float16, torch.float32


class Casts(TorchDispatchMode):
    """Notes how many dimensions each tensor has that is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.seen.append(args[0].dim())
        return func(*args, **(kwargs or {}))


def order_of_casts(device: str) -> list[int]:
    """Return the dimensions of what a convolution's autocast casts, in its order: of input, weight and bias."""
    image, weight = (
        torch.zeros(2, 1, 1, 1, device=device).sum(0),
        torch.zeros(1, 1, 1, 1, device=device),
    )
    with torch.autocast(device.split(":")[0], torch.bfloat16), Casts() as casts:
        F.conv2d(image, weight, torch.zeros(1, device=device))
    return casts.seen


def calls(x: Any, w: Any) -> dict[str, Any]:
    """A call for operators of every list: name -> function."""
    image, kernel = x.view(1, 4, 4, 4), w.view(4, 4, 1, 1)
    return {
        "mm": lambda: x @ w,
        "linear": lambda: F.linear(x, w),
        "conv2d": lambda: F.conv2d(image, kernel),
        "conv_transpose2d": lambda: F.conv_transpose2d(image, kernel),
        "bmm": lambda: torch.bmm(x.view(1, 16, 4), w.view(1, 4, 4)),
        "einsum": lambda: torch.einsum("ij,jk->ik", x, w),
        "sdpa": lambda: F.scaled_dot_product_attention(*(x.view(1, 1, 4, 16),) * 3),
        "exp": lambda: x.exp(),
        "pow": lambda: x**2,
        "layer_norm": lambda: F.layer_norm(x, (4,)),
        "group_norm": lambda: F.group_norm(image, 2),
        "mse_loss": lambda: F.mse_loss(x, x),
        "interpolate": lambda: F.interpolate(image, scale_factor=2),
        "softmax": lambda: x.softmax(-1),
        "log_softmax": lambda: x.log_softmax(-1),
        "sum": lambda: x.sum(),
        "cumsum": lambda: x.cumsum(0),
        "norm": lambda: torch.norm(x),
        "relu": lambda: x.relu(),
        "add": lambda: x + x,
        "addcmul": lambda: torch.addcmul(x, x, x.float()),
        "batch_norm": lambda: F.batch_norm(image, None, None, training=True),
    }


def trace_under(mode: Any, model: str = "dcgan") -> Any:
    """Return what two steps of a model and what comes beside them allocate, and their operators, under a fake mode."""
    run_fake.LeanFakeMode = mode  # type: ignore[misc]
    run = run_fake.trace_config(
        make(model, "amp", 8), DIGITS, 8, find_gpu("rtx3060"), None, whole_run=True
    )
    storages = [(s.size, s.category, s.module, s.operator) for s in run.whole.storages]
    return storages, run.whole.events, run.work.operators


def wide_statistics(args: Any, kwargs: Any, device: torch.device) -> outcomes.Outcome:
    """Say wrongly that a batch norm keeps its statistics in float64."""
    statistic = outcomes.Form((args[0].shape[1],), (1,), torch.float64, device)
    return outcomes.Outcome((direct_results.form_of(args[0], device), statistic, statistic), tuple)


def formats() -> dict[str, list[bool]]:
    """Return of convolutions whether result and gradients are channels last, by what is so among input and weight."""
    found = {}
    for name, of_input, of_weight in (
        ("neither", 0, 0),
        ("input", 1, 0),
        ("weight", 0, 1),
        ("both", 1, 1),
    ):
        kinds = (torch.contiguous_format, torch.channels_last)
        x = (
            torch.zeros(2, 4, 8, 8, device="fgpu:0")
            .contiguous(memory_format=kinds[of_input])
            .requires_grad_()
        )
        w = (
            torch.zeros(6, 4, 3, 3, device="fgpu:0")
            .contiguous(memory_format=kinds[of_weight])
            .requires_grad_()
        )
        result = F.conv2d(x, w)
        gradients = torch.ops.aten.convolution_backward(
            result, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
        )[:2]
        found[name] = [
            one.is_contiguous(memory_format=torch.channels_last) for one in (result, *gradients)
        ]
    return found


def main() -> None:
    """Print the observations."""
    warnings.simplefilter("ignore")
    registered = fake_device.register()
    routes.register()
    lists = fake_device.read_operator_lists(fake_device.header_path().read_text())
    missing = [
        f"{name}.{overload}"
        for entries in lists.values()
        for name, overload in entries
        if not torch._C._dispatch_has_kernel_for_dispatch_key(
            f"aten::{name}" + ("" if overload == "default" else f".{overload}"),
            "AutocastPrivateUse1",
        )
    ]
    dtypes: dict[str, dict[str, str]] = {}
    out: dict[str, Any] = {
        "registered": registered,
        "missing": missing,
        "lists": {k: len(v) for k, v in lists.items()},
    }
    out["cast_order_of_torch"] = order_of_casts("cpu")
    with FakeTensorMode():
        for given in (HALF, FULL):
            x = torch.zeros(16, 4, device="fgpu:0", dtype=given)
            w = torch.zeros(4, 4, device="fgpu:0", dtype=given)
            with torch.autocast("fgpu", HALF):
                dtypes[str(given)[6:]] = {
                    name: str(call().dtype)[6:] for name, call in calls(x, w).items()
                }
        out["dtypes"] = dtypes
        out["cast_order"] = order_of_casts("fgpu:0")
        out["formats"] = formats()
        weight = nn.Parameter(torch.zeros(4, 4, device="fgpu:0"))
        x = torch.zeros(4, 4, device="fgpu:0")
        recorder = Recorder("fgpu")
        casts: list[Any] = []
        with recorder.recording(), fake_device.listen_to_casts(casts.append):
            with torch.autocast("fgpu", HALF):
                _ = (F.linear(x, weight), F.linear(x, weight), F.linear(x, weight * 1))
            out["casts_in_one_region"] = len(casts)
            with torch.autocast("fgpu", HALF):
                _ = F.linear(x, weight)
            out["casts_in_two_regions"] = len(casts)
        out["cache_left"] = len(fake_device._weight_casts)
        try:
            with torch.autocast("fgpu", HALF):
                F.binary_cross_entropy(x, x)
            out["banned"] = ""
        except RuntimeError as error:
            out["banned"] = str(error)
        out["attention"] = {}
        for name, capability, dtype, size, mask in (
            ("flash", (8, 6), HALF, 64, None),
            ("efficient_turing", (7, 5), HALF, 64, None),
            ("efficient_float32", (8, 6), FULL, 64, None),
            ("efficient_mask", (8, 6), HALF, 64, "mask"),
            ("math_bias", (8, 6), HALF, 64, "bias of each head"),
            ("math_odd_head", (8, 6), FULL, 63, None),
        ):
            routes.target.capability = capability
            q = torch.zeros(1, 2, 32, size, device="fgpu:0", dtype=dtype, requires_grad=True)
            bias = torch.zeros(32, 32, device="fgpu:0", dtype=torch.bool) if mask else None
            if mask == "bias of each head":  # as T5 gets it from an embedding, its heads innermost
                bias = torch.zeros(32, 32, 2, device="fgpu:0", dtype=dtype).permute(2, 0, 1)[None]
            seen: list[str] = []
            recorder = Recorder(
                "fgpu", observer=lambda func, a, k, r, seen=seen: seen.append(func._schema.name)
            )
            with recorder.recording():
                F.scaled_dot_product_attention(q, q, q, attn_mask=bias).sum().backward()
            out["attention"][name] = sorted(
                {op for op in seen if "attention" in op or "softmax" in op}
            )
        lstm_in = torch.zeros(3, 5, 4, device="fgpu:0", requires_grad=True)
        with torch.device("fgpu:0"):
            lstm = nn.LSTM(4, 6, 2, batch_first=True)
        lstm(lstm_in)[0].sum().backward()
        out["lstm_gradient"] = list(lstm.weight_ih_l0.grad.shape)
        silu: list[str] = []
        recorder = Recorder("fgpu", observer=lambda func, a, k, r: silu.append(func._schema.name))
        with recorder.recording():
            F.silu(torch.zeros(4, device="fgpu:0", requires_grad=True)).sum().backward()
        added: list[str] = []
        recorder = Recorder("fgpu", observer=lambda func, a, k, r: added.append(func._schema.name))
        with recorder.recording():
            _ = (x + x).device
        out["operators_of_an_addition"] = added
        out["silu_is_one_kernel"] = "aten::silu_backward" in silu and "aten::sigmoid" not in silu
    with LeanFakeMode(allow_non_fake_inputs=True):
        # QR has no rule for shapes: torch runs it on zeros, which this device cannot hold.
        factored, scales = torch.geqrf(torch.zeros(4, 4, device="fgpu:0"))
        out["without_a_rule"] = [
            list(factored.shape),
            factored.device.type,
            list(scales.shape),
            scales.device.type,
        ]
        number = torch.tensor(2.0)
        number.add_(1)
        out["number"] = number.item(), type(number).__name__
    lean = {model: trace_under(LeanFakeMode, model) for model in ("dcgan", VIT)}
    before = FakeTensorMode.cache_misses
    out["lean_trace_is_torchs"] = {
        model: trace_under(TorchFakeMode, model) == lean[model] for model in lean
    }
    out["torchs_mode_keeps_results_of_its_own"] = FakeTensorMode.cache_misses - before > 100
    before = FakeTensorMode.cache_misses
    trace_under(LeanFakeMode)
    out["results_made_again"] = FakeTensorMode.cache_misses - before
    fake_mode._outcomes.clear()
    norm = torch.ops.aten.native_batch_norm.default
    direct_results.RULES[norm] = wide_statistics
    out["wrong_rule_is_noticed"] = trace_under(LeanFakeMode) != lean["dcgan"]
    out["split_operators"] = sorted(routes.find_split_operators())
    out["warnings"] = routes.unknown_routes()
    graphs: list[Any] = []
    torch.compile(lambda x: x + 1, backend=lambda graph, inputs: graphs.append(graph) or graph)(x)
    out["graphs_compiled"] = len(graphs)
    print(json.dumps(out))


if __name__ == "__main__":
    with torch.autograd.set_multithreading_enabled(False):  # type: ignore[no-untyped-call]
        main()
