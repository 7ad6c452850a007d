"""What stands for torch's symbolic shapes answers about numbers as torch does, and asks torch about all else."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpt.planner.device import plain_shapes
from mpt.planner.device.direct_results import REVIEWED

ASKED: dict[str, list[tuple[Any, ...]]] = {
    **{
        name: [(True,), (False,)]
        for name in ("guard_or_false", "guard_or_true", "statically_known_true")
    },
    "expect_true": [(True,), (False,)],
    **{
        name: [(3,), (True,), (0.5,)]
        for name in ("is_nested_int", "is_symbolic", "has_guarding_hint")
    },
    "guard_int": [(0,), (7,)],
    "sym_eq": [
        (2, 2),
        (2, 3),
        ((1, 2), [1, 2]),
        ((1, 2), (1, 3)),
        ((1,), (1, 2)),
        (torch.Size([4]), (4,)),
    ],
    "sym_and": [(True,), (True, False), (True, True, True)],
    "sym_or": [(False,), (True, False), (False, False, False)],
    "compute_unbacked_bindings": [(None, 3)],
    **{
        name: [(3,), ((1, 2),), (torch.zeros(2, 3),), ([torch.zeros(1), 2],)]
        for name in (
            "has_free_symbols",
            "has_free_unbacked_symbols",
            "free_unbacked_symbols",
            "free_symbols",
        )
    },
    **{name: [(3,), (None,), (torch.zeros(2),)] for name in ("_iterate_exprs", "_iterate_nodes")},
}


def plain(value: Any) -> Any:
    return list(value) if hasattr(value, "__iter__") else value


def test_answers_about_numbers_are_torchs() -> None:
    real: Any = importlib.import_module(plain_shapes.NAME)
    assert set(ASKED) == set(plain_shapes.RULES)
    there = {name for name in ASKED if hasattr(real, name)}
    # an earlier torch lacks has_guarding_hint
    assert there == set(ASKED) or not torch.__version__.startswith(REVIEWED)
    for name in there:
        for arguments in ASKED[name]:
            answer = plain_shapes.RULES[name](*arguments)
            assert answer is not NotImplemented, (name, arguments)
            assert plain(answer) == plain(getattr(real, name)(*arguments)), (name, arguments)


@pytest.mark.parametrize(
    "name", [name for name in plain_shapes.RULES if name != "compute_unbacked_bindings"]
)
def test_what_is_no_number_is_asked_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    module = SimpleNamespace(
        waits=True, load=lambda: loaded.append(name), **{name: lambda *asked: "torch's"}
    )
    monkeypatch.setattr(importlib, "import_module", {plain_shapes.NAME: module}.__getitem__)
    asked = [object()] * (2 if name == "sym_eq" else 1)
    assert plain_shapes.answer_for(name)(*asked) == "torch's"
    assert loaded == [name]
