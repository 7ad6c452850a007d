"""Settings of torch itself for a run. Imports torch only when it has set the variables that torch reads once."""

from __future__ import annotations

import os

from mpt.config.schema import Config
from mpt.memory.relieving.relief import environment

OLD_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables that torch also reads by an older name, and only if the newer one is not set."""


def prepare_torch(config: Config) -> None:
    """Make the settings that must precede torch's first allocation: deterministic kernels, threads, the allocator."""
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for name, value in environment(config.memory.plugins).items():
        # else the user's own settings would be lost
        if OLD_NAMES.get(name, name) not in os.environ:
            os.environ.setdefault(name, value)
    import torch

    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    torch.backends.cudnn.benchmark = not config.train.deterministic
    torch.backends.cudnn.deterministic = config.train.deterministic


def prepare_rank() -> None:
    """Keep torch's warnings of lost connections, with stacks of its C++, off the screen: the watch says it in a line.

    torch reads the variable when it is imported; whoever has set it is not overruled.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
