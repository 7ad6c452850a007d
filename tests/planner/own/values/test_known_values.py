"""Values that follow from a program alone are those of real tensors; others are not known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException

from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.own.stand_ins.exchange import tensors_exchanged
from mpt.planner.own.stand_ins.quantized import made_of_fakes
from mpt.planner.own.values.attempts import Answers
from mpt.planner.own.values.known_values import MOST_BYTES, values_known
from mpt.planner.own.values.without_values import without_values


def widths() -> Any:
    """The widths of a RegNet, as torchvision computes them."""
    steps = torch.round(torch.log((torch.arange(9) * 20.7 + 48) / 48) / 0.8)
    return (torch.round(torch.divide(48 * torch.pow(2.2, steps), 8)) * 8).int().tolist()


def written_in_parts() -> Any:
    x = torch.empty(2, 3)
    x[0] = torch.tensor([1.0, 2.0, 3.0])
    x[1].fill_(7)
    x.view(-1)[1:5].mul_(2)
    return x.t().contiguous().tolist()


def counted() -> Any:
    steps = torch.tensor(0.0)
    steps += 1
    torch._foreach_add_([steps, torch.zeros(2)], 1)
    return steps.item()


KNOWN: list[Callable[[], Any]] = [
    widths,
    written_in_parts,
    counted,
    lambda: [rate.item() for rate in torch.linspace(0, 0.3, 5)],
    lambda: [part.tolist() for part in torch.linspace(0, 0.3, 5).split([2, 3])],
    lambda: (4 ** torch.arange(3)).flip(0).numpy().tolist(),
    lambda: torch.randn(3, 2).new_full((2,), 5).bfloat16().cumsum(0).tolist(),
    lambda: nn.Parameter(nn.init.constant_(torch.empty(2), 4)).tolist(),
    lambda: int(torch.sort(torch.tensor([3, 1, 2]), descending=True)[1].max()),
    lambda: (torch.tensor([0, 2, 3]).nonzero().tolist(), torch.eye(2)[torch.eye(2) > 0].tolist()),
    lambda: torch.unique(torch.tensor([2, 1, 2]), return_counts=True)[1].tolist(),
    lambda: (torch.equal(torch.ones(2), torch.ones(2)), bool((torch.eye(2) > 2).any())),
    lambda: torch.ones(1).expand(9, 2).clone().sum().item(),
]


@pytest.fixture
def fake() -> Iterator[None]:
    with LeanFakeMode(allow_non_fake_inputs=True), values_known():
        yield


@pytest.mark.parametrize("compute", KNOWN)
def test_values_that_a_program_computes_are_those_of_real_tensors(
    compute: Callable[[], Any],
) -> None:
    real = compute()
    with LeanFakeMode(allow_non_fake_inputs=True), values_known():
        assert compute() == real


def written_through_a_view() -> torch.Tensor:
    x = torch.zeros(4)
    x[1:].normal_()
    return x


def written_with_what_is_not_known() -> torch.Tensor:
    x = torch.ones(2)
    return torch.add(x, torch.randn(2), out=x)


@pytest.mark.parametrize(
    "compute",
    [
        written_through_a_view,
        written_with_what_is_not_known,
        lambda: torch.ones(2) * torch.rand(2),
        lambda: torch.randperm(2),
        lambda: torch.empty(2),
        lambda: torch.ones(MOST_BYTES),
        lambda: nn.functional.dropout(torch.ones(2)),
    ],
)
@pytest.mark.usefixtures("fake")
def test_values_of_chance_and_of_large_tensors_are_not_known(
    compute: Callable[[], torch.Tensor],
) -> None:
    found = compute()
    with pytest.raises(DataDependentOutputException):
        found[0].item()


@pytest.mark.parametrize("compute", [torch.empty_like, lambda x: x.new_empty(2)])
def test_new_memory_by_the_form_of_known_values_holds_none(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with LeanFakeMode(allow_non_fake_inputs=True):
        assert compute(torch.tensor(3.0)).constant is None  # type: ignore[attr-defined]


def test_known_values_go_through_operators_that_an_evaluation_meets_whole() -> None:
    with (
        LeanFakeMode(allow_non_fake_inputs=True),
        without_values(Answers(trusts_data=True)) as asked,
        values_known(asked.values),
        torch.inference_mode(),
    ):
        x = torch.arange(3).type_as(torch.empty(1))
        assert torch.matmul(x, x).item() == 5


@pytest.mark.usefixtures("fake")
def test_a_parameter_made_from_a_number_is_converted_with_its_module() -> None:
    with tensors_exchanged():
        module = nn.ParameterList([torch.tensor(0.0)]).half()
    assert module[0].dtype == torch.float16


def test_predicted_labels_are_as_many_as_there_are_classes() -> None:
    with LeanFakeMode(allow_non_fake_inputs=True), without_values() as asked, asked.building():
        labels = torch.rand(16, 3).argmax(1)
        assert len(torch.unique(labels[torch.rand(16) > 0.5].int())) == 3
        assert len(torch.unique(torch.randint(2, 6, (16,)))) == 4
        assert len(torch.unique(torch.rand(2, 3).argmax(1) * torch.randint(9, (2,)))) == 2


def test_the_class_of_a_fake_tensor_is_found_in_a_dictionary_of_classes() -> None:
    class Picture(torch.Tensor):
        pass

    with LeanFakeMode(allow_non_fake_inputs=True), made_of_fakes():
        picture = torch.rand(2).as_subclass(Picture)
        assert {torch.Tensor: 1, Picture: 2}[type(picture)] == 2
        assert type(picture) not in {torch.Tensor: 1}
