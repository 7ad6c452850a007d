"""BatchNorm over the samples of all processes (`parallel.sync_batchnorm`).

torch's own `SyncBatchNorm` works on GPUs only and copies the module. Here a class is put in front of the module's own,
so that state-dict keys, hooks and the wrappers of memory tricks and precision modes stay. Mean and variance are
computed in float32 from two sums over the processes, the second around the common mean; in backward the sums' gradients
are summed likewise. Every process must take part in each forward, so all must split their samples alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpt.nn.shared.mixin import Mixin, mix_in


class Sum(torch.autograd.Function):
    """The sum of a tensor over the processes; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        """Return the sum."""
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the sum of the gradients."""
        return add_up(gradients[0], ctx.group), None


def add_up(value: Tensor, group: Any) -> Tensor:
    """Return the sum over the processes."""
    total: Tensor = Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return total


class Synchronised(Mixin, nn.Module):
    """Put in front of a BatchNorm's class."""

    norm_group: Any

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the statistics of all processes' samples while training, else as ever."""
        assert isinstance(self, _BatchNorm)
        if not self.training:
            result: Tensor = super().forward(input)
            return result
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(input.dim())]
        wide = input.float()
        number = torch.full((1,), float(wide.numel() // wide.shape[1]), device=wide.device)
        sums = add_up(torch.cat([wide.sum(dims), number]), self.norm_group)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = wide - mean.view(shape)
        squares = add_up(centred.square().sum(dims), self.norm_group)
        variance = squares / count
        self._follow(mean.detach(), variance.detach() * (count / (count - 1).clamp_min(1)))
        result = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            result = result * self.weight.float().view(shape) + self.bias.float().view(shape)
        return result.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics."""
        assert isinstance(self, _BatchNorm)
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)


def synchronise(networks: Iterable[nn.Module]) -> int:
    """Let every BatchNorm of some networks see all processes' samples; return how many there are."""
    group = dist.new_group()
    count = 0
    for network in networks:
        for module in network.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, Synchronised):
                mix_in(module, Synchronised)
                module.norm_group = group
                count += 1
    return count
