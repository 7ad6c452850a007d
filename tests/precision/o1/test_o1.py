"""O1's tables entry by entry, its rules one by one, and its scope."""

from __future__ import annotations

import operator
import threading
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mpt.errors import MptError
from mpt.precision import o1
from mpt.precision.o1 import o1_rules
from mpt.precision.o1 import o1_tables as tables
from tests.precision.o1_calls import arguments, inner_arguments, matrix, random, vector

half, single, double = torch.float16, torch.float32, torch.float64
METHODS_OF_HALF = [name for name in tables.HALF_TORCH if hasattr(Tensor, name)]
METHODS_OF_FLOAT = [name for name in tables.FLOAT_TORCH if hasattr(Tensor, name)]
METHODS_OF_PROMOTE = [name for name in tables.PROMOTE_TORCH if hasattr(Tensor, name)]
OPERATORS = {
    "__add__": operator.add, "__sub__": operator.sub, "__mul__": operator.mul, "__truediv__": operator.truediv,
    "__eq__": operator.eq, "__ne__": operator.ne, "__ge__": operator.ge, "__gt__": operator.gt, "__le__": operator.le,
    "__lt__": operator.lt,
}  # fmt: skip


def dtypes_seen(function: Any, args: list[Any], kwargs: dict[str, Any]) -> set[torch.dtype]:
    """Return the floating dtypes with which a function is called after O1's rule for it."""
    seen: set[torch.dtype] = set()

    def record(*args: Any, **kwargs: Any) -> None:
        seen.update(o1_rules.floating_dtypes([*args, *kwargs.values()]))

    o1_rules.rules[function](record, tuple(args), kwargs, o1_rules.Region(half, None))
    return seen


def first(result: Any) -> Tensor:
    while not isinstance(result, Tensor):
        result = result[0]
    return result


def mixed(args: list[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Turn the first floating tensor of float32 arguments to half."""
    if isinstance(args[0] if args else None, Tensor):
        return [args[0].half(), *args[1:]], kwargs
    if args:
        return [[args[0][0].half(), *args[0][1:]]], kwargs
    return args, {"tensors": [kwargs["tensors"][0].half(), *kwargs["tensors"][1:]]}


@pytest.mark.parametrize("dtype", [half, single, double])
@pytest.mark.parametrize("name", [*tables.HALF_TORCH, *tables.HALF_RECURRENT])
def test_listed_torch_functions_run_in_half(name: str, dtype: torch.dtype) -> None:
    args, kwargs = arguments(name, dtype)
    with o1.casts(half):
        assert first(getattr(torch, name)(*args, **kwargs)).dtype == half
    assert dtypes_seen(getattr(torch, name), args, kwargs) == {half}


@pytest.mark.parametrize("name", tables.HALF_FUNCTIONAL)
def test_listed_functional_forms_run_in_half(name: str) -> None:
    args, kwargs = inner_arguments(name, single)
    with o1.casts(half):
        assert getattr(functional, name)(*args, **kwargs).dtype == half


@pytest.mark.parametrize("name", METHODS_OF_HALF)
def test_methods_of_half_functions_run_in_half(name: str) -> None:
    args, kwargs = arguments(name, single)
    with o1.casts(half):
        assert getattr(args[0], name)(*args[1:], **kwargs).dtype == half


def test_the_matrix_product_operator_runs_in_half() -> None:
    with o1.casts(half):
        assert (matrix @ matrix).dtype == half
        assert Tensor.__matmul__(matrix, matrix).dtype == half


@pytest.mark.parametrize("dtype", [half, single, double])
@pytest.mark.parametrize("name", tables.FLOAT_TORCH)
def test_listed_torch_functions_run_in_float32(name: str, dtype: torch.dtype) -> None:
    args, kwargs = arguments(name, dtype)
    with o1.casts(half):
        assert getattr(torch, name)(*args, **kwargs).dtype == single


@pytest.mark.parametrize("dtype", [half, single, double])
@pytest.mark.parametrize("name", tables.FLOAT_FUNCTIONAL)
def test_listed_functional_forms_run_in_float32(name: str, dtype: torch.dtype) -> None:
    args, kwargs = inner_arguments(name, dtype)
    with o1.casts(half):
        assert getattr(functional, name)(*args, **kwargs).dtype == single
    assert dtypes_seen(getattr(functional, name), args, kwargs) == {single}


@pytest.mark.parametrize("name", METHODS_OF_FLOAT)
def test_methods_of_float32_functions_run_in_float32(name: str) -> None:
    args, kwargs = arguments(name, half)
    with o1.casts(half):
        assert getattr(args[0], name)(*args[1:], **kwargs).dtype == single


def test_powers_and_reciprocals_run_in_float32() -> None:
    h = matrix.half()
    with o1.casts(half):
        powered = h
        powered **= 2
        for result in (h**2, 2**h, 1 / h, powered):
            assert result.dtype == single
    assert torch.equal(1 / h.float(), Tensor.__rtruediv__(h.float(), 1))


def test_an_unscoped_reciprocal_overflows_where_the_listed_one_does_not() -> None:
    tiny = torch.full((1,), 1e-5, dtype=half)
    assert (1 / tiny).isinf()
    with o1.casts(half):
        assert (1 / tiny).isfinite()


@pytest.mark.parametrize("name", [*tables.PROMOTE_TORCH, *tables.SEQUENCE_TORCH])
def test_listed_functions_promote_to_the_widest(name: str) -> None:
    function = getattr(torch, name)
    for dtype, other in ((half, half), (single, single), (half, single)):
        args, kwargs = arguments(name, other)
        if dtype != other:
            args, kwargs = mixed(args, kwargs)
        assert dtypes_seen(function, args, kwargs) == {other}
        with o1.casts(half):
            result = function(*args, **kwargs)
        if isinstance(result, Tensor) and result.is_floating_point():
            assert result.dtype == other


@pytest.mark.parametrize("name", METHODS_OF_PROMOTE)
def test_methods_promote_to_the_widest(name: str) -> None:
    args, kwargs = mixed(*arguments(name, single))
    assert dtypes_seen(getattr(Tensor, name), args, kwargs) == {single}
    with o1.casts(half):
        getattr(args[0], name)(*args[1:], **kwargs)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_promote_and_zero_dimensional_tensors_count(name: str) -> None:
    scalar = torch.tensor(0.1)  # not exact in half: plain torch would compare and add in half
    assert (matrix.half() + scalar).dtype == half
    with o1.casts(half):
        result = OPERATORS[name](matrix.half(), scalar)
    assert torch.equal(result, OPERATORS[name](matrix.half().float(), scalar))
    assert result.dtype in (single, torch.bool)


def test_reflected_operators_promote() -> None:
    h, scalar = matrix.half(), torch.tensor(0.1)
    with o1.casts(half):
        for name in ("__radd__", "__rmul__", "__rsub__"):
            assert getattr(h, name)(scalar).dtype == single
        assert (1 - h).dtype == half
        assert (1 + h).dtype == half


def test_every_listed_callable_has_a_rule() -> None:
    for name in [
        *tables.PROMOTE_TENSOR,
        *tables.FLOAT_TENSOR,
        *tables.MATCH_SELF_TENSOR,
        *tables.NO_HALF_TENSOR,
    ]:
        assert getattr(Tensor, name) in o1_rules.rules, name
    for name in tables.COMPOSITES_FUNCTIONAL:
        if name != "linear_cross_entropy":  # new in torch 2.13
            assert getattr(functional, name) in o1_rules.COMPOSITES


@pytest.mark.parametrize("name", tables.NO_HALF_TORCH)
def test_in_place_functions_refuse_half(name: str) -> None:
    function = getattr(torch, name)
    with o1.casts(half):
        with pytest.raises(
            NotImplementedError, match=f"{name} cannot change a torch.float16 tensor"
        ):
            function(matrix.half())
        own = matrix.clone()
        assert function(own) is own


@pytest.mark.parametrize("name", tables.NO_HALF_TENSOR)
def test_in_place_methods_refuse_half_and_cast_the_rest_up(name: str) -> None:
    extra = {"pow_": (2.0,), "cumprod_": (0,), "cumsum_": (0,), "renorm_": (2.0, 0, 1.0)}.get(
        name, ()
    )
    with o1.casts(half):
        with pytest.raises(NotImplementedError, match="Use "):
            getattr(matrix.half(), name)(*extra)
        own = matrix.clone()
        assert getattr(own, name)(*extra) is own
        assert matrix.clone().pow_(matrix.half()).dtype == single


@pytest.mark.parametrize("name", [n for n in tables.MATCH_SELF_TENSOR if not n.startswith("__")])
@pytest.mark.parametrize("own", [half, single])
def test_in_place_methods_match_self(name: str, own: torch.dtype) -> None:
    other = single if own == half else half
    args, kwargs = arguments(name.rstrip("_"), other)
    if name == "sub_":
        args = [matrix, matrix.to(other)]
    args[0] = args[0].to(own).clone()
    assert dtypes_seen(getattr(Tensor, name), args, kwargs) == {own}
    with o1.casts(half):
        assert getattr(args[0], name)(*args[1:], **kwargs) is args[0]
    assert args[0].dtype == own


def test_augmented_operators_match_self() -> None:
    with o1.casts(half):
        for change in (operator.iadd, operator.isub, operator.imul, operator.itruediv):
            own = matrix.half()
            assert change(own, matrix) is own
            assert own.dtype == half


def test_binary_cross_entropy_is_refused_in_half_alone() -> None:
    args, kwargs = inner_arguments("binary_cross_entropy", half)
    with o1.casts(half):
        with pytest.raises(NotImplementedError, match="binary_cross_entropy_with_logits") as caught:
            functional.binary_cross_entropy(*args, **kwargs)
        assert functional.binary_cross_entropy(args[0].float(), args[1].float()).dtype == single
        with pytest.raises(NotImplementedError):
            functional.binary_cross_entropy(args[0].float(), target=args[1])
    assert isinstance(caught.value, MptError)


@pytest.mark.parametrize("dtype", [half, single])
def test_unlisted_functions_follow_their_input(dtype: torch.dtype) -> None:
    x = random(2, 4, 4).to(dtype)
    layers = [
        nn.BatchNorm1d(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.ReLU(),
        nn.Sigmoid(),
        nn.Tanh(),
        nn.Dropout(),
    ]
    layers += [nn.AvgPool1d(2), nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1)]
    functions = [torch.mean, torch.sqrt, torch.log1p, torch.max, lambda t: torch.softmax(t, -1)]
    functions += [
        lambda t: t.softmax(-1),
        lambda t: torch.layer_norm(t, (4,)),
        lambda t: torch.logsumexp(t, 0),
    ]
    functions += [
        lambda t: torch.sub(t, t),
        lambda t: torch.where(t > 0, t, t),
        lambda t: torch.einsum("bij->ij", t),
    ]
    functions += [
        lambda t: functional.scaled_dot_product_attention(t, t, t),
        lambda t: functional.rms_norm(t, (4,)),
    ]
    functions += [lambda t: functional.huber_loss(t, t)]
    with o1.casts(half):
        for function in [*layers, *functions]:
            assert function(x).dtype == dtype, function
        assert nn.Embedding(3, 2)(torch.tensor([1])).dtype == single


def test_integers_complex_numbers_and_mixed_lists_pass() -> None:
    numbers = torch.arange(3)
    waves = torch.ones(2, 2, dtype=torch.complex64)
    with o1.casts(half):
        assert (torch.cat([numbers, numbers])).dtype == torch.int64
        assert (waves @ waves).dtype == torch.complex64
        assert torch.sum(numbers).dtype == torch.int64
        assert torch.cat([numbers, vector]).dtype == single
    assert o1_rules.cast([vector, numbers], half)[0].dtype == single
    assert o1_rules.cast((vector, vector), half)[0].dtype == half


def test_explicit_dtypes_and_results_are_honoured() -> None:
    with o1.casts(half):
        assert functional.softmax(matrix.half(), 1, dtype=half).dtype == half
        assert torch.sum(matrix, dtype=double).dtype == double
        result = torch.empty(3, 3)
        assert torch.mm(matrix, matrix, out=result) is result
        sums = torch.empty(3, 3, dtype=half)
        assert torch.cumsum(matrix.half(), 0, out=sums) is sums
        assert torch.add(matrix, matrix.half(), out=result) is result


def test_keywords_are_cast() -> None:
    with o1.casts(half):
        assert functional.linear(input=matrix, weight=matrix.half(), bias=vector).dtype == half
        assert functional.mse_loss(input=matrix.half(), target=matrix).dtype == single
        assert torch.add(input=matrix.half(), other=torch.tensor(1.0)).dtype == single


def test_double_mixes_are_harmless() -> None:
    with o1.casts(half):
        assert torch.add(matrix.half(), matrix.double()).dtype == double
        assert torch.cat([matrix, matrix.double()]).dtype == double
        assert torch.mm(matrix.double(), matrix).dtype == half
        assert functional.mse_loss(matrix.double(), matrix.half()).dtype == single
        assert torch.add(matrix.half(), matrix.bfloat16()).dtype == single


def test_gradients_keep_their_leaf_dtype() -> None:
    for dtype in (half, single):
        x = matrix.clone().to(dtype).requires_grad_()
        with o1.casts(half):
            loss = functional.linear(x, matrix).sum()
        assert loss.dtype == single
        loss.backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype


def test_bfloat16_is_a_half_dtype_too() -> None:
    with o1.casts(torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        with pytest.raises(NotImplementedError):
            matrix.bfloat16().exp_()
    with pytest.raises(ValueError, match=r"float16 or torch.bfloat16, not torch.float32"):
        o1.casts(single)


def test_nothing_remains_after_the_block_or_an_exception() -> None:
    check = nn.RNNBase.check_input

    def fail() -> None:
        with o1.casts(half), o1.casts(torch.bfloat16), o1.suspended():
            assert nn.RNNBase.check_input is not check
            raise RuntimeError("from inside")

    with pytest.raises(RuntimeError, match="from inside"):
        fail()
    assert (matrix @ matrix).dtype == single
    assert o1.active_dtype() is None
    assert torch._C._len_torch_function_stack() == 0
    assert nn.RNNBase.check_input is check


def test_blocks_nest_and_the_innermost_decides() -> None:
    block = o1.casts(half)
    with block:
        depth = torch._C._len_torch_function_stack()
        with block, o1.casts(half):
            assert torch._C._len_torch_function_stack() == depth
            assert (matrix @ matrix).dtype == half
        with o1.casts(torch.bfloat16):
            assert (matrix @ matrix).dtype == torch.bfloat16
        with o1.suspended():
            assert o1.active_dtype() is None
            assert (matrix @ matrix).dtype == single
            with o1.casts(half):
                assert (matrix @ matrix).dtype == half
        assert o1.active_dtype() == half
        assert (matrix @ matrix).dtype == half
    with o1.suspended():
        assert (matrix @ matrix).dtype == single


def test_casts_decorates_a_function() -> None:
    @o1.casts(half)
    def multiply() -> Tensor:
        return matrix @ matrix

    assert multiply().dtype == half
    assert multiply().dtype == half


def test_other_threads_see_no_mode() -> None:
    found = []
    with o1.casts(half):
        thread = threading.Thread(
            target=lambda: found.extend([o1.active_dtype(), (matrix @ matrix).dtype])
        )
        thread.start()
        thread.join()
    assert found == [None, single]


def test_the_mode_works_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.LSTM(3, 2))
        x = torch.rand(2, 3)
        with o1.casts(half):
            out, _ = model(x)
            loss = functional.mse_loss(out, x[:, :2])
        loss.backward()
        assert out.dtype == half
        assert all(p.grad is not None and p.grad.dtype == single for p in model.parameters())


def test_decorated_functions_get_their_dtypes_only_inside() -> None:
    def dtypes(*tensors: Tensor, **named: Tensor) -> list[torch.dtype]:
        return [tensor.dtype for tensor in (*tensors, *named.values())]

    for decorate, inside in (
        (o1.half_function, half),
        (o1.float_function, single),
        (o1.promote_function, single),
    ):
        decorated = decorate(dtypes)
        with o1.casts(half):
            assert decorated(matrix, matrix.half(), other=matrix) == [inside] * 3
            with o1.suspended():
                assert decorated(matrix, matrix.half()) == [single, half]
        assert decorated(matrix, matrix.half()) == [single, half]


def test_a_registration_wins_over_the_lists_and_can_be_taken_back() -> None:
    o1.register_float_function(torch, "mm")
    o1.register_half_function(torch, "einsum")
    o1.register_half_function(functional, "multi_head_attention_forward")
    o1.register_half_function(Tensor, "__add__")
    try:
        with o1.casts(half):
            assert torch.mm(matrix, matrix.half()).dtype == single
            assert torch.bmm(matrix[None], matrix[None]).dtype == half
            assert torch.einsum("ij,jk->ik", matrix, matrix).dtype == half
            assert (matrix + matrix).dtype == half
    finally:
        for module, name in ((torch, "mm"), (torch, "einsum"), (Tensor, "__add__")):
            o1.unregister_function(module, name)
        o1.unregister_function(functional, "multi_head_attention_forward")
    with o1.casts(half):
        assert torch.mm(matrix, matrix).dtype == half
        assert torch.einsum("ij,jk->ik", matrix, matrix).dtype == single
        assert (matrix + matrix.half()).dtype == single
    assert not o1_rules.registered


def test_functions_of_other_modules_are_wrapped_for_the_block_only() -> None:
    module = ModuleType("kernels")

    def kernel(x: Tensor) -> torch.dtype:
        return x.dtype

    module.kernel = kernel  # type: ignore[attr-defined]
    o1.register_half_function(module, "kernel")
    try:
        assert module.kernel is kernel
        with o1.casts(half), o1.casts(half):
            assert module.kernel(matrix) == half
        assert module.kernel is kernel
    finally:
        o1.unregister_function(module, "kernel")
    with o1.casts(half):
        assert module.kernel is kernel


@pytest.mark.parametrize(
    "register",
    [o1.register_half_function, o1.register_float_function, o1.register_promote_function],
)
def test_registering_a_missing_function_is_an_error(register: Any) -> None:
    with pytest.raises(ValueError, match="no function 'nope' in torch"):
        register(torch, "nope")


def test_attribute_getters_pass_through() -> None:
    with o1.casts(half):
        assert (matrix.dtype, matrix.shape, matrix.is_cuda) == (single, (3, 3), False)
        assert matrix.T.requires_grad is False
