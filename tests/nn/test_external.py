"""Networks of torchvision are built for the pictures of any data set."""

import pytest
import torch

from mpt.nn.external import Settings, build
from mpt.seams import DataSpec, FieldSpec

LETTERS = DataSpec({"image": FieldSpec((1, 224, 224), torch.uint8, "image")}, 8, ("a", "b", "c"))


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        "vgg11",
        "densenet121",
        "mobilenet_v3_small",
        "vit_b_32",
        "swin_t",
        "convnext_tiny",
    ],
)
@pytest.mark.parametrize("channels", [1, 5])
def test_a_network_of_torchvision_takes_pictures_of_any_number_of_channels(
    name: str, channels: int
) -> None:
    with torch.device("meta"):
        net = build(Settings(channels=channels), LETTERS, f"torchvision:{name}")["net"].eval()
        assert net(torch.zeros(2, channels, 224, 224)).shape == (2, 3)


def test_a_network_of_other_channels_begins_like_the_published_one_elsewhere() -> None:
    torch.manual_seed(0)
    grey = build(Settings(channels=1), LETTERS, "torchvision:resnet18")["net"]
    torch.manual_seed(0)
    colour = build(Settings(), LETTERS, "torchvision:resnet18")["net"]
    differing = {
        name
        for name, weight in colour.state_dict().items()
        if not torch.equal(weight, grey.state_dict()[name])
    }
    assert differing == {"conv1.weight"}
    assert grey.conv1.weight.shape == (64, 1, 7, 7)
