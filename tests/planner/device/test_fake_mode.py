"""What the shorter fake mode and the shorter question before it leave out changes no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._library import simple_registry
from torch.profiler import record_function

from mpt.planner.device import dispatch_rules
from mpt.planner.device.fake_mode import LeanFakeMode


def test_a_range_of_the_profiler_takes_none_of_torch_s_rules_for_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*arguments: Any) -> None:
        raise AssertionError("a range has no shape")

    monkeypatch.setattr(LeanFakeMode, "_cached_dispatch_impl", stop)
    with LeanFakeMode(), record_function("a step") as entered:
        assert entered.record is not None


def test_an_operator_s_rule_for_a_mode_is_found_and_others_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = simple_registry.SimpleLibraryRegistry()
    monkeypatch.setattr(simple_registry, "singleton", registry)
    monkeypatch.setattr(simple_registry, "find_torch_dispatch_rule", None)
    dispatch_rules.shorten()
    relu: Any = torch.ops.aten.relu.default
    assert simple_registry.find_torch_dispatch_rule(relu, LeanFakeMode) is None
    assert not registry._data

    def rule(*arguments: Any) -> None:
        """A rule of its own."""

    registry.find(relu.__qualname__).torch_dispatch_rules.register(LeanFakeMode, rule)
    assert simple_registry.find_torch_dispatch_rule(relu, LeanFakeMode) is rule
    assert simple_registry.find_torch_dispatch_rule(relu, int) is None
