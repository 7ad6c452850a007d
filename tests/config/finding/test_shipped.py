"""Configurations that come with mpt are named by @NAME, and a name that there is not is answered shortly."""

import pytest

from mpt.config.finding.shipped import find_shipped
from mpt.errors import ConfigError

pytestmark = pytest.mark.tier("fast")


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one_alone() -> None:
    assert find_shipped("@dcgan_amp").name == "dcgan_amp.yaml"
    with pytest.raises(ConfigError) as refused:
        find_shipped("@dcgan_am")
    assert str(refused.value) == (
        "@dcgan_am: did you mean @dcgan_amp? `mpt list configs` lists all that mpt comes with"
    )


def test_a_name_like_none_is_answered_with_all_configurations() -> None:
    with pytest.raises(
        ConfigError, match=r"comes with the configurations began, .* such as [a-z0-9_]+gb$"
    ):
        find_shipped("@zzzzzz")
