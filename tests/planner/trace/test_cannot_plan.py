import json
from types import SimpleNamespace
from typing import Any

from mpt.planner.trace.cannot_plan import place_of


def test_the_line_that_is_named_is_the_scripts_and_not_one_of_python_that_it_called() -> None:
    recorder: Any = SimpleNamespace(module_names={})
    try:
        json.loads("no JSON")
    except ValueError as error:
        place = place_of([error], recorder)
    assert place.rpartition(":")[0] == __file__
