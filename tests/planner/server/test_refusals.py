"""What a memory trick refuses is refused beside other tricks without being built again, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest

from mpt.config.schema import Config
from mpt.errors import ConfigError
from mpt.planner.server.refusals import Refusals
from tests.planner.configs import make

SAID = "memory.optimizer_in_backward: amp scales the loss"


def configured(precision: str = "amp", **memory: Any) -> Config:
    return make("dcgan", precision, **memory)


def is_refused(refusals: Refusals, config: Config, asked: Any = "here") -> bool:
    try:
        refusals.check(config, asked)
    except ConfigError as error:
        return str(error) == SAID
    return False


@pytest.fixture
def refusals() -> Refusals:
    found = Refusals()
    found.note(configured(optimizer_in_backward=True), "here", ConfigError(SAID))
    return found


def test_a_refused_trick_is_refused_beside_others(refusals: Refusals) -> None:
    assert is_refused(refusals, configured(optimizer_in_backward=True))
    assert is_refused(refusals, configured(optimizer_in_backward=True, recompute="all"))


def test_another_precision_other_tricks_or_another_request_are_not_refused(
    refusals: Refusals,
) -> None:
    assert not is_refused(refusals, configured("fp32", optimizer_in_backward=True))
    assert not is_refused(refusals, configured(recompute="all"))
    assert not is_refused(refusals, configured(optimizer_in_backward=True), asked="elsewhere")


def test_what_no_trick_refused_is_not_kept() -> None:
    found = Refusals()
    found.note(configured(recompute="all"), "here", ConfigError("model.options: refused"))
    assert not is_refused(found, configured(recompute="all"))
