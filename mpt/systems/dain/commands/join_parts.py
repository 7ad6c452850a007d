"""Make a file to start DAIN from out of a pretrained flow network and a pretrained depth network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class Command:
    """Make a file to start DAIN from out of pretrained parts.

    Published training starts from PWC-Net's flow and MegaDepth's depth. Train with model.weights=OUT afterwards.

    Examples:
      mpt dain join-parts parts.safetensors --flow pwc_net.pth.tar
    """

    output: Annotated[Path, typer.Argument(metavar="OUT", show_default=False)]
    """The .safetensors file to write."""
    flow: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """PWC-Net's weights (pwc_net.pth.tar)."""
    depth: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    """MegaDepth's weights (best_generalization_net_G.pth)."""


def run(command: Command) -> None:
    """Join as the arguments say."""
    from mpt.systems.dain.nn.weights.published_weights import join_parts

    join_parts(command.output, command.flow, command.depth)
