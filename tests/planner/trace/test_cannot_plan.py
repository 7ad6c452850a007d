import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import mpt
from mpt.planner.trace.cannot_plan import is_installed, place_of, reason_of


def test_the_line_that_is_named_is_the_scripts_and_not_one_of_python_that_it_called() -> None:
    recorder: Any = SimpleNamespace(module_names={})
    try:
        json.loads("no JSON")
    except ValueError as error:
        place = place_of([error], recorder)
    assert place.rpartition(":")[0] == __file__


def test_a_line_of_a_library_is_followed_by_the_script_s_that_called_it() -> None:
    recorder: Any = SimpleNamespace(module_names={})
    try:
        yaml.safe_load("[")
    except yaml.YAMLError as error:
        place = place_of([error], recorder)
    library, _, script = place.partition(", called at ")
    assert "site-packages" in library
    assert script.rpartition(":")[0] == __file__


def test_a_folder_that_is_called_like_mpts_and_goes_on_is_a_scripts() -> None:
    folder = str(Path(mpt.__file__).parent)
    assert is_installed(f"{folder}/api.py")
    assert not is_installed(f"{folder}_training/train.py")


@pytest.mark.parametrize(
    "words", ["found two different devices cuda:0, mine:0", "found at least two devices, cuda:0"]
)
def test_a_build_with_cuda_puts_a_tensor_on_a_card_that_is_not_there(words: str) -> None:
    """Its own words were shown, with the name of the device that stands for a card."""
    error = RuntimeError(f"Unhandled FakeTensor Device Propagation for aten.mm.default, {words}")
    assert "the model moves itself to a GPU" in reason_of(error)
