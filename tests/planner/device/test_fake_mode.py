"""What the shorter fake mode and the shorter question before it leave out changes no answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.profiler import record_function

from mpt.planner.device import direct_results
from mpt.planner.device.fake_mode import LeanFakeMode
from tests.planner.torch_fake_mode import TorchFakeMode


def test_a_range_of_the_profiler_takes_none_of_torch_s_rules_for_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*arguments: Any) -> None:
        raise AssertionError("a range has no shape")

    monkeypatch.setattr(LeanFakeMode, "_cached_dispatch_impl", stop)
    with LeanFakeMode(), record_function("a step") as entered:
        assert entered.record is not None


def of_all_kinds(x: Tensor) -> list[Any]:
    """Return results of operators that the shorter mode has ways of its own for."""
    whole = x.to(torch.float16)[None, None]
    answers = [*torch.ops.aten._scaled_dot_product_flash_attention(whole, whole, whole)]
    roots = torch._foreach_sqrt([x, x.t()])
    with torch.no_grad():
        torch._foreach_add_([*roots], 1.0)
        step = torch.tensor(3.0)
        torch._foreach_add_([step], 1.0)
        torch._foreach_add_([step], torch.tensor(2.0), alpha=2.0)
    return [
        *(x.detach(), x.requires_grad_().detach(), *x.unbind(1), *x.split(2), *x.split([1, 3])),
        *(x[:, :1].squeeze(1), x[:1].squeeze(), x[:1, :1].squeeze((0, 1)), *answers, *roots, step),
        *(step.item(), torch.tensor(7).item(), torch.tensor(8).detach().item()),
    ]


def test_views_numbers_and_lists_of_tensors_are_those_of_torch_s_own_mode() -> None:
    found = []
    for mode in (LeanFakeMode(), TorchFakeMode(), LeanFakeMode()):  # the third knows outcomes
        with mode:
            results = of_all_kinds(torch.empty(1, 2, 4, 3)[0, 0])
        places: dict[int, int] = {}
        found.append(
            [
                (
                    *(one.dtype, one.shape, one.stride(), one.storage_offset(), one.device),
                    *(one.requires_grad, one.is_leaf, one._version, one._is_view()),
                    places.setdefault(one.untyped_storage()._cdata, len(places)),
                )
                if isinstance(one, Tensor)
                else one
                for one in results
            ]
        )
    assert found[0] == found[1] == found[2]
    assert found[0][-3:] == [8.0, 7, 8]


def test_a_detached_number_is_not_known_any_more_when_it_was_written_to() -> None:
    with LeanFakeMode():
        number = torch.tensor(7.0)
        detached = number.detach()
        number.add_(torch.empty(()))
        with pytest.raises(DataDependentOutputException):
            detached.item()


def test_rules_for_single_operators_give_the_forms_of_torch_s_own_mode() -> None:
    aten: Any = torch.ops.aten
    card = torch.device("cuda", 0)
    with TorchFakeMode():
        image, weight = torch.empty(2, 8, 4, 3), torch.empty(8)
        norm = image, weight, weight, 2, 8, 12, 4, 1e-5
        _, mean, scale = aten.native_group_norm.default(*norm)
        back = image, image, mean, scale, weight, 2, 8, 12, 4
        odd = torch.empty(6).as_strided((1, 2, 3), (4, 3, 1))
        calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
            (aten.native_group_norm.default, norm, {}),
            (aten.native_group_norm_backward.default, (*back, [True, True, True]), {}),
            (aten.native_group_norm_backward.default, (*back, [True, False, True]), {}),
            (aten._to_copy.default, (image,), {"dtype": torch.float16}),
            (aten._to_copy.default, (odd,), {"memory_format": torch.preserve_format}),
            (aten._to_copy.default, (torch.empty(()),), {"dtype": torch.float64}),
        ]
        for func, args, kwargs in calls:
            result = func(*args, **kwargs)
            outcome = direct_results.RULES[func](args, kwargs, card)
            results = [result] if isinstance(result, Tensor) else result
            assert outcome is not None
            assert outcome.results == tuple(
                None if one is None else direct_results.form_of(one, card) for one in results
            )
        last = image.to(memory_format=torch.channels_last)
        assert direct_results.group_norm((last, *norm[1:]), {}, card) is None
        assert direct_results.group_norm((image.half(), *norm[1:]), {}, card) is None
        assert direct_results.copied((last,), {}, card) is None
        other = {"memory_format": torch.channels_last}
        assert direct_results.copied((image,), other, card) is None
