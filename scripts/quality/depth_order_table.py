"""What half precision does to the order of depth in a trained run of DAIN: a table of docs/benchmarks/dain.md.

`python scripts/quality/depth_order_table.py RUN` writes it, in seconds on a CPU; RUN is `mpt train @dain_demo`. Pairs
of pixels are drawn in the first frame of each test triplet of the drawn data set; the projection gives the nearer
surface more weight, so a pair that is reversed changes which one is in front, and a tie gives both the same weight.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.config.checking.precision_names import FLOAT32
from mpt.engine.state.evaluation import inferring
from mpt.inference.half import rebuild, rebuild_half
from mpt.inference.trained import open_trained
from mpt.seams import Run
from mpt.systems.dain.commands.interpolate import network_of
from mpt.systems.dain.data.procedural_triplets import DrawnTriplets, Settings
from mpt.systems.dain.metrics.shared.depth_order import order_kept
from mpt.systems.dain.nn.dain import Dain
from scripts.command_line import described
from scripts.provenance import made
from scripts.quality.generative_table import ROOT, write_between

DOCUMENT = ROOT / "docs" / "benchmarks" / "dain.md"
MARKER = "table:depth-order"
SIDE = 64
HALVES = ("bfloat16", "float16")


def depths_of(run: Run, frames: Tensor) -> Tensor:
    """Return the log depth (b, 1, h, w) of frames."""
    net = network_of(run)
    assert isinstance(net, Dain), "the run is not DAIN's"
    with inferring(run):
        return net.depth_of(frames.to(run.device)).cpu()


def shares(exact: Tensor, other: Tensor) -> list[Tensor]:
    """Return the shares of pairs kept, reversed and tied, for each picture."""
    kept, turned = (
        torch.tensor([order_kept(one, sign * two) for one, two in zip(exact, other, strict=True)])
        for sign in (1, -1)
    )
    return [kept, turned, 1 - kept - turned]


def main() -> None:
    """Write the table."""
    parser = described(__doc__)
    parser.add_argument("run")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    trained = open_trained(arguments.run, arguments.runs, "cpu")
    drawn = DrawnTriplets(Settings(depth_order=True), SIDE, is_test=True).drawn
    frames, nearness = drawn.frames[0.0].float() / 255, drawn.order[:, :1]
    exact = depths_of(rebuild(trained, FLOAT32), frames)
    depths = {
        "float32": exact,
        **{name: depths_of(rebuild_half(trained, name), frames) for name in HALVES},
    }
    spread = float(exact.std((1, 2, 3)).mean())
    lines = [
        f"`python scripts/quality/depth_order_table.py {arguments.run}`, {made()}, CPU, torch {torch.__version__}: "
        f"{len(frames)} frames; the standard deviation of the log depth in a frame is {spread:.3g}.",
        "",
        "| Precision | Order of float32 kept, % of pairs | Least in a frame | Reversed | Tied | In the true order |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, depth in depths.items():
        kept, turned, tied = shares(exact, depth)
        true = shares(-nearness.int(), depth)[0].mean()
        cells = (kept.mean(), kept.min(), turned.mean(), tied.mean(), true)
        lines.append(f"| {name} | {' | '.join(f'{100 * float(cell):.2f}' for cell in cells)} |")
    write_between(DOCUMENT, MARKER, lines)


if __name__ == "__main__":
    main()
