"""Which device a run is built on."""

import pytest
import torch

from mpt.engine.building.devices import choose_device
from mpt.engine.step.built_parts import refuse_lazy
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


def test_a_gpu_of_a_number_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"found 'cuda:2'; torch sees 2 CUDA device\(s\), from cuda:0") as caught:
        choose_device("cuda:2")
    assert caught.value.exit_code == 2


def test_a_gpu_of_a_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device("cuda") == torch.device("cuda")
    assert not current
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert current == [torch.device("cuda:1")]


def test_layers_without_a_size_are_named():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"model mine: net\.2 is a LazyLinear"):
        refuse_lazy("mine", {"net": net})
    net(torch.zeros(1, 1, 4, 4))
    refuse_lazy("mine", {"net": net})
