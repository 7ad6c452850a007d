"""Runs at the start of every Python process of a rehearsal: gives torch the pretend CUDA as soon as it is imported."""

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder


class AfterTorch(MetaPathFinder):
    """Finds torch as others would, and installs the pretend device after it has been executed."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = Installing(spec.loader)
        return spec


class Installing(Loader):
    """Executes a module by another loader and then installs the device."""

    def __init__(self, loader):
        self.loader = loader

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        from tests.cuda_rehearsal.cards import Machine
        from tests.cuda_rehearsal.torch_cuda import install

        machine = Machine.from_environment()
        if machine is not None:
            install(machine)


if os.environ.get("MPT_REHEARSAL"):
    sys.meta_path.insert(0, AfterTorch())
