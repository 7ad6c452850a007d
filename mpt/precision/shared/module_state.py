"""A network's weights as they are saved: in float32 if the precision mode has float32 masters of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mpt.errors import PartError
from mpt.seams import Precision
from mpt.seams.members import article


def module_state(precision: Precision, module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state to save, by its own state-dict keys: masters in place of half weights."""
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise PartError(
                f"{type(module).__name__}: its state has {article(value)} as {name!r}; a checkpoint holds tensors "
                "alone: let get_extra_state return one, or use register_buffer"
            )
    if not precision.masters:
        return {name: value.detach() for name, value in state.items()}
    full: dict[str, Tensor] = {}
    for name, value in state.items():
        weight = precision.masters.get(value, value).detach()
        full[name] = weight.float() if weight.dtype == precision.numerics.dtype else weight
    return full


@torch.no_grad()
def load_module_state(precision: Precision, module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load the result of `module_state`, into masters and half weights alike. The caller checks shapes and keys."""
    if not precision.masters:
        module.load_state_dict(dict(state))
        return
    for name, value in module.state_dict(keep_vars=True).items():
        master = precision.masters.get(value)
        if master is not None:
            master.copy_(state[name])
        value.copy_(state[name])
