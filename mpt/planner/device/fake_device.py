"""A GPU that does not exist: a device "fgpu" that fake tensors live on, with CUDA's autocast rules.

A fake `cuda` device cannot run a backward pass without a GPU, so the planner borrows PyTorch's slot for third-party
backends (PrivateUse1), whose autograd and autocast keys work everywhere. Which operators autocast sends to which
dtype is read from the header of the installed torch (`include/ATen/autocast_mode.h`), the same lists from which
CUDA's own kernels are made, so a new release brings its own rules. Weight casts are cached as
`at::autocast::cached_cast` caches them.

Registration is for the life of the process and cannot be undone: use it in a process of its own
(`mpt.planner.server.worker`). Operators that take another route on a real GPU than on an unknown device are in
`mpt.planner.device.routes`.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from mpt.planner.device import efficient_zeros
from mpt.planner.device.device_guard import DeviceGuard

DEVICE = "fgpu"
POLICIES = ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE")
APPEND_DTYPE = (("norm", "Scalar"), ("norm", "ScalarOpt_dim"))
"""AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE: redispatched to the overload that takes a dtype, float32."""

_libraries: list[torch.library.Library] = []  # registrations vanish with the object
_weight_casts: dict[int, tuple[Tensor, Tensor]] = {}  # id(weight) -> (cast, weight kept alive)
_cast_listeners: list[Callable[[Tensor], None]] = []


def header_path() -> Path:
    """Return the installed torch's autocast header."""
    return Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


def read_operator_lists(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return policy -> [(operator, overload)] from the header's text; a missing list is a RuntimeError."""
    lists: dict[str, list[tuple[str, str]]] = {}
    for policy in POLICIES:
        body = re.search(rf"#define AT_FORALL_{policy}\(_\)((?:.*\\\n)*.*\n)", text)
        if body is None:
            raise RuntimeError(
                f"{header_path()} of torch {torch.__version__} has no list AT_FORALL_{policy}"
            )
        entries = [
            [part.strip() for part in entry.split(",")]
            for entry in re.findall(r"_\(([^)]*)\)", body.group(1))
        ]
        lists[policy] = [(entry[0], entry[1] if len(entry) > 1 else "default") for entry in entries]
    return lists


def find_operator(name: str, overload: str) -> Any:
    """Return `torch.ops.aten.NAME.OVERLOAD`, or None if this build does not have it."""
    return getattr(getattr(torch.ops.aten, name, None), overload, None)


def _start_autograd() -> None:
    """Let autograd's engine look for devices while there is none of ours: for each it starts a thread, for good.

    A plan's backward passes need none, and processes that are forked beside such threads cannot train.
    """
    with _disable_current_modes(), torch.enable_grad():
        torch.ones((), device="cpu", requires_grad=True).backward()  # type: ignore[no-untyped-call]


def register() -> int:
    """Register the device and its autocast kernels once; return the number of operators with a rule of the header."""
    if _libraries:
        return 0
    _start_autograd()
    efficient_zeros.register()
    torch.utils.backend_registration._setup_privateuseone_for_python_backend(
        DEVICE, backend_module=_device_module(), device_guard=DeviceGuard()
    )
    fallback: Any = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    _libraries.extend((fallback, kernels))
    makers = {
        "LOWER_PRECISION_FP": _lower_precision_kernel,
        "FP32": _float32_kernel,
        "FP32_SET_OPT_DTYPE": _output_dtype_kernel,
        "PROMOTE": _promote_kernel,
    }
    count = 0
    for policy, entries in read_operator_lists(header_path().read_text()).items():
        for name, overload in entries:
            operator = find_operator(name, overload)
            if operator is not None:
                kernels.impl(operator, makers[policy](operator), "AutocastPrivateUse1")
                count += 1
    for name, overload in APPEND_DTYPE:
        kernels.impl(find_operator(name, overload), _append_dtype_kernel, "AutocastPrivateUse1")
    kernels.impl(torch.ops.aten.binary_cross_entropy.default, _banned_kernel, "AutocastPrivateUse1")
    kernels.impl(torch.ops.aten.trace.default, _trace_kernel, "AutocastPrivateUse1")
    _hook_cache_clearing()
    setattr(torch.Tensor, "new_tensor", _new_tensor)  # noqa: B010 - the stubs call it a fixed method
    return count + len(APPEND_DTYPE) + 1


def fake_gpu() -> torch.device:
    """Return the device, which is registered from now on."""
    register()
    return torch.device(DEVICE, 0)


@contextlib.contextmanager
def listen_to_casts(listener: Callable[[Tensor], None]) -> Iterator[None]:
    """Call `listener` with every weight cast that enters the cache, inside the block."""
    _cast_listeners.append(listener)
    try:
        yield
    finally:
        _cast_listeners.remove(listener)


def clear_weight_casts() -> None:
    """Forget cached weight casts, as `torch.clear_autocast_cache` does for real devices."""
    _weight_casts.clear()


def _device_module() -> types.ModuleType:
    """Return the module for `torch.fgpu`: one device, no random state, both half dtypes."""
    module = types.ModuleType(f"torch.{DEVICE}")
    functions: dict[str, Any] = {
        "is_available": lambda: False,  # else torch would place constants on the device for real
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "device": lambda index: contextlib.nullcontext(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda state, device=None: None,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "_is_in_bad_fork": lambda: False,
        # No random state is kept on the device, so checkpointing has none to stash.
        "_initialized": False,
    }
    for name, function in functions.items():
        setattr(module, name, function)
    return module


def _hook_cache_clearing() -> None:
    """Clear our cast cache when torch clears its own: on leaving the outermost autocast, and in recomputation."""
    original = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        _weight_casts.clear()
        original()

    torch.clear_autocast_cache = clear_autocast_cache


def _new_tensor(
    like: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    """`Tensor.new_tensor` by way of `torch.tensor`: torch's own would fill real memory of the device."""
    dtype, device = dtype or like.dtype, device or like.device
    return torch.tensor(data, dtype=dtype, device=device, requires_grad=requires_grad)


_AUTOCAST_KEY = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "AutocastPrivateUse1"))  # noqa: B009 - not in the stubs


def _below_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEY)


def _is_eligible(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
        and value.device.type == DEVICE
    )


def _cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast one eligible tensor; a float32 leaf weight's cast is made once per autocast region."""
    if tensor.dtype == dtype or not _is_eligible(tensor):
        return tensor
    is_weight = (
        dtype == torch.get_autocast_dtype(DEVICE)
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )
    if not is_weight:
        return tensor.to(dtype)
    found = _weight_casts.get(id(tensor))
    if found is None:
        found = _weight_casts[id(tensor)] = (tensor.to(dtype), tensor)
        for listener in _cast_listeners:
            listener(found[0])
    return found[0]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return _cast_tensor(value, dtype)
    if isinstance(value, (list, tuple)):
        return [_cast(item, dtype) for item in value]
    return value


def _cast_call(
    operator: Any, args: Sequence[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    """Cast from the last argument to the first: the order in which compilers evaluate them for torch's own kernels."""
    named = {name: _cast(kwargs[name], dtype) for name in reversed(kwargs)}
    cast = [_cast(arg, dtype) for arg in reversed(args)]
    return operator(*reversed(cast), **named)


def _lower_precision_kernel(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return _cast_call(operator, args, kwargs, torch.get_autocast_dtype(DEVICE))

    return kernel


def _float32_kernel(operator: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            return _cast_call(operator, args, kwargs, torch.float32)

    return kernel


def _trace_kernel(tensor: Tensor) -> Tensor:
    """As CUDA's own kernel, which calls a sum that autocast sees."""
    return tensor.diagonal().sum()


def _output_dtype_kernel(operator: Any) -> Callable[..., Any]:
    """Leave the inputs and ask for a float32 result, unless the caller named a dtype."""
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            given = args[position] if position < len(args) else kwargs.get("dtype")
            if _is_eligible(args[0]) and given is None:
                args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
            return operator(*args, **kwargs)

    return kernel


def _promote_kernel(operator: Any) -> Callable[..., Any]:
    """Run in the widest dtype among the inputs."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _below_autocast():
            tensors = [value for value in tree_leaves((args, kwargs)) if _is_eligible(value)]
            wide = any(tensor.dtype == torch.float32 for tensor in tensors)
            return _cast_call(
                operator, args, kwargs, torch.float32 if wide else torch.get_autocast_dtype(DEVICE)
            )

    return kernel


def _append_dtype_kernel(
    tensor: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False
) -> Tensor:
    with _below_autocast():
        dtype = torch.float32 if _is_eligible(tensor) else tensor.dtype
        norm = torch.ops.aten.norm
        result: Tensor
        if dim is None:
            result = norm.ScalarOpt_dtype(tensor, p, dtype=dtype)
        else:
            result = norm.ScalarOpt_dim_dtype(tensor, p, dim, keepdim, dtype=dtype)
        return result


def _banned_kernel(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; "
        "use binary_cross_entropy_with_logits"
    )
