"""Libraries that a factory imports while it runs, imported as at any other time.

`import diffusers` inside a function is executed in the middle of a plan, whose modes make each tensor fake and whose
`torch.cuda` says that there is a card. What a library makes and looks at while it is imported is no part of the step,
and with a card it asks for functions of torch that a build without CUDA does not have (bitsandbytes, which diffusers
imports). So both are as they are without a plan, and as for imports at the top of a script. A script's own modules stay
in the plan, since they may build networks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mpt.planner.device.fake_device import DEVICE
from mpt.planner.own.stand_ins import files, flex, quantized
from mpt.planner.trace.cannot_plan import INSTALLED

ASKED = ("is_available", "device_count")
"""Functions of `torch.cuda` and `torch.accelerator` by which libraries decide on import."""


def let_scale(module: ModuleType) -> None:
    """Let Accelerate train in float16 on the fake device: it has a list of the kinds of devices that can."""

    def longer(constant: Any) -> Any:
        is_list = isinstance(constant, tuple) and {"cuda", "xpu"} <= {*constant}
        return (*constant, DEVICE) if is_list and DEVICE not in constant else constant

    start = module.Accelerator.__init__
    start.__code__ = start.__code__.replace(co_consts=tuple(map(longer, start.__code__.co_consts)))


def let_skip_masks(module: ModuleType) -> None:
    """Let transformers look at positions: for fake tensors, as for graphs, it makes masks that no run has."""
    module.is_fake_tensor = lambda tensor: False  # type: ignore[attr-defined]


CHANGED = {
    "accelerate.accelerator": let_scale,
    "transformers.utils.import_utils": let_skip_masks,
    quantized.FUNCTIONS: quantized.let_page,
}
"""Module -> function that changes it for good: the planning process is one of its own."""
OF_TORCH = {flex.NAME: flex.follow_flex_attention, files.SHARDED: files.save_no_shards}
"""The same of torch's own modules."""


def is_torch(name: str) -> bool:
    """Return whether a module is torch's own, which taking modes away imports too."""
    return name == "torch" or name.startswith("torch.")


@contextmanager
def libraries_as_ever() -> Iterator[None]:
    """Execute installed modules that are imported inside the block without modes, and with torch's own answers.

    To be entered before `torch.cuda` is stood in for.
    """
    execute = SourceFileLoader.exec_module
    asked = (torch.cuda, torch.accelerator)
    answers: list[tuple[Any, dict[str, Any]]] = [
        (one, {name: getattr(one, name) for name in ASKED}) for one in asked
    ]
    answers.append((torch.version, {"cuda": torch.version.cuda}))

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        if is_torch(module.__name__) or not any(folder in str(self.path) for folder in INSTALLED):
            execute(self, module)
            if module.__name__ in OF_TORCH:
                OF_TORCH[module.__name__](module)
            return
        with ExitStack() as stack:
            for one, own in answers:
                stack.enter_context(mock.patch.multiple(one, **own))
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch._C.DisableTorchFunction())
            execute(self, module)
        if module.__name__ in CHANGED:
            CHANGED[module.__name__](module)

    for name, change in (CHANGED | OF_TORCH).items():
        if name in sys.modules:
            change(sys.modules[name])
    with mock.patch.object(SourceFileLoader, "exec_module", exec_module):
        yield
