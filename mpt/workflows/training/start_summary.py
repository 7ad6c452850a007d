"""A training's description of itself before its first step: data, networks, optimizers and rates, precision.

Everything is read off the built run: nothing is computed, so that the first step comes no later. Memory and time on a
GPU are planned in a process during the training and logged once they are known (`mpt.engine.loop.plan_notice`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mpt.engine.loop.assembly import Supply
from mpt.report.units import counted
from mpt.seams import Run


def summarize(run: Run, supplied: Supply) -> Iterator[str]:
    """Yield the lines."""
    config, world, steps = run.config, run.world, supplied.total_steps
    batch = config.train.batch_size
    several = f", {world.size} processes of up to {world.place(batch)[1]}" if world.size > 1 else ""
    size = run.adaptation.micro_batch_size or batch
    parts = f" in micro-batches of {size}" if size < batch else ""
    epochs = steps / supplied.loader.steps_per_epoch
    length = f"{counted(steps, 'step')} of {batch}{parts} ({counted(epochs, 'epoch')})"
    yield from config.notes
    yield f"{config.model.name} on {config.dataset.name}, {length}, {run.device.type}{several}"
    many = "es" if len(run.data.classes) > 1 else ""
    classes = f", {len(run.data.classes)} class{many}" if run.data.classes else ""
    yield f"data: {len(supplied.train_data)} training and {len(supplied.test_data)} test samples{classes}"
    yield "networks: " + ", ".join(
        f"{name} {count(module)}" for name, module in run.task.trainable.items()
    )
    for names, text in alike(
        {name: describe_optimizer(run, name) for name in run.optimizers}
    ).items():
        yield f"optimizer{names}: {text}"
    yield f"precision {config.precision.mode}: {run.precision.numerics.reason}"


def count(module: nn.Module) -> str:
    """Return how many parameters a network has, and how many of them are trained if not all are."""
    parameters = list(dict.fromkeys(module.parameters()))
    total = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    return f"{millions(total)} parameters" + (
        "" if trained == total else f", {millions(trained)} of them trained"
    )


def millions(number: int) -> str:
    """Return a count as in "25.6 M", with more digits if it is small."""
    amount = number / 1e6
    return (
        f"{amount:.1f} M"
        if amount >= 10
        else f"{amount:.2f} M"
        if amount >= 0.1
        else f"{amount:.4f} M"
    )


def describe_optimizer(run: Run, name: str) -> str:
    """Return one network's optimizer, its rates and how they go over the run."""
    settings = run.optimizer_settings[name]
    rates = sorted(
        {settings.lr * group.get("lr_scale", 1.0) for group in run.optimizers[name].param_groups}
    )
    rate = (
        f"learning rate {settings.lr:g}"
        if rates == [settings.lr]
        else f"learning rates {rates[0]:g} to {rates[-1]:g}"
    )
    words = [run.config.optimizer.name, rate]
    words += [settings.schedule] if settings.schedule != "constant" else []
    words += [f"{settings.warmup_steps} steps of warm-up"] if settings.warmup_steps else []
    words += (
        [f"gradients clipped at {settings.clip_grad_norm:g}"] if settings.clip_grad_norm else []
    )
    return ", ".join(words)


def alike(texts: dict[str, str]) -> dict[str, str]:
    """Return each text once, under the names that share it; under none if all do."""
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return {
        "" if len(names) == 1 else f" of {' and '.join(of)}": text for text, of in names.items()
    }
