"""Weights in half: Apex's `O2` (with float32 master weights and BatchNorm), `O3` and the plain `fp16-pure` and
`bf16-pure`.

Under O2 the optimizer updates float32 masters, to which gradients are moved before unscaling and from which the half
weights are refreshed after each step; gradients are cast to float32 as they arrive, so that micro-batches and losses
add up in float32, as in Apex. Affine BatchNorm stays float32 and the saved state is float32. Under the pure modes there
are no masters: the saving is largest and small updates are lost to rounding.

A weight that a float32 module shares with others stays one and float32, and so do the modules that own it. Each
trainable network casts its floating inputs down and its outputs back to float32, as Apex does, here also if it is
entered by another public method than forward. EMA copies stay float32: averages with a decay of 0.999 vanish in half.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpt.config.options import PrecisionOptions
from mpt.errors import ConfigError
from mpt.nn.shared.mixin import Mixin, mix_in
from mpt.nn.shared.named_modules import named_modules
from mpt.precision.shared.choice import choose_dtype
from mpt.precision.shared.float32_modules import (
    Float32Module,
    cast_floating,
    keep_in_float32,
    own_methods,
)
from mpt.precision.shared.policy import Policy
from mpt.seams import Phase, Task

NAMES: dict[str, dict[str, object]] = {
    "O2": {},
    "O3": {"loss_scale": 1.0},
    "fp16-pure": {"dtype": "float16", "loss_scale": 1.0},
    "bf16-pure": {"dtype": "bfloat16", "loss_scale": 1.0},
}
ABOUT = {
    "O2": "Apex's O2: float16 weights with float32 masters and float32 BatchNorm.",
    "O3": "Apex's O3: everything in float16, no masters, no loss scale.",
    "fp16-pure": "Weights, gradients and optimizer state in float16; small updates are lost.",
    "bf16-pure": "Weights, gradients and optimizer state in bfloat16; small updates are lost.",
}
SHARDED = True
"""Under O2 a shard is its own float32 master and is gathered in half; in the pure modes shards are half."""


MIXED = ("same dtype", "should be the same", "scalar type")
"""Of torch's words for operands of two dtypes."""


class Settings(PrecisionOptions):
    """Nothing beyond the common settings."""


class HalfInputs(Mixin, nn.Module):
    """Mixed in front of a network's class: inputs go in as half, outputs come back as float32."""

    is_outermost = True
    half_input_dtype: torch.dtype
    half_has_entries: bool
    half_is_running = False
    """Whether the network was entered already: its calls of itself are not cast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Cast floating inputs down, run, cast floating outputs up."""
        if self.half_is_running:
            return super().forward(*args, **kwargs)
        return run_in_half(self, super().forward, args, kwargs)


def run_in_half(network: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a bound method of a `HalfInputs` from outside of the network."""
    down_args, down_kwargs = cast_floating((args, kwargs), network.half_input_dtype)
    network.half_is_running = network.half_has_entries
    try:
        return cast_floating(function(*down_args, **down_kwargs), torch.float32)
    except RuntimeError as error:
        if (reason := mixed_dtypes(network, error)) is not None:
            raise ConfigError(reason) from error
        raise
    finally:
        network.half_is_running = False


def mixed_dtypes(network: nn.Module, error: RuntimeError) -> str | None:
    """Return the advice if a weight kept in float32 met half outside its module; None for another
    failure.
    """
    said = str(error).split("\n")[0]
    kept = [
        name
        for name, module in network.named_modules()
        if name and isinstance(module, Float32Module)
    ]
    if not kept or not any(words in said for words in MIXED):
        return None
    named = ", ".join(kept[:4]) + ", ..." * (len(kept) > 4)
    return (
        f"precision.keep_fp32: {named} of {type(network).__name__} stay in float32, and the network computes with such "
        f"a weight or output in half elsewhere, as a head with an embedding's weight does ({said}). Keep the module "
        f'that uses it in float32 too ("*" keeps all), or cast there: weight.to(hidden.dtype)'
    )


def cast_inputs(network: Any, dtype: torch.dtype) -> None:
    """Cast a network's inputs and outputs, of forward or of another public method."""
    entries = {name: half_entry(function) for name, function in own_methods(type(network)).items()}
    mix_in(network, HalfInputs, entries)
    network.half_has_entries = bool(entries)
    network.half_input_dtype = dtype


def half_entry(function: FunctionType) -> Callable[..., Any]:
    """Return a method that casts as forward does, but for calls from inside of the network.

    Their origin distinguishes those, and, when a checkpoint repeats one during backward, by inputs in half.
    """

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {
            a.dtype
            for a in (*args, *kwargs.values())
            if isinstance(a, Tensor) and a.is_floating_point()
        }
        if self.half_is_running or given == {self.half_input_dtype}:
            return function(self, *args, **kwargs)
        return run_in_half(self, functools.partial(function, self), args, kwargs)

    return run


class HalfWeights(Policy):
    """Half weights, with float32 masters if `keeps_masters`."""

    casts_back = True

    def __init__(
        self,
        name: str,
        settings: PrecisionOptions,
        device: torch.device,
        dtype: torch.dtype,
        reason: str,
    ) -> None:
        super().__init__(name, settings, device, dtype, reason)
        self.keeps_masters = name == "O2"
        self.numerics = replace(self.numerics, rounds_weights=not self.keeps_masters)
        self.masters: dict[Tensor, nn.Parameter] = {}
        self._twins: dict[nn.Parameter, nn.Parameter] = {}
        self._originals: dict[nn.Module, dict[str, Tensor]] = {}

    def convert(self, networks: Mapping[str, nn.Module]) -> None:
        """Cast weights without masters on the CPU: in float32 they would take twice their room on the device.

        Which networks are trained is known only in `prepare`, which makes the others float32 again.
        """
        if self.keeps_masters:
            return
        names = {id(module): name for name, module in named_modules(networks)}
        kept = {
            parameter
            for net in networks.values()
            for module in net.modules()
            if any(fnmatchcase(names[id(module)], glob) for glob in self.settings.keep_fp32)
            for parameter in module.parameters()
        }
        twins: dict[Tensor, nn.Parameter] = {}
        for network in networks.values():
            self._originals[network] = dict(network.named_parameters(remove_duplicate=False))
            for module in network.modules():
                for name, parameter in module._parameters.items():
                    if (
                        parameter is not None
                        and parameter.dtype == torch.float32
                        and parameter not in kept
                    ):
                        if parameter not in twins:
                            half = parameter.detach().to(self.numerics.dtype)
                            twins[parameter] = nn.Parameter(
                                half, requires_grad=parameter.requires_grad
                            )
                        module._parameters[name] = twins[parameter]

    def _restore_untrained(self, task: Task) -> None:
        """Return untrained tensors to float32: averages, which would not move in half, and frozen networks."""
        trained = {p for module in task.trainable.values() for p in module.parameters()}
        full_of: dict[Tensor, nn.Parameter] = {}
        for network in task.modules.values():
            originals = self._originals.get(network, {})
            for name, half in list(network.named_parameters(remove_duplicate=False)):
                original = originals.get(name)
                if (
                    half in trained
                    or half.dtype != self.numerics.dtype
                    or (original is not None and original.dtype == half.dtype)
                ):
                    continue
                if half not in full_of:
                    full_of[half] = nn.Parameter(
                        half.detach().float(), requires_grad=half.requires_grad
                    )
                    if original is not None and not original.is_meta:
                        full_of[half].detach().copy_(original)
                owner, _, key = name.rpartition(".")
                network.get_submodule(owner)._parameters[key] = full_of[half]
        self._originals.clear()

    def prepare(self, task: Task, *, is_sharded: bool = False) -> None:
        """Keep masters, cast the trainable networks and the inputs and outputs of each."""
        self._restore_untrained(task)
        super().prepare(task, is_sharded=is_sharded)
        self._widen_owners(task)
        for module in task.trainable.values():
            self._cast(module, is_sharded)
            # A ModuleDict is networks trained together; it has no forward, so its members get the casts.
            for network in module.values() if isinstance(module, nn.ModuleDict) else [module]:
                cast_inputs(network, self.numerics.dtype)
        # its keys are the float32 weights: without masters, nothing else may keep them alive
        self._twins.clear()

    def _stays_float32(self, module: nn.Module) -> bool:
        return isinstance(module, Float32Module) or (
            self.keeps_masters and isinstance(module, _BatchNorm) and bool(module.affine)
        )

    def _widen_owners(self, task: Task) -> None:
        """Keep in float32 the modules that own a weight of a module which stays float32."""
        modules = [module for network in task.trainable.values() for module in network.modules()]
        while True:
            kept = {
                p for module in modules if self._stays_float32(module) for p in module.parameters()
            }
            inside = {
                m for module in modules if self._stays_float32(module) for m in module.modules()
            }
            sharing = [
                m
                for m in modules
                if m not in inside and not kept.isdisjoint(m._parameters.values())
            ]
            if not sharing:
                return
            for module in sharing:
                keep_in_float32(module, self.device.type, self.casts_back, self.numerics.dtype)

    def _cast(self, module: nn.Module, is_sharded: bool) -> None:
        """Cast the floating state of a module and its children to half, except BatchNorm and modules that stay
        float32."""
        if self._stays_float32(module):
            return
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == torch.float32:
                if self.keeps_masters and is_sharded:
                    self.masters[parameter] = parameter  # each shard is its own master
                    continue
                half = self._half_of(parameter)
                module._parameters[name] = half
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype == torch.float32:
                module._buffers[name] = buffer.to(self.numerics.dtype)
        for child in module.children():
            self._cast(child, is_sharded)

    def _half_of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the half twin of a float32 parameter; tied weights share one twin."""
        if parameter not in self._twins:
            half = nn.Parameter(
                parameter.detach().to(self.numerics.dtype), requires_grad=parameter.requires_grad
            )
            self._twins[parameter] = half
            # frozen parameters are never added to
            if self.keeps_masters and parameter.requires_grad:
                self.masters[half] = parameter
                half.grad_dtype = torch.float32
        return self._twins[parameter]

    def collect_gradients(self, phase: Phase) -> None:
        """Move the half weights' gradients, which are float32, to their masters."""
        for half in phase.module.parameters():
            master = self.masters.get(half)
            if master is not None and master is not half:
                master.grad, half.grad = half.grad, None

    @torch.no_grad()
    def publish_weights(self, phase: Phase) -> None:
        """Refresh the half weights from their masters."""
        pairs = [(p, self.masters[p]) for p in phase.module.parameters() if p in self.masters]
        if pairs:
            torch._foreach_copy_([half for half, _ in pairs], [master for _, master in pairs])


def build(name: str, settings: Settings, device: torch.device) -> Policy:
    """Build the mode; `dtype: auto` is resolved for the device."""
    dtype, reason = choose_dtype(settings, device, NAMES[name].get("dtype"))
    kept = "float32 master weights and BatchNorm" if name == "O2" else "no master weights"
    return HalfWeights(name, settings, device, dtype, f"{reason}; weights in half, {kept}")
