"""Flex attention on the fake device, which torch's own function refuses.

Compiled, it is one kernel that keeps its output and a float32 logarithm for each query, and no scores, as flash
attention does: it is planned as that, all blocks of its mask computed. Gradients of tensors that a score's function
reads (a learned bias) are not. Called without `torch.compile` it makes all scores, several times over, and is refused.

In a process that plans and does nothing else, the change of torch's module is for good.
"""

from __future__ import annotations

import sys
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor

from mpt.planner.device.fake_device import DEVICE
from mpt.planner.trace.cannot_plan import CannotPlan, line_of

NAME = "torch.nn.attention.flex_attention"
COMPILER = "torch._dynamo.eval_frame"
EAGER = (
    "cannot plan: flex_attention without torch.compile makes all scores, which is not followed; call "
    "torch.compile(flex_attention), or compile the network"
)


def follow_flex_attention(module: ModuleType | None = None) -> None:
    """Let flex attention be planned, if it is imported."""
    module = module or sys.modules.get(NAME)
    if module is None or getattr(module, "is_followed", False):
        return
    of_torch, check = module.flex_attention_hop, module._validate_device

    def attend(query: Tensor, key: Tensor, value: Tensor, *others: Any, **named: Any) -> Any:
        if query.device.type != DEVICE:
            return of_torch(query, key, value, *others, **named)
        if not is_compiled(sys._getframe()):
            raise CannotPlan(f"{EAGER}, at {line_of(sys._getframe())}")
        scale = others[2] if len(others) > 2 else named.get("scale")
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output, logarithms, *_ = flash(query, key, value, 0.0, False, False, scale=scale)
        return output, logarithms, query.new_empty(0)

    def validate(query: Tensor, *others: Tensor) -> None:
        if query.device.type != DEVICE:
            check(query, *others)

    changed = {
        "flex_attention_hop": attend,
        "_validate_device": validate,
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
        "is_followed": True,
    }
    vars(module).update(changed)


def is_compiled(frame: FrameType | None) -> bool:
    """Return whether a frame runs inside something that the script compiled."""
    while frame is not None:
        if frame.f_globals.get("__name__") == COMPILER:
            return True
        frame = frame.f_back
    return False
