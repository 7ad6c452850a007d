import numpy as np
import pytest
import torch

from mpt.systems.deepfacelab.nn.shared.patch_discriminator import (
    PatchDiscriminator,
    TransposedConvolution,
    find_strides,
    receptive_field,
)


@pytest.mark.parametrize(
    ("strides", "reach"), [([2], 3), ([2, 2], 7), ([2, 1], 7), ([2, 2, 2], 15), ([2, 1, 2], 11)]
)
def test_receptive_fields_are_those_counted_by_hand(strides, reach):
    assert receptive_field(strides) == reach


@pytest.mark.parametrize("patch", [3, 8, 16, 32, 64, 80])
def test_the_search_finds_the_nearest_field_with_the_fewest_layers(patch):
    strides = find_strides(patch)
    assert strides[0] == 2
    reach = receptive_field(strides)
    every = [
        [2, *(1 + (code >> bit & 1) for bit in range(layers - 1))]
        for layers in range(1, 10)
        for code in range(2 ** (layers - 1))
    ]
    nearest = min(abs(receptive_field(other) - patch) for other in every)
    assert abs(reach - patch) == nearest
    rivals = [other for other in every if receptive_field(other) == reach]
    assert len(strides) == min(len(other) for other in rivals)
    assert sum(strides) == max(sum(other) for other in rivals if len(other) == len(strides))


def test_both_outputs_are_maps_of_logits():
    torch.manual_seed(0)
    discriminator = PatchDiscriminator(16, 3, 4)
    center, pixels = discriminator(torch.rand(2, 3, 64, 64))
    assert pixels.shape == (2, 1, 64, 64)
    jump = int(np.prod(find_strides(16)))
    assert center.shape == (2, 1, 64 // jump, 64 // jump)


@pytest.mark.parametrize("stride", [1, 2])
def test_transposed_convolution_is_the_gradient_of_tensorflows_same_convolution(stride):
    torch.manual_seed(0)
    layer = TransposedConvolution(2, 3, stride)
    torch.nn.init.zeros_(layer.bias)
    x = torch.rand(1, 2, 5, 5)
    side = 5 * stride
    # SAME at stride 2 and an even side pads nothing before and one after; at stride 1 one on both sides.
    before = 1 if stride == 1 else 0
    padded = np.zeros((3, side + 2, side + 2))
    weight = layer.weight.detach().numpy()
    for i in range(5):
        for j in range(5):
            window = np.einsum("c,cdkl->dkl", x[0, :, i, j].numpy(), weight)
            padded[:, i * stride : i * stride + 3, j * stride : j * stride + 3] += window
    expected = padded[:, before : before + side, before : before + side]
    np.testing.assert_allclose(layer(x)[0].detach().numpy(), expected, atol=1e-5)
