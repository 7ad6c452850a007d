"""The script that measures which parts of image models need float32."""

from __future__ import annotations

import pytest
import torch

from scripts.quality import diffusion_float32 as script
from tests.systems.diffusion.library import diffusers


@pytest.mark.parametrize("shape", script.SMALL)
def test_every_part_has_layers_and_all_of_them_are_exact(shape: str) -> None:
    diffusers()
    net = script.build(shape)
    for part in script.PARTS[1:5]:
        assert any(part.chooses(name, module) for name, module in net.named_modules()), part.label
    given = next(script.inputs(net))
    with script.Attention(torch.float32):
        written = script.compute(net, given, torch.float32)
    for one, other in zip(written, script.compute(net, given, torch.float32), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
