"""`nvidia-smi` on a machine without a card: scripts write its answer to their log, or choose a card by it.

It is a program of a folder that is searched first, so that it is found however it is started. It knows the card that is
planned for, which is empty: a table, `--query-gpu` with numbers that are 0 but for the memory, and the memory of `-q`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.kept_apart import prefix

NAME = "nvidia-smi"
PROGRAM = """#!/bin/sh
unit=" MiB"
for word in "$@"; do
  case "$word" in *nounits*) unit="" ;; esac
done
for word in "$@"; do
  case "$word" in
    --query-gpu=*)
      line=""
      for field in $(echo "${{word#*=}}" | tr , " "); do
        case "$field" in
          name|gpu_name) value="{name}" ;;
          memory.total|memory.free) value="{mebibytes}$unit" ;;
          memory.*) value="0$unit" ;;
          *) value=0 ;;
        esac
        line="$line${{line:+, }}$value"
      done
      echo "$line"
      exit 0 ;;
    --query-*) exit 0 ;;
    -L) echo "GPU 0: {name}"; exit 0 ;;
    -q)
      printf "GPU 00000000:01:00.0\\n    FB Memory Usage\\n        Total : {mebibytes} MiB\\n"
      printf "        Reserved : 0 MiB\\n        Used : 0 MiB\\n        Free : {mebibytes} MiB\\n"
      exit 0 ;;
  esac
done
echo "| 0  {name}  |  0MiB / {mebibytes}MiB |  0% |"
"""


@contextmanager
def driver_asked(gpu: Gpu) -> Iterator[None]:
    """Let `nvidia-smi` be started inside the block where there is none."""
    if os.name != "posix" or shutil.which(NAME):
        yield
        return
    with tempfile.TemporaryDirectory(prefix=prefix()) as folder:
        program = Path(folder, NAME)
        program.write_text(PROGRAM.format(name=gpu.name, mebibytes=gpu.usable_bytes >> 20), "utf-8")
        program.chmod(0o755)
        before = os.environ.get("PATH", os.defpath)
        os.environ["PATH"] = os.pathsep.join([folder, before])
        try:
            yield
        finally:
            os.environ["PATH"] = before
