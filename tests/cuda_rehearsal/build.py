"""Builds the pretend device's extension with the installed torch's headers, once, and finds it again.

The compiler is called as `torch.utils.cpp_extension` calls it (its include and library folders, its C++ ABI), but
without ninja, which not every machine has, and for all files as one, which reads torch's headers once. What was built
is kept in a folder named after everything that went into it: the sources, torch, Python, the compiler.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

from tests.cuda_rehearsal.cards import VARIABLE

HERE = Path(__file__).parent
SOURCES = ("device.cpp", "host.cpp", "kernels.cpp", "module.cpp", "order.cpp", "rules.cpp")
HEADERS = ("device.h", "order.h", "rules.h")
NAMES = {"cuda": "pretend_cuda", "xpu": "pretend_xpu"}
"""Kind of device -> the extension's name."""


class CannotBuild(RuntimeError):
    """There is no compiler, or no headers to compile with."""


class HasCuda(CannotBuild):
    """This torch has CUDA of its own, beside which there is no place for a pretended one."""


def check() -> None:
    """Raise HasCuda or CannotBuild, which say why no rehearsal can run here."""
    import torch

    if torch.version.cuda is not None and not os.environ.get(VARIABLE):
        raise HasCuda(
            f"rehearsals need torch's CPU build, and {torch.__version__} has CUDA of its own"
        )
    compiler()


def compiler() -> str:
    """Return the C++ compiler. Raises CannotBuild, which says what is missing."""
    found = (
        shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")
    )
    if found is None:
        raise CannotBuild("the pretend CUDA device needs a C++ compiler (g++), and there is none")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise CannotBuild(
            f"the pretend CUDA device needs Python's headers, and there is no {header}"
        )
    return found


def load(kind: str = "cuda") -> ModuleType:
    """Build what is not built yet and import it; torch must be imported before."""
    library = build(kind)
    found = importlib.util.spec_from_file_location(NAMES[kind], library)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def build(kind: str) -> Path:
    """Return the extension's file for a kind of device, built if there is none; two processes do not build it twice."""
    import torch

    cxx = compiler()
    texts = [(HERE / name).read_bytes() for name in ("build.py", *HEADERS, *SOURCES)]
    key = hashlib.sha256(
        b"\0".join(
            [kind.encode(), *texts, torch.__version__.encode(), sys.version.encode(), cxx.encode()]
        )
    )
    folder = cache_folder() / key.hexdigest()[:16]
    library = folder / f"{NAMES[kind]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            compile_into(library, cxx, kind)
    return library


def cache_folder() -> Path:
    """Return where extensions are kept: `MPT_REHEARSAL_CACHE`, or a folder of this user's among temporary files."""
    named = os.environ.get("MPT_REHEARSAL_CACHE")
    return (
        Path(named) if named else Path(tempfile.gettempdir()) / f"mpt-cuda-rehearsal-{os.getuid()}"
    )


def compile_into(library: Path, cxx: str, kind: str) -> None:
    """Compile the sources as one, in half of the processor's time that each on its own takes, and link them."""
    import torch
    from torch.utils import cpp_extension

    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAMES[kind]}"]
    flags += ["-DREHEARSE_XPU"] if kind == "xpu" else []
    # as torch's wheels: structures of its headers have further members without it
    flags += ["-DNDEBUG"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [
        f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])
    ]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    libraries += ["-lc10", "-ltorch_cpu", "-ltorch_python"]
    unfinished = library.with_suffix(".unfinished")
    together = "".join(f'#include "{HERE / name}"\n' for name in SOURCES)
    command = [cxx, *flags, "-x", "c++", "-", "-o", str(unfinished), *libraries]
    done = subprocess.run(command, input=together, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"it does not compile with torch {torch.__version__}:\n{done.stderr[-4000:]}"
        )
    unfinished.rename(library)
