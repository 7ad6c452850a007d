"""Results of inference, off the device, so that the results of many batches do not fill a GPU."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from mpt.seams import Inference


def on_host(made: Inference) -> Inference:
    """Return an inference with its tensors on the CPU."""

    def host(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.cpu()

    return replace(
        made,
        tiles=host(made.tiles),
        outputs=host(made.outputs),
        scores=host(made.scores),
        figures={name: picture.cpu() for name, picture in made.figures.items()},
    )


def samples_in(result: Inference) -> int:
    """Return how many samples were made."""
    one = result.outputs if result.outputs is not None else result.tiles
    return len(result.rows) if one is None else len(one)
