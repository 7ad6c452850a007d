"""Keep the optimizer's state and do its arithmetic in host memory.

Adam's two averages are twice the weights; here they live, with a twin of each weight, on the CPU (pinned alongside
CUDA). A step copies the gradients over, steps there, and copies the weights back, so the GPU holds weights and
gradients only. Unscaling, the overflow check and clipping happen on the device before, as in every run.

On a CPU run the result is bit-equal. On a GPU the update is done by other kernels and may differ in the last bit, hence
`exact` is false. Source: Ren et al., "ZeRO-Offload", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mpt.accelerator import copies_beside
from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.travelling.host_blocks import block_bytes
from mpt.optim.shared.averaging import AveragingOptimizer
from mpt.seams import MemoryTrick, Precision

CONFLICTS = {
    "optimizer_in_backward": "that one steps on the device during backward; use one of the two",
    "low_bit_optimizer": "8-bit states live on the device; use one of the two",
}
RELIEVES = "optimizer"
PROPOSALS = (True,)
RANK = 2


class Settings(Options):
    """Nothing to set."""


class HostOptimizer(Optimizer):
    """Looks like an optimizer over the device's parameters, and works on twins in host memory."""

    def __init__(self, inner: Optimizer) -> None:
        self.twins: dict[Tensor, Tensor] = {}
        self.versions: dict[Tensor, int] = {}
        groups = [{**group, "params": list(group["params"])} for group in inner.param_groups]
        super().__init__(groups, {})
        self.inner = inner
        for group in inner.param_groups:
            group["params"] = [self._twin(parameter) for parameter in group["params"]]
        # torch's foreach and fused choices were made for the device.
        self.state = inner.state

    def _twin(self, parameter: Tensor) -> Tensor:
        with torch.no_grad():
            twin = torch.empty_like(
                parameter, device="cpu", pin_memory=copies_beside(parameter.device)
            )
            twin.copy_(parameter)
        self.versions[parameter] = parameter._version
        self.twins[parameter] = nn.Parameter(twin)
        return self.twins[parameter]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step on the host: gradients over, weights back."""
        assert closure is None, (
            "closures re-evaluate the model on the device; no optimizer here uses one"
        )
        moved = []
        for outer, inner in zip(self.param_groups, self.inner.param_groups):
            inner.update({key: value for key, value in outer.items() if key != "params"})
            for parameter, twin in zip(outer["params"], inner["params"]):
                if parameter.grad is not None:
                    # clipped or loaded since: the device is right
                    if parameter._version != self.versions[parameter]:
                        twin.copy_(parameter, non_blocking=True)
                    twin.grad = torch.empty_like(
                        parameter.grad, device="cpu", pin_memory=copies_beside(parameter.device)
                    )
                    twin.grad.copy_(parameter.grad, non_blocking=True)
                    moved.append((parameter, twin))
        for device in {
            parameter.device for parameter, _ in moved if copies_beside(parameter.device)
        }:
            # once, for the copies of all of them
            torch.accelerator.current_stream(device).synchronize()
        self.inner.step()
        # the optimizer's counters in its groups
        for outer, inner in zip(self.param_groups, self.inner.param_groups):
            outer.update({key: value for key, value in inner.items() if key != "params"})
        for parameter, twin in moved:
            parameter.copy_(twin, non_blocking=True)
            self.versions[parameter] = parameter._version
            twin.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the inner state, which is in the form of any optimizer's."""
        state = self.inner.state_dict()
        for outer, inner in zip(self.param_groups, state["param_groups"]):
            inner.update({key: value for key, value in outer.items() if key != "params"})
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this optimizer or of a plain one. Weights are taken over at the next step, by version."""
        self.inner.load_state_dict(state_dict)
        self.state = self.inner.state
        for outer, inner in zip(self.param_groups, self.inner.param_groups):
            outer.update({key: value for key, value in inner.items() if key != "params"})


class CpuOptimizer(MemoryTrick):
    """Replaces each optimizer by one that works in host memory."""

    name, exact = "cpu_optimizer", False

    def replace_optimizer(self, optimizer: Optimizer, precision: Precision) -> Optimizer:
        """Return an optimizer that works in host memory."""
        refuse_own_steps(optimizer, precision, "memory.cpu_optimizer")
        host = HostOptimizer(optimizer)
        # and their gradients
        self.host_bytes += sum(2 * block_bytes(twin.nbytes) for twin in host.twins.values())
        return host


def refuse_own_steps(optimizer: Optimizer, precision: Precision, trick: str) -> None:
    """Raise ConfigError if something else works on the optimizer's state: bf16-sr, bf16-kahan, or evaluations."""
    if precision.numerics.lifts_state:
        raise ConfigError(
            f"{trick}: {precision.name} takes the optimizer's steps on bfloat16 state itself; leave the trick out, "
            "or use precision=bf16-pure"
        )
    if isinstance(optimizer, AveragingOptimizer):
        raise ConfigError(
            f"{trick}: evaluations read {type(optimizer).__name__}'s averages from its state on the device; "
            "leave the trick out, or use optimizer=adamw"
        )


def build(settings: Settings) -> CpuOptimizer:
    """Build the trick."""
    return CpuOptimizer()
