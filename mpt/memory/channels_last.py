"""Store images and convolution weights with their channels last (NHWC).

Tensor cores read that order, so half-precision convolutions run without transposing copies, which cost time and
workspace. Shapes and state-dict keys stay. Other kernels add in another order: results differ in the last bits.
Dropout draws its mask in the order of memory, so other elements are dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpt.config.options import Options
from mpt.seams import MemoryTrick, Precision, Task

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Settings(Options):
    """Nothing to set."""


class ChannelsLast(MemoryTrick):
    """Reorders the weights; convolutions then produce channels-last activations by themselves."""

    name, exact = "channels_last", False

    def apply(self, task: Task, precision: Precision) -> None:
        """Reorder every weight of four or five dimensions, shared ones once."""
        reordered: dict[Tensor, nn.Parameter] = {}
        for root in task.modules.values():
            for module in root.modules():
                for name, parameter in module._parameters.items():
                    if parameter is not None and parameter.dim() in FORMATS:
                        module._parameters[name] = _reorder(parameter, reordered)


def _reorder(parameter: nn.Parameter, reordered: dict[Tensor, nn.Parameter]) -> nn.Parameter:
    if parameter not in reordered:
        # `Module.to(memory_format=...)` refuses fake tensors, so the parameter is made anew; optimizers come later.
        data = parameter.detach().contiguous(memory_format=FORMATS[parameter.dim()])
        reordered[parameter] = nn.Parameter(data, parameter.requires_grad)
    return reordered[parameter]


def build(settings: Settings) -> ChannelsLast:
    """Build the trick."""
    return ChannelsLast()
