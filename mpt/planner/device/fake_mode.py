"""Torch's fake mode with a shorter way to the same results.

FakeTensorMode computes an operator's results once for each set of arguments and then takes it from a cache. For
the thousands of small operators of a traced step, describing the arguments (a dataclass of 17 fields per tensor)
takes longer than making the result, and making it longer than it need be. Six things are shorter here
(`scripts/plans/bench_plan.py` measures):

- The description is one tuple. It leaves out where the arguments lie in their storages when the results are new
  memory, so that a loop over slices finds its results.
- Known results of an operator are made again from the results' forms, and a fake tensor from the attributes of the
  first one on its device. The first results of common operators are found by `mpt.planner.device.direct_results`.
- Views are taken by torch's own code for meta tensors and not by its decompositions in Python.
- Numbers (`torch.tensor(0.0)`, each weight's count of steps) are made like other tensors, not converted.
- Calls are not guarded against `torch.compile`, which planning never uses.

If torch's rules say otherwise than the CPU's kernels do, `mpt.planner.device.cpu_routes` is asked first, and
`mpt.planner.device.grouped_products` where they refuse what kernels take.

Anything that is not plain (symbolic sizes, sparse tensors, constants, tensors of another mode) goes torch's way.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only

from mpt.planner.device import cpu_routes, direct_results, jagged
from mpt.planner.device.cpu_routes import RECURRENT_LAYER
from mpt.planner.device.grouped_products import GROUPED, grouped_product
from mpt.planner.device.operator_kinds import (
    BLANK_IDS,
    NUMBERS,
    PLAIN,
    QUERY_IDS,
    RECORD_IDS,
    VIEW_IDS,
    facts_of,
    fakes_in,
    is_elsewhere,
    is_known,
    is_number,
    is_placed,
)
from mpt.planner.device.outcomes import Form, Number, Outcome, Result
from mpt.run.process.storage_trace import tensors_in

_aten = torch.ops.aten
_DETACH = _aten.detach.default
_TO_COPY = _aten._to_copy.default
_SCALAR = _aten._local_scalar_dense.default
_LIFT = _aten.lift_fresh.default
_EMPTY = _aten.empty_strided.default
_EMPTY_WITH = {"dtype", "device", "pin_memory"}
_PLACE = ("device", "layout", "pin_memory")
_STRIDED = torch.strided
_no_dispatch, _empty = torch._C._DisableTorchDispatch, torch.empty_strided
_subclass: Any = Tensor._make_subclass
_routes = {**cpu_routes.ROUTES, GROUPED: grouped_product}
_outcomes: dict[tuple[Any, ...], Outcome] = {}
"""By the description of an operator and its arguments; torch's own cache holds the same for as long as the process."""


class LeanFakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Makes the same tensors as FakeTensorMode, sooner."""

    def __init__(self, **options: Any) -> None:
        jagged.prepare()
        super().__init__(**options)
        self.is_direct = ".".join(torch.__version__.split(".")[:2]) in direct_results.REVIEWED
        """Whether outcomes are found by `mpt.planner.device.direct_results`."""
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Device -> the attributes of every fake tensor on it."""
        self._guard: Any = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if self._allow_unsafe_data_ptr_access
            else torch._C._set_throw_on_mutable_data_ptr
        )
        """Says, as torch's own constructor does, when the address of a fake tensor is asked for."""

    def create_symbolic_nested_int(self, *, nt_tensor_id: int | None = None) -> Any:
        """Return the uneven size of a nested tensor, a new one unless its number is given."""
        if nt_tensor_id is None:
            nt_tensor_id, self.nt_tensor_id_counter = (
                self.nt_tensor_id_counter,
                self.nt_tensor_id_counter + 1,
            )
        return jagged.uneven_size(nt_tensor_id)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of a tensor whose attributes are copied

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while planning

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if id(func) in QUERY_IDS:
            return self.dispatch(func, types, args, kwargs)
        if id(func) in RECORD_IDS:
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        view = self.view(func, args, kwargs)
        if view is not None:
            return view
        number = self.number(func, args)
        if number is not None:
            return number
        if (func is _TO_COPY and is_elsewhere(args[0], kwargs.get("device"))) or (
            id(func) in BLANK_IDS and is_known(args[0])  # torch would keep what its memory holds
        ):
            args = (self._without_values(args[0]), *args[1:])
        key = self._description(func, args, kwargs)
        outcome = None if key is None else _outcomes.get(key)
        if outcome is None and key is not None:
            outcome = self._directly(func, args, kwargs)
            if outcome is not None:
                _outcomes[key] = outcome
        if outcome is not None:
            return self.make(outcome, args)
        result = self._cached_dispatch_impl(func, types, args, kwargs)
        if key is None and args and is_known(args[0]) and func._schema.name.endswith("_"):
            return args[0]  # changed in place: torch makes another tensor of its value
        if key is not None:
            outcome = _learnt(func, FakeTensorMode.cache.get(fake_tensor._DispatchCacheKey(key)))
            if outcome is not None:
                _outcomes[key] = outcome
        return result

    def view(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the view of a plain tensor that an operator takes, or its views; None for other operators and
        tensors.
        """
        if id(func) not in VIEW_IDS or kwargs or not self._is_plain(args[0]):
            return None
        device = args[0].fake_device
        if func is _DETACH and device in self._attributes:
            with _no_dispatch():
                return self._fake(args[0], device, requires_grad=False)  # which detaches
        found = self._on_meta(func, args, {})
        if isinstance(found, Tensor):
            return self._fake(found, device)
        return [self._fake(one, device) for one in found]

    def number(self, func: Any, args: Sequence[Any]) -> Any:
        """Return a tensor of a number that is made or detached, or a number that is read if it is known; else None."""
        if func is _LIFT and is_number(args[0]):
            return self._constant(args[0])
        if func is _DETACH and is_known(args[0]):
            with _no_dispatch():
                known = args[0].constant.detach()
            made = self._fake(self._on_meta(func, args, {}), args[0].fake_device)
            return self._with(made, known)
        if func is _SCALAR and is_known(args[0]):
            with _no_dispatch():  # as torch's own rule does
                return func(args[0].constant)
        return None

    def _on_meta(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call the kernel for meta tensors, as `fake_tensor.in_kernel_invocation_manager` has it."""
        before = self.in_kernel_invocation
        with torch._C._DisableTorchDispatch():
            self.in_kernel_invocation = True
            with torch._C._PreserveDispatchKeyGuard():
                torch._C._set_meta_in_tls_dispatch_include(True)
                try:
                    return func(*args, **kwargs)
                finally:
                    self.in_kernel_invocation = before

    def known(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outcome | None:
        """Return the outcome that an operator had before with such arguments: one object for those of the same forms.

        None if it is not known, or if an argument is not plain.
        """
        if not args:
            return None
        if facts_of(func).changes_each:
            is_done = self.is_direct and (
                self._are_plain(args) or self._are_changed(func, args, kwargs)
            )
            if is_done or not self.is_direct:
                # as the kernels do: a backward pass refuses weights that were changed since its forward
                increment_version(args[0])
            return Outcome((None,)) if is_done else None
        key = self._description(func, args, kwargs)  # None if an argument is not plain
        return None if key is None else _outcomes.get(key)

    def _are_changed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Change tensors whose values are known, if those of all are, as torch's own rule does; return whether."""
        changed: Iterable[Any] = tensors_in(args)
        if not all(is_known(one) and one.fake_mode is self for one in changed):
            return False
        with _no_dispatch():
            func(*tree_map_only(Tensor, lambda one: one.constant, args), **kwargs)
        return True

    def _are_plain(self, values: Iterable[Any]) -> bool:
        """Return whether all tensors among nested arguments are plain."""
        return all(
            self._are_plain(one) if isinstance(one, list | tuple) else self._is_plain(one)
            for one in values
            if isinstance(one, list | tuple | Tensor)
        )

    def _directly(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome | None:
        """Return the outcome of an operator with plain arguments by `mpt.planner.device.direct_results`; None for
        others.
        """
        if not self.is_direct:
            return None
        if func._schema.name.startswith(direct_results.FOREACH):
            return self._for_each(func, args, kwargs)
        if (
            func is _EMPTY
            and kwargs.keys() == _EMPTY_WITH
            and not kwargs["pin_memory"]
            and is_placed(kwargs["device"])
        ):
            return Outcome(
                (Form(tuple(args[0]), tuple(args[1]), kwargs["dtype"], kwargs["device"]),)
            )
        rule = direct_results.RULES.get(func)
        has_kernel = func in direct_results.PLACED or func in direct_results.BY_META
        if rule is None and not has_kernel:
            return None
        devices = {one.fake_device for one in fakes_in(chain(args, kwargs.values()))}
        if len(devices) != 1:
            return None
        (device,) = devices
        found = None if rule is None else rule(args, kwargs, device)
        return self._by_meta(func, args, kwargs, device) if found is None and has_kernel else found

    def _by_meta(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device
    ) -> Outcome | None:
        """Return the outcome of an operator as its kernel for meta tensors gives it; None if that does not hold."""
        if device.type == "cpu" and func in cpu_routes.ROUTES:
            return None
        if func in direct_results.PLACED:
            device = kwargs.get("device") or device
            if (
                not is_placed(device)
                or kwargs.get("pin_memory")
                or kwargs.get("layout", _STRIDED) != _STRIDED
            ):
                return None
            kwargs = {name: value for name, value in kwargs.items() if name not in _PLACE}
        try:
            result = self._on_meta(func, args, kwargs)
        except Exception:  # torch's own rules name the mistake
            return None
        return direct_results.learnt(result, args, device)

    def _for_each(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Outcome | None:
        """Return the outcome of a `_foreach_` operator; None for those that must be asked as a whole."""
        if not func._schema.returns:
            return Outcome((None,))
        single = direct_results.single_operator(func)
        if single is None or not isinstance(args[0], list | tuple):
            return None
        forms: list[Result] = []
        for place, first in enumerate(args[0]):
            others = [one[place] if isinstance(one, list | tuple) else one for one in args[1:]]
            made = self.__torch_dispatch__(single, (), (first, *others), kwargs)
            forms.append(direct_results.form_of(made, made.fake_device))
        return Outcome(tuple(forms), list)

    def make(self, outcome: Outcome, args: Sequence[Any]) -> Any:
        """Return an operator's results from a known outcome, without calling the dispatcher."""
        make = self._make
        if outcome.container is None:
            return make(outcome.results[0], args)
        return outcome.container([make(form, args) for form in outcome.results])

    def _make(self, form: Result, args: Sequence[Any]) -> Any:
        if type(form) is not Form:
            if isinstance(form, Number):
                return form.value
            return None if form is None else args[cast(int, form)]
        with _no_dispatch():
            empty = _empty(form.shape, form.stride, dtype=form.dtype, device="meta")
        return self._fake(empty, form.device)

    def _constant(self, number: Tensor) -> Tensor:
        """Return a tensor of `torch.tensor(NUMBER)`, whose value stays known, as torch's own rule does."""
        with _no_dispatch():
            known = number.clone()
        return self._with(self._make(Form((), (), number.dtype, number.device), ()), known)

    def _with(self, made: Any, constant: Tensor) -> Tensor:
        """Return a fake tensor after noting its values, which one that is written to loses."""
        made.constant = constant
        if self.is_direct:  # as `add_constant_storage_mapping`, without a typed storage
            known = self.fake_tensor_converter.constant_storage_mapping
            storage = StorageWeakRef(constant.untyped_storage())  # type: ignore[no-untyped-call]
            known.setdefault(storage, []).append(weakref.ref(made))
        else:
            self.fake_tensor_converter.add_constant_storage_mapping(made)
        return cast(Tensor, made)

    def _without_values(self, tensor: Tensor) -> Tensor:
        """Return a tensor like one whose values are known: torch would copy them, and the fake device holds none."""
        form = Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        return cast(Tensor, self._make(form, ()))

    def _fake(
        self, meta: Tensor, device: torch.device, requires_grad: bool | None = None
    ) -> FakeTensor:
        attributes = self._attributes.get(device)
        if attributes is None:
            made = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(made))
            return made
        fake = _subclass(
            FakeTensor,
            meta,
            meta.requires_grad if requires_grad is None else requires_grad,
            dispatch_device=True,
            device_for_backend_keys=device,
        )
        self._guard(fake)
        fake.__dict__.update(attributes)
        return fake  # type: ignore[no-any-return]

    def _dispatch_impl(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        route = _routes.get(func)
        result = NotImplemented if route is None else route(func, *args, **kwargs)
        if result is not NotImplemented:
            return result
        try:
            return super()._dispatch_impl(func, types, args, kwargs)
        except (
            NotImplementedError
        ):  # an operator without a rule for shapes, which torch runs on zeros (QR, Dirichlet)
            fakes = fakes_in(chain(args, kwargs.values()))
            places = {one.fake_device for one in fakes if one.fake_device.type != "cpu"}
            if len(places) != 1:
                raise
        host, (device,) = torch.device("cpu"), places
        args, kwargs = self._moved((args, kwargs), host)
        return self._moved(super()._dispatch_impl(func, types, args, kwargs), device)

    def _moved(self, values: Any, device: torch.device) -> Any:
        """Return nested arguments or results with each fake tensor replaced by a new one on a device."""

        def move(one: FakeTensor) -> FakeTensor:
            return cast(
                FakeTensor, self._make(Form(tuple(one.shape), one.stride(), one.dtype, device), ())
            )

        return tree_map_only(FakeTensor, move, values)

    def _is_plain(self, value: Any) -> bool:
        return (
            type(value) is FakeTensor
            and value.fake_mode is self
            and value.constant is None
            and value.layout is _STRIDED
        )

    def _cache_key(
        self, state: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        key = self._description(func, args, kwargs)
        return (
            super()._cache_key(state, func, args, kwargs)
            if key is None
            else fake_tensor._DispatchCacheKey(key)
        )

    def _description(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """Return the key of an operator's results; None if an argument is not plain."""
        places = not facts_of(func).returns_new
        facts: list[Any] = [
            "lean",
            id(func),
            func is RECURRENT_LAYER and torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch._C._get_default_device(),
            torch.is_inference_mode_enabled(),
        ]
        if not self._describe(args, places, facts):
            return None
        if kwargs:
            facts.append(tuple(kwargs))
            if not self._describe(kwargs.values(), places, facts):
                return None
        return tuple(facts)

    def _describe(self, values: Iterable[Any], places: bool, facts: list[Any]) -> bool:
        """Append a description that distinguishes these arguments from others; False if one is not plain."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                own = value.__dict__
                if (
                    own["fake_mode"] is not self
                    or own["constant"] is not None
                    or value.layout is not _STRIDED
                ):
                    return False
                facts += (
                    value.dtype,
                    value.shape,
                    value.stride(),
                    value.fake_device,
                    value.requires_grad,
                    value.is_conj(),
                    value.is_neg(),
                    value.is_inference(),
                )
                if places:
                    facts += (value.storage_offset(), value.untyped_storage().nbytes())
            elif kind in NUMBERS:
                facts += (kind, value)  # 1, 1.0 and True are equal, and make different tensors
            elif kind in PLAIN:
                facts.append(value)
            elif kind in (list, tuple):
                facts += (kind, len(value))
                if not self._describe(value, places, facts):
                    return False
            elif kind is torch.Generator:  # changes values alone
                facts.append(kind)
            else:
                return False
        return True


def _learnt(func: Any, entry: Any) -> Outcome | None:
    """Return the entry of torch's cache for an operator's results, if that is plain."""
    if not isinstance(entry, fake_tensor._DispatchCacheValidEntry) or func.is_view:
        return None
    results: list[Result] = []
    for one in entry.output_infos:
        found = one.metadata
        if one.view_idx is not None:
            return None
        if one.inplace_idx is not None:
            results.append(one.inplace_idx)
        elif found is None:
            number = one.constant_value
            if number is not None and type(number) is not int:
                return None
            results.append(None if number is None else Number(number))
        elif found.requires_grad or found.is_conj or found.is_neg or found.layout != torch.strided:
            return None
        else:
            shape, stride = (tuple(map(int, sizes)) for sizes in (found.shape, found.stride))  # type: ignore[arg-type]
            results.append(Form(shape, stride, found.dtype, found.device))
    return Outcome(tuple(results), tuple if entry.is_output_tuple else None)
