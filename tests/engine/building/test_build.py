"""Which device a run is built on."""

import pytest
import torch

from mpt.engine.building.devices import choose_device
from mpt.engine.step.built_parts import refuse_lazy
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


def have(monkeypatch: pytest.MonkeyPatch, kind: str | None, count: int = 2) -> None:
    """Let torch have an accelerator of a kind."""
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "chosen"),
    [("cuda", "cuda"), ("xpu", "xpu"), ("hpu", "hpu"), ("mps", "cpu"), (None, "cpu")],
)
def test_auto_takes_the_accelerator_that_torch_has_but_for_apples(
    kind: str | None, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, kind)
    assert choose_device("auto") == torch.device(chosen)
    assert choose_device(chosen) == torch.device(chosen)


@pytest.mark.parametrize(
    ("kind", "wanted", "words"),
    [
        (
            None,
            "cuda",
            "cuda is asked for, but torch sees no CUDA device; use --device cpu, or see `mpt doctor`",
        ),
        (
            "xpu",
            "cuda:0",
            "cuda is asked for, but torch sees no CUDA device; torch's accelerator here is xpu",
        ),
        (
            "cuda",
            "xpu",
            "xpu is asked for, but torch sees no xpu device; torch's accelerator here is cuda",
        ),
        ("xpu", "xpu:2", "found 'xpu:2'; torch sees 2 xpu device(s), from xpu:0"),
    ],
)
def test_a_device_that_torch_does_not_have_is_refused(
    kind: str | None, wanted: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, kind)
    with pytest.raises(ConfigError) as caught:
        choose_device(wanted)
    assert str(caught.value) == f"device: {words}"


def test_a_gpu_of_a_number_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, "cuda")
    with pytest.raises(
        ConfigError, match=r"found 'cuda:2'; torch sees 2 CUDA device\(s\), from cuda:0"
    ) as caught:
        choose_device("cuda:2")
    assert caught.value.exit_code == 2


def test_a_gpu_of_a_number_becomes_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[int] = []
    have(monkeypatch, "cuda")
    monkeypatch.setattr(torch.accelerator, "set_device_index", current.append)
    assert choose_device("cuda") == torch.device("cuda")
    assert not current
    assert choose_device("cuda:1") == torch.device("cuda:1")
    assert current == [1]


def test_layers_without_a_size_are_named():
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Flatten(), torch.nn.LazyLinear(3))
    with pytest.raises(ConfigError, match=r"model mine: net\.2 is a LazyLinear"):
        refuse_lazy("mine", {"net": net})
    net(torch.zeros(1, 1, 4, 4))
    refuse_lazy("mine", {"net": net})
