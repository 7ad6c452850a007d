"""Views of zeros that have no memory, as fake tensors.

Forward-mode derivatives are zeros without memory (`torch._efficientzerotensor`) until something is added to them. Torch
takes three views of those in its own code, past every mode, so that a view of a fake tensor came out as a plain tensor
of the device "meta", and the next operator refused to meet it (Hessians under `vmap`). They are taken like others here.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

VIEWS = ("view", "as_strided", "_reshape_alias")
_libraries: list[torch.library.Library] = []  # registrations vanish with the object


def register() -> None:
    """Let modes see those views, once for the life of the process; real tensors' views are as before."""
    if _libraries:
        return
    kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.append(kernels)
    with warnings.catch_warnings():  # torch says once that a kernel is overridden
        warnings.simplefilter("ignore", UserWarning)
        for name in VIEWS:
            kernels.impl(name, torch.library.fallthrough_kernel, "ZeroTensor", allow_override=True)
