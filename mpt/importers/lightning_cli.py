"""A configuration of LightningCLI (`trainer:`, `model:`, `data:`), or its command line (`--trainer.max_epochs 3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpt.importers.shared.translation import Translation, epochs, is_true

NAME = "LightningCLI"
PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "amp",
    "16-mixed": "amp",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
    "16-true": "fp16-pure",
    "bf16-true": "bf16-pure",
}
OPTIMIZERS = {
    "Adam": "adam",
    "AdamW": "adamw",
    "SGD": "sgd",
    "RMSprop": "rmsprop",
    "Adamax": "adamax",
}
ARGUMENTS = (
    *("lr", "weight_decay", "betas", "momentum", "eps"),
    *("nesterov", "dampening", "alpha", "centered"),
)
"""Arguments of torch's optimizers that have the same name and meaning here."""
DEFAULTS = {
    "sgd": {"lr": 1e-3, "momentum": 0.0},
    "rmsprop": {"lr": 1e-2},
}
"""Defaults of torch's optimizers that are others here."""


def recognises(given: Mapping[str, Any], words: str) -> bool:
    """Return whether there is a trainer's section."""
    return any(name.startswith("trainer.") for name in given)


def translate(into: Translation) -> None:
    """Take the trainer's section, the optimizer's and the data's batch; the model's own settings stay as comments."""
    steps = into.take("trainer.max_steps", default=-1)
    if steps > 0:
        into.put("train.steps", int(steps), f"trainer.max_steps: {steps}")
        into.leave_all(
            ("trainer.max_epochs",),
            "it ends at whichever is first there: compare it with train.steps",
        )
    else:
        into.move("trainer.max_epochs", "train.epochs", float, default=1000)
    passes = int(into.take("trainer.accumulate_grad_batches", default=1))
    translate_batch(into, passes)
    written = str(into.take("trainer.precision", default="32-true"))
    if written in PRECISIONS:
        into.put("precision.mode", PRECISIONS[written], f"trainer.precision: {written}")
    else:
        into.leave("trainer.precision", written, "see `mpt list precision`")
    if into.given.get("trainer.gradient_clip_algorithm") != "value":
        into.move("trainer.gradient_clip_val", "optimizer.clip_grad_norm", or_none)
    into.leave_all(
        ("trainer.gradient_clip_val",),
        "it clips each value there; optimizer.clip_grad_norm clips their norm",
    )
    into.move("trainer.log_every_n_steps", "train.log_every", int, default=50)
    translate_validation(into, passes)
    into.move("seed_everything", "seed", lambda value: 0 if value is True else int(value))
    into.move("trainer.deterministic", "train.deterministic", is_true)
    strategy = str(into.take("trainer.strategy", default="auto"))
    if strategy.startswith(("ddp", "fsdp")):
        into.put(
            "parallel.strategy",
            strategy[: 3 + strategy.startswith("fsdp")],
            f"trainer.strategy: {strategy}",
        )
    elif strategy != "auto":
        into.leave("trainer.strategy", strategy, "parallel.strategy is ddp or fsdp")
    translate_optimizer(into)
    into.leave_all(
        ("trainer.devices", "trainer.accelerator", "trainer.num_nodes"),
        "--device, --nproc N or torchrun",
    )
    into.leave_all(("trainer.default_root_dir",), "runs go to --runs DIR")


def or_none(value: Any) -> float | None:
    """Return a norm to clip at; 0 is none there."""
    return float(value) or None


def devices_of(into: Translation) -> int:
    """Return on how many devices it trains, as far as the file says: each has a batch of its own there."""
    devices, nodes = (into.given.get(f"trainer.{name}") for name in ("devices", "num_nodes"))
    count = (
        len(devices)
        if isinstance(devices, list)
        else int(str(devices))
        if str(devices).isdecimal()
        else 1
    )
    return max(1, count) * (nodes if isinstance(nodes, int) else 1)


def translate_batch(into: Translation, passes: int) -> None:
    """Take the batch of the data module, times the batches that are accumulated and the devices."""
    name = next(
        (one for one in into.given if one.startswith("data.") and one.endswith("batch_size")), None
    )
    if name is None:
        if passes != 1:
            into.leave(
                "trainer.accumulate_grad_batches",
                passes,
                f"train.batch_size is {passes} times one pass's batch",
            )
        return
    factors = (name, "trainer.accumulate_grad_batches", "devices")
    into.batch(int(into.take(name)), passes, factors, devices_of(into))
    workers = next(
        (one for one in into.given if one.startswith("data.") and one.endswith("num_workers")), None
    )
    if workers is not None:
        into.move(workers, "dataset.workers", int)


def translate_validation(into: Translation, passes: int) -> None:
    """Take how often it validates: every N epochs, at a share of an epoch, or after that many batches of a pass."""
    share, every = (
        into.take("trainer.val_check_interval"),
        into.take("trainer.check_val_every_n_epoch", default=1),
    )
    if isinstance(share, int) and not isinstance(share, bool):
        into.updates(
            "train.evaluate_every", share, passes, "trainer.val_check_interval, in batches"
        )
    elif isinstance(share, float):
        into.put(
            "train.evaluate_every",
            epochs(share),
            f"trainer.val_check_interval: {share} of an epoch",
        )
    elif isinstance(every, int):
        into.put("train.evaluate_every", epochs(every), f"trainer.check_val_every_n_epoch: {every}")


def translate_optimizer(into: Translation) -> None:
    """Take an optimizer that is given as a class path and arguments."""
    written = str(into.take("optimizer.class_path", "optimizer", default=""))
    name = OPTIMIZERS.get(written.rpartition(".")[2])
    if name is None:
        if written:
            into.leave("optimizer", written, "see `mpt list optimizers`")
        return
    into.put("optimizer.name", name, f"optimizer: {written}")
    for argument in ARGUMENTS:
        into.move(f"optimizer.init_args.{argument}", f"optimizer.{argument}")
        into.move(f"optimizer.{argument}", f"optimizer.{argument}")
    for argument, value in DEFAULTS.get(name, {}).items():
        if f"optimizer.{argument}" not in into.settings:
            into.put(f"optimizer.{argument}", value, f"{argument} is {value} there by default")
