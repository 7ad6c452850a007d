"""The optimizers of a run: one for each trained network, over the parameters that the precision mode says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from mpt.config.options import OptimizerOptions, setting_of
from mpt.config.schema import Config
from mpt.engine.step.built_parts import require
from mpt.errors import ConfigError
from mpt.optim.shared.groups import check_globs, group_parameters
from mpt.seams import Phase, Precision, Task
from mpt.seams.members import article

SMALLEST_HALF = 2.0**-24
"""The smallest positive float16, subnormals included."""


def build_optimizers(
    config: Config,
    settings: Mapping[str, OptimizerOptions],
    task: Task,
    precision: Precision,
    says_foreach: bool,
) -> dict[str, Optimizer]:
    """Build an optimizer per trained module, over the parameters that the precision mode says."""
    unknown = sorted(set(config.optimizer.settings.phases) - set(task.trainable))
    if unknown:
        raise ConfigError(
            f"optimizer.phases: no module {unknown[0]!r} is trained; there are {', '.join(task.trainable)}"
        )
    check_globs(dict(task.trainable), list(config.optimizer.settings.parts))
    eps = setting_of(config.optimizer.settings, "eps", 1.0)
    half_state = any(
        p.dtype == torch.float16 for m in task.trainable.values() for p in precision.parameters(m)
    )
    if half_state and not precision.numerics.lifts_state and eps < SMALLEST_HALF:
        raise ConfigError(
            f"optimizer.eps: {eps:g} is zero in float16, so {config.precision.mode} would divide by zero at the second "
            "step; set optimizer.eps=1e-4, or use a mode with float32 weights (amp, O1, O2)"
        )
    optimizers: dict[str, Optimizer] = {}
    for name, module in task.trainable.items():
        own: Any = config.optimizer.plugin.native_settings(settings[name])
        if (
            precision.numerics.lifts_state
            and own.gains_by_fusing
            and own.foreach is None
            and own.fused is None
        ):
            # its steps are on float32, whatever the weights are
            own = own.model_copy(update={"fused": True})
        # Optimizers choose the foreach path by their parameters' devices, which fakes hide, and avoid it if one is the
        # CPU, as with weights that wait there: ask for the path that a GPU would take.
        if (
            says_foreach
            and setting_of(own, "foreach", False) is None
            and not setting_of(own, "fused")
        ):
            own = own.model_copy(update={"foreach": True})
        trained = precision.parameters(module)
        if not trained:
            raise ConfigError(
                f"network {name!r} has no parameter to train: its build froze all of them (requires_grad), or it has "
                "none"
            )
        made = config.optimizer.member("build")(own, group_parameters(name, module, trained, own))
        what = f"optimizer {config.optimizer.name}: its build"
        optimizers[name] = refuse_closures(what, require(what, made, Optimizer))
    return optimizers


def refuse_closures(what: str, optimizer: Optimizer) -> Optimizer:
    """Return an optimizer that steps on the gradients that are there. Raises ConfigError for one, as LBFGS, that
    computes losses again itself.
    """
    parameters = list(inspect.signature(optimizer.step).parameters.values())
    if any(
        one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters
    ):
        raise ConfigError(
            f"{what} returned {article(optimizer)}, whose step needs {parameters[0].name}: it computes the loss again "
            "itself; mpt calls step() after the backward, so take an optimizer that needs gradients alone"
        )
    return optimizer


def optimizer_settings(config: Config, name: str) -> OptimizerOptions:
    """Return the settings of one network's optimizer: the common ones, changed by `optimizer.phases`."""
    settings: OptimizerOptions = config.optimizer.settings
    changes = settings.phases.get(name)
    return settings.model_validate({**settings.model_dump(), **changes}) if changes else settings


def clip_norm(
    phase: Phase, optimizers: Mapping[str, Optimizer], settings: Mapping[str, OptimizerOptions]
) -> float | None:
    return next(
        settings[name].clip_grad_norm
        for name, optimizer in optimizers.items()
        if optimizer is phase.optimizer
    )
