"""A small set of plugins of every kind, so that these tests do not change when the package's own plugins do."""

import pytest

from mpt.config.finding.registry import SUBPACKAGES, Registry

FILES = {
    "nn/net.py": '''
"""A small network."""
from __future__ import annotations
import nonexistent_heavy_package
from typing import Literal
from pydantic import Field
from mpt.config.options import Options

TASK = "sort"
Kind = Literal["round", "square"]

class Settings(Options):
    image_size: int = 32
    channels: int = 1
    width: int = Field(8, ge=1)
    """How wide it is."""
    kind: Kind = "round"
''',
    "nn/external.py": '''
"""Models of other packages."""
from mpt.config.options import Options
TASK = "sort"
class Settings(Options):
    options: dict[str, int] = {}
''',
    "nn/shared_parts.py": "import nonexistent_heavy_package\n",
    "tasks/sort.py": '''
"""Sorts."""
from mpt.config.options import Options
class Settings(Options):
    smoothing: float = 0.0
''',
    "data/digits.py": '''
"""Digits."""
from mpt.config.options import DatasetOptions
class Settings(DatasetOptions):
    path: str | None = None
''',
    "precision/modes.py": '''
"""Three modes."""
from mpt.config.options import PrecisionOptions
NAMES = {"fp32": {}, "amp": {}, "bf16": {"dtype": "bfloat16"}, "O1": {}}
class Settings(PrecisionOptions):
    pass
''',
    "memory/micro_batch.py": '''
"""Splits the batch."""
from typing import ClassVar
from pydantic import Field
from mpt.config.options import Options
class Settings(Options):
    shorthand: ClassVar[str | None] = "count"
    count: int = Field(2, gt=0)
    order: str = "as_read"
''',
    "memory/recompute.py": '''
"""Computes again."""
from mpt.config.options import Options
CONFLICTS = {"offload": "both would keep the same tensors; use one"}
class Settings(Options):
    pass
''',
    "memory/offload.py": '''
"""Moves away."""
from mpt.config.options import Options
class Settings(Options):
    pin: bool = True
''',
    "memory/zeroing.py": '''
"""Fills with zeros."""
from typing import ClassVar
from mpt.config.options import Options
class Settings(Options):
    shorthand: ClassVar[str | None] = "enabled"
    enabled: bool = True
''',
    "optim/adam.py": '''
"""Adam."""
from mpt.config.options import OptimizerOptions
class Settings(OptimizerOptions):
    betas: tuple[float, float] = (0.9, 0.999)
''',
}


@pytest.fixture(scope="session")
def registry(tmp_path_factory):
    folder = tmp_path_factory.mktemp("subpackages")
    for subpackage in SUBPACKAGES:
        (folder / subpackage).mkdir()
        (folder / subpackage / "__init__.py").write_text("")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return Registry(folder, "subpackages")
