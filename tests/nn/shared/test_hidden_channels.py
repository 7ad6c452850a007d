"""Which channels are hidden, and that removing those that give nothing changes nothing."""

import copy

import pytest
import torch
from torch import nn

from mpt.nn.dcgan import Discriminator, Generator
from mpt.nn.shared.hidden_channels import hidden_channels, narrow, width_of
from tests.pruning import check_that_what_gives_nothing_goes

NETWORKS = {
    "generator": (lambda: Generator(32, 1, 10, 8), [torch.randn(4, 10)], [32, 16, 8]),
    "discriminator": (lambda: Discriminator(32, 1, 8), [torch.rand(4, 1, 32, 32)], [8, 16, 32]),
    "perceptron": (
        lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(9, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)
        ),
        [torch.rand(4, 1, 3, 3)],
        [16],
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_that_nothing_reads_go_without_a_change(name):
    """The second half of every group has small filters and is not read; pruning must choose just these."""
    build, given, widths = NETWORKS[name]
    torch.manual_seed(0)
    net = build().eval()
    groups = list(hidden_channels(net))
    assert [width_of(one.producer) for one in groups] == widths
    check_that_what_gives_nothing_goes(net, given)


def test_what_is_read_twice_or_mixed_stays():
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    unknown = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.PixelShuffle(2), nn.Conv2d(2, 8, 3), nn.GroupNorm(2, 8)
    )
    grouped = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 1, 3))
    computed = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8)
    )
    assert [list(hidden_channels(one)) for one in (Skip(), unknown, grouped, computed)] == [[]] * 4
    tied = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    tied[4].weight = tied[2].weight
    assert narrow(tied, 0.5) == 0  # both groups touch the tied weight
    assert tied[4].weight is tied[2].weight


def test_shapes_do_not_depend_on_values_and_frozen_weights_stay_frozen():
    with torch.device("meta"):
        planned = Generator(32, 1, 10, 8)
    real = Generator(32, 1, 10, 8)
    frozen = copy.deepcopy(real).requires_grad_(False)
    for net in (planned, real, frozen):
        narrow(net, 0.25)
    assert {k: v.shape for k, v in planned.state_dict().items()} == {
        k: v.shape for k, v in real.state_dict().items()
    }
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
