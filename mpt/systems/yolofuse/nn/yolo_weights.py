"""Start a detector from published weights, tensor by tensor, by their names.

Published YOLO files (`yolov8n.pt`) hold a pickled model, which would run code if it were unpickled. It is not: the
tensors are read by name from the file's description (`mpt.run.weights_file`), without the publisher's package, and any
file that is not just a tree of modules is refused. Whoever would rather have a plain state dict writes one where that
package is:

    python -c "import sys; from ultralytics import YOLO; from safetensors.torch import save_file; \\
        save_file({k: v.contiguous() for k, v in YOLO(sys.argv[1]).model.float().state_dict().items()}, sys.argv[2])" \\
        yolov8n.pt yolov8n.safetensors

A file of the same network is loaded by name like any other. A one-camera YOLO file starts a fusion: its backbone, layer
by layer, goes into both branches as far as shapes agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

NUMBERED = re.compile(r"^(?:net\.|model\.)*(\d+)\.(.+)$")
LEAST_OF_OWN = 0.5
"""Share of the network's tensors from which on a file is taken for one of the same network."""


def translate(net: nn.Module, branches: list[list[int]], tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return what a one-camera backbone gives to each branch, its layer n to the branch's n-th, by our names.

    None where there is nothing to translate: the file is of this network already, or of no YOLO.
    """
    own = net.state_dict()
    by_layer: dict[int, dict[str, Tensor]] = {}
    fitting = 0
    for name, tensor in tensors.items():
        match = NUMBERED.match(name)
        if match:
            by_layer.setdefault(int(match[1]), {})[match[2]] = tensor
            mine = own.get(f"model.{match[1]}.{match[2]}")
            fitting += mine is not None and mine.shape == tensor.shape
    if len(branches) < 2 or not by_layer or fitting >= LEAST_OF_OWN * len(own):
        return None
    renamed = {
        f"model.{layer}.{rest}": tensor
        for branch in branches
        for position, layer in enumerate(branch)
        for rest, tensor in by_layer.get(position, {}).items()
    }
    return {name: tensor for name, tensor in renamed.items() if name in own and own[name].shape == tensor.shape}
