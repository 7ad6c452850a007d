"""Gradients of a tensor that is used twice, which autograd adds up in place on a real device.

It does so if nothing else holds the first of them (`can_accumulate_inplace` in torch's `input_buffer.cpp`): no third
tensor of that size is made. Under a dispatch mode, as the planner's, it adds out of place, since it cannot know
the mode's treatment of it. So the planner has to see which sums are autograd's, and that nothing holds the
summand. What a run on a CPU measures is measured under such a mode too, and planned as that.

Not seen: a sum inside of one of autograd's own formulas, of a gradient that came in, is taken for one of these.
"""

from __future__ import annotations

from types import FrameType

import torch
from torch import Tensor

SUM = torch.ops.aten.add.Tensor
ENGINE = torch.autograd.graph._engine_run_backward.__code__
"""The innermost line of Python around autograd's own operators: a hook's or a part's have lines of their own."""
LAST_REFERENCE = 2
"""A storage's use count if one tensor has it: that tensor's, and that of the question."""


def node_number() -> int:
    """Return the number of the autograd node that runs or ran last, -1 outside of the engine."""
    node = torch._C._current_autograd_node()
    return -1 if node is None else int(node._sequence_nr())


def is_in_place(gradient: Tensor, other: object, caller: FrameType | None) -> bool:
    """Would autograd add `other` to this gradient in place, if these are its summands? `caller` asked for the sum."""
    if (
        caller is None
        or caller.f_code is not ENGINE
        or torch.is_grad_enabled()
        or not isinstance(other, Tensor)
    ):
        return False
    if gradient.shape != other.shape or gradient.dtype != other.dtype:
        return False
    storage = gradient.untyped_storage()
    # no part of another, and not expanded
    is_whole = storage.nbytes() == gradient.numel() * gradient.element_size()
    is_last = bool(torch._C._storage_Use_Count(storage._cdata) == LAST_REFERENCE)
    return is_whole and is_last
