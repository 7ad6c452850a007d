"""The detector of the published throughputs: its maps and boxes are the paper's, and it is planned as a classifier."""

from __future__ import annotations

import torch

from scripts.plans.ssd300 import BOXES, Ssd300


def test_six_maps_give_the_papers_boxes_and_a_logit_for_each_class_of_the_data() -> None:
    with torch.device("meta"):
        network = Ssd300(1000)
        images = torch.zeros(2, 3, 300, 300)
        sides = []
        for block in (network.backbone, *network.further):
            block.register_forward_hook(
                lambda module, inputs, output: sides.append(output.shape[-1])
            )
        logits = network(images)
    assert logits.shape == (2, 1000)
    assert sides == [38, 19, 10, 5, 3, 1]
    assert sum(boxes * side**2 for boxes, side in zip(BOXES, sides, strict=True)) == 8732
