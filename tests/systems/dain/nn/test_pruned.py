"""Pruned interpolating networks compute what the whole ones do if what went gave nothing."""

import pytest
import torch

from mpt.nn.shared.hidden_channels import hidden_channels
from mpt.systems.dain.nn.dain import Dain
from mpt.systems.dain.nn.rife import Rife
from mpt.systems.dain.nn.rife_published.versions import build_version
from tests.pruning import check_that_what_gives_nothing_goes

NETWORKS = {"rife": lambda: Rife((16, 16, 8), 3, 4), "dain": lambda: Dain("tiny")}


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_that_give_nothing_can_go_without_a_change(name):
    torch.manual_seed(0)
    frames = [torch.rand(1, 3, 64, 64), torch.rand(1, 3, 64, 64), torch.tensor([0.5])]
    check_that_what_gives_nothing_goes(NETWORKS[name]().eval(), frames)


@pytest.mark.parametrize(("version", "groups"), [("4.0", 4 * 8), ("4.25", 5), ("ifnet", 4 * 8)])
def test_published_networks_have_hidden_channels(version, groups):
    with torch.device("meta"):
        assert len(list(hidden_channels(build_version(version)))) >= groups
