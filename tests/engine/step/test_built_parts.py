"""What parts must make is checked where they make it, and said in one line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from inspect import get_annotations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpt.config.options import PrecisionOptions
from mpt.engine.step.built_parts import (
    Networks,
    check_evidence,
    check_figures,
    check_forward,
    check_losses,
    check_phases,
    require,
)
from mpt.errors import ConfigError, PartError
from mpt.outside.own_code import first_line
from mpt.precision.shared.policy import Policy
from mpt.seams import (
    Batch,
    Evidence,
    Legend,
    Loss,
    MemoryTrick,
    Phase,
    Precision,
    Samples,
    Task,
    gather,
)
from mpt.seams.task_members import check_task, require_hook


class Judged(Task):
    metric = "accuracy"


def test_figures_are_numbers_and_have_the_tasks_metric() -> None:
    assert check_figures(Judged(), {"accuracy": torch.tensor(0.5), "loss": 2}) == {
        "accuracy": 0.5,
        "loss": 2.0,
    }


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (
            None,
            r"task Judged: its conclude returned nothing; expected a dict of figures, as in \{'accuracy': 0.9\}",
        ),
        ({"accuracy": "good"}, "returned a str as 'accuracy'; expected a number"),
        ({"accuracy": torch.zeros(2)}, "returned a Tensor as 'accuracy'; expected a number"),
        ({"loss": 1.0}, "returned the figures loss; 'accuracy', the task's metric, is missing"),
    ],
)
def test_figures_that_are_none_are_refused(made: Any, words: str) -> None:
    with pytest.raises(PartError, match=words):
        check_figures(Judged(), made)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([], "its phases returned no phase; expected a list of mpt.seams.Phase"),
        ([3], "its phases returned an int among them"),
        (
            Phase("net", nn.Linear(1, 1), torch.optim.SGD([torch.ones(1)]), tuple),
            "returned a Phase;",
        ),
        (None, "its phases returned nothing"),
    ],
    ids=["none", "a number", "one alone", "nothing"],
)
def test_a_task_without_phases_would_train_nothing_and_is_refused(made: Any, words: str) -> None:
    with pytest.raises(PartError, match=words):
        check_phases("mine", made)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ((torch.ones(2), torch.ones(2)), "its evaluate_batch returned a tuple; expected a dict"),
        ({"label": [1, 2]}, "returned a list as 'label'; expected a tensor"),
        ({"loss": torch.ones(())}, "a single number as 'loss'; expected a tensor with a row per"),
    ],
)
def test_outputs_of_an_evaluation_are_tensors_with_a_row_per_sample(made: Any, words: str) -> None:
    with pytest.raises(PartError, match=words):
        check_evidence(Judged(), made, "evaluate_batch")


def test_a_mode_s_forward_is_a_context() -> None:
    mode = type("Mine", (Policy,), {"forward": lambda self: None})(
        "mine", PrecisionOptions(), torch.device("cpu"), torch.float32, "mine"
    )
    with pytest.raises(PartError, match="precision mine: its forward returned nothing; expected a"):
        check_forward(mode)
    check_forward(Policy("mine", PrecisionOptions(), torch.device("cpu"), torch.float32, "mine"))


def test_a_task_has_all_that_a_training_asks_for() -> None:
    networks = {"net": nn.Linear(1, 1)}
    whole = {
        "metric": "accuracy",
        "higher_is_better": True,
        "modules": networks,
        "trainable": networks,
        "phases": lambda self, optimizers: (),
    }
    judged = type("Whole", (Task,), whole)()
    assert check_task(judged) is judged
    for name, words in (
        ("metric", r'it has no metric; give the class one, as in metric = "accuracy"'),
        ("higher_is_better", "it has no higher_is_better; give the class one, as in higher_is_"),
        ("modules", r'it has no modules; give the class one, as in self.modules = {"net": net}'),
        ("trainable", "it has no trainable; give"),
        ("phases", "it has no phases, which returns the updates of a step; give the class one"),
    ):
        lacking = type("Lacking", (Task,), {key: one for key, one in whole.items() if key != name})
        with pytest.raises(PartError, match=f"task Lacking: {words}"):
            check_task(lacking())
    with pytest.raises(PartError, match="its modules is a Linear; expected a dict of networks by"):
        check_task(type("Wrong", (Task,), {**whole, "modules": networks["net"]})())
    with pytest.raises(PartError, match="Whole: it has no conclude, which returns an evaluation's"):
        require_hook(judged, "conclude", "an evaluation's figures")


def test_what_is_gathered_of_an_evaluation_is_among_its_outputs() -> None:
    assert gather([{"logits": torch.ones(1)}, {}], "logits").tolist() == [1.0]
    with pytest.raises(
        PartError, match=r"'labels' was gathered of .* evaluate_batch returned 'log"
    ):
        gather([{"logits": torch.ones(1)}], "labels")
    with pytest.raises(
        PartError, match=r"'labels' was gathered of .* evaluate_batch returned nothi"
    ):
        gather(({} for _ in range(2)), "labels")


def test_what_a_build_returns_must_be_of_its_kind() -> None:
    net = nn.Linear(1, 1)
    assert require("net", net, nn.Module) is net
    with pytest.raises(
        PartError, match=r"precision mine: its build returned an int; .* mpt.seams.Precision"
    ):
        require("precision mine: its build", 3, Precision)
    with pytest.raises(
        ConfigError, match=r"task gan wants a network called 'disc'; .* returned 'gen'"
    ):
        Networks("mine", "gan", {"gen": net})["disc"]


class Before(Policy):
    """A mode that was written for an earlier version."""

    replaces_step = True


class Misspelt(Judged):
    """A task with a hook that nothing calls."""

    def evalute_batch(self, batch: Batch) -> Evidence:
        return {}


class Noted(Judged):
    """A task that was written before some members had a class of their own."""

    def __init__(self) -> None:
        self.metric_note = "in dB"


class Walking(Judged):
    """A task with a hook of before."""

    def walk(self, seeds: list[int], frames: int) -> None: ...


class Sampling(Samples, Legend):
    """A task that derives from what it implements."""

    metric = "accuracy"
    metric_note = "in dB"

    def walk(self, seeds: Sequence[int], frames: int) -> Tensor:
        return torch.zeros(())


class WithHelper(Judged):
    """A task whose own method has nearly the name of a hook."""

    def infers(self) -> int:
        return 1

    def preview(self, batch: Batch) -> None:
        self.infers()


def test_a_member_of_before_and_a_misspelt_hook_are_said_in_one_line() -> None:
    mode = Before("mine", PrecisionOptions(), torch.device("cpu"), torch.float32, "mine")
    with pytest.raises(
        PartError, match=r"whose replaces_step has no effect: .* is now numerics\.lifts_state$"
    ):
        require("precision mine: its build", mode, Precision)
    with pytest.raises(
        PartError, match=r"whose evalute_batch nothing calls; is Task\.evaluate_batch meant\?"
    ):
        require("task mine: its build", Misspelt(), Task)
    for part, name, new in ((Noted(), "metric_note", "Legend"), (Walking(), "walk", "Samples")):
        words = rf"whose {name} has no effect: Task\.{name} is now {new}\.{name} of mpt\.seams, from which such a task"
        with pytest.raises(PartError, match=words):
            require("task mine: its build", part, Task)
    for part in (WithHelper(), Sampling()):
        require("task mine: its build", part, Task)


def test_a_hook_that_does_not_take_its_arguments_is_named_when_it_is_built() -> None:
    class Narrow(Task):
        def evaluate_batch(self) -> Evidence:  # type: ignore[override]
            return {}

    class Wide(Task):
        def __init__(self, further: int) -> None:
            super().__init__()

        def after_step(self, *numbers: int) -> None: ...
        def conclude(self, found: Sequence[Evidence], further: int = 0) -> dict[str, float]:  # type: ignore[override]
            return {}

    class Widest(Wide):
        def conclude(self, found: Any, further: int) -> dict[str, float]:  # type: ignore[override]
            return {}

    line = Narrow.evaluate_batch.__code__.co_firstlineno
    words = rf"a Narrow, whose evaluate_batch \(test_built_parts.py:{line}\) takes \(self\); it is called as evaluate_b"
    with pytest.raises(PartError, match=words):
        require("task mine: its build", Narrow(), Task)
    with pytest.raises(
        PartError, match=r"whose conclude .* takes \(self, found, further\); it is call"
    ):
        require("task mine: its build", Widest(1), Task)
    require("task mine: its build", Wide(1), Task)
    shared = type("Shared", (MemoryTrick,), {"apply": lambda self, task: None})
    with pytest.raises(PartError, match=r"it is called as apply\(self, task, precision\)"):
        require("memory.mine: its build", shared(), MemoryTrick)


@pytest.mark.parametrize(
    ("name", "value", "new"),
    [
        ("fold", lambda self, modules: None, "HoldsWeights.fold"),
        ("beside_steps", lambda self: None, "BetweenSteps.beside_steps"),
        ("takes_updates", True, "gone: each update"),
        ("keeps_gradients", True, 'gradients = "zeroed"'),
    ],
)
def test_a_tricks_member_of_before_is_said_in_one_line(name: str, value: Any, new: str) -> None:
    before = type("Before", (MemoryTrick,), {"name": "mine", name: value, "__module__": __name__})()
    with pytest.raises(
        PartError, match=rf"whose {name} has no effect: MemoryTrick\.{name} is now {re.escape(new)}"
    ):
        require("memory.mine: its build", before, MemoryTrick)


def test_the_base_classes_fit_on_a_screen() -> None:
    def members(kind: type) -> list[str]:
        return [
            name for name in {**vars(kind), **get_annotations(kind)} if not name.startswith("_")
        ]

    assert len(members(Task)) <= 20
    assert len(members(Precision)) <= 18
    assert len(members(MemoryTrick)) <= 12


def test_reading_a_member_of_before_says_what_it_is_now() -> None:
    mode: Any = Policy("mine", PrecisionOptions(), torch.device("cpu"), torch.float32, "mine")
    with pytest.raises(AttributeError) as caught:
        mode.dtype  # noqa: B018
    assert first_line(caught.value).endswith("(Precision.dtype is now numerics.dtype)")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, "found a float; do not call .item"),
        (torch.zeros(3), r"found a tensor of shape \(3,\); take its mean"),
        (torch.zeros(()), "depends on no trained weight"),
    ],
)
def test_a_loss_that_cannot_be_back_propagated_is_said(value: Any, words: str) -> None:
    net = nn.Linear(1, 1)
    phase = Phase("net", net, torch.optim.SGD(net.parameters()), lambda batch: iter(()))
    with pytest.raises(ConfigError, match=words):
        check_losses([Loss("mine", value)], phase)
    trained = Loss("mine", net(torch.ones(1, 1)).sum())
    check_losses([trained], phase)
    check_losses([trained, Loss("constant", torch.zeros(()))], phase)
