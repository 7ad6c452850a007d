"""Sparse gradients of embeddings on fake tensors: the rows that a batch looked up, and not the whole table.

Torch's fake mode has sparse tensors without contents, and the fake device has no sparse kernels. So a tensor stands for
a sparse one and keeps its indices and values, which are ordinary fake tensors, whose births and deaths are recorded. To
autograd it is a strided gradient of the table's shape, which it passes on as it is; optimizers ask `is_sparse`, and
its methods and the operators of `SparseAdam`, SGD and Adagrad do to indices and values what torch's kernels do
(`aten/src/ATen/native/sparse/cuda/SparseCUDATensor.cu`, `SparseCUDATensorMath.cu`, `SparseTensorMath.cpp`).

Which rows a batch looks up is not known: coalesced, a gradient is planned as if all tokens differed, as far as the
table has rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
NOTE = "sparse gradients were taken as if all tokens of a batch differed"
KEPT_SUM = (
    "a sum of sparse gradients that is kept, such as SGD's momentum, grows with every step; use momentum=0, "
    "torch.optim.SparseAdam or sparse=False"
)


class SparseRows(Tensor):
    """Stands for a sparse tensor of fake indices (sparse dimensions, count) and values (count, ...)."""

    is_sparse = True
    layout = torch.sparse_coo
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    places: Tensor
    numbers: Tensor
    is_summed: bool
    """No place occurs twice: it is coalesced."""
    sums: list[SparseRows]
    """Coalesced copies that the gradients of its values will be taken at, of all with the same places together."""

    def __new__(
        cls,
        places: Tensor,
        numbers: Tensor,
        size: Sequence[int],
        is_summed: bool = False,
        sums: list[SparseRows] | None = None,
    ) -> SparseRows:
        """Make one of the size of the whole table, which takes no memory."""
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls, size, dtype=numbers.dtype, device=numbers.device
        )
        made.places, made.numbers, made.is_summed = places, numbers, is_summed
        made.sums = [] if sums is None else sums
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return call(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseRows({tuple(self.shape)}, {len(self.numbers)} rows)"

    def like(
        self, numbers: Tensor, places: Tensor | None = None, is_summed: bool | None = None
    ) -> SparseRows:
        """Return one of other values."""
        summed = self.is_summed if is_summed is None else is_summed
        if places is not None:
            return SparseRows(places, numbers, self.shape, summed)
        return SparseRows(self.places, numbers, self.shape, summed, self.sums)

    def is_coalesced(self) -> bool:
        """Return whether no place occurs twice."""
        return self.is_summed

    def _indices(self) -> Tensor:
        return self.places

    def _values(self) -> Tensor:
        return self.numbers

    indices, values = _indices, _values

    def _nnz(self) -> int:
        return len(self.numbers)

    def sparse_dim(self) -> int:
        """Return the number of dimensions that have indices."""
        return len(self.places)

    def dense_dim(self) -> int:
        """Return the number of the others."""
        return self.dim() - len(self.places)

    def new(self, places: Tensor, numbers: Tensor, size: Sequence[int]) -> SparseRows:  # type: ignore[override]
        """Return one of other contents, as SparseAdam asks for it."""
        return SparseRows(places, numbers, size)

    def coalesce(self) -> SparseRows:
        """Return the sum of the values of each place."""
        if self.is_summed:
            return self
        count = len(self.numbers)
        if self.numbers.device.type == "cpu":
            return self.like(
                torch.empty_like(self.numbers), torch.empty_like(self.places), is_summed=True
            )
        flat = self.places.new_empty(count)
        # of the values, and of each place's first
        orders = [torch.empty_like(flat) for _ in range(2)]
        # Thrust sorts keys and values into copies
        sorting = [torch.empty_like(flat) for _ in range(2)]
        del sorting
        rows = min(count, self.shape[: self.sparse_dim()].numel())
        summed = self.numbers.new_empty((rows, *self.numbers.shape[1:]))
        del orders
        places = (
            flat[:rows].view(1, rows)
            if self.sparse_dim() == 1
            else flat.new_empty((self.sparse_dim(), rows))
        )
        return self.like(summed, places, is_summed=True)

    def to_dense(self, *options: Any, **named: Any) -> Tensor:
        """Return the whole table."""
        return self.numbers.new_zeros(self.shape)


def measured(given: SparseRows, *options: Any, **named: Any) -> Tensor:
    """Return a norm of the values."""
    return given.numbers.new_empty(())


def raised(given: SparseRows, exponent: Any) -> SparseRows:
    """Return a power of the values, of each place once."""
    summed = given.coalesce()
    return summed.like(torch.empty_like(summed.numbers))


def answered(given: SparseRows) -> Tensor:
    """Return whether any of the values is true."""
    return given.numbers.new_empty((), dtype=torch.bool)


def made(
    sparse_dims: int,
    dense_dims: int,
    size: Sequence[int],
    places: Tensor,
    numbers: Tensor,
    **options: Any,
) -> SparseRows:
    """Return a sparse tensor, as torch's own constructor does."""
    return SparseRows(places, numbers, size, bool(options.get("is_coalesced")))


def of_dense(table: Tensor, dimensions: int | None = None, layout: Any = None) -> SparseRows:
    """Return the entries of a dense tensor that are not 0, as `Tensor.to_sparse` does."""
    if dimensions not in (None, table.dim()) or layout not in (None, torch.sparse_coo):
        raise NotImplementedError("to_sparse is followed for all dimensions of a tensor, in COO")
    if table.requires_grad:
        raise NotImplementedError("the gradient of to_sparse is not followed")
    places = table.nonzero().t().clone()
    return SparseRows(places, table[tuple(places)].clone(), table.shape, is_summed=True)


def cloned(given: SparseRows, **options: Any) -> SparseRows:
    """Return a copy of places and values."""
    return given.like(given.numbers.clone(), given.places.clone())


def converted(
    given: SparseRows,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    **options: Any,
) -> SparseRows:
    """Return a copy in another dtype or on another device."""
    numbers = given.numbers.to(device=device, dtype=dtype, copy=True)
    return given.like(numbers, given.places.to(device=device, copy=True))


def turned(given: SparseRows, *dimensions: int) -> SparseRows:
    """Return the transpose of a matrix: a copy of its places, in another order, and of its values."""
    copied = cloned(given)
    return SparseRows(copied.places, copied.numbers, (given.shape[1], given.shape[0]))


def multiplied(first: Any, second: Any) -> Tensor:
    """Return the product with a dense matrix, which cuSPARSE computes of 32-bit indices of coalesced places, and a CPU
    of the places as they are.

    Its gradient is made at the places of a coalesced copy, both of which are counted from here on.
    """
    if not isinstance(first, SparseRows):
        turned_product: Tensor = multiplied(turned(second), first.t()).t()
        return turned_product
    if isinstance(second, SparseRows) or first.dense_dim():
        raise NotImplementedError("a product of two sparse tensors is not followed")
    if first.requires_grad and not first.is_summed:
        first.sums += [first.coalesce(), first.coalesce()]
    indices = []
    if first.device.type != "cpu":
        summed = first.coalesce()
        by_row = (len(first) + 1, summed._nnz())
        indices = [summed.places.new_empty(count, dtype=torch.int32) for count in by_row]
    result: Tensor = second.new_empty((first.shape[0], second.shape[1]))
    del indices
    return result


def emptied(given: SparseRows) -> SparseRows:
    """Let go of all rows."""
    given.places, given.numbers = given.places[:, :0].clone(), given.numbers[:0].clone()
    return given


def joined(first: SparseRows, second: SparseRows) -> tuple[Tensor, Tensor]:
    """Return the places and values of a sum, in which a place may occur twice."""
    return torch.cat([first.places, second.places], 1), torch.cat([first.numbers, second.numbers])


def added(first: Any, second: Any, alpha: Any = 1) -> Any:
    """Return a sum; with a dense tensor it is dense."""
    if not isinstance(second, SparseRows):
        raise RuntimeError(
            "add(sparse, dense) is not supported: a sparse gradient takes no weight decay (torch says the same)"
        )
    if not isinstance(first, SparseRows):
        return first.clone()
    places, numbers = joined(first, second)
    return first.like(numbers, places, is_summed=False)


def added_in_place(first: Any, second: Any, alpha: Any = 1) -> Any:
    """Add rows to a table, or to rows that were there before."""
    if isinstance(first, SparseRows):
        if torch._C._current_autograd_node() is None:
            raise NotImplementedError(KEPT_SUM)
        first.places, first.numbers = joined(first, second)
        first.is_summed = False
    return first


def masked(table: Tensor, mask: SparseRows) -> SparseRows:
    """Return a table's rows at the places of a mask: gathered, and multiplied by ones into new memory."""
    gathered = (
        None if table.device.type == "cpu" else torch.empty_like(mask.numbers, dtype=table.dtype)
    )
    found = torch.empty_like(mask.numbers, dtype=table.dtype)
    del gathered
    return mask.like(found, mask.places.clone())


def of_bags(
    gradient: Tensor,
    tokens: Tensor,
    offsets: Tensor,
    bags: Tensor,
    sizes: Tensor,
    maxima: Tensor,
    rows: int,
    *_: Any,
) -> SparseRows:
    """Return the gradient of a table from that of bags (bags, features): a row for each token."""
    numbers = gradient.new_empty((len(tokens), *gradient.shape[1:]))
    return SparseRows(tokens.view(1, -1), numbers, (rows, *gradient.shape[1:]))


def makes_rows(func: Any, args: Sequence[Any]) -> bool:
    """Return whether an operator makes a sparse tensor from others."""
    return func is MAKES or (func is BAGS and args[9])


def is_stolen(func: Any, args: Sequence[Any]) -> bool:
    """Return whether this copies a real sparse gradient that autograd would keep as it is if no mode saw it.

    It asks how often indices and values are referred to, and a mode's Python objects count
    (`torch/csrc/autograd/functions/accumulate_grad.h`).
    """
    if func is not _aten.clone.default or args[0].layout != torch.sparse_coo:
        return False
    node = torch._C._current_autograd_node()
    return node is not None and "AccumulateGrad" in node.name()


def shared(gradient: Tensor) -> Tensor:
    """Return another sparse tensor of the same indices and values."""
    places, numbers = gradient._indices(), gradient._values()
    return torch.sparse_coo_tensor(places, numbers, gradient.shape, check_invariants=False)


def through_values(func: Any) -> Callable[..., SparseRows]:
    """Return the rule of an operator that changes each value alone."""

    def rule(given: SparseRows, *others: Any, **named: Any) -> SparseRows:
        if not isinstance(given, SparseRows) or any(isinstance(one, SparseRows) for one in others):
            raise NotImplementedError(f"{func._schema.name} of two sparse tensors is not followed")
        return given.like(func(given.numbers, *others, **named))

    return rule


def through_values_in_place(func: Any) -> Callable[..., SparseRows]:
    """Return the rule of an operator that changes each value alone, in place."""

    def rule(given: SparseRows, *others: Any, **named: Any) -> SparseRows:
        func(given.numbers, *others, **named)
        return given

    return rule


NORM = _aten.linalg_vector_norm.default
HAS_NORM = torch._C._dispatch_has_kernel_for_dispatch_key(NORM._schema.name, "SparseCUDA")
"""Whether this release of torch has that norm of sparse tensors: 2.15 is the first."""
MAKES = _aten._sparse_coo_tensor_with_dims_and_tensors.default
BAGS = _aten._embedding_bag_backward.default
RULES: Mapping[Any, Callable[..., Any]] = {
    MAKES: made,
    BAGS: of_bags,
    _aten.detach.default: lambda given: given.like(given.numbers),
    _aten.alias.default: lambda given: given.like(given.numbers),
    # autograd's own questions, for the gradient of the values that one is made of
    _aten._values.default: lambda given: given.numbers.detach(),
    _aten._indices.default: lambda given: given.places.detach(),
    _aten._coalesce.default: lambda given: given.coalesce(),
    _aten.clone.default: cloned,
    _aten._to_copy.default: converted,
    _aten.zero_.default: emptied,
    _aten.t.default: turned,
    _aten.transpose.int: turned,
    _aten.mm.default: multiplied,
    _aten.addmm.default: lambda added, first, second, **_: multiplied(first, second),
    _aten.add.Tensor: added,
    _aten.add_.Tensor: added_in_place,
    _aten.sparse_mask.default: masked,
    _aten.pow.Tensor_Scalar: raised,
    _aten.sum.default: lambda given, **named: given.numbers.new_empty((), **named),
    **dict.fromkeys((_aten.norm.Scalar, _aten.norm.ScalarOpt_dim), measured),
    **{
        func: through_values(func)
        for func in (
            _aten.mul.Tensor,
            _aten.mul.Scalar,
            _aten.div.Tensor,
            _aten.div.Scalar,
            _aten.neg.default,
            _aten.isnan.default,
        )
    },
    **({NORM: measured} if HAS_NORM else {}),
    **dict.fromkeys((_aten.any.default, _aten._is_any_true.default), answered),
    **{
        func: through_values_in_place(func)
        for func in (
            _aten.mul_.Tensor,
            _aten.mul_.Scalar,
            _aten.div_.Tensor,
            _aten.div_.Scalar,
            _aten.neg_.default,
        )
    },
}
"""Operator -> its result for sparse tensors, from its own arguments."""


def call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator on sparse tensors. Raises NotImplementedError for one that is not followed."""
    rule = RULES.get(func)
    if rule is None:
        name = func._schema.name
        if name in ("aten::_foreach_mul_", "aten::_foreach_add_"):
            raise NotImplementedError(KEPT_SUM)
        raise NotImplementedError(
            f"sparse tensors are not followed through {name} (a gradient of an embedding is dense with sparse=False)"
        )
    return rule(*args, **kwargs)
