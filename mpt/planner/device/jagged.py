"""Nested tensors of the layout `torch.jagged` on fake tensors, whose rows have known lengths.

One is a tensor of all rows and one of the places at which each begins (`torch.nested._internal.nested_tensor`); its
uneven size is a number of its own kind. For fake tensors torch makes a symbol of it, which planning has none of: here
it is the number that real ones have. Modes leave a nested tensor alone, and it comes back with those inside.

Attention takes flash attention's or the memory-efficient kernel of a card, on all rows; the plain formula of a CPU
makes a nested tensor of another layout, which is not planned. The scratch of those kernels in backward is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nested._internal import nested_tensor, sdpa

from mpt.planner.device import routes
from mpt.planner.device.fake_device import DEVICE

NESTED: type = nested_tensor.NestedTensor


def prepare() -> None:
    """Make the tensor that torch keeps for views of nested ones, which must not be of a mode that ends."""
    make = getattr(nested_tensor, "_nt_view_dummy", None)
    if make is not None:
        make()
    for name, accepts in (
        ("can_use_flash_attention", _takes_flash),
        ("can_use_efficient_attention", lambda query: True),
    ):
        asked = getattr(sdpa, name, None)
        if asked is not None and not hasattr(asked, _ON_CARD):
            setattr(sdpa, name, _answered(asked, accepts))


_ON_CARD = "_answers_for_a_card"


def _answered(asked: Callable[..., bool], accepts: Callable[[Any], bool]) -> Callable[..., bool]:
    """Return torch's question whether a kernel takes tensors, answered for those of the fake card."""

    def answer(params: Any, debug: bool = False) -> bool:
        is_on_card = params.query.device.type == DEVICE
        return accepts(params.query) if is_on_card else asked(params, debug)

    setattr(answer, _ON_CARD, True)
    return answer


def _takes_flash(query: Any) -> bool:
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return is_half and routes.target.capability >= (8, 0)


def uneven_size(number: int) -> Any:
    """Return the size of the rows of the `number`-th nested tensor."""
    return torch._C._get_nested_int(number, 1)
